"""The choice between cached and streaming stores, from measurements."""
from libc.stdint cimport uint64_t, uint8_t

cdef enum:
    CLASSES = 48            # one size class for each power of two of a batch's bytes

cdef struct StoreChooser:       # measurements of cached and streaming stores, by size class
    double best[CLASSES][2]     # by STORES_*: nanoseconds per byte, a decaying minimum; 0: never measured
    uint64_t uses[CLASSES]
    uint8_t favoured[CLASSES]   # the better kind at the last use
    uint64_t gap[CLASSES]       # uses from the last trial of the other kind to the next; 0: there was none
    uint64_t trial[CLASSES]     # the use that is that next trial

cdef uint8_t stores_choose(StoreChooser* chooser, uint64_t nbytes) noexcept nogil
cdef void stores_measured(StoreChooser* chooser, uint64_t nbytes, uint8_t stores, uint64_t ns) noexcept nogil
