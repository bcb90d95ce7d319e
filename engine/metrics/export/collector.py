"""Collector that turns pages of counters into Prometheus families. Needs prometheus_client: import it on export."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from ... import __version__
from .. import definitions, page
from ..elastic_job import ElasticJob
from ..knobs import GAUGES
from ..page import PageError, Snapshot
from .encoding import OPENMETRICS, PLAIN, Encoder
from .rank_pages import Member

CLOCKS_APART = 0.05  # seconds by which two readings of the clocks must differ to count as a clock step, not noise

FAMILIES: dict[str, type[Metric]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "summary": SummaryMetricFamily,
    "info": InfoMetricFamily,
}


@dataclass(frozen=True)
class RankReading:
    """State of one rank at one moment."""

    rank: int
    up: bool  # whether the rank's process runs
    snapshot: Snapshot | None  # contents of the page; None until the rank's engine has started
    offset: float  # seconds to add to CLOCK_MONOTONIC to get unix time
    host: str
    version: str
    peers: Mapping[int, str]  # names of hosts by number, as far as the pages read here contain them


# A series: the values of its labels besides `run` and `rank`, and the further arguments of `add_metric`.
Series = tuple[tuple[str, ...], tuple[object, ...]]
Reader = Callable[[RankReading, Snapshot], Iterable[Series]]


def merge_buckets(counts: Sequence[int]) -> list[tuple[str, int]]:
    """Merge the `page.DURATIONS` buckets of a page into the exported cumulative buckets.

    Page bucket k counts durations below 2**k ns. Returns pairs of an upper bound in seconds and the number of durations
    up to it; `+Inf` comes last.
    """
    found, seen, total = [], 0, 0
    for power, bound in _POWERS:
        total += sum(counts[seen : power + 1])
        seen = power + 1
        found.append((bound, total))
    return [*found, ("+Inf", total + sum(counts[seen:]))]


_POWERS = [(round(bound * 1e9).bit_length() - 1, repr(bound)) for bound in definitions.BUCKETS]


class Exporter(Collector):
    """Collector of the metrics of a run's ranks on this host.

    `say` logs a line, once for each page that cannot be read. `active` returns whether the job runs. `elastic` returns
    the state of an elastic job, where the label `rank` is a slot number; None for other jobs, and while an elastic job
    starts.
    """

    def __init__(
        self,
        run: str,
        members: Sequence[Member],
        say: Callable[[str], None],
        active: Callable[[], bool] = lambda: True,
        elastic: Callable[[], ElasticJob | None] = lambda: None,
    ) -> None:
        self._run = run
        self._members = members
        self._say = say
        self._active = active
        self._elastic = elastic
        self._encoder = Encoder()
        self._said: set[tuple[int, str]] = set()
        self._lock = threading.Lock()
        self._offset = time.time() - time.monotonic()
        self._host = socket.gethostname()
        self._version = __version__

    def encode_metrics(self, accept: str = "") -> tuple[bytes, str]:
        """Encode all metrics; return the body and its content type.

        `accept` is the request's `Accept` header: OpenMetrics if it names that format, else the text format.
        """
        with self._lock:  # a scrape is work for one processor, and ranks want the others
            openmetrics = "application/openmetrics-text" in accept
            return self._encoder.encode(self.collect(), openmetrics), OPENMETRICS if openmetrics else PLAIN

    def collect_all(self) -> list[Metric]:
        """Return all families of this moment; may be called from any thread."""
        with self._lock:
            return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        """Yield the families, in the order of their definitions."""
        readings, unreadable = self._read()
        job = self._elastic()
        leader = 0 if job is None else next((slot for slot, rank in job.ranks.items() if rank == 0), None)
        hosts = {
            "engine_job_active": float(self._active()),
            "engine_unreadable_pages": float(unreadable),
        }
        for definition in definitions.METRICS.values():
            family = FAMILIES[definition.kind](
                definition.name.removesuffix("_info"), definition.about, labels=definition.all_labels
            )  # type: ignore[call-arg]
            if definition.scope == "host":
                family.add_metric([self._run], hosts[definition.name])  # type: ignore[attr-defined]
            elif definition.scope == "elastic":
                for labels, value in [] if job is None else _read_elastic(job, definition):
                    family.add_metric([self._run, *labels], value)  # type: ignore[attr-defined]
            else:
                self._add_series(family, definition, readings, leader)
            if family.samples:
                yield family

    def _add_series(
        self, family: Metric, definition: definitions.Metric, readings: Sequence[RankReading], leader: int | None
    ) -> None:
        """Add the series of every rank that has the metric."""
        read = READERS[definition.name]
        for reading in readings:
            if definition.scope in ("leader", "tuner") and reading.rank != leader:
                continue
            snapshot = reading.snapshot or _NOTHING
            if reading.snapshot is None and definition.name != "engine_rank_up":
                continue
            if definition.scope == "tuner" and snapshot.phase == "off":
                continue
            if definition.scope == "gpu" and not snapshot.on_gpu:
                continue
            if definition.scope == "far" and not snapshot.far:
                continue
            for labels, values in read(reading, snapshot):
                family.add_metric([self._run, str(reading.rank), *labels], *values)  # type: ignore[attr-defined]

    def _read(self) -> tuple[list[RankReading], int]:
        """Read all pages, and count those that cannot be read."""
        offset = time.time() - time.monotonic()
        if abs(offset - self._offset) > CLOCKS_APART:
            self._offset = offset
        found: list[tuple[int, bool, Snapshot | None]] = []
        unreadable = 0
        for member in self._members:
            try:
                source = member.source()
                snapshot = None if source is None else page.read(source)
            except PageError as error:
                unreadable += 1
                self._tell(member.rank, str(error))
                continue
            if snapshot is not None and snapshot.state == "new":
                snapshot = None
            found.append((member.rank, member.up(snapshot), snapshot))
        peers = {each["host"]: each.host for _, _, each in found if each is not None and each.far and each.host}
        readings = [
            RankReading(rank, up, each, self._offset, self._host_of(each), self._version, peers)
            for rank, up, each in found
        ]
        return readings, unreadable

    def _host_of(self, snapshot: Snapshot | None) -> str:
        """Return the host's name from the rank's page, or this host's name if the page has none."""
        return snapshot.host if snapshot is not None and snapshot.far and snapshot.host else self._host

    def _tell(self, rank: int, problem: str) -> None:
        if (rank, problem) not in self._said:
            self._said.add((rank, problem))
            self._say(f"metrics: rank {rank} is left out, its page of counters {problem}")


