"""Dashboard Autotune: what the tuner tries, and what it has gained."""

from __future__ import annotations

from grafana.common import BIG, LONG, RUN, Dashboard, Panel, Query, query_mean
from grafana.engine import query_knob
from grafana.words import COMPRESSION_WORDS, PHASE_WORDS, STORE_WORDS

BEST = f"max by (run) (engine_autotune_best_score_seconds{{{RUN}}} > 0)"
DEFAULT = f"max by (run) (engine_autotune_default_score_seconds{{{RUN}}} > 0)"
LAST = f"max by (run) (engine_autotune_score_seconds{{{RUN}}} > 0)"


def make_number_panel(title: str, about: str, expr: str, high: float, unit: str = "short", width: int = 4) -> Panel:
    return Panel("stat", title, about, unit, (Query(expr, "", 0, high),), width=width, height=5, base="blue")


STATE = (
    Panel(
        "stat",
        "Phase",
        "Waiting for steps; searching; watching for a drift; lost: it could not go on; left: the program has ended it; "
        "resting: its trials have lost all that they may.",
        "short",
        (Query(f"max(engine_autotune_phase{{{RUN}}})", "phase", 1, 3),),
        width=4,
        height=5,
        words=PHASE_WORDS,
    ),
    Panel(
        "stat",
        "Won",
        "How much shorter a step is with the best setting than with the one it began with, as the tuner has "
        "measured them.",
        "percentunit",
        (Query(f"1 - ({BEST}) / ({DEFAULT})", "won", -0.5, 1),),
        width=4,
        height=5,
        thresholds=((0.02, "green"),),
        base="blue",
    ),
    make_number_panel("Trials", "Settings that were measured.", f"max(engine_autotune_trials_total{{{RUN}}})", 1e5),
    make_number_panel(
        "Searches",
        "Begun since the start. More than one: a drift was noticed, or the number of ranks has changed.",
        f"max(engine_autotune_searches_total{{{RUN}}})",
        100,
    ),
    make_number_panel(
        "Changes", "Settings that were put into force.", f"max(engine_autotune_changes_total{{{RUN}}})", 1e5
    ),
    make_number_panel(
        "Since the last change",
        "How long the setting in force has been in force.",
        f"clamp_min(time() - max(engine_autotune_last_change_timestamp_seconds{{{RUN}}} > 0), 0)",
        1e7,
        "s",
    ),
)
SCORES = (
    Panel(
        "timeseries",
        "Score",
        "Time of a step in the last trial, with the setting it began with, and with the best so far.",
        "s",
        (Query(LAST, "last trial", 1e-7, LONG), Query(DEFAULT, "default", 1e-7, LONG), Query(BEST, "best", 1e-7, LONG)),
        width=16,
        height=9,
    ),
    Panel(
        "states",
        "Phase over time",
        "What the tuner did when.",
        "short",
        (Query(f"max by (run) (engine_autotune_phase{{{RUN}}})", "tuner", 1, 3),),
        height=9,
        words=PHASE_WORDS,
    ),
    Panel(
        "timeseries",
        "Step time while tuning",
        "What the program felt of it: mean time of a step over all ranks.",
        "s",
        (Query(query_mean("engine_step_duration_seconds", "run"), "step", 1e-6, LONG),),
        width=12,
    ),
    Panel(
        "timeseries",
        "Trials and changes",
        "Trials made and settings put into force since the start. Flat when the search is over.",
        "short",
        (
            Query(f"max by (run) (engine_autotune_trials_total{{{RUN}}})", "trials", 0, 1e5),
            Query(f"max by (run) (engine_autotune_changes_total{{{RUN}}})", "changes", 0, 1e5),
            Query(f"max by (run) (engine_knob_version{{{RUN}}})", "version of the knobs", 0, 1e6),
        ),
        width=12,
    ),
)
KNOBS = (
    Panel(
        "timeseries",
        "Fusion threshold",
        "Bytes at which a batch is full, as it was in force.",
        "bytes",
        (query_knob("fusion_threshold_bytes", BIG),),
    ),
    Panel(
        "timeseries",
        "Cycle time",
        "How long a batch waits for more, as it was in force.",
        "s",
        (query_knob("cycle_time_seconds", 10),),
    ),
    Panel("timeseries", "Chunk", "Bytes of a chunk, as it was in force.", "bytes", (query_knob("chunk_bytes", BIG),)),
    Panel(
        "states",
        "Stores",
        "How results are written: through the cache or around it.",
        "short",
        (query_knob("stores", 2),),
        width=12,
        height=5,
        words=STORE_WORDS,
    ),
    Panel(
        "states",
        "Compression",
        "What travels instead of 32-bit floats.",
        "short",
        (query_knob("compression", 2),),
        width=12,
        height=5,
        words=COMPRESSION_WORDS,
    ),
    Panel(
        "timeseries",
        "Sockets per lane",
        "Connections in use between two ranks on different hosts, as it was in force.",
        "short",
        (query_knob("sockets_per_lane", 8),),
    ),
)
DASHBOARD = Dashboard(
    "enginerun-autotune",
    "Autotune",
    "What the tuner tries and what it has won. Lines mark the changes of the knobs.",
    (("State", STATE), ("Scores", SCORES), ("Knobs over time", KNOBS)),
)
