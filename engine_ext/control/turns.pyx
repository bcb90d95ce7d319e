"""Turns of process sets on the GPU: one order, on all ranks, of GPU work for the world and all sets.

NCCL's kernels of two communicators wait for each other if two ranks have them in different orders. The schedules of sets have no
common order, but the world's schedule is one order that every rank executes. So a set's coordinator that has handed an entry of
GPU tensors to its own CUDA thread requests a turn from the world's coordinator. That one appends a TURN (requests.pyx) to the
world's schedule. Every rank of the set then tells its CUDA thread to take the next item of that set. The k-th turn of a set is
its k-th item on every rank, because all of them execute its schedule in the same order.

Only a CUDA thread waits for a turn, and the set's later items behind it. docs/architecture/gpu.md says why that always ends.
"""
from libc.stdint cimport uint64_t

from engine_ext.control.table cimport table_request_turn
from engine_ext.platform.atomics cimport count_up, load_acquire, load_pointer, now_ns, store_pointer
from engine_ext.platform.clock cimport overdue_ns, patience_at
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.shared.layout cimport CAUSE_LEFT, CAUSE_RAISED, COORDINATOR, Status
from engine_ext.shared.segment cimport abort_world, gone, wake


cdef void turns_enter(State* world, device_queue* queue) noexcept nogil:
    """Add a set's queue to the world's list: the set has turns from now on."""
    pthread_mutex_lock(&world.lock)
    queue.next = world.queues
    store_pointer(<void**>&world.queues, queue)
    pthread_mutex_unlock(&world.lock)


cdef void turns_leave(State* world, device_queue* queue) noexcept nogil:
    """Remove a set's queue from the world's list, if it is there."""
    cdef device_queue** link = &world.queues
    pthread_mutex_lock(&world.lock)
    while link[0] != NULL and link[0] != queue:
        link = &link[0].next
    if link[0] != NULL:
        store_pointer(<void**>link, queue.next)
    pthread_mutex_unlock(&world.lock)


cdef void turns_hand(State* world, device_queue* queue) noexcept nogil:
    """Count an item of a set that this rank has given its CUDA thread."""
    pthread_mutex_lock(&world.lock)
    if queue.handed <= queue.given:
        queue.since = patience_at(world.clock, now_ns())
    count_up(&queue.handed, 1)
    pthread_mutex_unlock(&world.lock)
    turns_look_for_left(world)


cdef bint request_turns(State* world) noexcept nogil:
    """Request the turns that are wanted, as far as there is room for requests. Return whether that was all. The caller holds the
    lock."""
    cdef device_queue* queue = world.queues
    while queue != NULL:
        while queue.asked < queue.wanted:
            if table_request_turn(&world.table, queue.number) != Status.OK:
                return False
            queue.asked += 1
        queue = queue.next
    return True


cdef void turns_want(State* world, device_queue* queue) noexcept nogil:
    """Request one more turn. Called on a set's coordinator."""
    cdef bint room
    pthread_mutex_lock(&world.lock)
    queue.wanted += 1
    room = request_turns(world)
    pthread_mutex_unlock(&world.lock)
    if room:
        wake(&world.segment, world.segment.leader, 0)


cdef void turns_retry(State* world) noexcept nogil:
    """Repeat the requests that found no room, after the world's coordinator has read some of this rank's."""
    cdef uint64_t head
    cdef bint asked
    if load_pointer(<void**>&world.queues) == NULL:
        return
    pthread_mutex_lock(&world.lock)
    head = world.segment.mine.request_head
    request_turns(world)
    asked = world.segment.mine.request_head != head
    pthread_mutex_unlock(&world.lock)
    if asked:
        wake(&world.segment, world.segment.leader, 0)


cdef void turns_give(State* world, const engine_entry* entry) noexcept nogil:
    """Execute a TURN entry: the CUDA thread takes the next item of that set, if this rank is in it."""
    cdef device_queue* queue
    cdef bint done = True
    pthread_mutex_lock(&world.lock)
    queue = world.queues
    while queue != NULL and queue.number != entry.id:
        queue = queue.next
    if queue != NULL:
        count_up(&queue.given, 1)
        queue.since = patience_at(world.clock, now_ns())
        done = queue.d.turn(queue) == 0
    pthread_mutex_unlock(&world.lock)
    if not done:
        abort_world(&world.segment, world.segment.rank, CAUSE_RAISED, b"out of memory for the turn of a process set")


cdef bint lacks_turns(State* world) noexcept nogil:
    """Return whether an item of this rank waits for its turn. The caller holds the lock."""
    cdef const device_queue* queue = world.queues
    while queue != NULL:
        if queue.handed > queue.given:
            return True
        queue = queue.next
    return False


cdef void turns_look_for_left(State* world) noexcept nogil:
    """End the world if its coordinator has left while an item waits for a turn, which nobody can give any more."""
    cdef bint lacking
    if load_pointer(<void**>&world.queues) == NULL or not gone(&world.segment, COORDINATOR):
        return
    if load_acquire(&world.segment.mine.cursor) != load_acquire(&world.segment.coordinator.tail):
        return                      # the turn may be among the entries that are still to be executed
    pthread_mutex_lock(&world.lock)
    lacking = lacks_turns(world)
    pthread_mutex_unlock(&world.lock)
    if lacking:
        abort_world(&world.segment, COORDINATOR, CAUSE_LEFT,
                    b"a process set's tensors on GPUs wait for their turn, which it gives")


cdef bint turns_are_late(State* world, uint64_t seen, uint64_t limit_ns) noexcept nogil:
    """Return whether an item of some set has waited `limit_ns` without any turn of that set."""
    cdef const device_queue* queue
    cdef bint late = False
    pthread_mutex_lock(&world.lock)
    queue = world.queues
    while queue != NULL and not late:
        late = queue.handed > queue.given and overdue_ns(seen, queue.since, limit_ns)
        queue = queue.next
    pthread_mutex_unlock(&world.lock)
    return late
