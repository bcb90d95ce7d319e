"""A transport: it brings the bytes of a chunk to the other ranks of an engine, and tells each rank the progress of the others.

Chunks are numbered over the whole schedule. Every rank takes every chunk through the same stages, in order. The transport
brings what a rank has written to its slot to its readers, and tells each rank the progress of every other one. It knows neither
tensors nor fusion nor the computation. The executor (data/executor.pyx) is its only caller.

Every implementation promises:

- **Order.** When `all_ranks_reached(stage, n)` is true, everything can be read that any rank wrote and offered before it
  published n chunks of that stage: its slots, and its part of the arena if there is one. A slot holds chunk n from when its owner
  has published n as packed until all ranks have published n as copied. Then the owner writes chunk n + SLOTS to it. Progress only
  grows.
- **Fences.** A wake-up is never lost. A rank that has stored its `needs` and checks once more, after a full fence, either sees
  what another rank has published since, or is woken by it. The caller fences after `needs`; `publish` fences before it looks
  for ranks that sleep (docs/architecture/protocol.md, I8).
- **Callers.** Only the holder of the driver's role calls, without the GIL and without the engine's lock. There is one call at a
  time, but the next may come from another thread.
- **Time.** No call waits, allocates, or takes longer than to copy a chunk. There are no deadlines here: control/stall.pyx watches
  how long nothing moves.
- **Failure.** No call fails. A rank that dies or loses its connection stops making progress. The thread that watches it finds
  that out and ends the world with a cause (`abort_world`). After that no slot is written, and the slots' contents are undefined.
"""
from libc.stdint cimport uint64_t

cdef enum Stage:
    PACKED = 0              # a rank's own bytes are in its slot
    REDUCED = 1             # its part of the result is in its slot, too
    COPIED = 2              # it has copied everything that it needs from all slots

cdef struct Progress:       # number of chunks of the schedule that a rank has passed, by stage
    uint64_t packed
    uint64_t reduced
    uint64_t copied

cdef struct Transport:
    # Return the address of the slot of `rank` for chunk `n`, to be read; this rank's own slot may be written, too.
    char* (*slot)(Transport* t, int rank, uint64_t n) noexcept nogil
    # Publish this rank's progress, and wake the ranks whose `needs` it meets.
    void (*publish)(Transport* t, const Progress* mine) noexcept nogil
    # Say which bytes of this rank's slot for chunk `n`, from byte `begin` on, `rank` will read once they are published; -1: every
    # rank. NULL where ranks read slots in place.
    void (*offer)(Transport* t, int rank, uint64_t n, uint64_t begin, uint64_t nbytes) noexcept nogil
    # Return whether every rank, this one included, has passed `stage` for `chunks` chunks.
    bint (*all_ranks_reached)(Transport* t, Stage stage, uint64_t chunks) noexcept nogil
    # Store, before this rank sleeps, the progress of others at which it can go on; UINT64_MAX: it does not wait for that stage.
    void (*needs)(Transport* t, const Progress* others) noexcept nogil
    # Sums over all ranks by the transport itself; the three are NULL if it cannot. `sum_room` returns memory of the transport
    # for `nbytes`, NULL if there is none. `sum` begins to replace `count` floats of four or eight bytes there by the sums of all
    # ranks' floats. `summed` returns whether that is done. All ranks make the same sums, for the same entries in the same order.
    char* (*sum_room)(Transport* t, uint64_t nbytes) noexcept nogil
    void (*sum)(Transport* t, uint64_t count, int item_bytes) noexcept nogil
    bint (*summed)(Transport* t) noexcept nogil
    # Return the progress of a rank as known here: it tells who is to blame when nothing moves.
    Progress (*progress)(Transport* t, int rank) noexcept nogil
