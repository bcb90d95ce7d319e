"""MPI as a carrier of bytes, which adds nothing, so that results have the bits of any other lane; and, if a user chooses that, as
what sums over all ranks, in an order of its own.

Every message is announced on the lane's connection, by a frame that says what it is; so the receiver knows its length and place
before it begins to receive, and MPI has to be asked only while a message is under way. Messages between two ranks arrive in the
order in which they were begun, and so are announced in it.

MPI takes calls of one thread at a time, of any: all calls here are made under one lock, since MPI is the process's.
"""
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

from engine_ext.platform.atomics cimport load32_relaxed, load_acquire, load_relaxed, store32_release, store_release
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock

cdef extern from "platform/mpi.h" nogil:
    """
    static pthread_mutex_t mpi_lock = PTHREAD_MUTEX_INITIALIZER;
    """
    pthread_mutex_t mpi_lock
    int engine_mpi_send(const engine_mpi* library, const void* data, int nbytes, int rank, int tag, engine_mpi_request* request)
    int engine_mpi_receive(const engine_mpi* library, void* data, int nbytes, int rank, int tag, engine_mpi_request* request)
    int engine_mpi_sum(const engine_mpi* library, void* data, int count, int item_bytes, engine_mpi_request* request)
    int engine_mpi_test(const engine_mpi* library, engine_mpi_request* request)
    void engine_mpi_cancel(const engine_mpi* library, engine_mpi_request* request)


cdef bint courier_send(Courier* courier, const char* data, uint64_t nbytes) noexcept nogil:
    """Begin to send what stays as it is until it has arrived. False: MPI takes no more now."""
    cdef Messages* going = &courier.going
    cdef bint begun = False
    pthread_mutex_lock(&mpi_lock)
    if going.tail - going.head < MESSAGES:
        begun = engine_mpi_send(courier.library, data, <int>nbytes, courier.rank, courier.tag,
                                &going.list[going.tail % MESSAGES].request) == 0
        if begun:
            store_release(&going.tail, going.tail + 1)
    pthread_mutex_unlock(&mpi_lock)
    return begun


cdef bint courier_receive(Courier* courier, char* data, uint64_t nbytes) noexcept nogil:
    """Begin to receive the next message. False: MPI refuses, or there are more than a peer sends that keeps to the rules."""
    cdef Messages* coming = &courier.coming
    cdef bint begun
    if coming.tail - coming.head == MESSAGES:
        return False
    pthread_mutex_lock(&mpi_lock)
    begun = engine_mpi_receive(courier.library, data, <int>nbytes, courier.rank, courier.tag,
                               &coming.list[coming.tail % MESSAGES].request) == 0
    pthread_mutex_unlock(&mpi_lock)
    if begun:
        coming.list[coming.tail % MESSAGES].tells = False
        coming.tail += 1
    return begun


cdef bint courier_tell(Courier* courier, const Progress* passed) noexcept nogil:
    """Keep how far the peer is until all that is under way has arrived. False: nothing is."""
    cdef Messages* coming = &courier.coming
    cdef Message* last = &coming.list[(coming.tail - 1) % MESSAGES]
    if coming.head == coming.tail:
        return False
    last.tells, last.passed = True, passed[0]
    return True


cdef int pass_over(const Courier* courier, Messages* messages, Progress* passed) noexcept nogil:
    """Let go of the oldest messages that are done: how many, or -1 for an error; and what the last of them told, if it did."""
    cdef Message* message
    cdef int done = 1, count = 0
    while messages.head != messages.tail:
        message = &messages.list[messages.head % MESSAGES]
        done = engine_mpi_test(courier.library, &message.request)
        if done <= 0:
            break
        if message.tells and passed != NULL:
            passed[0] = message.passed
        store_release(&messages.head, messages.head + 1)
        count += 1
    return count if done >= 0 else -1


