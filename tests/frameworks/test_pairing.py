"""Everything that is paired over ranks is paired by name: random orders, dtypes, missing and renamed parts on one rank.

Each case accepts the right value, or an error that names the difference. Shapes are equal, so that no shape reveals a
wrong partner.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import EngineError

from ..on_ranks import on_ranks
from .backends import Lazy, on_backends
from .quick_jax import JAX

keras, tf, jax, optax = Lazy("keras"), Lazy("tensorflow"), Lazy("jax"), Lazy("optax")
hvd, of_tf, of_jax = Lazy("engine.keras"), Lazy("engine.tensorflow"), Lazy("engine.jax")
values = Lazy("engine.keras.values")

pytestmark = on_backends(2)
ON_TENSORFLOW = on_backends(2, backends=("tensorflow",))
ON_JAX = on_ranks(2, env=JAX, job="jax")  # without Keras

TRIALS = 24
CHANGES = ("none", "order", "dtype", "missing", "renamed")
Things = dict[str, np.ndarray[Any, Any]]


def value(name: str, rank: int) -> np.ndarray[Any, Any]:
    """Return a rank's value for a name: different from all others, and exact in float16."""
    return np.full(2, 4 * (ord(name[0]) - ord("a")) + rank, np.float32)


class Trial:
    """A random program with the same names on all ranks, except for one change on one of them."""

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        names = [f"{letter}{number}" for letter in draw.sample("abcdefgh", draw.randint(1, 5))]
        # One of `CHANGES`
        self.change = CHANGES[number % len(CHANGES)] if len(names) > 1 else draw.choice(("dtype", "renamed"))
        odd, victim = draw.randrange(2), draw.choice(names)
        # Values of this rank, in its own order
        self.mine: Things = {name: value(name, engine.rank()) for name in names}
        self.named = {victim}  # names of which an error must contain one
        if self.change == "renamed":
            self.named.add(f"z{number}")
        if self.change == "order":
            self.mine = {name: self.mine[name] for name in names[::-1]} if engine.rank() == odd else self.mine
        elif engine.rank() == odd and self.change == "dtype":
            self.mine[victim] = self.mine[victim].astype(np.float16)
        elif engine.rank() == odd and self.change == "missing":
            del self.mine[victim]
        elif engine.rank() == odd and self.change == "renamed":
            self.mine = {f"z{number}" if name == victim else name: each for name, each in self.mine.items()}

    def run(self, case: Callable[[Things], Things], expected: Callable[[str], Any]) -> None:
        """Run a case, which returns its results by the names of this rank's things."""
        raised: Exception | None = None
        found: Things = {}
        try:
            found = case(self.mine)
        except Exception as error:
            raised = error
        if raised is not None:
            text = f"{type(raised).__name__}: {raised}"
            assert self.change not in ("none", "order"), text
            assert any(name in text for name in self.named), f"{self.named} not in {text}"
            assert isinstance(engine.errors.of(raised), EngineError) or isinstance(raised, ValueError), text
            return
        assert set(found) == set(self.mine)
        for name, each in found.items():
            # A state sends the root's values without checking other ranks: the root keeps its own.
            right = self.mine[name] if expected is from_root and engine.rank() == 0 else expected(name)
            assert np.array_equal(each, right), f"{name}: {each} for {right} after {self.change}"


def from_root(name: str) -> Any:
    return value(name, 0)


def averaged(name: str) -> Any:
    return (value(name, 0) + value(name, 1)) / 2


def keras_variables(things: Things) -> dict[str, Any]:
    return {name: keras.Variable(each, dtype=each.dtype.name, name=name) for name, each in things.items()}


def numpy_of(variables: dict[str, Any]) -> Things:
    return {name: np.asarray(keras.ops.convert_to_numpy(each.value), np.float32) for name, each in variables.items()}


def broadcast_variables(things: Things) -> Things:
    made = keras_variables(things)
    values.broadcast_variables(made.values(), 0)
    return numpy_of(made)


