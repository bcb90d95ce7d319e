from libc.stdint cimport uint64_t

from engine_ext.bindings.handles cimport Handle
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op
from engine_ext.shared.counters cimport counters_page

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
    cdef uint64_t formed            # process sets that the world has formed together
    cdef uint64_t offset            # where its segment lies there
    cdef uint64_t regions
    cdef uint64_t prepared          # allreduces that were prepared without a name
    cdef list shared                # this rank's parts of the arena
    cdef object opening             # opens a GPU by its number; None: none can be opened
    cdef object lane                # of the open GPU, which stays as long as the engine; or None
    cdef list group_names           # all that it was called, of which the last counts: native code may read an earlier one
    cdef bint held                  # a carrier may still write to the segment, which stays mapped

    cdef int connect(self) except -1
    cdef object carried             # channels of the carrier, and whether it can sum; None: there is none
    cdef int use_carrier(self) except -1
    cdef void hold_carrier(self, bint over)
    cdef int open(self, int rank, tuple numbers, Engine world, uint64_t offset, int calls) except -1
    cdef Handle start(self, Op* op, object name, bint blocking, object output)
    cdef int expect_world(self) except -1
    cdef int agree_on_size(self, str name, uint64_t size) except -1
