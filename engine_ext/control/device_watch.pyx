"""Work that a GPU was given and does not end.

It may wait for what the program computes before it, here or on another rank, as an operation that is not enqueued waits for a
rank that is late; so the same limits hold. The rank whose own GPU has not come to the work is late, and tells so of itself. Those
of the others wait in NCCL for it, and they tell only when nobody else has.
"""
from libc.stdint cimport uint64_t
from libc.stdio cimport snprintf
from libc.string cimport memcpy

from engine_ext.control.stall cimport stall_accuse, stall_tell
from engine_ext.control.turns cimport turns_are_late
from engine_ext.gpu.device cimport DEVICE_NAME, DEVICE_OUTSTANDING, device
from engine_ext.platform.atomics cimport load32_relaxed, load_acquire, load_pointer
from engine_ext.platform.clock cimport after_ns, age_ns, overdue_ns
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.shared.layout cimport COORDINATOR
from engine_ext.shared.segment cimport claimed

cdef enum:
    TEXT_BYTES = 320

cdef uint64_t NEVER = <uint64_t>-1
cdef uint64_t AGAIN_NS = 100000000       # between two attempts to accuse
cdef uint64_t GRACE_NS = 10000000000     # in which whoever is late tells so itself: between hosts after pings


cdef void describe(State* e, const char* whose, uint64_t ticket, uint64_t ns, bint begun, char* text) noexcept nogil:
    """What a GPU has not done for so long, and why that may be."""
    cdef char[DEVICE_NAME] name
    pthread_mutex_lock(&e.lock)
    memcpy(name, e.device.names[(ticket - 1) % DEVICE_OUTSTANDING], DEVICE_NAME)
    pthread_mutex_unlock(&e.lock)
    snprintf(text, TEXT_BYTES, "%s GPU has not %s %s for %.1f s: %s", whose,
             <const char*>b"ended" if begun else <const char*>b"begun", <const char*>name, <double>ns / 1e9,
             <const char*>b"NCCL waits there for another rank's GPU, or for the network" if begun else
             <const char*>b"what the program computes before it goes on, or hangs")


cdef void watch_turns(State* e, uint64_t seen) noexcept nogil:
    """End the world if the coordinator gives process sets no turns. It may be kept by an entry of host memory; of that others
    tell, and sooner."""
    cdef char[TEXT_BYTES] text
    cdef uint64_t limit = after_ns(e.stall_limit_ns, GRACE_NS)
    if e.stall_limit_ns and turns_are_late(e, seen, limit):
        snprintf(text, TEXT_BYTES, "it has given process sets no turn on the GPUs for %.0f s", <double>limit / 1e9)
        stall_accuse(e, COORDINATOR, text, False)


cdef uint64_t device_watch(State* e, uint64_t seen) noexcept nogil:
    """Look whether the GPU goes on, warn if it does not, and end the world when the stall limit is over. When to look again, as
    this process sees time pass."""
    cdef char[TEXT_BYTES] text
    cdef device* d = <device*>load_pointer(<void**>&e.device)       # pairs with use_device
    cdef uint64_t passed, limit = e.stall_limit_ns
    cdef bint begun
    if d == NULL or load32_relaxed(&e.failed) or claimed(&e.segment):
        return NEVER
    watch_turns(e, seen)
    passed = load_acquire(&d.passed)                # pairs with lane_look, as the next two
    if passed >= load_acquire(&d.enqueued):
        e.device_since = 0
        return NEVER
    if e.device_since == 0 or passed != e.device_passed:
        e.device_since, e.device_passed = seen, passed
    begun = load_acquire(&d.begun) > passed
    if overdue_ns(seen, e.device_since, e.stall_warning_ns) and e.device_told != passed + 1:
        e.device_told = passed + 1
        describe(e, b"this rank's", passed + 1, age_ns(seen, e.device_since), begun, text)
        stall_tell(e, text)
    if begun and limit:
        limit = after_ns(after_ns(limit, e.look_ns), GRACE_NS)
    if overdue_ns(seen, e.device_since, limit):
        describe(e, b"its", passed + 1, age_ns(seen, e.device_since), begun, text)
        stall_accuse(e, e.segment.rank, text, False)
    return max(after_ns(e.device_since, limit), after_ns(seen, AGAIN_NS)) if limit else NEVER
