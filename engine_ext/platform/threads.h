/* Start of the engine's threads. */
#ifndef ENGINE_PLATFORM_THREADS_H
#define ENGINE_PLATFORM_THREADS_H

#include <pthread.h>
#include <signal.h>
#include <stddef.h>

/* Start a thread with all signals blocked, since they are for the user's threads. Signals of faults stay unblocked: the kernel
 * kills a process at a blocked fault without running a handler, so Python's faulthandler would print nothing. `thread` NULL: the
 * thread is detached. Return 0 or an errno. */
static inline int engine_thread_start(pthread_t *thread, void *(*run)(void *), void *argument) {
  static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
  sigset_t blocked, theirs;
  pthread_attr_t attributes;
  pthread_t detached;
  int status = pthread_attr_init(&attributes);
  if (status != 0) return status;
  if (thread == NULL) pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  sigfillset(&blocked);
  for (size_t k = 0; k < sizeof faults / sizeof *faults; k++) sigdelset(&blocked, faults[k]);
  pthread_sigmask(SIG_SETMASK, &blocked, &theirs);
  status = pthread_create(thread != NULL ? thread : &detached, &attributes, run, argument);
  pthread_sigmask(SIG_SETMASK, &theirs, NULL);
  pthread_attr_destroy(&attributes);
  return status;
}

#endif
