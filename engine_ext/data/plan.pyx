"""The fusion plan. Pieces lie one after another, at multiples of 64 bytes; the gaps between them have no meaning."""
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from engine_ext.kernels.kernels cimport dtype_bytes


cdef void plan_clear(Plan* plan) noexcept nogil:
    """Empty the plan, and keep its memory."""
    plan.count, plan.end, plan.total = 0, 0, 0


cdef void plan_free(Plan* plan) noexcept nogil:
    free(plan.pieces)
    memset(plan, 0, sizeof(Plan))


cdef Piece* plan_add(
    Plan* plan, const char* source, char* target, uint64_t nbytes, int dtype, int wire, int64_t shared
) noexcept nogil:
    """Append a tensor of `nbytes`, which travels as `wire`; return its piece, NULL without memory."""
    plan.end = plan.total
    return plan_append(plan, source, target, nbytes, dtype, wire, shared)


cdef Piece* plan_append(
    Plan* plan, const char* source, char* target, uint64_t nbytes, int dtype, int wire, int64_t shared
) noexcept nogil:
    """Append a tensor like plan_add, but without a gap behind the last piece, which has the same dtype."""
    cdef Piece* pieces
    cdef Piece* piece
    if plan.count == plan.room:
        pieces = <Piece*>realloc(plan.pieces, (<size_t>plan.room * 2 + 64) * sizeof(Piece))
        if pieces == NULL:
            return NULL
        plan.pieces, plan.room = pieces, plan.room * 2 + 64
    piece = &plan.pieces[plan.count]
    piece.source, piece.target, piece.start = source, target, plan.end
    piece.nbytes = nbytes // <uint64_t>dtype_bytes(dtype) * <uint64_t>dtype_bytes(wire)
    piece.dtype, piece.wire, piece.shared = dtype, wire, shared
    plan.count += 1
    plan.end += piece.nbytes
    plan.total = (plan.end + PIECE_ALIGNMENT - 1) // PIECE_ALIGNMENT * PIECE_ALIGNMENT
    return piece


cdef int32_t plan_find(const Plan* plan, uint64_t at) noexcept nogil:
    """Return the number of the last piece that starts at or before `at`."""
    cdef int32_t low = 0, high = plan.count, middle
    while high - low > 1:
        middle = (low + high) // 2
        if plan.pieces[middle].start <= at:
            low = middle
        else:
            high = middle
    return low
