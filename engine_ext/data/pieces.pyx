"""The fusion plan's pieces in a chunk. `n` counts from the entry's first chunk; [low, high) is of the logical buffer.

Slots are shared memory; tensors are this rank's own. Whoever owns an element adds the ranks' values in rank order (I7).
"""
from libc.stdint cimport uint64_t

from engine_ext.data.executor cimport elements, offset
from engine_ext.data.plan cimport Cut, cut_range, next_piece
from engine_ext.kernels.identity cimport fill_identity
from engine_ext.kernels.kernels cimport ENGINE_NO_SOURCE


cdef void pack_range(Executor* x, char* into, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil:
    """Copy [low, high) from the tensors to the slot `into`, which holds it from `begin` on; scale and cast on the way."""
    cdef Cut cut = cut_range(&x.plan, low, high)
    while next_piece(&x.plan, &cut):
        if cut.piece.source == NULL:
            fill_identity(into + (cut.low - begin), cut.piece.wire, x.reduction.op, elements(x, cut.piece, cut.high - cut.low))
        else:
            x.kernels.pack(cut.piece.wire, cut.piece.dtype, x.reduction.prescale, x.streaming, into + (cut.low - begin),
                           cut.piece.source + offset(x, cut.piece, cut.low), elements(x, cut.piece, cut.high - cut.low))


cdef void copy_range(Executor* x, const char* out, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil:
    """Copy [low, high) from the slot `out`, which holds it from `begin` on, to the tensors."""
    cdef Cut cut = cut_range(&x.plan, low, high)
    while next_piece(&x.plan, &cut):
        x.kernels.unpack(cut.piece.wire, cut.piece.dtype, cut.piece.target + offset(x, cut.piece, cut.low),
                         out + (cut.low - begin), elements(x, cut.piece, cut.high - cut.low))


cdef void identity_of_absent(Executor* x, char* into, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil:
    """The part that this rank reduces itself: what it does not have must lie in its slot too."""
    cdef Cut cut = cut_range(&x.plan, low, high)
    while next_piece(&x.plan, &cut):
        if cut.piece.source == NULL:
            fill_identity(into + (cut.low - begin), cut.piece.wire, x.reduction.op, elements(x, cut.piece, cut.high - cut.low))


cdef void find_slots(Executor* x, uint64_t n) noexcept nogil:
    """Where each rank's slot of chunk n lies."""
    cdef int r
    for r in range(x.size):
        x.slots[r] = slot(x, r, n)


cdef void find_sources(Executor* x, const Cut* cut, uint64_t begin) noexcept nogil:
    """What each rank has of a piece, after find_slots: this one in its tensor, unless it is absent here. The slots hold the
    logical buffer from `begin` on, which may have wrapped below zero."""
    cdef int r
    for r in range(x.size):
        x.sources[r] = x.slots[r] + (cut.low - begin)
    if cut.piece.source != NULL:
        x.sources[x.rank] = cut.piece.source + offset(x, cut.piece, cut.low)


cdef void reduce_range(Executor* x, uint64_t n, uint64_t begin, uint64_t low, uint64_t high, int copies) noexcept nogil:
    """Reduce [low, high) into the tensors and, with two copies, into this rank's slot. The slots hold it from `begin` on."""
    cdef Cut cut = cut_range(&x.plan, low, high)
    find_slots(x, n)
    x.reduction.copies = copies
    while next_piece(&x.plan, &cut):
        find_sources(x, &cut, begin)
        x.reduction.unscaled = x.rank if cut.piece.source != NULL else ENGINE_NO_SOURCE
        x.targets[0] = cut.piece.target + offset(x, cut.piece, cut.low)
        if copies > 1:
            x.targets[1] = x.slots[x.rank] + (cut.low - begin)
        x.reduction.dtype, x.reduction.tensor = cut.piece.wire, cut.piece.dtype
        x.kernels.reduce(&x.reduction, x.sources, <void* const*>x.targets, elements(x, cut.piece, cut.high - cut.low))
