"""Which kind of store a batch uses.

Who pays for a cached store is the reader, so only whole entries tell, and what they tell changes while a virtual machine's
cores move about. Each size class keeps, for both kinds, the best recent time per byte. The better one is used; the other is
tried again now and then, more often at first. A bad minute is forgotten because the remembered minimum drifts towards what is
measured, slowly: one late rank must not make a kind look bad.
"""
from libc.stdint cimport uint64_t, uint8_t

from engine_ext.shared.layout cimport STORES_CACHED, STORES_STREAMING

cdef enum:
    FIRST_TRIALS = 6        # alternate at first
    YOUNG = 128             # uses of a class
    TRY_AGAIN_YOUNG = 8     # then give the other kind one in so many
    TRY_AGAIN = 32
    SMALLEST = 16           # below 64 KiB everything is in the cache anyway


cdef int size_class(uint64_t nbytes) noexcept nogil:
    cdef int k = 0
    while nbytes > 1 and k < CLASSES - 1:
        nbytes >>= 1
        k += 1
    return k


cdef uint8_t stores_choose(StoreChooser* chooser, uint64_t nbytes) noexcept nogil:
    cdef int k = size_class(nbytes)
    cdef uint64_t n = chooser.uses[k]
    cdef uint64_t period = TRY_AGAIN_YOUNG if n < YOUNG else TRY_AGAIN
    cdef uint8_t better
    if k < SMALLEST:
        return STORES_CACHED
    chooser.uses[k] += 1
    if n < FIRST_TRIALS or chooser.best[k][0] == 0 or chooser.best[k][1] == 0:
        return STORES_STREAMING if n & 1 else STORES_CACHED
    better = STORES_CACHED if chooser.best[k][STORES_CACHED] <= chooser.best[k][STORES_STREAMING] else STORES_STREAMING
    return 1 - better if n % period == period - 1 else better


cdef void stores_measured(StoreChooser* chooser, uint64_t nbytes, uint8_t stores, uint64_t ns) noexcept nogil:
    cdef double* best
    cdef double rate
    if nbytes == 0 or stores > 1:
        return
    rate = <double>ns / <double>nbytes
    best = &chooser.best[size_class(nbytes)][stores]
    if best[0] == 0 or rate < best[0]:
        best[0] = rate
    else:
        best[0] += min(rate - best[0], best[0]) * 0.1
