"""Where steps end: as the program says it, or as the tuner guesses it from the traffic."""
from libc.stdint cimport uint32_t

from engine_ext.bindings.arguments cimport expect_name
from engine_ext.bindings.refusals cimport expect_open
from engine_ext.control.driver cimport driver_pin, driver_unpin
from engine_ext.control.completion cimport end_step
from engine_ext.control.step_marks cimport marks_open
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Record
from engine_ext.platform.atomics cimport store32_release
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock


cdef int mark_step(State* e, int number) except -1:
    """A step of optimizer `number` has ended."""
    expect_open(e)
    end_step(e, number)
    return 0


cdef int record_steps(State* e) except -1:
    """Remember the ends of steps from now on."""
    cdef int status
    pthread_mutex_lock(&e.lock)
    status = marks_open(&e.marks)
    pthread_mutex_unlock(&e.lock)
    if status < 0:
        raise MemoryError("no memory for the times of steps")
    return 0


cdef int mark_traffic(State* e, str name, uint32_t every, uint32_t window) except -1:
    """Take every so many-th end of the tensor `name` for the end of a step, or every `window` tensors; neither: nothing."""
    cdef Record* anchor = NULL
    cdef Record* before
    cdef const char* text
    cdef uint32_t length = 0
    expect_open(e)
    if name is not None:
        text = expect_name(name, &length)
        anchor = driver_pin(e, text, length)
        if anchor == NULL:
            raise MemoryError("no memory for a name")
    pthread_mutex_lock(&e.lock)
    before, e.marks.anchor = e.marks.anchor, anchor
    e.marks.every, e.marks.window, e.marks.passed = every, window, 0
    pthread_mutex_unlock(&e.lock)
    store32_release(&e.marks.timed, window != 0)
    if before != NULL:
        driver_unpin(e, before)
    return 0
