"""Resources that jobs with many resets hold and leave, in all their processes over the whole job."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..launch.conftest import launcher as launcher
from ..launch.launch_jobs import Launcher
from ..waiting import marked, until, until_files

pytest.importorskip("torch")

MEMORY = 4 << 20  # bytes by which a process may grow, because of its allocators
MAPS = 5  # memory maps by which a process may grow
SETTLED = 6  # number of worlds after which everything has been used once
# Files of Python and torch that remain when a process is killed.
NOT_OURS = ("pymp-", "torchinductor_")


@dataclass(frozen=True)
class Held:
    """Resources of a process; `name` is for people."""

    name: str
    descriptors: int
    threads: int
    maps: int
    memory: int

    @classmethod
    def by(cls, pid: int) -> Held:
        files = Path(f"/proc/{pid}")
        resident = int((files / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        maps = len((files / "maps").read_text().splitlines())
        name = (files / "cmdline").read_text().replace("\0", " ")[-60:]
        return cls(name, len(os.listdir(files / "fd")), len(os.listdir(files / "task")), maps, resident)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worlds", "kills"),
    [
        pytest.param(22, {10}, id="20 resets"),
        pytest.param(202, set(range(10, 190, 20)), id="200 resets", marks=pytest.mark.slow),
    ],
)
def test_resets_leave_nothing_in_any_process(launcher: Launcher, worlds: int, kills: set[int]) -> None:
    """Loaders have persistent processes, and gradients lie side by side; worlds end with and without a kill."""
    shared, home = set(os.listdir("/dev/shm")), launcher.home
    command = [sys.executable, "-m", "tests.elastic.leak_program", home, worlds]
    job = launcher.start("-np", 2, "--min-np", 2, "--metrics-port", 0, "--output-dir", home / "out", *command)
    held = []
    for world in range(1, worlds + 1):
        until_files(home / f"world.{world}")
        held.append({pid: Held.by(pid) for pid in marked(launcher.mark)})
        if world in kills:
            (home / f"kill.{world}").touch()
        (home / f"go.{world}").touch()
        if world in kills:
            dies = home / f"dies.{world}"
            os.kill(int(until(lambda dies=dies: dies.exists() and dies.read_text(), "who dies")), signal.SIGKILL)
    done = launcher.finish(job)
    assert done.code == 0, done.err
    early, late = held[SETTLED], held[-1]
    assert {len(each) for each in held[SETTLED:]} == {len(early)}, "processes have become more, or fewer"
    stayed = early.keys() & late.keys()
    assert len(stayed) == len(early) - 2, "a worker and its loader's process were killed, and the others not"
    for pid in stayed:
        first, last = early[pid], late[pid]
        assert (last.descriptors, last.threads) == (first.descriptors, first.threads), f"{first} -> {last}"
        assert last.maps <= first.maps + MAPS, f"{first} -> {last}"
        assert last.memory <= first.memory + MEMORY, f"{first} -> {last}"
    assert [path.name for path in launcher.kept() if not path.name.startswith(NOT_OURS)] == []
    assert set(os.listdir("/dev/shm")) <= shared
