"""Search for jobs of this user on this host, and access to their pages.

A job of `enginerun` is a process that holds a page for each rank, in the order of ranks. Ranks that were started
otherwise each hold a page of their own; they belong together if their launcher gives them one job id or started them.
Several processes may hold a page: ranks open what the launcher created, and children that a rank forks inherit it.
The page belongs to the oldest of them. On several hosts, each agent of `enginerun` holds the pages of its host's
ranks, and the launcher holds copies of all. An agent on the launcher's host is a part of that job; elsewhere it
represents the job.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

from ...config.launchers import JOBS
from ...host.processes import Process, is_running, list_memory, list_processes, read_process
from ...text.bounded_reader import parse_natural
from .. import elastic_job
from ..elastic_job import ElasticJob
from ..page import NAME, PageError, Snapshot, read
from ..run_names import clean_name, default_name
from .rates import JobReading, Page

PROC = Path("/proc")
AGENT = "engine.launch.agent"  # module in the command line of an agent


@dataclass(frozen=True)
class RunningJob:
    """Job that runs on this host."""

    run: str  # name of the run
    pid: int  # launcher, or without one, lowest rank
    launched: bool  # whether `enginerun` started the job, and so holds the pages of all ranks
    pages: tuple[Path, ...]  # empty if the job does not count
    processes: tuple[Process, ...]  # those that define the job's lifetime: the launcher, or every rank
    members: frozenset[int]  # process ids of all known members


@dataclass(frozen=True)
class _Held:
    """Page held open by its owner."""

    owner: Process
    path: Path
    number: int  # descriptor in the owner


def find_jobs() -> list[RunningJob]:
    """Find the jobs of this user that run now, oldest first."""
    mine = {process.pid: process for process in _list_own_processes()}
    environments = {pid: read_environment(pid) for pid in mine}
    owned, holders = _group_pages_by_owner(mine)
    jobs = []
    alone: dict[str, list[_Held]] = {}
    for pages in owned.values():
        owner = pages[0].owner
        if _is_agent(owner, mine, environments, owned):
            continue
        if _is_held_by_launcher(pages, mine, environments):
            ranks = [pid for pid, variables in environments.items() if _launcher_of(variables) == owner.pid]
            run = _name(environments, ranks, owner.pid)
            paths = tuple(held.path for held in pages)
            jobs.append(RunningJob(run, owner.pid, True, paths, (owner,), frozenset([owner.pid, *ranks])))
        else:
            for held in pages:
                alone.setdefault(_make_job_key(owner, environments[owner.pid], look_into(held.path)), []).append(held)
    for several in alone.values():
        first = min(several, key=lambda held: (_rank(held.path), held.owner.pid)).owner
        pids = {held.owner.pid for held in several}
        run = _name(environments, [first.pid], first.pid)
        members = frozenset(pid for held in several for pid in holders[held.path]) | pids
        owners = tuple({held.owner.pid: held.owner for held in several}.values())
        jobs.append(RunningJob(run, first.pid, False, tuple(held.path for held in several), owners, members))
    jobs += _find_uncounted_jobs(mine, environments, {pid for job in jobs for pid in job.members})
    return sorted(jobs, key=lambda job: (min(process.born for process in job.processes), job.pid))


class Attached:
    """Open pages of a job, readable after the job has ended. Close it, or use it as a context manager."""

    def __init__(self, job: RunningJob) -> None:
        self.job = job
        self._opened: dict[tuple[int, int], int] = {}  # descriptors by device and inode, in the order of ranks
        self._join(job.pages)
        self._board = _board_of(job)

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the pages."""
        while self._opened:
            os.close(self._opened.popitem()[1])
        if self._board is not None:
            os.close(self._board)
            self._board = None

    def read(self) -> JobReading:
        """Read every page, including those of ranks that joined the job since the last reading.

        A page without a rank gets the number of its position among the pages. Pages of an elastic job are numbered by
        slot, and only slots in which a worker runs are included.
        """
        if not self.job.launched:
            self._look_again()
        elastic = self.read_elastic_state()
        now = time.monotonic()
        pages = [look_into(descriptor) for descriptor in self._opened.values()]
        if elastic is not None:
            return JobReading(now, {slot: page for slot, page in enumerate(pages) if slot in elastic.ranks})
        return JobReading(now, by_rank(pages))

    def read_elastic_state(self) -> ElasticJob | None:
        """Return the published state of an elastic job; None for other jobs."""
        return None if self._board is None else elastic_job.read(self._board)

    @property
    def runs(self) -> bool:
        """True while the job runs."""
        return any(_still_runs(process) for process in self.job.processes)

    def read_process_states(self, reading: JobReading) -> dict[int, str]:
        """Return the states of the ranks' processes, as in `Process.state`; `X` for those that are gone.

        Ranks on other hosts have their state in the copies of their pages. Other ranks are omitted if they are in
        another PID namespace (a container).
        """
        here = _one_numbering(self.job.processes[0].pid)
        found = {}
        for rank, page in reading.snapshots.items():
            if page["copied_ns"]:
                found[rank] = state_letter(page)
            elif here:
                process = read_process(page["pid"])
                found[rank] = "X" if process is None else process.state
        return found

    def _join(self, paths: Sequence[Path]) -> None:
        for path in paths:
            with contextlib.suppress(OSError):  # it has just ended
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                status = os.fstat(descriptor)
                if self._opened.setdefault((status.st_dev, status.st_ino), descriptor) != descriptor:
                    os.close(descriptor)

    def _look_again(self) -> None:
        mine = {process.pid for process in self.job.processes}
        for job in find_jobs():
            if not job.launched and mine & job.members:
                self._join(job.pages)
                known = {process.pid: process for process in (*self.job.processes, *job.processes)}
                self.job = replace(
                    self.job,
                    pages=tuple(dict.fromkeys((*self.job.pages, *job.pages))),
                    processes=tuple(known.values()),
                    members=self.job.members | job.members,
                )


