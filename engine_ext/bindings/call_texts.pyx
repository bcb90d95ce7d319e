"""How native calls end, in words: the class of engine_ext/errors.py that a call from Python raises, a colon, and the message."""
from libc.stdint cimport uint32_t
from libc.stdio cimport snprintf
from libc.string cimport strncmp

from engine_ext.bindings.calls cimport (
    ENGINE_CALL_DUPLICATE, ENGINE_CALL_FAILED_WORLD, ENGINE_CALL_JOINED, ENGINE_CALL_MISMATCH, ENGINE_CALL_NOT_INITIALIZED,
    ENGINE_CALL_NO_MEMORY, ENGINE_CALL_OK,
)
from engine_ext.control.driver cimport LABEL_BYTES, driver_label
from engine_ext.control.verdict cimport verdict_describe
from engine_ext.shared.layout cimport Status

cdef extern from "platform/utf8.h" nogil:
    void utf8_repair(char* text)


cdef int status_of_verdict(const char* text) noexcept nogil:
    return ENGINE_CALL_NOT_INITIALIZED if strncmp(text, b"NotInitializedError", 19) == 0 else ENGINE_CALL_FAILED_WORLD


cdef int text_of_end(const Op* op, const char* name, uint32_t name_bytes, char* text) noexcept nogil:
    """How a call has ended, ENGINE_CALL_*; and unless it went well why, in `text`."""
    cdef char[LABEL_BYTES] label
    cdef const char* told = b""
    cdef int length = <int>name_bytes
    if op.status == Status.OK or op.status == Status.ABSENT:
        return ENGINE_CALL_OK
    if op.text != NULL:
        told = op.text
    if op.number:
        name, length = label, <int>driver_label(label, op.meta.kind, op.number - 1)
    if op.status == Status.MISMATCH:
        snprintf(text, TEXT_BYTES, "MismatchError: ranks disagree on '%.*s': %s", length, name, told)
        return ENGINE_CALL_MISMATCH
    if op.status == Status.FAILED_CALL:
        snprintf(text, TEXT_BYTES, "MismatchError: '%.*s' was not done: %s", length, name, told)
        return ENGINE_CALL_MISMATCH
    if op.status == Status.AFTER_FAILURE:
        snprintf(text, TEXT_BYTES, "DuplicateNameError: a call of '%.*s' has failed on this rank, and other ranks have not "
                 "called it since: it cannot be called again before they have", length, name)
        return ENGINE_CALL_DUPLICATE
    snprintf(text, TEXT_BYTES, "%s", told)
    return status_of_verdict(text)


cdef int text_of_refusal(State* e, const Target* target, int status, char* text) noexcept nogil:
    """Why the driver has not taken an operation, ENGINE_CALL_* and `text`."""
    cdef const char* name = target.text if target.text != NULL else target.label
    cdef int rank = e.segment.numbers[e.segment.rank], length = <int>target.text_bytes
    if status == Status.FAILED_WORLD:
        verdict_describe(e, text)
        return status_of_verdict(text)
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
    """Put a question mark for what is not UTF-8, at the latest where the text was cut."""
    utf8_repair(text)
