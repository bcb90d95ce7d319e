"""The clock of a rank's steps: the parts of each step, and why a late one was late.

A step lasts from one `mark_step` of an optimizer to the next. Every nanosecond of it is in one part, by what the thread that
marks steps did: it got a batch, collected garbage, was blocked in the engine, waited for a processor, or did anything else,
which is called compute. Time for which it waited for a processor is in no other part, whatever it was about to do there.

A rank judges its own steps by itself (step_rule_judge). Of other ranks it knows what entries tell: which rank submitted last, and
how much later than the first. That is a length of time, and no time of another clock.

The functions take the clock's own lock, the innermost one, and make no system call under it. In other threads than the one that
marks steps, those that a program calls often look at a word and return.
"""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from engine_ext.platform.posix cimport pthread_mutex_t

cdef enum:                      # parts of a step
    PART_INPUT = 0              # getting a batch
    PART_COMPUTE = 1            # the rest: forward, backward, the optimizer, whatever the program does between steps
    PART_GC = 2                 # Python's cyclic garbage collector
    PART_CPU = 3                # waiting for a processor
    PART_WAIT = 4               # blocked in the engine
    PARTS = 5

cdef enum:
    STEP_WINDOW = 64            # number of steps by which a step is judged
    STEP_FIRST = 16             # number of steps before the first that is judged
    STEP_SAMPLES = 16           # most readings of the run delay within a step, besides the last
    LATE_KEPT = 256             # number of late steps that are remembered
    WINDOW_TOTAL = PARTS        # index of the window of whole steps; windows of parts have the part's
    WINDOW_LATE = PARTS + 1     # index of the window of other ranks' lateness
    WINDOWS = PARTS + 2

cdef struct StepParts:          # one step; times in nanoseconds
    uint64_t[5] ns              # by part
    uint64_t late_ns            # how much later than this one other ranks submitted what it waited for
    int32_t late_rank           # the rank of the world that was last by most; -1: none
    bint device                 # whether tensors on a GPU were among it: the program waits for those without being blocked
    bint elsewhere              # whether another thread of the process was blocked in the engine, for which this one may wait
    bint far                    # whether it is known of something that crossed hosts which rank was last

cdef struct StepWindow:         # the last steps, up to STEP_WINDOW of them
    uint64_t[64] recent         # a ring
    uint64_t[64] sorted         # the same, in ascending order

cdef struct StepRule:
    StepWindow[7] windows
    uint64_t count              # number of steps that were judged or remembered

cdef struct LateStep:
    uint64_t number             # number of the step, the first marked one being 1
    uint64_t begun, ended       # nanoseconds, monotonic
    uint64_t excess             # nanoseconds by which it lasted longer than the median
    int32_t cause               # LATE_*
    int32_t rank                # the rank of the world that it waited for; -1: none, or not known
    StepParts parts

cdef struct StepClock:          # written under its lock, but for `on`
    pthread_mutex_t lock
    uint32_t on                 # atomic: 1 while steps are clocked
    uint64_t thread             # atomic: number of the thread that marks steps (task_times.h); 0: none has
    int delays                  # descriptor of its run delay (task_times.h); -1: not known
    bint reading                # whether that thread reads its run delay now: no other takes its place meanwhile
    int opened                  # number of times that run delays were looked for in the last FORGIVEN steps
    uint32_t elsewhere          # atomic: 1 once another thread was blocked in the engine in this step
    uint32_t yielded            # atomic: 1 once a wait in the engine has yielded since the last reading
    const void* engine          # engine of the optimizer whose steps are clocked; NULL: none yet
    int optimizer               # number of that optimizer in its engine
    uint32_t others             # steps in a row that other optimizers have marked
    # The step in progress.
    uint64_t begun              # its start: nanoseconds, monotonic; 0: there is none
    uint64_t since              # up to when its time is in `parts`
    uint64_t delayed            # run delay at the last reading
    uint64_t read_at            # time of that reading
    uint64_t[5] unread          # by part: time since then
    uint32_t samples            # number of readings that are left
    uint32_t inputs             # depth of calls that get a batch
    bint collecting             # whether the thread collects garbage
    bint waiting                # whether it is blocked in the engine
    uint64_t foreign_gc         # when another thread began to collect garbage; 0: none does
    uint64_t foreign_base       # time in the part that it holds up, at that start
    int foreign_part            # that part
    StepParts parts
    uint64_t chain_ns           # lateness of entries that overlap, as far as it is not in `parts`
    uint64_t chain_end          # when the last of those ended
    uint64_t latest_ns          # the largest lateness of an entry in this step
    # The steps before.
    uint64_t steps              # number of steps of this optimizer
    StepRule rule
    LateStep[256] kept          # a ring of LATE_KEPT late steps
    uint64_t late               # number of late steps

cdef StepClock* step_clock_open() noexcept nogil
cdef void step_clock_forked(StepClock* clock) noexcept nogil
cdef void step_clock_close(StepClock* clock, bint alive) noexcept nogil
cdef void step_clock_switch(StepClock* clock, bint on) noexcept nogil
cdef void step_clock_sample(StepClock* clock) noexcept nogil
cdef void step_clock_wait(StepClock* clock, bint begins, uint64_t now) noexcept nogil
cdef void step_clock_input(StepClock* clock, bint begins) noexcept nogil
cdef void step_clock_collection(StepClock* clock, bint begins) noexcept nogil
cdef void step_clock_entry(
    StepClock* clock, int32_t rank, uint64_t late_ns, uint64_t submitted, bint device, bint far) noexcept nogil
cdef bint step_clock_mark(StepClock* clock, const void* engine, int optimizer, LateStep* late, bint* blind) noexcept nogil
cdef bint step_rule_judge(StepRule* rule, const StepParts* parts, LateStep* late) noexcept nogil