def _board_of(job: RunningJob) -> int | None:
    """Open the published state of an elastic job's launcher; return None if there is none."""
    for number in list_memory(job.pid, elastic_job.NAME) if job.launched else ():
        with contextlib.suppress(OSError):  # closed in the meantime
            return os.open(PROC / str(job.pid) / "fd" / str(number), os.O_RDONLY | os.O_CLOEXEC)
    return None


def look_into(source: int | Path) -> Page:
    """Read a page by its descriptor or path; return, rather than raise, the error of one that cannot be read."""
    try:
        return read(source)
    except PageError as error:
        return error


def state_letter(page: Snapshot) -> str:
    """Return the process state from a copy of a rank's page; empty if the copy has none."""
    state = page["copied_state"]  # a damaged page may have any number
    return chr(state) if 32 < state < 127 else ""


def by_rank(pages: Sequence[Page]) -> dict[int, Page]:
    """Number pages, given in the order of ranks as far as that is known, by their own rank.

    A page without a rank, or with the same rank as a later one, gets the first free number from its position on.
    """
    told = {page["rank"]: page for page in pages if _has_rank(page)}
    numbered: dict[int, Page] = dict(told)
    for place, page in enumerate(pages):
        if not _has_rank(page) or told[page["rank"]] is not page:
            while place in numbered:
                place += 1
            numbered[place] = page
    return dict(sorted(numbered.items()))


def read_environment(pid: int) -> dict[str, str]:
    """Return the variables with which a process was started; empty if they cannot be read."""
    try:
        data = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in data.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


# ---- processes ------------------------------------------------------------------------------------------------------


def _list_own_processes() -> Iterator[Process]:
    for process in list_processes():
        with contextlib.suppress(OSError):
            # Do not use the directory's owner: it is root for a process that has changed its user.
            status = (PROC / str(process.pid) / "status").read_bytes()
            if int(status.partition(b"\nUid:")[2].split(maxsplit=2)[1]) == os.geteuid():
                yield process


def _still_runs(process: Process) -> bool:
    """Return whether this very process still runs (the same start time, not a reused id)."""
    now = read_process(process.pid)
    return now is not None and now.born == process.born and is_running(now)


def _one_numbering(pid: int) -> bool:
    try:
        return os.readlink(PROC / str(pid) / "ns/pid") == os.readlink(PROC / "self/ns/pid")
    except OSError:
        return True


# ---- pages ----------------------------------------------------------------------------------------------------------


