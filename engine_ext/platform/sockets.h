/* Connected stream sockets that do not block. */
#ifndef ENGINE_PLATFORM_SOCKETS_H
#define ENGINE_PLATFORM_SOCKETS_H

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { ENGINE_SOCKET_ENDED = -ENOTCONN }; /* the other side has closed the connection */

/* Send what the parts hold: how many bytes were taken, 0 if there is no room now, or -errno. */
static inline int64_t engine_socket_send(int fd, struct iovec *parts, int count) {
  struct msghdr message;
  memset(&message, 0, sizeof message);
  message.msg_iov = parts;
  message.msg_iovlen = (size_t)count;
  for (;;) {
    ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) return -errno;
  }
}

/* Receive into the parts, of which at least one has room: how many bytes came, 0 if there are none now, or -errno. */
static inline int64_t engine_socket_receive(int fd, struct iovec *parts, int count) {
  struct msghdr message;
  memset(&message, 0, sizeof message);
  message.msg_iov = parts;
  message.msg_iovlen = (size_t)count;
  for (;;) {
    ssize_t came = recvmsg(fd, &message, MSG_DONTWAIT);
    if (came > 0) return came;
    if (came == 0) return ENGINE_SOCKET_ENDED;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) return -errno;
  }
}

/* Have `epoll` tell, with `number`, whenever bytes come on `fd` or it takes bytes again: 0 or -errno. */
static inline int engine_socket_watch(int epoll, int fd, uint32_t number) {
  struct epoll_event event;
  memset(&event, 0, sizeof event);
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u32 = number;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) ? -errno : 0;
}

/* Wait until one of what `epoll` watches has news, at most `milliseconds` (-1: without limit), and add 1 << number to `news` for
 * each, by words of 64 bits. Signals end the wait early. */
static inline void engine_socket_wait(int epoll, uint64_t *news, int milliseconds) {
  struct epoll_event events[64];
  int count = epoll_wait(epoll, events, 64, milliseconds);
  for (int i = 0; i < count; i++) news[events[i].data.u32 / 64] |= (uint64_t)1 << events[i].data.u32 % 64;
}

#endif
