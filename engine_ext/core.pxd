from libc.stdint cimport int64_t, uint64_t

from engine_ext.bindings.memory cimport Memory
from engine_ext.bindings.view cimport View
from engine_ext.control.driver cimport Name
from engine_ext.control.state cimport State
from engine_ext.control.table cimport Op, Record
from engine_ext.shared.counters cimport counters_page

cdef class Engine

cdef class Handle:
    cdef Op* op
    cdef Engine engine
    cdef readonly str name
    cdef readonly object output
    cdef object memory
    cdef tuple rows
    cdef list parts                 # of an allgather of a group
    cdef int waiting                # threads in wait()

    cdef int conclude(self, Op* op) except -1

cdef class Engine:
    cdef State* state
    cdef readonly int rank          # among the engine's ranks
    cdef readonly int size
    cdef readonly int number        # this rank in the world
    cdef readonly tuple numbers     # all of the engine's ranks in the world
    cdef readonly Engine world      # of a process set; None: this is the world's
    cdef dict settings
    cdef counters_page* page        # mapped; of the world, else NULL
    cdef int control                # the world's memory file
    cdef uint64_t end               # of what lies in it
    cdef uint64_t formed            # process sets so far
    cdef uint64_t offset            # where its segment lies there
    cdef uint64_t[6] unnamed        # operations without a name so far, by each of KINDS
    cdef unsigned long thread       # that has used this engine
    cdef bint several               # others have, too
    cdef uint64_t regions
    cdef list shared                # this rank's parts of the arena
    cdef bint warned                # that others do not join
    cdef bint closed

    cdef int open(self, int rank, tuple numbers, Engine world, uint64_t offset) except -1
    cdef void watch_time(self) noexcept
    cdef int count_into(self, int page) except -1
    cdef int check(self) except -1
    cdef int between_ticks(self, Op* op) except -1
    cdef void count_blocked(self, int one) noexcept
    cdef int finish(self, Op* op, bint urgent) except -1
    cdef int refuse(self, int status, str name) except -1
    cdef void bury(self) noexcept
    cdef object world_error(self)
    cdef Handle start(self, Op* op, object name, bint blocking, object owner, object output)
    cdef int bring(self, const Name* name, Handle handle, bint blocking, bint unnamed) except -1
    cdef Handle reduce_group(self, int kind, list tensors, list outputs, object name, int op, double prescale, double postscale,
                             bint blocking, object wire)
    cdef uint64_t row_bytes(self, const View* view) noexcept
    cdef int expect_joins(self, uint64_t begun) except -1
    cdef void leave_world(self) noexcept
    cdef int make_room(self, const Name* name, int status) except -1
    cdef int expect_heard(self, const Record* record, uint64_t begun) except -1
    cdef int bring_failure(self, int kind, object name, str text, bint waits) except -1
    cdef void count_unnamed(self, int kind, uint64_t count) noexcept
    cdef void note_thread(self) noexcept
    cdef int catch_up(self, const int64_t* counts) except -1
    cdef int skip(self, int kind, uint64_t count, str why, bint waits) except -1
    cdef int release(self, int rank, Op* op) except -1
    cdef int release_stuck(self, Op* op) except -1
    cdef bint withholds(self, int rank, Op* op) noexcept
    cdef str name_of(self, Op* op)

cdef object disagreement(int status, str what, str text)
cdef Op* new_op() except NULL
cdef void free_op(Op* op) noexcept
cdef Memory take_memory(Op* op)
