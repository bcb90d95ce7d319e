/* Connected, non-blocking stream sockets. */
#ifndef ENGINE_PLATFORM_SOCKETS_H
#define ENGINE_PLATFORM_SOCKETS_H

#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum {
  ENGINE_SOCKET_ENDED = -ENOTCONN, /* the other side has closed the connection */
  ENGINE_SOCKET_SHORT = -ENOBUFS   /* the system lacks memory for this call; a later one may succeed, but no event announces it */
};

/* Convert the errno of a call on a connection: 0 if it would block, ENGINE_SOCKET_SHORT, or -errno. */
static inline int64_t engine_socket_error(int error) {
  if (error == EAGAIN || error == EWOULDBLOCK) return 0;
  return error == ENOBUFS || error == ENOMEM ? ENGINE_SOCKET_SHORT : -error;
}

/* Send the contents of the parts. Return the number of bytes taken, 0 if there is no room now, or an error as of
 * engine_socket_error. */
static inline int64_t engine_socket_send(int fd, struct iovec *parts, int count) {
  struct msghdr message;
  memset(&message, 0, sizeof message);
  message.msg_iov = parts;
  message.msg_iovlen = (size_t)count;
  for (;;) {
    ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (errno != EINTR) return engine_socket_error(errno);
  }
}

/* Receive into the parts, of which at least one has room. Return the number of bytes that came, 0 if there are none now,
 * ENGINE_SOCKET_ENDED, or an error as of engine_socket_error. */
static inline int64_t engine_socket_receive(int fd, struct iovec *parts, int count) {
  struct msghdr message;
  memset(&message, 0, sizeof message);
  message.msg_iov = parts;
  message.msg_iovlen = (size_t)count;
  for (;;) {
    ssize_t came = recvmsg(fd, &message, MSG_DONTWAIT);
    if (came > 0) return came;
    if (came == 0) return ENGINE_SOCKET_ENDED;
    if (errno != EINTR) return engine_socket_error(errno);
  }
}

/* Make `epoll` report `number` whenever `fd` becomes readable or writable (edge-triggered); return 0 or -errno. */
static inline int engine_socket_watch(int epoll, int fd, uint32_t number) {
  struct epoll_event event;
  memset(&event, 0, sizeof event);
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u32 = number;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) ? -errno : 0;
}

/* Note the events of the watched sockets since the last call: set bit `number` of `news`, in words of 64 bits, for each socket
 * with an event. Set it in `ended` too if nothing more comes on the socket. Return the number of sockets with events, at most 64;
 * then there may be more. */
static inline int engine_socket_look(int epoll, uint64_t *news, uint64_t *ended) {
  struct epoll_event events[64];
  int count = epoll_wait(epoll, events, 64, 0);
  for (int i = 0; i < count; i++) {
    uint32_t number = events[i].data.u32;
    news[number / 64] |= (uint64_t)1 << number % 64;
    if (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) ended[number / 64] |= (uint64_t)1 << number % 64;
  }
  return count;
}

/* Make `sleeper`, another epoll, report 0 once for each new event of `epoll`; return 0 or -errno. */
static inline int engine_socket_nest(int sleeper, int epoll) {
  struct epoll_event event;
  memset(&event, 0, sizeof event);
  event.events = EPOLLIN | EPOLLET;
  return epoll_ctl(sleeper, EPOLL_CTL_ADD, epoll, &event) ? -errno : 0;
}

/* Have `sleeper` report no events of `epoll` (`quiet`), or report them again, at once if there are any. The system does this in
 * one step: an event is either reported now or was there before. */
static inline void engine_socket_hush(int sleeper, int epoll, int quiet) {
  struct epoll_event event;
  memset(&event, 0, sizeof event);
  event.events = quiet ? 0 : EPOLLIN | EPOLLET;
  epoll_ctl(sleeper, EPOLL_CTL_MOD, epoll, &event);
}

/* Sleep until `sleeper` reports something, for at most `milliseconds` (-1: no limit). Return whether something other than new
 * events of the nested epoll may have ended the sleep: the bell, the time, or a signal. */
static inline int engine_socket_sleep(int sleeper, int milliseconds) {
  struct epoll_event events[2];
  int count = epoll_wait(sleeper, events, 2, milliseconds);
  return count != 1 || events[0].data.u32 != 0;
}

/* Make the system close an idle TCP connection whose peer system has not answered for `silence_ms`; it probes once a second.
 * Other kinds of sockets are unaffected. TCP_USER_TIMEOUT would also close a connection whose peer reads nothing. */
static inline void engine_socket_keep(int fd, uint32_t silence_ms) {
  int on = 1, second = 1, times = (int)((silence_ms + 999) / 1000);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &second, sizeof second);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &second, sizeof second);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

/* Return whether a TCP connection's peer has yet to acknowledge something. `silent` becomes the milliseconds since anything came
 * from it, if the system has repeatedly asked for an answer; else 0. A stopped process is not silent: its system answers, if only
 * that there is no room. */
static inline int engine_socket_owed(int fd, uint32_t *silent) {
  enum { ASKED = 3 };
  struct tcp_info info;
  socklen_t length = sizeof info;
  int waiting = 0;
  memset(&info, 0, sizeof info);
  *silent = 0;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length)) return 0; /* another kind of socket */
  if (info.tcpi_retransmits >= ASKED || info.tcpi_probes >= ASKED) *silent = info.tcpi_last_ack_recv;
  if (info.tcpi_unacked || info.tcpi_probes) return 1;
  return ioctl(fd, SIOCOUTQ, &waiting) == 0 && waiting > 0; /* the system of a stopped peer may be lost later */
}

/* Return whether the peer's system has received all that was sent. Closing before may lose the rest, because bytes that arrive
 * afterwards are answered by a reset, which discards what is in flight. */
static inline int engine_socket_delivered(int fd) {
  int waiting = 0;
  return ioctl(fd, SIOCOUTQ, &waiting) != 0 || waiting == 0;
}

/* Acknowledge received bytes at once on a TCP connection, because the peer waits for that. */
static inline void engine_socket_acknowledge(int fd) {
  int at_once = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &at_once, sizeof at_once);
}

#endif
