"""What ranks on several hosts agree on over MPI, where its launcher gives them neither a secret nor rank 0's address.

Rank 0 opens the socket on which the other hosts will call it, makes a secret, and broadcasts both with mpi4py. MPI is
initialised for that if the program has not done it, and finalised when the program ends. Whoever has called MPI_Init
waits in it for all others without a deadline, and mpi4py lets no other thread run meanwhile; so a thread of its own
calls it past mpi4py, and this one waits for that thread.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..bounded_reader import parse_json, text, whole
from ..errors import ConfigError, RendezvousError
from ..forms import MOST_PORTS
from ..host import network
from ..host.patience import Patience
from ..hub_address import HubAddress
from ..world import World

BYTES = 4096  # of the message, which is padded: no rank but the first knows its length
ADDRESSES = 16  # of rank 0's host that are told at most
FAREWELL = 5.0  # seconds that the end of MPI may take in a process that ends
LOOK = 0.1  # seconds between two looks at whether another rank has given up
_PAUSE = 0.001  # seconds between two looks at a broadcast that is under way


def agree(world: World, seconds: float, interface: str | None) -> World | None:
    """Agree on the job's name, its secret and where the hosts meet. Collective.

    Parameters
    ----------
    world : World
        This process's place. A secret and a hub that it has already stay.
    seconds : float
        To wait for the other ranks.
    interface : str or None
        The interface of this host, or its address, on which rank 0 listens; None: all of them.

    Returns
    -------
    World or None
        None if there is no mpi4py.

    Raises
    ------
    RendezvousError
        Some rank did not take part in time, or rank 0 cannot listen.
    ConfigError
        mpi4py belongs to another MPI than the launcher.
    """
    mpi = begin(world, seconds)
    if mpi is None:
        return None
    hub = world.hub
    message = b""
    if world.rank == 0:
        if hub is None:
            hub = _listen(world, interface)
        told = {"job": secrets.token_hex(8), "secret": secrets.token_hex(32), "hosts": (hub.host, *hub.others)}
        message = json.dumps({**told, "port": hub.port}).encode()
    told = parse_json(_broadcast(mpi, message, world, seconds), "what rank 0 has told over MPI")
    job, secret, port = text(told, "job"), text(told, "secret"), whole(told, "port", 1, MOST_PORTS)
    if hub is None:
        first, *others = (str(host) for host in told["hosts"])
        hub = HubAddress(first, port, others=tuple(others))
    return replace(world, job=f"mpi={job}", secret=world.secret or secret, hub=hub)


class OtherFailedError(Exception):
    """Another rank gives up, and takes no part any more."""


def nobody_failed() -> bool:
    """No other rank has given up, as far as is known."""
    return False


def begin(world: World, seconds: float, other_failed: Callable[[], bool] = nobody_failed) -> Any:
    """Initialise MPI, if nobody has, and check that it is the launcher's. Collective; errors as of `agree`.

    `other_failed`: asked while others are waited for; if it says so, an `OtherFailedError` is raised.

    Returns
    -------
    module or None
        `mpi4py.MPI`; None if there is no mpi4py.
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
        _initialise(ctypes.CDLL(MPI.__file__), MPI.THREAD_MULTIPLE, world, seconds, other_failed)
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


_begun: list[threading.Event] = []  # set when the MPI_Init that is under way has ended, for a second try of init


def _initialise(
    library: ctypes.CDLL, level: int, world: World, seconds: float, other_failed: Callable[[], bool]
) -> None:
    """Call MPI_Init_thread in a thread, which calls MPI_Finalize when the process ends, as MPI asks of it."""
    if not _begun:
        _begun.append(_begin_to_live(library, level))
    patience = Patience(seconds)
    while not _begun[0].wait(min(patience.wait(), LOOK)):
        if other_failed():
            raise OtherFailedError
        if not patience.left():
            raise _late(world, seconds, "MPI_Init has not ended")


def _begin_to_live(library: ctypes.CDLL, level: int) -> threading.Event:
    """Start the thread; the event is set when MPI is initialised."""
    begun, leave, ended = threading.Event(), threading.Event(), threading.Event()

    def live() -> None:
        library.MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))  # A failure ends the process.
        begun.set()
        leave.wait()
        library.MPI_Finalize()
        ended.set()

    def end() -> None:
        if not begun.is_set():  # ranks that have not come keep it from MPI_Finalize, too
            return
        finalised = ctypes.c_int()
        library.MPI_Finalized(ctypes.byref(finalised))
        if not finalised.value:
            leave.set()
            ended.wait(FAREWELL)

    threading.Thread(target=live, name="engine-mpi", daemon=True).start()
    atexit.register(end)
    return begun


def _listen(world: World, interface: str | None) -> HubAddress:
    """Open the socket of the hub."""
    try:
        chosen = None if interface is None else network.interface_address(interface)
        with network.listen(chosen, 0, backlog=256) as listener:
            port = listener.getsockname()[1]
            addresses = network.own_addresses()[:ADDRESSES] if chosen is None else [chosen]
            if not addresses:
                raise ValueError("this host has no address that others could reach")
            return HubAddress(addresses[0], port, listener.detach(), tuple(addresses[1:]))
    except ValueError as error:
        raise RendezvousError(f"rank {world.rank}: ENGINE_INTERFACE: {error}") from None
    except OSError as error:
        raise RendezvousError(f"rank {world.rank} can open no socket for the other hosts: {error.strerror}") from None


def _broadcast(mpi: Any, message: bytes, world: World, seconds: float) -> bytes:
    """Tell all ranks what rank 0 says."""
    buffer = bytearray(message.ljust(BYTES))
    request = mpi.COMM_WORLD.Ibcast([buffer, mpi.BYTE], root=0)
    wait(request, world, seconds, "rank 0 has told nothing")
    return bytes(buffer)


def wait(
    request: Any, world: World, seconds: float, what: str, other_failed: Callable[[], bool] = nobody_failed
) -> None:
    """Wait for what all ranks take part in. A RendezvousError says `what` is if they do not in time.

    `other_failed`: as of `begin`.
    """
    patience, soon = Patience(seconds), Patience(LOOK)
    while not request.Test():
        if not patience.left():
            raise _late(world, seconds, what)
        if not soon.left():
            soon.begin(LOOK)
            if other_failed():
                raise OtherFailedError
        time.sleep(_PAUSE)


def _late(world: World, seconds: float, what: str) -> RendezvousError:
    return RendezvousError(
        f"rank {world.rank}: {what} within {seconds:g} s (ENGINE_START_TIMEOUT), by which ranks on several hosts agree "
        f"where to meet. Does each of the {world.size} ranks call engine.init(), and has mpi4py? {_WITHOUT}"
    )
