"""One connection to a rank on another host: frames that wait to be sent, and the frame that is being received."""
from libc.stdint cimport int32_t, uint16_t, uint32_t, uint64_t

from engine_ext.platform.atomics cimport load32_acquire
from engine_ext.platform.posix cimport pthread_mutex_t

cdef extern from "engine_ext/transport/frames.h" nogil:
    enum:
        FRAME_LEFT, FRAME_SLOT, FRAME_PROGRESS, FRAME_REQUESTS, FRAME_SCHEDULE, FRAME_WORDS, FRAME_CAUSE, FRAME_CLOCK
        FRAME_MESSAGE, FRAME_PING, FRAME_PONG, FRAMES
        FRAME_LONGEST, FRAME_WORDS_MOST
    ctypedef struct engine_frame:
        uint32_t bytes
        uint16_t type
        int32_t rank
        uint32_t offset
        uint64_t position
    ctypedef struct engine_word:
        uint32_t offset
        uint32_t bytes
        uint64_t value
    ctypedef struct engine_failure_cause:
        uint64_t abort
        char* reason
    ctypedef struct engine_times:
        uint64_t asked
        uint64_t received
        uint64_t answered
    bint engine_word_of_rank(const engine_word* word)
    bint engine_word_of_coordinator(const engine_word* word, int size)

cdef enum:
    OPEN = 1                # Link.state: no error yet, and the other side has not closed
    ENDED = -107            # Link.state: the other side has closed; other values below 0: -errno
    AHEAD = 16384           # bytes of Receiver.ahead
    SMALL_WORDS = 3         # payloads of at most this many 64-bit words are copied

cdef struct Outgoing:       # a frame that is not wholly sent
    engine_frame head
    const char* data        # the payload, which stays unchanged until it is sent; NULL: it is in `small`
    char* owned             # malloc'ed payload, freed when the frame is sent; NULL: the queue does not own the payload
    uint64_t[SMALL_WORDS] small
    uint64_t sent           # bytes sent so far, of header and payload together

cdef struct Link:
    int fd
    int peer                # the rank at the other end
    int state               # atomic: OPEN, ENDED or -errno
    bint peer_ended         # the other side has said that it is done; the reader alone
    int unsent              # atomic: -errno of a send that failed; 0: none has
    uint64_t out_bytes      # atomic: bytes that the system has taken from this side; written under the lock
    uint64_t owed_since     # monotonic ns: when an acknowledgement was first seen to be owed; 0: none; the network thread alone
    uint64_t in_bytes       # atomic: bytes received; written by the reader alone
    uint32_t* sent_any        # atomic: set to 1 when something is sent on any connection of the owner, who shares the word
    uint32_t* starved       # atomic: set to 1 when the system lacks memory for a call on any connection of the owner, likewise
    uint64_t out_starved    # monotonic ns: since when the system lacks memory to send; 0: it has some; under the lock
    uint64_t in_starved     # monotonic ns: since when it lacks memory to receive; 0: it has some; the reader alone
    # outgoing: any thread, under the lock
    pthread_mutex_t lock
    bint mute               # frames are dropped from now on; what comes in tells why
    Outgoing* queue         # malloc'ed ring
    uint32_t room           # its capacity in frames, a power of 2
    uint32_t head           # number of the oldest frame, since the start
    uint32_t tail           # number after the newest frame
    # incoming: the reader alone
    engine_frame coming     # header of the frame that is being received
    uint64_t came           # bytes of it received so far, of header and payload together
    char* target            # address for its payload
    uint64_t[SMALL_WORDS] small     # a place for payloads that the receiver checks first

# Receiver of frames. `find_target` returns the address for the payload of a frame; NULL: the frame is not allowed here.
# `handle_frame` processes the complete frame, and returns whether it is allowed here.
cdef struct Receiver:
    char* (*find_target)(void* owner, Link* link, const engine_frame* frame) noexcept nogil
    bint (*handle_frame)(void* owner, Link* link, const engine_frame* frame) noexcept nogil
    void* owner
    char* ahead             # AHEAD bytes, for data behind a payload: many short frames then need only one system call

cdef inline int link_state(const Link* link) noexcept nogil:
    return <int>load32_acquire(<const uint32_t*>&link.state)

cdef void link_open(Link* link, int fd, int peer, uint32_t* sent_any, uint32_t* starved) noexcept nogil
cdef void link_break(Link* link) noexcept nogil
cdef void link_close(Link* link) noexcept nogil
cdef void link_queue(Link* link, const engine_frame* head, const char* data) noexcept nogil
cdef void link_give(Link* link, const engine_frame* head, char* owned) noexcept nogil
cdef void link_leave(Link* link) noexcept nogil
cdef bint link_flush(Link* link) noexcept nogil
cdef bint link_idle(Link* link) noexcept nogil
cdef bint link_delivered(Link* link) noexcept nogil
cdef void link_acknowledge_end(Link* link) noexcept nogil
cdef bint link_receive(Link* link, const Receiver* receiver, bint ended) noexcept nogil
cdef bint link_check_acks(Link* link, uint32_t patience_ms) noexcept nogil
