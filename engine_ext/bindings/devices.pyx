"""Tensors on a GPU: when they are ready, and who waits for their results.

A submission marks the current stream of its framework: the tensors are ready when the device has passed the mark. Who waits for
the operation lets the current stream wait on the device, and goes on at once.
"""
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint32_t
from libc.stdlib cimport free, malloc

from engine_ext.bindings.refusals cimport expect_open, world_error
from engine_ext.bindings.view cimport HOST, view_anywhere
from engine_ext.control.completion cimport claim_await, claim_outwait
from engine_ext.control.driver cimport driver_answer
from engine_ext.gpu.device cimport DEVICE_WHY, device_item, device_mark
from engine_ext.platform.atomics cimport load32_acquire, load_acquire, store32_release
from engine_ext.platform.clock cimport age_ns, patience_look
from engine_ext.platform.doors cimport DOOR_EVERYBODY, door_count, door_ring, door_sleep
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.shared.layout cimport CAUSE_RAISED, CAUSE_STALLED
from engine_ext.shared.segment cimport abort_world

from engine_ext.errors import DeviceError, UnsupportedTensorError

cdef uint64_t ALL = <uint64_t>-1

cdef extern from "engine_ext/bindings/dlpack.h":
    enum: DL_CUDA

cdef enum:
    LOOK_NS = 200000            # between two looks at a device that ends its work
    REST_NS = 5000000000        # longest wait for a device after a failure: its lane waits 4 s
    PER_THREAD = 2              # CU_STREAM_PER_THREAD: another stream in each thread that uses it


cdef str describe_location(const View* view):
    return "in the host's memory" if view.device == HOST else f"on cuda:{view.device - 1}"


cdef int expect_same_device(object tensor, const View* view, const View* other, str what) except -1:
    """Refuse a tensor of an operation that is elsewhere than another of its tensors."""
    if view.device != other.device:
        raise UnsupportedTensorError(
            f"{type(tensor).__module__}.{type(tensor).__qualname__} cannot be communicated: {what} is {describe_location(view)}, "
            f"and others of the operation are {describe_location(other)}; an operation has all its tensors on one device"
        )
    return 0


cdef device* device_of(State* e, int ordinal) except NULL:
    """The process's GPU. If it is not open it is opened now, together with all ranks of the world; and in a process set its ranks
    are connected."""
    cdef device* d = e.world.device
    if e.opened and not e.held and d.ordinal == ordinal:
        return d
    if e.opener == NULL:
        raise UnsupportedTensorError(f"a tensor on cuda:{ordinal}, and this engine opens no GPU")
    (<object>e.opener)(ordinal)
    if not e.opened:
        raise DeviceError("the GPU is not open")
    return e.world.device


cdef void* current_stream(CurrentStream stream_of, int ordinal) except? NULL:
    cdef void* stream = NULL
    stream_of(DL_CUDA, ordinal, &stream)
    if <size_t>stream == PER_THREAD:
        raise UnsupportedTensorError(
            "the current stream is the default one of each thread, which others cannot wait for; choose a stream of your own"
        )
    return stream


cdef int mark_ready(State* e, Op* op, object tensor, const View* view) except -1:
    """An operation on tensors in the memory of a GPU: it may begin behind what is on the current stream now."""
    cdef char[DEVICE_WHY] why
    cdef device* d = device_of(e, view.device - 1)
    op.meta.device, op.stream_of, op.ticket, op.released = 1, view.stream_of, 0, False
    op.stream = current_stream(view.stream_of, view.device - 1)
    if d.mark(d, op.stream, &op.mark, why) != 0:
        raise DeviceError(f"the tensor on cuda:{view.device - 1} cannot be waited for: {why.decode('utf-8', 'replace')}")
    return 0


cdef void release_mark(State* e, Op* op) noexcept nogil:
    """Release the mark of an operation that the lane has never taken."""
    if op.mark != NULL:
        e.world.device.unmark(e.world.device, op.mark)
        op.mark = NULL


cdef int make_stream_wait(State* e, uint64_t ticket, CurrentStream stream_of, Op* op, bint measured) except -1:
    """Make the current stream wait until the device has passed a ticket. `op`, if it is that of one: it is released when this is
    the stream that its tensors were submitted on, since whoever uses their memory next does so there. `measured`: how long the
    stream stands there is the step's exposed time."""
    cdef char[DEVICE_WHY] why
    cdef device* d = e.world.device
    cdef void* stream
    if ticket == 0 or d == NULL:
        return 0
    if e.alive[0] != 1:
        expect_open(e)              # a forked child calls nothing of CUDA's
    stream = current_stream(stream_of, d.ordinal)
    if d.wait(d, stream, ticket, measured, why) != 0:
        if load_acquire(e.segment.abort):
            raise world_error(e)
        raise DeviceError(f"rank {e.segment.rank} cannot wait for the GPU: {why.decode('utf-8', 'replace')}")
    if op != NULL and stream == op.stream:
        op.released = True
    return 0


cdef bint is_known_passed(const State* e, uint64_t ticket) noexcept nogil:
    """Whether the device uses the tensors of a ticket no more, as far as its lane has looked. 0: there is none."""
    cdef const device* d = e.world.device
    return ticket == 0 or d == NULL or load_acquire(&d.passed) >= ticket      # pairs with the lane's look


