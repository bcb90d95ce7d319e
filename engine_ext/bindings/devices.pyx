"""Tensors on a GPU: when they are ready, and who waits for their results.

A submission marks the current stream of its framework: the tensors are ready when the device has passed the mark. Who waits for
the operation lets the current stream wait on the device, and goes on at once.
"""
from libc.stdint cimport uint64_t

from engine_ext.bindings.refusals cimport expect_open, world_error
from engine_ext.bindings.view cimport HOST
from engine_ext.control.driver cimport driver_answer
from engine_ext.control.verdict cimport verdict_await, verdict_outwait
from engine_ext.gpu.device cimport DEVICE_WHY, device
from engine_ext.operations.op cimport CurrentStream
from engine_ext.platform.atomics cimport load32_acquire, load_acquire
from engine_ext.platform.clock cimport age_ns, patience_look
from engine_ext.platform.doors cimport door_sleep
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.shared.layout cimport CAUSE_STALLED
from engine_ext.shared.segment cimport abort_world

from engine_ext.errors import DeviceError, UnsupportedTensorError

cdef uint64_t ALL = <uint64_t>-1

cdef extern from "engine_ext/bindings/dlpack.h":
    enum: DL_CUDA

cdef enum:
    LOOK_NS = 200000            # between two looks at a device that ends its work
    REST_NS = 5000000000        # longest wait for a device after a failure: its lane waits 4 s
    PER_THREAD = 2              # CU_STREAM_PER_THREAD: another stream in each thread that uses it


cdef str place(const View* view):
    return "in the host's memory" if view.device == HOST else f"on cuda:{view.device - 1}"


cdef int expect_same_device(object tensor, const View* view, const View* other, str what) except -1:
    """Refuse a tensor of an operation that is elsewhere than another of its tensors."""
    if view.device != other.device:
        raise UnsupportedTensorError(
            f"{type(tensor).__module__}.{type(tensor).__qualname__} cannot be communicated: {what} is {place(view)}, and others "
            f"of the operation are {place(other)}; an operation has all its tensors on one device"
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


cdef void unmark(State* e, Op* op) noexcept nogil:
    """An operation that was never taken needs its mark no more."""
    if op.mark != NULL:
        e.world.device.unmark(e.world.device, op.mark)
        op.mark = NULL


cdef int follow(State* e, uint64_t ticket, CurrentStream stream_of, Op* op, bint measured) except -1:
    """Let the current stream wait until the device has passed a ticket. `op`, if it is that of one: it is released when this is
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


cdef bint rests(State* e, bint failed) noexcept nogil:
    """Whether the device has passed all that this engine has handed over; after a failure, whether it does nothing any more."""
    cdef device* d = e.world.device
    return has_ended_all(e) and d.has_passed(
        d, ALL if failed else load_acquire(&d.enqueued) if e.device != NULL else e.last_ticket
    ) and (failed or e.device == NULL or d.frozen_rest(d))


cdef bint come_to_rest(State* e, uint64_t ns, bint failed) noexcept nogil:
    """Wait, at most so long, until the device has passed all, and its lane has ended all; or, unless it has `failed` before,
    the world fails."""
    cdef uint64_t begun = patience_look(e.clock)
    while not rests(e, failed):
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
        verdict_await(e)                # there is no driver any more that would have it judged
        verdict_outwait(e)
        d.stop(d)
        come_to_rest(e, REST_NS if e.device != NULL else 0, True)      # the world's waits for all
    return has_ended_all(e)
