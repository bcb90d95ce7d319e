/* A long cable: passes every packet from one interface to another and back, each a constant time later.
 *
 *   delay ONE OTHER MICROSECONDS
 *
 * Needs CAP_NET_RAW in the network namespace of both. Prints a line when it is ready, and ends when its standard input
 * does. Packets stay as large as the hosts' stacks have made them (PACKET_VNET_HDR), so few pass. It is for kernels
 * without the queueing discipline netem, which delays as well.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { WAITING = 4096, LARGEST = (1 << 16) + 256, BUFFER = 64 << 20 };

typedef struct {
  uint64_t due;  /* nanoseconds of the monotonic clock */
  ssize_t size;
  char *bytes;
} packet;

/* One direction. The packets from `first` on are on their way, in order; WAITING of them at most, then `from` keeps them. */
typedef struct {
  int from, to;
  unsigned first, count;
  packet packets[WAITING];
} line;

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void fail(const char *what) {
  fprintf(stderr, "delay: %s: %s\n", what, strerror(errno));
  exit(1);
}

static int opened(const char *interface) {
  int fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, htons(ETH_P_ALL)), on = 1, buffer = BUFFER;
  if (fd < 0) fail("socket");
  struct sockaddr_ll where = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL)};
  where.sll_ifindex = (int)if_nametoindex(interface);
  if (where.sll_ifindex == 0) fail(interface);
  if (setsockopt(fd, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on)) fail("PACKET_VNET_HDR");
  if (setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on)) fail("PACKET_IGNORE_OUTGOING");
  if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &buffer, sizeof buffer)) fail("SO_RCVBUFFORCE");
  if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &buffer, sizeof buffer)) fail("SO_SNDBUFFORCE");
  if (bind(fd, (struct sockaddr *)&where, sizeof where)) fail("bind");
  return fd;
}

static void take(line *l, uint64_t delay) {
  while (l->count < WAITING) {
    packet *p = &l->packets[(l->first + l->count) % WAITING];
    if (!p->bytes && !(p->bytes = malloc(LARGEST))) fail("malloc");
    p->size = recv(l->from, p->bytes, LARGEST, 0);
    if (p->size < 0) return;
    p->due = now() + delay;
    l->count++;
  }
}

/* Sends what is due; returns when the next packet is, or UINT64_MAX. A packet that is refused is lost, as on a cable. */
static uint64_t pass(line *l) {
  while (l->count) {
    packet *p = &l->packets[l->first];
    if (p->due > now()) return p->due;
    if (send(l->to, p->bytes, (size_t)p->size, 0) < 0 && errno == EAGAIN) return now() + 50000;
    l->first = (l->first + 1) % WAITING;
    l->count--;
  }
  return UINT64_MAX;
}

int main(int argc, char **argv) {
  static line lines[2];
  if (argc != 4) return fprintf(stderr, "usage: delay ONE OTHER MICROSECONDS\n"), 2;
  uint64_t delay = strtoull(argv[3], NULL, 10) * 1000;
  int one = opened(argv[1]), other = opened(argv[2]);
  lines[0].from = lines[1].to = one;
  lines[1].from = lines[0].to = other;
  puts("ready");
  fflush(stdout);
  struct pollfd waits[3] = {{.fd = one, .events = POLLIN}, {.fd = other, .events = POLLIN}, {.fd = 0, .events = POLLIN}};
  while (!waits[2].revents) {
    uint64_t due = UINT64_MAX;
    for (int k = 0; k < 2; k++) {
      take(&lines[k], delay);
      uint64_t next = pass(&lines[k]);
      if (next < due) due = next;
      waits[k].events = lines[k].count < WAITING ? POLLIN : 0;
    }
    uint64_t here = now(), left = due > here ? due - here : 0;
    struct timespec most = {.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
    ppoll(waits, 3, due == UINT64_MAX ? NULL : &most, NULL);
  }
  return 0;
}
