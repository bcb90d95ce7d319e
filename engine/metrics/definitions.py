"""Definitions of all metrics: name, type, labels and meaning. Exporters, dashboards and documentation use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .knobs import GAUGES
from .names import CAUSES

Kind = Literal["counter", "gauge", "histogram", "summary", "info"]
COMMON = ("run", "rank")  # labels of every series of a rank


@dataclass(frozen=True)
class Metric:
    """A family of series.

    The scope says which ranks have the series. `rank`: every rank. `gpu`: ranks that have opened a GPU. `far`: ranks of
    a job on several hosts. `group`: ranks in process sets, or in groups of torch.distributed. `leader`: rank 0, about
    the whole job. `tuner`: rank 0 while it tunes. `host`: the endpoint, without the label `rank`. `elastic`: same as
    `host`, for elastic jobs, also between worlds.
    """

    name: str  # exported name; counters end in `_total`, units are seconds and bytes
    kind: Kind
    about: str  # one line for the help text and the documentation
    labels: tuple[str, ...] = ()  # labels besides `run` and `rank`
    scope: Literal["rank", "gpu", "far", "group", "leader", "tuner", "host", "elastic"] = "rank"

    @property
    def series(self) -> tuple[str, ...]:
        """Names of the metric's series as queries use them."""
        endings = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
        return tuple(self.name + ending for ending in endings.get(self.kind, ("",)))

    @property
    def all_labels(self) -> tuple[str, ...]:
        """All labels of the series except `le`."""
        return (*(COMMON[:1] if self.scope in ("host", "elastic") else COMMON), *self.labels)


