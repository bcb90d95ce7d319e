"""Gradient hooks: the code that runs for each parameter in a backward pass, in C.

A hook holds an operation, its parameter's record and the metadata for the coordinator, all prepared when the parameter is
registered. Calling it costs a view of the gradient, a comparison and a bit.
"""
cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

from engine_ext.bindings.collectives cimport FAULT_BYTES, may_share, raise_text, wire_fault, wire_number, wire_of
from engine_ext.bindings.devices cimport (
    device_of, set_allocator, is_known_passed, list_group_parts, make_stream_wait, mark_ready, release_mark,
)
from engine_ext.bindings.groups cimport Extent, find_overlap, group_add, group_gather, group_open, group_parts, group_sparse
from engine_ext.bindings.handles cimport wait_for
from engine_ext.bindings.memory cimport abandon_op, keep_alive, take_memory
from engine_ext.bindings.observing cimport mark_step
from engine_ext.bindings.refusals cimport expect_open, make_mismatch_error, raise_refusal
from engine_ext.bindings.submit cimport make_room
from engine_ext.bindings.torch_parameter cimport HookPlace, give_gradient, gradient_of, hook_place, prefetch_place
from engine_ext.bindings.view cimport HOST, View, expect_dense, expect_reducible, view_anywhere, view_of
from engine_ext.control.driver cimport Target, driver_pin, driver_submit, driver_unpin, driver_wait_for_all
from engine_ext.control.state cimport State
from engine_ext.core cimport Engine
from engine_ext.gpu.device cimport device
from engine_ext.kernels.kernels cimport ENGINE_ADASUM, ENGINE_AVERAGE, ENGINE_BOOL
from engine_ext.operations.kinds cimport dtype_name
from engine_ext.operations.op cimport OP_DONE, Op
from engine_ext.operations.operation cimport new_op
from engine_ext.platform.atomics cimport load32_acquire
from engine_ext.shared.layout cimport KIND_ALLGATHER, KIND_ALLREDUCE, LAYOUT_ROWS, NAME_BYTES, Status, engine_meta
from engine_ext.transport.arena cimport arena_locate

from engine_ext.errors import ArgumentError, EngineError, UnsupportedTensorError

cdef extern from "platform/cpu.h" nogil:
    void engine_prefetch(const void* memory, size_t nbytes)

cdef enum:                          # bytes that a hook call touches of each struct, from its beginning: one to six cache lines
    HOOK_BYTES = 320                # includes the garbage collector's header of 16 bytes before it
    OP_BYTES = 96
    RECORD_BYTES = 56

cdef enum:
    WATCHED_PASSES = 2              # passes that check for shared memory: at the start, and after a change of order


cdef int fill_extent(Extent* extent, const char* begin, uint64_t nbytes, int index, bint reads) noexcept:
    """Fill in an extent unless it is empty; return the number of extents written, 0 or 1."""
    if begin == NULL or not nbytes:
        return 0
    extent.begin, extent.end, extent.index, extent.reads = begin, begin + nbytes, index, reads
    return 1


def hold_the_same(list groups, list seen):
    """Return whether lists hold the same objects as those in `seen`, in the same order."""
    cdef Py_ssize_t g, k
    cdef list now, before
    if len(groups) != len(seen):
        return False
    for g in range(len(groups)):
        if type(groups[g]) is not list:
            return False
        now, before = groups[g], seen[g]
        if len(now) != len(before):
            return False
        for k in range(len(now)):
            if now[k] is not before[k]:
                return False
    return True


cdef int expect_wire(int wire, int op, int place) except -1:
    """Raise if gradients on device `place`, as in View.device, cannot be reduced with a compression."""
    cdef char[FAULT_BYTES] text
    if wire_fault(wire, False, op, place, text):
        raise_text(text)
    return 0


