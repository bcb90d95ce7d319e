"""The process sets of this rank, in the list of the world's engine: through it the monitor looks after them, and a failure of
the world reaches who sleeps in one."""
from engine_ext.control.state cimport State
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock

cdef inline void process_set_enter(State* e) noexcept nogil:
    pthread_mutex_lock(&e.world.lock)
    e.next_set, e.world.sets, e.many_threads = e.world.sets, e, e.world.calls_back      # pairs with driver_note_done
    pthread_mutex_unlock(&e.world.lock)

cdef inline void process_set_leave(State* e) noexcept nogil:
    """Nothing happens if it is not in the list: it is a world, or has not begun, or has left."""
    cdef State** link = &e.world.sets
    pthread_mutex_lock(&e.world.lock)
    while link[0] != NULL and link[0] != e:
        link = &link[0].next_set
    if link[0] != NULL:
        link[0] = e.next_set
    pthread_mutex_unlock(&e.world.lock)