_NOTHING = Snapshot({name: [0] * words for name, words in page.EXPECTED.items()})


def _make_field_reader(field: str, unit: float = 1.0) -> Reader:
    """Return a reader of a one-word field."""
    return lambda _, snapshot: [((), (snapshot[field] / unit,))]


def _make_known_reader(field: str, unit: float) -> Reader:
    """Return a reader of a one-word field in which 0 means that there is no value yet."""
    return lambda _, snapshot: [((), (snapshot[field] / unit,))] if snapshot[field] else []


def _make_summary_reader(count: str, nanoseconds: str) -> Reader:
    return lambda _, snapshot: [((), (snapshot[count], snapshot[nanoseconds] / 1e9))]


def _is_device(snapshot: Snapshot, number: int) -> bool:
    """Return whether the GPU executes the collectives with this number; their durations are only sampled there."""
    algorithms = snapshot.names["algorithms"]
    return algorithms[number % len(algorithms)] == "device"


def _by_algorithm(field: str, unit: float = 1.0) -> Reader:
    def read(_: RankReading, snapshot: Snapshot) -> Iterator[Series]:
        for number, times in enumerate(snapshot.fields["collectives"]):
            if times and not (field == "collective_ns" and _is_device(snapshot, number)):
                operation, algorithm = divmod(number, len(snapshot.names["algorithms"]))
                labels = (snapshot.names["operations"][operation], snapshot.names["algorithms"][algorithm])
                yield labels, (snapshot.fields[field][number] / unit,)

    return read


def _read_tensors(_: RankReading, snapshot: Snapshot) -> Iterator[Series]:
    for operation, tensors in zip(snapshot.names["operations"], snapshot.fields["collective_tensors"], strict=True):
        if tensors:
            yield (operation,), (tensors,)


