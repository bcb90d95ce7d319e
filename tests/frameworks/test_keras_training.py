"""`fit` on N ranks equals `fit` on the whole batch in one process, on each backend of Keras."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from typing import Any

import numpy as np
import pytest

import engine

from ..on_ranks import Parts
from ..waiting import until
from .backends import Lazy, on_backends, on_op_ranks

keras, toy, hvd = Lazy("keras"), Lazy("tests.frameworks.keras_toy"), Lazy("engine.keras")

pytestmark = on_backends(2)

MAKERS: dict[str, Any] = {
    "momentum, clipped, averaged": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, global_clipnorm=0.3, use_ema=True, ema_momentum=0.5, weight_decay=0.01
    ),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)), 1024.0
    ),
}


@on_backends(2, spare=())
@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", MAKERS)
def test_fit_equals_one_process_with_the_whole_batch(kind: str) -> None:
    trained, alone = toy.compare_training(MAKERS[kind])
    assert trained.optimizer.iterations == alone.optimizer.iterations == 8
    toy.check_close(toy.state(trained.optimizer), toy.state(alone.optimizer))


@pytest.mark.slow
@on_op_ranks(1, 3)
def test_other_numbers_of_ranks() -> None:
    toy.compare_training(lambda: keras.optimizers.Adam(0.05))


def test_several_steps_in_one_execution() -> None:
    if toy.BACKEND == "torch":
        pytest.skip("Keras refuses steps_per_execution on torch")
    toy.compare_training(lambda: keras.optimizers.Adam(0.05), compile={"steps_per_execution": 3}, batches=5)


def test_eager_steps() -> None:
    toy.compare_training(lambda: keras.optimizers.SGD(0.1, momentum=0.9), compile={"run_eagerly": True}, epochs=1)


def test_train_on_batch() -> None:
    trained, alone = toy.model(), toy.model()
    alone.compile(keras.optimizers.Adam(0.05), loss="mse")
    trained.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), loss="mse")
    x, y = toy.whole(2)
    size = 4 * engine.size()
    for step in range(2):
        alone.train_on_batch(x[step * size : (step + 1) * size], y[step * size : (step + 1) * size])
        mine = slice(step * size + 4 * engine.rank(), step * size + 4 * engine.rank() + 4)
        trained.train_on_batch(x[mine], y[mine])
    toy.check_same_everywhere(toy.weights(trained))
    toy.check_close(toy.weights(trained), toy.weights(alone))


@on_backends(2, spare=())
@pytest.mark.sample(3)
@pytest.mark.parametrize("ours", [False, True])
def test_accumulated_gradients(ours: bool) -> None:
    """Batches that are accumulated, by Keras after the reduction or by the engine before it, equal one large batch."""
    if ours:
        options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05), **options)
    else:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05, gradient_accumulation_steps=2))
    trained, alone = toy.model(), toy.model()
    trained.compile(optimizer, loss="mse")
    before = engine.counters()["tensors"]
    toy.fit(trained, together=True)
    tensors = engine.counters()["tensors"] - before
    alone.compile(keras.optimizers.Adam(0.05), loss="mse")
    x, y = toy.whole()
    alone.fit(x, y, batch_size=8 * engine.size(), epochs=2, verbose=0, shuffle=False)
    toy.check_same_everywhere(toy.weights(trained))
    toy.check_close(toy.weights(trained), toy.weights(alone))
    assert tensors < (24 if ours else 40), tensors  # 4 gradients in 4 steps, or in 8
    assert len(optimizer.variables) == len(toy.state(optimizer))


def test_a_train_step_of_ones_own() -> None:
    """The model computes its gradients itself, and hands them to the optimizer."""
    kind: Any = {"torch": _torch_model, "tensorflow": _tensorflow_model, "jax": _jax_model}[toy.BACKEND]()
    made = []
    for together in (True, False):
        keras.utils.set_random_seed(1)
        model = kind()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
        model.compile(hvd.DistributedOptimizer(optimizer) if together else optimizer, loss="mse")
        toy.fit(model, together)
        made.append(toy.weights(model))
    toy.check_same_everywhere(made[0])
    toy.check_close(*made)


def _torch_model() -> Any:
    import torch

    class Own(keras.Sequential):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__([keras.Input((toy.FEATURES,)), keras.layers.Dense(2, name="own")])

        def train_step(self, data: Any) -> Any:
            x, y = data
            self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss.backward()
            known = list(self.trainable_weights)
            with torch.no_grad():
                self.optimizer.apply([each.value.grad for each in known], known)
            return {"loss": loss}

    return Own


def _tensorflow_model() -> Any:
    import tensorflow as tf

    class Own(keras.Sequential):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__([keras.Input((toy.FEATURES,)), keras.layers.Dense(2, name="own")])

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    return Own


def _jax_model() -> Any:
    import jax

    class Own(keras.Sequential):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__([keras.Input((toy.FEATURES,)), keras.layers.Dense(2, name="own")])

        def train_step(self, state: Any, data: Any) -> Any:
            trainable, others, of_optimizer, metrics = state
            x, y = data

            def loss_of(values: Any) -> Any:
                predicted, after = self.stateless_call(values, others, x, training=True)
                return self.compute_loss(y=y, y_pred=predicted), after

            (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
            trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, gradients, trainable)
            return {"loss": loss}, (trainable, others, of_optimizer, metrics)

    return Own


def test_mixed_precision() -> None:
    """`compile` would put the loss scale of float16 layers around a wrapped optimizer, which is refused."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        inner = toy.model()
        inner.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
        with pytest.raises(ValueError, match="auto_scale_loss=False"):
            toy.fit(inner, together=True)
        toy.compare_training(
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), 256.0), tolerance=2e-3
        )
    finally:
        keras.config.set_dtype_policy("float32")


