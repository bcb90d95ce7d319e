"""Prepared calls: an operation, its name and the description of its tensor are made once and used in every call.

A call then costs a view of the tensor, whose memory may have moved, and the operation itself.
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
    cdef Op* op                     # it keeps the tensor only while submitted; NULL after a failed call: the next makes one
    cdef Target target              # its record is pinned
    cdef View first                 # of the tensor, when it was prepared
    cdef bint inside                # whether a thread is in a call
    cdef int reduction              # ENGINE_SUM ..
    cdef double prescale, postscale
    cdef readonly object tensor
    cdef readonly str name

    def __init__(self, Engine engine not None, tensor, target, str name not None, int op, double prescale, double postscale):
        cdef View given
        cdef uint32_t length = 0
        cdef const char* text
        if self.engine is not None:
            raise EngineError("an allreduce is prepared once")
        expect_open(engine.state)
        self.engine, self.state, self.tensor, self.name = engine, engine.state, tensor, name
        self.reduction, self.prescale, self.postscale = op, prescale, postscale
        view_anywhere(target, &given)
        view_anywhere(tensor, &self.first)
        expect_dense(tensor, &self.first, "the tensor")
        if self.first.device != HOST or self.first.data != given.data or self.first.readonly:
            raise UnsupportedTensorError(
                "an allreduce is prepared for a tensor in the host's memory that is writable and used as it lies there; use "
                "allreduce_() for others"
            )
        self.make_op()
        text = expect_name(name, &length)
        self.target.record = driver_pin(self.state, text, length)
        if self.target.record == NULL:
            raise MemoryError("no memory for a name")

    def __dealloc__(self):
        if self.op != NULL:
            abandon_op(self.state, self.op)
        if self.target.record != NULL and self.state.alive[0] == 1:
            driver_unpin(self.state, self.target.record)

    cdef int make_op(self) except -1:
        """Make the operation, marked as done while it is not submitted."""
        self.op = allreduce_op(self.state, self.tensor, self.tensor, self.reduction, self.prescale, self.postscale, None)
        self.op.flags = OP_DONE         # while it is not submitted
        keep_alive(self.op, None)       # a reference that the garbage collector does not see would keep cycles alive forever
        return 0

    def __call__(self):
        cdef State* e = self.state
        if e == NULL:
            raise EngineError("this allreduce was not prepared: use prepare_allreduce()")
        expect_open(e)
        if self.inside:
            raise EngineError(f"'{self.name}' is under way already, in another thread or below a signal handler: prepare an "
                              "allreduce for each")
        self.inside = True
        try:
            try:
                self.look_at_tensor()
            except Exception as error:
                fail_call(e, "allreduce", self.name, f"{type(error).__name__}: {error}")
                raise
            driver_note_thread(e)
            submit_when_room(e, &self.target, self.op, True, self.name)
            if not load32_acquire(&self.op.flags) & OP_DONE or self.op.status != Status.OK:
                self.finish()
        finally:
            self.inside = False
            if self.op != NULL:
                keep_alive(self.op, None)
        return self.tensor

    cdef int look_at_tensor(self) except -1:
        """Find the tensor's memory, which may have moved since the last call; raise ArgumentError if its shape, dtype or layout
        changed."""
        cdef View view
        cdef object keeper = view_anywhere(self.tensor, &view)
        if (view.dtype != self.first.dtype or view.layout != self.first.layout or view.ndim != self.first.ndim
                or view.device != HOST or view.readonly
                or memcmp(view.dims, self.first.dims, <size_t>view.ndim * sizeof(int64_t)) != 0):
            raise ArgumentError(f"the tensor of '{self.name}' has another shape, dtype, layout or place than when the allreduce "
                                "was prepared: prepare it anew")
        if self.op == NULL:
            self.make_op()
        keep_alive(self.op, self.tensor if keeper is None else (self.tensor, keeper))
        if view.data != self.op.source:
            self.op.source = self.op.target = view.data
            if may_share(&self.op.meta):
                self.op.meta.shared = arena_locate(&self.state.arena, view.data, view.nbytes)
            self.op.agreed = 0
        return 0

    cdef int finish(self) except -1:
        """Wait for the operation and raise what went wrong with it. After an error the operation is not used again."""
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
