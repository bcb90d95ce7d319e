"""Dashboard Engine: what happens between a gradient's submission and its mean."""

from __future__ import annotations

from grafana.common import BIG, LONG, RUN, Dashboard, Panel, Query, query_mean, query_quantile, query_rate
from grafana.words import COMPRESSION_WORDS, STORE_WORDS


def query_knob(name: str, high: float, low: float = 0) -> Query:
    """Return the query of a knob's value."""
    return Query(f'max by (name) (engine_knob{{{RUN}, name="{name}"}})', "{{name}}", low, high)


FILL = (
    f"sum by (run) ({query_rate('engine_fused_bytes_total')})"
    f" / (sum by (run) ({query_rate('engine_fusion_capacity_bytes_total')}) > 0)"
)
REDUCED = RUN + ', op="allreduce"'
PER_BATCH = (
    f"sum by (run) ({query_rate('engine_collective_bytes_total', REDUCED)})"
    f" / (sum by (run) ({query_rate('engine_collectives_total', REDUCED)}) > 0)"
)
TENSORS_PER_BATCH = (
    f"sum by (run) ({query_rate('engine_collective_tensors_total', REDUCED)})"
    f" / (sum by (run) ({query_rate('engine_collectives_total', REDUCED)}) > 0)"
)

FUSION = (
    Panel(
        "timeseries",
        "Fusion fill",
        "Bytes in batches of allreduces over the bytes for which they had room. Low with many batches closed by "
        "the cycle "
        "time: a longer cycle time or a smaller threshold may do better.",
        "percentunit",
        (Query(FILL, "fill", 0, 1.1),),
        top=1,
    ),
    Panel(
        "timeseries",
        "Size of a batch",
        "Mean bytes in an allreduce, fused ones as one, beside the fusion threshold.",
        "bytes",
        (Query(PER_BATCH, "batch", 1, BIG), query_knob("fusion_threshold_bytes", BIG)),
    ),
    Panel(
        "timeseries",
        "Tensors in a batch",
        "Mean tensors in an allreduce. 1 is no fusion at all.",
        "short",
        (Query(TENSORS_PER_BATCH, "tensors", 1, 1e5),),
    ),
)
LATENCY = (
    Panel(
        "timeseries",
        "Latency by operation",
        "Median and 95 % quantile of the time from the start of a collective to its end on a rank. Buckets are "
        "fourfold "
        "of each other, so these are coarse; the mean below is exact.",
        "s",
        (
            Query(query_quantile(0.5, "engine_collective_duration_seconds", "op") + " >= 0", "{{op}}, median", 0, LONG),
            Query(query_quantile(0.95, "engine_collective_duration_seconds", "op") + " >= 0", "{{op}}, 95 %", 0, LONG),
        ),
        width=12,
    ),
    Panel(
        "heatmap",
        "Distribution of allreduce times",
        "Allreduces a second by how long they took, over all ranks.",
        "s",
        (
            Query(
                f"sum by (le) ({query_rate('engine_collective_duration_seconds_bucket', REDUCED)})",
                "{{le}}",
                0,
                1e7,
                heatmap=True,
            ),
        ),
        width=12,
    ),
    Panel(
        "timeseries",
        "Mean latency by operation",
        "Time from the start of a collective to its end on a rank.",
        "s",
        (Query(query_mean("engine_collective_duration_seconds", "op"), "{{op}}", 0, LONG),),
    ),
    Panel(
        "timeseries",
        "From submission to the start",
        "Negotiation: from the first rank's submission to the closing of the batch. Queue: from a tensor's "
        "submission to "
        "the start of its collective.",
        "s",
        (
            Query(query_mean("engine_negotiation_duration_seconds", "run"), "negotiation", 0, LONG),
            Query(query_mean("engine_queue_duration_seconds", "run"), "queue", 0, LONG),
        ),
    ),
    Panel(
        "timeseries",
        "Executing collectives",
        "Share of the time in which a rank executes a collective, and the part of it that is exposed: the "
        "program waits.",
        "percentunit",
        (
            Query(
                f"avg by (run) (sum by (run, rank) ({query_rate('engine_collective_duration_seconds_sum')}))",
                "busy",
                0,
                1.5,
            ),
            Query(f"avg by (run) ({query_rate('engine_exposed_seconds_total')})", "exposed", 0, 1.1),
        ),
    ),
)
FLOW = (
    Panel(
        "timeseries",
        "Collectives a second",
        "Executed collectives of one rank, by operation and algorithm, fused ones as one.",
        "ops",
        (
            Query(
                f"avg by (op, algorithm) ({query_rate('engine_collectives_total')} > 0)",
                "{{op}}, {{algorithm}}",
                0,
                1e7,
            ),
        ),
        stacked=True,
    ),
    Panel(
        "timeseries",
        "Bytes a second",
        "Bytes of tensors in collectives of one rank, by operation and algorithm, as they travel.",
        "Bps",
        (
            Query(
                f"avg by (op, algorithm) ({query_rate('engine_collective_bytes_total')} > 0)",
                "{{op}}, {{algorithm}}",
                0,
                BIG,
            ),
        ),
        stacked=True,
    ),
    Panel(
        "timeseries",
        "Time of a collective, by algorithm",
        "Mean time from the start of a collective to its end, by operation and algorithm.",
        "s",
        (
            Query(
                f"sum by (op, algorithm) ({query_rate('engine_collective_seconds_total')}) "
                f"/ (sum by (op, algorithm) ({query_rate('engine_collectives_total')}) > 0)",
                "{{op}}, {{algorithm}}",
                0,
                LONG,
            ),
        ),
    ),
    Panel(
        "timeseries",
        "Batches by reason",
        "Why batches were closed: full; the whole step was there; somebody waited; the cycle time was over.",
        "ops",
        (Query(f"sum by (reason) ({query_rate('engine_cycles_total')})", "{{reason}}", 0, 1e7),),
        stacked=True,
    ),
    Panel(
        "timeseries",
        "Submissions and cache misses",
        "Operations that one rank submits a second, and those that had to bring their whole description. Misses "
        "should be "
        "0 after the first step: new names or changing shapes cost a message each.",
        "ops",
        (
            Query(f"avg by (run) ({query_rate('engine_submissions_total')})", "submissions", 0, 1e7),
            Query(f"avg by (run) ({query_rate('engine_cache_misses_total')})", "misses", 0, 1e7),
        ),
    ),
    Panel(
        "timeseries",
        "Operations pending",
        "Submitted and not done, over all ranks: the mean and the most.",
        "short",
        (
            Query(f"avg by (run) (engine_pending_tensors{{{RUN}}})", "mean", 0, 1e6),
            Query(f"max by (run) (engine_pending_tensors{{{RUN}}})", "most", 0, 1e6),
        ),
    ),
)
DEVICE = (
    Panel(
        "timeseries",
        "A collective on the GPU",
        "Mean times of sampled collectives by the GPU's clock: in the queue since a tensor was ready, packing, in "
        "NCCL, unpacking. Of ranks with a GPU, as all of this row.",
        "s",
        (
            Query(
                query_mean("engine_device_duration_seconds", "stage", RUN + ', stage!="exposed"'),
                "{{stage}}",
                0,
                LONG,
                expected=False,
            ),
        ),
        stacked=True,
    ),
    Panel(
        "timeseries",
        "Exposed on the GPU",
        "Mean time for which the program's stream stood at the end of a step and waited for its gradients.",
        "s",
        (
            Query(
                query_mean("engine_device_duration_seconds", "run", RUN + ', stage="exposed"'),
                "exposed",
                0,
                LONG,
                expected=False,
            ),
        ),
    ),
    Panel(
        "timeseries",
        "Collectives not done by the GPU",
        "Over all ranks, the mean: handed over and not enqueued; enqueued and not done.",
        "short",
        (
            Query(
                f'avg by (run) (engine_device_entries_total{{{RUN}, reached="handed_over"}} - ignoring (reached) '
                f'engine_device_entries_total{{{RUN}, reached="enqueued"}})',
                "not enqueued",
                0,
                1e6,
                expected=False,
            ),
            Query(
                f'avg by (run) (engine_device_entries_total{{{RUN}, reached="enqueued"}} - ignoring (reached) '
                f'engine_device_entries_total{{{RUN}, reached="done"}})',
                "not done",
                0,
                1e6,
                expected=False,
            ),
        ),
    ),
    Panel(
        "timeseries",
        "Speed in NCCL",
        "Bytes of sampled collectives over their time in NCCL, of one rank.",
        "Bps",
        (
            Query(
                f"sum by (run) ({query_rate('engine_device_sampled_bytes_total')}) / (sum by (run) ("
                + query_rate("engine_device_duration_seconds_sum", RUN + ', stage="nccl"')
                + ") > 0)",
                "in NCCL",
                0,
                BIG,
                expected=False,
            ),
        ),
    ),
)
KNOBS = (
    Panel(
        "stat",
        "Fusion threshold",
        "Bytes at which a batch is full.",
        "bytes",
        (query_knob("fusion_threshold_bytes", BIG),),
        width=4,
        height=5,
        base="blue",
    ),
    Panel(
        "stat",
        "Cycle time",
        "How long a batch waits for more.",
        "s",
        (query_knob("cycle_time_seconds", 10),),
        width=4,
        height=5,
        base="blue",
    ),
    Panel(
        "stat", "Chunk", "Bytes of a chunk.", "bytes", (query_knob("chunk_bytes", BIG),), width=4, height=5, base="blue"
    ),
    Panel(
        "stat",
        "Stores",
        "How results are written: through the cache or around it.",
        "short",
        (query_knob("stores", 2),),
        width=4,
        height=5,
        words=STORE_WORDS,
    ),
    Panel(
        "stat",
        "Compression",
        "What travels instead of 32-bit floats.",
        "short",
        (query_knob("compression", 2),),
        width=4,
        height=5,
        words=COMPRESSION_WORDS,
    ),
    Panel(
        "stat",
        "Sockets per lane",
        "Connections in use between two ranks on different hosts.",
        "short",
        (query_knob("sockets_per_lane", 8),),
        width=4,
        height=5,
        base="blue",
    ),
)
DASHBOARD = Dashboard(
    "enginerun-engine",
    "Engine",
    "What happens between a tensor's submission and its result: fusion, latencies, batches, knobs.",
    (("Fusion", FUSION), ("Latency", LATENCY), ("Flow", FLOW), ("On the GPU", DEVICE), ("Knobs in force", KNOBS)),
)