def test_gradients_of_an_embedding() -> None:
    """TensorFlow makes them sparse, and they stay sparse."""

    def layers() -> list[Any]:
        words, flat = keras.layers.Embedding(20, 3, name="words"), keras.layers.Flatten(name="flat")
        return [words, flat, keras.layers.Dense(2, name="last")]

    made = []
    for options in ({}, {"sparse_as_dense": True}, None):
        model = toy.model(layers)
        optimizer = keras.optimizers.SGD(0.5)
        model.compile(optimizer if options is None else hvd.DistributedOptimizer(optimizer, **options), loss="mse")
        x, y = toy.whole()
        words, size = np.abs(x * 6).astype(np.int32) % 20, 4 * engine.size()
        if options is not None:
            words, y, size = toy.part(words), toy.part(y), 4
        model.fit(words, y, batch_size=size, epochs=1, shuffle=False, verbose=0)
        made.append(toy.weights(model))
    toy.check_same_everywhere([*made[0], *made[1]])
    toy.check_close(made[0], made[2])
    toy.check_close(made[1], made[2])


def test_xla_is_refused_with_what_to_set() -> None:
    if toy.BACKEND != "tensorflow":
        pytest.skip("JAX compiles as it should, and torch.compile is another thing")
    model = toy.model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=True)
    with pytest.raises(Exception, match="jit_compile=False"):
        toy.fit(model, together=True)
    model.compile(model.optimizer, loss="mse", jit_compile="auto")
    toy.fit(model, together=True)
    toy.check_same_everywhere(toy.weights(model))


@pytest.mark.slow
def test_torch_compile() -> None:
    if toy.BACKEND != "torch":
        pytest.skip("is torch's")
    import torch

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    steps = toy.Steps(optimizer)
    torch.compile(steps.apply, backend="eager")(toy.gradients_of(engine.rank(), 0))
    alone = toy.Steps(keras.optimizers.SGD(0.1))
    alone.apply(toy.mean_gradients(0))
    toy.check_close(steps.values(), alone.values())


@pytest.mark.slow
def test_files_know_nothing_of_the_engine(parts: Parts) -> None:
    """A model trained with a wrapped optimizer is saved, loaded plain, loaded wrapped, and trained on."""
    for name, make in MAKERS.items():
        model = toy.model()
        model.compile(hvd.DistributedOptimizer(make(), backward_passes_per_step=2), loss="mse")
        toy.fit(model, together=True)
        path = f"{name.split(',')[0]}-{engine.rank()}.keras"
        model.save(path)
        plain, wrapped = keras.models.load_model(path), hvd.load_model(path)
        toy.fit(wrapped, together=True)
        with parts.part(name):
            with zipfile.ZipFile(path) as file:
                assert b"engine" not in file.read("config.json")
            optimizer, fresh = model.optimizer, make()
            assert type(plain.optimizer) is type(fresh)
            own = toy.state(optimizer)[: len(plain.optimizer.variables)]
            toy.check_close(toy.state(plain.optimizer), own, 0.0)
            toy.check_close(toy.weights(plain), toy.weights(model), 0.0)
            assert int(plain.optimizer.iterations) == 4
            assert int(wrapped.optimizer.iterations) == 12, "reduced and stepped for each of 8 batches"
        toy.check_same_everywhere(toy.weights(wrapped))


