"""Synthetic metrics of a healthy elastic run of four ranks with the tuner, with every family that exists.

A step takes 200 ms at first. The tuner waits for a minute, searches for twelve, finds a setting that takes 160 ms, and
watches. Rank 2 is a little late for a while, too little for an alert.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator

from engine.elastic.causes import Kind
from engine.metrics.definitions import BUCKETS, ERRORS, METRICS, Metric
from engine.metrics.names import LATE_CAUSES, REASONS, STAGES

NAME = "train-4711"
SIZE = 4
STEP = 5.0  # seconds between two scrapes
MINUTES = 30
HOSTS = ("node-1", "node-2")
BYTES = 52_000_000  # of gradients in a step
TENSORS = 160

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, str, Labels]  # family, series, labels


class Run:
    """State of the run, advanced from scrape to scrape."""

    def __init__(self, start: float, seed: int = 5) -> None:
        self.now = self.start = start
        self.random = random.Random(seed)
        self.values: dict[Key, float] = defaultdict(float)
        self.best = self.default = 0.0
        self.knobs = {
            "fusion_threshold_bytes": 64 << 20, "cycle_time_seconds": 1e-3, "chunk_bytes": 1 << 20, "stores": 2,
            "compression": 0, "sockets_per_lane": 1,
        }  # fmt: skip
        self.found = dict(self.knobs)
        self.trials = 0
        self.step_time = 0.2
        self._constants()

    def _set(self, name: str, value: float, /, **labels: object) -> None:
        self._key(name, name, labels, value, False)

    def _add(self, name: str, value: float, /, **labels: object) -> None:
        self._key(name, name, labels, value, True)

    def _observe(self, name: str, value: float, times: float, /, **labels: object) -> None:
        """Add that many observations of one value; a histogram spreads them over two buckets."""
        metric = METRICS[name]
        self._key(name, f"{name}_sum", labels, value * times, True)
        self._key(name, f"{name}_count", labels, times, True)
        if metric.kind == "histogram":
            for bound in (*BUCKETS, math.inf):
                share = 1.0 if bound >= 2 * value else 0.7 if bound >= value else 0.0
                self._key(
                    name,
                    f"{name}_bucket",
                    {**labels, "le": "+Inf" if bound == math.inf else bound},
                    times * share,
                    True,
                )

    def _key(self, family: str, series: str, labels: dict[str, object], value: float, adds: bool) -> None:
        metric = METRICS[family]
        assert set(labels) - {"le"} == set(metric.all_labels) - {"run"}, f"{series} {labels}"
        key = (family, series, (("run", NAME), *((label, str(of)) for label, of in labels.items())))
        self.values[key] = value + (self.values[key] if adds else 0)

    def _constants(self) -> None:
        self._set("engine_job_active", 1)
        for name, value in (
            ("size", SIZE),
            ("min_size", 2),
            ("max_size", SIZE),
            ("cooling_hosts", 0),
            ("resetting", 0),
        ):
            self._set(f"engine_elastic_{name}", value)
        self._set("engine_elastic_worlds_total", 2)
        self._set("engine_elastic_reset_seconds_total", 1.5)
        self._set("engine_elastic_slow_workers_total", 0)
        for cause in Kind:
            self._set("engine_elastic_resets_total", cause is Kind.NEWCOMERS, cause=cause.value)
        self._set("engine_unreadable_pages", 0)
        for rank in range(SIZE):
            self._set(
                "engine_rank_info", 1, rank=rank, host=HOSTS[rank // 2], local_rank=rank % 2, pid=4712 + rank,
                version="0.1.0", transport="shared-memory, tcp",
            )  # fmt: skip
            self._set("engine_rank_up", 1, rank=rank)
            self._set("engine_world_size", SIZE, rank=rank)
            self._set("engine_start_timestamp_seconds", self.start, rank=rank)
            for name in ("engine_resets_total", "engine_stall_warnings_total", "engine_stalled_tensors"):
                self._set(name, 0, rank=rank)
            for kind in ERRORS:
                self._set("engine_errors_total", 0, rank=rank, kind=kind)
        for reason in REASONS:
            self._set("engine_cycles_total", 0, rank=0, reason=reason)

    def advance(self) -> None:
        """Advance to the next scrape."""
        self.now += STEP
        age = self.now - self.start
        self._tune(age)
        steps = STEP / self.step_time
        noise = self.random.gauss
        batches = max(1, BYTES / self.knobs["fusion_threshold_bytes"] + 1)
        took = 0.06 * self.step_time / 0.2 / batches
        for rank in range(SIZE):
            lag = abs(noise(0.0004, 0.0003)) + 0.00005
            if rank == 2:
                lag += 0.011 * math.exp(-(((age - 1200) / 160) ** 2))
            of = {"rank": rank}
            reduced = {**of, "op": "allreduce"}
            self._observe("engine_step_duration_seconds", self.step_time * noise(1, 0.002), steps, **of)
            self._observe("engine_arrival_lag_seconds", lag, steps * batches, **of)
            self._observe(
                "engine_queue_duration_seconds", 0.012 - lag / 4 + abs(noise(0, 0.001)), steps * batches, **of
            )
            self._observe("engine_collective_duration_seconds", took * noise(1, 0.02), steps * batches, **reduced)
            self._observe("engine_collective_duration_seconds", 0.0002, STEP / 10, **{**of, "op": "broadcast"})
            self._add("engine_collectives_total", steps * batches, **reduced, algorithm="two-shot")
            self._add("engine_collectives_total", STEP / 10, **of, op="broadcast", algorithm="one-shot")
            self._add("engine_collective_bytes_total", steps * BYTES, **reduced, algorithm="two-shot")
            self._add("engine_collective_bytes_total", 4000, **of, op="broadcast", algorithm="one-shot")
            self._add("engine_collective_seconds_total", steps * batches * took, **reduced, algorithm="two-shot")
            self._add("engine_collective_seconds_total", STEP / 10 * 0.0002, **of, op="broadcast", algorithm="one-shot")
            self._add("engine_collective_tensors_total", steps * TENSORS, **reduced)
            self._add("engine_collective_tensors_total", STEP / 10, **of, op="broadcast")
            self._add("engine_blocked_seconds_total", STEP * (0.25 - 2 * lag + abs(noise(0, 0.01))), **of)
            self._add("engine_exposed_seconds_total", steps * max(0, self.step_time - 0.15) * noise(1, 0.02), **of)
            for cause in LATE_CAUSES:
                share = 0.3 if cause == "rank" else (rank + 1) * 0.002
                self._add("engine_late_steps_total", steps * share / 5, **of, cause=cause)
                self._add("engine_late_seconds_total", STEP * share, **of, cause=cause)
            self._add("engine_network_sent_bytes_total", steps * BYTES * 0.75, **of)
            self._add("engine_network_received_bytes_total", steps * BYTES * 0.75, **of)
            self._add("engine_crossing_seconds_total", STEP * abs(noise(0.05, 0.01)), **of, peer=HOSTS[1 - rank // 2])
            for group, every in ((f"tp ({3 + rank // 2})", 1), ("dp (2)", 8)):
                of_group = {**of, "group": group}
                self._add("engine_group_collectives_total", steps * batches / every, **of_group)
                self._add("engine_group_bytes_total", steps * BYTES / every, **of_group)
                self._add("engine_group_seconds_total", steps * batches * took / every, **of_group)
                self._set("engine_group_pending_tensors", rank == 2, **of_group)
            for reached in ("handed_over", "enqueued", "done"):
                self._add("engine_device_entries_total", steps * batches, **of, reached=reached)
            self._add("engine_device_bytes_total", steps * BYTES, **of)
            self._add("engine_device_sampled_bytes_total", steps * BYTES / 4, **of)
            for stage, share in zip(STAGES, (0.1, 0.1, 0.6, 0.1, 0.3), strict=True):
                self._observe("engine_device_duration_seconds", took * share, steps * batches / 4, **of, stage=stage)
            self._add("engine_fused_bytes_total", steps * BYTES, **of)
            self._add(
                "engine_fusion_capacity_bytes_total", steps * batches * self.knobs["fusion_threshold_bytes"], **of
            )
            self._add("engine_submissions_total", steps * TENSORS, **of)
            self._set("engine_cache_misses_total", TENSORS, **of)
            self._set("engine_pending_tensors", self.random.randrange(0, 60), **of)
            self._set("engine_last_collective_timestamp_seconds", self.now - self.step_time / 3, **of)
        self._observe("engine_negotiation_duration_seconds", 0.004 + abs(noise(0, 0.0005)), steps * batches, rank=0)
        for reason, share in zip(REASONS, (0.5, 0.3, 0.0, 0.2, 0.0), strict=True):
            self._add("engine_cycles_total", steps * batches * share, rank=0, reason=reason)

    def _tune(self, age: float) -> None:
        phase = 1 if age < 60 else 2 if age < 780 else 3
        trial = min(24, int((age - 60) // 30)) if phase > 1 else 0
        if trial > self.trials or (phase > 1 and not self.default):
            self.trials = trial
            if trial:
                self.knobs["fusion_threshold_bytes"] = 2 ** self.random.randrange(20, 28)
                self.knobs["cycle_time_seconds"] = 10 ** self.random.uniform(-4, -2)
                self.knobs["chunk_bytes"] = 2 ** self.random.randrange(16, 23)
                self.knobs["stores"] = self.random.randrange(3)
            if phase == 3:
                self.knobs = dict(self.found)
            off = abs(math.log2(self.knobs["fusion_threshold_bytes"]) - 23) / 5
            off += abs(math.log10(self.knobs["cycle_time_seconds"]) + 3.3) / 2
            self.step_time = 0.158 + 0.025 * off
            score = self.step_time * self.random.gauss(1, 0.003)
            self.default = self.default or score
            if not self.best or score < self.best:
                self.best, self.found = score, dict(self.knobs)
            self._set("engine_autotune_score_seconds", score, rank=0)
            self._set("engine_autotune_last_change_timestamp_seconds", self.now - 1, rank=0)
            self._add("engine_autotune_changes_total", 1, rank=0)
            self._add("engine_knob_version", 1, rank=0)
        elif not self.default:
            for name in ("score_seconds", "last_change_timestamp_seconds", "changes_total"):
                self._set(f"engine_autotune_{name}", 0, rank=0)
            self._set("engine_knob_version", 0, rank=0)
        self._set("engine_autotune_phase", phase, rank=0)
        self._set("engine_autotune_searches_total", float(phase > 1), rank=0)
        self._set("engine_autotune_trials_total", trial, rank=0)
        self._set("engine_autotune_default_score_seconds", self.default, rank=0)
        self._set("engine_autotune_best_score_seconds", self.best, rank=0)
        for name, value in self.knobs.items():
            self._set("engine_knob", value, rank=0, name=name)


def _head(metric: Metric, openmetrics: bool) -> Iterator[str]:
    name = metric.name.removesuffix("_total") if openmetrics else metric.name
    kind = "gauge" if metric.kind == "info" else metric.kind
    yield f"# HELP {name} {metric.about}"
    yield f"# TYPE {name} {kind}"


def _line(series: str, labels: Labels, value: float, time: str = "") -> str:
    inner = ",".join(f'{name}="{of}"' for name, of in labels)
    return f"{series}{{{inner}}} {float(value)!r}{time}"


def history(start: float, minutes: float = MINUTES) -> str:
    """Whole run in OpenMetrics format, with timestamps."""
    run = Run(start)
    told: dict[str, list[str]] = {name: list(_head(metric, True)) for name, metric in METRICS.items()}
    while run.now < start + 60 * minutes:
        run.advance()
        for (family, series, labels), value in run.values.items():
            told[family].append(_line(series, labels, value, f" {run.now}"))
    return "\n".join([*(line for lines in told.values() for line in lines), "# EOF\n"])


def exposition() -> str:
    """Exposition of an endpoint after ten minutes, in Prometheus' text format."""
    run = Run(1_700_000_000.0)
    while run.now < run.start + 600:
        run.advance()
    lines = []
    for name, metric in METRICS.items():
        lines += _head(metric, False)
        lines += [_line(series, labels, value) for (of, series, labels), value in run.values.items() if of == name]
    return "\n".join(lines) + "\n"
