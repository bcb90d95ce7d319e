"""Command `python -m benchmarks collective | training | frameworks | ...`: measure the engine beside its baselines."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import acceptance, compression, observing, sets, start
from benchmarks.autotune import jobs, jobs_report
from benchmarks.autotune import report as autotune_report
from benchmarks.autotune import run as autotune
from benchmarks.autotune.contenders import CONTENDERS as POLICIES
from benchmarks.autotune.surfaces import NOISES
from benchmarks.collective import report as collective_report
from benchmarks.collective import run as collective
from benchmarks.collective.contenders import NAMES
from benchmarks.common import records
from benchmarks.common.processes import RankError, termination_as_interrupt
from benchmarks.common.tables import Table
from benchmarks.frameworks import report as frameworks_report
from benchmarks.frameworks import run as frameworks
from benchmarks.gpu import command as gpu
from benchmarks.gpu import report as gpu_report
from benchmarks.hosts import report as hosts_report
from benchmarks.hosts import run as hosts
from benchmarks.hosts.contenders import NAMES as HOST_CONTENDERS
from benchmarks.hosts.places import CABLES
from benchmarks.hub import run as hub
from benchmarks.scaling import measured
from benchmarks.scaling import run as scaling
from benchmarks.training import report as training_report
from benchmarks.training import run as training

WIDTH = 160
"""Number of columns of output that is not a terminal."""
MARKS = ("<!-- {}: begin -->", "<!-- {}: end -->")
"""Lines of a page between which tables are written."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the engine beside its baselines."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, what: str) -> Callable[..., Any]:
        return commands.add_parser(name, help=what).add_argument

    add = command("collective", "allreduce and other operations by size, cost of a call, idle engine")
    add("--quick", action="store_true", help="about a minute: fewer sizes, shorter blocks")
    add("--ranks", type=int, nargs="+", help="world sizes (2 4)")
    add("--sizes", type=int, nargs="+", help="in bytes, multiples of 4; of operations with --only or --parts")
    add("--only", nargs="+", choices=collective.OPERATIONS, help="these operations by size, nothing else")
    add("--rounds", type=int, help="rounds in which the contenders take turns")
    add("--contenders", nargs="+", choices=NAMES)
    add("--parts", nargs="+", choices=collective.PARTS)
    add("--against", metavar="DIR", help="also another build of the engine, from `pip install --target DIR`")

    add = command("training", "what data parallelism adds to a training step")
    add("--quick", action="store_true", help="4 rounds of short blocks")
    add("--workloads", nargs="+", choices=training.WORKLOADS)
    add("--variants", nargs="+", choices=training.VARIANTS)
    add("--ranks", type=int)
    add("--rounds", type=int, help="rounds in which the variants take turns")

    add = command("frameworks", "calls from TensorFlow, JAX and torch, and steps of Keras, beside the bare ones")
    add("--parts", nargs="+", choices=frameworks.PARTS)
    add("--frameworks", nargs="+", choices=frameworks.BACKENDS, help="of the calls; of `fit` the backends of Keras")
    add("--models", nargs="+", choices=frameworks.MODELS, help="of `fit`")
    add("--ranks", type=int)
    add("--rounds", type=int, help="rounds in which everything takes turns")
    add("--merge", action="store_true", help="keep what the last run has, and is not measured now")

    gpu.add_options(command("gpu", gpu.HELP))

    add = command("hosts", "allreduce, training and idleness on hosts that are namespaces of this machine; needs root")
    add("--quick", action="store_true", help="about three minutes: fewer sizes and rounds")
    add("--parts", nargs="+", choices=hosts.PARTS)
    add("--cables", nargs="+", choices=CABLES)
    add("--per-host", type=int, nargs="+", help="ranks on each of the two hosts (1 2)")
    add("--sizes", type=int, nargs="+", help="in bytes, multiples of 4")
    add("--contenders", nargs="+", choices=HOST_CONTENDERS)
    add("--also", nargs="+", metavar="NAME:VARIABLE=VALUE,...", help="also the engine with other settings")
    add("--workloads", nargs="+", choices=training.WORKLOADS, help="of the training")
    add("--rounds", type=int, help="rounds in which the contenders take turns")
    add("--merge", action="store_true", help="keep what the last run has, and is not measured now")

    add = command("compression", "allreduce that travels as halves, beside the uncompressed one")
    add("--ranks", type=int)
    add("--bytes", type=int, dest="nbytes", help="of the float32 tensor")
    add("--rounds", type=int, help="rounds in which the variants take turns")

    add = command(
        "scaling", "the simulator of `enginerun foresee` beside Horovod's published scaling; measures nothing"
    )
    add("--measured", action="store_true", help="beside 1 to 8 hosts that are namespaces of this machine; needs root")
    add("--models", nargs="+", choices=measured.Settings().models, help="of what is measured")

    add = command("start", "how a job on several hosts starts, by its parts; needs root")
    add("--hosts", type=int, help="namespaces of this machine (4)")
    add("--per-host", type=int, help="ranks on each (4)")
    add("--rounds", type=int, help="jobs")
    add = command("hub", "what the coordinator's rank spends on a step, by the number of ranks; other hosts are played")
    add("--ranks", type=int, nargs="+", help="world sizes (8 32 64 128 256)")
    add("--steps", type=int)

    add = command("sets", "allreduce in process sets, beside the world's and other libraries' groups")
    add("--ranks", type=int, help="of the world; half of them in each set")
    add("--sizes", type=int, nargs="+", help="message sizes in bytes, multiples of 4")
    add("--rounds", type=int, help="rounds in which the contenders take turns")
    add("--contenders", nargs="+", choices=sets.NAMES)

    add = command("observing", "what a timeline, and what metrics cost 2000 tensors of 1 KiB")
    add("--workloads", nargs="+", choices=observing.WORKLOADS)
    add("--against", metavar="DIR", help="also another build of the engine, from `pip install --target DIR`")
    add("--variants", nargs="+", choices=[name for name in observing.VARIANTS if name != observing.OTHER])
    add("--rounds", type=int, help="rounds in which the variants take turns")
    add("--steps", type=int, help="timed steps in a block: the fewer, the less the machine changes meanwhile")

    add = command("autotune", "the tuner beside other policies, on synthetic and recorded surfaces")
    add("--parts", nargs="+", choices=autotune.PARTS)
    add("--surfaces", nargs="+", choices=autotune.surfaces(), help="of the searches")
    add("--noises", nargs="+", choices=[noise.name for noise in NOISES], help="of synthetic surfaces")
    add("--contenders", nargs="+", choices=tuple(POLICIES))
    add("--seeds", type=int, help="searches of each kind; where nothing matters five times as many of ours")
    add("--merge", action="store_true", help="keep what the last run has, and is not run now")

    add = command("autotune-jobs", "the tuner on jobs that train, against every setting of a grid")
    add("--workloads", nargs="+", choices=jobs.WORKLOADS)
    for name, what in (
        ("searches", "by the tuner, each in a job of its own"),
        ("rounds", "of the last measurement, in which settings take turns"),
        ("grid-rounds", "of the grid"),
    ):
        add(f"--{name}", type=int, help=what)
    add("--merge", action="store_true", help="keep workloads of the last run that are not run now")
    add("--record", action="store_true", help="keep the grid as a surface for `autotune`")

    add = command("all", "collective and training, then the report")
    add("--quick", action="store_true")

    add = command("report", "tables from the JSON of the last runs")
    add("--markdown", action="store_true", help="print Markdown")
    add("--only", nargs="+", choices=REPORTS, help="of these alone")
    name = "tables, or what --only says"
    add(
        "--write",
        type=Path,
        metavar="FILE",
        help=f"replace what stands between two marks in a page, {MARKS[0].format(name)}",
    )
    return parser