def model_of(things: Things) -> Any:
    """Return a model with a bias for each thing, whose layers are made in the order of the things."""
    entry = keras.Input((1,))
    layers = {name: keras.layers.Dense(2, name=name, dtype=each.dtype.name) for name, each in things.items()}
    outputs = {name: layer(entry) for name, layer in layers.items()}
    model = keras.Model(entry, list(outputs.values()))
    for name, layer in layers.items():
        layer.bias.assign(things[name])
    return model


def biases(model: Any, things: Things) -> Things:
    return numpy_of({name: model.get_layer(name).bias for name in things})


def broadcast_model(things: Things) -> Things:
    model = model_of(things)
    hvd.broadcast_global_variables(0, model)
    return biases(model, things)


def broadcast_moments(things: Things) -> Things:
    """Broadcast the momentum of each variable, and return it."""
    model = model_of(things)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
    model.optimizer.build(model.trainable_variables)
    slots = {}
    for variable, slot in zip(model.trainable_variables, model.optimizer.momentums, strict=True):
        layer, kind = variable.path.split("/")
        if kind == "bias":
            slots[layer] = slot
            slot.assign(things[layer])
    hvd.broadcast_global_variables(0, model)
    return numpy_of(slots)


def keras_gradients(things: Things) -> Things:
    """Make a step of SGD from zeros, with the things as gradients, and return the changes."""
    made = keras_variables({name: 0 * each for name, each in things.items()})
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    gradients = [keras.ops.convert_to_tensor(each) for each in things.values()]
    optimizer.apply(gradients, list(made.values()))
    return {name: -each for name, each in numpy_of(made).items()}


def synced(state: Any) -> Any:
    """Give all ranks the commit of rank 0, the only one that has one."""
    if engine.rank() == 0:
        state.save()
    state.sync()
    return state


def keras_state(things: Things) -> Things:
    from engine.keras.elastic import KerasState

    return biases(synced(KerasState(model_of(things))).model, things)


def state_values(things: Things) -> Things:
    """Return values of a state by name, as numbers."""
    from engine.elastic import ObjectState

    state = synced(ObjectState(**{name: each.astype(np.float32) for name, each in things.items()}))
    return {name: getattr(state, name) for name in things}


def in_tensorflow(things: Things) -> dict[str, Any]:
    return {name: tf.Variable(each, name=name) for name, each in things.items()}


def tensorflow_variables(things: Things) -> Things:
    made = in_tensorflow(things)
    of_tf.broadcast_variables(made.values(), 0)
    return {name: each.numpy() for name, each in made.items()}


def tensorflow_graph(things: Things) -> Things:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        made = {name: tf.compat.v1.get_variable(name, initializer=each) for name, each in things.items()}
        operation = of_tf.broadcast_global_variables(0)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(operation)
        found: Things = session.run(made)
        return found


def tensorflow_gradients(things: Things) -> Things:
    made = in_tensorflow(things)
    with of_tf.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.add_n([tf.reduce_sum(tf.cast(each * things[name], tf.float32)) for name, each in made.items()])
    found = tape.gradient(loss, list(made.values()))
    return {name: each.numpy() for name, each in zip(made, found, strict=True)}


def tensorflow_function(things: Things) -> Things:
    made = in_tensorflow(things)

    @tf.function
    def step() -> Any:
        with of_tf.DistributedGradientTape(tf.GradientTape(), num_groups=2) as tape:
            loss = tf.add_n([tf.reduce_sum(tf.cast(each * things[name], tf.float32)) for name, each in made.items()])
        return tape.gradient(loss, list(made.values()))

    return {name: each.numpy() for name, each in zip(made, step(), strict=True)}


def tensorflow_state(things: Things) -> Things:
    from engine.tensorflow.elastic import TensorFlowState

    made = in_tensorflow(things)
    synced(TensorFlowState(made.values()))
    return {name: each.numpy() for name, each in made.items()}


