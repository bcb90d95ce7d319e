"""Comparison of the simulator of `enginerun foresee` with Horovod's published efficiencies; nothing is measured.

A step consists of a model's layers. The forward pass takes a third and the backward pass two thirds of the step time
that was measured on one GPU, divided among layers by their multiplications. A layer's gradients are ready at the end of
its backward pass, and the program waits for all at the end. The sum over the GPUs of a server takes no time.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import environment, records
from benchmarks.common.tables import Table, format_size
from benchmarks.scaling import sensitivity
from benchmarks.scaling.published import BANDWIDTH, BATCH, GPUS, MODELS, Model
from engine.config.config import Config
from engine.foresee.model import Network, Rules, Step, Tensor, predict

FITTED_ON = ("VGG-16", 128)
"""Published figure from which an effective bandwidth is derived."""

BATCHES = (BATCH, BATCH // 2)
"""Images in a batch, of which either may be the published one."""

CLOSE = 0.1
"""Difference of efficiencies up to which a prediction counts as accurate."""


@dataclass(frozen=True)
class ScalingSettings:
    """Assumptions about the network where nothing is published, and the batch."""

    bandwidth: float = BANDWIDTH
    latency: float = 10e-6
    batch: int = BATCH


def make_step(model: Model, batch: int) -> Step:
    """Return a step on one GPU, without communication."""
    seconds = batch / model.images
    layers = model.layers()
    whole = sum(layer.multiplications for layer in layers)
    moment = seconds / 3
    tensors = []
    for layer in reversed(layers):
        moment += 2 / 3 * seconds * layer.multiplications / whole
        tensors += [Tensor(moment, moment, moment, 4 * count) for count in layer.tensors]
    # The last gradient is ready at the end of the step, except for rounding.
    return Step(max(seconds, moment), tuple(tensors), ((seconds, max(seconds, moment)),))


def compute_efficiency(step: Step, servers: int, network: Network) -> float:
    """Return the step time of one GPU divided by that on some servers."""
    usual = Config()
    rules = Rules(usual.fusion_threshold, usual.cycle_time_ms / 1e3, usual.chunk_bytes)
    return step.seconds / predict(step, rules, servers, network).seconds


def fit_bandwidth(step: Step, servers: int, published: float, latency: float) -> float:
    """Find the bandwidth at which a step has the published efficiency, by bisection: efficiency grows with it."""
    low, high = 1e8, 1e12
    while high / low > 1.0001:
        middle = (low * high) ** 0.5
        if compute_efficiency(step, servers, Network(middle, latency)) < published:
            low = middle
        else:
            high = middle
    return low


def run(settings: ScalingSettings) -> Path:
    """Compute, and write `out/scaling.json`."""
    before = environment.record()
    begun = time.perf_counter()
    network = Network(settings.bandwidth, settings.latency)
    steps = {model.name: make_step(model, settings.batch) for model in MODELS}
    halves = {model.name: make_step(model, settings.batch // 2) for model in MODELS}
    known = {model.name: model.efficiency for model in MODELS}
    name, servers = FITTED_ON
    effective = fit_bandwidth(steps[name], servers, known[name][servers], settings.latency)
    results = [
        {
            "model": model.name,
            "parameters": sum(sum(layer.tensors) for layer in model.layers()),
            "step": steps[model.name].seconds,
            "servers": count,
            "published": published,
            "foreseen": compute_efficiency(steps[model.name], count, network),
            "half_batch": compute_efficiency(halves[model.name], count, network),
            "fitted": compute_efficiency(steps[model.name], count, Network(effective, settings.latency)),
        }
        for model in MODELS
        for count, published in model.efficiency.items()
    ]
    studied = sensitivity.study_choices(
        {(model.name, batch): make_step(model, batch) for model in MODELS for batch in BATCHES}
    )
    seconds = round(time.perf_counter() - begun, 1)
    found = {"results": results, "effective_bandwidth": effective, "sensitivity": studied, "seconds": seconds}
    return records.write("scaling", asdict(settings), before, found)


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return the tables of `out/scaling.json`."""
    settings, effective = content["settings"], content["effective_bandwidth"]
    table = Table(
        f"Scaling efficiency foreseen for {settings['bandwidth'] / 1e9:g} Gbit/s beside what Horovod has published, "
        f"servers with {GPUS} GPUs",
        ["model", "parameters", "step", "servers", "published", "foreseen", "error", f"within {100 * CLOSE:.0f} points",
         f"batch {settings['batch'] // 2}", "error", f"at {effective / 1e9:.1f} Gbit/s", "error"],
    )  # fmt: skip
    for row in content["results"]:
        published = row["published"]
        cells = [row["model"], format_size(4 * row["parameters"]), f"{1e3 * row['step']:.0f} ms", str(row["servers"])]
        cells += [_format_share(published), _format_share(row["foreseen"]), _format_points(row["foreseen"] - published)]
        cells.append("pass" if abs(row["foreseen"] - published) <= CLOSE else "miss")
        chosen = (row["model"], row["servers"]) == FITTED_ON
        cells += [_format_share(row["half_batch"]), _format_points(row["half_batch"] - published)]
        cells += [_format_share(row["fitted"]), "chosen so" if chosen else _format_points(row["fitted"] - published)]
        table.rows.append(cells)
    table.note = (
        f"Not measured: published figures beside a simulation. {settings['batch']} images a GPU; "
        f"{1e6 * settings['latency']:.0f} us of latency are assumed; the last columns take the one bandwidth that "
        f"gives {FITTED_ON[0]} on {FITTED_ON[1]} servers its published figure."
    )
    return [table, sensitivity.build_table(content["sensitivity"])]


def _format_share(part: float) -> str:
    return f"{100 * part:.1f} %"


def _format_points(difference: float) -> str:
    return f"{100 * difference:+.1f}"
