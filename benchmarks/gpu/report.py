"""Tables of `out/gpu.json`: parts first, assumptions last. Titles of results from the stand-in say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.common import environment
from benchmarks.common.tables import MISSING, Table, format_digits, format_duration, format_size
from benchmarks.gpu import binding
from benchmarks.gpu import here as places
from benchmarks.gpu.beliefs import BELIEFS
from benchmarks.gpu.opening import STEPS as OPENING
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.reference import OPS

STAND_IN = "STAND-IN, no GPU: "
NO_FIGURES = "The stand-in shows that the command works. Its times and bandwidths mean nothing."
Found = Mapping[str, Any]


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return the tables of a record; failed guarantees of the driver come first."""
    parts = content["parts"]
    made: list[Table] = []
    if parts.get("litmus", {}).get("problems"):
        made.append(_build_failure_table(parts["litmus"]))
    made.append(_build_part_table(content))
    for name, table in MAKERS.items():
        if name in parts and parts[name]["outcome"] != "skipped":
            made += table(parts[name])
    made.append(_build_belief_table(parts, content["here"]["stand_in"]))
    if content["here"]["stand_in"]:
        for table_ in made:
            table_.title = STAND_IN + table_.title
    return made


def _build_failure_table(found: Found) -> Table:
    rows = [[*problem.partition(": ")[::2]] for problem in found["problems"]]
    title = "THE DRIVER IS NOT AS THE TESTS TAKE IT TO BE: all that follows, and all tests on stand-ins, may be wrong"
    return Table(title, ["program", "what is not so"], rows, left=["what is not so"])


def _build_part_table(content: Found) -> Table:
    table = Table("GPU: parts", ["part", "outcome", "s", "what it is, and why it is not ok"], left=["outcome"])
    table.left = ["outcome", table.columns[3]]
    for name, part in PARTS.items():
        found = content["parts"].get(name)
        if found is None:
            table.rows.append([name, "not run", MISSING, part.title])
            continue
        why = f": {found['why'].splitlines()[0]}" if found["why"] else ""
        table.rows.append([name, found["outcome"], f"{found['seconds']:.1f}", part.title + why])
    notes = [places.describe(content["here"]), environment.describe(content["environment"])]
    commands = {(found["command"], found["revision"]) for found in content["parts"].values()}
    if len(commands) > 1:
        notes.append("Made by " + ", ".join(f"`{command}` at {revision}" for command, revision in sorted(commands)))
    table.note = "\n\n".join([NO_FIGURES, *notes] if content["here"]["stand_in"] else notes)
    return table


def _build_litmus_tables(found: Found) -> list[Table]:
    counts = found.get("counts", {})
    table = Table("Litmus programs", list(counts), [[str(count) for count in counts.values()]])
    skipped = [f"{name} ({why})" for name, why in found.get("skipped", {}).items()]
    table.note = f"Each was run {found.get('times')} times." + (f" Skipped: {', '.join(skipped)}." if skipped else "")
    return [table] if counts else []


def _build_opening_tables(found: Found) -> list[Table]:
    times = found.get("times", {})
    table = Table("Until the engine can use the GPU", ["step", *times])
    table.rows = [
        [title, *(format_duration(each.get(step)) for each in times.values())] for step, title in OPENING.items()
    ]
    table.note = "The kernels are compiled twice: alone, and by the engine. Caches are those of the driver's compiler."
    return [table] if times else []


def _build_numerics_tables(found: Found) -> list[Table]:
    made = []
    for count, world in found.get("worlds", {}).items():
        title = f"Results on {count} rank{'s' if count != '1' else ''}"
        table = Table(title, ["dtype", *OPS, "broadcast"])
        made.append(table)
        if "skipped" in world:
            table.note = f"skipped: {world['skipped']}"
            continue
        table.title += f" {world['where']}" if world["where"] else ""
        for dtype, columns in world["rows"].items():
            table.rows.append([dtype, *(_error(columns.get(column)) for column in table.columns[1:])])
        table.note = (
            "The largest error, in units in the last place of the dtype that travels, where the largest of the values "
            "and the result is; whole numbers and broadcasts are exact or wrong."
        )
        if world["unfinished"]:
            table.note += " Not all was tried: the time was over."
    return made


def _error(off: float | str | None) -> str:
    if off is None or isinstance(off, str):
        return off or MISSING
    return "exact" if off == 0 else f"{off:.2f}"