def tree_of(things: Things) -> Any:
    """Return a pytree that keeps its insertion order."""
    return OrderedDict((name, jax.numpy.asarray(each)) for name, each in things.items())


class Held(dict[str, Any]):
    """A pytree whose class gives JAX no keys, but keeps them beside its children."""


@cache
def register_held() -> None:
    jax.tree_util.register_pytree_node(
        Held,
        lambda tree: (tuple(tree.values()), tuple(tree)),
        lambda keys, children: Held(zip(keys, children, strict=True)),
    )


def jax_tree_without_keys(things: Things) -> Things:
    register_held()
    tree = [Held(tree_of(things))]
    return {name: np.asarray(each) for name, each in of_jax.broadcast_pytree(tree)[0].items()}


def jax_program_without_keys(things: Things) -> Things:
    optimizer = of_jax.distributed(optax.sgd(1.0))
    register_held()
    tree = Held(below=Held(tree_of(things)))
    updates, _ = jax.jit(optimizer.update)(tree, optimizer.init(tree))
    return {name: -np.asarray(each) for name, each in updates["below"].items()}


def jax_tree(things: Things) -> Things:
    return {name: np.asarray(each) for name, each in of_jax.broadcast_pytree(tree_of(things)).items()}


def jax_gradients(things: Things) -> Things:
    optimizer = of_jax.distributed(optax.sgd(1.0))
    tree = tree_of(things)
    updates, _ = optimizer.update(tree, optimizer.init(tree))
    return {name: -np.asarray(each) for name, each in updates.items()}


def jax_program(things: Things) -> Things:
    optimizer = of_jax.distributed(optax.sgd(1.0))
    tree = tree_of(things)
    updates, _ = jax.jit(optimizer.update)(tree, optimizer.init(tree))
    return {name: -np.asarray(each) for name, each in updates.items()}


def jax_state(things: Things) -> Things:
    from engine.jax.elastic import JaxState

    return {name: np.asarray(each) for name, each in synced(JaxState(tree=tree_of(things))).tree.items()}


CASES: dict[str, tuple[Callable[[Things], Things], Callable[[str], Any]]] = {
    case.__name__: (case, expected)
    for expected, cases in (
        (from_root, (broadcast_variables, broadcast_model, broadcast_moments, keras_state, state_values)),
        (averaged, (keras_gradients, tensorflow_gradients, tensorflow_function)),
        (from_root, (tensorflow_variables, tensorflow_graph, tensorflow_state)),
        (from_root, (jax_tree, jax_tree_without_keys, jax_state)),
        (averaged, (jax_gradients, jax_program, jax_program_without_keys)),
    )
    for case in cases
}


def run_trials(name: str) -> None:
    """Run the trials of a case; no two trials share names."""
    first = 1000 * list(CASES).index(name)
    for number in range(first, first + TRIALS):
        try:
            Trial(number).run(*CASES[name])
        except AssertionError as error:
            raise AssertionError(f"trial {number}: {error}") from error


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("tensorflow", "jax"))])
def test_what_ranks_pair_they_pair_by_name(name: str) -> None:
    run_trials(name)


@ON_TENSORFLOW
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("tensorflow")])
def test_what_ranks_pair_in_tensorflow_they_pair_by_name(name: str) -> None:
    run_trials(name)


@ON_JAX
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("jax")])
def test_what_ranks_pair_in_jax_they_pair_by_name(name: str) -> None:
    run_trials(name)


def gradients_in(names: list[str], case: Callable[[dict[str, float]], Things]) -> None:
    """Reduce gradients in this rank's own order, with a different value for each name, and check the results."""
    given = {name: 4.0 * (ord(name) - ord("a")) + engine.rank() for name in names}
    for name, found in case(given).items():
        assert np.all(found == given[name] - engine.rank() + 0.5), f"{name}: {found} in the order {names}"


