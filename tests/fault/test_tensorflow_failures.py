"""Failed collectives in programs of TensorFlow: TensorFlow's kind of error with the engine's text, on every rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ..left_out import NAMES, leaving_out
from ..ranks import run_ranks, start_ranks
from .faults import soon

ENV = {
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTEROP_THREADS": "1",
    **leaving_out(*NAMES),
}


def failure(call: Callable[[], Any]) -> tuple[str, str, float]:
    """Return the class and message of a call's error, and the seconds that it took."""
    import tensorflow as tf

    begun = time.monotonic()
    try:
        call()
    except tf.errors.OpError as error:
        return type(error).__name__, error.message, time.monotonic() - begun
    raise AssertionError("a call that cannot be done went on")


def wrong_calls() -> list[tuple[str, str, float]]:
    """Make calls that fail without ending the world, and one after the world has failed, because rank 1 left."""
    import tensorflow as tf

    import engine
    import engine.tensorflow as hvd

    engine.init()
    rank = engine.rank()
    found = []
    calls: dict[str, Callable[[Any], Any]] = {
        "shape": lambda x: hvd.allreduce(x, name="shape"),
        "root": lambda x: hvd.broadcast(x, 7, name="root"),
        "rows": lambda x: hvd.alltoall(x, name="rows"),
    }
    for name, call in calls.items():
        sent = tf.ones([2 + rank if name == "shape" else 3])
        found += [failure(partial(call, sent)), failure(partial(tf.function(call), sent))]
        assert float(hvd.allreduce(tf.constant(2.0))) == 2.0
    engine.barrier()
    if rank == 1:
        engine.shutdown()
        return found
    waiting = tf.function(lambda x: [hvd.allreduce(x, name=f"left {k}") for k in range(3)])
    found.append(failure(lambda: waiting(tf.ones([2]))))
    found.append(failure(lambda: hvd.allreduce(tf.ones([2]))))
    return found


@pytest.mark.slow
def test_wrong_calls_and_a_rank_that_leaves() -> None:
    finished = run_ranks(2, wrong_calls, env=ENV, check=False)
    first, second = finished.values
    assert first is not None and second is not None, finished
    for found in (first, second):
        expected = (
            ("FailedPreconditionError", "MismatchError: ranks disagree on 'shape'"),
            ("InvalidArgumentError", "ArgumentError: root rank 7 is not among the 2 ranks"),
            ("InvalidArgumentError", "ArgumentError: 3 rows cannot be divided equally between 2 ranks"),
        )
        for (kind, text, _), (error, words) in zip(found, (each for each in expected for _ in range(2)), strict=False):
            assert kind == error and words in text, found
    for kind, text, seconds in first[6:]:
        assert kind == "AbortedError" and "RankLeftError: rank 1 left" in text
        soon(seconds, 2, first)


DIES = """
    import os, signal, time
    import tensorflow as tf
    import engine, engine.tensorflow as hvd

    tf.config.threading.set_inter_op_parallelism_threads(1)  # the import has left TensorFlow's runtime as it was
    engine.init()
    # Without AutoGraph, whose files a process that is killed leaves behind.
    step = tf.function(lambda x: [hvd.allreduce(x, name=f"step {k}") for k in range(3)], autograph=False)
    step(tf.ones([2]))
    engine.barrier()
    if engine.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for call in (lambda: step(tf.ones([2])), lambda: hvd.allreduce(tf.ones([2]))):
        begun = time.monotonic()
        try:
            call()
        except tf.errors.AbortedError as error:
            assert "RankDiedError: rank 1 died" in error.message, error.message
            assert time.monotonic() - begun < 30, "stall_limit is 600 s"
        else:
            raise AssertionError("it went on")
    open("seen", "w").close()
"""


def test_a_rank_that_dies() -> None:
    with start_ranks(2, DIES, env=ENV) as job:
        job.wait_for("seen", timeout=90)
        job.finish(check=False)


BLOCKED = """
    import tensorflow as tf
    import engine, engine.tensorflow as hvd

    engine.init()
    rank = engine.rank()
    hvd.allreduce(tf.ones([2]))
    open(f"blocked.{rank}", "w").close()
    if rank == 0:
        hvd.allreduce(tf.ones([2]), name="of rank 0")
    tf.function(lambda x: hvd.allreduce(x, name="of rank 1"))(tf.ones([2]))
"""


@pytest.mark.slow
def test_an_interrupt_ends_ranks_that_wait_for_each_other() -> None:
    with start_ranks(2, BLOCKED, env=ENV, options=["--stall-check-shutdown-time-seconds", "0"]) as job:
        job.wait_for("blocked.0", "blocked.1", timeout=90)
        begun = time.monotonic()
        os.kill(job.process.pid, signal.SIGINT)
        job.finish(check=False)
        soon(time.monotonic() - begun, 10)
