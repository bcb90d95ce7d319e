"""Dashboard Run overview: whether the run is healthy, and its speed compared with the possible one."""

from __future__ import annotations

from grafana.common import BIG, LONG, RUN, Dashboard, Panel, Query, query_mean, query_rate
from grafana.words import PHASE_WORDS

STEP = query_mean("engine_step_duration_seconds", "run")
FLOOR = (
    f"clamp_min(sum by (run) ({query_rate('engine_step_duration_seconds_sum')})"
    f" - sum by (run) ({query_rate('engine_exposed_seconds_total')}), 0)"
    f" / (sum by (run) ({query_rate('engine_step_duration_seconds_count')}) > 0)"
)
EXPOSED = f"avg by (run) ({query_rate('engine_exposed_seconds_total')})"
STEPS = f"avg by (run) ({query_rate('engine_step_duration_seconds_count')})"
BYTES = f"avg by (run) (sum by (run, rank) ({query_rate('engine_collective_bytes_total')}))"

HEALTH = (
    Panel(
        "stat",
        "Ranks up",
        "Ranks whose process runs. Fewer than the ranks of the job: one has ended or died.",
        "short",
        (
            Query(f"sum(engine_rank_up{{{RUN}}})", "up", 1, 4096),
            Query(f"max(engine_world_size{{{RUN}}})", "of", 1, 4096),
        ),
        width=4,
        height=5,
        base="blue",
    ),
    Panel(
        "stat",
        "Ranks missing",
        "Ranks of the job that are not up. Anything but 0 needs a look at the launcher's report.",
        "short",
        (Query(f"max(engine_world_size{{{RUN}}}) - sum(engine_rank_up{{{RUN}}})", "missing", 0, 0),),
        width=3,
        height=5,
        thresholds=((1, "red"),),
    ),
    Panel(
        "stat",
        "Alerts",
        "Alerts that fire for this run. The table below names them; docs/reference/alerts.md says what to do.",
        "short",
        (Query(f'count(ALERTS{{{RUN}, alertstate="firing"}}) or vector(0)', "firing", 0, 100),),
        width=3,
        height=5,
        thresholds=((1, "red"),),
    ),
    Panel(
        "stat",
        "Errors",
        "Failed collectives and failures of the job that any rank has seen since it started.",
        "short",
        (Query(f"sum(engine_errors_total{{{RUN}}})", "errors", 0, 0),),
        width=3,
        height=5,
        thresholds=((1, "red"),),
    ),
    Panel(
        "stat",
        "Stalled operations",
        "Operations that are overdue: some rank has not submitted its part.",
        "short",
        (Query(f"sum(engine_stalled_tensors{{{RUN}}})", "stalled", 0, 0),),
        width=3,
        height=5,
        thresholds=((1, "orange"), (10, "red")),
    ),
    Panel(
        "stat",
        "Since the last collective",
        "How long ago any rank last finished a collective. It grows in a stall, and while the program does "
        "something else.",
        "s",
        (Query(f"clamp_min(time() - max(engine_last_collective_timestamp_seconds{{{RUN}}} > 0), 0)", "ago", 0, LONG),),
        width=4,
        height=5,
        thresholds=((30, "orange"), (120, "red")),
    ),
    Panel(
        "stat",
        "Tuner",
        "What the tuner does. Without one there is nothing here.",
        "short",
        (Query(f"max(engine_autotune_phase{{{RUN}}})", "phase", 1, 3),),
        width=4,
        height=5,
        words=PHASE_WORDS,
    ),
)
SPEED = (
    Panel(
        "timeseries",
        "Step time against its floor",
        "Mean time of an optimizer step over all ranks, and what would be left of it without exposed communication. "
        "The gap is what faster communication or better knobs can win at most.",
        "s",
        (Query(STEP, "step", 1e-6, LONG), Query(FLOOR, "floor", 0, LONG)),
        width=12,
    ),
    Panel(
        "timeseries",
        "Exposed communication",
        "Share of the time in which ranks were blocked while a collective was executed: communication that backward "
        "did not hide.",
        "percentunit",
        (Query(EXPOSED, "exposed", 0, 1.1),),
        width=6,
        thresholds=((0.1, "orange"), (0.3, "red")),
        top=1,
    ),
    Panel(
        "timeseries",
        "Steps a second",
        "Optimizer steps a second of one rank; all ranks step together.",
        "ops",
        (Query(STEPS, "steps", 1e-3, 1e5),),
        width=6,
    ),
    Panel(
        "timeseries",
        "Throughput",
        "Bytes of tensors in collectives, a second and rank, as they travel: compression lowers it.",
        "Bps",
        (
            Query(
                f"avg by (run, op) (sum by (run, rank, op) ({query_rate('engine_collective_bytes_total')}) > 0)",
                "{{op}}",
                1,
                BIG,
            ),
            Query(BYTES, "all", 1, BIG),
        ),
        width=12,
    ),
    Panel(
        "timeseries",
        "Slowest and fastest rank to arrive",
        "Mean time after the first rank at which ranks submit their tensors: the latest rank and the earliest. "
        "One rank "
        "far behind the others is a straggler; the Ranks dashboard says which.",
        "s",
        (
            Query(f"max by (run) ({query_mean('engine_arrival_lag_seconds', 'run, rank')})", "latest", 0, LONG),
            Query(f"min by (run) ({query_mean('engine_arrival_lag_seconds', 'run, rank')})", "earliest", 0, LONG),
        ),
        width=12,
    ),
)
TROUBLE = (
    Panel(
        "states",
        "Ranks over time",
        "Which rank's process ran when.",
        "short",
        (Query(f"max by (rank) (engine_rank_up{{{RUN}}})", "rank {{rank}}", 1, 1),),
        width=8,
        words={0: ("down", "red"), 1: ("up", "green")},
    ),
    Panel(
        "timeseries",
        "Errors and stall warnings",
        "How many came in the last interval, by kind. A flat line at 0 is what it should be.",
        "short",
        (
            Query(f"sum by (kind) (increase(engine_errors_total{{{RUN}}}[$__rate_interval]))", "{{kind}}", 0, 0),
            Query(
                f"sum by (run) (increase(engine_stall_warnings_total{{{RUN}}}[$__rate_interval]))",
                "stall warning",
                0,
                0,
            ),
        ),
        width=8,
    ),
    Panel(
        "table",
        "Alerts that are pending or fire",
        "Empty when all is well. What to do about each is in docs/reference/alerts.md.",
        "short",
        (Query(f"ALERTS{{{RUN}}}", "", 1, 1, expected=False),),
        width=8,
        columns={
            "alertname": ("alert", ""),
            "alertstate": ("state", ""),
            "severity": ("severity", ""),
            "rank": ("rank", ""),
            "kind": ("kind", ""),
        },
    ),
)
WORLDS = (
    Panel(
        "timeseries",
        "Ranks of an elastic job",
        "Ranks of the newest world, between the fewest with which the job goes on and the most to which it grows.",
        "short",
        (
            Query(f"max(engine_elastic_size{{{RUN}}})", "ranks", 1, 4096),
            Query(f"max(engine_elastic_min_size{{{RUN}}})", "fewest", 1, 4096),
            Query(f"max(engine_elastic_max_size{{{RUN}}})", "most", 1, 4096),
        ),
        width=8,
    ),
    Panel(
        "timeseries",
        "Resets",
        "Worlds that have ended in the last interval, by the reason. Newcomers and hosts that go cost no steps; a "
        "failure costs those since the last commit.",
        "short",
        (
            Query(
                f"sum by (cause) (increase(engine_elastic_resets_total{{{RUN}}}[$__rate_interval]))", "{{cause}}", 0, 3
            ),
        ),
        width=8,
        stacked=True,
    ),
    Panel(
        "timeseries",
        "Time in resets",
        "Share of the time in which no world ran.",
        "percentunit",
        (Query(f"sum({query_rate('engine_elastic_reset_seconds_total')})", "resetting", 0, 1.1),),
        width=4,
        thresholds=((0.05, "orange"), (0.2, "red")),
        top=1,
    ),
    Panel(
        "stat",
        "Worlds, left alone, slow",
        "Worlds that have run; hosts that are left alone after failures; workers that were let go because the others "
        "waited for them.",
        "short",
        (
            Query(f"max(engine_elastic_worlds_total{{{RUN}}})", "worlds", 1, 1e6),
            Query(f"max(engine_elastic_cooling_hosts{{{RUN}}})", "hosts left alone", 0, 0),
            Query(f"max(engine_elastic_slow_workers_total{{{RUN}}})", "slow workers", 0, 1),
        ),
        width=4,
        base="blue",
    ),
    Panel(
        "states",
        "State of an elastic job",
        "Whether a world ran, or one was over and the next not there yet.",
        "short",
        (Query(f"max(engine_elastic_resetting{{{RUN}}})", "job", 0, 1),),
        width=24,
        height=4,
        words={0: ("a world runs", "green"), 1: ("resetting", "orange")},
    ),
)
DASHBOARD = Dashboard(
    "enginerun-overview",
    "Run overview",
    "Is the run healthy, and how fast is it against its floor?",
    (("Health", HEALTH), ("Speed", SPEED), ("Trouble", TROUBLE), ("Worlds of an elastic job", WORLDS)),
)
