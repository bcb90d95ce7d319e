"""Agreement over MPI of ranks on several hosts, if the MPI launcher gives them neither a secret nor rank 0's address.

Rank 0 opens the socket to which the other hosts will connect, makes a secret, and broadcasts both with mpi4py. MPI is
initialised for that if the program has not done it, and finalised when the program ends. MPI_Init waits for all other
ranks without a deadline, and mpi4py holds the GIL meanwhile. So a separate thread calls it through ctypes, and the
calling thread waits for that thread with a deadline.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...config.world import World
from ...errors import ConfigError, RendezvousError
from ...host.patience import Patience
from .invitation import exchange_invitation, open_hub

BYTES = 4096  # size of the padded message: no rank but the first knows the length of its text
FINALIZE_SECONDS = 5.0  # seconds that MPI_Finalize may take at the end of the process
LOOK = 0.1  # seconds between two checks whether another rank has given up
_PAUSE = 0.001  # seconds between two polls of a pending request


def agree_over_mpi(world: World, seconds: float, interface: str | None) -> World | None:
    """Agree on the job's name, its secret and the address of rank 0, and return the world with them. Collective.

    A secret and a hub that `world` has already are kept. It is None if mpi4py is not installed. Rank 0 listens on
    `interface`, a name or an address of this host; None: all interfaces. If a rank does not take part in `seconds`, or
    rank 0 cannot listen, a RendezvousError is raised. A ConfigError says that mpi4py finds no MPI, or another MPI than
    the launcher's, or that MPI has been finalised.
    """
    mpi = initialise_mpi(world, seconds)
    if mpi is None:
        return None
    found = exchange_invitation(
        world.rank,
        world.hub,
        lambda: open_hub(world.rank, interface),
        lambda message: _broadcast(mpi, message, world, seconds),
        "what rank 0 has sent over MPI",
    )
    return replace(world, job=f"mpi={found.job}", secret=world.secret or found.secret, hub=found.hub)


class OtherFailedError(Exception):
    """Another rank has given up, and takes part no more."""


def nobody_failed() -> bool:
    """Return False: the default of `other_failed`."""
    return False


def initialise_mpi(world: World, seconds: float, other_failed: Callable[[], bool] = nobody_failed) -> Any:
    """Initialise MPI, unless that is done, check that it is the launcher's, and return `mpi4py.MPI`. Collective.

    It is None if mpi4py is not installed. `other_failed` is polled while this rank waits for others; if it returns
    True, an `OtherFailedError` is raised. Other errors are those of `agree_over_mpi`.
    """
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
        from mpi4py import MPI
    except ModuleNotFoundError:
        return None
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"mpi4py is installed, and finds no MPI: {error}. {_WITHOUT}") from None
    if MPI.Is_finalized():
        raise ConfigError(f"MPI has been finalised in this process, and ranks cannot agree over it. {_WITHOUT}")
    if not MPI.Is_initialized():
        _await_initialisation(ctypes.CDLL(MPI.__file__), MPI.THREAD_MULTIPLE, world, seconds, other_failed)
        MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if (rank, size) != (world.rank, world.size):
        library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
        raise ConfigError(
            f"{world.source} says rank {world.rank} of {world.size}, and mpi4py rank {rank} of {size}: it uses "
            f"{library}, which is not the MPI of the launcher. Install the same one for both. {_WITHOUT}"
        )
    return MPI


_WITHOUT = "Or set ENGINE_SECRET and ENGINE_HUB in every process, and MPI is not asked."


_begun: list[threading.Event] = []  # set when the pending MPI_Init has ended; kept for a second try of init


def _await_initialisation(
    library: ctypes.CDLL, level: int, world: World, seconds: float, other_failed: Callable[[], bool]
) -> None:
    """Call MPI_Init_thread in a new thread, which also calls MPI_Finalize when the process ends, as MPI requires."""
    if not _begun:
        _begun.append(_start_mpi_thread(library, level))
    patience = Patience(seconds)
    while not _begun[0].wait(min(patience.wait(), LOOK)):
        if other_failed():
            raise OtherFailedError
        if not patience.seconds_left():
            raise _make_timeout_error(world, seconds, "MPI_Init has not ended")


def _start_mpi_thread(library: ctypes.CDLL, level: int) -> threading.Event:
    """Start the thread of MPI, and return an event that is set when MPI is initialised."""
    begun, leave, ended = threading.Event(), threading.Event(), threading.Event()

    def run_mpi() -> None:
        library.MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))  # A failure ends the process.
        begun.set()
        leave.wait()
        library.MPI_Finalize()
        ended.set()

    def end() -> None:
        if not begun.is_set():  # ranks that are missing would block MPI_Finalize, too
            return
        finalised = ctypes.c_int()
        library.MPI_Finalized(ctypes.byref(finalised))
        if not finalised.value:
            leave.set()
            ended.wait(FINALIZE_SECONDS)

    threading.Thread(target=run_mpi, name="engine-mpi", daemon=True).start()
    atexit.register(end)
    return begun


def _broadcast(mpi: Any, message: bytes, world: World, seconds: float) -> bytes:
    """Broadcast rank 0's message, and return it padded to `BYTES`."""
    buffer = bytearray(message.ljust(BYTES))
    request = mpi.COMM_WORLD.Ibcast([buffer, mpi.BYTE], root=0)
    wait(request, world, seconds, "rank 0 has sent nothing")
    return bytes(buffer)


def wait(
    request: Any, world: World, seconds: float, what: str, other_failed: Callable[[], bool] = nobody_failed
) -> None:
    """Wait for a request in which all ranks take part.

    If it is not complete in time, a `RendezvousError` is raised with `what` in its text. `other_failed` is the same as
    in `initialise_mpi`.
    """
    patience, soon = Patience(seconds), Patience(LOOK)
    while not request.Test():
        if not patience.seconds_left():
            raise _make_timeout_error(world, seconds, what)
        if not soon.seconds_left():
            soon.reset(LOOK)
            if other_failed():
                raise OtherFailedError
        time.sleep(_PAUSE)


def _make_timeout_error(world: World, seconds: float, what: str) -> RendezvousError:
    return RendezvousError(
        f"rank {world.rank}: {what} within {seconds:g} s (ENGINE_START_TIMEOUT), by which ranks on several hosts agree "
        f"where to meet. Does each of the {world.size} ranks call engine.init(), and has mpi4py? {_WITHOUT}"
    )
