"""Worker's program for `tests/elastic/test_run.py`: `run_program.py TASK`; it prints one result on each line.

The directory in `RUN_TEST` has files by which the test delays workers, or follows their progress.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine.elastic.state import ObjectState
from engine.elastic.worker.gate import JobOver
from engine.elastic.worker.run import run
from engine.errors import ConfigError, WorldError

from ..waiting import linger, until_files

STEPS = 60
WORKER = int(os.environ.get("ENGINE_WORKER", "0"))
PLACE = Path(os.environ["RUN_TEST"])


def say(*words: object) -> None:
    print(*words, flush=True)


def reduced(state: ObjectState) -> None:
    """Make a step: each rank contributes 1, so the total shows how many ranks there were in each."""
    state.total += float(engine.allreduce(np.ones(4), op=engine.Sum)[0])
    state.step += 1


def commit_or_wait(state: ObjectState) -> None:
    """Commit at every fifth step; after step 22, between two commits, wait for the test."""
    if state.step % 5 == 0:
        state.commit()
    if state.step == 22:
        (PLACE / f"half.{WORKER}").touch()
        until_files(PLACE / "go")


def steps(state: ObjectState) -> int:
    """Make all steps."""
    while state.step < STEPS:
        reduced(state)
        commit_or_wait(state)
    return state.step


def endless(state: ObjectState) -> int:
    """Step and commit until an interrupt or failure."""
    while True:
        reduced(state)
        state.commit()
        (PLACE / f"half.{WORKER}").touch()


def other_exception(state: ObjectState) -> int:
    """Replace the world's failure by another exception, without the engine's exception as its context."""
    try:
        return steps(state)
    except WorldError:
        pass
    raise ValueError("a loader gives up")


def swallowed(state: ObjectState) -> int:
    """Skip batches whose step raises anything."""
    while state.step < STEPS:
        for _ in range(5):
            try:
                reduced(state)
            except Exception:
                continue
        state.commit()
        if state.step == 20:
            (PLACE / f"half.{WORKER}").touch()
            until_files(PLACE / "go")
    return state.step


def from_a_loader(state: ObjectState) -> int:
    """Reduce in a data loader of torch, whose data set replaces the exception; the loader raises it anew."""
    from torch.utils.data import DataLoader, IterableDataset

    class Steps(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            try:
                yield steps(state)
            except WorldError:
                raise KeyError("no such sample") from None

    return int(next(iter(DataLoader(Steps()))))


def in_a_graph(state: ObjectState, call: str) -> int:
    """Reduce in a compiled function of TensorFlow, which replaces the exception by one of its own."""
    import tensorflow as tf

    def reduce() -> np.float64:
        return np.float64(engine.allreduce(np.ones(4), op=engine.Sum)[0])

    @tf.function
    def step() -> Any:
        return tf.py_function(reduce, [], tf.float64) if call == "py" else tf.numpy_function(reduce, [], tf.float64)

    while state.step < STEPS:
        try:
            state.total += float(step())
        except WorldError:
            raise SystemExit("TensorFlow has passed on what was raised: the test shows nothing") from None
        state.step += 1
        commit_or_wait(state)
    return state.step


def py_function(state: ObjectState) -> int:
    return in_a_graph(state, "py")


def numpy_function(state: ObjectState) -> int:
    return in_a_graph(state, "numpy")


def program_error(state: ObjectState) -> int:
    """Raise an error of the program on worker 1."""
    reduced(state)
    state.commit()
    if WORKER == 1:
        raise ValueError("batch 7 is bad")
    return steps(state)


def nested(state: ObjectState) -> str:
    """Call a wrapped function in another one."""
    reduced(state)
    try:
        run(steps)(state)
    except ConfigError as error:
        return str(error).replace(" ", "_")
    return ""


def ends_late(state: ObjectState) -> int:
    """Return on worker 0, while the others do not end until the test lets them."""
    while state.step < 5:
        reduced(state)
        if state.step < 4:
            state.commit()
    if WORKER != 0 and state.world == 1:
        (PLACE / f"half.{WORKER}").touch()
        until_files(PLACE / "go")
    return state.step


def stay() -> None:
    """Report that this process runs: Python forgets signals that a child receives while it is forked."""
    (PLACE / "child").touch()
    linger()


def forks(state: ObjectState) -> int | None:
    """End a forked child by SIGTERM, and return its exit code."""
    child = multiprocessing.get_context("fork").Process(target=stay, daemon=True)
    child.start()
    until_files(PLACE / "child")
    child.terminate()
    child.join(20)
    state.commit()
    reduced(state)
    return child.exitcode


OTHERS = other_exception, swallowed, from_a_loader, py_function, numpy_function
TASKS = {each.__name__: each for each in (steps, endless, *OTHERS, program_error, nested, ends_late, forks)}


def main() -> None:
    state = ObjectState(step=0, total=0.0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(engine.size())])
    try:
        result = run(TASKS[sys.argv[1]])(state)
    except JobOver as over:
        say("over", over.good, over.why, state.step)
        raise SystemExit(7) from None
    variables = [os.environ[name] for name in ("ENGINE_RANK", "ENGINE_SIZE")]
    say("result", result, state.total, engine.rank(), engine.size(), *variables, *resets)
    if sys.argv[2:] == ["twice"]:
        run(steps)(state)


if __name__ == "__main__":
    main()