cdef int courier_arrived(Courier* courier, Progress* passed) noexcept nogil:
    """How many messages have arrived since the last call, or -1 for an error. What is told behind them is in `passed`."""
    cdef int count
    if courier.coming.head == courier.coming.tail:
        return 0
    pthread_mutex_lock(&mpi_lock)
    count = pass_over(courier, &courier.coming, passed)
    pthread_mutex_unlock(&mpi_lock)
    return count


cdef bint courier_sent(Courier* courier) noexcept nogil:
    """Let MPI go on with what is being sent; whether all has been."""
    cdef int count
    cdef bint sent
    if load_acquire(&courier.going.tail) == load_relaxed(&courier.going.head):
        return True
    pthread_mutex_lock(&mpi_lock)
    count = pass_over(courier, &courier.going, NULL)
    sent = courier.going.head == courier.going.tail or count < 0    # who receives knows of an error, too
    pthread_mutex_unlock(&mpi_lock)
    return sent


cdef bint courier_busy(Courier* courier) noexcept nogil:
    """Whether anything is under way. The network thread's. It takes the lock: who gives a message later finds this look done."""
    cdef bint found
    pthread_mutex_lock(&mpi_lock)
    found = courier.coming.head != courier.coming.tail or courier.going.tail != courier.going.head
    pthread_mutex_unlock(&mpi_lock)
    return found


cdef bint courier_close(Courier* courier) noexcept nogil:
    """Give up what is under way. False: MPI may still write to where messages were to arrive, or read what is being sent."""
    cdef Messages* coming = &courier.coming
    cdef uint64_t k
    cdef bint over
    pthread_mutex_lock(&mpi_lock)
    for k in range(coming.head, coming.tail):
        engine_mpi_cancel(courier.library, &coming.list[k % MESSAGES].request)
    pass_over(courier, coming, NULL)
    pass_over(courier, &courier.going, NULL)
    over = coming.head == coming.tail and courier.going.head == courier.going.tail
    pthread_mutex_unlock(&mpi_lock)
    return over


# ---- sums over all ranks -----------------------------------------------------------------------------------------------------

cdef char* summing_room(Summing* summing, uint64_t nbytes) noexcept nogil:
    """Memory for so many bytes, kept from sum to sum; NULL if there is none."""
    if nbytes > summing.room_bytes:
        free(summing.room)
        summing.room = <char*>calloc(1, nbytes)         # gaps between tensors are summed, too
        summing.room_bytes = nbytes if summing.room != NULL else 0
    return summing.room


cdef void summing_begin(Summing* summing, uint64_t count, int item_bytes) noexcept nogil:
    """Begin to sum what is in the room."""
    cdef uint32_t state = SUMMING_FAILED
    pthread_mutex_lock(&mpi_lock)
    if engine_mpi_sum(summing.library, summing.room, <int>count, item_bytes, &summing.request) == 0:
        state = SUMMING_GOES_ON
    store32_release(&summing.state, state)
    pthread_mutex_unlock(&mpi_lock)


cdef bint summing_busy(Summing* summing) noexcept nogil:
    """As courier_busy, of a sum. A failure is news as well."""
    cdef bint found
    pthread_mutex_lock(&mpi_lock)
    found = load32_relaxed(&summing.state) != SUMMING_NOTHING
    pthread_mutex_unlock(&mpi_lock)
    return found


cdef bint summing_look(Summing* summing) noexcept nogil:
    """Let MPI go on with a sum; whether it was done just now. The network thread's, as long as there is one."""
    cdef int done = 0
    if load32_relaxed(&summing.state) != SUMMING_GOES_ON:
        return False
    pthread_mutex_lock(&mpi_lock)
    done = engine_mpi_test(summing.library, &summing.request)
    pthread_mutex_unlock(&mpi_lock)
    if done:
        store32_release(&summing.state, SUMMING_NOTHING if done > 0 else SUMMING_FAILED)
    return done > 0


cdef void summing_close(Summing* summing) noexcept nogil:
    """A sum that is under way when the world has failed cannot be called back: it keeps its memory."""
    summing_look(summing)
    if load32_relaxed(&summing.state) == SUMMING_NOTHING:
        free(summing.room)
    summing.room, summing.room_bytes = NULL, 0
