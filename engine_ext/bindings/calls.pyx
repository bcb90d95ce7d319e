"""The native call (calls.h): submission from compiled code, completion of a call, and the registry of engines.

`submit` makes an operation and submits it, as calls from Python do. A call that lingers drives the engine, and completes here if
the operation is done in time. Otherwise the operation is abandoned, and a finisher thread completes the call
(control/native_calls.pyx).

Engines are found by the number of their process set. An engine that shuts down is dismissed first, and from then on its calls are
refused. When its thread has stopped, it waits until no thread is inside any more and all calls are answered.
"""
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport uintptr_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from engine_ext.bindings.call_ops cimport call_op
from engine_ext.bindings.groups cimport group_copy, group_rows, group_skip
from engine_ext.bindings.refusals cimport TEXT_BYTES, text_as_utf8, text_of_end, text_of_refusal
from engine_ext.bindings.submit cimport TICK_NS
from engine_ext.control.driver cimport (
    Goal, Target, driver_call, driver_note_done, driver_note_thread, driver_submit, driver_wait,
)
from engine_ext.control.native_calls cimport finishers_forked, finishers_start
from engine_ext.control.stall cimport stall_look_after, stall_look_for_left
from engine_ext.operations.kinds cimport operation_of
from engine_ext.operations.op cimport OP_ABANDONED, OP_DONE, OP_PATIENT, Op
from engine_ext.operations.operation cimport free_parts, make_op
from engine_ext.platform.atomics cimport load_pointer, now_ns, or32
from engine_ext.platform.clock cimport age_ns
from engine_ext.platform.posix cimport (
    CLOCK_MONOTONIC, clock_gettime, pthread_atfork, pthread_cond_broadcast, pthread_cond_init, pthread_cond_t,
    pthread_cond_timedwait, pthread_condattr_init, pthread_condattr_setclock, pthread_condattr_t, pthread_mutex_init,
    pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock, timespec,
)
from engine_ext.shared.layout cimport (
    FAILURE_BYTES, FAULT_CALL, KINDS, MAX_RANKS, NAME_BYTES, Status,
)

cdef struct Access:             # an engine, as calls find it; guarded by registry.lock
    Access* next
    State* engine
    int number                  # number of its process set; 0: the world
    bint open                   # whether calls are admitted
    uint32_t inside             # threads that use the engine in `submit` or `rank_and_size`
    uint64_t unanswered         # calls whose `done` has not returned yet

cdef struct Call:               # the part of a call that is kept until its end
    Access* access
    Done done
    void* argument              # for `done`
    int32_t ranks               # number of ranks in the process set
    uint32_t name_bytes
    char[1] name                # `name_bytes` bytes, none without a name; not terminated

cdef struct Parts:              # progress of `part_copy` in a gathered group
    uint32_t next               # the tensor after the last that was copied
    uint64_t[MAX_RANKS] offsets  # its offset in each rank's payload; undefined while `next` is 0

cdef struct Registry:
    pthread_mutex_t lock
    pthread_cond_t news         # a thread has left an engine, or a call was answered
    Access* first
    bint forked                 # this process is a forked child of a rank and has had no engine since

cdef Registry registry


# ---- registry of engines -----------------------------------------------------------------------------------------------------

cdef void initialize_registry() noexcept nogil:
    """Initialize the lock and the condition, and empty the list of engines."""
    cdef pthread_condattr_t attributes
    pthread_mutex_init(&registry.lock, NULL)
    pthread_condattr_init(&attributes)
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC)
    pthread_cond_init(&registry.news, &attributes)
    registry.first = NULL


cdef void reset_after_fork() noexcept nogil:
    """Reset the registry in a forked child. Engines, threads and any held locks belong to the parent."""
    registry.forked = registry.forked or registry.first != NULL
    initialize_registry()
    finishers_forked()


cdef int calls_admit(State* e, int number) except -1:
    """Register an engine for native calls under the number of its process set; 0: the world."""
    cdef Access* access = <Access*>calloc(1, sizeof(Access))
    if access == NULL:
        raise MemoryError("no memory for the engine")
    access.engine, access.number, access.open = e, number, True
    pthread_mutex_lock(&registry.lock)
    access.next, registry.first, registry.forked = registry.first, access, False
    pthread_mutex_unlock(&registry.lock)
    return 0


cdef Access* access_of(const State* e) noexcept nogil:
    """Return the registered access to an engine, or NULL. The caller holds the lock."""
    cdef Access* access = registry.first
    while access != NULL and access.engine != e:
        access = access.next
    return access


