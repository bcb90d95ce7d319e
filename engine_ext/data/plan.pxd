"""The fusion plan: the tensors of one entry as one logical buffer."""
from libc.stdint cimport int32_t, int64_t, uint64_t

cdef struct Piece:          # a tensor in the logical buffer
    const char* source      # NULL: absent here, contributes the identity of the operation
    char* target
    uint64_t start          # bytes from the buffer's start: a multiple of PIECE_ALIGNMENT; within a group, of the element size
    uint64_t nbytes         # size in the buffer; a tensor that is compressed on the way is larger
    int64_t shared          # place in the arena; -1: not in the arena
    int32_t dtype           # of the tensor
    int32_t wire            # dtype in the buffer

cdef struct Plan:
    Piece* pieces
    int32_t count
    int32_t room            # capacity of `pieces`
    uint64_t end            # end of the last piece, in bytes from the buffer's start
    uint64_t total          # bytes of the logical buffer, gaps included

cdef enum:
    PIECE_ALIGNMENT = 64

cdef void plan_clear(Plan* plan) noexcept nogil
cdef void plan_free(Plan* plan) noexcept nogil
cdef Piece* plan_add(
    Plan* plan, const char* source, char* target, uint64_t nbytes, int dtype, int wire, int64_t shared
) noexcept nogil
cdef Piece* plan_append(
    Plan* plan, const char* source, char* target, uint64_t nbytes, int dtype, int wire, int64_t shared
) noexcept nogil
cdef int32_t plan_find(const Plan* plan, uint64_t at) noexcept nogil

cdef struct Cut:            # the part [low, high) of a piece that lies in the range [begin, end) of the logical buffer
    Piece* piece
    int32_t k               # number of the piece
    uint64_t low
    uint64_t high
    uint64_t begin
    uint64_t end

cdef inline Cut cut_range(const Plan* plan, uint64_t begin, uint64_t end) noexcept nogil:
    """Return a cut before the first piece of [begin, end), for loops of the form `while next_piece(&plan, &cut)`."""
    cdef Cut cut
    cut.piece, cut.low, cut.high = NULL, 0, 0
    cut.begin, cut.end, cut.k = begin, end, plan_find(plan, begin) - 1
    return cut

cdef inline bint next_piece(const Plan* plan, Cut* cut) noexcept nogil:
    """Advance to the next piece that has bytes in the range; False: there is none. Gaps between pieces are skipped."""
    while cut.k + 1 < plan.count and plan.pieces[cut.k + 1].start < cut.end:
        cut.k += 1
        cut.piece = &plan.pieces[cut.k]
        cut.low, cut.high = max(cut.begin, cut.piece.start), min(cut.end, cut.piece.start + cut.piece.nbytes)
        if cut.low < cut.high:
            return True
    return False