cdef bint has_passed(State* e, uint64_t ticket) noexcept nogil:
    """The same, and the device is asked; but not in a forked child, where CUDA does not work."""
    cdef device* d = e.world.device
    return is_known_passed(e, ticket) or (e.alive[0] == 1 and d.has_passed(d, ticket))


cdef inline bint has_failed(const State* e) noexcept nogil:
    """Whether the world has failed, or this host says so."""
    return load_acquire(e.segment.claim) != 0 or load_acquire(e.segment.abort) != 0


cdef uint64_t longest_rest(const State* e, uint64_t ns) noexcept nogil:
    """How long to wait for the device: `ns`, unless it has come to its work and waits there for other ranks' GPUs. Then a rank
    is late, which `stall_limit` is for and device_watch tells of."""
    cdef device* d = e.world.device
    if load_acquire(&d.begun) <= load_acquire(&d.passed) and d.frozen_rest(d):          # pairs with lane_look
        return ns
    return max(ns, e.stall_limit_ns) if e.stall_limit_ns else ALL


cdef bint has_ended_all(State* e) noexcept nogil:
    """Whether the lane has ended all that this engine has handed over; all there is, if it is the world's."""
    cdef device* d = e.device
    cdef bint all
    if d != NULL:
        return load_acquire(&d.ended) >= load_acquire(&d.pushed)        # pairs with the lane, and with push
    pthread_mutex_lock(&e.lock)
    all = e.returned == e.handed
    pthread_mutex_unlock(&e.lock)
    return all


cdef bint is_device_idle(State* e, bint failed) noexcept nogil:
    """Whether the device has passed all that this engine has handed over; after a failure, whether it does nothing any more."""
    cdef device* d = e.world.device
    return has_ended_all(e) and d.has_passed(
        d, ALL if failed else load_acquire(&d.enqueued) if e.device != NULL else e.last_ticket
    ) and (failed or e.device == NULL or d.frozen_rest(d))


cdef bint come_to_rest(State* e, uint64_t ns, bint failed) noexcept nogil:
    """Wait, at most so long, until the device has passed all, and its lane has ended all; or, unless it has `failed` before,
    the world fails."""
    cdef uint64_t begun = patience_look(e.clock)
    while not is_device_idle(e, failed):
        if age_ns(patience_look(e.clock), begun) >= (ns if failed else longest_rest(e, ns)) or (has_failed(e) and not failed):
            return False
        driver_answer(e)
        door_sleep(&e.stop, load32_acquire(&e.stop), LOOK_NS)
    return True


cdef bint finish_device(State* e, uint64_t ns) noexcept nogil:
    """Wait, at most so long, until the device has passed all that it was given: what it has not passed then nobody may take for
    done, so the world fails. After a failure until nothing of it runs any more. Whether the lane has ended it all."""
    cdef device* d = e.world.device
    if not e.opened:
        return True
    if not has_failed(e) and not come_to_rest(e, ns, False) and not has_failed(e):
        abort_world(&e.segment, e.segment.rank, CAUSE_STALLED, b"its GPU has not done what it was given when shutdown_timeout "
                    b"was over: the driver or the GPU hangs, or NCCL waits for another rank")
    if has_failed(e):
        claim_await(e)                # there is no driver any more that would have it judged
        claim_outwait(e)
        d.stop(d)
        come_to_rest(e, REST_NS if e.device != NULL else 0, True)      # the world's waits for all
    return has_ended_all(e)


# ---- room for results -------------------------------------------------------------------------------------------------------

# Room for results on a GPU whose size only their entry tells: of an allgather and an all-to-all.
#
# Memory of a GPU is its framework's to give, which takes the GIL, and may wait for the GPU. So neither the driver nor the lane
# asks for it: a thread of its own does (`engine/gpu/device.py`), by the function that came with the operation. What was freed on
# the stream of the operation may still be in use there, so the lane waits for a mark that is recorded behind the allocation. An
# item for which room is being made is the state's `finding_room` until its lane or a failure ends it: looked at under the lock,
# it tells whether the item and its operation are still there.

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
        wanted.count = item.n_transfers
        wanted.stream, room[0] = (<Op*>item.ops[0]).stream, (<Op*>item.ops[0]).room
        Py_INCREF(<object>room[0])
        wanted.sizes = <uint64_t*>malloc(<size_t>item.n_transfers * sizeof(uint64_t))
        for k in range(item.n_transfers if wanted.sizes != NULL else 0):
            wanted.sizes[k] = 0
            for r in range(e.segment.size):
                wanted.sizes[k] += item.transfers[k].received[r]
    pthread_mutex_unlock(&e.lock)
    return item


cdef int assign_targets(State* e, const Wanted* wanted, const uint64_t* targets, device_mark* mark, list made) except -1:
    """Assign the item its targets, if it is still there."""
    cdef device* d = e.world.device
    cdef device_item* item
    cdef int k
    pthread_mutex_lock(&e.lock)
    item = e.finding_room
    if item != NULL:
        e.finding_room = NULL
        for k in range(item.n_transfers):
            item.transfers[k].target = targets[k]
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
    return assign_targets(e, wanted, targets, mark, made)


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