cdef void calls_dismiss(State* e) noexcept nogil:
    """Refuse calls to an engine from now on."""
    cdef Access* access
    pthread_mutex_lock(&registry.lock)
    access = access_of(e)
    if access != NULL:
        access.open = False
    pthread_mutex_unlock(&registry.lock)


cdef bint calls_settle(State* e, uint64_t ns) noexcept nogil:
    """Wait until no thread is inside a stopped engine and all its calls are answered, for at most `ns` nanoseconds.

    Return False if a thread is still inside, so that the engine must stay. Otherwise the engine is unregistered.
    """
    cdef uint64_t begun = now_ns(), passed
    cdef timespec until
    cdef Access* access
    cdef bint empty = True
    pthread_mutex_lock(&registry.lock)
    access = access_of(e)
    while access != NULL and (access.inside or access.unanswered):
        passed = age_ns(now_ns(), begun)
        if passed >= ns:
            empty = access.inside == 0
            break
        clock_gettime(CLOCK_MONOTONIC, &until)
        until.tv_nsec += <long>((ns - passed) % 1000000000)
        until.tv_sec += <long>((ns - passed) // 1000000000) + until.tv_nsec // 1000000000
        until.tv_nsec %= 1000000000
        pthread_cond_timedwait(&registry.news, &registry.lock, &until)
    if access != NULL and empty:
        access.engine = NULL
        free_unused_access(access)
    pthread_mutex_unlock(&registry.lock)
    return empty


cdef void free_unused_access(Access* access) noexcept nogil:
    """Free an access to which nothing refers any more. The caller holds the lock."""
    cdef Access** link = &registry.first
    if access.engine != NULL or access.inside or access.unanswered:
        return
    while link[0] != NULL and link[0] != access:        # NULL: a `done` has forked, and returns in the child
        link = &link[0].next
    if link[0] == access:
        link[0] = access.next
        free(access)


cdef Access* enter_engine(int number) noexcept nogil:
    """Enter the engine of a process set, which then stays until `leave_engine`; return its access, or NULL if there is none."""
    cdef Access* access
    pthread_mutex_lock(&registry.lock)
    access = registry.first
    while access != NULL and not (access.open and access.number == number):
        access = access.next
    if access != NULL:
        access.inside += 1
    pthread_mutex_unlock(&registry.lock)
    return access


cdef void adjust_access(Access* access, int inside, int unanswered) noexcept nogil:
    """Add to the counts of an access; if it is dismissed, wake the thread that waits in `calls_settle`."""
    pthread_mutex_lock(&registry.lock)
    access.inside += <uint32_t>inside
    access.unanswered += <uint64_t><int64_t>unanswered
    if not access.open:
        pthread_cond_broadcast(&registry.news)
        free_unused_access(access)
    pthread_mutex_unlock(&registry.lock)


cdef inline void leave_engine(Access* access) noexcept nogil:
    """Leave an engine that `enter_engine` has entered."""
    adjust_access(access, -1, 0)


# ---- completion of calls -----------------------------------------------------------------------------------------------------

cdef void reject_call(const engine_call* call, int status, char* text) noexcept nogil:
    """Complete a call that was not submitted, with its error; repairs `text` to valid UTF-8."""
    cdef engine_result result
    memset(&result, 0, sizeof(result))
    text_as_utf8(text)
    result.status, result.text = status, text
    call.done(call.argument, &result)


cdef void finish_call(Op* op) noexcept nogil:
    """Complete the call of a finished operation, and free both. Runs without locks; the engine may be gone."""
    cdef Call* call = <Call*>op.call
    cdef Access* access = call.access
    cdef char[TEXT_BYTES] text
    cdef engine_result result
    cdef Parts parts
    memset(&result, 0, sizeof(result))
    parts.next = 0
    result.status, result.ranks = text_of_end(op, call.name, call.name_bytes, text), call.ranks
    result.parts = <engine_parts*>&parts
    if result.status != ENGINE_CALL_OK:
        text_as_utf8(text)
        result.text = text
    elif operation_of(&op.meta).uneven:
        result.memory, result.bytes, result.rows, result.count = op.memory, op.memory_bytes, op.row_counts, op.meta.group
        op.memory = NULL
    call.done(call.argument, &result)
    free_parts(op)
    adjust_access(access, 0, -1)


# ---- submission --------------------------------------------------------------------------------------------------------------

cdef bint take_name(const engine_call* call, Target* target) noexcept nogil:
    """Fill in `target` with the name of a call, or none if it is unnamed; return False for an invalid name."""
    memset(target, 0, sizeof(Target))
    if call.flags & ENGINE_CALL_UNNAMED:
        return True
    target.text, target.text_bytes = call.name, call.name_bytes
    return call.name != NULL and 0 < call.name_bytes <= NAME_BYTES


cdef Call* make_call(Access* access, const engine_call* call, const Target* target) noexcept nogil:
    """Copy what is needed to complete a call; return NULL without memory."""
    cdef Call* kept = <Call*>malloc(sizeof(Call) + target.text_bytes)
    if kept != NULL:
        kept.access, kept.done, kept.argument = access, call.done, call.argument
        kept.ranks, kept.name_bytes = access.engine.segment.size, target.text_bytes
        if target.text != NULL:
            memcpy(kept.name, target.text, target.text_bytes)
    return kept


cdef void announce_failure(State* e, const engine_call* call, Target* target, const char* why) noexcept nogil:
    """Announce that a call of this rank has failed, in place of the operation that it would have submitted."""
    cdef Op* op = make_op()
    if op == NULL:
        return
    op.meta.kind, op.meta.fault = call.kind, FAULT_CALL
    op.text = <char*>malloc(FAILURE_BYTES + 1)
    op.flags = OP_PATIENT | OP_ABANDONED
    if op.text != NULL:
        snprintf(op.text, FAILURE_BYTES, "failed before it was submitted: %.*s", <int>FAILURE_BYTES - 40, why)
    if op.text == NULL or driver_submit(e, target, op) != Status.OK:
        free_parts(op)


cdef bint wait_for(State* e, Op* op, uint64_t begun, uint64_t ns, int status) noexcept nogil:
    """Drive the engine until the operation is done, or until `ns` have passed since `begun`.

    Return whether the caller has to complete the call. If not, it must not touch the operation any more.
    """
    cdef uint64_t passed = age_ns(now_ns(), begun)
    cdef Goal goal
    memset(&goal, 0, sizeof(Goal))
    goal.op = op
    while status == Status.TICK and passed < ns:
        stall_look_after(e, op)
        status = driver_wait(e, &goal, min(ns - passed, <uint64_t>TICK_NS))
        passed = age_ns(now_ns(), begun)
    return or32(&op.flags, OP_ABANDONED) & OP_DONE != 0


cdef int submit_op(State* e, const engine_call* call, Target* target, Op* op, Op** ended) noexcept nogil:
    """Submit an operation, and wait for it if the call lingers; return a Status.

    `ended` gets the operation if it is done and the caller has to complete the call.
    """
    cdef uint64_t begun
    cdef bint lingers = call.linger_ns == ENGINE_CALL_FOREVER or (
        call.linger_ns > 0 and load_pointer(<void**>&e.table.inflight) == NULL)
    cdef int status
    op.finished, op.awaited, op.flags = finish_call, True, OP_PATIENT
    if call.flags & ENGINE_CALL_MARKS_STEP and call.optimizer >= 0:
        op.step = call.optimizer + 1
    if not lingers:
        op.flags = OP_PATIENT | OP_ABANDONED
        status = driver_submit(e, target, op)
    else:
        begun = now_ns()
        status = driver_call(e, target, op, min(call.linger_ns, <uint64_t>TICK_NS))
        if status == Status.OK or status == Status.TICK:
            ended[0] = op if wait_for(e, op, begun, call.linger_ns, status) else NULL
            status = Status.OK
    stall_look_for_left(e)
    return status


cdef int prepare_op(Access* access, const engine_call* call, const Target* target, Op* op, char* text) noexcept nogil:
    """Fill in the operation of a call. Return ENGINE_CALL_OK, or another status with the reason in `text`."""
    cdef int status = ENGINE_CALL_NO_MEMORY
    if call.fault != NULL:
        snprintf(text, TEXT_BYTES, "%s", call.fault)
        return ENGINE_CALL_REFUSED
    if op != NULL:
        status = call_op(access.engine, call, op, text)
    if status == ENGINE_CALL_OK:
        op.call = make_call(access, call, target)
        if op.call == NULL or not finishers_start():
            status = ENGINE_CALL_NO_MEMORY
    if status == ENGINE_CALL_NO_MEMORY:
        snprintf(text, TEXT_BYTES, "MemoryError: no memory, or no thread, for a call")
    return status


cdef int try_to_submit(Access* access, const engine_call* call, Target* target, Op* op, Op** ended, char* text) noexcept nogil:
    """Check the call and submit its operation as `submit_op` does; return ENGINE_CALL_OK.

    On failure return another status with the reason in `text`, and tell the other ranks.
    """
    cdef int status
    if not take_name(call, target):
        snprintf(text, TEXT_BYTES, "ArgumentError: a name has 1 to %d bytes of UTF-8; this one has %u", <int>NAME_BYTES,
                 call.name_bytes)
        return ENGINE_CALL_REFUSED
    status = prepare_op(access, call, target, op, text)
    if status == ENGINE_CALL_OK:
        adjust_access(access, 0, 1)             # before the submission: the end may come at once
        status = submit_op(access.engine, call, target, op, ended)
        if status == Status.OK:
            return ENGINE_CALL_OK
        status = text_of_refusal(access.engine, target, status, text)
        adjust_access(access, 0, -1)
    if call.kind < KINDS and (
            status == ENGINE_CALL_REFUSED or status == ENGINE_CALL_NO_MEMORY or status == ENGINE_CALL_DUPLICATE):
        announce_failure(access.engine, call, target, text)
    return status


cdef void submit(const engine_call* call) noexcept nogil:
    """Submit a call, as calls.h specifies."""
    cdef char[TEXT_BYTES] text
    cdef Target target
    cdef Access* access
    cdef Op* ended = NULL
    cdef Op* op
    cdef int status
    if call.struct_size != sizeof(engine_call):
        snprintf(text, TEXT_BYTES, "IncompatibleRanksError: the call was made for another version of the engine")
        reject_call(call, ENGINE_CALL_REFUSED, text)
        return
    access = enter_engine(call.set)
    if access == NULL:
        reject_call(call, describe_closed(call, text), text)
        return
    driver_note_thread(access.engine)
    if call.linger_ns != ENGINE_CALL_FOREVER:
        driver_note_done(access.engine)
    op = make_op()
    status = try_to_submit(access, call, &target, op, &ended, text)
    if status != ENGINE_CALL_OK and op != NULL:
        free_parts(op)
    leave_engine(access)
    if status != ENGINE_CALL_OK:
        reject_call(call, status, text)
    elif ended != NULL:
        finish_call(ended)


cdef int describe_closed(const engine_call* call, char* text) noexcept nogil:
    """Write into `text` why there is no engine for a call; return the matching ENGINE_CALL_* status."""
    if registry.forked:
        snprintf(text, TEXT_BYTES, "ForkedError: the engine was used in a forked child of its process, which is no rank. Use the "
                 "engine in the parent only, or start the child with the 'spawn' method")
        return ENGINE_CALL_FORKED
    snprintf(text, TEXT_BYTES, "NotInitializedError: %s. In an elastic job nothing communicates before the function that "
             "elastic.run wraps is called: move this call into that function",
             b"this rank has no such process set: it was never added, or was removed, or this rank is not in it" if call.set else
             b"there is no engine: call engine.init() first; after engine.shutdown() call it again")
    return ENGINE_CALL_NOT_INITIALIZED


cdef int rank_and_size(int32_t set, int32_t* rank, int32_t* size) noexcept nogil:
    """Write this rank's number in process set `set` and the size of the set; return ENGINE_CALL_OK or ..._NOT_INITIALIZED."""
    cdef Access* access = enter_engine(set)
    if access == NULL:
        return ENGINE_CALL_NOT_INITIALIZED
    rank[0], size[0] = access.engine.segment.rank, access.engine.segment.size
    leave_engine(access)
    return ENGINE_CALL_OK


# ---- members of a gathered group ---------------------------------------------------------------------------------------------

cdef uint64_t part_rows(const engine_result* result, uint32_t k, int64_t* rows) noexcept nogil:
    """Write the rows of member `k` from each rank into `rows`; return the bytes of all of them. See calls.h."""
    cdef uint64_t row_bytes = 0
    return group_rows(result.memory, result.rows, result.ranks, k, rows, &row_bytes)


cdef void part_copy(const engine_result* result, uint32_t k, void* target) noexcept nogil:
    """Copy member `k` of a gathered group into `target`. Copying in ascending order is fast. See calls.h."""
    cdef Parts* parts = <Parts*>result.parts
    if k < parts.next:
        parts.next = 0
    group_skip(result.memory, result.rows, result.ranks, result.count, parts.next, k, parts.offsets)
    group_copy(result.memory, result.rows, result.ranks, k, parts.offsets, <char*>target)
    parts.next = k + 1


# ---- table of functions ------------------------------------------------------------------------------------------------------

cdef engine_calls table
memset(&table, 0, sizeof(table))
table.struct_size, table.version = sizeof(engine_calls), ENGINE_CALLS_VERSION
table.submit, table.place, table.part_rows, table.part_copy = submit, rank_and_size, part_rows, part_copy
initialize_registry()
pthread_atfork(NULL, NULL, reset_after_fork)

TABLE = PyCapsule_New(&table, ENGINE_CALLS_CAPSULE, NULL)


def address():
    """Return the address of the table of functions in this process, for `ctypes`."""
    return <uintptr_t>&table