def reduce_in_random_orders(draw: random.Random, case: Callable[[dict[str, float]], Things]) -> None:
    for _ in range(5):
        names = list("abcd")
        draw.shuffle(names)
        gradients_in(names, case)


def of_optimizer(variables: dict[str, Any], given: dict[str, float], **options: Any) -> Things:
    """Return the changes of one step of a wrapped Keras optimizer, which is kept with the variables."""
    optimizer = variables.setdefault("", hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options))
    before = {name: np.array(keras.ops.convert_to_numpy(variables[name].value)) for name in given}
    gradients = [keras.ops.full((2,), each, "float32") for each in given.values()]
    optimizer.apply(gradients, [variables[name] for name in given])
    return {name: before[name] - keras.ops.convert_to_numpy(variables[name].value) for name in given}


def of_tape(variables: dict[str, Any], given: dict[str, float], **options: Any) -> Things:
    """Return the gradients of a tape in a newly traced function."""

    @tf.function
    def step() -> Any:
        with of_tf.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            loss = tf.add_n([tf.reduce_sum(variables[name] * each) for name, each in given.items()])
        return tape.gradient(loss, [variables[name] for name in given])

    return {name: each.numpy() for name, each in zip(given, step(), strict=True)}


def of_optax(optimizer: Any, given: dict[str, float]) -> Things:
    tree = OrderedDict((name, jax.numpy.full(2, each)) for name, each in given.items())
    return {name: -np.asarray(each) for name, each in optimizer.update(tree, optimizer.init(tree))[0].items()}


@pytest.mark.parametrize("number", range(4))
def test_orders_may_change_from_step_to_step_on_one_rank(number: int) -> None:
    draw = random.Random(10 * number + engine.rank())
    variables = {name: keras.Variable(np.zeros(2, np.float32), name=f"{name}{number}of_orders") for name in "abcd"}
    cases = [lambda given: of_optimizer(variables, given)]
    if keras.backend.backend() == "tensorflow":
        of_tensorflow = {name: tf.Variable(tf.zeros(2), name=f"{name}{number}of_orders") for name in "abcd"}
        cases.append(lambda given: of_tape(of_tensorflow, given))
    for case in cases:
        reduce_in_random_orders(draw, case)


@ON_JAX
@pytest.mark.parametrize("number", range(4))
def test_orders_of_a_pytree_may_change_from_step_to_step_on_one_rank(number: int) -> None:
    optimizer = of_jax.distributed(optax.sgd(1.0))
    draw = random.Random(10 * number + engine.rank())
    reduce_in_random_orders(draw, lambda given: of_optax(optimizer, given))


@ON_TENSORFLOW
@pytest.mark.parametrize("number", range(4))
def test_groups_may_be_in_another_order_on_one_rank(number: int) -> None:
    draw = random.Random(10 * number + engine.rank())
    variables = {name: tf.Variable(tf.zeros(2), name=f"{name}{number}of_groups") for name in "abcde"}
    groups = [list("abc"), list("de")]
    for group in (groups, *groups):
        draw.shuffle(group)
    chosen = [[variables[name] for name in group] for group in groups]
    gradients_in(list("abcde"), lambda given: of_tape(variables, given, groups=chosen))


@ON_TENSORFLOW
def test_other_groups_on_one_rank_are_named() -> None:
    variables = {name: tf.Variable(tf.zeros(2), name=f"{name}_of_other_groups") for name in "abcd"}
    groups = [["a", "b", "cd"[engine.rank()]], ["dc"[engine.rank()]]]
    chosen = [[variables[name] for name in group] for group in groups]
    with pytest.raises(Exception, match=r"c_of_other_groups': rank 1 has .* in the group of 'c_of_other_groups'"):
        of_tape(variables, dict.fromkeys("abcd", 1.0), groups=chosen)