_METRICS = (
    # Traffic.
    Metric(
        "engine_collectives_total", "counter", "Collectives that were executed, fused ones as one.", ("op", "algorithm")
    ),
    Metric(
        "engine_collective_bytes_total",
        "counter",
        "Bytes of tensors in collectives, as they travel.",
        ("op", "algorithm"),
    ),
    Metric(
        "engine_collective_seconds_total",
        "counter",
        "Time from the starts of collectives to their ends on this rank, those on a GPU excepted.",
        ("op", "algorithm"),
    ),
    Metric("engine_collective_tensors_total", "counter", "Tensors in collectives.", ("op",)),
    Metric(
        "engine_collective_duration_seconds",
        "histogram",
        "Time from the start of a collective to its end on this rank, those on a GPU excepted.",
        ("op",),
    ),
    Metric(
        "engine_last_collective_timestamp_seconds",
        "gauge",
        "Unix time at which the last collective ended; 0: none yet.",
    ),
    # Time.
    Metric("engine_step_duration_seconds", "histogram", "Time from one optimizer step to the next."),
    Metric(
        "engine_late_steps_total",
        "counter",
        "Late steps by what was late on this rank: `input`, `compute`, `gc`, `cpu`, `network`, or another `rank`.",
        ("cause",),
    ),
    Metric("engine_late_seconds_total", "counter", "By how much they lasted longer than the median step.", ("cause",)),
    Metric(
        "engine_blocked_seconds_total",
        "counter",
        "Time in which the program was blocked in the engine; added up over the world and process sets.",
    ),
    Metric(
        "engine_exposed_seconds_total",
        "counter",
        "Exposed communication: time in which a collective was executed while the program was blocked.",
    ),
    Metric(
        "engine_queue_duration_seconds",
        "summary",
        "Time from a tensor's submission to the start of its collective, of one tensor of each collective.",
    ),
    Metric(
        "engine_negotiation_duration_seconds",
        "summary",
        "Time from the first rank's submission to the closing of the batch, of one tensor of each collective.",
        scope="leader",
    ),
    Metric(
        "engine_arrival_lag_seconds",
        "summary",
        "How long after the first rank this rank submitted, of one tensor of each collective: large for a straggler.",
    ),
    # On the GPU.
    Metric(
        "engine_device_entries_total",
        "counter",
        "Collectives of tensors on the GPU, by how far they are: handed over, enqueued there, or done by the GPU.",
        ("reached",),
        scope="gpu",
    ),
    Metric("engine_device_bytes_total", "counter", "Bytes of their tensors.", scope="gpu"),
    Metric(
        "engine_device_duration_seconds",
        "summary",
        "Samples by the GPU's clock: of collectives `queue`, from when a tensor was ready, `pack`, `nccl` and "
        "`unpack`; of steps `exposed`, for which the program's stream stood and waited for its gradients.",
        ("stage",),
        scope="gpu",
    ),
    Metric(
        "engine_device_sampled_bytes_total",
        "counter",
        "Bytes of the collectives whose time in NCCL was sampled.",
        scope="gpu",
    ),
    # Between hosts.
    Metric("engine_network_sent_bytes_total", "counter", "Bytes that the rank sent to other hosts.", scope="far"),
    Metric("engine_network_received_bytes_total", "counter", "Bytes that the rank got from other hosts.", scope="far"),
    Metric(
        "engine_compression_saved_bytes_total",
        "counter",
        "Bytes of tensors that were compressed, less what travelled of them.",
    ),
    Metric(
        "engine_compression_not_finite_total",
        "counter",
        "Blocks of 64 elements that `fp8` made NaN, since they held an infinity or a NaN; each on one rank.",
        scope="far",
    ),
    Metric(
        "engine_crossing_seconds_total",
        "counter",
        "Time in which collectives waited for data from another host, `peer`: large for a slow connection.",
        ("peer",),
        scope="far",
    ),
    # In process sets.
    Metric(
        "engine_group_collectives_total",
        "counter",
        "Collectives of a process set, or group of torch.distributed, which are in the rank's other counts, too.",
        ("group",),
        scope="group",
    ),
    Metric("engine_group_bytes_total", "counter", "Bytes of their tensors.", ("group",), scope="group"),
    Metric(
        "engine_group_seconds_total",
        "counter",
        "Time from their starts to their ends on this rank, those on a GPU excepted.",
        ("group",),
        scope="group",
    ),
    Metric(
        "engine_group_pending_tensors",
        "gauge",
        "Operations of the group that are submitted and not done.",
        ("group",),
        scope="group",
    ),
    # The queue and fusion.
    Metric("engine_pending_tensors", "gauge", "Operations submitted and not done."),
    Metric("engine_fused_bytes_total", "counter", "Bytes in batches of allreduces."),
    Metric("engine_fusion_capacity_bytes_total", "counter", "Bytes for which these batches had room."),
    Metric("engine_cycles_total", "counter", "Batches closed, by reason.", ("reason",), scope="leader"),
    Metric("engine_submissions_total", "counter", "Operations submitted."),
    Metric(
        "engine_cache_misses_total", "counter", "Submissions with their whole description: new names, changed tensors."
    ),
    # Failures and stalls.
    Metric(
        "engine_errors_total",
        "counter",
        "Errors of collectives (mismatch), and failures of the job by cause.",
        ("kind",),
    ),
    Metric("engine_stall_warnings_total", "counter", "Warnings about operations that are overdue."),
    Metric("engine_stalled_tensors", "gauge", "Operations in flight that are overdue."),
    # Identity of the ranks and the job.
    Metric("engine_rank_up", "gauge", "1 while the rank's process runs, 0 after it has ended or died."),
    Metric(
        "engine_rank_info",
        "info",
        "The rank's process. Always 1; to be joined.",
        ("host", "local_rank", "pid", "version", "transport"),
    ),
    Metric("engine_world_size", "gauge", "Number of ranks."),
    Metric("engine_resets_total", "counter", "How often the process has met other ranks again after the first time."),
    Metric("engine_start_timestamp_seconds", "gauge", "Unix time at which the rank's engine was first started."),
    Metric("engine_job_active", "gauge", "1 while the job runs.", scope="host"),
    Metric("engine_unreadable_pages", "gauge", "Ranks whose page of counters cannot be read.", scope="host"),
    # Worlds of an elastic job.
    Metric("engine_elastic_worlds_total", "counter", "Worlds that have run.", scope="elastic"),
    Metric(
        "engine_elastic_resets_total",
        "counter",
        "Worlds that have ended before the training was complete, by what was the reason: `failure` of a member, "
        "`host_lost`, `hosts` that go or have fewer slots, a worker that `left`, one that is `slow`, `newcomers`.",
        ("cause",),
        scope="elastic",
    ),
    Metric(
        "engine_elastic_reset_seconds_total",
        "counter",
        "Time from the ends of worlds to when the next one ran; of a reset that lasts, so far.",
        scope="elastic",
    ),
    Metric("engine_elastic_resetting", "gauge", "1 between two worlds, else 0.", scope="elastic"),
    Metric("engine_elastic_size", "gauge", "Ranks of the newest world.", scope="elastic"),
    Metric("engine_elastic_min_size", "gauge", "Ranks with which the job goes on at least.", scope="elastic"),
    Metric("engine_elastic_max_size", "gauge", "Ranks to which it grows at most.", scope="elastic"),
    Metric(
        "engine_elastic_cooling_hosts",
        "gauge",
        "Hosts on which no worker is started for a while, or for good, after failures.",
        scope="elastic",
    ),
    Metric(
        "engine_elastic_slow_workers_total",
        "counter",
        "Workers that were let go because the others waited for them (`--slow-limit`).",
        scope="elastic",
    ),
    # Knobs and the tuner.
    Metric(
        "engine_knob",
        "gauge",
        "Knobs in force, in bytes and seconds; words by number.",
        ("name",),
        scope="leader",
    ),
    Metric("engine_knob_version", "gauge", "Counts the changes of the knobs.", scope="leader"),
    Metric(
        "engine_autotune_phase",
        "gauge",
        "1 waiting for steps, 2 searching, 3 watching for a drift, 4 lost, 5 ended by the program, "
        "6 ended as its trials lost all that they may.",
        scope="tuner",
    ),
    Metric("engine_autotune_searches_total", "counter", "Searches that were begun.", scope="tuner"),
    Metric("engine_autotune_trials_total", "counter", "Trials that were made.", scope="tuner"),
    Metric("engine_autotune_changes_total", "counter", "Settings that were put into force.", scope="tuner"),
    Metric("engine_autotune_last_change_timestamp_seconds", "gauge", "Unix time of the last of them.", scope="tuner"),
    Metric("engine_autotune_score_seconds", "gauge", "Time of a step in the last trial.", scope="tuner"),
    Metric(
        "engine_autotune_default_score_seconds",
        "gauge",
        "Time of a step with the setting it began with.",
        scope="tuner",
    ),
    Metric(
        "engine_autotune_best_score_seconds", "gauge", "Time of a step with the best setting so far.", scope="tuner"
    ),
)

METRICS = {metric.name: metric for metric in _METRICS}
SERIES = {series: metric for metric in _METRICS for series in metric.series}
KNOBS = tuple(gauge.label for gauge in GAUGES)  # values of the label `name`
ERRORS = ("mismatch", *CAUSES[1:])  # values of the label `kind`
# Upper bounds of the exported buckets, in seconds: powers of two of a nanosecond, each the fourfold of the last.
BUCKETS = tuple(2.0**power * 1e-9 for power in range(14, 34, 2))


def format_metrics_table() -> str:
    """Return all metrics as a Markdown table for the documentation."""
    rows = ["| metric | type | labels | of | meaning |", "|---|---|---|---|---|"]
    of = {
        "rank": "each rank",
        "gpu": "each rank with a GPU",
        "far": "each rank of several hosts",
        "group": "each rank in a process set",
        "leader": "rank 0",
        "tuner": "rank 0 while it tunes",
        "host": "the run",
        "elastic": "an elastic job",
    }
    for metric in _METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {of[metric.scope]} | {metric.about} |")
    return "\n".join(rows)
