"""What a call of the engine raises: who, what, and how to mend it."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State
from engine_ext.control.verdict cimport VERDICT_BYTES, verdict_describe
from engine_ext.operations.describe cimport describe_ranks
from engine_ext.platform.atomics cimport load_acquire
from engine_ext.shared.layout cimport Status

from engine_ext import errors
from engine_ext.errors import DuplicateNameError, EngineError, ForkedError, MismatchError, NotInitializedError

cdef enum:
    SET_BYTES = 128


cdef str set_text(State* e):
    """The ranks of a process set, as the world calls them: `ranks 0, 2`."""
    cdef char[SET_BYTES] text
    describe_ranks(NULL, e.segment.numbers, e.segment.size, text, SET_BYTES)
    return text.decode()


cdef int refuse_closed(State* e) except -1:
    """Raise why an engine cannot be used."""
    if e.alive == NULL or e.segment.header == NULL:
        raise NotInitializedError("this engine was never initialised")
    if e.alive[0] != 1:
        raise ForkedError(
            f"rank {e.segment.numbers[e.segment.rank]}'s engine was used in a forked child of its process, which is no rank. "
            "Use the engine in the parent only, or start the child with the 'spawn' method"
        )
    if not e.world.closed:
        raise NotInitializedError(
            f"the process set of {set_text(e)} was removed; unwrap() a distributed optimizer that belonged to it"
        )
    raise NotInitializedError(
        "this engine was shut down; call engine.init() again, and make anew what belonged to it: unwrap() a distributed "
        "optimizer and wrap it again"
    )


cdef int refuse(State* e, int status, str name) except -1:
    """Raise why the operation `name` was not submitted, or not done."""
    if status == Status.FAILED_WORLD:
        raise world_error(e)
    if status == Status.DUPLICATE:
        raise DuplicateNameError(
            f"rank {e.segment.numbers[e.segment.rank]} submitted '{name}' again before its operation had completed; synchronize "
            "its handle first, or give each call a name of its own"
        )
    if status == Status.JOINED:
        raise EngineError(
            f"rank {e.segment.numbers[e.segment.rank]} submitted '{name}' after join(): it submits nothing until every rank has "
            "joined; call join() after all else, and wait for it"
        )
    if status == Status.NO_MEMORY:
        raise MemoryError(f"no memory to submit '{name}'")
    raise EngineError(f"'{name}' ended with status {status}, which is a defect of the engine")


cdef object world_error(State* e):
    """The first cause, as every call raises it."""
    cdef char[VERDICT_BYTES] text
    cdef uint64_t word = load_acquire(e.segment.abort)     # pairs with abort_world
    verdict_describe(e, text)
    kind, _, message = (<bytes>text).decode("utf-8", "replace").partition(": ")
    if word == 0:
        return NotInitializedError(message)
    return getattr(errors, kind)(message, <int>(word & 0xFFFF) - 1)


cdef object disagreement(const Op* op, str what):
    """What every rank raises of an operation that cannot be done, though the engine goes on."""
    text = op.text.decode("utf-8", "replace") if op.text != NULL else ""
    if op.status == Status.FAILED_CALL:
        return MismatchError(f"{what} was not done: {text}")
    return MismatchError(f"ranks disagree on {what}: {text}")