@ON_JAX
def test_paths_of_jax_that_are_written_alike_are_told_apart() -> None:
    leaves: list[Any] = [("a/b", 1.0), ("a", {"b": 2.0}), (1, 3.0), ("1", 4.0)]
    tree = OrderedDict(leaves if engine.rank() else leaves[::-1])
    tree = jax.tree.map(lambda each: jax.numpy.full(2, each + engine.rank()), tree)
    optimizer = of_jax.distributed(optax.sgd(-1.0))
    updates, _ = optimizer.update(tree, optimizer.init(tree))
    for found, added in ((updates, 0.5), (of_jax.broadcast_pytree(tree), 0.0)):
        given = found["a/b"], found["a"]["b"], found[1], found["1"]
        assert [float(each[0]) - added for each in given] == [1.0, 2.0, 3.0, 4.0], found


@ON_JAX
def test_leaves_of_jax_that_the_engine_does_not_take_are_given_all_the_same() -> None:
    rank = engine.rank()
    tree = {
        "int4": jax.numpy.full(3, rank + 1, "int4"),
        "float8": jax.numpy.full(3, rank + 1, "float8_e4m3"),
        "text": np.array(["a", "b"][rank]),
        "objects": np.array([rank, None]),
        "date": np.array(["2020-01-01"], "M8[D]") + rank,
        "long": np.full(2, rank + 1, np.longdouble),
    }
    found = of_jax.broadcast_pytree(tree)
    assert found["int4"].tolist() == found["float8"].tolist() == [1] * 3
    assert (str(found["text"]), found["objects"].tolist()) == ("a", [0, None])
    assert (str(found["date"][0]), found["long"].tolist()) == ("2020-01-01", [1, 1])


def nested(path: list[str]) -> Any:
    """Return a layer, with a nested layer for each further part of a path."""
    if len(path) == 1:
        return keras.layers.Dense(2, use_bias=False, name=path[0])

    class Block(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__(name=path[0])
            self.inner = nested(path[1:])

        def call(self, entry: Any) -> Any:
            return self.inner(entry)

    return Block()


@pytest.mark.parametrize("elastic", [False, True])
def test_moments_of_variables_that_are_alike_with_underscores_are_told_apart(elastic: bool) -> None:
    from engine.keras.elastic import KerasState

    paths = [["a_b", "c"], ["a", "b_c"], ["a_b_c"]]
    if engine.rank():
        paths = [paths[1], paths[0], paths[2]]  # the last one is equal, and the first two would swap
    entry = keras.Input((2,))
    model = keras.Model(entry, [nested(path)(entry) for path in paths])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
    model.optimizer.build(model.trainable_variables)
    right = {"a_b/c/kernel": 1.0, "a/b_c/kernel": 2.0, "a_b_c/kernel": 3.0}
    slots = dict(zip((each.path for each in model.trainable_variables), model.optimizer.momentums, strict=True))
    for path, slot in slots.items():
        slot.assign(np.full((2, 2), right[path] + 10 * engine.rank()))
    if elastic:
        synced(KerasState(model))
    else:
        hvd.broadcast_global_variables(0, model)
    for path, slot in slots.items():
        assert np.all(keras.ops.convert_to_numpy(slot.value) == right[path]), path


@pytest.mark.parametrize(
    ("setting", "given"),
    [("momentum", (0.9, 0.8)), ("clipnorm", (1.0, None)), ("learning_rate.decay_steps", (10, 20))],
)
def test_settings_of_optimizers_that_differ_are_named(setting: str, given: tuple[Any, Any]) -> None:
    mine = given[engine.rank()]
    if "." in setting:
        made = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, mine, 0.9))
    else:
        made = keras.optimizers.SGD(0.1, **{setting: mine})
    variable = keras.Variable(np.ones(2, np.float32), name=f"of_{setting.partition('.')[0]}")
    gradient = keras.ops.convert_to_tensor(np.ones(2, np.float32))
    with pytest.raises(engine.errors.MismatchError, match=rf"'optimizer.{setting}': rank 1 has {given[1]}"):
        hvd.DistributedOptimizer(made).apply([gradient], [variable])
