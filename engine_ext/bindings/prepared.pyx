"""Prepared calls: an operation, its name and what is known of its tensor are made once and used in every call.

A call costs a view of the tensor, whose memory may have moved, and the operation itself.
"""
cimport cython
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcmp

from engine_ext.bindings.collectives cimport allreduce_op, expect_name, may_share
from engine_ext.bindings.handles cimport wait_for
from engine_ext.bindings.memory cimport abandon_op, keep_alive
from engine_ext.bindings.refusals cimport expect_open, make_mismatch_error, raise_refusal
from engine_ext.bindings.submit cimport fail_call, submit_when_room
from engine_ext.bindings.view cimport HOST, View, expect_dense, view_anywhere
from engine_ext.control.driver cimport Target, driver_note_thread, driver_pin, driver_unpin
from engine_ext.control.state cimport State
from engine_ext.core cimport Engine
from engine_ext.operations.op cimport OP_DONE, Op
from engine_ext.platform.atomics cimport load32_acquire
from engine_ext.shared.layout cimport Status
from engine_ext.transport.arena cimport arena_locate

from engine_ext.errors import ArgumentError, EngineError, UnsupportedTensorError


@cython.no_gc_clear                  # __dealloc__ needs the engine
cdef class PreparedAllreduce:
    """A blocking allreduce of one tensor in place."""
    cdef Engine engine
    cdef State* state
    cdef Op* op                     # NULL between a call that failed and the next
    cdef Target target              # pinned
    cdef object keeper              # what keeps the tensor's memory in place, if that is not the tensor
    cdef bint inside                # whether a thread is in a call
    cdef int reduction
    cdef double prescale, postscale
    cdef readonly object tensor
    cdef readonly str name

    def __init__(self, Engine engine not None, tensor, target, name, int op, double prescale, double postscale):
        cdef View view, given
        cdef uint32_t length = 0
        cdef const char* text
        if self.engine is not None:
            raise EngineError("an allreduce is prepared once")
        expect_open(engine.state)
        self.engine, self.state, self.tensor = engine, engine.state, tensor
        self.reduction, self.prescale, self.postscale = op, prescale, postscale
        engine.prepared += 1
        self.name = f"allreduce.prepared.{engine.prepared}" if name is None else name
        view_anywhere(target, &given)
        self.keeper = view_anywhere(tensor, &view)
        expect_dense(tensor, &view, "the tensor")
        if view.device != HOST or view.data != given.data or view.readonly:
            raise UnsupportedTensorError(
                "an allreduce is prepared for a tensor in the host's memory that is writable and used as it lies there; use "
                "allreduce_() for others"
            )
        self.make_op()
        text = expect_name(self.name, &length)
        self.target.record = driver_pin(self.state, text, length)
        if self.target.record == NULL:
            raise MemoryError("no memory for a name")

    def __dealloc__(self):
        if self.op != NULL:
            abandon_op(self.state, self.op)
        if self.target.record != NULL and self.state.alive[0] == 1:
            driver_unpin(self.state, self.target.record)

    cdef int make_op(self) except -1:
        self.op = allreduce_op(self.state, self.tensor, self.tensor, self.reduction, self.prescale, self.postscale, None)
        self.op.flags = OP_DONE         # as long as it is not submitted
        return 0

    def __call__(self):
        cdef State* e = self.state
        if e == NULL:
            raise EngineError("this allreduce was not prepared: use prepare_allreduce()")
        expect_open(e)
        if self.inside:
            raise EngineError(f"'{self.name}' is called by another thread: prepare an allreduce for each thread")
        self.inside = True
        try:
            try:
                self.look_at_tensor()
            except (ArgumentError, UnsupportedTensorError) as error:
                fail_call(e, "allreduce", self.name, f"{type(error).__name__}: {error}")
                raise
            driver_note_thread(e)
            submit_when_room(e, &self.target, self.op, True, self.name)
            if not load32_acquire(&self.op.flags) & OP_DONE or self.op.status != Status.OK:
                self.finish()
        finally:
            self.inside = False
        return self.tensor

    cdef int look_at_tensor(self) except -1:
        """Find the tensor's memory, which may have moved since the last call; refuse another shape, dtype or layout."""
        cdef View view
        cdef Op* op
        if self.op == NULL:
            self.make_op()
        op = self.op
        self.keeper = view_anywhere(self.tensor, &view)
        if (view.dtype != op.meta.dtype or view.layout != <signed char>op.meta.layout or <uint32_t>view.ndim != op.meta.ndim
                or view.device != HOST or view.readonly
                or memcmp(view.dims, op.meta.dims, <size_t>view.ndim * sizeof(int64_t)) != 0):
            raise ArgumentError(f"the tensor of '{self.name}' has another shape, dtype or layout than when the allreduce was "
                                "prepared: prepare it anew")
        if view.data != op.source:
            op.source = op.target = view.data
            if self.keeper is not None:
                keep_alive(op, (self.tensor, self.keeper))
            op.meta.shared = arena_locate(&self.state.arena, view.data, view.nbytes) if may_share(&op.meta) else -1
            op.agreed = 0
        return 0

    cdef int finish(self) except -1:
        """Wait for an operation that is not done, and raise what went wrong with it. It is not used again where that raises."""
        cdef Op* op = self.op
        try:
            wait_for(self.state, op, True, 0)
            if op.status == Status.MISMATCH or op.status == Status.FAILED_CALL:
                raise make_mismatch_error(self.state, op, f"'{self.name}'")
            if op.status != Status.OK:
                raise_refusal(self.state, op.status, self.name)
        except BaseException:
            self.op = NULL
            abandon_op(self.state, op)
            raise
        return 0
