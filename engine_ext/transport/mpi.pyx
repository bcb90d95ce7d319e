"""MPI as a carrier (carrier.h). It moves bytes unchanged, so results have the same bits as over any other lane. If the user
chooses so, it also sums over all ranks, in an order of its own.

MPI allows calls from any thread, but from one at a time. A process has one MPI, so all calls are made under one lock. Each
channel has its own tag.
"""
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock
from engine_ext.transport.carrier cimport (
    ENGINE_CARRIER_BUSY, ENGINE_CARRIER_CAPSULE, ENGINE_CARRIER_DONE, ENGINE_CARRIER_FAILED, ENGINE_CARRIER_MESSAGES,
    ENGINE_CARRIER_VERSION, engine_carrier, engine_carrier_provider,
)

cdef extern from *:
    """
    static pthread_mutex_t mpi_lock = PTHREAD_MUTEX_INITIALIZER;
    """
    pthread_mutex_t mpi_lock

cdef enum:
    LEAST_BYTES = 16 << 10      # shorter messages take less time over a connection
    CHANNELS = 256              # for the world and its process sets; a world has as many tags

cdef struct Requests:           # a ring of requests, under the lock
    engine_mpi_request[ENGINE_CARRIER_MESSAGES] list
    uint64_t head               # number of the oldest request, since the start
    uint64_t tail               # number after the newest request

cdef struct Peer:               # requests from and to one rank
    Requests sends
    Requests receives

cdef struct MpiCarrier:
    engine_carrier functions    # first: a pointer to the one is a pointer to the other
    engine_mpi library
    int tag
    int size                    # of the world
    Peer* peers                 # calloc'ed, by rank in the world: memory is touched only for ranks with messages
    char* room                  # calloc'ed memory for sums, which are made in place
    uint64_t room_bytes
    engine_mpi_request summing  # the request of the sum in flight; under the lock
    bint sums                   # whether a sum is in flight

cdef struct MpiProvider:
    engine_carrier_provider functions   # first
    engine_mpi library
    int tag                     # of channel 0
    int size                    # of the world


# ---- messages ----------------------------------------------------------------------------------------------------------------

cdef int send(engine_carrier* functions, int rank, const void* source, uint32_t nbytes) noexcept nogil:
    cdef MpiCarrier* carrier = <MpiCarrier*>functions
    cdef Requests* sends = &carrier.peers[rank].sends
    cdef bint begun
    pthread_mutex_lock(&mpi_lock)
    begun = engine_mpi_send(&carrier.library, source, <int>nbytes, rank, carrier.tag,
                            &sends.list[sends.tail % ENGINE_CARRIER_MESSAGES]) == 0
    sends.tail += begun
    pthread_mutex_unlock(&mpi_lock)
    return ENGINE_CARRIER_DONE if begun else ENGINE_CARRIER_BUSY


cdef int receive(engine_carrier* functions, int rank, void* target, uint32_t nbytes) noexcept nogil:
    cdef MpiCarrier* carrier = <MpiCarrier*>functions
    cdef Requests* receives = &carrier.peers[rank].receives
    cdef bint begun
    pthread_mutex_lock(&mpi_lock)
    begun = engine_mpi_receive(&carrier.library, target, <int>nbytes, rank, carrier.tag,
                               &receives.list[receives.tail % ENGINE_CARRIER_MESSAGES]) == 0
    receives.tail += begun
    pthread_mutex_unlock(&mpi_lock)
    return ENGINE_CARRIER_DONE if begun else ENGINE_CARRIER_FAILED


cdef int complete_requests(const engine_mpi* library, Requests* requests, uint64_t* count) noexcept nogil:
    """Remove the oldest requests that are done, and add their number to `count`. Returns DONE or FAILED."""
    cdef int done
    while requests.head != requests.tail:
        done = engine_mpi_test(library, &requests.list[requests.head % ENGINE_CARRIER_MESSAGES])
        if done <= 0:
            return ENGINE_CARRIER_DONE if done == 0 else ENGINE_CARRIER_FAILED
        requests.head += 1
        count[0] += 1
    return ENGINE_CARRIER_DONE


cdef int progress(engine_carrier* functions, int rank, uint64_t* sent, uint64_t* arrived) noexcept nogil:
    cdef MpiCarrier* carrier = <MpiCarrier*>functions
    cdef Peer* peer = &carrier.peers[rank]
    cdef int sends, receives
    pthread_mutex_lock(&mpi_lock)
    sends = complete_requests(&carrier.library, &peer.sends, sent)
    receives = complete_requests(&carrier.library, &peer.receives, arrived)
    pthread_mutex_unlock(&mpi_lock)
    return min(sends, receives)


# ---- sums over all ranks -----------------------------------------------------------------------------------------------------

cdef void* sum_memory(engine_carrier* functions, uint64_t nbytes) noexcept nogil:
    """Return memory that is kept from sum to sum. It is zeroed, since gaps between tensors are summed, too."""
    cdef MpiCarrier* carrier = <MpiCarrier*>functions
    if nbytes > carrier.room_bytes:
        free(carrier.room)
        carrier.room = <char*>calloc(1, nbytes)
        carrier.room_bytes = nbytes if carrier.room != NULL else 0
    return carrier.room


