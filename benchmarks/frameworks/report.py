"""Tables of the benchmark of the bindings."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.common import stats
from benchmarks.common.environment import describe
from benchmarks.common.tables import MISSING, Table, format_digits, format_duration

TITLES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}
MODELS = {"large": "10 million parameters", "small": "a small model"}
Row = tuple[str, str, tuple[str, ...], float | None]
"""Title of a case, its name, the cases that are subtracted from it, and the seconds that may remain."""

CALLS: dict[str, tuple[Row, ...]] = {
    "tensorflow": (
        ("4 KiB in a tf.function, named", "named", ("bare", "empty"), 60e-6),
        ("4 KiB in a tf.function, unnamed", "unnamed", ("bare", "empty"), 60e-6),
        ("4 KiB, eager", "eager", ("bare",), 120e-6),
        ("50 of 4 KiB in one tf.function", "many", ("bare", "empty many"), None),
        ("50 of 4 KiB as one group", "many in a group", ("bare", "empty many"), None),
        ("160 of 62,500 floats as one group", "group", ("bare group", "empty group"), None),
    ),
    "jax": (
        ("4 KiB in a program", "named", ("bare", "empty"), 100e-6),
        ("50 of 4 KiB in one program", "many", ("bare", "empty many"), None),
        ("50 of 4 KiB as one group", "many in a group", ("bare", "empty many"), None),
        ("160 of 4 KiB as one group", "several in a group", ("bare several", "empty several"), 100e-6),
        ("160 of 62,500 floats as one group", "group", ("bare group", "empty group"), None),
    ),
    "torch": (
        ("4 KiB, in place", "named", ("bare",), None),
        ("160 of 62,500 floats as one group, in place", "group", ("bare group",), None),
    ),
}


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return the tables of `out/frameworks.json`: calls, steps of Keras, and these beside the strategy."""
    calls = [each for each in content["results"] if each["part"] == "calls"]
    fits = [each for each in content["results"] if each["part"] == "fit"]
    ranks = content["settings"]["ranks"]
    tables = _build_call_table(calls, ranks), _build_fit_table(fits, ranks), _build_strategy_table(fits, ranks)
    found = [table for table in tables if table.rows]
    if found:
        found[-1].note = f"Brackets: 95 % bootstrap interval over rounds. {describe(content['environment'])}"
    return found


def estimate_excess(rounds: dict[str, list[float]], case: str, baselines: tuple[str, ...]) -> stats.Interval:
    """Return the time of a case above its baselines of the same round, in seconds: the median over rounds."""
    columns = np.stack([np.asarray(rounds[name]) for name in (case, *baselines)], axis=-1)
    return stats.bootstrap_interval(columns, lambda r: np.median(r[..., 0] - r[..., 1:].sum(axis=-1), axis=-1))


def _build_call_table(results: list[dict[str, Any]], ranks: int) -> Table:
    columns = ["call", "median", "bare", "empty", "above bare", "above both", "at most", "result"]
    table = Table(f"What a framework adds to an allreduce, {ranks} ranks", columns)
    for result in results:
        rounds = result["rounds"]
        for title, case, baselines, most in CALLS[result["framework"]]:
            over = [estimate_excess(rounds, case, baselines[:1]), estimate_excess(rounds, case, baselines)]
            # The requirement for JAX includes an empty program.
            left = over[0] if result["framework"] == "jax" else over[1]
            medians = [format_duration(float(np.median(rounds[name]))) for name in (case, *baselines)]
            table.rows.append(
                [
                    f"{TITLES[result['framework']]}: {title}",
                    *[*medians, MISSING][:3],
                    *map(_format_interval, over),
                    MISSING if most is None else format_duration(most),
                    MISSING if most is None else "pass" if left.value <= most else "miss",
                ]
            )
    return table


def _build_fit_table(results: list[dict[str, Any]], ranks: int) -> Table:
    columns = ["backend", "model", "floor", "step", "above the floor", "bare", "of the floor", "at most", "result"]
    table = Table(f"A step of Keras, {ranks} ranks on a processor each", columns)
    for result in results:
        rounds = result["rounds"]
        for how, wanted in ("fit", result["model"] == "large"), ("loop", False):
            if f"engine.{how}" not in rounds:
                continue
            over = estimate_excess(rounds, f"engine.{how}", (f"engine.{how}_floor",))
            floor, step = (float(np.median(rounds[f"engine.{how}{end}"])) for end in ("_floor", ""))
            share = over.value / floor
            verdict = ["10 %", "pass" if share <= 0.1 else "miss"] if wanted else [MISSING, MISSING]
            place = TITLES[result["framework"]] + ("" if how == "fit" else ", a loop of a tf.function")
            cells = [
                place,
                MODELS[result["model"]],
                format_duration(floor),
                format_duration(step),
                _format_interval(over),
            ]
            cells.append(format_duration(float(np.median(rounds["engine.bare"]))))
            table.rows.append([*cells, f"{format_digits(100 * share)} %", *verdict])
    return table


def _build_strategy_table(results: list[dict[str, Any]], ranks: int) -> Table:
    """Compare our step with the strategy's, each above the floor of its own processes."""
    columns = ["model", "strategy's step", "above its floor", "engine's step", "above its floor ", "share", "at most"]
    table = Table(
        f"The engine beside MultiWorkerMirroredStrategy in a loop of a tf.function, {ranks} ranks", [*columns, "result"]
    )
    names = ("strategy.loop_strategy", "strategy.loop_floor", "engine.loop", "engine.loop_floor")
    for result in results:
        rounds = result["rounds"]
        if names[0] not in rounds:
            continue
        theirs, ours = estimate_excess(rounds, names[0], names[1:2]), estimate_excess(rounds, names[2], names[3:])
        table.rows.append(
            [
                MODELS[result["model"]],
                format_duration(float(np.median(rounds[names[0]]))),
                _format_interval(theirs),
                format_duration(float(np.median(rounds[names[2]]))),
                _format_interval(ours),
                format_digits(ours.value / theirs.value),
                "0.25",
                "pass" if ours.value <= 0.25 * theirs.value else "miss",
            ]
        )
    return table


def _format_interval(found: stats.Interval) -> str:
    return f"{format_duration(found.value)} [{format_duration(found.low)}, {format_duration(found.high)}]"
