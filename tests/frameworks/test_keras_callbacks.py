"""Callbacks of the Keras binding, and collectives on values."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine

from .backends import Lazy, on_backends

keras, toy, hvd = Lazy("keras"), Lazy("tests.frameworks.keras_toy"), Lazy("engine.keras")

pytestmark = on_backends(2)


def compiled(optimizer: Any, seed: int = 1) -> Any:
    """Return a model, compiled with a wrapped optimizer."""
    model = toy.model(seed=seed)
    model.compile(hvd.DistributedOptimizer(optimizer), loss="mse", metrics=["mae"])
    return model


def shift(optimizer: Any, trained: Any, by: float) -> None:
    """Make an optimizer's state nonzero."""
    optimizer.build(trained)
    for each in optimizer.variables:
        if each.shape:
            each.assign(each + by)


@on_backends(2, spare=())
def test_all_ranks_begin_as_one_of_them() -> None:
    """The optimizer's state is broadcast, too, as when only one rank has loaded a file."""
    alone = toy.model(seed=12)
    alone.compile(keras.optimizers.Adam(0.05), loss="mse")
    shift(alone.optimizer, alone.trainable_variables, 1.0)
    model = compiled(keras.optimizers.Adam(0.05), seed=11 + engine.rank())
    shift(model.optimizer, model.trainable_variables, engine.rank())
    toy.fit(alone, together=False)
    toy.fit(model, together=True, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1)])
    toy.check_same_everywhere([*toy.weights(model), *toy.state(model.optimizer)])
    toy.check_close(toy.weights(model), toy.weights(alone))


def test_the_first_step_has_the_broadcast_weights() -> None:
    """Keras may create the optimizer's variables only in the first step."""
    alone = toy.model(seed=12)
    alone.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    model = compiled(keras.optimizers.SGD(0.1, momentum=0.9), seed=11 + engine.rank())
    toy.fit(alone, together=False, epochs=1)
    toy.fit(model, together=True, epochs=1, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1)])
    toy.check_same_everywhere(toy.weights(model))
    toy.check_close(toy.weights(model), toy.weights(alone))


def test_local_variables_keep_their_values() -> None:
    model = compiled(keras.optimizers.SGD(0.0), seed=11 + engine.rank())
    kept = model.get_layer("first").kernel
    before = np.array(keras.ops.convert_to_numpy(kept))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[kept])
    toy.fit(model, together=True, epochs=1, callbacks=[callback])
    assert np.array_equal(before, keras.ops.convert_to_numpy(kept))
    toy.check_same_everywhere(toy.weights(model)[1:])


def test_a_model_is_broadcast_outside_of_fit() -> None:
    model = compiled(keras.optimizers.SGD(0.1), seed=11 + engine.rank())
    with pytest.raises(TypeError, match=r"call broadcast_global_variables\(root_rank, model\)"):
        hvd.broadcast_global_variables(0)
    hvd.broadcast_global_variables(1, model)
    toy.check_same_everywhere(toy.weights(model))
    toy.check_close(toy.weights(model), toy.weights(toy.model(seed=12)), 0.0)
    odd = toy.model(lambda: [keras.layers.Dense(2 + engine.rank(), name="odd")])
    with pytest.raises(engine.errors.MismatchError, match=r"float32\[6, 3\]"):
        hvd.broadcast_global_variables(0, odd)


