"""Variables that processes inherit from a rank, and the note that it is the rank they belong to."""

from __future__ import annotations

import multiprocessing
import os

from ..config import config
from ..config.launchers import LAUNCHERS
from ..config.world import World, find_place
from ..errors import EngineError
from ..host.processes import read_process
from ..text.bounded_reader import parse_natural

HOLDER = "ENGINERUN_RANK_HOLDER"
"""Variable that tells child processes that their parent already is the rank whose variables they have inherited."""
HOROVOD = ("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE")
"""Variables that tell programs for Horovod their rank and size."""


def hold_rank(world: World) -> None:
    """Note this process's rank in its environment, for the processes that it starts."""
    if world.size > 1:
        os.environ[HOLDER] = f"{os.getpid()} {world.rank} {world.size} {world.job}"


def release_rank() -> None:
    """Remove the note of `hold_rank`."""
    os.environ.pop(HOLDER, None)


def expect_own_rank() -> None:
    """Raise EngineError if the process that set `HOLDER`, an ancestor of this one, already is this rank."""
    if HOLDER not in os.environ:
        return
    pid, _, held = os.environ[HOLDER].partition(" ")
    world = find_place(config.read_environment())
    own = held == f"{world.rank} {world.size} {world.job}"
    holder = parse_natural(pid)
    if own and holder and holder != os.getpid() and read_process(holder) is not None:
        raise EngineError(
            f"process {os.getpid()} was started by process {pid}, which is rank {world.rank} of {world.size} itself, "
            'and has its variables. Call engine.init() in that process alone, under if __name__ == "__main__":; a '
            "process that is to be another rank needs variables of its own"
        )


def export_place(world: World) -> None:
    """Update the launchers' variables to a place in a world, for processes that this one spawns."""
    numbers = [str(number) for number in (world.rank, world.local_rank, world.size, world.local_size)]
    for names in (*(launcher.place for launcher in LAUNCHERS), HOROVOD):
        if names[0] in os.environ:
            os.environ.update(zip(names, numbers, strict=True))


def is_importing_worker() -> bool:
    """Return whether this process is a worker of `multiprocessing` that imports the program (`spawn`, `forkserver`)."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))  # as multiprocessing itself asks
