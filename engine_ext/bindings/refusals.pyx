"""Exceptions that a call of the engine raises, and statuses and texts of native calls: who, what, and how to mend it."""
from libc.stdint cimport uint64_t
from libc.stdio cimport snprintf
from libc.string cimport strncmp

from engine_ext.bindings.calls cimport (
    ENGINE_CALL_DUPLICATE, ENGINE_CALL_FAILED_WORLD, ENGINE_CALL_JOINED, ENGINE_CALL_MISMATCH, ENGINE_CALL_NOT_INITIALIZED,
    ENGINE_CALL_NO_MEMORY, ENGINE_CALL_OK,
)
from engine_ext.control.driver cimport LABEL_BYTES, driver_label
from engine_ext.control.failure cimport describe_failure
from engine_ext.operations.kinds cimport describe_ranks
from engine_ext.platform.atomics cimport load_acquire
from engine_ext.shared.layout cimport Status
from engine_ext.shared.segment cimport group_name

from engine_ext import errors
from engine_ext.errors import DuplicateNameError, EngineError, ForkedError, MismatchError, NotInitializedError

cdef enum:
    SET_BYTES = 128


cdef str set_text(State* e):
    """Return the ranks of an engine by their numbers in the world, such as `ranks 0, 2`."""
    cdef char[SET_BYTES] text
    describe_ranks(NULL, e.segment.numbers, e.segment.size, text, SET_BYTES)
    return text.decode()


cdef str set_place(State* e):
    """Return where an operation runs, such as `in the process set of ranks 0, 2` or `in the group 'tp' of ranks 0, 2`."""
    cdef const char* name = group_name(&e.segment)
    kind = "process set" if name == NULL else f"group '{(<bytes>name).decode()}'"
    return f"in the {kind} of {set_text(e)}"


cdef int refuse_closed(State* e) except -1:
    """Raise the reason why an engine cannot be used."""
    if e.alive == NULL or e.segment.header == NULL:
        raise NotInitializedError("this engine was never initialised")
    if e.alive[0] != 1:
        raise ForkedError(
            f"rank {e.segment.numbers[e.segment.rank]}'s engine was used in a forked child of its process, which is no rank. "
            "Use the engine in the parent only, or start the child with the 'spawn' method"
        )
    if not e.world.closed and group_name(&e.segment) != NULL:
        raise NotInitializedError(f"{set_place(e).removeprefix('in ')} was destroyed")
    if not e.world.closed:
        raise NotInitializedError(
            f"the process set of {set_text(e)} was removed; unwrap() a distributed optimizer that belonged to it"
        )
    raise NotInitializedError(
        "this engine was shut down; call engine.init() again, and make anew what belonged to it: unwrap() a distributed "
        "optimizer and wrap it again"
    )


cdef int raise_refusal(State* e, int status, str name) except -1:
    """Raise the reason why the operation `name` was not submitted, or was not done."""
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
    """Make the exception for the first cause of the world's failure, which every call raises."""
    cdef char[FAILURE_TEXT_BYTES] text
    cdef uint64_t word = load_acquire(e.segment.abort)     # pairs with abort_world
    describe_failure(e, text)
    kind, _, message = (<bytes>text).decode("utf-8", "replace").partition(": ")
    if word == 0:
        return getattr(errors, kind)(message)
    return getattr(errors, kind)(message, <int>(word & 0xFFFF) - 1)


cdef object make_mismatch_error(State* e, const Op* op, str what):
    """Make the exception that every rank raises for an impossible operation, after which the engine goes on."""
    if group_name(&e.segment) != NULL and e.world != e:
        what = f"{what} {set_place(e)}"
    text = op.text.decode("utf-8", "replace") if op.text != NULL else ""
    if op.status == Status.FAILED_CALL:
        return MismatchError(f"{what} was not done: {text}")
    return MismatchError(f"ranks disagree on {what}: {text}")


# ---- native calls -----------------------------------------------------------------------------------------------------------

# Texts of native calls: the class of engine_ext/errors.py that a call from Python raises, a colon, and the message.

cdef extern from "platform/utf8.h" nogil:
    void utf8_repair(char* text)


cdef int failure_status(const char* text) noexcept nogil:
    """Return the status of a failed world from its text: the engine was shut down, or the world has failed."""
    return ENGINE_CALL_NOT_INITIALIZED if strncmp(text, b"NotInitializedError", 19) == 0 else ENGINE_CALL_FAILED_WORLD


cdef int text_of_end(const Op* op, const char* name, uint32_t name_bytes, char* text) noexcept nogil:
    """Return the ENGINE_CALL_* status of a finished operation; unless it is OK, write the reason into `text`, of TEXT_BYTES."""
    cdef char[LABEL_BYTES] label
    cdef const char* reason = b""
    cdef int length = <int>name_bytes
    if op.status == Status.OK or op.status == Status.ABSENT:
        return ENGINE_CALL_OK
    if op.text != NULL:
        reason = op.text
    if op.number:
        name, length = label, <int>driver_label(label, op.meta.kind, op.number - 1)
    if op.status == Status.MISMATCH:
        snprintf(text, TEXT_BYTES, "MismatchError: ranks disagree on '%.*s': %s", length, name, reason)
        return ENGINE_CALL_MISMATCH
    if op.status == Status.FAILED_CALL:
        snprintf(text, TEXT_BYTES, "MismatchError: '%.*s' was not done: %s", length, name, reason)
        return ENGINE_CALL_MISMATCH
    if op.status == Status.AFTER_FAILURE:
        snprintf(text, TEXT_BYTES, "DuplicateNameError: a call of '%.*s' has failed on this rank, and other ranks have not "
                 "called it since: it cannot be called again before they have", length, name)
        return ENGINE_CALL_DUPLICATE
    snprintf(text, TEXT_BYTES, "%s", reason)
    return failure_status(text)


cdef int text_of_refusal(State* e, const Target* target, int status, char* text) noexcept nogil:
    """Return the ENGINE_CALL_* status for a Status with which the driver refused an operation; write the reason into `text`."""
    cdef const char* name = target.text if target.text != NULL else target.label
    cdef int rank = e.segment.numbers[e.segment.rank], length = <int>target.text_bytes
    if status == Status.FAILED_WORLD:
        describe_failure(e, text)
        return failure_status(text)
    if status == Status.DUPLICATE:
        snprintf(text, TEXT_BYTES, "DuplicateNameError: rank %d submitted '%.*s' again before its operation had completed; name "
                 "your calls apart, or leave the name out", rank, length, name)
        return ENGINE_CALL_DUPLICATE
    if status == Status.JOINED:
        snprintf(text, TEXT_BYTES, "EngineError: rank %d submitted '%.*s' after join(): it submits nothing until every rank has "
                 "joined; call join() after all else, and wait for it", rank, length, name)
        return ENGINE_CALL_JOINED
    snprintf(text, TEXT_BYTES, "MemoryError: no memory to submit '%.*s'", length, name)
    return ENGINE_CALL_NO_MEMORY


cdef void text_as_utf8(char* text) noexcept nogil:
    """Replace bytes that are not valid UTF-8, such as a character cut at the end, by question marks."""
    utf8_repair(text)
