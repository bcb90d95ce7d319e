"""`enginerun job riseml.yml`: run an experiment described in RiseML's format, line by line."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...host import machine
from ...text.readable import format_count, format_ranks, format_size, print_plain
from ..cli.check_build import find_distribution
from ..cli.options import MEBIBYTE, Options, parse
from ..errors import LaunchError
from ..hosts.host_list import HostRanks, told_idle
from ..job import JobRun
from ..process.devices import devices_here, share_devices
from .riseml import FRAMEWORKS, Description, command_of, describe

USUAL = "riseml.yml"
USAGE = """usage: enginerun job [FILE] [--check] [options of enginerun]

Run the experiment that FILE describes in RiseML's form (riseml.yml), its workers on this machine, or on the hosts of -H
or --hostfile. Each process executes a line of 'run', and then waits until all have, before the next.

--check  show what would be started, and start nothing

Other options are those of enginerun, except for the number of ranks and the command, which the file tells."""


@dataclass(frozen=True)
class Bounds:
    """Resources that each process may use."""

    cpus: int | None  # number of CPUs; None: no limit
    memory: int | None  # private memory in bytes; None: no limit


def main(arguments: Sequence[str]) -> int:
    """Run `enginerun job`; return 0, or the exit code of `JobRun.run` for the first line that failed.

    `arguments` are those after `job`. A `LaunchError` is raised if the file, or a line of it, cannot be run here.
    """
    if {"-h", "--help"} & set(arguments):
        print_plain(USAGE)
        return 0
    named = bool(arguments) and not arguments[0].startswith("-")
    path = Path(arguments[0] if named else USUAL)
    check = "--check" in arguments
    rest = [argument for argument in arguments[named:] if argument != "--check"]
    description = describe(path)
    bounds = bounds_of(description)
    jobs = [_parse_options(description, bounds, line, rest) for line in description.run]
    places = jobs[0].places
    devices = () if places else devices_of(description, devices_here(os.environ.get("CUDA_VISIBLE_DEVICES")))
    lines = describe_job(path, description, bounds, devices, places, jobs[0].idle, hosts_given=_hosts_given(rest))
    for line in lines:
        if check:
            print_plain(line)
        elif not jobs[0].quiet:
            _show_line(line)
    if check:
        for number, job in enumerate(jobs, 1):
            words = _make_command_line(description, bounds, rest, job.command)
            print_plain(f"line {number} of {len(jobs)}: {' '.join(map(quote_word, words))}")
        return 0
    return _run([replace(job, idle=()) for job in jobs], description.run)


def _run(jobs: Sequence[Options], lines: Sequence[str]) -> int:
    """Run the jobs one after another; after one that fails, no further job is started. Return the exit code."""
    for number, job in enumerate(jobs, 1):
        if len(jobs) > 1:
            if not job.quiet:
                _show_line(f"line {number} of {len(jobs)}: {lines[number - 1]}")
            if job.directory is not None:
                job = replace(job, directory=job.directory / f"line.{number}")
        code = JobRun(job).run()
        if code:
            if number < len(jobs):
                _show_line(f"line {number} of {len(jobs)} has failed: what follows it is not started")
            return code
    return 0


def quote_word(word: str) -> str:
    """Quote a word for a shell; one with unprintable characters gets the form `$'..'`, with escapes."""
    if word.isprintable():
        return shlex.quote(word)
    shown = "".join(_escape_character(each) for each in word)
    return f"$'{shown}'"


def _escape_character(each: str) -> str:
    if each in "\\'":
        return f"\\{each}"
    if each.isprintable():
        return each
    if each == "\n":
        return "\\n"
    return f"\\x{ord(each):02x}" if ord(each) < 0x80 else f"\\U{ord(each):08x}"


def _show_line(line: str) -> None:
    print_plain(f"enginerun: {line}", file=sys.stderr)


def _hosts_given(rest: Sequence[str]) -> bool:
    names = ("-H", "--hosts", "-hostfile", "--hostfile")
    return any(argument.partition("=")[0] in names for argument in rest)


def _make_command_line(
    description: Description, bounds: Bounds, rest: Sequence[str], command: Sequence[str]
) -> tuple[str, ...]:
    """Return the command line of `enginerun` for one line; the user's options override those of the file."""
    cpus = () if bounds.cpus is None else ("--cpus-per-rank", str(bounds.cpus))
    horovod = ("--horovod",) if description.distributed else ()
    return ("enginerun", "-np", str(description.size), *horovod, *cpus, *rest, "--", *command)


