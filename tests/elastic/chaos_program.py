"""Training for `tests/elastic/chaos.py`: `chaos_program.py DIRECTORY` trains until there is a file `enough` in it.

A linear model is fitted with the same batch size for any number of ranks, so each step is that of one process, except
for rounding. Each worker writes a line for each step, with its time, world and number.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

import engine
from engine.elastic.samplers import ElasticBatchSampler
from engine.elastic.state import ObjectState
from engine.elastic.worker.run import run

from ..waiting import let_pass

SAMPLES, BATCH, FEATURES = 240, 24, 8
EVERY = 5  # steps between commits
RATE = 0.2
PAUSE = 0.004  # seconds that a step computes


def data() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return inputs and outputs for the fit."""
    drawn = np.random.default_rng(7)
    inputs = drawn.normal(size=(SAMPLES, FEATURES))
    return inputs, inputs @ np.arange(1.0, FEATURES + 1) + 0.1 * drawn.normal(size=SAMPLES)


def gradient(weights: npt.NDArray[np.float64], indices: list[int]) -> npt.NDArray[np.float64]:
    """Return the gradient of a part of a batch, whose loss is divided by the size of the whole batch."""
    inputs, outputs = data()
    taken = inputs[indices]
    result: npt.NDArray[np.float64] = taken.T @ (taken @ weights - outputs[indices]) / BATCH
    return result


def undisturbed(steps: int) -> npt.NDArray[np.float64]:
    """Return the weights after so many steps of one process."""
    sampler = ElasticBatchSampler(range(SAMPLES), BATCH, seed=3, rank=0, size=1)
    weights, made, epoch = np.zeros(FEATURES), 0, 0
    while made < steps:
        sampler.set_epoch(epoch)
        for number, indices in enumerate(sampler):
            weights -= RATE * gradient(weights, indices)
            sampler.record_batch(number)
            made += 1
        epoch += 1
    return weights


@run
def train(state: ObjectState, directory: Path) -> None:
    """Train whole epochs until the file `enough` exists."""
    while True:
        state.sampler.set_epoch(state.epoch)
        for number, indices in enumerate(state.sampler):
            # Sums of gradients travel together with the samples that they contain.
            sent = np.concatenate([gradient(state.weights, indices), np.bincount(indices, minlength=SAMPLES)])
            received = engine.allreduce(sent, op=engine.Sum, name="step")
            state.weights = state.weights - RATE * received[:FEATURES]
            state.seen = state.seen + received[FEATURES:]
            state.sampler.record_batch(number)
            state.step += 1
            with (directory / f"steps.{os.environ['ENGINE_WORKER']}").open("a") as file:
                file.write(f"{time.monotonic():.6f} {state.world} {state.step} {engine.rank()} {engine.size()}\n")
            let_pass(PAUSE)
            if state.step % EVERY == 0:
                state.commit()
        state.epoch += 1
        enough = np.array([float((directory / "enough").exists())])
        if engine.allreduce(enough, op=engine.Max, name="enough")[0]:
            return


def main() -> None:
    directory = Path(sys.argv[1])
    engine.init()
    state = ObjectState(
        weights=np.zeros(FEATURES),
        seen=np.zeros(SAMPLES),
        step=0,
        epoch=0,
        sampler=ElasticBatchSampler(range(SAMPLES), BATCH, seed=3),
    )
    train(state, directory)
    told = {"weights": state.weights, "seen": state.seen, "step": state.step, "epoch": state.epoch}
    np.savez(directory / f"result.{engine.rank()}.npz", **told)


if __name__ == "__main__":
    main()
