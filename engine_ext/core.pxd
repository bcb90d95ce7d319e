from libc.stdint cimport uint64_t

from engine_ext.bindings.handles cimport Handle
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op
from engine_ext.shared.counters cimport counters_page
from engine_ext.transport.transport cimport Transport

cdef class Engine:
    cdef State* state
    cdef readonly int rank          # among the engine's ranks
    cdef readonly int size          # number of the engine's ranks
    cdef readonly int number        # number of this rank in the world
    cdef readonly tuple numbers     # numbers of all of the engine's ranks in the world
    cdef readonly Engine world      # the world's engine, for a process set; None: this is the world's
    cdef dict settings              # constructor arguments; a process set's begin as the world's
    cdef counters_page* page        # the mapped page of counters, in the world's engine; NULL: none
    cdef int control                # descriptor of the world's memory file, in the world's engine; else -1
    cdef uint64_t formed            # process sets that the world has formed together
    cdef uint64_t offset            # where this engine's segment begins in the world's file
    cdef uint64_t regions           # regions of the arena
    cdef uint64_t prepared          # prepared allreduces without a name
    cdef list shared                # this rank's parts of the arena's regions
    cdef object opening             # function that opens a GPU by its number; None: none can be opened
    cdef object cuda_thread         # CUDA thread of the open GPU, kept as long as the engine; or None
    cdef list group_names           # all its names, the last of which counts: native code may still read an earlier one
    cdef bint stays_mapped          # a carrier may still write to the segment, so it stays mapped

    cdef object carried             # (channels of the carrier, whether it can sum); None: there is none

    cdef int open(self, int rank, tuple numbers, Engine world, uint64_t offset, int calls) except -1
    cdef int apply_settings(self, Engine world) except -1
    cdef int map_segment(self, Engine world) except -1
    cdef int enter_segment(self, Engine world) except -1
    cdef Transport* open_transport(self, list failures) except? NULL
    cdef int open_tables(self, Transport* transport) except -1
    cdef int start_threads(self) except -1
    cdef int connect(self) except -1
    cdef int use_carrier(self) except -1
    cdef void hold_carrier(self, bint over)
    cdef Handle start(self, Op* op, object name, bint blocking, object output)
    cdef int expect_world(self) except -1
    cdef int agree_on_size(self, str name, uint64_t size) except -1
