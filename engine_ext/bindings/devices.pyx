"""Tensors on a GPU: when they are ready, and how streams wait for results.

A submission marks the framework's current stream. The tensors are ready once the device has passed the mark. A thread that waits
for the operation makes the current stream wait on the device, and continues at once.
"""
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint32_t
from libc.stdlib cimport free, malloc

from engine_ext.bindings.refusals cimport expect_open, world_error
from engine_ext.bindings.view cimport HOST, view_anywhere
from engine_ext.control.driver cimport driver_answer
from engine_ext.control.failure cimport claim_await, claim_outwait
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
    LOOK_NS = 200000            # nanoseconds between two looks at a device that finishes its work
    REST_NS = 5000000000        # nanoseconds: longest wait for a device after a failure; its CUDA thread waits 4 s
    PER_THREAD = 2              # CU_STREAM_PER_THREAD: a different stream in each thread that uses it


cdef str describe_location(const View* view):
    """Return where a view's memory is, as a phrase for an error."""
    return "in the host's memory" if view.device == HOST else f"on cuda:{view.device - 1}"


cdef int expect_same_device(object tensor, const View* view, const View* other, str what) except -1:
    """Raise UnsupportedTensorError if two tensors of an operation are on different devices; `what` names the first."""
    if view.device != other.device:
        raise UnsupportedTensorError(
            f"{type(tensor).__module__}.{type(tensor).__qualname__} cannot be communicated: {what} is {describe_location(view)}, "
            f"and others of the operation are {describe_location(other)}; an operation has all its tensors on one device"
        )
    return 0


cdef device* device_of(State* e, int ordinal) except NULL:
    """Return the process's GPU. If it is not open, open it together with all ranks of the world. For a process set, also connect
    its ranks."""
    cdef device* d = e.world.device
    if e.opened and not e.calls_opener and d.ordinal == ordinal:
        return d
    if e.opener == NULL:
        raise UnsupportedTensorError(f"a tensor on cuda:{ordinal}, and this engine opens no GPU")
    (<object>e.opener)(ordinal)
    if not e.opened:
        raise DeviceError("the GPU is not open")
    return e.world.device


cdef void* current_stream(CurrentStream stream_of, int ordinal) except? NULL:
    """Return the current stream of the framework on GPU `ordinal`; raise for a per-thread default stream."""
    cdef void* stream = NULL
    stream_of(DL_CUDA, ordinal, &stream)
    if <size_t>stream == PER_THREAD:
        raise UnsupportedTensorError(
            "the current stream is the default one of each thread, which others cannot wait for; choose a stream of your own"
        )
    return stream


cdef int mark_ready(State* e, Op* op, object tensor, const View* view) except -1:
    """Mark an operation on tensors in GPU memory: it begins after the work that is on the current stream now."""
    cdef char[DEVICE_WHY] why
    cdef device* d = device_of(e, view.device - 1)
    op.meta.device, op.stream_of, op.ticket, op.released = 1, view.stream_of, 0, False
    op.stream = current_stream(view.stream_of, view.device - 1)
    if d.mark(d, op.stream, &op.mark, why) != 0:
        raise DeviceError(f"the tensor on cuda:{view.device - 1} cannot be waited for: {why.decode('utf-8', 'replace')}")
    return 0


cdef void release_mark(State* e, Op* op) noexcept nogil:
    """Release the mark of an operation that the CUDA thread never took."""
    if op.mark != NULL:
        e.world.device.unmark(e.world.device, op.mark)
        op.mark = NULL


cdef int make_stream_wait(State* e, uint64_t ticket, CurrentStream stream_of, Op* op, bint measured) except -1:
    """Make the current stream wait until the device has passed `ticket`; 0: there is nothing to wait for.

    `op`: the operation of that ticket, or NULL. It is released if its tensors were submitted on the same stream, because that
    stream orders any later use of their memory. `measured`: count the stream's waiting time as exposed time of the step.
    """
    cdef char[DEVICE_WHY] why
    cdef device* d = e.world.device
    cdef void* stream
    if ticket == 0 or d == NULL:
        return 0
    if e.alive[0] != 1:
        expect_open(e)              # a forked child must not call CUDA
    stream = current_stream(stream_of, d.ordinal)
    if d.wait(d, stream, ticket, measured, why) != 0:
        if load_acquire(e.segment.abort):
            raise world_error(e)
        raise DeviceError(f"rank {e.segment.rank} cannot wait for the GPU: {why.decode('utf-8', 'replace')}")
    if op != NULL and stream == op.stream:
        op.released = True
    return 0


