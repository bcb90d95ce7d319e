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


cdef inline bint continues(unsigned char byte) noexcept nogil:
    """Whether a byte is in a sequence of UTF-8, behind its first."""
    return byte & 0xC0 == 0x80


cdef int sequence_bytes(const unsigned char* at) noexcept nogil:
    """How long the sequence of UTF-8 is that begins here; 0: none does."""
    if at[0] < 0x80:
        return 1
    if 0xC2 <= at[0] <= 0xDF:
        return 2 if continues(at[1]) else 0
    if 0xE0 <= at[0] <= 0xEF and continues(at[1]) and continues(at[2]):
        if (at[0] == 0xE0 and at[1] < 0xA0) or (at[0] == 0xED and at[1] > 0x9F):
            return 0            # longer than it has to be; half of a pair of UTF-16
        return 3
    if 0xF0 <= at[0] <= 0xF4 and continues(at[1]) and continues(at[2]) and continues(at[3]):
        return 0 if (at[0] == 0xF0 and at[1] < 0x90) or (at[0] == 0xF4 and at[1] > 0x8F) else 4
    return 0


cdef void text_as_utf8(char* text) noexcept nogil:
    """Put a question mark for what is not UTF-8: a name may be any bytes, and where a text is cut, a character may be. Frameworks
    that cannot decode a text raise something else in its place."""
    cdef unsigned char* at = <unsigned char*>text
    cdef int length
    while at[0]:
        length = sequence_bytes(at)
        if length == 0:
            at[0] = <unsigned char>c"?"
        at += max(length, 1)
