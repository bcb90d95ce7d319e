"""The engines of one process, of its world and its process sets, and the one thread that drives them while nobody waits.

The engine thread is started with the world's engine and ends with the last engine. It never takes the GIL and never spins. It
sleeps without a timeout unless a batch is open or an entry is in progress. It sleeps at one door for all engines: a thread that
rings an engine's own door, which tells the engines with news apart, rings that door next (segment.pxd: ring).
"""
from libc.errno cimport ESHUTDOWN
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.control.driver cimport NEVER, announce_sleep, drive_unattended, driver_stop, is_due, remaining_ns
from engine_ext.control.state cimport State
from engine_ext.platform.atomics cimport load32_acquire, store32_release
from engine_ext.platform.doors cimport door_count, door_ring, door_sleep
from engine_ext.platform.posix cimport engine_thread_start, pthread_join, pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.shared.layout cimport DOOR_THREAD, SLEEP_ENGINE

cdef extern from "platform/cpu.h" nogil:
    uint64_t engine_float_enter()

cdef enum:
    LEAVE_POLL_NS = 1000000    # nanoseconds between two looks whether the engine thread still drives an engine that leaves


cdef inline State* next_engine(State* world, State* e) noexcept nogil:
    """Return the engine after `e`; the world's is the first. The caller holds the world's lock."""
    return world.sets if e == world else e.next_set


cdef bint is_over(State* world) noexcept nogil:
    """Return whether the last engine has left."""
    cdef bint over
    pthread_mutex_lock(&world.lock)
    over = load32_acquire(&world.stop) != 0 and world.sets == NULL
    pthread_mutex_unlock(&world.lock)
    return over


cdef State* find_due(State* world, State* last) noexcept nogil:
    """Return the next engine after `last` (NULL: from the first on) that is due, or NULL. The engine stays until the next call of
    this. An engine that left while it was driven has no successor here; its door was rung, so the search starts again."""
    cdef State* e
    pthread_mutex_lock(&world.lock)
    e = world if last == NULL else next_engine(world, last)
    while e != NULL and (load32_acquire(&e.stop) or not is_due(e)):
        e = next_engine(world, e)
    world.driven = e
    pthread_mutex_unlock(&world.lock)
    return e


cdef uint64_t find_earliest(State* world) noexcept nogil:
    """Return when the first engine is due by itself: nanoseconds, monotonic; NEVER: none is."""
    cdef uint64_t earliest = NEVER
    cdef State* e = world
    pthread_mutex_lock(&world.lock)
    while e != NULL:
        if not load32_acquire(&e.stop) and e.due != NEVER and (earliest == NEVER or e.due < earliest):
            earliest = e.due
        e = next_engine(world, e)
    pthread_mutex_unlock(&world.lock)
    return earliest


cdef void* engine_thread(void* argument) noexcept nogil:
    """Run the engine thread: drive engines that are due, until the last one has left."""
    cdef State* world = <State*>argument
    cdef State* e
    cdef uint32_t* door = &world.segment.mine.door[DOOR_THREAD]
    cdef uint32_t count
    cdef bint moved
    engine_float_enter()
    while True:
        count = door_count(door)        # read before the engines' own doors: pairs with ring
        if is_over(world):              # read after the count: pairs with engines_leave
            break
        moved = False
        e = find_due(world, NULL)
        while e != NULL:
            moved |= drive_unattended(e)
            e = find_due(world, e)
        if not moved:
            door_sleep(door, count, remaining_ns(find_earliest(world)))
    return NULL


cdef int engines_enter(State* e) noexcept nogil:
    """Have the engine thread drive an engine; the thread is started with the world's. Return 0 or an errno."""
    cdef State* world = e.world
    cdef int status
    e.driven_at = door_count(&e.segment.mine.door[SLEEP_ENGINE])
    announce_sleep(e, SLEEP_ENGINE, e.driven_at)
    e.moved = True                      # the first look is for what came before
    if e == world:
        status = engine_thread_start(&e.thread, engine_thread, e)
        e.threaded = status == 0
        return status
    pthread_mutex_lock(&world.lock)
    status = ESHUTDOWN if load32_acquire(&world.stop) else 0        # set if another thread has closed the world meanwhile
    if status == 0:
        e.next_set, world.sets, e.many_threads = world.sets, e, world.calls_back        # pairs with driver_note_done
    pthread_mutex_unlock(&world.lock)
    door_ring(&world.segment.mine.door[DOOR_THREAD], 1)
    return status


cdef void engines_leave(State* e) noexcept nogil:
    """Have the engine thread leave an engine, after its turn there if it is driving it, and then fail what is in flight. With the
    last engine the thread ends, and is joined."""
    cdef State* world = e.world
    cdef State** link = &world.sets
    cdef bint last, driven = True
    pthread_mutex_lock(&world.lock)
    store32_release(&e.stop, 1)
    while link[0] != NULL and link[0] != e:
        link = &link[0].next_set
    if link[0] != NULL:
        link[0], e.next_set = e.next_set, NULL
    last = world.threaded and load32_acquire(&world.stop) and world.sets == NULL
    if last:
        world.threaded = False
    pthread_mutex_unlock(&world.lock)
    door_ring(&world.segment.mine.door[DOOR_THREAD], 1)
    while driven and not last:
        pthread_mutex_lock(&world.lock)
        driven = world.driven == e
        pthread_mutex_unlock(&world.lock)
        if driven:
            door_sleep(&e.local_door, door_count(&e.local_door), LEAVE_POLL_NS)
    if last:
        pthread_join(world.thread, NULL)
    driver_stop(e)