@cython.final                        # so that its methods are called directly, for each gradient
@cython.no_gc_clear                  # __dealloc__ needs the engine, also when the collector breaks the cycle with the group
cdef class GradientHook:
    """A hook that submits the gradient of one parameter; made by GradientGroup.add."""
    cdef GradientGroup group
    cdef Engine engine
    cdef Op* op                     # NULL: deferred, the binding reduces this gradient after the pass
    cdef Target target                # its record is pinned
    cdef PyObject* after            # the hook called after this one in the last pass; borrowed from the group's list
    cdef HookPlace found            # where the framework finds this hook; only used for prefetching
    cdef int passed                 # backward passes since the last reduction
    cdef bint flying                # submitted in this pass
    cdef bint sparse                # the gradient of this pass is sparse
    cdef bint apart                 # the gradient shares memory with others, so it is copied before it is reduced in place
    cdef bint usual                 # the operation's metadata equals `meta`, so it need not be copied again
    cdef bint placed                # on a GPU: the result has a place beside others, and `view` is that place once it was needed
    cdef object view                # a tensor in shared memory, or that place; or None. No program ever gets this object
    cdef object given               # the tensor over `view` that is the parameter's gradient; a program may move its memory
    cdef object room                # target of the others' result if a GPU parameter has no gradient here; else None
    cdef char* place                # address of `view`; for a deferred gradient, its address in this pass
    cdef engine_meta meta           # the parameter's metadata, also used for an absent gradient
    cdef uint64_t nbytes            # of the parameter; of a deferred gradient, of the last one
    cdef readonly str label         # name of the parameter, for errors
    cdef readonly int index         # number of the parameter in its group

    def __dealloc__(self):
        if self.op != NULL:
            if self.placed:
                self.keep_place()
            abandon_op(self.engine.state, self.op)
            self.op = NULL
        if self.target.record != NULL and self.engine.state.alive[0] == 1:
            driver_unpin(self.engine.state, self.target.record)

    cdef int keep_place(self) noexcept:
        """Keep the GPU memory of the result, which the operation owns, until the device has passed everything given to it so far.

        Code that waited for the result may have done so on another stream than the one on which the memory is reused.
        """
        cdef device* d = self.engine.state.world.device
        self.op.released = False
        if d != NULL and load32_acquire(&self.op.flags) & OP_DONE:      # else its entry gives it a later ticket
            self.op.ticket = d.pushed
        return 0

    def __call__(self, parameter):
        cdef GradientGroup group = self.group
        cdef object gradient
        if group.paused:
            return
        self.look_ahead()
        if group.passes > 1 and not group.urgent:
            group.touched = True
            self.passed += 1
            if self.passed < group.passes:
                return              # autograd adds the next passes to this gradient
        gradient = gradient_of(parameter)
        if gradient is None:
            return
        if not group.active:
            expect_open(self.engine.state)
            group.active = True
            group.binding.begin_pass()
        if self.flying:             # autograd has already added to the buffer that is being reduced
            raise EngineError(
                f"the gradient of '{self.label}' was accumulated twice in one backward pass, while it was being reduced: a "
                "module shared by two reentrantly checkpointed segments does that. Use checkpoint(..., use_reentrant=False), or "
                "optimizer.no_sync() for all but the last backward"
            )
        self.submit_gradient(parameter, gradient)

    @property
    def due(self):
        """True if the next call submits the gradient."""
        return self.group.urgent or self.passed + 1 >= self.group.passes

    def found_in(self, hooks):
        """Remember the dictionary in which the framework looks this hook up, for prefetching."""
        hook_place(&self.found, hooks)

    cdef inline void look_ahead(self) noexcept:
        """Prefetch what the next hook will touch. Since the last backward pass all of it has left the cache, and hooks fire in
        the same order as before."""
        cdef GradientGroup group = self.group
        cdef PyObject* following = self.after
        cdef GradientHook hook
        if group.last != NULL and (<GradientHook>group.last).after != <PyObject*>self:
            (<GradientHook>group.last).after = <PyObject*>self
            group.watched = WATCHED_PASSES      # the graph differs from that of the last pass
        group.last = <PyObject*>self
        if following == NULL:
            return
        hook = <GradientHook>following      # prefetched when the hook before this one was called
        engine_prefetch(hook.op, OP_BYTES)
        engine_prefetch(hook.target.record, RECORD_BYTES)
        prefetch_place(&hook.found)
        if hook.after != NULL:
            engine_prefetch(<char*>hook.after - 16, HOOK_BYTES)

    cdef int submit_gradient(self, parameter, gradient) except -1:
        """Submit the gradient of a parameter, moved or replaced if it cannot be reduced where it lies."""
        cdef View view
        cdef object keeper = None
        cdef bint fits = False
        cdef GradientGroup group = self.group
        if self.apart or (self.view is None and not self.placed and group.watched and group.fresh
                          and group.binding.shares_memory(gradient)):
            self.apart = True
            gradient = group.binding.separate(parameter, gradient)
        if self.op == NULL:
            return self.defer_to_binding(parameter, gradient)
        try:
            keeper = view_anywhere(gradient, &view)
            fits = self.matches_parameter(&view)
        except UnsupportedTensorError:
            pass                    # sparse, or on another device: the binding gives a better error
        if not fits:
            gradient = self.group.binding.replace(self.index, parameter, gradient)
            if type(gradient) is tuple:
                return self.bring_sparse(<tuple>gradient)
            keeper = view_anywhere(gradient, &view)
            expect_dense(gradient, &view, f"the gradient of '{self.label}'")
            expect_reducible(&view, f"the gradient of '{self.label}'")
            fits = self.matches_parameter(&view)
        self.op.placed = False
        if view.device != HOST:
            self.expect_device()        # the parameter may have been moved there since
            if fits and self.placed:
                self.take_place()
        elif fits and self.view is not None and view.data != self.place:
            if arena_locate(&self.engine.state.arena, view.data, 1) >= 0:
                self.group.expect_untied(self, &view)
            self.engine.state.executor.kernels.copy(self.place, view.data, view.nbytes)         # still in the cache
            self.give_view(parameter, keeper is None)
            view.data, gradient = self.place, self.view
        self.describe_gradient(&view, fits)
        self.group.moved |= self.op.source != view.data or self.op.nbytes != view.nbytes
        if keeper is not None or self.placed:
            keeper = (gradient, keeper, self.view)
        keep_alive(self.op, gradient if keeper is None else keeper)     # until it is finished
        self.op.source = self.op.target = view.data
        if self.op.placed:
            self.op.target = self.place
        self.op.nbytes = view.nbytes
        if view.device != HOST:
            self.get_ready(gradient, &view)
        return self.submit()

    cdef inline void describe_gradient(self, const View* view, bint fits) noexcept:
        """Fill in the operation's metadata: the parameter's if the gradient `fits` it, else those of the gradient's memory."""
        if not fits:
            self.op.meta, self.op.agreed, self.usual = self.meta, 0, False
            self.op.meta.dtype, self.op.meta.layout = view.dtype, <unsigned char>view.layout
            self.op.meta.device = view.device != HOST
            self.op.meta.ndim, self.op.meta.wire = <uint32_t>view.ndim, wire_of(self.group.wire, view.dtype)
            memcpy(self.op.meta.dims, view.dims, sizeof(view.dims))
            self.op.meta.shared = -1
        elif not self.usual:
            self.op.meta, self.op.agreed, self.usual = self.meta, 0, True

    cdef int give_view(self, parameter, bint cheap) except -1:
        """Make the gradient a tensor over the view.

        `given` no longer is one if a program assigned to its `data`, as torch does when a module is converted. That is checked
        only where it is `cheap`: a new tensor costs less than a capsule.
        """
        cdef View now
        cdef bint there = False
        if self.given is not None and cheap:
            try:
                view_anywhere(self.given, &now)
                there = now.data == self.place and self.matches_parameter(&now)
            except UnsupportedTensorError:
                pass
        if not there:
            self.given = self.group.binding.alias_for(self.index)
        return give_gradient(parameter, self.given)

    cdef int expect_device(self) except -1:
        """Raise if a gradient on a GPU cannot be reduced with the group's settings."""
        return self.group.expect_device(self.label, self.view is not None and not self.placed)

    cdef int take_place(self) except -1:
        """Direct the result to its place on the GPU, which is asked for when it is first needed. So places lie in the order in
        which gradients come, which is also their order in a batch."""
        cdef View view
        if self.view is None:
            place = self.group.binding.place_for(self.index)
            view_anywhere(place, &view)
            if not self.matches_parameter(&view):
                raise EngineError(f"there is no place on the GPU for the gradient of '{self.label}'")    # a defect of the binding
            self.view, self.place = place, view.data
        self.op.placed = True
        return 0

    cdef int get_ready(self, tensor, const View* view) except -1:
        """Mark when a tensor on a GPU is ready."""
        expect_wire(self.op.meta.wire, self.op.meta.op, view.device)
        release_mark(self.engine.state, self.op)
        return mark_ready(self.engine.state, self.op, tensor, view)

    cdef int bring_sparse(self, tuple parts) except -1:
        """Submit a sparse gradient, given as (indices, values, shape, fault). It is gathered, and the binding adds it up."""
        cdef View view
        cdef Py_ssize_t k
        cdef list keepers = []
        cdef object room = None
        cdef Op* op = self.op
        self.drop_parts()
        op.meta, op.agreed, self.usual, op.nbytes = self.meta, 0, False, 0
        try:
            group_open(op, KIND_ALLGATHER, 2)
            for k in range(2):
                keepers.append(group_add(op, k, parts[k], &view))
            group_gather(op)
            group_sparse(op, parts[2], parts[3])
            op.meta.device = view.device != HOST
            if view.device != HOST:
                self.expect_device()
                room = self.group.binding.rooms_for(self.index)
                set_allocator(op, room, &view)
            keep_alive(op, (parts, keepers, room, self.view))
            if view.device != HOST:
                self.get_ready(parts[1], &view)
        except BaseException:
            self.drop_parts()
            raise
        self.sparse = True
        return self.submit()

    cdef list take_parts(self):
        """Return the gathered indices and values of a sparse gradient of all ranks, as `group_parts` does; None for a dense one.
        Makes the operation dense again."""
        cdef list parts = None
        if self.op.status == Status.OK and self.op.row_counts != NULL:
            if self.op.result != NULL:
                parts = list_group_parts(self.op, self.engine.state.segment.size, 2)
            else:
                parts = group_parts(self.op.memory, self.op.row_counts, self.engine.state.segment.size, 2)
        self.drop_parts()
        return parts

    cdef void drop_parts(self) noexcept:
        """Make the operation one for a dense gradient again, and free what a sparse one has allocated."""
        cdef Op* op = self.op
        if op.members != NULL or op.row_counts != NULL:
            free(op.members)
            free(op.splits)
            free(op.row_counts)
            free(op.memory)
            Py_XDECREF(<PyObject*>op.result)
            op.members, op.splits, op.row_counts, op.memory, op.result = NULL, NULL, NULL, NULL, NULL
            op.rows, op.row_bytes = 0, 0
        self.sparse = False

    cdef int defer_to_binding(self, parameter, gradient) except -1:
        """Leave the reduction of a gradient to the binding; it only has to be dense."""
        cdef View view
        try:
            view_anywhere(gradient, &view)
            self.group.moved |= self.place != view.data or self.nbytes != view.nbytes
            self.place, self.nbytes = view.data, view.nbytes
        except UnsupportedTensorError:
            view_anywhere(self.group.binding.replace(self.index, parameter, gradient), &view)
            self.place = NULL       # memory made by `replace` is not shared with others
        self.flying = True
        return 0

    cdef inline bint matches_parameter(self, const View* view) noexcept:
        """Return whether a gradient has its parameter's dtype, shape, layout and kind of memory."""
        return (view.dtype == self.meta.dtype and (view.device != HOST) == self.meta.device
                and view.layout == <signed char>self.meta.layout and <uint32_t>view.ndim == self.meta.ndim
                and memcmp(view.dims, self.meta.dims, <size_t>view.ndim * sizeof(int64_t)) == 0)

    cdef int bring_nothing(self) except -1:
        """Submit *absent* for a parameter without a gradient on this rank. The other ranks' result, if any, goes to its usual
        place."""
        if not self.usual:
            self.op.meta, self.op.agreed, self.usual = self.meta, 0, True
        self.op.nbytes = self.nbytes
        self.op.source, self.op.target = NULL, self.place
        if self.meta.device:
            self.find_room()
        return self.submit()

    cdef tuple take_result(self):
        """Return the other ranks' gradient for a parameter without one here, as (memory, dtype, number of the layout). Dtype and
        layout are theirs."""
        self.usual = self.op.meta.dtype == self.meta.dtype and self.op.meta.layout == self.meta.layout
        return take_memory(self.op), dtype_name(self.op.meta.dtype).decode(), self.op.meta.layout

    cdef int find_room(self) except -1:
        """Direct the other ranks' result to memory of the framework, so that nothing is allocated on a device while it works."""
        cdef View view
        if self.placed:
            self.take_place()
        self.room = self.view if self.placed else self.group.binding.room_for(self.index)
        view_anywhere(self.room, &view)
        if not self.placed and (view.nbytes != self.nbytes or view.dtype != self.meta.dtype or view.layout != LAYOUT_ROWS
                                or view.device == HOST):
            raise EngineError(f"there is no room on the GPU for the gradient of '{self.label}'")     # a defect of the binding
        rooms = self.group.binding.rooms_for(self.index)    # for a sparse gradient of theirs
        set_allocator(self.op, rooms, &view)
        keep_alive(self.op, (self.room, rooms))
        self.op.target = view.data
        return self.get_ready(self.room, &view)

    cdef int submit(self) except -1:
        """Submit the operation; wait while there is no room for it."""
        cdef State* e = self.engine.state
        cdef int status
        while True:
            self.op.flags, self.op.memory_bytes = 0, 0      # of the last pass: `target` is not for a result that is gathered
            status = driver_submit(e, &self.target, self.op)
            if status == Status.OK:
                self.flying = True
                return 0
            self.op.flags = OP_DONE         # while it is not submitted: a signal may end the wait for room
            if status != Status.NO_ROOM and status != Status.AFTER_FAILURE:
                raise_refusal(e, status, self.label)
            make_room(e, &self.target, status)

    cdef int extents_of(self, Extent* extents) noexcept:
        """Write the extents of private memory that this pass has written or only read; return how many: 0 to 2."""
        cdef Op* op = self.op
        cdef int count = 0
        if op == NULL:
            return fill_extent(extents, self.place if self.flying else NULL, self.nbytes, self.index, False)
        if op.placed:
            count = fill_extent(extents, self.place, self.nbytes, self.index, False)
            if op.source != op.target:
                count += fill_extent(&extents[count], op.source, op.nbytes, self.index, True)
        elif self.view is None and not self.sparse:
            count = fill_extent(extents, op.source, op.nbytes, self.index, False)
        return count

    cdef inline bint lies_at(self, const View* view) noexcept:
        """Return whether a gradient lies where that of the last pass was reduced."""
        if self.op == NULL or self.view is not None:
            return self.place == view.data and self.nbytes == view.nbytes
        return self.op.source == view.data and self.op.nbytes == view.nbytes

    cdef int raise_error(self) except -1:
        """Mark a finished operation as no longer in flight, and raise what went wrong with it."""
        cdef Op* op = self.op
        self.flying = False
        if op.status == Status.MISMATCH or op.status == Status.FAILED_CALL:
            error = make_mismatch_error(self.engine.state, op, f"the gradient of '{self.label}'")
            free(op.text)
            op.text = NULL
            raise error
        if op.status != Status.OK and op.status != Status.ABSENT:
            raise_refusal(self.engine.state, op.status, self.label)
        return 0


