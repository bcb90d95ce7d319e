"""How native calls end, in words."""
from libc.stdint cimport uint32_t

from engine_ext.control.driver cimport Target
from engine_ext.control.state cimport State
from engine_ext.control.verdict cimport VERDICT_BYTES
from engine_ext.operations.op cimport Op
from engine_ext.shared.layout cimport NAME_BYTES

cdef enum:
    TEXT_BYTES = VERDICT_BYTES + NAME_BYTES     # of the text of a result

cdef int text_of_end(const Op* op, const char* name, uint32_t name_bytes, char* text) noexcept nogil
cdef int text_of_refusal(State* e, const Target* target, int status, char* text) noexcept nogil
cdef void text_as_utf8(char* text) noexcept nogil
