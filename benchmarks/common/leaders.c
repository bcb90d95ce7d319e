/* Plays the leaders of all hosts but the first, and the lanes of their ranks, to a real rank 0.
 *
 *   leaders SIZE HOST_SIZE TENSORS STEPS PACE_US BACKWARD_MS STEP_MS FD...
 *
 * Ranks from HOST_SIZE on are played, HOST_SIZE to a host. The first descriptors are trunks, by host, the others are lanes, by the
 * rank that is played and then one rank of the real host: all connected to their ranks. All played ranks do the same: in each step
 * they submit TENSORS names evenly over BACKWARD_MS, and wait for all of them. A leader tells what is new every PACE_US, as real
 * ones do, each at a time of its own. What tensors hold is not played: on lanes the ranks say that they have done everything.
 *
 * Prints, for each step, the nanoseconds from its first submission until it is done.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "engine_ext/transport/frames.h"

enum { HOSTS_MOST = 256, OUT_BYTES = 1 << 21, TURN_BYTES = 1 << 16 };

typedef struct {
  int fd, first, count;        /* of the ranks that it speaks for */
  engine_frame head;           /* of the frame that comes in */
  uint32_t came;               /* bytes of it */
  char *payload;               /* FRAME_LONGEST */
  uint64_t drained[MAX_RANKS]; /* by rank: bytes of its request ring that were read */
  uint64_t requested;          /* bytes of requests that it has sent for each of its ranks */
  uint64_t tail;               /* of the schedule, as it has been told */
  uint64_t told;               /* cursor that it has told */
  uint64_t arrivals, waits;    /* as it has told */
  uint32_t waiting;            /* whether its ranks wait for all, as it has told */
  uint64_t ready[ID_WORDS];    /* as it has told */
  char *out;                   /* OUT_BYTES: what waits to be sent */
  size_t from, to;             /* of it */
} trunk;

static trunk trunks[HOSTS_MOST];
static int hosts, tensors, epoll_fd, *id_of;
static uint64_t *by_id;        /* by id: 1 + number of the tensor */
static uint64_t executed;      /* operations of all entries so far */
static uint64_t bits[ID_WORDS], arrivals, waits, head; /* of every played rank, now */
static uint32_t waiting;
static char *requests;         /* all that is ever requested, as it lies in the ring */
static uint64_t *words;        /* the schedule from its beginning, one step of it */
static uint64_t taken;         /* words of the schedule that have been looked at */

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void fail(const char *what) {
  fprintf(stderr, "leaders: %s\n", what);
  exit(1);
}

