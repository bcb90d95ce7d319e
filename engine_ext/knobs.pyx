"""The knobs as Python gives and gets them: a dict by name. `engine_knobs` (layout.h) has a member of each name.

`engine.config` refuses what is out of range here, in words for the user; a test compares the two.
"""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.control.state cimport State
from engine_ext.platform.atomics cimport store32_release
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.shared.layout cimport (
    BETWEEN_MPI, BETWEEN_NAMES, BETWEENS, COORDINATOR, MAX_SOCKETS, SLOT_BYTES, STORES, STORES_NAMES, WIRES, WIRE_NAMES,
    engine_knobs,
)

from engine_ext.errors import EngineError

# Of each knob the smallest and the largest value, or its words by number.
KNOBS = {
    "fusion_threshold": (0, 1 << 60),
    "cycle_time_ms": (0.0, 10_000.0),
    "stores": tuple([STORES_NAMES[number].decode() for number in range(STORES)]),
    "chunk_bytes": (4096, SLOT_BYTES),
    "between_hosts": tuple([BETWEEN_NAMES[number].decode() for number in range(BETWEENS)]),
    "compression": tuple([WIRE_NAMES[number].decode() for number in range(WIRES)]),
    "sockets_per_lane": (1, MAX_SOCKETS),
}


cdef str numbers_of(tuple allowed):
    """What a knob with these limits is, for an error."""
    kind = "a whole number" if isinstance(allowed[0], int) else "a number"
    return f"{kind} from {allowed[0]} to {allowed[1]}"


cdef engine_knobs knobs_with(engine_knobs knobs, dict changes) except *:
    """`knobs`, changed as Python says. Raises ValueError or TypeError for what cannot be."""
    cdef dict values = knobs
    for name, value in changes.items():
        if name not in KNOBS:
            raise TypeError(f"there is no knob {name!r}; there are: {', '.join(KNOBS)}")
        allowed = KNOBS[name]
        if isinstance(allowed[0], str):
            if value not in allowed:
                raise ValueError(f"{name} is one of {', '.join(allowed)}, not {value!r}")
            values[name] = allowed.index(value)
        else:
            if isinstance(value, bool) or not isinstance(value, int if isinstance(allowed[0], int) else (int, float)):
                raise TypeError(f"{name} is {numbers_of(allowed)}, not a {type(value).__name__}")
            if not allowed[0] <= value <= allowed[1]:       # nor does NaN lie there
                raise ValueError(f"{name} is {numbers_of(allowed)}, not {value!r}")
            values[name] = type(allowed[0])(value)
    return values


cdef int expect_summing(const State* e, const engine_knobs* knobs) except -1:
    """Raise EngineError if MPI is to sum what the world's ranks have no MPI for."""
    if (knobs.between_hosts == BETWEEN_MPI and e.segment.world == &e.segment and e.segment.hosts > 1
            and not e.segment.crews.summing):
        raise EngineError("between_hosts=mpi has MPI sum, and lanes are not over MPI: set lanes=mpi (ENGINE_LANES=mpi) on all "
                          "ranks, too, or another value of between_hosts")
    return 0


cdef uint32_t set_knobs(State* e, dict changes) except? 0:
    """Have the coordinator use these from the next step on; the version that they are."""
    cdef engine_knobs before, chosen
    cdef bint current = False
    if e.segment.rank != COORDINATOR:
        raise EngineError(f"knobs are set on the coordinator, rank 0; this is rank {e.segment.rank}")
    while not current:
        pthread_mutex_lock(&e.lock)
        before = e.wanted
        pthread_mutex_unlock(&e.lock)
        chosen = knobs_with(before, changes)    # without the lock: it runs Python, and may raise
        expect_summing(e, &chosen)
        chosen.version = before.version + 1
        pthread_mutex_lock(&e.lock)
        current = e.wanted.version == before.version    # else another thread has set knobs meanwhile, which stay set
        if current:
            e.wanted = chosen
            store32_release(&e.wanted_new, 1)
        pthread_mutex_unlock(&e.lock)
    return chosen.version


cdef dict knobs_of(State* e):
    """The knobs on the last entry that this rank has executed, their version, and the entry with which it came into force."""
    cdef engine_knobs seen
    cdef uint64_t entry
    cdef dict values
    pthread_mutex_lock(&e.lock)
    seen, entry = e.knobs, e.knobs_entry
    pthread_mutex_unlock(&e.lock)
    values = seen
    told = {"version": seen.version, "entry": entry}
    for name, allowed in KNOBS.items():
        told[name] = allowed[values[name]] if isinstance(allowed[0], str) else values[name]
    return told
