"""Dashboard Ranks: which rank makes the others wait."""

from __future__ import annotations

from grafana.common import LONG, RANKS, RUN, Dashboard, Panel, Query, query_mean, query_rate

LAG = query_mean("engine_arrival_lag_seconds", "run, rank", RANKS)
BY_RANK = "rank {{rank}}"
LOST = query_rate("engine_late_seconds_total", f'{RANKS}, cause!="rank"')

LATE = (
    Panel(
        "heatmap",
        "Arrival lag by rank",
        "How long after the first rank each rank submitted its tensors, in the mean. A row that is bright and stays "
        "bright is a straggler: the others wait for it.",
        "s",
        (Query(LAG, BY_RANK, 0, LONG),),
        width=12,
        height=9,
    ),
    Panel(
        "timeseries",
        "Arrival lag by rank and host",
        "The same figures as lines, with each rank's host. Ranks that take turns at being late are noise; one "
        "rank that "
        "always is has less processor, memory or input than the others.",
        "s",
        (
            Query(
                f"({LAG}) * on (run, rank) group_left (host) max by (run, rank, host) (engine_rank_info{{{RANKS}}})",
                "rank {{rank}} on {{host}}",
                0,
                LONG,
            ),
        ),
        width=12,
        height=9,
    ),
    Panel(
        "timeseries",
        "Lag as a share of the step",
        "Mean arrival lag over the mean time of a step. The straggler alert fires above a tenth, if others are "
        "not late "
        "as well.",
        "percentunit",
        (
            Query(
                f"({LAG}) / on (run) group_left () ({query_mean('engine_step_duration_seconds', 'run')})",
                BY_RANK,
                0,
                10,
            ),
        ),
        width=12,
        thresholds=((0.1, "red"),),
    ),
    Panel(
        "timeseries",
        "Blocked in the engine",
        "Share of the time in which the program waited for the engine. A straggler waits least: the others wait "
        "for it.",
        "percentunit",
        (Query(f"sum by (rank) ({query_rate('engine_blocked_seconds_total', RANKS)})", BY_RANK, 0, 1.1),),
        width=12,
        top=1,
    ),
    Panel(
        "timeseries",
        "Lost to late steps by rank and cause",
        "By how much steps lasted longer than the median step, as a share of the time, on the ranks that were late by "
        "themselves: getting a batch (input), computing, collecting garbage (gc), waiting for a processor (cpu), or "
        "the network. A rank that shows in the arrival lag alone is late in every step.",
        "percentunit",
        (Query(f"sum by (rank, cause) ({LOST}) > 0", "rank {{rank}}, {{cause}}", 0, 10),),
        width=24,
        stacked=True,
    ),
)
TIMES = (
    Panel(
        "timeseries",
        "Step time",
        "Mean time of a step. Ranks step together, so that this is alike for all, and says nothing of who is slow.",
        "s",
        (Query(query_mean("engine_step_duration_seconds", "rank", RANKS), BY_RANK, 1e-6, LONG),),
    ),
    Panel(
        "timeseries",
        "Exposed communication",
        "Share of the time in which the rank was blocked while a collective was executed.",
        "percentunit",
        (Query(f"sum by (rank) ({query_rate('engine_exposed_seconds_total', RANKS)})", BY_RANK, 0, 1.1),),
        top=1,
    ),
    Panel(
        "timeseries",
        "Time in the queue",
        "Mean time from a tensor's submission to the start of its collective. Long on ranks that are early.",
        "s",
        (Query(query_mean("engine_queue_duration_seconds", "rank", RANKS), BY_RANK, 0, LONG),),
    ),
    Panel(
        "timeseries",
        "Operations pending",
        "Submitted and not done.",
        "short",
        (Query(f"sum by (rank) (engine_pending_tensors{{{RANKS}}})", BY_RANK, 0, 1e6),),
        width=12,
    ),
    Panel(
        "states",
        "Rank up",
        "Which rank's process ran when.",
        "short",
        (Query(f"max by (rank) (engine_rank_up{{{RANKS}}})", BY_RANK, 1, 1),),
        width=12,
        words={0: ("down", "red"), 1: ("up", "green")},
    ),
)
SENT = query_rate("engine_network_sent_bytes_total", RANKS)
CROSSING = f"quantile by (peer) (0.25, {query_rate('engine_crossing_seconds_total', RUN)})"
HOSTS = (
    Panel(
        "timeseries",
        "Waiting for a host",
        "Share of the time in which collectives waited for data from a host: three quarters of the ranks of other "
        "hosts waited longer. A host that is above the others has a slow connection; its ranks need not be late. Of "
        "jobs on several hosts.",
        "percentunit",
        (Query(CROSSING, "{{peer}}", 0, 1.1, expected=False),),
        width=12,
        top=1,
    ),
    Panel(
        "timeseries",
        "Sent to other hosts",
        "Bytes a second that each rank sends over the network.",
        "Bps",
        (Query(f"sum by (rank) ({SENT})", BY_RANK, 0, 1e12, expected=False),),
        width=12,
    ),
)
SETS = (
    Panel(
        "timeseries",
        "Bytes by process set",
        "Bytes a second in collectives of each process set, or group of torch.distributed, of the mean of its ranks.",
        "Bps",
        (
            Query(
                f"avg by (group) ({query_rate('engine_group_bytes_total', RUN)})",
                "{{group}}",
                0,
                1e12,
                expected=False,
            ),
        ),
        width=12,
        top=1,
    ),
    Panel(
        "timeseries",
        "Time in process sets",
        "Share of the time from the starts of a process set's collectives to their ends, of the mean of its ranks.",
        "percentunit",
        (
            Query(
                f"avg by (group) ({query_rate('engine_group_seconds_total', RUN)})",
                "{{group}}",
                0,
                2,
                expected=False,
            ),
        ),
        width=12,
    ),
)
TABLE = (
    Panel(
        "table",
        "Ranks",
        "Each rank's process and its present figures.",
        "short",
        (
            Query(f"max by (rank, host, local_rank, pid, version, transport) (engine_rank_info{{{RANKS}}})", "", 1, 1),
            Query(f"max by (rank) (engine_rank_up{{{RANKS}}})", "", 1, 1),
            Query(query_mean("engine_arrival_lag_seconds", "rank", RANKS), "", 0, LONG),
            Query(f"sum by (rank) ({query_rate('engine_blocked_seconds_total', RANKS)})", "", 0, 1.1),
            Query(f"sum by (rank) (engine_pending_tensors{{{RANKS}}})", "", 0, 1e6),
            Query(f"sum by (rank) (engine_errors_total{{{RANKS}}})", "", 0, 0),
            Query(f"max by (rank) (engine_resets_total{{{RANKS}}})", "", 0, 0),
            Query(f"time() - max by (rank) (engine_start_timestamp_seconds{{{RANKS}}} > 0)", "", 0, 1e8),
        ),
        width=24,
        columns={
            "rank": ("rank", ""),
            "host": ("host", ""),
            "local_rank": ("local rank", ""),
            "pid": ("process", ""),
            "transport": ("transport", ""),
            "version": ("version", ""),
            "Value #B": ("up", "bool_yes_no"),
            "Value #C": ("arrival lag", "s"),
            "Value #D": ("blocked", "percentunit"),
            "Value #E": ("pending", "short"),
            "Value #F": ("errors", "short"),
            "Value #G": ("resets", "short"),
            "Value #H": ("running for", "s"),
        },
    ),
    Panel(
        "heatmap",
        "Distribution of step times",
        "Steps a second by how long they took, over all ranks. A second band above the first is a step that is slow "
        "now and then: checkpoints, evaluation, a loader that runs dry.",
        "s",
        (
            Query(
                f"sum by (le) ({query_rate('engine_step_duration_seconds_bucket', RUN)})",
                "{{le}}",
                0,
                1e6,
                heatmap=True,
            ),
        ),
        width=24,
    ),
)
DASHBOARD = Dashboard(
    "enginerun-ranks",
    "Ranks",
    "Which rank holds the others up?",
    (
        ("Who is late", LATE),
        ("Where their time goes", TIMES),
        ("Between hosts", HOSTS),
        ("In process sets", SETS),
        ("Who they are", TABLE),
    ),
    by_rank=True,
)
