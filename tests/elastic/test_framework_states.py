"""States of Keras, TensorFlow and JAX: a newcomer gets the others' commit, and values are restored."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from engine.elastic.state import HostsUpdatedInterrupt, ObjectState

from .lockstep import Rank, together

RANKS = 2


def keras_numpy(variable: Any) -> Any:
    from keras import ops

    return ops.convert_to_numpy(variable.value)


def sync(states: list[ObjectState]) -> None:
    for state in states:
        state._peers = Rank()
    assert together([state._peers for state in states], [state.sync for state in states]) == [None] * len(states)  # type: ignore[misc]


class Keras:
    """A model of Keras and its optimizer; only the first rank has made steps, and so has committed more."""

    def __init__(self) -> None:
        keras = pytest.importorskip("keras")
        from engine.keras.elastic import KerasState

        keras.utils.clear_session()  # each process numbers its layers from the start
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
        self.model.compile(keras.optimizers.Adam(), loss="mse")
        self.state: Any = KerasState(self.model, epoch=0)

    def step(self) -> None:
        self.model.train_on_batch(np.ones((2, 3), np.float32), np.zeros((2, 4), np.float32))

    def shown(self) -> list[Any]:
        variables = [*self.model.weights, *self.model.optimizer.variables]
        return [np.asarray(keras_numpy(each)).tolist() for each in variables]


class TensorFlow:
    """Variables of TensorFlow."""

    def __init__(self) -> None:
        tf = pytest.importorskip("tensorflow")
        from engine.tensorflow.elastic import TensorFlowState

        self.variables = [tf.Variable(np.zeros(3, np.float32)), tf.Variable(0, dtype=tf.int64), tf.Variable(True)]
        self.state: Any = TensorFlowState(self.variables, epoch=0)

    def step(self) -> None:
        self.variables[0].assign_add([1.0, 2.0, 3.0])
        self.variables[1].assign_add(1)

    def shown(self) -> list[Any]:
        return [each.numpy().tolist() for each in self.variables]


class Jax:
    """Pytrees of JAX, including random keys, bfloat16, a NumPy array and a function."""

    def __init__(self) -> None:
        jax = pytest.importorskip("jax")
        from engine.jax.elastic import JaxState

        self.jax = jax
        params = {"w": jax.numpy.zeros(3), "b": jax.numpy.zeros((), "bfloat16"), "host": np.zeros(2), "f": self.step}
        tree = jax.tree_util.Partial(lambda: None, params["w"], params["b"])  # a function that cannot be pickled
        self.state: Any = JaxState(params=params | {"f": 0}, tree=tree, key=jax.random.key(1), epoch=0)

    def step(self) -> None:
        params = self.state.params
        self.state.params = {**params, "w": params["w"] + 1, "b": params["b"] + 1, "host": params["host"] + 1}
        self.state.key = self.jax.random.split(self.state.key)[0]

    def shown(self) -> list[Any]:
        assert isinstance(self.state.params["w"], self.jax.Array) and callable(self.state.tree)
        key = self.jax.random.key_data(self.state.key).tolist()
        params = self.state.params
        return [*(np.asarray(params[name], np.float32).tolist() for name in ("w", "b", "host")), key]


KINDS = pytest.mark.parametrize("kind", [Keras, TensorFlow, Jax])


@pytest.mark.sample(1)
@KINDS
def test_a_newcomer_gets_the_newest_commit(kind: Any) -> None:
    """The commit includes the slots of an optimizer that has made no step here."""
    made = [kind() for _ in range(RANKS)]
    for number, each in enumerate(made):
        for _ in range(2 * number):
            each.step()
            each.state.epoch += 1
            each.state.save()
    newest = made[1].shown()
    made[1].step()
    sync([each.state for each in made])
    assert [each.shown() for each in made] == [newest] * RANKS
    assert [each.state.epoch for each in made] == [2] * RANKS


@pytest.mark.sample(1)
@KINDS
def test_values_come_back_as_often_as_it_takes(kind: Any) -> None:
    made = kind()
    made.step()
    made.state.save()
    kept = made.shown()
    for _ in range(3):
        made.step()
        assert made.shown() != kept
        made.state.restore()
        assert made.shown() == kept


def test_an_array_that_a_program_uses_up_comes_back() -> None:
    made = Jax()
    made.state.save()
    made.jax.jit(lambda array: array + 1, donate_argnums=0)(made.state.params["w"]).block_until_ready()
    made.state.params["w"].delete()
    made.state.restore()
    assert made.state.params["w"].tolist() == [0, 0, 0]


def test_a_pytree_that_was_nothing_before_becomes_nothing_again() -> None:
    """A newcomer that has no structure for the commit raises an error, instead of going on with a list."""
    made, newcomer = Jax(), Jax()
    made.state.key = None
    made.state.save()
    made.state.key = {"best": made.jax.numpy.ones(2)}
    made.state.restore()
    assert made.state.key is None
    made.state.key = {"best": made.jax.numpy.ones(2)}
    made.state.save()
    made.state.restore()
    assert made.state.key["best"].tolist() == [1, 1]
    newcomer.state.key = None
    states = [made.state, newcomer.state]
    for state in states:
        state._peers = Rank()
    told = together([state._peers for state in states], [state.sync for state in states])
    assert told[0] is None and "'key' is a NoneType here" in str(told[1])


def test_a_model_without_variables_is_refused() -> None:
    keras = pytest.importorskip("keras")
    from engine.keras.elastic import KerasState

    with pytest.raises(ValueError, match=r"model\.build"):
        KerasState(keras.Sequential([keras.layers.Dense(1)]))


def test_a_commit_waits_for_the_passes_of_an_optimizer_of_keras() -> None:
    """The commit is made up for at the first check after the last pass."""
    keras = pytest.importorskip("keras")
    import engine.keras
    from engine.keras.elastic import KerasState

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(engine.keras.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=2), loss="mse")
    state: Any = KerasState(model)
    sync([state])
    passed = model.optimizer._engine.passes.variables[-1]
    passed.assign(1)
    state._peers = Rank()
    assert together([state._peers], [state.commit]) == [None]
    assert (state.committed, state.owed) == (0, True)
    passed.assign(0)
    assert together([state._peers], [state.check_host_updates]) == [None]
    assert (state.committed, state.owed) == (1, False)


@pytest.mark.parametrize("local", [False, True])
def test_a_step_that_divides_by_the_number_of_ranks_is_compiled_anew_in_a_new_world(local: bool) -> None:
    keras = pytest.importorskip("keras")
    import engine.keras
    from engine.keras.elastic import KerasState

    layer = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    wrap = engine.keras.PartialDistributedOptimizer
    model.compile(wrap(keras.optimizers.SGD(), local_layers=[layer] if local else None), loss="mse")
    compiled = model.train_function = lambda iterator: None
    state: Any = KerasState(model)
    state.on_reset()
    assert model.train_function is (None if local else compiled)


def test_nobody_compares_what_is_traced_in_an_elastic_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.frameworks import agreement

    monkeypatch.delenv("ENGINE_GATE", raising=False)
    assert agreement.compares_gradients()
    monkeypatch.setenv("ENGINE_GATE", "gate")
    assert not agreement.compares_gradients()


SAMPLES, EPOCHS = 3, 2


def _seen(interrupt_at: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the epochs and batches that a callback sees, and the commits' batches, if hosts change at one batch."""
    keras = pytest.importorskip("keras")
    from engine.keras import elastic

    seen: list[tuple[int, int]] = []

    class Alone(Rank):
        def reduce_maximum(self, values: Any) -> Any:
            return list(values)

    class See(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append((self.epoch, state.batch))
            if len(seen) == interrupt_at:
                state.on_hosts_updated(state.world)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    state: Any = elastic.KerasState(model, epoch=0, batch=0)
    state._peers = Alone()
    callbacks = [
        elastic.CommitStateCallback(state),
        elastic.UpdateBatchStateCallback(state),
        elastic.UpdateEpochStateCallback(state),
        See(),
    ]
    data = np.ones((SAMPLES, 1), np.float32)
    commits: list[int] = []
    while state.epoch < EPOCHS:
        left = data[state.batch :]
        try:
            model.fit(
                left,
                left,
                batch_size=1,
                initial_epoch=state.epoch,
                epochs=state.epoch + 1,
                callbacks=callbacks,
                verbose=0,
            )
        except HostsUpdatedInterrupt:
            state.restore()
            state.enter(state.world + 1)
            commits.append(state.epoch * SAMPLES + state.batch)
    return seen, commits


def test_epochs_and_batches_are_those_of_an_undisturbed_run() -> None:
    """Hosts change at every batch of two epochs; the commit comes last, in whatever order the program has callbacks."""
    expected = [epoch for epoch in range(EPOCHS) for _ in range(SAMPLES)]
    for interrupt_at in range(1, EPOCHS * SAMPLES + 1):
        seen, commits = _seen(interrupt_at)
        assert [epoch for epoch, _ in seen] == expected
        assert commits == [interrupt_at]


@pytest.mark.slow
def test_a_fit_on_jax_commits_and_comes_back_from_a_step_that_fails() -> None:
    """JAX's variables have no values within an epoch, and unusable ones after a failed step."""
    pytest.importorskip("keras")
    pytest.importorskip("jax")
    program = [sys.executable, "-m", "tests.elastic.keras_fit_program"]
    environment = os.environ | {"KERAS_BACKEND": "jax"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["jax", "True", "2", "20"], done.stderr