def noting(seen: list[Any], change: Any = None) -> Any:
    """Return a callback that records metrics, and can set some before."""

    class Noting(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if change is not None:
                change(self, epoch, logs)
            seen.append(dict(logs))

    return Noting()


def test_metrics_are_averaged_and_ranks_stop_together() -> None:
    """Rank 0 sees no progress and rank 1 much; their average improves until the third epoch."""
    own: list[Any] = []
    seen: list[Any] = []

    def change(_: Any, epoch: int, logs: Any) -> None:
        logs["val_loss"] = 5.0 if engine.rank() == 0 else [6.0, 4.0, 7.0, 8.0, 9.0][epoch]
        if engine.rank() == 1:
            logs["one"] = 3.0

    model = compiled(keras.optimizers.SGD(0.1))
    history = toy.fit(
        model,
        together=True,
        epochs=5,
        callbacks=[
            noting(own, change),
            hvd.callbacks.MetricAverageCallback(),
            noting(seen),
            keras.callbacks.EarlyStopping("val_loss", patience=1),
        ],
    )
    everyone = engine.allgather_object((own, seen))
    assert [logs["val_loss"] for logs in seen] == [5.5, 4.5, 6.0]
    assert history.history["val_loss"] == [5.5, 4.5, 6.0]
    assert all(logs["one"] == 3.0 for logs in seen)
    for epoch in range(3):
        assert seen[epoch]["loss"] == sum(mine[epoch]["loss"] for mine, _ in everyone) / engine.size()
        assert everyone[0][1][epoch] == everyone[1][1][epoch]


def test_a_rank_that_stops_by_itself_stops_all() -> None:
    def change(callback: Any, epoch: int, _: Any) -> None:
        if epoch == 1 and engine.rank() == 1:
            callback.model.stop_training = True

    seen: list[Any] = []
    model = compiled(keras.optimizers.SGD(0.1))
    callbacks = [noting(seen, change), hvd.callbacks.MetricAverageCallback()]
    toy.fit(model, together=True, epochs=4, callbacks=callbacks)
    assert len(seen) == 2
    toy.check_same_everywhere(toy.weights(model))


def test_the_learning_rate_follows_its_schedule() -> None:
    model = compiled(keras.optimizers.SGD(0.5))
    stairs = hvd.callbacks.LearningRateScheduleCallback(0.5, lambda epoch: 0.5**epoch, start_epoch=1, end_epoch=3)
    history = toy.fit(model, together=True, epochs=5, callbacks=[stairs])
    np.testing.assert_allclose(history.history["lr"], [0.5, 0.25, 0.125, 0.125, 0.125])
    model = compiled(keras.optimizers.SGD(0.5))
    constant = hvd.callbacks.LearningRateScheduleCallback(0.5, 0.1, start_epoch=1)
    history = toy.fit(model, together=True, epochs=2, callbacks=[constant])
    np.testing.assert_allclose(history.history["lr"], [0.5, 0.05], rtol=1e-6)


def test_the_warm_up_reaches_the_learning_rate() -> None:
    rates: list[float] = []

    class Notes(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    model = compiled(keras.optimizers.SGD(0.8))
    warm_up = hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2)
    toy.fit(model, together=True, epochs=3, callbacks=[warm_up, Notes()])
    size = engine.size()
    expected = [0.8 / size * (min((step + 1) / 4, 2) * (size - 1) / 2 + 1) for step in range(12)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    assert rates[-1] == np.float32(0.8)


def test_momentum_is_corrected_when_the_learning_rate_changes() -> None:
    """The velocity of Keras' SGD contains the learning rate, and is rescaled to the new one."""
    made = []
    for correction in (True, False):
        model = compiled(keras.optimizers.SGD(0.1, momentum=0.9))
        drop = hvd.callbacks.LearningRateScheduleCallback(
            0.1, lambda epoch: 0.5 if epoch else 1.0, momentum_correction=correction
        )
        toy.fit(model, together=True, epochs=1, callbacks=[drop])
        before = [np.array(each) for each in toy.state(model.optimizer) if each.ndim]
        drop.on_epoch_begin(1)
        after = [np.array(each) for each in toy.state(model.optimizer) if each.ndim]
        assert any(np.abs(each).max() > 0 for each in before)
        made.append((before, after))
    for (before, after), factor in zip(made, (0.5, 1.0), strict=True):
        toy.check_close(after, [each * factor for each in before], 1e-7)


def test_the_best_model_is_saved_once() -> None:
    def change(_: Any, epoch: int, logs: Any) -> None:
        logs["val_loss"] = [3.0, 1.0, 2.0][epoch]

    seen: list[Any] = []
    model = compiled(keras.optimizers.SGD(0.1))
    best = hvd.callbacks.BestModelCheckpoint(filepath="best.keras")
    found: list[Any] = []
    keep = noting(seen, lambda *_: found.append(toy.weights(model)))
    toy.fit(model, together=True, epochs=3, callbacks=[noting([], change), keep, best])
    engine.barrier("saved")
    toy.check_close(toy.weights(keras.models.load_model("best.keras")), found[1], 0.0)
    engine.barrier("read")
    if engine.rank() == 0:
        Path("best.keras").unlink()


def test_values_are_combined() -> None:
    rank, size = engine.rank(), engine.size()
    total = sum(range(size))
    assert hvd.allreduce(float(rank), name="a") == total / size
    assert hvd.allreduce(np.float32(rank), average=False).dtype == np.float32
    np.testing.assert_array_equal(hvd.allreduce([rank, 1], op=engine.Sum), [total, size])
    variable = keras.Variable(np.full((2, 2), rank, np.float32))
    np.testing.assert_array_equal(hvd.allreduce(variable, op=engine.Max), np.full((2, 2), size - 1))
    np.testing.assert_array_equal(
        hvd.allgather(keras.ops.convert_to_tensor(np.full((rank + 1,), rank, np.int32))),
        np.concatenate([np.full(each + 1, each) for each in range(size)]),
    )
    np.testing.assert_array_equal(hvd.broadcast(np.array([rank, 7.0]), 1, name="b"), [1.0, 7.0])
    mine = hvd.reducescatter(np.arange(4.0) + rank, op=engine.Sum)
    np.testing.assert_array_equal(mine, np.split(size * np.arange(4.0) + total, size)[rank])
    with pytest.raises(TypeError, match="expected a number, an array or a tensor, not"):
        hvd.allreduce(object(), name="wrong")


def test_different_numbers_of_steps_are_told_before_the_first() -> None:
    model = compiled(keras.optimizers.SGD(0.1))
    before = toy.weights(model)
    x, y = toy.whole(4)
    own = 8 + 4 * engine.rank()
    broadcast, average = hvd.callbacks.BroadcastGlobalVariablesCallback, hvd.callbacks.MetricAverageCallback
    warm_up = hvd.callbacks.LearningRateWarmupCallback(0.1, steps_per_epoch=2)
    for callbacks in ([warm_up, broadcast(0), average()], [average()]):
        with pytest.raises(engine.errors.MismatchError, match=r"rank 0: 2 batches, 1 epochs, rank 1: 3 batches"):
            model.fit(x[:own], y[:own], batch_size=4, verbose=0, callbacks=callbacks)
    with pytest.raises(engine.errors.MismatchError, match="rank 0: 2 batches, 1 epochs, rank 1: 2 batches, 2 epochs"):
        model.fit(x[:8], y[:8], batch_size=4, epochs=1 + engine.rank(), verbose=0, callbacks=[average()])
    toy.check_close(toy.weights(model), before, 0.0)
    # Equal numbers of steps are accepted, even with a smaller last batch on one rank; so is a model that trains alone.
    model.fit(x[: 8 - engine.rank()], y[: 8 - engine.rank()], batch_size=4, verbose=0, callbacks=[average()])
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    model.fit(x[:own], y[:own], batch_size=4, verbose=0, callbacks=[average()])


def test_different_first_epochs_are_told_before_the_first_step() -> None:
    """A rank without remaining epochs reports it, too."""
    broadcast, average = hvd.callbacks.BroadcastGlobalVariablesCallback, hvd.callbacks.MetricAverageCallback
    rank = engine.rank()
    for first, callbacks, text in (
        (2 * rank, [broadcast(0)], "rank 0: 0, rank 1: 2"),
        (rank, [average(), keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))], "0: 0, rank 1: 1"),
        (3 * rank, [average()], "rank 0: 0, rank 1: none"),
    ):
        model = compiled(keras.optimizers.SGD(0.1))
        before = toy.weights(model)
        with pytest.raises(engine.errors.MismatchError, match=f"different epochs.*{text}"):
            toy.fit(model, together=True, epochs=3, initial_epoch=first, callbacks=callbacks)
        toy.check_close(toy.weights(model), before, 0.0)
    model = compiled(keras.optimizers.SGD(0.1))
    for each in ([average()], [broadcast(0), average()]):  # except equal numbers of steps
        toy.fit(model, together=True, epochs=3, initial_epoch=1, callbacks=each)