def _read_durations(_: RankReading, snapshot: Snapshot) -> Iterator[Series]:
    counts, times, width = (
        snapshot.fields["collective_durations"],
        snapshot.fields["collective_ns"],
        len(snapshot.names["algorithms"]),
    )
    for number, operation in enumerate(snapshot.names["operations"]):
        of_it = counts[number * page.DURATIONS : (number + 1) * page.DURATIONS]
        if any(of_it):
            yield (operation,), (merge_buckets(of_it), sum(times[number * width : (number + 1) * width]) / 1e9)


def _read_steps(_: RankReading, snapshot: Snapshot) -> Iterator[Series]:
    if any(snapshot.fields["step_durations"]):
        yield (), (merge_buckets(snapshot.fields["step_durations"]), snapshot["step_ns"] / 1e9)


def _make_late_reader(figures: Callable[[Snapshot], Mapping[str, float]]) -> Reader:
    """Return a reader of figures by cause; all causes are there from the start, as in `_read_errors`."""
    return lambda _, snapshot: [((cause,), (value,)) for cause, value in figures(snapshot).items()]


def _read_last_time(reading: RankReading, snapshot: Snapshot) -> Iterator[Series]:
    yield (), (snapshot["last_ns"] / 1e9 + reading.offset if snapshot["last_ns"] else 0.0,)


def _read_errors(_: RankReading, snapshot: Snapshot) -> Iterator[Series]:
    """Yield all kinds from the start: `increase()` misses the first error if its series begins at 1.

    The end of a world after which the job goes on is not a failure of the job.
    """
    goes_on = snapshot.state == "resetting"
    for kind in definitions.ERRORS:
        if kind == "mismatch":
            yield (kind,), (snapshot["mismatches"],)
        else:
            yield (kind,), (snapshot.get_name("causes", "cause") == kind and not goes_on,)


def _read_info(reading: RankReading, snapshot: Snapshot) -> Iterator[Series]:
    transport = "shared-memory, tcp" if snapshot.far else "shared-memory"
    labels = (reading.host, str(snapshot["local_rank"]), str(snapshot["pid"]), reading.version, transport)
    yield labels, ({},)


def _read_knobs(_: RankReading, snapshot: Snapshot) -> Iterator[Series]:
    return (((gauge.label,), (snapshot[gauge.field] / gauge.per,)) for gauge in GAUGES)


def _read_crossing_waits(reading: RankReading, snapshot: Snapshot) -> Iterator[Series]:
    """Yield all hosts waited for from the start: `increase()` misses the first value of a series."""
    for host, waited in enumerate(snapshot.fields["crossing_ns"][: snapshot["hosts"]]):
        if host != snapshot["host"]:
            yield (reading.peers.get(host, f"host {host}"),), (waited / 1e9,)


def _device_entries(_: RankReading, snapshot: Snapshot) -> Iterator[Series]:
    fields = {"handed_over": "device_entries", "enqueued": "device_enqueued", "done": "device_passed"}
    return (((reached,), (snapshot[field],)) for reached, field in fields.items())


def _device_durations(_: RankReading, snapshot: Snapshot) -> Iterator[Series]:
    for stage in snapshot.names["stages"]:
        count, nanoseconds = snapshot.get_samples(stage)
        yield (stage,), (count, nanoseconds / 1e9)


def _make_group_reader(field: str, unit: float = 1.0) -> Reader:
    """Return a reader of one figure of each group."""

    def read(_: RankReading, snapshot: Snapshot) -> Iterator[Series]:
        return (((name,), (getattr(counts, field) / unit,)) for name, counts in snapshot.groups.items())

    return read


def _read_cycles(_: RankReading, snapshot: Snapshot) -> Iterator[Series]:
    return (((reason,), (n,)) for reason, n in zip(snapshot.names["reasons"], snapshot.fields["cycles"], strict=True))