static void flush(trunk *t) {
  while (t->from < t->to) {
    ssize_t sent = send(t->fd, t->out + t->from, t->to - t->from, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (sent < 0) fail("a trunk has ended");
    t->from += (size_t)sent;
  }
  t->from = t->to = 0;
}

static void add(trunk *t, const void *data, size_t nbytes) {
  if (t->to + nbytes > OUT_BYTES) fail("too much waits to be sent");
  memcpy(t->out + t->to, data, nbytes);
  t->to += nbytes;
}

static void add_frame(trunk *t, int type, int rank, const void *data, uint32_t nbytes, uint64_t position) {
  engine_frame frame = {.bytes = nbytes, .type = (uint16_t)type, .rank = rank, .position = position};
  add(t, &frame, sizeof frame);
  add(t, data, nbytes);
}

/* All that is to be requested: TENSORS names, in the order in which a rank submits them. */
static void write_requests(void) {
  uint64_t place = 0;
  requests = calloc((size_t)tensors + 1, 512);
  if (!requests) fail("no memory");
  for (int k = 0; k < tensors; k++) {
    char name[64];
    int length = snprintf(name, sizeof name, "tensor.%d", k);
    uint32_t nbytes = (uint32_t)(sizeof(engine_request) + (size_t)length + 7) / 8 * 8;
    if (REQUEST_BYTES - place % REQUEST_BYTES < nbytes) place += REQUEST_BYTES - place % REQUEST_BYTES; /* zeros: go on there */
    engine_request *request = (engine_request *)(requests + place);
    request->bytes = nbytes, request->name_bytes = (uint16_t)length, request->submitted = now_ns();
    request->meta.kind = KIND_ALLREDUCE, request->meta.dtype = ENGINE_FLOAT32, request->meta.op = ENGINE_SUM;
    request->meta.prescale = request->meta.postscale = 1.0, request->meta.shared = -1;
    request->meta.ndim = 1, request->meta.dims[0] = 1;
    memcpy(request + 1, name, (size_t)length);
    place += nbytes;
  }
  head = place;
}

static uint32_t put(engine_word *list, uint32_t count, uint64_t offset, uint32_t nbytes, uint64_t value) {
  list[count].offset = (uint32_t)offset, list[count].bytes = nbytes, list[count].value = value;
  return count + 1;
}

/* Requests as far as there is room in the ring of the coordinator's host. Whether any were sent. */
static int tell_requests(trunk *t) {
  uint64_t room = REQUEST_BYTES, end;
  for (int r = t->first; r < t->first + t->count; r++) {
    uint64_t left = t->drained[r] + REQUEST_BYTES - t->requested;
    if (left < room) room = left;
  }
  end = t->requested + room < head ? t->requested + room : head;
  /* Whole records only: as many as there are. */
  uint64_t place = t->requested, whole = 0;
  while (place < end) {
    uint32_t nbytes = ((engine_request *)(requests + place))->bytes;
    uint64_t next = nbytes ? place + nbytes : place + REQUEST_BYTES - place % REQUEST_BYTES;
    if (next > end) break;
    place = next;
    whole += nbytes != 0;
  }
  if (place == t->requested || t->to > OUT_BYTES / 4) return 0;
  for (int r = t->first; r < t->first + t->count; r++) {
    uint64_t begin = t->requested;
    engine_word list[2];
    while (begin < place) {
      uint64_t most = REQUEST_BYTES - begin % REQUEST_BYTES, nbytes = place - begin < most ? place - begin : most;
      add_frame(t, FRAME_REQUESTS, r, requests + begin, (uint32_t)nbytes, begin);
      begin += nbytes;
    }
    put(list, put(list, 0, offsetof(rank_page, request_head), 8, place), offsetof(rank_page, arrivals), 8, t->arrivals + whole);
    add_frame(t, FRAME_WORDS, r, list, sizeof list, 0);
  }
  t->requested = place;
  t->arrivals += whole;
  flush(t);
  return 1;
}

/* What is new of the ranks of a host, as a leader tells it. */
static void tell(trunk *t) {
  engine_word list[ID_WORDS + 8];
  uint32_t count = 0;
  for (int w = 0; w < ID_WORDS; w++)
    if (bits[w] != t->ready[w])
      count = put(list, count, offsetof(rank_page, ready) + 8u * (unsigned)w, 8, t->ready[w] = bits[w]);
  /* Behind the bits, as a leader tells it: whoever sees that a host waits for all sees all that it has submitted. */
  if (waits != t->waits) count = put(list, count, offsetof(rank_page, wait_all), 4, t->waiting = waiting);
  if (arrivals > t->arrivals) count = put(list, count, offsetof(rank_page, arrivals), 8, t->arrivals = arrivals);
  if (waits != t->waits) count = put(list, count, offsetof(rank_page, waits), 8, t->waits = waits);
  if (t->tail != t->told) count = put(list, count, offsetof(rank_page, cursor), 8, t->told = t->tail);
  for (int r = t->first; count && r < t->first + t->count; r++)
    add_frame(t, FRAME_WORDS, r, list, count * (uint32_t)sizeof *list, 0);
  flush(t);
}

/* The next words of the schedule, on the first trunk alone: who is called how, and what was executed. */
static void execute(uint64_t tail) {
  while (taken < tail) {
    const engine_entry *entry = (const engine_entry *)&words[taken % RING_WORDS];
    if (entry->words == 0) fail("an entry without words");
    if (entry->type == ENTRY_DEFINE) {
      char number[16] = "";              /* behind "tensor."; a name ends without a zero */
      memcpy(number, (const char *)(entry + 1) + 7, (size_t)entry->name_bytes - 7);
      int k = atoi(number);
      id_of[k] = entry->id, by_id[entry->id] = 1 + (uint64_t)k;
    } else if (entry->type == ENTRY_BATCH || entry->type == ENTRY_SKIP) {
      executed += entry->items;
    } else if (entry->type == ENTRY_ERROR) {
      fail("the coordinator has found a mismatch");
    }
    taken += entry->words;
  }
}

static void take(trunk *t) {
  if (t->head.type == FRAME_SCHEDULE) {
    if (t == trunks) memcpy(&words[t->head.position % RING_WORDS], t->payload, t->head.bytes);
    t->tail = t->head.position + t->head.bytes / 8;
    if (t == trunks) execute(t->tail);
    if (t->tail - t->told > RING_WORDS / 16) tell(t);
  } else if (t->head.type == FRAME_WORDS && t->head.rank < 0) {
    const engine_word *list = (const engine_word *)t->payload;
    for (uint32_t k = 0; k < t->head.bytes / sizeof *list; k++) {
      uint64_t at = list[k].offset - offsetof(coordinator_page, drained);
      if (at < 8 * MAX_RANKS) t->drained[at / 8] = list[k].value;
      if (list[k].offset == offsetof(coordinator_page, schedule_full) && list[k].value) tell(t);
    }
  } else if (t->head.type == FRAME_CAUSE) {
    fail(((engine_failure_cause *)t->payload)->reason);
  }
}

static void receive(trunk *t) {
  for (;;) {
    int in_head = t->came < sizeof t->head;
    char *to = in_head ? (char *)&t->head + t->came : t->payload + (t->came - sizeof t->head);
    size_t room = in_head ? sizeof t->head - t->came : t->head.bytes - (t->came - sizeof t->head);
    ssize_t came = room ? recv(t->fd, to, room, MSG_DONTWAIT) : 0;
    if (room && came < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (room && came <= 0) fail("rank 0 has ended a trunk");
    t->came += (uint32_t)came;
    if (t->came >= sizeof t->head && t->came - sizeof t->head == t->head.bytes) {
      take(t);
      t->came = 0;
    }
  }
}

/* Take in what has come, at most until `until`. */
static void serve(uint64_t until) {
  static char sink[1 << 18];
  struct epoll_event events[64];
  for (;;) {
    uint64_t now = now_ns(), left = now < until ? until - now : 0;
    struct timespec wait = {.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
    int count = epoll_pwait2(epoll_fd, events, 64, &wait, NULL);
    for (int i = 0; i < count; i++) {
      int number = (int)events[i].data.u32;
      if (number < hosts) {
        receive(&trunks[number]);
        flush(&trunks[number]);
      } else if (recv(number - hosts, sink, sizeof sink, MSG_DONTWAIT) == 0) {
        fail("a lane has ended");
      }
    }
    if (count <= 0 || now_ns() >= until) return;
  }
}

static void watch(int fd, uint32_t number) {
  struct epoll_event event = {.events = EPOLLIN, .data.u32 = number};
  if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event)) fail("epoll");
}

/* Say on a lane that its rank has passed all chunks there will ever be. */
static void be_done(int fd) {
  uint64_t progress[3] = {(uint64_t)1 << 40, (uint64_t)1 << 40, (uint64_t)1 << 40};
  engine_frame frame = {.bytes = sizeof progress, .type = FRAME_PROGRESS};
  if (send(fd, &frame, sizeof frame, MSG_NOSIGNAL) < 0 || send(fd, progress, sizeof progress, MSG_NOSIGNAL) < 0) fail("lane");
}

static void submit_until(int *submitted, int end) {
  for (; *submitted < end; ++*submitted) {
    int id = id_of[*submitted];
    bits[id / 64] ^= (uint64_t)1 << id % 64;
    arrivals++;
  }
}

int main(int argc, char **argv) {
  if (argc < 8) fail("usage");
  int size = atoi(argv[1]), host_size = atoi(argv[2]), steps = atoi(argv[4]);
  uint64_t pace = (uint64_t)atoll(argv[5]) * 1000, backward = (uint64_t)atoll(argv[6]) * 1000000;
  uint64_t whole = (uint64_t)atoll(argv[7]) * 1000000;
  tensors = atoi(argv[3]);
  hosts = (size - 1) / host_size;        /* that are played */
  epoll_fd = epoll_create1(0);
  id_of = calloc((size_t)tensors, sizeof *id_of), by_id = calloc(IDS, 8), words = calloc(RING_WORDS, 8);
  for (int h = 0; h < hosts; h++) {
    trunk *t = &trunks[h];
    t->fd = atoi(argv[8 + h]), t->first = (h + 1) * host_size;
    t->count = size - t->first < host_size ? size - t->first : host_size;
    t->payload = malloc(FRAME_LONGEST), t->out = malloc(OUT_BYTES);
    watch(t->fd, (uint32_t)h);
  }
  for (int k = 8 + hosts; k < argc; k++) {
    watch(atoi(argv[k]), (uint32_t)(hosts + atoi(argv[k])));
    be_done(atoi(argv[k]));
  }
  write_requests();
  for (int step = 0; step < steps; step++) {
    uint64_t begun = now_ns(), end = executed + (uint64_t)tensors, *due = calloc((size_t)hosts, 8);
    int submitted = 0;
    if (waiting) waiting = 0, waits++;   /* told with the first bits */
    for (int h = 0; h < hosts; h++) due[h] = begun + pace * (uint64_t)h / (uint64_t)hosts;
    if (step == 0) waiting = 1, waits++;
    while (executed < end) {
      uint64_t now = now_ns(), next = now + 1000000;
      if (step == 0) {
        for (int h = 0; h < hosts; h++)
          if (tell_requests(&trunks[h]) || trunks[h].waits != waits) tell(&trunks[h]);
      } else if (submitted < tensors || trunks[hosts - 1].waits != waits) {
        uint64_t age = now - begun;
        submit_until(&submitted, age >= backward ? tensors : (int)((uint64_t)tensors * age / backward));
        if (submitted == tensors && !waiting) {      /* the backward pass is over: who waits is told of at once */
          waiting = 1, waits++;
          for (int h = 0; h < hosts; h++) due[h] = now;
        }
        for (int h = 0; h < hosts; h++) {
          if (now >= due[h]) {
            tell(&trunks[h]);
            due[h] = now + pace;
          }
          if (due[h] < next) next = due[h];
        }
      }
      serve(next);
    }
    if (step == 0) arrivals = (uint64_t)tensors;
    printf("%llu\n", (unsigned long long)(now_ns() - begun));
    fflush(stdout);
    while (step + 1 < steps && now_ns() < begun + whole) serve(begun + whole);
    free(due);
  }
  serve(now_ns() + 100000000);
  return 0;
}