def test_backups_of_different_epochs_are_told() -> None:
    """Each rank has its own backup, as after a preemption between two of them."""
    alone = toy.model()
    alone.compile(keras.optimizers.SGD(0.1), loss="mse")
    backup = keras.callbacks.BackupAndRestore(f"backup-{engine.rank()}", delete_checkpoint=False)
    toy.fit(alone, together=False, epochs=1 + engine.rank(), callbacks=[backup])
    resumed = compiled(keras.optimizers.SGD(0.1))
    for callbacks in ([hvd.callbacks.MetricAverageCallback(), backup], [backup, hvd.callbacks.MetricAverageCallback()]):
        with pytest.raises(engine.errors.MismatchError, match=r"rank 0: 1, rank 1: 2.*BackupAndRestore"):
            toy.fit(resumed, together=True, epochs=4, callbacks=callbacks)
    engine.barrier("tried")
    shutil.rmtree(f"backup-{engine.rank()}")


def test_learning_rates_that_part_are_told_at_the_end_of_the_epoch() -> None:
    model = compiled(keras.optimizers.SGD(0.1))
    own = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 if epoch < 1 else 0.25 / (1 + engine.rank()))
    with pytest.raises(engine.errors.MismatchError, match=r"epoch 1, .*rank 0: 0.25, rank 1: 0.125"):
        toy.fit(model, together=True, epochs=3, callbacks=[hvd.callbacks.MetricAverageCallback(), own])