def _build_binding_tables(found: Found) -> list[Table]:
    table = Table("PyTorch's operations on a GPU", ["ranks", "cases", "equal", "different", "not run"])
    table.note = (
        "Each case is made on the GPU and in the host's memory; its results have to be equal, or close where they are "
        "not whole numbers."
    )
    for count, world in found.get("worlds", {}).items():
        if "skipped" in world:
            table.rows.append([count, *[MISSING] * 4])
            table.note += f" {count} ranks: skipped: {world['skipped']}."
            continue
        said = list(world["cases"].values())
        equal, late = said.count(binding.OK), said.count(binding.OVER)
        cells = [len(said), equal, len(said) - equal - late, late]
        table.rows.append([f"{count} {world['where']}".strip(), *map(str, cells)])
    return [table]


def _build_cost_tables(found: Found) -> list[Table]:
    made = []
    for name, rows in found.get("groups", {}).items():
        table = Table(f"Costs of calls: {name}", ["call", "median", "p99", "least"])
        if isinstance(rows, str):
            table.note = f"skipped: {rows}"
        else:
            table.rows = [
                [row["name"], *(format_duration(row[each]) for each in ("median", "p99", "least"))] for row in rows
            ]
        made.append(table)
    return made


def _build_bandwidth_tables(found: Found) -> list[Table]:
    columns = ["tensors", "aligned", "what travels", "pack GB/s", "of a copy's", "unpack GB/s", "of a copy's", "aim"]
    table = Table("Pack and unpack", columns, left=["what travels"])
    rows: dict[tuple[str, bool, str], dict[str, Found]] = {}
    for row in found.get("rows", []):
        rows.setdefault((row["layout"], row["aligned"], row["what"]), {})[row["direction"]] = row
    for (layout, aligned, what), both in rows.items():
        cells = [
            [format_digits(both[each]["bandwidth"] / 1e9), f"{both[each]['share']:.2f}"] for each in ("pack", "unpack")
        ]
        reached = found["aim"] and all(row["share"] >= found["aim"] for row in both.values())
        verdict = MISSING if found["aim"] is None else "pass" if reached else "miss"
        table.rows.append([layout, "yes" if aligned else "no", what, *cells[0], *cells[1], verdict])
    copies = [
        f"{layout}: {format_digits(copy['bandwidth'] / 1e9)} GB/s of {format_size(copy['bytes'])}"
        for layout, copy in found.get("copies", {}).items()
    ]
    aim = f" Aim: {found['aim']:.0%} of it." if found.get("aim") else ""
    table.note = (
        f"A copy by cuMemcpyDtoDAsync of as many bytes: {'; '.join(copies)}.{aim} What is read and written counts."
    )
    return [table] if rows else []


def _build_world_tables(found: Found) -> list[Table]:
    made = []
    if worlds := found.get("again"):
        table = Table(
            "Worlds one after the other in a process", ["world", "init", "first allreduce", "shutdown", "used"]
        )
        for number, each in enumerate(worlds):
            times = [format_duration(each[name]) for name in ("init", "first", "shutdown")]
            table.rows.append([str(number + 1), *times, format_size(each["used"])])
        growth = f"from the second world on it grew by {found.get('growth')} bytes"
        table.note = f"`used` is the device's memory behind `shutdown`; {growth}."
        made.append(table)
    lost = found.get("lost")
    if lost:
        table = Table("A rank that is killed", ["since its death", "seconds"])
        made.append(table)
        if "skipped" in lost:
            table.note = f"skipped: {lost['skipped']}"
            return made
        for name, what in (
            ("heard", "the survivor's call raises"),
            ("rest", "its device is at rest, the engine shut down"),
            ("alone", "it has reduced in a new world of its own, in the same process"),
        ):
            table.rows.append([what, format_digits(lost[name]) if name in lost else MISSING])
        said = lost["said"].partition("\n")[0] or "nothing"
        table.note = f"Two ranks {lost['where']}. The survivor was told: {said}"
    return made


def _format_interval(interval: Found, of: str) -> str:
    shown = [
        format_digits(interval[each]) if of == "ratio" else format_duration(interval[each])
        for each in ("value", "low", "high")
    ]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"


