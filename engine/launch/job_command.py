"""`enginerun job riseml.yml`: run an experiment that is described in RiseML's form, line by line, on this machine."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import readable
from ..host import machine
from .check_build import installed
from .errors import LaunchError
from .job import JobRun
from .options import MEBIBYTE, Options, one_host, parse
from .riseml import FRAMEWORKS, Description, command_of, describe

USUAL = "riseml.yml"
USAGE = """usage: enginerun job [FILE] [--check] [options of enginerun]

Run the experiment that FILE describes in RiseML's form (riseml.yml), all its workers on this machine. Each process
executes a line of 'run', and then waits until all have, before the next.

--check  show what would be started, and start nothing

Other options are those of enginerun, except for the number of ranks and the command, which the file tells."""


@dataclass(frozen=True)
class Bounds:
    """What a process may use.

    Attributes
    ----------
    cpus : int or None
    memory : int or None
        Bytes.
    devices : tuple of str
        CUDA_VISIBLE_DEVICES of each rank; empty: as it is.
    """

    cpus: int | None
    memory: int | None
    devices: tuple[str, ...]


def main(arguments: Sequence[str]) -> int:
    """Run `enginerun job`.

    Parameters
    ----------
    arguments : sequence of str
        Those behind `job`.

    Returns
    -------
    int
        Exit code: 0, or that of the first line that failed, as `JobRun.run` says.

    Raises
    ------
    LaunchError
        The file, or a line of it, cannot be run here.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    named = bool(arguments) and not arguments[0].startswith("-")
    path = Path(arguments[0] if named else USUAL)
    check = "--check" in arguments
    rest = [argument for argument in arguments[named:] if argument != "--check"]
    description = describe(path)
    bounds = bounds_of(description, devices_here(os.environ.get("CUDA_VISIBLE_DEVICES"), Path("/dev")))
    jobs = [_options(description, bounds, line, rest) for line in description.run]
    for line in said(path, description, bounds, hosts_given=_hosts_given(rest)):
        if check:
            print(line)
        elif not jobs[0].quiet:
            _say(line)
    if check:
        for number, job in enumerate(jobs, 1):
            print(f"line {number} of {len(jobs)}: {shlex.join(_arguments(description, bounds, rest, job.command))}")
        return 0
    return _run(jobs, description.run)


def _run(jobs: Sequence[Options], lines: Sequence[str]) -> int:
    """One job after another; what follows one that fails is not started."""
    for number, job in enumerate(jobs, 1):
        if len(jobs) > 1:
            if not job.quiet:
                _say(f"line {number} of {len(jobs)}: {lines[number - 1]}")
            if job.directory is not None:
                job = replace(job, directory=job.directory / f"line.{number}")
        code = JobRun(job).run()
        if code:
            if number < len(jobs):
                _say(f"line {number} of {len(jobs)} has failed: what follows it is not started")
            return code
    return 0


def _say(line: str) -> None:
    print(f"enginerun: {line}", file=sys.stderr, flush=True)


def _hosts_given(rest: Sequence[str]) -> bool:
    names = ("-H", "--hosts", "-hostfile", "--hostfile")
    return any(argument.partition("=")[0] in names for argument in rest)


def _arguments(
    description: Description, bounds: Bounds, rest: Sequence[str], command: Sequence[str]
) -> tuple[str, ...]:
    """What `enginerun` takes for one line. What the user adds goes before what the file says."""
    cpus = () if bounds.cpus is None else ("--cpus-per-rank", str(bounds.cpus))
    horovod = ("--horovod",) if description.distributed else ()
    return ("enginerun", "-np", str(description.size), *horovod, *cpus, *rest, "--", *command)


def _options(description: Description, bounds: Bounds, line: str, rest: Sequence[str]) -> Options:
    command = command_of(line)
    options = one_host(parse(_arguments(description, bounds, rest, command)[1:]), "'enginerun job'")
    if options.command != command:
        raise LaunchError(f"the file says what runs: leave {shlex.join(_other(options.command))!r} out")
    if options.size != description.size:
        raise LaunchError(
            f"-np {options.size} is not what the file says, {description.size}: leave -np out, or change 'workers'"
        )
    if bounds.cpus is not None and options.binding and description.cpus is not None:
        there, wanted = len(machine.facts().cpus), bounds.cpus * description.size
        if wanted > there:
            raise LaunchError(
                f"{description.cpus.place}: {readable.count(description.workers, 'worker')} need {wanted} CPUs, and "
                f"{there} are in the affinity set: ask for fewer, or add --no-binding"
            )
    return replace(options, memory=bounds.memory, devices=bounds.devices)