def _group_pages_by_owner(mine: Mapping[int, Process]) -> tuple[dict[int, list[_Held]], dict[Path, set[int]]]:
    """Return the pages by their owners' process ids, in the order of descriptors, and the ids of all their holders."""
    held: dict[tuple[int, int], list[_Held]] = {}
    for process in mine.values():
        seen = set()
        for number in list_memory(process.pid, NAME):
            path = PROC / str(process.pid) / "fd" / str(number)
            try:
                status, written = path.stat(), path.lstat().st_mode & stat.S_IWUSR
            except OSError:
                continue
            # The link's mode shows how the file was opened: a mere reader is not part of a job.
            if written and (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                held.setdefault((status.st_dev, status.st_ino), []).append(_Held(process, path, number))
    owned: dict[int, list[_Held]] = {}
    holders: dict[Path, set[int]] = {}
    for several in held.values():
        owner = min(several, key=lambda one: (one.owner.born, one.owner.pid))
        owned.setdefault(owner.owner.pid, []).append(owner)
        holders[owner.path] = {one.owner.pid for one in several}
    for pages in owned.values():
        pages.sort(key=lambda one: one.number)
    return owned, holders


def _has_rank(page: Page) -> TypeGuard[Snapshot]:
    """Return whether a page contains its rank."""
    return isinstance(page, Snapshot) and page.state != "new"


def _rank(path: Path) -> int:
    page = look_into(path)
    return page["rank"] if isinstance(page, Snapshot) else 1 << 62


def _is_held_by_launcher(
    pages: Sequence[_Held], mine: Mapping[int, Process], environments: Mapping[int, Mapping[str, str]]
) -> bool:
    """Return whether a launcher, rather than the rank itself, holds the pages."""
    owner = pages[0].owner
    if len(pages) > 1 or any(_launcher_of(variables) == owner.pid for variables in environments.values()):
        return True
    page = look_into(pages[0].path)
    return isinstance(page, Snapshot) and page["pid"] != owner.pid and page["pid"] in mine


def _is_agent(
    owner: Process,
    mine: Mapping[int, Process],
    environments: Mapping[int, Mapping[str, str]],
    owned: Mapping[int, object],
) -> bool:
    """Return whether a process is the agent of a launcher on this host that itself holds the pages of all ranks."""
    launchers = {_launcher_of(environments[pid]) for pid, process in mine.items() if process.parent == owner.pid}
    return AGENT in _read_command(owner.pid) and bool((launchers - {owner.pid}) & owned.keys())


# ---- names ----------------------------------------------------------------------------------------------------------


def _launcher_of(variables: Mapping[str, str]) -> int | None:
    """Return the process id of the launcher from the job id `PID-KEY` in a process's environment; None if absent."""
    pid, dash, key = variables.get("ENGINE_JOB", "").partition("-")
    return parse_natural(pid) if dash and key else None


def _make_job_key(owner: Process, variables: Mapping[str, str], page: Page) -> str:
    """Return a text that is equal for all ranks of a job that another launcher started."""
    if isinstance(page, Snapshot) and page["size"] == 1:
        return f"process {owner.pid}"
    names = ("ENGINE_JOB",) if variables.get("ENGINE_JOB") else JOBS
    known = [f"{name}={variables[name]}" for name in names if variables.get(name)]
    return " ".join(known) if known else f"children of {owner.parent}"


def _name(environments: Mapping[int, Mapping[str, str]], ranks: Sequence[int], pid: int) -> str:
    """Return the exported name of a run: the given name, or one made of the program's name and `pid`."""
    for rank in sorted(ranks):
        name = environments[rank].get("ENGINE_RUN_NAME", "").strip()
        if name and name.lower() != "auto":
            return clean_name(name)
    for candidate in sorted(ranks) or [pid]:
        if command := _read_command(candidate):
            return default_name(command, pid)
    return f"run-{pid}"


def _read_command(pid: int) -> list[str]:
    try:
        data = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return [part.decode(errors="replace") for part in data.rstrip(b"\0").split(b"\0")] if data else []


def _find_uncounted_jobs(
    mine: Mapping[int, Process],
    environments: Mapping[int, Mapping[str, str]],
    counted: set[int],
) -> Iterator[RunningJob]:
    """Yield jobs of `enginerun` that have no pages."""
    ranks: dict[int, list[int]] = {}
    for pid, variables in environments.items():
        launcher = _launcher_of(variables)
        if launcher is not None and launcher in mine and launcher not in counted and pid not in counted:
            ranks.setdefault(launcher, []).append(pid)
    for launcher, members in ranks.items():
        run = _name(environments, members, launcher)
        yield RunningJob(run, launcher, True, (), (mine[launcher],), frozenset([launcher, *members]))