def test_files_that_several_ranks_would_write_are_told() -> None:
    model = compiled(keras.optimizers.SGD(0.1))
    every = keras.callbacks.ModelCheckpoint
    average, best = hvd.callbacks.MetricAverageCallback(), hvd.callbacks.BestModelCheckpoint
    with pytest.raises(engine.errors.MismatchError, match=r"ranks 0 and 1 .*same.keras', all at the same time"):
        toy.fit(model, together=True, callbacks=[average, every("same.keras")])
    for callbacks in ([every(f"own-{engine.rank()}.keras")], [best("loss", filepath="best.keras")]):
        toy.fit(model, together=True, epochs=1, callbacks=[average, *callbacks])
    engine.barrier("written")  # rank 0 still writes the best model when rank 1 is done
    found = [each.name for each in Path().glob("*.keras")]
    engine.barrier("seen")
    if engine.rank() == 0:
        for name in found:
            Path(name).unlink()
    assert {"own-0.keras", "best.keras"} <= set(found) and "same.keras" not in found


def test_callbacks_that_decide_by_the_metrics_of_one_rank_are_warned_of() -> None:
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    early, average = keras.callbacks.EarlyStopping, hvd.callbacks.MetricAverageCallback
    broadcast, stops = hvd.callbacks.BroadcastGlobalVariablesCallback, keras.callbacks.TerminateOnNaN
    logging.getLogger("engine").addHandler(handler)
    try:
        for callbacks in (
            [average(), early("loss")],
            [early("mae"), average()],
            [broadcast(0), early("loss")],
            [average(), stops()],
        ):
            toy.fit(compiled(keras.optimizers.SGD(0.1)), together=True, epochs=1, callbacks=callbacks)
    finally:
        logging.getLogger("engine").removeHandler(handler)
    assert [each.split(" ", 1)[0] for each in warned] == ["EarlyStopping", "EarlyStopping", "TerminateOnNaN"]
    assert "own 'mae'" in warned[0] and "own 'loss'" in warned[1]
