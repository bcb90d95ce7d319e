/* A system that is short of memory now and then: loaded first (LD_PRELOAD), it refuses some calls on sockets as the kernel
 * does, with ENOBUFS, ENOMEM or EINTR. SHORTAGE_EVERY: one of so many calls of a process; SHORTAGE_RUN: so many in turn. */
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/types.h>

static _Atomic unsigned calls;

static long setting(const char *name) {
  const char *text = getenv(name);
  return text != NULL ? atol(text) : 0;
}

/* Whether this call is refused; errno says why. EINTR comes alone, as signals do. */
static int refuses(void) {
  static const int ERRORS[] = {ENOBUFS, ENOMEM};
  static long every, run;
  if (every == 0) every = setting("SHORTAGE_EVERY"), run = setting("SHORTAGE_RUN");
  if (every <= 0) return 0;
  long number = (long)atomic_fetch_add(&calls, 1), at = number % every;
  if (at == every - 1) errno = EINTR;
  else if (at < run) errno = ERRORS[number / every % 2];
  else return 0;
  return 1;
}

#define STANDS_FOR(type, name, parameters, arguments)                                    \
  __attribute__((visibility("default"))) type name parameters {                          \
    static type(*real) parameters;                                                       \
    if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, #name);                         \
    return refuses() ? -1 : real arguments;                                              \
  }

STANDS_FOR(ssize_t, send, (int fd, const void *data, size_t bytes, int flags), (fd, data, bytes, flags))
STANDS_FOR(ssize_t, recv, (int fd, void *data, size_t bytes, int flags), (fd, data, bytes, flags))
STANDS_FOR(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
STANDS_FOR(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags))
STANDS_FOR(int, accept4, (int fd, struct sockaddr *name, socklen_t *bytes, int flags), (fd, name, bytes, flags))
