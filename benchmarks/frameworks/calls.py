"""Rank that calls a collective through a framework, and bare. Started by `benchmarks.frameworks.run`.

Averaged values stay the same from the first call on, so that calls in place can be repeated.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.common.worker import GroupWorker, WrongResultError

ELEMENTS = 1024
"""Number of elements of an array of 4 KiB."""
MANY = 50
GROUP = 160
GROUP_ELEMENTS = 10_000_000 // GROUP

Case = Callable[[], Any]
"""Callable that makes one call and returns its result."""


class CallsRank:
    """Handlers of the requests to a rank."""

    def __init__(self, worker: GroupWorker, framework: str) -> None:
        self._worker = worker
        small, large = _make_array(worker, ELEMENTS), [_make_array(worker, GROUP_ELEMENTS) for _ in range(GROUP)]
        self._cases = make_bare_cases(small, large) | FRAMEWORKS[framework](_make_array(worker, ELEMENTS), large)

    def list_cases(self, request: dict[str, Any]) -> list[str]:
        """Return the names of the cases that can be measured."""
        return list(self._cases)

    def check_first_call(self, request: dict[str, Any]) -> None:
        """Call once, which compiles in some frameworks, and check the first and last element of each result."""
        returned = self._cases[request["case"]]()
        mean = (self._worker.ranks + 1) / 2
        wanted = self._worker.rank + 1 if request["case"].startswith("empty") else mean
        for each in returned if isinstance(returned, list | tuple) else [returned]:
            if {float(each[0]), float(each[-1])} != {wanted}:
                raise WrongResultError(f"{request['case']}: {float(each[0])} and {float(each[-1])}, not {wanted}")

    def time_block(self, request: dict[str, Any]) -> list[float]:
        """Return the seconds of each call. The ranks meet before each."""
        run, meet, clock = self._cases[request["case"]], self._worker.meet, time.perf_counter
        samples = []
        for _ in range(request["warmup"] + request["iterations"]):
            meet()
            start = clock()
            returned = run()
            samples.append(clock() - start)
            del returned  # freed here, not while the next call is timed
        return samples[request["warmup"] :]


def _make_array(worker: GroupWorker, elements: int) -> Any:
    return np.full(elements, worker.rank + 1, np.float32)


def make_bare_cases(small: Any, large: Sequence[Any]) -> dict[str, Case]:
    """Return cases of the engine with NumPy arrays, in place."""
    engine = importlib.import_module("engine")
    own, copies, average = small.copy(), [each.copy() for each in large], engine.Average
    several = [small.copy() for _ in range(GROUP)]
    return {
        "bare": lambda: engine.allreduce_(own, op=average, name="bare"),
        "bare several": lambda: engine.grouped_allreduce_(several, op=average, name="bare several"),
        "bare group": lambda: engine.grouped_allreduce_(copies, op=average, name="bare group"),
    }


def make_tensorflow_cases(small: Any, large: Sequence[Any]) -> dict[str, Case]:
    """Return cases in eager mode and in a `tf.function`."""
    import tensorflow as tf

    hvd = importlib.import_module("engine.tensorflow")
    x, many, group = tf.constant(small), [tf.constant(small) for _ in range(MANY)], [tf.constant(a) for a in large]

    def average_tensor(tensor: Any, name: str | None) -> Any:
        return hvd.allreduce(tensor, op=hvd.Average, name=name)

    # Use a lambda: `tf.function(tf.identity)` is slower, because of its further arguments.
    empty = tf.function(lambda x: tf.identity(x))
    empty_group = tf.function(lambda *xs: [tf.identity(each) for each in xs])
    named, unnamed = tf.function(lambda x: average_tensor(x, "named")), tf.function(lambda x: average_tensor(x, None))
    separate = tf.function(lambda *xs: [average_tensor(each, f"separate.{k}") for k, each in enumerate(xs)])
    together = tf.function(lambda *xs: hvd.grouped_allreduce(list(xs), op=hvd.Average, name="together"))
    return {
        "empty": lambda: empty(x),
        "named": lambda: named(x),
        "unnamed": lambda: unnamed(x),
        "eager": lambda: average_tensor(x, "eager"),
        "empty many": lambda: empty_group(*many),
        "many": lambda: separate(*many),
        "many in a group": lambda: together(*many),
        "empty group": lambda: empty_group(*group),
        "group": lambda: together(*group),
    }


def make_jax_cases(small: Any, large: Sequence[Any]) -> dict[str, Case]:
    """Return cases in compiled programs, timed until their results are complete."""
    import jax as jax_

    hvd = importlib.import_module("engine.jax")
    x, many = jax_.numpy.asarray(small), [jax_.numpy.array(small) for _ in range(MANY)]
    several, group = [jax_.numpy.array(small) for _ in range(GROUP)], [jax_.numpy.array(a) for a in large]
    wait = jax_.block_until_ready

    def average_tensor(array: Any, name: str) -> Any:
        return hvd.allreduce(array, op=hvd.Average, name=name)

    empty = jax_.jit(lambda x: jax_.numpy.copy(x))
    empty_group = jax_.jit(lambda xs: [jax_.numpy.copy(each) for each in xs])
    one = jax_.jit(lambda x: average_tensor(x, "one"))
    separate = jax_.jit(lambda xs: [average_tensor(each, f"separate.{k}") for k, each in enumerate(xs)])
    together = jax_.jit(lambda xs: hvd.grouped_allreduce(xs, op=hvd.Average, name="together"))
    return {
        "empty": lambda: wait(empty(x)),
        "named": lambda: wait(one(x)),
        "empty many": lambda: wait(empty_group(many)),
        "many": lambda: wait(separate(many)),
        "many in a group": lambda: wait(together(many)),
        "empty several": lambda: wait(empty_group(several)),
        "several in a group": lambda: wait(together(several)),
        "empty group": lambda: wait(empty_group(group)),
        "group": lambda: wait(together(group)),
    }


def make_torch_cases(small: Any, large: Sequence[Any]) -> dict[str, Case]:
    """Return cases in place."""
    import torch as torch_

    torch_.set_num_threads(1)
    hvd = importlib.import_module("engine.torch")
    x, group = torch_.from_numpy(small), [torch_.from_numpy(each.copy()) for each in large]
    return {
        "named": lambda: hvd.allreduce_(x, op=hvd.Average, name="named"),
        "group": lambda: hvd.grouped_allreduce_(group, op=hvd.Average, name="group"),
    }


FRAMEWORKS: dict[str, Callable[[Any, Sequence[Any]], dict[str, Case]]] = {
    "tensorflow": make_tensorflow_cases,
    "jax": make_jax_cases,
    "torch": make_torch_cases,
}


def main() -> None:
    """Join the other ranks and answer requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--framework", choices=FRAMEWORKS, required=True)
    worker = GroupWorker(parser)
    try:
        importlib.import_module("engine").init()
        rank = CallsRank(worker, worker.options.framework)
    except BaseException:
        worker.report_failure()
        raise
    worker.serve({"cases": rank.list_cases, "first": rank.check_first_call, "block": rank.time_block})
    importlib.import_module("engine").shutdown()


if __name__ == "__main__":
    main()
