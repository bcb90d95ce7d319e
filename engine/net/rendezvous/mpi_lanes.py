"""MPI as the transport between hosts: functions and handles of the library that this process uses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ...config.world import World
from ...errors import ConfigError
from .mpi_bootstrap import initialise_mpi, nobody_failed, wait

FUNCTIONS = ("isend", "irecv", "test", "cancel", "iallreduce")
_TAGS = 1 << 15  # number of tags that every MPI has
_SETS = 1 << 8  # tags of one world
_kept: list[Any] = []  # communicator for all worlds of the process: making one is collective
_left: list[Any] = []  # communicators of single worlds, never freed: an unfinished sum may still use them


_unfinished: list[tuple[Any, Any]] = []  # communicators and requests of a failed start, which the next start uses


def prepare_library(
    world: World, generation: int, seconds: float, other_failed: Callable[[], bool] = nobody_failed
) -> dict[str, Any]:
    """Return the functions and handles that the engine needs to call MPI. Collective.

    All ranks of `world` have come; its number `generation` has message tags of its own. While this rank waits, at most
    `seconds`, `other_failed` is polled: whether another rank has given up and takes no part in this.

    The result has the address of each of `FUNCTIONS`; the handles `comm` and `byte`, and whether handles are `ints`;
    the first `tag` of the world, which those of its process sets follow. For sums: the handles `float32`, `float64`,
    `sum` and `everybody`, a communicator of this world alone, and the address `in_place`.

    It raises a ConfigError without mpi4py or MPI, or if MPI may be called by one thread only. It raises a
    RendezvousError if a rank did not take part in time, and an OtherFailedError if `other_failed` returned True.
    """
    mpi = initialise_mpi(world, seconds, other_failed)
    if mpi is None:
        raise ConfigError(
            "lanes over MPI (ENGINE_LANES=mpi) need mpi4py: `pip install mpi4py`, and `mpirun` as launcher"
        )
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise ConfigError(
            "MPI was initialised for calls of one thread alone, and lanes over it (ENGINE_LANES=mpi) call it from "
            "others: initialise it with MPI_THREAD_SERIALIZED, or, if the program calls MPI during collectives, with "
            "MPI_THREAD_MULTIPLE, as mpi4py does unless mpi4py.rc says otherwise"
        )
    if not _kept:
        _kept.append(_duplicate_communicator(mpi, world, seconds, other_failed))
    _left.append(_duplicate_communicator(mpi, world, seconds, other_failed))
    functions = ctypes.CDLL(mpi.__file__)
    addresses = {
        name: ctypes.cast(getattr(functions, f"MPI_{name.capitalize()}"), ctypes.c_void_p).value for name in FUNCTIONS
    }
    return {
        **addresses,
        "comm": _handle(mpi, _kept[0]),
        "byte": _handle(mpi, mpi.BYTE),
        "ints": mpi._sizeof(mpi.Comm) == ctypes.sizeof(ctypes.c_int),
        "tag": generation * _SETS % _TAGS,
        "everybody": _handle(mpi, _left[-1]),
        "float32": _handle(mpi, mpi.FLOAT),
        "float64": _handle(mpi, mpi.DOUBLE),
        "sum": _handle(mpi, mpi.SUM),
        "in_place": int(mpi.IN_PLACE) % (1 << 64),
    }


def _duplicate_communicator(mpi: Any, world: World, seconds: float, other_failed: Callable[[], bool]) -> Any:
    """Make a communicator of all ranks that returns errors. Collective."""
    comm, request = _unfinished.pop() if _unfinished else mpi.COMM_WORLD.Idup()
    try:
        wait(request, world, seconds, "not all ranks have made a communicator", other_failed)
    except BaseException:
        _unfinished.append((comm, request))  # MPI matches it with the next one of ranks that have made none
        raise
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    return comm


def _handle(mpi: Any, of: Any) -> int:
    """Return the C value of a handle: a pointer, or an int."""
    kind = ctypes.c_uint32 if mpi._sizeof(type(of)) == ctypes.sizeof(ctypes.c_int) else ctypes.c_uint64
    return kind.from_address(mpi._addressof(of)).value
