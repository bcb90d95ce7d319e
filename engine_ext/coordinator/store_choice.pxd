"""Cached or streaming stores, per size of batch, from the times of whole entries."""
from libc.stdint cimport uint64_t, uint8_t

cdef enum:
    CLASSES = 48            # one for each power of two of a batch's bytes

cdef struct StoreChooser:
    double best[CLASSES][2]     # nanoseconds per byte, decaying minimum; 0: never measured
    uint64_t uses[CLASSES]

cdef uint8_t stores_choose(StoreChooser* chooser, uint64_t nbytes) noexcept nogil
cdef void stores_measured(StoreChooser* chooser, uint64_t nbytes, uint8_t stores, uint64_t ns) noexcept nogil