def _collective(options: argparse.Namespace, console: Console) -> None:
    settings = collective.Settings.quick() if options.quick else collective.Settings()
    if options.command == "collective":
        given = {name: tuple(getattr(options, name) or ()) for name in ("ranks", "sizes", "contenders", "parts")}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value}
        if options.against:
            changes["against"] = options.against
        if options.sizes:
            changes["busy_sizes"] = changes["sizes"]
            if options.only or "operations" in (options.parts or ()):
                changes["operation_sizes"] = changes["sizes"]
        if options.rounds:
            changes["rounds"] = changes["operation_rounds"] = options.rounds
        settings = dataclasses.replace(settings, **changes)
        if options.only:
            settings = settings.only(options.only)
        try:
            settings.check()
        except ValueError as error:
            raise SystemExit(f"--sizes: {error}") from None
    path = collective.run(settings, console)
    content = records.read("collective") or {}
    _show(console, collective_report.tables(content), path, collective_report.picture(content))


def _training(options: argparse.Namespace, console: Console) -> None:
    settings = training.Settings(rounds=4, block_seconds=0.5) if options.quick else training.Settings()
    if options.command == "training":
        changes: dict[str, Any] = {name: tuple(getattr(options, name) or ()) for name in ("workloads", "variants")}
        changes |= {name: getattr(options, name) for name in ("ranks", "rounds")}
        settings = dataclasses.replace(settings, **{name: value for name, value in changes.items() if value})
    path = training.run(settings, console)
    content = records.read("training") or {}
    _show(console, training_report.tables(content), path, training_report.picture(content))


