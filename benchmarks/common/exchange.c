/* Moves bytes over connected sockets in both directions at once, and does nothing with them: what a network allows.
 *
 *   cc -O3 -march=native -shared -fPIC -o libexchange.so exchange.c
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <sys/socket.h>

/* Sends `size` bytes of `out` and receives as many into `in`, over a non-blocking socket.
 *
 * Tries `tries` times before it sleeps. Returns 0, or -errno; -ECONNRESET where the other side has gone. */
int exchange(int fd, const char *out, char *in, size_t size, int tries) {
  size_t sent = 0, received = 0;
  int idle = 0;
  while (sent < size || received < size) {
    int moved = 0;
    if (sent < size) {
      ssize_t n = send(fd, out + sent, size - sent, MSG_NOSIGNAL);
      if (n > 0) sent += (size_t)n, moved = 1;
      else if (n < 0 && errno != EAGAIN && errno != EINTR) return -errno;
    }
    if (received < size) {
      ssize_t n = recv(fd, in + received, size - received, 0);
      if (n > 0) received += (size_t)n, moved = 1;
      else if (n == 0) return -ECONNRESET;
      else if (errno != EAGAIN && errno != EINTR) return -errno;
    }
    if (moved) {
      idle = 0;
    } else if (++idle > tries) {
      struct pollfd wait = {.fd = fd, .events = (short)((sent < size ? POLLOUT : 0) | (received < size ? POLLIN : 0))};
      if (poll(&wait, 1, -1) < 0 && errno != EINTR) return -errno;
    }
  }
  return 0;
}
