"""Reports of a program to its observers: fields of the page of counters, and the ends of its steps."""
from libc.errno cimport EPROTO
from libc.stdint cimport uint64_t

from engine_ext.bindings.collectives cimport expect_name
from engine_ext.bindings.refusals cimport expect_open
from engine_ext.control.completion cimport end_step
from engine_ext.control.driver cimport driver_pin, driver_unpin
from engine_ext.control.observers cimport observe_marked_step
from engine_ext.control.step_clock cimport step_clock_collection, step_clock_input
from engine_ext.control.trace cimport open_step_marks
from engine_ext.operations.op cimport Record
from engine_ext.platform.atomics cimport store32_release
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.shared.counters cimport counters_map, counters_put, counters_write

from engine_ext.errors import IncompatibleRanksError


cdef counters_page* map_page(int fd) except NULL:
    """Map the page of counters in the file `fd`, which the caller keeps."""
    cdef counters_page* page = NULL
    cdef int status = counters_map(fd, &page)
    if status == -EPROTO:
        raise IncompatibleRanksError("the page of counters is of another layout than this build's")
    if status < 0:
        raise OSError(-status, "cannot map the page of counters")
    return page


cdef int set_fields(counters_page* page, dict fields) except -1:
    """Set fields of the page by name: one-word fields to a number, longer ones to a text. Without a page do nothing."""
    cdef bytes name, text
    cdef int status
    if page == NULL:
        return 0
    for word, value in fields.items():
        name = word.encode()
        if isinstance(value, str):
            text = value.encode(errors="replace")
            status = counters_write(page, name, text, <uint64_t>len(text))
        else:
            status = counters_put(page, name, <uint64_t>value)
        if status < 0:
            raise ValueError(f"{word} is no field of {'several words' if isinstance(value, str) else 'one word'} on the page "
                             "of counters")
    return 0


# ---- ends of steps ----------------------------------------------------------------------------------------------------------

# Ends of steps: marked by the program, or guessed by the tuner from the traffic.

cdef int mark_step(State* e, int number, bint judged) except -1:
    """Record that a step of optimizer `number` has ended. `judged`: the calling thread is the program's."""
    if number < 0:
        raise ValueError(f"an optimizer's number is 0 or more, not {number}")
    expect_open(e)
    end_step(e, number)
    if judged:
        observe_marked_step(e, number)
    return 0


cdef void note_input(State* e, bint begins) noexcept:
    """Note that the calling thread begins or ends to get a batch. Does nothing in a forked child, and where nothing is
    counted."""
    if e.alive != NULL and e.alive[0] == 1 and e.world.step_clock != NULL:
        step_clock_input(e.world.step_clock, begins)


cdef void note_collection(State* e, bint begins) noexcept:
    """Note that the calling thread begins or ends to collect garbage, like note_input."""
    if e.alive != NULL and e.alive[0] == 1 and e.world.step_clock != NULL:
        step_clock_collection(e.world.step_clock, begins)


cdef int record_steps(State* e) except -1:
    """Record the ends of steps from now on."""
    cdef int status
    pthread_mutex_lock(&e.lock)
    status = open_step_marks(&e.marks)
    pthread_mutex_unlock(&e.lock)
    if status < 0:
        raise MemoryError("no memory for the times of steps")
    return 0


cdef int mark_traffic(State* e, str name, uint32_t every, uint32_t window) except -1:
    """Guess the ends of steps from the traffic: at every `every`-th completion of the tensor `name`, or after every `window`
    tensors. With no name and window 0, stop guessing."""
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
