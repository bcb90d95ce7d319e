"""The kind of store that a batch uses: cached or streaming.

The reader pays for a cached store, so only whole entries can be compared, and their times change while a virtual machine's
cores move about. Each size class keeps the best recent time per byte of both kinds. The better kind is used. The other is tried
again now and then, the less often the more often it has lost, and the slower it is: at 16 MiB it may take five times as long.
The remembered minimum drifts slowly towards what is measured, so a bad minute is forgotten, and one late rank does not make a
kind look bad.
"""
from libc.string cimport memset

from engine_ext.shared.layout cimport STORES_CACHED, STORES_STREAMING

cdef enum:
    FIRST_TRIALS = 4        # uses of a class in which the kinds alternate
    FIRST_GAP = 8           # uses to the first trial after that; each trial that the kind loses doubles the gap
    USUAL_GAP = 32          # the widest gap while the kinds are alike
    TRIAL_SHARE = 64        # a wider one keeps what trials cost below the class's time divided by this
    WIDEST_GAP = 4096
    SMALLEST = 16           # least size class that has a choice: below 64 KiB everything is in the cache


cdef int size_class(uint64_t nbytes) noexcept nogil:
    """Return the size class of a batch: the logarithm of its bytes to base 2, rounded down."""
    cdef int k = 0
    while nbytes > 1 and k < CLASSES - 1:
        nbytes >>= 1
        k += 1
    return k


cdef inline uint64_t widest_gap(double ratio) noexcept nogil:
    """Return the widest gap between trials of a kind that takes `ratio` times as long as the other."""
    return <uint64_t>min(max(TRIAL_SHARE * (ratio - 1), <double>USUAL_GAP), <double>WIDEST_GAP)


cdef uint8_t stores_choose(StoreChooser* chooser, uint64_t nbytes) noexcept nogil:
    """Return STORES_CACHED or STORES_STREAMING for an entry of `nbytes`, and count the use."""
    cdef int k = size_class(nbytes)
    cdef uint64_t n = chooser.uses[k]
    cdef double* best = chooser.best[k]
    cdef uint8_t better
    if k < SMALLEST:
        return STORES_CACHED
    chooser.uses[k] += 1
    if n < FIRST_TRIALS or best[0] == 0 or best[1] == 0:
        return STORES_STREAMING if n & 1 else STORES_CACHED
    better = STORES_CACHED if best[STORES_CACHED] <= best[STORES_STREAMING] else STORES_STREAMING
    if chooser.gap[k] == 0 or chooser.favoured[k] != better:
        chooser.favoured[k], chooser.gap[k], chooser.trial[k] = better, FIRST_GAP, n + FIRST_GAP
    if n < chooser.trial[k]:
        return better
    chooser.gap[k] = min(2 * chooser.gap[k], widest_gap(best[1 - better] / best[better]))
    chooser.trial[k] = n + chooser.gap[k]
    return 1 - better


cdef void stores_measured(StoreChooser* chooser, uint64_t nbytes, uint8_t stores, uint64_t ns) noexcept nogil:
    """Note that an entry of `nbytes` with this kind of store took `ns`."""
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


def replay_stores(list times not None):
    """Choose the kind of store for entries, one after another; return the kinds as numbers. For tests.

    Each entry is a tuple of its bytes, and the nanoseconds that it takes with cached and with streaming stores.
    """
    cdef StoreChooser chooser
    cdef list chosen = []
    memset(&chooser, 0, sizeof(chooser))
    for nbytes, *both in times:
        kind = stores_choose(&chooser, nbytes)
        stores_measured(&chooser, nbytes, kind, both[kind])
        chosen.append(kind)
    return chosen