READERS: dict[str, Reader] = {
    "engine_collectives_total": _by_algorithm("collectives"),
    "engine_collective_bytes_total": _by_algorithm("collective_bytes"),
    "engine_collective_seconds_total": _by_algorithm("collective_ns", 1e9),
    "engine_collective_tensors_total": _read_tensors,
    "engine_collective_duration_seconds": _read_durations,
    "engine_last_collective_timestamp_seconds": _read_last_time,
    "engine_step_duration_seconds": _read_steps,
    "engine_late_steps_total": _make_late_reader(lambda snapshot: snapshot.late_steps),
    "engine_late_seconds_total": _make_late_reader(lambda snapshot: snapshot.late_seconds),
    "engine_blocked_seconds_total": _make_field_reader("blocked_ns", 1e9),
    "engine_exposed_seconds_total": _make_field_reader("exposed_ns", 1e9),
    "engine_queue_duration_seconds": _make_summary_reader("queued", "queue_ns"),
    "engine_negotiation_duration_seconds": _make_summary_reader("negotiated", "negotiation_ns"),
    "engine_arrival_lag_seconds": _make_summary_reader("lags", "lag_ns"),
    "engine_device_entries_total": _device_entries,
    "engine_device_bytes_total": _make_field_reader("device_bytes"),
    "engine_device_duration_seconds": _device_durations,
    "engine_device_sampled_bytes_total": _make_field_reader("device_sampled_bytes"),
    "engine_network_sent_bytes_total": _make_field_reader("network_sent"),
    "engine_network_received_bytes_total": _make_field_reader("network_received"),
    "engine_compression_saved_bytes_total": _make_field_reader("compression_saved_bytes"),
    "engine_compression_not_finite_total": _make_field_reader("compression_not_finite"),
    "engine_crossing_seconds_total": _read_crossing_waits,
    "engine_group_collectives_total": _make_group_reader("collectives"),
    "engine_group_bytes_total": _make_group_reader("nbytes"),
    "engine_group_seconds_total": _make_group_reader("nanoseconds", 1e9),
    "engine_group_pending_tensors": _make_group_reader("pending"),
    # The fields are read in another order than they are written, so more operations may seem completed than submitted.
    "engine_pending_tensors": lambda _, snapshot: [((), (max(0, snapshot["submitted"] - snapshot["completed"]),))],
    "engine_fused_bytes_total": _make_field_reader("fused_bytes"),
    "engine_fusion_capacity_bytes_total": _make_field_reader("fusion_capacity"),
    "engine_cycles_total": _read_cycles,
    "engine_submissions_total": _make_field_reader("submitted"),
    "engine_cache_misses_total": _make_field_reader("requests"),
    "engine_errors_total": _read_errors,
    "engine_stall_warnings_total": _make_field_reader("stall_warnings"),
    "engine_stalled_tensors": _make_field_reader("stalled"),
    "engine_rank_up": lambda reading, _: [((), (float(reading.up),))],
    "engine_rank_info": _read_info,
    "engine_world_size": _make_field_reader("size"),
    "engine_resets_total": lambda _, snapshot: [((), (max(0, snapshot["worlds"] - 1),))],
    "engine_start_timestamp_seconds": _make_field_reader("started_ns", 1e9),
    "engine_knob": _read_knobs,
    "engine_knob_version": _make_field_reader("knob_version"),
    "engine_autotune_phase": _make_field_reader("tuner_phase"),
    "engine_autotune_searches_total": _make_field_reader("tuner_searches"),
    "engine_autotune_trials_total": _make_field_reader("tuner_trials"),
    "engine_autotune_changes_total": _make_field_reader("tuner_changes"),
    "engine_autotune_last_change_timestamp_seconds": _make_known_reader("tuner_changed_ns", 1e9),
    "engine_autotune_score_seconds": _make_known_reader("tuner_score_ps", 1e12),
    "engine_autotune_default_score_seconds": _make_known_reader("tuner_default_ps", 1e12),
    "engine_autotune_best_score_seconds": _make_known_reader("tuner_best_ps", 1e12),
}

ELASTIC = {
    "engine_elastic_worlds_total": "worlds",
    "engine_elastic_resets_total": "resets",
    "engine_elastic_reset_seconds_total": "reset_seconds",
    "engine_elastic_resetting": "resetting",
    "engine_elastic_size": "size",
    "engine_elastic_min_size": "min_size",
    "engine_elastic_max_size": "max_size",
    "engine_elastic_cooling_hosts": "cooling",
    "engine_elastic_slow_workers_total": "slow_workers",
}
"""Attribute of `ElasticJob` with the value of each metric."""


def _read_elastic(job: ElasticJob, metric: definitions.Metric) -> list[tuple[tuple[str, ...], float]]:
    """Return labels and values of a metric of the job as a whole.

    Resets have all causes from the start: `increase()` misses the first reset if its series begins at 1.
    """
    value = getattr(job, ELASTIC[metric.name])
    return [((cause,), count) for cause, count in value.items()] if metric.labels else [((), float(value))]