@on_backends(2, backends=("torch",))
def test_a_model_that_horovod_has_saved_is_loaded(rank: int) -> None:
    """The file names Horovod's subclass of a Keras class; a class of the same name from elsewhere stays unknown."""
    model = toy.model()
    model.compile(keras.optimizers.Adam(0.25), loss="mse")
    model.optimizer.build(model.trainable_variables)
    plain_file, wrapped_file = f"plain-{rank}.keras", f"wrapped-{rank}.keras"
    model.save(plain_file)
    for module in "horovod._keras", "elsewhere":
        with zipfile.ZipFile(plain_file) as plain, zipfile.ZipFile(wrapped_file, "w") as wrapped:
            for name in plain.namelist():
                data = plain.read(name)
                if name == "config.json":
                    config = json.loads(data)
                    config["compile_config"]["optimizer"] |= {"module": module, "registered_name": "Adam"}
                    data = json.dumps(config).encode()
                wrapped.writestr(name, data)
        if module == "elsewhere":
            with pytest.raises(TypeError, match="Could not locate class 'Adam'"):
                hvd.load_model(wrapped_file)
        else:
            optimizer = hvd.load_model(wrapped_file).optimizer
            assert optimizer.__class__ is type(keras.optimizers.Adam()) and hasattr(optimizer, "unwrap")
            assert float(optimizer.learning_rate) == 0.25


def test_one_rank_alone_may_load_the_model(rank: int) -> None:
    """Horovod's scripts resume this way. Paths of a loaded Sequential model lack the model's name."""
    model = toy.model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.25)), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    if rank == 0:
        model.save("resumed.keras")
        model = hvd.load_model("resumed.keras")
    toy.fit(model, together=True, epochs=1)
    hvd.check_consistency({str(k): each for k, each in enumerate(toy.weights(model))})


@pytest.mark.slow
@on_backends(2, backends=("jax",))
def test_a_saved_model_loads_where_there_is_no_engine() -> None:
    if engine.rank() == 0:
        model = toy.model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.5), process_set=hvd.global_process_set), "mse")
        model.optimizer.build(model.trainable_variables)
        model.save("plain.keras")
        program = (
            "import sys; sys.modules['engine'] = sys.modules['engine_ext'] = None; import keras; "
            "made = keras.models.load_model('plain.keras').optimizer; "
            "print(type(made).__name__, float(made.learning_rate))"
        )
        told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
        assert told.stdout == "Adam 0.5\n", told.stderr
    engine.barrier("loaded")


def test_variables_of_an_optimizer_may_be_called_as_in_keras_2() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    optimizer.build([keras.Variable(np.zeros(2))])
    assert optimizer.variables() == list(optimizer.variables) and len(optimizer.variables) == 3


def test_copies_are_plain() -> None:
    import copy

    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.25))
    for made in (
        optimizer.__class__.from_config(optimizer.get_config()),
        type(optimizer).from_config(optimizer.get_config()),
        keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
    ):
        assert type(made) is type(keras.optimizers.Adam()) and float(made.learning_rate) == 0.25
    model = toy.model()
    model.compile(optimizer, loss="mse")
    copied = copy.deepcopy(model)
    assert type(copied.optimizer) is type(keras.optimizers.Adam())
    assert isinstance(optimizer, keras.optimizers.Adam) and optimizer.__class__ is type(keras.optimizers.Adam())


def test_the_bindings_of_other_frameworks_are_not_imported() -> None:
    model = toy.model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    toy.fit(model, together=True, epochs=1)
    others = {"torch", "tensorflow", "jax"} - {toy.BACKEND}
    assert not {f"engine.{each}" for each in others} & set(sys.modules)


def test_steps_are_marked_and_operations_named() -> None:
    native = engine.session.runtime.current_engine()
    native.record_steps()
    model = toy.model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, loss="mse")
    begin, _ = native.steps(0)
    toy.fit(model, together=True, epochs=2)
    number = optimizer._engine.number

    def marked() -> int:
        return [mark[2] for mark in native.steps(begin)[1]].count(number)

    until(lambda: marked() >= 8, "eight marks, of programs that JAX may still be running")
    assert marked() == 8
