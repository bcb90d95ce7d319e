"""Sensitivity of the scaling that is foreseen for Horovod's jobs to what their publications leave open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from statistics import NormalDist
from typing import Any

from benchmarks.common.tables import Table
from benchmarks.scaling.published import BANDWIDTH, BATCH, GPUS, MODELS, Model
from engine.foresee.model import Network, Rules, Step, predict

CLOSE = 0.1
"""Difference of efficiencies up to which a figure counts as reproduced."""


PCIE = 0.75 / 48e9
"""Seconds for a bit within a server of 4 GPUs, 3/4 of which cross a bus of 6 GB/s."""


@dataclass(frozen=True)
class Assumptions:
    """One choice of what is not published; the defaults are plausible for RDMA."""

    batch: int = BATCH
    """Images on a GPU in a step."""
    reached: float = 22e9
    """Bits per second that messages reach on the link of 25 Gbit/s."""
    hop: float = 5e-6
    """Seconds of a hop of the ring, which takes 2 (N - 1) of them for N GPUs, whatever it carries."""
    spread: float = 0.02
    """Standard deviation of the computing time of a GPU's steps, by its mean; each step waits for the slowest GPU."""
    server: float = 0.0
    """Seconds for a bit within a server, if it does not travel while others cross the link; 0: all at once."""
    cycle: float = 5e-3
    """Seconds for which tensors wait to be fused."""
    fusion: int = 64 << 20
    """Bytes at which a fused buffer is full."""


PLAUSIBLE = Assumptions()
CHOICES = {
    "plausible: batch of 64, 22 Gbit/s, hop of 5 us, steps vary by 2 %, cycle of 5 ms, fusion of 64 MiB": PLAUSIBLE,
    "batch of 32": replace(PLAUSIBLE, batch=32),
    "link reaches 25 Gbit/s": replace(PLAUSIBLE, reached=BANDWIDTH),
    "link reaches 18 Gbit/s": replace(PLAUSIBLE, reached=18e9),
    "link reaches 12.5 Gbit/s, as TCP may": replace(PLAUSIBLE, reached=12.5e9),
    "a server's bus of 6 GB/s in turn with the link": replace(PLAUSIBLE, server=PCIE),
    "hop of 0 us": replace(PLAUSIBLE, hop=0.0),
    "hop of 50 us, as TCP's": replace(PLAUSIBLE, hop=50e-6),
    "steps do not vary": replace(PLAUSIBLE, spread=0.0),
    "steps vary by 4 %": replace(PLAUSIBLE, spread=0.04),
    "cycle of 1 ms": replace(PLAUSIBLE, cycle=1e-3),
    "cycle of 50 ms": replace(PLAUSIBLE, cycle=50e-3),
    "no fusion": replace(PLAUSIBLE, fusion=0),
}
"""Assumptions by name: a plausible choice, then each quantity of it at other plausible values."""

GRID: dict[str, tuple[float, ...]] = {
    "batch": (BATCH, BATCH // 2),
    "reached": (25e9, 22e9, 20e9, 18e9, 15e9, 12.5e9),
    "hop": (0.0, 5e-6, 20e-6, 50e-6),
    "spread": (0.0, 0.01, 0.02, 0.03, 0.04),
    "server": (0.0, PCIE),
}
"""Values of which all combinations are tried."""


def foresee_efficiency(step: Step, servers: int, chosen: Assumptions) -> float:
    """Return the step time of one GPU divided by that on some servers."""
    gpus = GPUS * servers
    # Of S bytes a ring of N GPUs carries 2 S (N - 1) / N over each link, and the model's exchange of H servers
    # 2 S (H - 1) / H. The model has four trips for an entry, two of them before it begins.
    more = (gpus - 1) / gpus / ((servers - 1) / servers)
    seconds = more * (1 / chosen.reached + chosen.server)
    network = Network(1 / seconds, chosen.hop * (gpus - 1) / 2)
    rules = Rules(chosen.fusion, chosen.cycle, chunk_bytes=1 << 40)
    slowest = NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))  # expected largest of so many, after Blom
    return step.seconds / (predict(step, rules, servers, network).seconds + step.seconds * chosen.spread * slowest)


def list_published() -> Iterator[tuple[Model, int, float]]:
    """Yield the model, the number of servers and the efficiency of each published figure."""
    for model in MODELS:
        for servers, efficiency in model.efficiency.items():
            yield model, servers, efficiency


def foresee_published(chosen: Assumptions, steps: dict[tuple[str, int], Step]) -> list[float]:
    """Return the foreseen efficiency for each published figure; `steps` has those of one GPU, by model and batch."""
    return [foresee_efficiency(steps[model.name, chosen.batch], count, chosen) for model, count, _ in list_published()]


def find_worst_error(foreseen: list[float]) -> float:
    """Return the largest difference from a published figure, with its sign."""
    errors = [found - known for found, (_, _, known) in zip(foreseen, list_published(), strict=True)]
    return max(errors, key=abs)


def study_choices(steps: dict[tuple[str, int], Step]) -> dict[str, Any]:
    """Compute efficiencies for each of `CHOICES`, and count the combinations of `GRID` that reproduce all figures."""
    choices = {name: foresee_published(chosen, steps) for name, chosen in CHOICES.items()}
    grid = [Assumptions(**dict(zip(GRID, values, strict=True))) for values in product(*GRID.values())]
    close = [chosen for chosen in grid if abs(find_worst_error(foresee_published(chosen, steps))) <= CLOSE]
    ranges = {name: sorted({getattr(chosen, name) for chosen in close}) for name in GRID}
    return {"choices": choices, "combinations": len(grid), "close": len(close), "close_with": ranges}


def build_table(content: dict[str, Any]) -> Table:
    """Return the table of what `study_choices` has found."""
    published = list(list_published())
    table = Table(
        "Efficiency foreseen for Horovod's jobs by what is not published, in per cent",
        ["assumed", *(f"{model.name}, {servers}" for model, servers, _ in published), "worst, points"],
    )
    table.rows.append(["published", *(f"{100 * efficiency:.1f}" for _, _, efficiency in published), ""])
    for name, foreseen in content["choices"].items():
        worst = find_worst_error(foreseen)
        verdict = "pass" if abs(worst) <= CLOSE else "miss"
        table.rows.append([name, *(f"{100 * each:.1f}" for each in foreseen), f"{100 * worst:+.1f} {verdict}"])
    with_these = content["close_with"]
    table.note = (
        f"Not measured. The number after a model is that of servers with {GPUS} GPUs. Rows after the first change one "
        f"quantity. Of {content['combinations']} combinations of plausible values {content['close']} put all "
        f"{len(published)} figures within {100 * CLOSE:.0f} points: batches of "
        f"{', '.join(map(str, with_these['batch']))}, {_format_list(with_these['reached'], 1e-9)} Gbit/s, hops of "
        f"{_format_list(with_these['hop'], 1e6)} us, steps that vary by {_format_list(with_these['spread'], 100)} %."
    )
    return table


def _format_list(values: list[float], factor: float) -> str:
    return ", ".join(f"{factor * value:g}" for value in values)
