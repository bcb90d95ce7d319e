"""Functions that need no engine: the choice of kernels, and the memory of a world."""
from engine_ext.kernels.kernels cimport (
    ENGINE_ADASUM, ENGINE_ALL_DTYPES, ENGINE_DTYPE_NAMES, ENGINE_LEVELS, ENGINE_OP_NAMES, engine_kernels_best,
    engine_kernels_get, engine_kernels_level, engine_kernels_name,
)
from engine_ext.platform.atomics cimport load_acquire
from engine_ext.shared.layout cimport CAUSE_RAISED, ENGINE_PROTOCOL, MAX_RANKS, NAMES_TEXT, engine_layout
from engine_ext.shared.segment cimport Segment, abort_world, segment_create, segment_map, segment_unmap

import os

from engine_ext.errors import EngineError

cdef extern from "platform/memory.h" nogil:
    int engine_memory_file(const char* name)

cdef extern from "fingerprint.h" nogil:
    const char* ENGINE_SOURCES      # digest of all native sources: tools/native_fingerprint.py

cdef int chosen_level = -1      # ENGINE_PLAIN ..; -1: the best


def kernel_levels():
    """Return the names of the kernel sets that this processor can run, the best last."""
    return [engine_kernels_name(k).decode() for k in range(ENGINE_LEVELS) if engine_kernels_get(k) != NULL]


def use_kernels(str level):
    """Choose the kernel set of engines made from now on; `auto` is the best."""
    global chosen_level
    cdef int k = -1
    if level != "auto":
        k = engine_kernels_level(level.encode())
        if k < 0 or engine_kernels_get(k) == NULL:
            raise EngineError(f"kernels {level!r} cannot run on this processor; it can run {', '.join(kernel_levels())}")
    chosen_level = k


cdef int kernel_level() noexcept:
    """Return the kernel set for engines made now."""
    return engine_kernels_best() if chosen_level < 0 else chosen_level


def segment_info():
    """Return the versions that ranks must share to work together: protocol, layout, sources and kernels."""
    kernels = engine_kernels_name(kernel_level()).decode()
    return {
        "protocol": ENGINE_PROTOCOL, "layout": f"{engine_layout():016x}", "sources": ENGINE_SOURCES.decode(), "kernels": kernels,
    }


def codes():
    """Return the names of numbered values, in the order of the numbers, by the name of their list."""
    names_of_kinds = {name: tuple(names) for name, _, *names in map(str.split, NAMES_TEXT.decode().splitlines())}
    names_of_kinds["dtypes"] = tuple([ENGINE_DTYPE_NAMES[k].decode() for k in range(ENGINE_ALL_DTYPES)])
    names_of_kinds["reductions"] = tuple([ENGINE_OP_NAMES[k].decode() for k in range(ENGINE_ADASUM + 1)])
    return names_of_kinds


def create_segment(int size, unsigned int generation):
    """Make the control segment of a world; return its descriptor."""
    if not 1 <= size <= MAX_RANKS:
        raise EngineError(f"a host carries 1 to {MAX_RANKS} ranks, not {size}")
    cdef int fd = segment_create(size, generation)
    if fd < 0:
        raise OSError(-fd, os.strerror(-fd))
    return fd


def create_arena():
    """Make the empty file in which shared tensors are allocated; return its descriptor."""
    cdef int fd = engine_memory_file(b"engine-arena")
    if fd < 0:
        raise OSError(-fd, os.strerror(-fd))
    return fd


def is_aborted(int control, int rank, int size, hosts):
    """Return whether the world of a segment has failed already."""
    cdef Segment segment
    cdef int status = map_for(&segment, control, rank, size, hosts)
    if status < 0:
        raise OSError(-status, os.strerror(-status))
    try:
        return load_acquire(segment.abort) != 0
    finally:
        segment_unmap(&segment)


cdef int map_for(Segment* segment, int control, int rank, int size, object hosts) except? -1:
    """Map a segment for a process that makes no engine; return 0, or an error number below 0."""
    cdef int[MAX_RANKS] host_of
    cdef int r
    for r in range(size if hosts else 0):
        host_of[r] = hosts[r]
    return segment_map(segment, control, 0, rank, size, host_of if hosts else NULL)


def abort_segment(int control, int rank, int size, hosts, str reason):
    """Make a world fail on behalf of a rank that has met the others and cannot make its engine."""
    cdef Segment segment
    cdef bytes text = reason.encode("utf-8", "replace")
    cdef int status = map_for(&segment, control, rank, size, hosts)
    if status < 0:
        raise OSError(-status, os.strerror(-status))
    abort_world(&segment, rank, CAUSE_RAISED, text)
    segment_unmap(&segment)
