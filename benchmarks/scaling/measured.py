"""Comparison of the simulator of `enginerun foresee` with real steps, on namespaces of this machine as hosts.

Models, batches and network are those of the published figures, with every size and the bandwidth divided by one number.
It is smaller where less travels, or else the engine's own messages, which nothing divides, would be most of it. So a
step has the same shape and length, and two processors suffice for eight hosts. Ranks sleep instead of computing. The
steps of one host are recorded, and predicted for more hosts: as recorded, with gradients as fp8, and with local steps.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from benchmarks.common import binding, environment, progress, records
from benchmarks.common.processes import Group
from benchmarks.common.tables import Table, format_size
from benchmarks.hosts.contenders import ContenderVariant, HostContender
from benchmarks.hosts.places import CABLES, HostPlaces, create_hosts
from benchmarks.scaling.published import BANDWIDTH, BATCH, MODELS, Model
from benchmarks.scaling.run import make_step
from engine.foresee.command import Variant, predict_steps
from engine.foresee.model import Network, Prediction
from engine.foresee.recorded import Recorded, choose_steps
from engine.foresee.variants import LocalSteps
from engine.trace.reading import Recording, read

WORLDS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2))
"""Numbers of hosts, and of ranks on each. The world of one host, which is recorded, precedes those of several."""

VARIANTS = {
    "gradients": Variant(),
    "gradients, fp8": Variant("fp8"),
    "4 local steps": Variant("none", LocalSteps(4)),
    "4 local steps, fp8, 2 fragments, delay 1": Variant("fp8", LocalSteps(4, 2, 1)),
}
"""Jobs by name: with averaged gradients as they are and as fp8, and with local steps."""

CLOSE = 0.1
"""Relative error of a step up to which a prediction counts as accurate."""


@dataclass(frozen=True)
class MeasuredSettings:
    """Worlds, models and networks to measure."""

    models: tuple[str, ...] = tuple(model.name for model in MODELS)
    worlds: tuple[tuple[int, int], ...] = WORLDS
    bandwidths: tuple[float, ...] = (BANDWIDTH, 10e9)
    """Bits per second of a host's link, before the division by `scale`, for gradients as they are."""
    slow: float = 2.5e9
    """The same for other variants, so that what they send is not all hidden."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    scale: int = 200
    slow_scale: int = 50
    """Divisors of sizes and bandwidths, for gradients as they are and for other variants."""
    latency: float = 100e-6
    """Assumed seconds of one trip: a wake-up on a busy machine."""
    chunk_bytes: int = 64 << 10
    """Chunk size of the engine, small enough for several chunks per entry."""
    steps: int = 6
    periods: int = 3
    """Synchronisations of a parameter that are measured with local steps."""

    def list_links(self, hosts: int) -> list[tuple[str, float, int]]:
        """Return variants, bandwidths and divisors to measure on so many hosts."""
        links: list[tuple[str, float, int]] = []
        for name in self.variants:
            if name == "gradients":
                links += [(name, bandwidth, self.scale) for bandwidth in self.bandwidths]
            else:
                links.append((name, self.slow, self.slow_scale))
        if hosts > 1:
            return links
        return [("gradients", math.inf, scale) for scale in dict.fromkeys(scale for _, _, scale in links)]


def run(settings: MeasuredSettings, console: Console) -> Path:
    """Measure, and write `out/scaling-measured.json`."""
    before = environment.record()
    begun = time.perf_counter()
    models = [model for model in MODELS if model.name in settings.models]
    rows: list[dict[str, Any]] = []
    told: dict[tuple[str, int, int], Recorded] = {}
    wanted = dict.fromkeys(bandwidth / scale for _, bandwidth, scale in settings.list_links(2))
    reached = {bandwidth: _measure_bandwidth(bandwidth) for bandwidth in wanted}
    count = sum(len(models) * len(settings.list_links(hosts)) for hosts, _ in settings.worlds)
    with progress.show_progress(console, "hosts", count) as advance:
        for hosts, per_host in settings.worlds:
            with _start_job(hosts, per_host, settings) as (places, group):
                for name, bandwidth, scale in settings.list_links(hosts):
                    if math.isfinite(bandwidth):
                        places.limit_bandwidth(bandwidth / scale)
                    network = Network(reached.get(bandwidth / scale, math.inf), settings.latency)
                    for model in models:
                        key = model.name, per_host, scale
                        seconds, sent, recording = _take_steps(settings, group, places, model, VARIANTS[name], scale)
                        if hosts == 1:
                            told[key] = choose_steps(recording)
                        foreseen = _predict_steps(told[key], hosts, network, VARIANTS[name])
                        row = _make_row(model, hosts, per_host, bandwidth, seconds, sent, foreseen)
                        rows.append({"variant": name, "scale": scale, **row, "load": os.getloadavg()[0]})
                        advance(f"{hosts} x {per_host}, {model.name}, {name}")
    results = {
        "results": rows,
        "reached": list(reached.items()),
        "seconds": round(time.perf_counter() - begun, 1),
    }
    return records.write("scaling-measured", asdict(settings), before, results)


@contextlib.contextmanager
def _start_job(hosts: int, per_host: int, settings: MeasuredSettings) -> Iterator[tuple[HostPlaces, Group]]:
    with create_hosts(hosts, per_host, CABLES["plain"]) as places:
        name = f"scaling-{hosts}x{per_host}"
        module, variables = "benchmarks.scaling.worker", {"ENGINE_CHUNK_BYTES": str(settings.chunk_bytes)}
        with Group(name, places.ranks, module, (), "engine", binding.list_processors(), variables, places) as group:
            yield places, group


def _measure_bandwidth(bandwidth: float) -> float:
    """Return the bits per second that bare sockets reach over a link in both directions at once.

    The fastest of some calls counts, since other programs on the machine only make them slower.
    """
    with create_hosts(2, 1, CABLES["plain"]) as places:
        places.limit_bandwidth(bandwidth)
        contender = HostContender(ContenderVariant("sockets", "sockets"), places)
        try:
            nbytes = int(bandwidth / 8 * 0.5) // 4 * 4
            return 8 * nbytes / min(contender.time_block("private", nbytes, 1, 5))
        finally:
            contender.close()


def _take_steps(
    settings: MeasuredSettings, group: Group, places: HostPlaces, model: Model, variant: Variant, scale: int
) -> tuple[float, float, list[Recording]]:
    """Take steps of a model; return the seconds and the bytes that a host sends in one, and the recording, if any."""
    step = make_step(model, BATCH)
    request = {
        "do": "steps" if variant.local is None else "local steps",
        "moments": [tensor.ready for tensor in step.tensors],
        "bytes": [int(tensor.nbytes) // scale for tensor in step.tensors],
        "seconds": step.seconds,
        "compression": variant.compression or "none",
        "steps": settings.steps,
        "periods": settings.periods,
        "options": None if variant.local is None else asdict(variant.local),
    }
    count = settings.steps + 1 if variant.local is None else (settings.periods + 2) * variant.local.every
    with TemporaryDirectory(prefix="benchmark-") as folder:
        request["timeline"] = folder
        before = places.read_sent_bytes()
        answers = group.ask_ranks(request)
        sent = [now - earlier for earlier, now in zip(before, places.read_sent_bytes(), strict=True)]
        recording = read([Path(folder)], []) if variant.local is None else []
    seconds = statistics.fmean(statistics.median(each) for each in answers)
    return seconds, statistics.fmean(sent) / count, recording


def _predict_steps(told: Recorded, hosts: int, network: Network, variant: Variant) -> Prediction:
    """Predict the recorded steps, and return the median, as for the measurements."""
    found = predict_steps(told, told.rules, hosts, network, variant)
    medians = (statistics.median(getattr(each, name) for each in found) for name in ("seconds", "busy", "nbytes"))
    return Prediction(hosts, *medians)


def _make_row(
    model: Model, hosts: int, per_host: int, bandwidth: float, seconds: float, sent: float, foreseen: Prediction
) -> dict[str, Any]:
    return {
        "model": model.name,
        "hosts": hosts,
        "per_host": per_host,
        "bandwidth": bandwidth if hosts > 1 else None,
        "seconds": seconds,
        "sent": sent,
        "foreseen": foreseen.seconds,
        "foreseen_bytes": foreseen.nbytes,
    }


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return the table of `out/scaling-measured.json`."""
    settings = content["settings"]
    table = Table(
        "Steps foreseen and measured, sizes and bandwidths divided",
        ["model", "job", "link", "by", "hosts x ranks", "measured", "foreseen", "error", f"within {100 * CLOSE:.0f} %",
         "efficiency", "foreseen", "a host sends", "foreseen"],
        left=("job", "link"),
    )  # fmt: skip
    alone = {(row["model"], row["per_host"], row["scale"]): row for row in content["results"] if row["hosts"] == 1}
    several = [row for row in content["results"] if row["hosts"] > 1]
    order = {name: place for place, name in enumerate((*settings["models"], *VARIANTS))}
    for row in sorted(several, key=lambda row: (order[row["model"]], order[row["variant"]], -row["bandwidth"])):
        one = alone[row["model"], row["per_host"], row["scale"]]
        error = row["foreseen"] / row["seconds"] - 1
        cells = [
            row["model"],
            row["variant"],
            f"{row['bandwidth'] / 1e9:g} Gbit/s",
            str(row["scale"]),
            f"{row['hosts']} x {row['per_host']}",
        ]
        cells += [f"{1e3 * row['seconds']:.0f} ms", f"{1e3 * row['foreseen']:.0f} ms", f"{100 * error:+.1f} %"]
        cells.append("pass" if abs(error) <= CLOSE else "miss")
        cells += [f"{100 * one['seconds'] / row['seconds']:.1f} %", f"{100 * one['foreseen'] / row['foreseen']:.1f} %"]
        table.rows.append([*cells, format_size(round(row["sent"])), format_size(round(row["foreseen_bytes"]))])
    reached = ", ".join(f"{found / 1e6:.1f} of {given / 1e6:g} Mbit/s" for given, found in content["reached"])
    table.note = (
        f"Foreseen for what bare sockets reached on two of the hosts: {reached}. Hosts are namespaces of one machine, "
        "whose links are limited; where the models compute, ranks sleep. What a "
        f"host sends is counted by its interface, with headers. {environment.describe(content['environment'])}"
    )
    return [table]