cdef bint is_known_passed(const State* e, uint64_t ticket) noexcept nogil:
    """Return whether the device no longer uses the tensors of `ticket`, as of the CUDA thread's last look; True for ticket 0."""
    cdef const device* d = e.world.device
    return ticket == 0 or d == NULL or load_acquire(&d.passed) >= ticket      # pairs with cuda_thread_look


cdef bint has_passed(State* e, uint64_t ticket) noexcept nogil:
    """Return the same as `is_known_passed`, but ask the device too. A forked child does not ask, since CUDA does not work
    there."""
    cdef device* d = e.world.device
    return is_known_passed(e, ticket) or (e.alive[0] == 1 and d.has_passed(d, ticket))


cdef inline bint has_failed(const State* e) noexcept nogil:
    """Return whether the world has failed, or a rank of this host claims that it has."""
    return load_acquire(e.segment.claim) != 0 or load_acquire(e.segment.abort) != 0


cdef uint64_t longest_rest(const State* e, uint64_t ns) noexcept nogil:
    """Return how many nanoseconds to wait for the device: `ns`, unless it has begun its work and now waits for other ranks' GPUs.
    In that case a rank is late, for which `stall_limit` applies and which device_watch reports."""
    cdef device* d = e.world.device
    if load_acquire(&d.begun) <= load_acquire(&d.passed) and d.frozen_rest(d):          # pairs with cuda_thread_look
        return ns
    return max(ns, e.stall_limit_ns) if e.stall_limit_ns else ALL


cdef bint has_ended_all(State* e) noexcept nogil:
    """Return whether the CUDA thread has ended all items of this engine; for the world's engine, those of all engines."""
    cdef device* d = e.device
    cdef bint all
    if d != NULL:
        return load_acquire(&d.ended) >= load_acquire(&d.pushed)        # pairs with the CUDA thread, and with push
    pthread_mutex_lock(&e.lock)
    all = e.returned == e.handed
    pthread_mutex_unlock(&e.lock)
    return all


cdef bint is_device_idle(State* e, bint failed) noexcept nogil:
    """Return whether the device has passed all that this engine handed over. `failed`: whether nothing of the engine runs on it
    any more."""
    cdef device* d = e.world.device
    return has_ended_all(e) and d.has_passed(
        d, ALL if failed else load_acquire(&d.enqueued) if e.device != NULL else e.last_ticket
    ) and (failed or e.device == NULL or d.frozen_rest(d))


cdef bint come_to_rest(State* e, uint64_t ns, bint failed) noexcept nogil:
    """Wait for at most `ns` until the device has passed everything and its CUDA thread has ended everything; return whether they
    have. Unless the world has `failed` before, a failure of the world ends the wait."""
    cdef uint64_t begun = patience_look(e.clock)
    while not is_device_idle(e, failed):
        if age_ns(patience_look(e.clock), begun) >= (ns if failed else longest_rest(e, ns)) or (has_failed(e) and not failed):
            return False
        driver_answer(e)
        door_sleep(&e.stop, load32_acquire(&e.stop), LOOK_NS)
    return True


cdef bint finish_device(State* e, uint64_t ns) noexcept nogil:
    """Wait for at most `ns` until the device has passed everything it was given; return whether the CUDA thread has ended it all.

    If the time is over, the world fails, since nobody may take the unfinished work for done. After a failure, wait until nothing
    of the engine runs on the device any more.
    """
    cdef device* d = e.world.device
    if not e.opened:
        return True
    if not has_failed(e) and not come_to_rest(e, ns, False) and not has_failed(e):
        abort_world(&e.segment, e.segment.rank, CAUSE_STALLED, b"its GPU has not done what it was given when shutdown_timeout "
                    b"was over: the driver or the GPU hangs, or NCCL waits for another rank")
    if has_failed(e):
        claim_await(e)                # no driver is left that would have the claim judged
        claim_outwait(e)
        d.stop(d)
        come_to_rest(e, REST_NS if e.device != NULL else 0, True)      # the world's engine waits for all
    return has_ended_all(e)


# ---- memory for results -----------------------------------------------------------------------------------------------------