def _hosts(options: argparse.Namespace, console: Console) -> None:
    settings = hosts.Settings.quick() if options.quick else hosts.Settings()
    names = ("parts", "cables", "per_host", "sizes", "contenders", "also", "workloads")
    changes: dict[str, Any] = {name: tuple(getattr(options, name)) for name in names if getattr(options, name)}
    if options.rounds:
        changes |= {"rounds": options.rounds, "training_rounds": options.rounds}
    settings = dataclasses.replace(settings, **changes)
    try:
        settings.check()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    path = hosts.run(settings, console, options.merge)
    content = records.read("hosts") or {}
    _show(console, hosts_report.tables(content), path, hosts_report.picture(content))


def _compression(options: argparse.Namespace, console: Console) -> None:
    given = {name: getattr(options, name) for name in ("ranks", "nbytes", "rounds") if getattr(options, name)}
    path = compression.run(compression.Settings(**given), console)
    _show(console, compression.tables(records.read("compression") or {}), path, None)


def _hub(options: argparse.Namespace, console: Console) -> None:
    changes: dict[str, Any] = {"ranks": tuple(options.ranks)} if options.ranks else {}
    changes |= {"steps": options.steps} if options.steps else {}
    path = hub.run(hub.Settings(**changes), console)
    content = records.read("hub") or {}
    _show(console, hub.tables(content), path, hub.picture(content))


def _scaling(options: argparse.Namespace, console: Console) -> None:
    if options.measured:
        settings = measured.Settings(tuple(options.models)) if options.models else measured.Settings()
        path = measured.run(settings, console)
        _show(console, measured.tables(records.read("scaling-measured") or {}), path, None)
        return
    path = scaling.run(scaling.Settings())
    _show(console, scaling.tables(records.read("scaling") or {}), path, None)


def _autotune(options: argparse.Namespace, console: Console) -> None:
    changes: dict[str, Any] = {
        name: tuple(getattr(options, name))
        for name in ("parts", "surfaces", "noises", "contenders")
        if getattr(options, name)
    }
    if options.seeds:
        changes |= {"seeds": options.seeds, "flat_seeds": 5 * options.seeds}
    try:
        path = autotune.run(autotune.Settings(**changes), console, options.merge)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    content = records.read("autotune") or {}
    _show(console, autotune_report.tables(content), path, autotune_report.picture(content))


def _jobs(options: argparse.Namespace, console: Console) -> None:
    names = ("searches", "rounds", "grid_rounds", "record")
    changes: dict[str, Any] = {name: getattr(options, name) for name in names if getattr(options, name)}
    if options.workloads:
        changes["workloads"] = tuple(options.workloads)
    path = jobs.run(jobs.Settings(**changes), console, options.merge)
    content = records.read("autotune-jobs") or {}
    _show(console, jobs_report.tables(content), path, jobs_report.picture(content))


def _sets(options: argparse.Namespace, console: Console) -> None:
    changes = {name: getattr(options, name) for name in ("ranks", "rounds") if getattr(options, name)}
    changes |= {name: tuple(getattr(options, name)) for name in ("sizes", "contenders") if getattr(options, name)}
    settings = sets.Settings(**changes)
    try:
        settings.check()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    path = sets.run(settings, console)
    content = records.read("sets") or {}
    _show(console, sets.tables(content), path, sets.picture(content))