def _build_step_tables(found: Found) -> list[Table]:
    columns = ["model", "tensors", "bytes", "of DDP's step", "DDP over the floor", "engine over the floor", "aim"]
    table = Table("Training steps on one rank, beside DDP over NCCL", columns)
    for each in found.get("workloads", {}).values():
        overheads = [_format_interval(each["overheads"][name], "time") for name in ("ddp", "engine")]
        ratio = _format_interval(each["ratio"], "ratio")
        verdict = "pass" if each["ratio"]["value"] < 1 else "miss"
        table.rows.append([each["title"], str(each["tensors"]), format_size(each["bytes"]), ratio, *overheads, verdict])
    table.note = "Medians over rounds in which the variants took turns, with intervals of 95 %. Aim: below DDP's step."
    return [table] if table.rows else []


def _build_frozen_tables(found: Found) -> list[Table]:
    made = []
    for count, world in found.get("worlds", {}).items():
        title = f"Frozen passes of 100 tensors of 4 KiB on {count} rank{'s' if count != '1' else ''}"
        table = Table(title, ["what", "median", "p99", "least"])
        made.append(table)
        if "skipped" in world:
            table.note = f"skipped: {world['skipped']}"
            continue
        table.title += f" {world['where']}" if world["where"] else ""
        table.rows = [
            [row["name"], *(format_duration(row[each]) for each in ("median", "p99", "least"))] for row in world["rows"]
        ]
        ratios = "; ".join(f"{way}: {_format_interval(ratio, 'ratio')}" for way, ratio in world["ratios"].items())
        first, second = (format_size(taken) for taken in world["memory"])
        table.note = (
            f"The ways take turns. Until the device has passed, to the unfrozen way: {ratios}. The first freeze has "
            f"taken {first} of the device's memory, another one {second}."
        )
    return made + _build_frozen_step_tables(found.get("workloads"))


def _build_frozen_step_tables(workloads: Found | str | None) -> list[Table]:
    table = Table("Frozen training steps on one rank", ["model", "tensors", "bytes", "compared", "ratio", "step"])
    if isinstance(workloads, str):
        table.note = f"skipped: {workloads}"
        return [table]
    for each in (workloads or {}).values():
        shown = [each["title"], str(each["tensors"]), format_size(each["bytes"])]
        for pair, ratio in each["ratios"].items():
            taken = each["rounds"][pair.partition(" to ")[0]]
            table.rows.append([*shown, pair, _format_interval(ratio, "ratio"), format_duration(median(taken))])
    table.note = (
        "Ratios of medians over rounds in which all variants took turns, with intervals of 95 %, and the median of the "
        "first one's step. A replay is of a graph that has the whole step; `floor_replay` has no communication. One "
        "rank calls no NCCL in frozen passes."
    )
    return [table] if table.rows else []


def _build_overlap_tables(found: Found) -> list[Table]:
    columns = [
        "model",
        "variant",
        "engine's work",
        "under the backward pass",
        "under its kernels",
        "exposed",
        "backward pass",
    ]
    table = Table("The engine's work on the device, of a step", columns, left=["variant"])
    notes = set()
    for each in found.get("workloads", {}).values():
        for variant, told in each["variants"].items():
            traced = told["traced"]
            cells = [MISSING] * 3
            if isinstance(traced, str):
                notes.add(traced)
            else:
                shown = [f"{traced[name]:.0%}" if name in traced else MISSING for name in ("backward", "computing")]
                cells = [format_duration(traced["work"]), *shown]
            table.rows.append(
                [each["title"], variant, *cells, *map(_format_signed, (told["exposed"], told["backward"]))]
            )
    table.note = (
        "Work and its shares are from a trace. Exposed: how much longer a backward pass takes with the engine than "
        "without, by the device's clock, the variants taking turns." + "".join(f" {note}." for note in sorted(notes))
    )
    return [table] if table.rows else []


def _format_signed(seconds: float) -> str:
    return f"-{format_duration(-seconds)}" if seconds < 0 else format_duration(seconds)


def _build_belief_table(parts: Mapping[str, Found], stand_in: bool) -> Table:
    mark = "stand-in: " if stand_in else ""
    rows: Sequence[list[str]] = [[each.what, each.believed, each.format_measured(parts, mark)] for each in BELIEFS]
    return Table(
        "What was believed, and what was measured",
        ["belief", "believed", "measured"],
        list(rows),
        left=["believed", "measured"],
    )


MAKERS = {
    "litmus": _build_litmus_tables,
    "opening": _build_opening_tables,
    "numerics": _build_numerics_tables,
    "binding": _build_binding_tables,
    "costs": _build_cost_tables,
    "bandwidth": _build_bandwidth_tables,
    "failure": _build_world_tables,
    "steps": _build_step_tables,
    "frozen": _build_frozen_tables,
    "overlap": _build_overlap_tables,
}
