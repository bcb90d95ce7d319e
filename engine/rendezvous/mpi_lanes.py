"""MPI as what carries bytes between hosts: what the engine has to know of the library that this process uses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from ..world import World
from .by_mpi import begin, nobody_failed, wait

FUNCTIONS = ("isend", "irecv", "test", "cancel", "iallreduce")
_TAGS = 1 << 15  # that every MPI has
_SETS = 1 << 8  # tags of one world
_kept: list[Any] = []  # our communicator, for all worlds of the process: to make one takes every rank
_left: list[Any] = []  # those of worlds: a sum that such a world did not end may go on in its own


_unfinished: list[tuple[Any, Any]] = []  # communicators and requests of a start that has failed: the next takes them


def library(
    world: World, generation: int, seconds: float, other_failed: Callable[[], bool] = nobody_failed
) -> dict[str, Any]:
    """What the engine needs to call MPI. Collective.

    Parameters
    ----------
    world : World
        This process's place. All its ranks have come.
    generation : int
        Of the world: it has message tags of its own.
    seconds : float
        To wait for the other ranks.
    other_failed : callable
        Asked meanwhile: whether some rank that has come gives up, and takes no part in this.

    Returns
    -------
    dict
        Addresses of MPI's functions by `FUNCTIONS`; the handles `comm` and `byte`, and whether handles are `ints`; the
        `tag` of the world, behind which those of its process sets follow; for sums the handles `everybody`, a
        communicator of this world alone, `float32`, `float64` and `sum`, and the address `in_place`.

    Raises
    ------
    ConfigError
        There is no mpi4py, no MPI, or one that may be called by one thread alone.
    RendezvousError
        Some rank did not take part in time.
    OtherFailedError
        `other_failed` has said so.
    """
    mpi = begin(world, seconds, other_failed)
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
        _kept.append(_duplicate(mpi, world, seconds, other_failed))
    _left.append(_duplicate(mpi, world, seconds, other_failed))
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


def _duplicate(mpi: Any, world: World, seconds: float, other_failed: Callable[[], bool]) -> Any:
    """A communicator of all ranks, whose errors are returned. Collective."""
    comm, request = _unfinished.pop() if _unfinished else mpi.COMM_WORLD.Idup()
    try:
        wait(request, world, seconds, "not all ranks have made a communicator", other_failed)
    except BaseException:
        _unfinished.append((comm, request))  # MPI pairs it with the next one of the ranks that have made none
        raise
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    return comm


def _handle(mpi: Any, of: Any) -> int:
    """A handle as C has it: a pointer, or an int."""
    kind = ctypes.c_uint32 if mpi._sizeof(type(of)) == ctypes.sizeof(ctypes.c_int) else ctypes.c_uint64
    return kind.from_address(mpi._addressof(of)).value