cdef int sum_all(engine_carrier* functions, void* memory, uint64_t count, int item_bytes) noexcept nogil:
    cdef MpiCarrier* carrier = <MpiCarrier*>functions
    pthread_mutex_lock(&mpi_lock)
    carrier.sums = engine_mpi_sum(&carrier.library, memory, <int>count, item_bytes, &carrier.summing) == 0
    pthread_mutex_unlock(&mpi_lock)
    return ENGINE_CARRIER_DONE if carrier.sums else ENGINE_CARRIER_FAILED


cdef int summed(engine_carrier* functions) noexcept nogil:
    cdef MpiCarrier* carrier = <MpiCarrier*>functions
    cdef int done
    pthread_mutex_lock(&mpi_lock)
    done = engine_mpi_test(&carrier.library, &carrier.summing)
    carrier.sums = done == 0
    pthread_mutex_unlock(&mpi_lock)
    return done                 # 1, 0 or -1, which are DONE, BUSY and FAILED


# ---- opening and closing -----------------------------------------------------------------------------------------------------

cdef bint finish_peer(const engine_mpi* library, Peer* peer) noexcept nogil:
    """Cancel receives from a peer; return whether all its requests are done."""
    cdef uint64_t count = 0, k
    for k in range(peer.receives.head, peer.receives.tail):
        engine_mpi_cancel(library, &peer.receives.list[k % ENGINE_CARRIER_MESSAGES])
    complete_requests(library, &peer.receives, &count)
    complete_requests(library, &peer.sends, &count)
    return peer.receives.head == peer.receives.tail and peer.sends.head == peer.sends.tail


cdef int close(engine_carrier* functions) noexcept nogil:
    """Close a channel. A sum that is in flight when the world fails cannot be cancelled, so its memory is leaked."""
    cdef MpiCarrier* carrier = <MpiCarrier*>functions
    cdef bint over = True
    cdef int r
    pthread_mutex_lock(&mpi_lock)
    for r in range(carrier.size):
        over &= finish_peer(&carrier.library, &carrier.peers[r])
    pthread_mutex_unlock(&mpi_lock)
    if carrier.sums:
        summed(functions)
    if not carrier.sums:
        free(carrier.room)
    if not over:
        return ENGINE_CARRIER_BUSY
    free(carrier.peers)
    free(carrier)
    return ENGINE_CARRIER_DONE


cdef engine_carrier* open_channel(engine_carrier_provider* functions, uint32_t channel, void* memory,
                                  uint64_t nbytes) except? NULL:
    """Open a channel. Only the world's, channel 0, can sum."""
    cdef MpiProvider* provider = <MpiProvider*>functions
    cdef MpiCarrier* carrier = <MpiCarrier*>calloc(1, sizeof(MpiCarrier))
    cdef Peer* peers = <Peer*>calloc(provider.size, sizeof(Peer))
    if carrier == NULL or peers == NULL:
        free(carrier)
        free(peers)
        raise MemoryError("no memory for a carrier over MPI")
    carrier.functions.least_bytes = LEAST_BYTES
    carrier.functions.send, carrier.functions.receive, carrier.functions.progress = send, receive, progress
    carrier.functions.close = close
    if channel == 0:
        carrier.functions.sum_memory, carrier.functions.sum, carrier.functions.summed = sum_memory, sum_all, summed
    carrier.library, carrier.peers, carrier.size = provider.library, peers, provider.size
    carrier.tag = provider.tag + <int>channel
    return &carrier.functions


cdef void free_provider(object capsule) noexcept:
    free(PyCapsule_GetPointer(capsule, ENGINE_CARRIER_CAPSULE))


def make_provider(dict given, int tag, int size):
    """Return a provider of carriers over MPI. `given` has MPI's functions and handles by the names of `engine_mpi`."""
    cdef MpiProvider* provider = <MpiProvider*>calloc(1, sizeof(MpiProvider))
    cdef engine_mpi* library = &provider.library
    if provider == NULL:
        raise MemoryError("no memory for carriers over MPI")
    capsule = PyCapsule_New(provider, ENGINE_CARRIER_CAPSULE, free_provider)
    provider.functions.version, provider.functions.channels = ENGINE_CARRIER_VERSION, CHANNELS
    provider.functions.open, provider.tag, provider.size = open_channel, tag, size
    library.isend, library.irecv = <void*><size_t>given["isend"], <void*><size_t>given["irecv"]
    library.test, library.cancel = <void*><size_t>given["test"], <void*><size_t>given["cancel"]
    library.iallreduce = <void*><size_t>given["iallreduce"]
    library.comm, library.byte, library.ints = given["comm"], given["byte"], given["ints"]
    library.everybody, library.in_place = given["everybody"], given["in_place"]
    library.float32, library.float64, library.sum = given["float32"], given["float64"], given["sum"]
    return capsule