def _parse_options(description: Description, bounds: Bounds, line: str, rest: Sequence[str]) -> Options:
    command = command_of(line)
    options = parse(_make_command_line(description, bounds, rest, command)[1:])
    if options.command != command:
        words = options.command[: options.command.index("--")] if "--" in options.command else options.command
        raise LaunchError(f"the file says what runs: leave {shlex.join(words)!r} out")
    if options.size != description.size:
        raise LaunchError(
            f"-np {options.size} is not what the file says, {description.size}: leave -np out, or change 'workers'"
        )
    _check_whole(description, options.places)
    _check_cpus(description, bounds, options)
    gpus = None if description.gpus is None else (description.gpus.value, description.processes)
    return replace(options, memory=bounds.memory, gpus=gpus)


def _check_cpus(description: Description, bounds: Bounds, options: Options) -> None:
    """Refuse numbers of CPUs to which the processes cannot be bound; does nothing with `--no-binding`."""
    if bounds.cpus is None or description.cpus is None or not options.binding:
        return
    if description.cpus.value < description.processes:
        raise LaunchError(
            f"{description.cpus.place}: a worker has {description.processes} processes, and at least one CPU for each "
            "is needed: ask for more, or add --no-binding"
        )
    there, wanted = len(machine.collect_facts().cpus), bounds.cpus * description.size
    if wanted > there and not options.places:
        raise LaunchError(
            f"{description.cpus.place}: {format_count(description.workers, 'worker')} need {wanted} CPUs, and "
            f"{there} are in the affinity set: ask for fewer, or add --no-binding"
        )


def _check_whole(description: Description, places: Sequence[HostRanks]) -> None:
    """Refuse hosts whose slots would divide a worker between two hosts."""
    processes = description.processes
    for place in places:
        for worker in dict.fromkeys(rank // processes for rank in place.ranks):
            ranks = range(worker * processes, (worker + 1) * processes)
            if not set(ranks) <= set(place.ranks):
                raise LaunchError(
                    f"--hosts: worker {worker} has {processes} processes ({format_ranks(ranks)}), and {place.name!r} "
                    f"would run some of them: give each host a multiple of {processes} slots"
                )


def bounds_of(description: Description) -> Bounds:
    """Return the resources of each process: its share of its worker's."""
    processes = description.processes
    cpus = memory = None
    if description.cpus is not None:
        cpus = max(1, description.cpus.value // processes)
    if description.mem is not None:
        memory = description.mem.value * MEBIBYTE // processes
    return Bounds(cpus, memory)


def devices_of(description: Description, devices: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs that each process sees, if all processes run on this machine, whose GPUs are `devices`.

    The result is that of `share_devices`; empty if the description names no GPUs. A `LaunchError` is raised if the
    machine has too few.
    """
    if description.gpus is None:
        return ()
    try:
        return share_devices(description.gpus.value, description.processes, description.size, devices)
    except LaunchError as error:
        raise LaunchError(f"{description.gpus.place}: {error}") from None


def describe_job(
    path: Path,
    description: Description,
    bounds: Bounds,
    devices: Sequence[str] = (),
    places: Sequence[HostRanks] = (),
    idle: Sequence[str] = (),
    hosts_given: bool = False,
) -> list[str]:
    """Return the lines that the user is shown before anything is started."""
    project = f"project {description.project}, " if description.project else ""
    where = "" if hosts_given or not description.distributed else "; no hosts are given: this machine runs them all"
    lines = [
        f"{path}: {project}{format_count(description.workers, 'worker')} with "
        f"{description.processes} process{'es' * (description.processes > 1)} each{where}"
    ]
    for place in places:
        workers = dict.fromkeys(rank // description.processes for rank in place.ranks)
        names = f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"
        lines.append(f"{place.name}: {names} ({format_ranks(place.ranks)})")
    lines += told_idle(idle, description.size)
    found = find_distribution(FRAMEWORKS[description.framework])
    if found is None:
        lines.append(f"{description.framework} is not installed here, and nothing is installed by this")
    elif description.version is not None and not _is_same_version(description.version.value, found[1]):
        lines.append(
            f"{description.version.place}: {description.framework} {description.version.value} is asked for; what runs "
            f"is what is installed, {found[0]} {found[1]}"
        )
    limits = []
    if bounds.cpus is not None:
        limits.append(format_count(bounds.cpus, "CPU"))
    if bounds.memory is not None:
        limits.append(f"{format_size(bounds.memory)} of private memory")
    if devices:
        shown = dict.fromkeys(f"{visible!r}" for visible in devices)
        limits.append(f"CUDA_VISIBLE_DEVICES={' | '.join(shown)}")
    if limits:
        lines.append(f"each process has {', '.join(limits)}")
    return lines


def _is_same_version(asked: str, there: str) -> bool:
    """Return whether a version is the one that was asked for; `2.1` matches any 2.1.x, and `+cpu` is ignored."""
    public = there.partition("+")[0]
    return public == asked or public.startswith(f"{asked}.")
