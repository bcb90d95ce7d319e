"""The transport of ranks on several hosts: shared memory on each, and lanes between them."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.shared.layout cimport MAX_SOCKETS
from engine_ext.shared.segment cimport Segment
from engine_ext.transport.carrier cimport engine_carrier
from engine_ext.transport.link cimport Link, Receiver, engine_failure_cause
from engine_ext.transport.shm cimport SharedMemory
from engine_ext.transport.transport cimport Progress, Transport

cdef struct Announced:          # a message of the carrier
    bint tells                  # behind it, the peer is as far as this
    Progress passed

cdef struct Lane:               # what passes between this rank and one of another host
    Link* links                 # its connections, one behind the other
    int count                   # of them, 1 to MAX_SOCKETS
    bint carries                # whether this rank receives for its host what the peer offers
    bint ended                  # the peer has said that it is done, and all has arrived; the network thread alone
    uint32_t answered           # atomic: number of the last call that the peer has answered
    engine_failure_cause failure_cause  # why the world has ended, as the peer knows it; read only behind `cause_known`
    uint32_t cause_known        # atomic: 1 once that has come
    # what goes out: the holder of the driver's role
    int next                    # number of the connection that carries the next bytes of a slot
    uint32_t used               # by bit: connections that have carried bytes since this rank last sent its progress
    uint64_t given              # atomic: messages that the carrier was given
    uint64_t sent               # atomic: those of them that have been sent; the network thread writes it
    uint32_t failed             # atomic: 1 once the carrier cannot go on with this lane; the network thread writes it
    bint left                   # this rank has said that it is done
    # what comes in, by connection: the network thread alone
    Progress[MAX_SOCKETS] reported  # the peer's progress behind the bytes that have come
    Progress[MAX_SOCKETS] due   # its progress behind bytes that are on their way; not above `reported`: there are none
    Announced* coming           # ring of messages that are announced and have not arrived; NULL: there is no carrier
    uint64_t announced          # how many messages were announced, since the start
    uint64_t arrived            # how many of them have arrived

cdef struct Lanes:
    SharedMemory memory         # first: a pointer to the one is a pointer to the other
    Lane** to                   # by host: the lane to the rank that carries for it what this rank offers; NULL: this host
    Lane** of                   # by rank: the lane that it has with this rank; NULL: none
    uint32_t sockets            # the knob `sockets_per_lane`
    engine_carrier* carrier     # takes large offers; NULL: all goes over the connections
    Announced* announced        # memory of all lanes' rings
    char* room                  # the carrier's memory for the sum that goes on
    uint64_t room_bytes
    uint32_t summing            # atomic, SUMMING_*
    bint posted                 # the carrier was given messages since the last `publish`
    uint32_t dozing             # atomic: 1 while the network thread sleeps and does not poll the carrier: `bell` wakes it
    int bell                    # eventfd
    Receiver receiver           # of what comes on any lane

cdef Transport* lanes_open(Lanes* t, Segment* segment, Lane** to, Lane** of, int bell) noexcept nogil
cdef bint lanes_use(Lanes* t, engine_carrier* carrier) noexcept nogil
cdef bint lanes_close(Lanes* t) noexcept nogil
cdef uint64_t lanes_messages(const Lanes* t) noexcept nogil
cdef bint lanes_delivered(const Lanes* t) noexcept nogil
cdef bint lane_is_delivered(const Lane* lane) noexcept nogil
cdef bint lane_is_cut(const Lane* lane) noexcept nogil
cdef void lanes_send_failure_cause(Lanes* t, const engine_failure_cause* failure_cause) noexcept nogil
cdef const engine_failure_cause* lanes_failure_cause(const Lanes* t) noexcept nogil
cdef bint lanes_ping(Lanes* t, int rank, uint32_t number) noexcept nogil
cdef bint lanes_answered(const Lanes* t, int rank, uint32_t number) noexcept nogil
cdef int lanes_poll(Lanes* t) noexcept nogil
cdef bint lanes_doze(Lanes* t) noexcept nogil
cdef void lanes_wake(Lanes* t) noexcept nogil
cdef int carrying_rank(const Segment* segment, int rank, int host) noexcept nogil