def _other(command: Sequence[str]) -> Sequence[str]:
    return command[: command.index("--")] if "--" in command else command


def devices_here(visible: str | None, devices: Path) -> tuple[str, ...]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them.

    Parameters
    ----------
    visible : str or None
        The launcher's own CUDA_VISIBLE_DEVICES, to which the job is bound; None: not set.
    devices : Path
        `/dev`.

    Returns
    -------
    tuple of str
    """
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip())
    numbers = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return tuple(sorted((found[1] for found in numbers if found), key=int))


def bounds_of(description: Description, devices: Sequence[str]) -> Bounds:
    """What each process may use, of what a worker has.

    Parameters
    ----------
    description : Description
    devices : sequence of str
        The machine's GPUs.

    Returns
    -------
    Bounds
        With a process for each GPU, all see those of all workers, for they choose by `local_rank`, which counts the
        ranks of this machine. Otherwise each sees its share of its worker's, or all of them if they cannot be divided.

    Raises
    ------
    LaunchError
        Fewer CPUs than processes, or more GPUs than there are.
    """
    processes = description.processes
    cpus = memory = None
    if description.cpus is not None:
        cpus = description.cpus.value // processes
        if cpus == 0:
            raise LaunchError(
                f"{description.cpus.place}: a worker has {processes} processes, and at least one CPU for each is needed"
            )
    if description.mem is not None:
        memory = description.mem.value * MEBIBYTE // processes
    return Bounds(cpus, memory, _devices(description, devices))


def _devices(description: Description, devices: Sequence[str]) -> tuple[str, ...]:
    if description.gpus is None:
        return ()
    gpus, processes, size = description.gpus.value, description.processes, description.size
    needed = gpus * description.workers
    if needed > len(devices):
        raise LaunchError(
            f"{description.gpus.place}: {readable.count(description.workers, 'worker')} need {needed} GPUs, and this "
            f"machine has {len(devices)}: write 'gpus: 0', and 'workers: {{count: .., processes: ..}}'"
        )
    if gpus == processes:
        return (",".join(devices[:needed]),) * size
    shares = processes if gpus % processes == 0 else 1
    share = gpus // shares
    first = [rank // processes * gpus + (rank % processes * share if shares > 1 else 0) for rank in range(size)]
    return tuple(",".join(devices[at : at + share]) for at in first)


def said(path: Path, description: Description, bounds: Bounds, hosts_given: bool) -> list[str]:
    """What the user is told before anything is started, in a line each."""
    project = f"project {description.project}, " if description.project else ""
    where = "" if hosts_given or not description.distributed else "; no hosts are given: this machine runs them all"
    lines = [
        f"{path}: {project}{readable.count(description.workers, 'worker')} with "
        f"{description.processes} process{'es' * (description.processes > 1)} each{where}"
    ]
    found = installed(FRAMEWORKS[description.framework])
    if found is None:
        lines.append(f"{description.framework} is not installed here, and nothing is installed by this")
    elif description.version is not None and not _same(description.version.value, found[1]):
        lines.append(
            f"{description.version.place}: {description.framework} {description.version.value} is asked for; what runs "
            f"is what is installed, {found[0]} {found[1]}"
        )
    limits = []
    if bounds.cpus is not None:
        limits.append(readable.count(bounds.cpus, "CPU"))
    if bounds.memory is not None:
        limits.append(f"{readable.size(bounds.memory)} of private memory")
    if bounds.devices:
        shown = dict.fromkeys(f"{devices!r}" for devices in bounds.devices)
        limits.append(f"CUDA_VISIBLE_DEVICES={' | '.join(shown)}")
    if limits:
        lines.append(f"each process has {', '.join(limits)}")
    return lines


def _same(asked: str, there: str) -> bool:
    """Whether a version is the one that was asked for; `2.1` asks for any 2.1.x, and `+cpu` is of no interest."""
    public = there.partition("+")[0]
    return public == asked or public.startswith(f"{asked}.")