def _start(options: argparse.Namespace, console: Console) -> None:
    names = ("hosts", "per_host", "rounds")
    settings = start.Settings(**{name: getattr(options, name) for name in names if getattr(options, name) is not None})
    try:
        settings.check()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    path = start.run(settings, console)
    _show(console, start.tables(records.read("start") or {}), path, None)


def _frameworks(options: argparse.Namespace, console: Console) -> None:
    changes: dict[str, Any] = {name: getattr(options, name) for name in ("ranks", "rounds") if getattr(options, name)}
    changes |= {
        name: tuple(getattr(options, name)) for name in ("parts", "frameworks", "models") if getattr(options, name)
    }
    path = frameworks.run(frameworks.Settings(**changes), console, options.merge)
    _show(console, frameworks_report.tables(records.read("frameworks") or {}), path, None)


def _observing(options: argparse.Namespace, console: Console) -> None:
    changes = {name: getattr(options, name) for name in ("against", "rounds") if getattr(options, name)}
    changes |= {name: tuple(getattr(options, name)) for name in ("workloads", "variants") if getattr(options, name)}
    if options.steps:
        changes["steps"] = tuple((name, options.steps) for name in observing.WORKLOADS)
    path = observing.run(observing.Settings(**changes), console)
    content = records.read("observing") or {}
    _show(console, observing.tables(content), path, observing.picture(content))


REPORTS: dict[str, Any] = {
    "collective": collective_report,
    "training": training_report,
    "hosts": hosts_report,
    "gpu": gpu_report,
    "start": start,
    "sets": sets,
    "observing": observing,
    "autotune": autotune_report,
    "autotune-jobs": jobs_report,
    "compression": compression,
    "hub": hub,
    "scaling": scaling,
    "scaling-measured": measured,
    "frameworks": frameworks_report,
}
"""Modules that make the tables of each record."""


def _report(options: argparse.Namespace, console: Console) -> None:
    found = {name: content for name in options.only or REPORTS if (content := records.read(name))}
    if not found:
        raise SystemExit("nothing to report: run `python -m benchmarks all` first")
    tables = [] if options.only else [acceptance.table(found.get("collective"), found.get("training"))]
    for name, content in found.items():
        made: list[Table] = REPORTS[name].tables(content)
        if made:
            command = f"Made by `{content['environment']['command']}` in {content['seconds']:.0f} s."
            made[0].note = "\n\n".join(filter(None, (made[0].note, command)))
        tables += made
    text = "\n".join(table.markdown() for table in tables)
    if options.write:
        _replace(options.write, text, "-".join(options.only or ("tables",)))
    elif options.markdown:
        sys.stdout.write(text)
    else:
        for table in tables:
            table.show(console)


def _replace(page: Path, text: str, name: str) -> None:
    """Replace the text between two marks of a page."""
    begin, end = MARKS[0].format(name), MARKS[1].format(name)
    whole = page.read_text(encoding="utf-8")
    if begin not in whole or end not in whole:
        raise SystemExit(f"{page} has no lines {begin} and {end}")
    before, after = whole.split(begin, 1)[0], whole.split(end, 1)[1]
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")


def _show(console: Console, tables: list[Table], path: Path, picture: Path | None) -> None:
    for table in tables:
        table.show(console)
    console.print(f"written: {path}" + (f", {picture}" if picture else ""), soft_wrap=True)


COMMANDS: dict[str, Callable[[argparse.Namespace, Console], None]] = {
    "collective": _collective,
    "training": _training,
    "sets": _sets,
    "start": _start,
    "frameworks": _frameworks,
    "observing": _observing,
    "autotune": _autotune,
    "autotune-jobs": _jobs,
    "gpu": gpu.execute,
    "hosts": _hosts,
    "compression": _compression,
    "hub": _hub,
    "scaling": _scaling,
    "report": _report,
}
ALL = ("collective", "training", "report")


def main() -> None:
    """Run one command. Ctrl-C and SIGTERM end all ranks first."""
    options = _parser().parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    try:
        with termination_as_interrupt():
            if options.command == "all":
                options.write, options.markdown, options.only = None, False, None
            for name in ALL if options.command == "all" else (options.command,):
                COMMANDS[name](options, console)
    except RankError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
