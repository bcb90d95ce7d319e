"""One connection to a rank on another host: frames that wait to be sent, and the frame that is coming in."""
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
    OPEN = 1                # of Link.state: until an error, or until the other side closes
    ENDED = -107            # the other side has closed; other values below 0: -errno
    AHEAD = 16384
    SMALL_WORDS = 3         # a payload of at most so many 64-bit words is copied

cdef struct Outgoing:       # a frame that is not wholly sent
    engine_frame head
    const char* data        # the payload, which stays as it is until it is sent; NULL: it is in `small`
    char* owned             # malloc'ed: freed when the frame is sent; NULL: the payload is somebody else's
    uint64_t[SMALL_WORDS] small
    uint64_t sent           # bytes, of head and payload

cdef struct Link:
    int fd
    int peer                # the rank at the other end
    int state               # atomic: OPEN, ENDED or -errno
    bint peer_ended         # the other side has said that it is done; the network thread alone
    int unsent              # atomic: -errno of a send that failed; 0: none has
    uint64_t out_bytes      # atomic: bytes that the system has taken from this side; under the lock
    uint64_t owed_since     # when it was first seen that an acknowledgement is owed; 0: none is; the network thread alone
    uint64_t in_bytes       # atomic: bytes that have come; the network thread alone
    uint32_t* spoken        # atomic: 1 once something is sent, on this connection or on others of its owner
    uint32_t* starved       # atomic: 1 once the system had no memory for a call on this connection or on others of its owner
    uint64_t out_starved    # since when it has none to send: nanoseconds, monotonic; 0: it has some; under the lock
    uint64_t in_starved     # the same to receive; the network thread alone
    # what goes out: any thread, under the lock
    pthread_mutex_t lock
    bint mute               # it takes nothing more: what comes in tells why
    Outgoing* queue         # malloc'ed ring
    uint32_t room           # frames for which it has room, a power of 2
    uint32_t head           # number of the oldest, since the start
    uint32_t tail           # number after the newest
    # what comes in: the network thread alone
    engine_frame coming     # header of the frame that is coming in
    uint64_t came           # bytes of it, of header and payload
    char* target            # where its payload goes
    uint64_t[SMALL_WORDS] small     # or here, for a receiver that wants to look at it first

# Receiver of frames. `find_target` returns where the payload of a frame goes, NULL if the frame may not come here;
# `handle_frame` takes the frame when it is complete, and returns whether it may come here.
cdef struct Receiver:
    char* (*find_target)(void* owner, Link* link, const engine_frame* frame) noexcept nogil
    bint (*handle_frame)(void* owner, Link* link, const engine_frame* frame) noexcept nogil
    void* owner
    char* ahead             # AHEAD bytes, for what comes behind a payload: frames are short, and system calls are not

cdef inline int link_state(const Link* link) noexcept nogil:
    return <int>load32_acquire(<const uint32_t*>&link.state)

cdef void link_open(Link* link, int fd, int peer, uint32_t* spoken, uint32_t* starved) noexcept nogil
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
