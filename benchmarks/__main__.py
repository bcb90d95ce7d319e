"""Command `python -m benchmarks collective | training | frameworks | ...`: measure the engine beside its baselines."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import acceptance, compression, late_steps, observing, sets, start
from benchmarks.autotune import jobs, jobs_report
from benchmarks.autotune import report as autotune_report
from benchmarks.autotune import run as autotune
from benchmarks.autotune.contenders import CONTENDERS as POLICIES
from benchmarks.autotune.surfaces import NOISES
from benchmarks.c10d import run as c10d
from benchmarks.collective import report as collective_report
from benchmarks.collective import run as collective
from benchmarks.collective.contenders import NAMES
from benchmarks.common import records
from benchmarks.common.processes import RankError, interrupt_on_termination
from benchmarks.common.tables import Table
from benchmarks.figures import draw
from benchmarks.frameworks import report as frameworks_report
from benchmarks.frameworks import run as frameworks
from benchmarks.gpu import command as gpu
from benchmarks.gpu import report as gpu_report
from benchmarks.hosts import report as hosts_report
from benchmarks.hosts import run as hosts
from benchmarks.hosts.contenders import NAMES as HOST_CONTENDERS
from benchmarks.hosts.places import CABLES
from benchmarks.hub import run as hub
from benchmarks.local_steps import run as local_steps
from benchmarks.scaling import measured
from benchmarks.scaling import run as scaling
from benchmarks.training import report as training_report
from benchmarks.training import run as training

WIDTH = 160
"""Number of columns of output that is not a terminal."""
MARKS = ("<!-- {}: begin -->", "<!-- {}: end -->")
"""Lines of a page between which tables are written."""


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the engine beside its baselines."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add_command(name: str, what: str) -> Callable[..., Any]:
        return commands.add_parser(name, help=what).add_argument

    add = add_command("collective", "allreduce and other operations by size, cost of a call, idle engine")
    add("--quick", action="store_true", help="about a minute: fewer sizes, shorter blocks")
    add("--ranks", type=int, nargs="+", help="world sizes (2 4)")
    add("--sizes", type=int, nargs="+", help="in bytes, multiples of 4; of operations with --only or --parts")
    add("--only", nargs="+", choices=collective.OPERATIONS, help="these operations by size, nothing else")
    add("--rounds", type=int, help="rounds in which the contenders take turns")
    add("--contenders", nargs="+", choices=NAMES)
    add("--parts", nargs="+", choices=collective.PARTS)
    add("--against", metavar="DIR", help="also another build of the engine, from `pip install --target DIR`")

    add = add_command("training", "what data parallelism adds to a training step")
    add("--quick", action="store_true", help="4 rounds of short blocks")
    add("--workloads", nargs="+", choices=training.WORKLOADS)
    add("--variants", nargs="+", choices=training.VARIANTS)
    add("--ranks", type=int)
    add("--rounds", type=int, help="rounds in which the variants take turns")

    add = add_command("frameworks", "calls from TensorFlow, JAX and torch, and steps of Keras, beside the bare ones")
    add("--parts", nargs="+", choices=frameworks.PARTS)
    add("--frameworks", nargs="+", choices=frameworks.BACKENDS, help="of the calls; of `fit` the backends of Keras")
    add("--models", nargs="+", choices=frameworks.MODELS, help="of `fit`")
    add("--ranks", type=int)
    add("--rounds", type=int, help="rounds in which everything takes turns")
    add("--merge", action="store_true", help="keep what the last run has, and is not measured now")

    gpu.add_options(add_command("gpu", gpu.HELP))

    add = add_command(
        "hosts", "allreduce, training and idleness on hosts that are namespaces of this machine; needs root"
    )
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

    add = add_command("compression", "allreduce that travels as halves, beside the uncompressed one")
    add("--ranks", type=int)
    add("--bytes", type=int, dest="nbytes", help="of the float32 tensor")
    add("--rounds", type=int, help="rounds in which the variants take turns")

    add = add_command(
        "scaling", "the simulator of `enginerun foresee` beside Horovod's published scaling; measures nothing"
    )
    add("--measured", action="store_true", help="beside 1 to 8 hosts that are namespaces of this machine; needs root")
    add("--models", nargs="+", choices=measured.MeasuredSettings().models, help="of what is measured")
    add("--variants", nargs="+", choices=measured.MeasuredSettings().variants, help="likewise")

    add = add_command("start", "how a job on several hosts starts, by its parts; needs root")
    add(
        "--here",
        action="store_true",
        help="on this host instead: imports, and the first line of a script; needs no root",
    )
    add("--hosts", type=int, help="namespaces of this machine (4)")
    add("--per-host", type=int, help="ranks on each (4)")
    add("--rounds", type=int, help="jobs")
    add = add_command(
        "hub", "what the coordinator's rank spends on a step, by the number of ranks; other hosts are played"
    )
    add("--ranks", type=int, nargs="+", help="world sizes (8 32 64 128 256)")
    add("--steps", type=int)

    add = add_command(
        "local-steps", "local steps and outer averaging: throughput over a slow cable, loss of a small GPT"
    )
    add("--parts", nargs="+", choices=local_steps.PARTS)
    add("--rounds", type=int, help="rounds in which the variants of the throughput take turns")
    add("--steps", type=int, help="inner steps of each training")
    add("--synchronous-steps", type=int, help="number of them with averaged gradients, before the local ones")
    add("--seeds", type=int, nargs="+", help="seeds of the trainings")
    add("--compression", help="of the changes that travel (bf16)")

    add = add_command("sets", "allreduce in process sets, beside the world's and other libraries' groups")
    add("--ranks", type=int, help="of the world; half of them in each set")
    add("--sizes", type=int, nargs="+", help="message sizes in bytes, multiples of 4")
    add("--rounds", type=int, help="rounds in which the contenders take turns")
    add("--contenders", nargs="+", choices=sets.NAMES)

    add = add_command("c10d", "torch.distributed on the engine and on gloo: reductions, messages, new groups")
    add("--rounds", type=int, help="rounds in which the backends take turns")

    add = add_command("observing", "what a timeline, and what metrics cost 2000 tensors of 1 KiB")
    add("--workloads", nargs="+", choices=observing.WORKLOADS)
    add("--against", metavar="DIR", help="also another build of the engine, from `pip install --target DIR`")
    add("--variants", nargs="+", choices=[name for name in observing.VARIANTS if name != observing.OTHER])
    add("--rounds", type=int, help="rounds in which the variants take turns")
    add("--steps", type=int, help="timed steps in a block: the fewer, the less the machine changes meanwhile")

    add = add_command("late-steps", "what ranks say about steps that are delayed on purpose; needs root")
    add("--delays", type=int, help="number of delays of a job (200)")
    add("--seeds", type=int, nargs="+", help="a job with other delays for each (1)")

    add = add_command("autotune", "the tuner beside other policies, on synthetic and recorded surfaces")
    add("--parts", nargs="+", choices=autotune.PARTS)
    add("--surfaces", nargs="+", choices=autotune.list_surfaces(), help="of the searches")
    add("--noises", nargs="+", choices=[noise.name for noise in NOISES], help="of synthetic surfaces")
    add("--contenders", nargs="+", choices=tuple(POLICIES))
    add("--seeds", type=int, help="searches of each kind; where nothing matters five times as many of ours")
    add("--merge", action="store_true", help="keep what the last run has, and is not run now")

    add = add_command("autotune-jobs", "the tuner on jobs that train, against every setting of a grid")
    add("--workloads", nargs="+", choices=jobs.WORKLOADS)
    for name, what in (
        ("searches", "by the tuner, each in a job of its own"),
        ("rounds", "of the last measurement, in which settings take turns"),
        ("grid-rounds", "of the grid"),
    ):
        add(f"--{name}", type=int, help=what)
    add("--merge", action="store_true", help="keep workloads of the last run that are not run now")
    add("--record", action="store_true", help="keep the grid as a surface for `autotune`")

    add = add_command("all", "collective and training, then the report")
    add("--quick", action="store_true")

    add = add_command("draw", "figures of the pages, from recorded runs; measures nothing")
    add("names", nargs="*", metavar="NAME", help=f"all, or some of: {', '.join(draw.NAMES)}")
    add("--out", type=Path, default=draw.IMAGES, metavar="DIRECTORY", help="docs/images")

    add = add_command("report", "tables from the JSON of the last runs")
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


def _run_collective(options: argparse.Namespace, console: Console) -> None:
    settings = collective.CollectiveSettings.for_quick_run() if options.quick else collective.CollectiveSettings()
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
            settings = settings.select_operations(options.only)
        try:
            settings.check()
        except ValueError as error:
            raise SystemExit(f"--sizes: {error}") from None
    path = collective.run(settings, console)
    content = records.read("collective") or {}
    _print_results(console, collective_report.build_tables(content), path, collective_report.draw_figure(content))


def _run_training(options: argparse.Namespace, console: Console) -> None:
    settings = training.TrainingSettings(rounds=4, block_seconds=0.5) if options.quick else training.TrainingSettings()
    if options.command == "training":
        changes: dict[str, Any] = {name: tuple(getattr(options, name) or ()) for name in ("workloads", "variants")}
        changes |= {name: getattr(options, name) for name in ("ranks", "rounds")}
        settings = dataclasses.replace(settings, **{name: value for name, value in changes.items() if value})
    path = training.run(settings, console)
    content = records.read("training") or {}
    _print_results(console, training_report.build_tables(content), path, training_report.draw_figure(content))


def _run_hosts(options: argparse.Namespace, console: Console) -> None:
    settings = hosts.HostsSettings.for_quick_run() if options.quick else hosts.HostsSettings()
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
    _print_results(console, hosts_report.build_tables(content), path, hosts_report.draw_figure(content))


def _run_compression(options: argparse.Namespace, console: Console) -> None:
    given = {name: getattr(options, name) for name in ("ranks", "nbytes", "rounds") if getattr(options, name)}
    path = compression.run(compression.CompressionSettings(**given), console)
    _print_results(console, compression.build_tables(records.read("compression") or {}), path, None)


def _run_hub(options: argparse.Namespace, console: Console) -> None:
    changes: dict[str, Any] = {"ranks": tuple(options.ranks)} if options.ranks else {}
    changes |= {"steps": options.steps} if options.steps else {}
    path = hub.run(hub.HubSettings(**changes), console)
    content = records.read("hub") or {}
    _print_results(console, hub.build_tables(content), path, hub.draw_figure(content))


def _run_scaling(options: argparse.Namespace, console: Console) -> None:
    if options.measured:
        chosen = {name: tuple(getattr(options, name)) for name in ("models", "variants") if getattr(options, name)}
        settings = measured.MeasuredSettings(**chosen)
        path = measured.run(settings, console)
        _print_results(console, measured.build_tables(records.read("scaling-measured") or {}), path, None)
        return
    path = scaling.run(scaling.ScalingSettings())
    _print_results(console, scaling.build_tables(records.read("scaling") or {}), path, None)


def _run_autotune(options: argparse.Namespace, console: Console) -> None:
    changes: dict[str, Any] = {
        name: tuple(getattr(options, name))
        for name in ("parts", "surfaces", "noises", "contenders")
        if getattr(options, name)
    }
    if options.seeds:
        changes |= {"seeds": options.seeds, "flat_seeds": 5 * options.seeds}
    try:
        path = autotune.run(autotune.AutotuneSettings(**changes), console, options.merge)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    content = records.read("autotune") or {}
    _print_results(console, autotune_report.build_tables(content), path, autotune_report.draw_figure(content))


def _run_autotune_jobs(options: argparse.Namespace, console: Console) -> None:
    names = ("searches", "rounds", "grid_rounds", "record")
    changes: dict[str, Any] = {name: getattr(options, name) for name in names if getattr(options, name)}
    if options.workloads:
        changes["workloads"] = tuple(options.workloads)
    path = jobs.run(jobs.TunedJobsSettings(**changes), console, options.merge)
    content = records.read("autotune-jobs") or {}
    _print_results(console, jobs_report.build_tables(content), path, jobs_report.draw_figure(content))


def _run_local_steps(options: argparse.Namespace, console: Console) -> None:
    given = ("rounds", "steps", "synchronous_steps", "compression")
    changes: dict[str, Any] = {name: getattr(options, name) for name in given if getattr(options, name) is not None}
    changes |= {name: tuple(getattr(options, name)) for name in ("parts", "seeds") if getattr(options, name)}
    path = local_steps.run(local_steps.LocalStepSettings(**changes), console)
    _print_results(console, local_steps.build_tables(records.read("local-steps") or {}), path, None)


def _run_sets(options: argparse.Namespace, console: Console) -> None:
    changes = {name: getattr(options, name) for name in ("ranks", "rounds") if getattr(options, name)}
    changes |= {name: tuple(getattr(options, name)) for name in ("sizes", "contenders") if getattr(options, name)}
    settings = sets.ProcessSetSettings(**changes)
    try:
        settings.check()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    path = sets.run(settings, console)
    content = records.read("sets") or {}
    _print_results(console, sets.build_tables(content), path, sets.draw_figure(content))


def _run_c10d(options: argparse.Namespace, console: Console) -> None:
    path = c10d.run(c10d.TorchSettings(**({"rounds": options.rounds} if options.rounds else {})), console)
    _print_results(console, c10d.build_tables(records.read("c10d") or {}), path, None)


def _run_start(options: argparse.Namespace, console: Console) -> None:
    if options.here:
        path = start.run_here(options.rounds or 15, console)
        _print_results(console, start.build_tables_here(records.read("start-here") or {}), path, None)
        return
    names = ("hosts", "per_host", "rounds")
    settings = start.StartSettings(
        **{name: getattr(options, name) for name in names if getattr(options, name) is not None}
    )
    try:
        settings.check()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    path = start.run(settings, console)
    _print_results(console, start.build_tables(records.read("start") or {}), path, None)


def _run_frameworks(options: argparse.Namespace, console: Console) -> None:
    changes: dict[str, Any] = {name: getattr(options, name) for name in ("ranks", "rounds") if getattr(options, name)}
    changes |= {
        name: tuple(getattr(options, name)) for name in ("parts", "frameworks", "models") if getattr(options, name)
    }
    path = frameworks.run(frameworks.FrameworkSettings(**changes), console, options.merge)
    _print_results(console, frameworks_report.build_tables(records.read("frameworks") or {}), path, None)


def _run_observing(options: argparse.Namespace, console: Console) -> None:
    changes = {name: getattr(options, name) for name in ("against", "rounds") if getattr(options, name)}
    changes |= {name: tuple(getattr(options, name)) for name in ("workloads", "variants") if getattr(options, name)}
    if options.steps:
        changes["steps"] = tuple((name, options.steps) for name in observing.WORKLOADS)
    path = observing.run(observing.ObservingSettings(**changes), console)
    content = records.read("observing") or {}
    _print_results(console, observing.build_tables(content), path, observing.draw_figure(content))


def _run_late_steps(options: argparse.Namespace, console: Console) -> None:
    changes: dict[str, Any] = {"delays": options.delays} if options.delays else {}
    changes |= {"seeds": tuple(options.seeds)} if options.seeds else {}
    try:
        path = late_steps.run(late_steps.LateStepSettings(**changes), console)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    _print_results(console, late_steps.build_tables(records.read("late-steps") or {}), path, None)


def _draw_figures(options: argparse.Namespace, console: Console) -> None:
    if unknown := set(options.names) - set(draw.NAMES):
        raise SystemExit(f"no such figure: {', '.join(sorted(unknown))}; there are {', '.join(draw.NAMES)}")
    for path in draw.draw_figures(options.names or draw.NAMES, options.out):
        console.print(str(path), soft_wrap=True)


REPORTS: dict[str, Any] = {
    "collective": collective_report,
    "training": training_report,
    "hosts": hosts_report,
    "gpu": gpu_report,
    "start": start,
    "sets": sets,
    "local-steps": local_steps,
    "c10d": c10d,
    "observing": observing,
    "late-steps": late_steps,
    "autotune": autotune_report,
    "autotune-jobs": jobs_report,
    "compression": compression,
    "hub": hub,
    "scaling": scaling,
    "scaling-measured": measured,
    "frameworks": frameworks_report,
}
"""Modules that make the tables of each record."""


def _write_report(options: argparse.Namespace, console: Console) -> None:
    found = {name: content for name in options.only or REPORTS if (content := records.read(name))}
    if not found:
        raise SystemExit("nothing to report: run `python -m benchmarks all` first")
    tables = [] if options.only else [acceptance.build_table(found.get("collective"), found.get("training"))]
    for name, content in found.items():
        made: list[Table] = REPORTS[name].build_tables(content)
        if made:
            command = f"Made by `{content['environment']['command']}` in {content['seconds']:.0f} s."
            made[0].note = "\n\n".join(filter(None, (made[0].note, command)))
        tables += made
    text = "\n".join(table.to_markdown() for table in tables)
    if options.write:
        _replace_section(options.write, text, "-".join(options.only or ("tables",)))
    elif options.markdown:
        sys.stdout.write(text)
    else:
        for table in tables:
            table.print_to(console)


def _replace_section(page: Path, text: str, name: str) -> None:
    """Replace the text between two marks of a page."""
    begin, end = MARKS[0].format(name), MARKS[1].format(name)
    whole = page.read_text(encoding="utf-8")
    if begin not in whole or end not in whole:
        raise SystemExit(f"{page} has no lines {begin} and {end}")
    before, after = whole.split(begin, 1)[0], whole.split(end, 1)[1]
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")


def _print_results(console: Console, tables: list[Table], path: Path, picture: Path | None) -> None:
    for table in tables:
        table.print_to(console)
    console.print(f"written: {path}" + (f", {picture}" if picture else ""), soft_wrap=True)


COMMANDS: dict[str, Callable[[argparse.Namespace, Console], None]] = {
    "collective": _run_collective,
    "training": _run_training,
    "sets": _run_sets,
    "local-steps": _run_local_steps,
    "c10d": _run_c10d,
    "start": _run_start,
    "frameworks": _run_frameworks,
    "observing": _run_observing,
    "late-steps": _run_late_steps,
    "autotune": _run_autotune,
    "autotune-jobs": _run_autotune_jobs,
    "gpu": gpu.run_command,
    "hosts": _run_hosts,
    "compression": _run_compression,
    "hub": _run_hub,
    "scaling": _run_scaling,
    "draw": _draw_figures,
    "report": _write_report,
}
ALL = ("collective", "training", "report")


def main() -> None:
    """Run one command. Ctrl-C and SIGTERM end all ranks first."""
    options = _build_parser().parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    try:
        with interrupt_on_termination():
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
