/* Connected stream sockets that do not block. */
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
  ENGINE_SOCKET_SHORT = -ENOBUFS   /* the system has no memory for this call; a later one may succeed, and no event tells when */
};

/* What the error of a call on a connection means: 0 if there is nothing to do now, ENGINE_SOCKET_SHORT, or -errno. */
static inline int64_t engine_socket_error(int error) {
  if (error == EAGAIN || error == EWOULDBLOCK) return 0;
  return error == ENOBUFS || error == ENOMEM ? ENGINE_SOCKET_SHORT : -error;
}

/* Send what the parts hold: how many bytes were taken, 0 if there is no room now, as engine_socket_error. */
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

/* Receive into the parts, of which at least one has room: how many bytes came, 0 if there are none now, as
 * engine_socket_error. */
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

/* Have `epoll` tell, with `number`, whenever bytes come on `fd` or it takes bytes again: 0 or -errno. */
static inline int engine_socket_watch(int epoll, int fd, uint32_t number) {
  struct epoll_event event;
  memset(&event, 0, sizeof event);
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u32 = number;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) ? -errno : 0;
}

/* Wait until one of what `epoll` watches has news, at most `milliseconds` (-1: without limit), and add 1 << number to `news` for
 * each, by words of 64 bits; likewise to `ended` if nothing more comes on it. Signals end the wait early. */
static inline void engine_socket_wait(int epoll, uint64_t *news, uint64_t *ended, int milliseconds) {
  struct epoll_event events[64];
  int count = epoll_wait(epoll, events, 64, milliseconds);
  for (int i = 0; i < count; i++) {
    uint32_t number = events[i].data.u32;
    news[number / 64] |= (uint64_t)1 << number % 64;
    if (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) ended[number / 64] |= (uint64_t)1 << number % 64;
  }
}

/* Have the system end a TCP connection that is idle, and whose other side's system has not answered for so long; it asks once a
 * second. Other kinds of sockets have no use of that. TCP_USER_TIMEOUT would also end one whose other side takes nothing. */
static inline void engine_socket_keep(int fd, uint32_t silence_ms) {
  int on = 1, second = 1, times = (int)((silence_ms + 999) / 1000);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &second, sizeof second);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &second, sizeof second);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

/* Whether a TCP connection's other side has yet to acknowledge something. `silent` is for how many milliseconds nothing has come
 * from there, if the system has asked for an answer again and again, else 0. A process that is stopped is not silent: its system
 * answers, if only that there is no room. */
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
  return ioctl(fd, SIOCOUTQ, &waiting) == 0 && waiting > 0; /* a side that is stopped may be gone later */
}

/* Whether the other side's system has all that was sent. Who closes before may lose the rest: bytes that come afterwards are
 * answered by a reset, which takes back what is on its way. */
static inline int engine_socket_delivered(int fd) {
  int waiting = 0;
  return ioctl(fd, SIOCOUTQ, &waiting) != 0 || waiting == 0;
}

/* Acknowledge what has come at once, if it is a TCP connection: the other side waits for that. */
static inline void engine_socket_acknowledge(int fd) {
  int at_once = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &at_once, sizeof at_once);
}

#endif
