/* Every memory fence of the engine. Each has a name, so that a build can leave it out. tests/verify/mutate.py then shows that a
 * stress run of that build, or the model of the protocol, fails without it. A check ensures that there are no other fences. */
#ifndef ENGINE_PLATFORM_FENCES_H
#define ENGINE_PLATFORM_FENCES_H

enum {
  /* Full fences: the two sides of "announce, then look" (docs/architecture/protocol.md, I8). */
  FENCE_WAKE = 1,        /* news published, before the look for sleepers */
  FENCE_STAGE = 2,       /* the same, for the stages of an entry */
  FENCE_SUBMIT = 3,      /* the same, for a submission */
  FENCE_ENGINE = 4,      /* the engine thread's sleep announced, before the look for news */
  FENCE_CALLER = 5,      /* a caller's sleep announced, before the look for news */
  FENCE_ROLE = 6,        /* the engine thread's role given up, before the look for waiters */
  FENCE_GIVE_BACK = 7,   /* a caller's role given back, before the look for news and waiters */
  FENCE_WAITER = 8,      /* counted as a waiter, before the look at the role */
  FENCE_DONE = 9,        /* operations completed, before the look for waiters */
  FENCE_TAKE = 10,       /* the engine thread's door read, before the look at the role */
  /* One-sided fences. */
  FENCE_TURN = 11,       /* release: a turn of the process's clock stored, before the words of the next one (clock.h) */
  FENCE_LOOK = 12,       /* acquire: a look of the process's clock read, before its turn is read again (clock.h) */
  FENCE_STREAM = 13      /* streaming stores, before the store that publishes them (kernels) */
};

/* The fence that this build leaves out; 0: none. */
#ifndef ENGINE_WITHOUT_FENCE
#define ENGINE_WITHOUT_FENCE 0
#endif

/* Order this thread's earlier stores before its later loads. */
static inline void full_fence(int name) {
  if (name == ENGINE_WITHOUT_FENCE)
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
  else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* Order this thread's earlier accesses before its later stores. */
static inline void release_fence(int name) {
  if (name == ENGINE_WITHOUT_FENCE)
    __atomic_signal_fence(__ATOMIC_RELEASE);
  else
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

/* Order this thread's earlier loads before its later accesses. */
static inline void acquire_fence(int name) {
  if (name == ENGINE_WITHOUT_FENCE)
    __atomic_signal_fence(__ATOMIC_ACQUIRE);
  else
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
}

#if defined(__x86_64__)
/* Order this thread's earlier streaming stores before its later stores, which a release does not. */
static inline void stream_fence(int name) {
  if (name == ENGINE_WITHOUT_FENCE)
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
  else
    __builtin_ia32_sfence();
}
#endif

#endif