# Memory for results on a GPU whose size is known only from their schedule entry: of an allgather and an all-to-all.
#
# Only the framework can allocate GPU memory. That takes the GIL and may wait for the GPU, so neither the driver nor the CUDA
# thread does it. A thread of its own (`engine/gpu/device.py`) calls the function that came with the operation. Memory freed on
# the operation's stream may still be in use there, so the CUDA thread waits for a mark recorded after the allocation. While
# memory is allocated for an item, the item is the state's `allocating`, until its CUDA thread or a failure ends it. A look under
# the lock tells whether the item and its operation still exist.

cdef int set_allocator(Op* op, object room, const View* view) except -1:
    """Store the function that allocates an operation's result. The caller makes sure that the operation's `owner` keeps it
    alive."""
    if room is None:
        raise UnsupportedTensorError(
            f"a tensor on cuda:{view.device - 1}, whose framework's binding makes no room for results of unknown size; move it "
            "with .cpu()"
        )
    op.room = <void*>room
    return 0


# ---- the thread that allocates results ---------------------------------------------------------------------------------------

cdef struct Wanted:             # the item for which memory is allocated
    void* stream                # the operation's stream
    uint64_t* sizes             # malloc'ed: bytes of each result; later their addresses
    int count                   # number of results


cdef device_item* next_item(State* e, Wanted* wanted, void** room) noexcept:
    """Take the oldest item without memory and make it `allocating`; NULL if there is none. `wanted.sizes` is for the caller to
    free; NULL without memory. `room` gets a new reference to the function that allocates.

    No Python object is allocated under the lock, since that may run arbitrary code.
    """
    cdef device_item* item
    cdef int k, r
    pthread_mutex_lock(&e.lock)
    item = e.unallocated
    if item != NULL:
        e.unallocated, e.allocating = item.next_roomless, item
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
    """Give the item its result addresses and `mark`, unless it has ended meanwhile; then release the mark."""
    cdef device* d = e.world.device
    cdef device_item* item
    cdef int k
    pthread_mutex_lock(&e.lock)
    item = e.allocating
    if item != NULL:
        e.allocating = NULL
        for k in range(item.n_transfers):
            item.transfers[k].target = targets[k]
        item.ready[item.n_ready] = mark
        item.n_ready += 1
        Py_INCREF(made)
        (<Op*>item.ops[0]).result = <void*>made
        d.set_targets(d, item)            # under the lock, under which the CUDA thread ends it
    pthread_mutex_unlock(&e.lock)
    if item == NULL:
        d.unmark(d, mark)
    return 0


cdef int allocate_results(State* e, Wanted* wanted, object room) except -1:
    """Make the framework allocate the results of an item, and give them to the item."""
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


cdef int serve_allocations(State* e) except -1:
    """Allocate memory whenever a result needs it, until `stop_allocations` is called. An error makes the world fail."""
    cdef Wanted wanted
    cdef void* room = NULL
    cdef object function
    cdef uint32_t count
    while True:
        count = door_count(&e.allocation_door)
        if load32_acquire(&e.rooms_closed):         # pairs with stop_allocations
            return 0
        if next_item(e, &wanted, &room) == NULL:
            with nogil:
                door_sleep(&e.allocation_door, count, 0)
            continue
        function = <object>room
        Py_DECREF(function)                         # the reference of next_item
        try:
            allocate_results(e, &wanted, function)
        except BaseException as error:              # any error: the ranks that wait for the memory must learn of it
            text = f"no room on its GPU for a result: {type(error).__name__}: {error}".encode("utf-8", "replace")
            abort_world(&e.segment, e.segment.rank, CAUSE_RAISED, text)
        finally:
            free(wanted.sizes)
            function = None


cdef void stop_allocations(State* e) noexcept nogil:
    """End the thread that allocates results, since none will be needed any more."""
    store32_release(&e.rooms_closed, 1)             # pairs with serve_allocations
    door_ring(&e.allocation_door, DOOR_EVERYBODY)


# ---- results -----------------------------------------------------------------------------------------------------------------

cdef list list_group_parts(const Op* op, int size, int count):
    """Return what was gathered of a group as a list by member: (tensor with the bytes, rows of each rank, bytes of a row)."""
    cdef list made = <list>op.result
    cdef int k, r
    return [(made[k], tuple([op.row_counts[k * (size + 1) + r] for r in range(size)]), op.row_counts[k * (size + 1) + size])
            for k in range(count)]
