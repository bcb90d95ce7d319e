"""What a transport is: how the bytes of a chunk reach the other ranks of an engine, and how each knows how far the others are.

Chunks are numbered over the whole schedule. Every rank takes every chunk through the same stages, in order; the transport
carries what a rank has written to its slot to those who read it, and tells each rank how far every other one is. It knows
neither tensors nor fusion nor what is computed. The executor (data/executor.pyx) is its only caller.

Every implementation promises:

- **Order.** When `reached(stage, n)` is true, all that every rank wrote and offered before it published n chunks of that stage
  can be read: its slots, and its part of the arena where there is one. A slot holds chunk n from the time that its owner has
  published n as packed until all ranks have published n as copied; then the owner writes chunk n + SLOTS to it. Progress only
  grows.
- **Fences.** A wake-up is never lost: whoever has stored its `needs` and looks once more, after a full fence, either sees what
  another rank has published since, or is woken by it. The caller fences after `needs`; `publish` fences before it looks for ranks
  that sleep (docs/architecture/protocol.md, I8).
- **Callers.** The holder of the driver's role alone, without the GIL and without the engine's lock. There is one call at a
  time, but the next may come from another thread.
- **Time.** No call waits, allocates, or takes longer than to copy a chunk. There are no deadlines in here: whoever drives watches
  how long nothing moves (control/stall.pyx).
- **Failure.** No call fails. A rank that dies or loses its link stands still, and is found by whoever watches it; that ends the
  world with a cause (`abort_world`). After that no slot is written, and what the slots hold means nothing.
"""
from libc.stdint cimport uint64_t

cdef enum Stage:
    PACKED = 0              # a rank's own bytes are in its slot
    REDUCED = 1             # its part of the result is, too
    COPIED = 2              # it has taken what it wants from all slots

cdef struct Progress:       # chunks that a rank has passed, at each stage
    uint64_t packed
    uint64_t reduced
    uint64_t copied

cdef struct Transport:
    # Where the slot of `rank` for chunk `n` can be read; one's own slot can be written, too.
    char* (*slot)(Transport* t, int rank, uint64_t n) noexcept nogil
    # Tell the others how far this rank is, and wake those that have said they need it.
    void (*publish)(Transport* t, const Progress* mine) noexcept nogil
    # Say which bytes of the own slot, from `begin` in chunk `n` on, `rank` will read when they are published; -1: every rank.
    # NULL where ranks read slots in place.
    void (*offer)(Transport* t, int rank, uint64_t n, uint64_t begin, uint64_t nbytes) noexcept nogil
    # Whether every rank, this one included, has passed `stage` for `chunks` chunks.
    bint (*reached)(Transport* t, Stage stage, uint64_t chunks) noexcept nogil
    # Before this rank sleeps: how far others have to be, at each stage, for it to go on; UINT64_MAX: it waits for none there.
    void (*needs)(Transport* t, const Progress* others) noexcept nogil
    # Where the transport can sum over all ranks itself; else NULL. Memory for so many bytes, the transport's, NULL if there is
    # none; begin to replace `count` floats of four or eight bytes there by the sums of all ranks' floats; and whether that is
    # done. All ranks sum equally many, for the same entries in the same order.
    char* (*sum_room)(Transport* t, uint64_t nbytes) noexcept nogil
    void (*sum)(Transport* t, uint64_t count, int item_bytes) noexcept nogil
    bint (*summed)(Transport* t) noexcept nogil
    # How far a rank is, as known here: for who is to blame when nothing moves.
    Progress (*progress)(Transport* t, int rank) noexcept nogil