cdef class GradientGroup:
    """The gradients that one optimizer reduces together."""
    cdef Engine engine
    cdef engine_meta scales         # reduction and factors; the rest is zero, but `shared` is -1
    cdef int wire                   # compression of float32 and float64, as in engine_meta
    cdef object binding             # the framework's functions for gradients: see Binding in gradients.pyi
    cdef list hooks                 # GradientHook of each parameter, by index
    cdef bint on_device             # a gradient is or was on a GPU
    cdef list used_by_device        # (ticket, gradient) of those that the GPU may still use
    cdef readonly int watched       # passes in which gradients are still checked for shared memory
    cdef bint moved                 # a gradient does not lie where it lay in the last pass
    cdef public bint fresh          # no parameter had a gradient before this pass, so autograd may give them shared memory
    cdef PyObject* last             # the hook that was called last; borrowed
    cdef public bint paused         # calls of hooks are ignored
    cdef public bint urgent         # do not wait for more passes
    cdef public int passes          # backward passes that are accumulated before a reduction
    cdef readonly bint touched      # such a pass has been accumulated since the last reduction
    cdef readonly bint active       # True from the first hook call of a pass, or `announce`, to the end of `finish`
    cdef int number                 # the optimizer's number, for the records of steps

    def __init__(self, Engine engine, binding, int op, double prescale=1.0, double postscale=1.0, wire=None, int number=0):
        expect_open(engine.state)
        if not 0 <= op <= ENGINE_ADASUM:
            raise ArgumentError(f"there is no reduction {op}")
        self.wire = wire_number(wire, op)
        expect_wire(self.wire, op, HOST)
        memset(&self.scales, 0, sizeof(engine_meta))
        self.engine, self.hooks, self.used_by_device, self.passes, self.watched = engine, [], [], 1, WATCHED_PASSES
        self.binding, self.number = binding, number
        self.scales.kind, self.scales.op = KIND_ALLREDUCE, <unsigned char>op
        self.scales.prescale, self.scales.postscale, self.scales.shared = prescale, postscale, -1

    def add(self, parameter, str name, view, bint deferred=False, bint placed=False):
        """Register a parameter; return the hook to give to the framework."""
        cdef GradientHook hook = GradientHook.__new__(GradientHook)
        cdef View memory
        cdef Py_ssize_t length
        cdef const char* text = PyUnicode_AsUTF8AndSize(name, &length)
        cdef uint32_t k
        expect_open(self.engine.state)
        if not 0 < length <= NAME_BYTES:
            raise ValueError(f"a name has 1 to {NAME_BYTES} bytes of UTF-8; '{name}' has {length}")
        view_anywhere(self.binding.memory_of(parameter), &memory)
        if memory.device != HOST:
            self.expect_device(name, view is not None)
            expect_wire(self.wire, self.scales.op, memory.device)
            device_of(self.engine.state, memory.device - 1)     # opened now, while there is memory for it
        expect_reducible(&memory, f"parameter '{name}'")
        if memory.dtype == ENGINE_BOOL and self.scales.op == ENGINE_AVERAGE:
            raise UnsupportedTensorError(f"parameter '{name}' is bool, which has no Average")
        hook.meta = self.scales
        hook.meta.dtype, hook.meta.layout = memory.dtype, <unsigned char>max(memory.layout, 0)
        hook.meta.device = memory.device != HOST
        hook.meta.ndim, hook.meta.wire, hook.nbytes = <uint32_t>memory.ndim, wire_of(self.wire, memory.dtype), memory.nbytes
        for k in range(hook.meta.ndim):
            hook.meta.dims[k] = memory.dims[k]
        hook.group, hook.engine, hook.found.parameter = self, self.engine, <PyObject*>parameter
        hook.label, hook.index, hook.view = name, len(self.hooks), view
        hook.placed = placed and memory.device != HOST and memory.nbytes > 0
        if deferred:
            self.hooks.append(hook)
            return hook
        if view is not None:
            view_of(view, &memory)
            hook.place = memory.data
            if may_share(&hook.meta):
                hook.meta.shared = arena_locate(&self.engine.state.arena, memory.data, memory.nbytes)
        hook.op = new_op()
        hook.op.optimizer = <uint32_t>self.number + 1
        hook.target.record = driver_pin(self.engine.state, text, <uint32_t>length)
        if hook.target.record == NULL:
            raise MemoryError("no memory for a name")
        self.hooks.append(hook)
        return hook

    cdef int expect_device(self, str name, bint shared) except -1:
        """Raise for what is unsupported with a gradient on a GPU; from now on the group waits for GPU work. `shared`: the
        parameter was in host memory, and the ranks share a view of its gradient there."""
        if shared:
            raise UnsupportedTensorError(
                f"parameter '{name}' is on a GPU, and was in the host's memory when its optimizer was wrapped with "
                "gradient_as_bucket_view: move the model before, or leave out gradient_as_bucket_view"
            )
        if self.scales.op == ENGINE_ADASUM:
            raise UnsupportedTensorError(f"parameter '{name}' is on a GPU, and Adasum takes tensors in the host's memory")
        self.on_device = True
        return 0

    cdef int follow_all(self) except -1:
        """Make the current stream wait until the device has reduced all gradients. Gradients that were submitted on another
        stream are not released."""
        cdef GradientHook hook, last = None
        cdef State* e = self.engine.state
        for hook in self.hooks:
            if hook.op != NULL and hook.op.ticket and hook.op.status == Status.OK and (
                    last is None or hook.op.ticket > last.op.ticket):
                last = hook
        if last is not None:
            make_stream_wait(e, last.op.ticket, last.op.stream_of, last.op, True)
            for hook in self.hooks:
                if hook.op != NULL and hook.op.ticket and hook.op.status == Status.OK:
                    hook.op.released = last.op.released and hook.op.stream == last.op.stream
        return 0

    cdef int hold_gradients(self) except -1:
        """Keep gradients alive that a GPU may still use, and drop those that it has passed."""
        cdef GradientHook hook
        cdef State* e = self.engine.state
        cdef uint64_t ticket
        if self.used_by_device:
            self.used_by_device = [(ticket, owner) for ticket, owner in self.used_by_device if not is_known_passed(e, ticket)]
        for hook in self.hooks:
            if hook.op != NULL and hook.op.ticket and not hook.op.released and hook.op.owner != NULL:
                result = <object>hook.op.result if hook.op.result != NULL else None
                self.used_by_device.append((hook.op.ticket, (<object>hook.op.owner, result)))
        return 0

    cdef int expect_untied(self, GradientHook hook, const View* view) except -1:
        """Raise if a gradient lies where another parameter's gradient is reduced, or may still be reduced in this backward
        pass."""
        cdef GradientHook other
        for other in self.hooks:
            if other is not hook and other.view is not None and not other.placed and (other.flying or not self.urgent) and (
                    view.data < other.place + other.nbytes and other.place < view.data + view.nbytes):
                raise EngineError(
                    f"the gradient of '{hook.label}' lies in that of '{other.label}', where autograd adds up both: give it "
                    "memory of its own before backward, as zero_grad() does with set_to_none=True, or tie them after backward"
                )
        return 0

    def may_overlap(self, list rest, list gradients):
        """Return whether gradients that this pass has not submitted may share memory with submitted ones, or with each other.
        Gradients that lie where they were reduced in the last pass were compared in that pass.

        `rest`: indices of their parameters.
        """
        cdef GradientHook hook
        cdef View view
        cdef Py_ssize_t k, count = 0
        cdef int first = 0, second = 0
        cdef bint moved = self.moved
        cdef bint found
        cdef Extent* extents = <Extent*>malloc((2 * <size_t>len(self.hooks) + <size_t>len(rest) + 1) * sizeof(Extent))
        if extents == NULL:
            raise MemoryError("no memory to compare gradients")
        try:
            for k in range(len(rest)):
                hook = self.hooks[rest[k]]
                try:
                    view_anywhere(gradients[k], &view)
                except UnsupportedTensorError:
                    return True     # the binding decides
                if view.layout < 0:
                    return True
                moved |= not hook.lies_at(&view)
                count += fill_extent(&extents[count], view.data, view.nbytes, hook.index, False)
            if not moved:
                return False
            for hook in self.hooks:
                if hook.flying:
                    count += hook.extents_of(&extents[count])
                    if hook.view is not None and not hook.placed:
                        count += fill_extent(&extents[count], hook.place, hook.nbytes, hook.index, False)
            found = find_overlap(extents, count, &first, &second)
            return found
        finally:
            free(extents)

    cdef int expect_apart(self) except -1:
        """Raise if private gradients of this pass share memory, one of which was reduced in place. From then on both are
        copied."""
        cdef GradientHook hook, other
        cdef Py_ssize_t count = 0
        cdef int first = 0, second = 0
        cdef bint found
        cdef Extent* extents
        if not self.moved:
            return 0
        self.moved = False
        extents = <Extent*>malloc((2 * <size_t>len(self.hooks) + 1) * sizeof(Extent))
        if extents == NULL:
            raise MemoryError("no memory to compare gradients")
        for hook in self.hooks:
            count += hook.extents_of(&extents[count])
        found = find_overlap(extents, count, &first, &second)
        free(extents)
        if found:
            hook, other = self.hooks[second], self.hooks[first]
            hook.apart = other.apart = True
            raise EngineError(
                f"the gradients of '{other.label}' and '{hook.label}' share memory, which they did not in the first passes, when "
                "the engine looked: this pass has reduced it twice. Repeat the step from zero_grad() on: from now on these two "
                "are copied first"
            )
        return 0

    def release(self):
        """Drop all hooks and the binding, so that nothing is reduced any more. The framework has dropped the hooks before."""
        self.hooks, self.binding, self.last = [], None, NULL

    def restart(self):
        """Forget the passes that were accumulated since the last reduction."""
        cdef GradientHook hook
        if self.touched:
            for hook in self.hooks:
                hook.passed = 0
        self.touched = False

    def missing(self):
        """Return the indices of the parameters whose gradient was not submitted in this pass."""
        cdef GradientHook hook
        return [hook.index for hook in self.hooks if not hook.flying]

    def mark_late(self, bint late):
        """Tell the other ranks that the next pass brings gradients that came after a backward pass; with `late` False, that it
        does not.

        The first gradient carries `late` as its root, which is 0 in every other allreduce. So this rank's pass fails beside
        another rank's next backward pass, instead of being added to it.
        """
        cdef GradientHook hook
        for hook in self.hooks:
            if hook.op != NULL:
                hook.meta.root, hook.usual = late, False
                break

    def announce(self):
        """Submit *absent* for each parameter without a gradient in this pass, without waiting; except for deferred gradients."""
        cdef GradientHook hook
        expect_open(self.engine.state)
        self.active = True
        for hook in self.hooks:
            if not hook.flying and hook.op != NULL:
                hook.bring_nothing()

    def finish(self):
        """Announce absent gradients, wait for all gradients, and mark the end of the step.

        Returns
        -------
        list of (int, memory)
            Index and result of each parameter whose result is not in its gradient. If only other ranks had a gradient: the tensor
            that holds the result, or (memory, dtype, number of the layout) with dtype and layout of those ranks. If the result
            has a place that the gradient was not in: the tensor there. If any rank had a sparse gradient: a list of two (memory,
            rows of each rank, bytes of a row), the gathered indices and values.
        """
        cdef Engine engine = self.engine
        cdef GradientHook hook
        cdef list found = []
        cdef list parts
        cdef object error = None
        self.announce()
        driver_wait_for_all(engine.state, True)
        try:
            for hook in self.hooks:
                if hook.op != NULL:
                    wait_for(engine.state, hook.op, False, 0)     # driver_wait_for_all has told the coordinator to close batches
        finally:
            driver_wait_for_all(engine.state, False)
        self.restart()
        try:
            if self.on_device:
                self.follow_all()
            self.expect_apart()
        except EngineError as cause:
            error = cause
        if self.on_device:
            self.hold_gradients()
        self.watched -= self.watched > 0 and self.fresh
        self.fresh = False
        self.active = False         # not when a signal ended the wait: then the next call finishes
        for hook in self.hooks:
            if hook.op == NULL:
                hook.flying = False
                continue
            try:
                hook.raise_error()
            except Exception as cause:          # every hook is reset; the first error is raised
                error = error or cause
            # Only these may be sparse. The fields that would tell lie in cache lines that nothing else here touches.
            parts = hook.take_parts() if hook.sparse or hook.op.source == NULL else None
            if parts is not None:
                found.append((hook.index, parts))
            elif hook.op.source == NULL and hook.nbytes and hook.op.status == Status.OK:
                found.append((hook.index, hook.room if hook.meta.device else
                              hook.view if hook.op.memory == NULL else hook.take_result()))
            elif hook.placed and hook.op.placed and hook.op.source != hook.op.target and hook.op.status == Status.OK:
                found.append((hook.index, hook.view))
            if self.on_device:
                hook.room = None
            keep_alive(hook.op, hook.view if hook.placed else None)     # a reference that the collector does not see
        if error is not None:
            raise error
        mark_step(engine.state, self.number, True)
        return found
