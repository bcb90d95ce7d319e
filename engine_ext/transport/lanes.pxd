"""The transport of ranks on several hosts: shared memory on each, and lanes between them."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.shared.layout cimport MAX_SOCKETS
from engine_ext.shared.segment cimport Segment
from engine_ext.transport.carrier cimport engine_carrier
from engine_ext.transport.link cimport Link, Receiver, engine_failure_cause
from engine_ext.transport.shm cimport SharedMemory
from engine_ext.transport.transport cimport Progress, Transport

cdef struct Announced:          # a message that the carrier brings
    bint tells                  # the peer has reported progress behind it: `passed` is valid
    Progress passed

cdef struct Lane:               # all traffic between this rank and a rank of another host
    Link* links                 # array of its connections
    int count                   # number of connections, 1 to MAX_SOCKETS
    bint carries                # whether this rank receives for its host what the peer offers
    bint ended                  # the peer has said that it is done, and all has arrived; the reader alone
    uint32_t answered           # atomic: number of the last ping that the peer has answered; the reader writes it
    engine_failure_cause failure_cause  # why the world has ended, as the peer knows it; valid once `cause_known` is 1
    uint32_t cause_known        # atomic: 1 once `failure_cause` has come; the reader writes it
    # outgoing: the holder of the driver's role
    int next                    # number of the connection that carries the next bytes of a slot
    uint32_t used               # bit k: connection k has carried bytes since this rank last sent its progress
    uint64_t given              # atomic: number of messages given to the carrier
    uint64_t sent               # atomic: number of these that have been sent; the network thread writes it
    uint32_t failed             # atomic: 1 once the carrier cannot go on with this lane; the network thread writes it
    bint left                   # this rank has said that it is done
    # incoming, by connection: the reader alone
    Progress[MAX_SOCKETS] reported  # the peer's progress as this connection last reported it: all bytes up to there have come
    Progress[MAX_SOCKETS] due   # progress that this connection will report behind its bytes; not above `reported`: no bytes due
    Announced* coming           # ring of messages that are announced and have not arrived; NULL: there is no carrier
    uint64_t announced          # number of messages announced, since the start
    uint64_t arrived            # number of messages that have arrived

cdef struct Lanes:
    SharedMemory memory         # first: a pointer to the one is a pointer to the other
    Lane** to                   # by host: the lane to the rank that receives for it what this rank offers; NULL: this host
    Lane** of                   # by rank: the lane between it and this rank; NULL: none
    uint32_t sockets            # the knob `sockets_per_lane`
    engine_carrier* carrier     # takes large offers; NULL: everything goes over the connections
    Announced* announced        # memory of all lanes' rings
    char* room                  # the carrier's memory for sums
    uint64_t room_bytes
    uint32_t summing            # atomic, SUMMING_*
    bint posted                 # the carrier was given messages since the last `publish`
    uint32_t dozing             # atomic: 1 while the network thread sleeps without polling the carrier: `bell` wakes it
    int bell                    # eventfd
    Receiver receiver           # handles the frames of all lanes

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
