"""Room for results on a GPU whose size only their entry tells: of an allgather and an all-to-all.

Memory of a GPU is its framework's to give, which takes the GIL, and may wait for the GPU. So neither whoever drives nor the lane
asks for it: a thread of its own does (`engine/device.py`), by the function that came with the operation. What was freed on the
stream of the operation may still be in use there, so the lane waits for a mark that is recorded behind the allocation. An item
for which room is being made is the state's `finding_room` until its lane or a failure ends it: looked at under the lock, it tells
whether the item and its operation are still there.
"""
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from engine_ext.bindings.view cimport HOST, View, view_anywhere
from engine_ext.control.state cimport State
from engine_ext.gpu.device cimport DEVICE_WHY, device, device_item, device_mark
from engine_ext.operations.op cimport Op
from engine_ext.platform.atomics cimport load32_acquire, store32_release
from engine_ext.platform.doors cimport DOOR_EVERYBODY, door_count, door_ring, door_sleep
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.shared.layout cimport CAUSE_RAISED
from engine_ext.shared.segment cimport abort_world

from engine_ext.errors import DeviceError, UnsupportedTensorError


cdef int expect_room(Op* op, object room, const View* view) except -1:
    """Give an operation what makes room for its result, and has to be kept by its owner."""
    if room is None:
        raise UnsupportedTensorError(
            f"a tensor on cuda:{view.device - 1}, whose framework's binding makes no room for results of unknown size; move it "
            "with .cpu()"
        )
    op.room = <void*>room
    return 0


# ---- the thread that makes room ----------------------------------------------------------------------------------------------

cdef struct Wanted:             # of the item for which room is made
    void* stream
    uint64_t* sizes             # malloc'ed: bytes of each result
    int count


cdef device_item* next_item(State* e, Wanted* wanted, void** room) noexcept:
    """The oldest item without room, if there is one, and a new reference to the function that makes it. Nothing of Python's is
    allocated under the lock: that might run anything."""
    cdef device_item* item
    cdef int k, r
    pthread_mutex_lock(&e.lock)
    item = e.roomless
    if item != NULL:
        e.roomless, e.finding_room = item.next_roomless, item
        wanted.count = item.n_parcels
        wanted.stream, room[0] = (<Op*>item.ops[0]).stream, (<Op*>item.ops[0]).room
        Py_INCREF(<object>room[0])
        wanted.sizes = <uint64_t*>malloc(<size_t>item.n_parcels * sizeof(uint64_t))
        for k in range(item.n_parcels if wanted.sizes != NULL else 0):
            wanted.sizes[k] = 0
            for r in range(e.segment.size):
                wanted.sizes[k] += item.parcels[k].received[r]
    pthread_mutex_unlock(&e.lock)
    return item


cdef int give(State* e, const Wanted* wanted, const uint64_t* targets, device_mark* mark, list made) except -1:
    """Give the item its room, if it is still there."""
    cdef device* d = e.world.device
    cdef device_item* item
    cdef int k
    pthread_mutex_lock(&e.lock)
    item = e.finding_room
    if item != NULL:
        e.finding_room = NULL
        for k in range(item.n_parcels):
            item.parcels[k].target = targets[k]
        item.ready[item.n_ready] = mark
        item.n_ready += 1
        Py_INCREF(made)
        (<Op*>item.ops[0]).result = <void*>made
        d.give_room(d, item)            # under the lock, under which the lane ends it
    pthread_mutex_unlock(&e.lock)
    if item == NULL:
        d.unmark(d, mark)
    return 0


cdef int make_room(State* e, Wanted* wanted, object room) except -1:
    """Have a framework make room for the results of an item, and give it."""
    cdef char[DEVICE_WHY] why
    cdef device_mark* mark = NULL
    cdef View view
    cdef list made
    cdef int k
    cdef uint64_t* targets = wanted.sizes
    if targets == NULL:
        raise MemoryError("no memory for the sizes of a result")
    if e.world.device.relax(e.world.device, why) != 0:  # a thread that captures a graph may forbid others to allocate
        raise DeviceError(f"the GPU cannot be asked for it: {why.decode('utf-8', 'replace')}")
    made = room([targets[k] for k in range(wanted.count)])
    if len(made) != wanted.count:
        raise DeviceError(f"its framework made room for {len(made)} tensors instead of {wanted.count}")
    for k, each in enumerate(made):
        view_anywhere(each, &view)
        if view.device == HOST or view.nbytes != targets[k]:
            raise DeviceError(f"its framework made room for {view.nbytes} bytes instead of {targets[k]}")
        targets[k] = <uint64_t>view.data
    if e.world.device.mark(e.world.device, wanted.stream, &mark, why) != 0:
        raise DeviceError(f"the memory for it cannot be waited for: {why.decode('utf-8', 'replace')}")
    return give(e, wanted, targets, mark, made)


cdef int make_rooms(State* e) except -1:
    """Make room whenever a result needs it, until there will be none any more. A failure is the world's."""
    cdef Wanted wanted
    cdef void* room = NULL
    cdef object function
    cdef uint32_t count
    while True:
        count = door_count(&e.rooms_door)
        if load32_acquire(&e.rooms_closed):         # pairs with close_rooms
            return 0
        if next_item(e, &wanted, &room) == NULL:
            with nogil:
                door_sleep(&e.rooms_door, count, 0)
            continue
        function = <object>room
        Py_DECREF(function)                         # the reference of next_item
        try:
            make_room(e, &wanted, function)
        except BaseException as error:              # whatever it is: who waits for room has to hear of it
            text = f"no room on its GPU for a result: {type(error).__name__}: {error}".encode("utf-8", "replace")
            abort_world(&e.segment, e.segment.rank, CAUSE_RAISED, text)
        finally:
            free(wanted.sizes)
            function = None


cdef void close_rooms(State* e) noexcept nogil:
    """Nobody needs room any more: the thread that makes it ends."""
    store32_release(&e.rooms_closed, 1)             # pairs with make_rooms
    door_ring(&e.rooms_door, DOOR_EVERYBODY)


# ---- results -----------------------------------------------------------------------------------------------------------------

cdef list parts_in_rooms(const Op* op, int size, int count):
    """What was gathered of a group, by member: the tensor that holds the bytes, the rows of each rank, and the bytes of a row."""
    cdef list made = <list>op.result
    cdef int k, r
    return [(made[k], tuple([op.row_counts[k * (size + 1) + r] for r in range(size)]), op.row_counts[k * (size + 1) + size])
            for k in range(count)]
