"""Handle: one submitted operation, as Python holds it."""
cimport cython

from engine_ext.bindings.failed_calls cimport catch_up, release
from engine_ext.bindings.groups cimport group_parts
from engine_ext.bindings.memory cimport Memory, take_memory
from engine_ext.bindings.devices cimport follow, has_passed
from engine_ext.bindings.ownership cimport abandon, let_go
from engine_ext.bindings.refusals cimport disagreement, refuse
from engine_ext.bindings.rooms cimport parts_in_rooms
from engine_ext.bindings.submit cimport submit
from engine_ext.bindings.waiting cimport wait_for
from engine_ext.operations.kinds cimport operation_of
from engine_ext.operations.op cimport OP_DONE
from engine_ext.operations.operation cimport SAYS_ALIGNED
from engine_ext.platform.atomics cimport load32_acquire
from engine_ext.shared.layout cimport Status

from engine_ext.errors import EngineError


@cython.no_gc_clear                  # __dealloc__ needs the engine
cdef class Handle:
    """One submitted operation."""

    def __dealloc__(self):
        if self.op != NULL:
            abandon(self.state, self.op)
            self.op = NULL

    @property
    def done(self):
        if self.op == NULL:
            return self.ticket == 0 or has_passed(self.state, self.ticket)
        return load32_acquire(&self.op.flags) & OP_DONE != 0 and (
            self.op.status != Status.OK or has_passed(self.state, self.op.ticket))

    @property
    def gathered(self):
        if self.memory is None:
            raise EngineError(f"'{self.name}' has nothing gathered: call wait() first")
        return memoryview(self.memory) if isinstance(self.memory, Memory) else self.memory, self.rows

    @property
    def gathered_group(self):
        if self.parts is None:
            raise EngineError(f"'{self.name}' has no group gathered: call wait() first")
        return self.parts

    def wait(self):
        """Drive the engine until the operation is done; raise what went wrong with it."""
        cdef Op* op = self.op
        if op == NULL:
            follow(self.state, self.ticket, self.stream_of, NULL, False)
            return
        self.waiting += 1           # threads in here: the last one to leave with success lets go of the operation
        try:
            wait_for(self.state, op, True)
            self.conclude(op)
        finally:
            self.waiting -= 1
        if self.waiting == 0:
            self.op = NULL
            let_go(self.state, op)

    cdef int conclude(self, Op* op) except -1:
        """The operation is done: take its result, or raise what went wrong."""
        cdef State* e = self.state
        if op.status == Status.MISMATCH or op.status == Status.FAILED_CALL:
            if op.status == Status.FAILED_CALL and op.meta.root > 0:
                release(e, op.meta.root - 1, op)
            raise disagreement(op, f"'{self.name}'")
        if op.status != Status.OK:
            refuse(e, op.status, self.name)
        if op.ticket:
            self.ticket, self.stream_of = op.ticket, op.stream_of
            follow(e, op.ticket, op.stream_of, op, False)
        if op.result != NULL:
            self.take_from_room(op)
        elif op.memory != NULL and op.meta.group:
            self.parts = self.parts or group_parts(op.memory, op.row_counts, e.segment.size, op.meta.group)
        elif op.memory != NULL:
            self.rows = tuple([op.row_counts[r] for r in range(e.segment.size)])
            self.memory = take_memory(op)
        elif op.rows and operation_of(&op.meta).says == SAYS_ALIGNED:       # others, of the engine's own, agree on a size there
            catch_up(e, op.meta.dims)
        return 0

    cdef int take_from_room(self, Op* op) except -1:
        """The result is in tensors of the framework's, which the operation keeps as long as the device may write to them."""
        cdef State* e = self.state
        if op.meta.group:
            self.parts = parts_in_rooms(op, e.segment.size, <int>op.meta.group)
        else:
            self.rows = tuple([op.row_counts[r] for r in range(e.segment.size)])
            self.memory = (<list>op.result)[0]
        return 0


cdef Handle begin(object engine, State* e, Op* op, object name, bint blocking, object output):
    """Bring an operation under `name`, or the next of the unnamed. With `blocking`, wait up to a tick for it."""
    cdef Handle handle = Handle.__new__(Handle)
    handle.engine, handle.state, handle.output, handle.op = engine, e, output, op
    handle.name = submit(e, op, name, blocking)
    return handle
