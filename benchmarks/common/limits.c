/* What this machine allows in this minute: the figures that a shared-memory allreduce is measured against.
 *
 *   cc -O3 -march=native -pthread -o limits limits.c
 *   ./limits -n 2 -s 4096,16777216,104857600 -i 41          every row and size, one JSON object per line
 *   ./limits -n 2 -m 104857600 -                            serve: read "row bytes warmup iterations" lines from stdin
 *
 *   -n ranks  -b cpu,cpu,... (one per rank)  -s sizes in bytes  -i iterations  -c chunk bytes  -m largest size in bytes
 *
 * One process per rank. Rows:
 *   memcpy             every rank copies one private buffer to another, all at the same time
 *   private_cached     sum of private float32 tensors through slots in shared memory, ordinary stores
 *   private_streaming  the same with non-temporal stores into shared memory
 *   in_segment         sum of tensors that already live in shared memory
 *   futex              round trip of a futex wake between rank 0 and rank 1 (bytes are ignored)
 *
 * Before every iteration each rank writes its whole tensor, as a backward pass would have, and all ranks meet. An iteration's
 * time is the largest of the ranks' own times. Sums are taken in rank order and checked.
 *
 * A sketch that shows what can be reached: float32 and addition only, and a rank that dies stops the program.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#define FENCE_STREAMED() _mm_sfence()
#else
#define PAUSE() ((void)0)
#define FENCE_STREAMED() ((void)0)          /* no streaming stores here: the row equals the cached one */
#endif

enum { MAX_RANKS = 64, SLOTS = 2, MAX_ITERATIONS = 20000, MAX_SIZES = 64, LINE = 64, FUTEX_TRIPS = 20 };
static const double FUTEX_DELAY = 100e-6;     /* seconds */
enum row { MEMCPY, PRIVATE_CACHED, PRIVATE_STREAMING, IN_SEGMENT, FUTEX, ROWS };
static const char *const ROW_NAMES[ROWS] = {"memcpy", "private_cached", "private_streaming", "in_segment", "futex"};

typedef struct { _Alignas(LINE) atomic_ulong value; } flag;
typedef struct { _Alignas(LINE) atomic_int value; } word;

/* Everything the ranks share besides slots and tensors. */
struct shared {
  word order;                                   /* futex: counts commands; the ranks sleep on it between commands */
  enum row row;                                 /* the command: written by rank 0 before `order`, which publishes it */
  size_t bytes;
  int warmup, iterations;
  atomic_int wrong;                             /* a rank found a wrong sum */
  flag packed[MAX_RANKS], reduced[MAX_RANKS], met[MAX_RANKS];
  word ping[2];
  double seconds[MAX_RANKS][MAX_ITERATIONS];
};

struct job {
  int ranks, rank, crowded;                     /* crowded: more ranks than processors, so spinning only delays */
  size_t chunk, largest;
  struct shared *shared;
  char *slots, *tensors;                        /* ranks * SLOTS * chunk bytes; ranks * largest bytes */
  float *x, *y;                                 /* private memory */
  unsigned long chunks_done, meetings;
  pid_t children[MAX_RANKS];                    /* rank 0 only; [0] is unused */
};

static void fail(const char *what) {
  fprintf(stderr, "limits: %s: %s\n", what, strerror(errno));
  exit(1);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void wait_for(const struct job *j, flag *f, unsigned long at_least) {
  int spins = j->crowded ? INT_MAX : 0;
  /* Acquire: pairs with the release store of whoever advances the flag. */
  while (atomic_load_explicit(&f->value, memory_order_acquire) < at_least) {
    if (spins > 4000) sched_yield();
    else { PAUSE(); spins++; }
  }
}

static void publish(flag *f, unsigned long value) {
  atomic_store_explicit(&f->value, value, memory_order_release); /* pairs with the acquire in wait_for */
}

static void wait_all(const struct job *j, flag *flags, unsigned long at_least) {
  for (int r = 0; r < j->ranks; r++) if (r != j->rank) wait_for(j, &flags[r], at_least);
}

static void meet(struct job *j) {
  publish(&j->shared->met[j->rank], ++j->meetings);
  wait_all(j, j->shared->met, j->meetings);
}

static float *slot(const struct job *j, int rank, unsigned long chunk) {
  return (float *)(j->slots + ((size_t)rank * SLOTS + chunk % SLOTS) * j->chunk);
}

static float *tensor(const struct job *j, int rank) { return (float *)(j->tensors + (size_t)rank * j->largest); }

/* First element of a rank's part of n elements; parts start on a cache line. */
static size_t part(const struct job *j, size_t n, int rank) {
  size_t at = (n * (size_t)rank / (size_t)j->ranks + 15) / 16 * 16;
  return rank == j->ranks || at > n ? n : at;
}

static void copy(float *to, const float *from, size_t n, int streaming) {
  if (!streaming) { memcpy(to, from, n * sizeof(float)); return; }
  size_t i = 0;
#if defined(__AVX512F__)
  for (; i < n && (uintptr_t)(to + i) % 64; i++) to[i] = from[i];
  for (; i + 16 <= n; i += 16) _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
#elif defined(__AVX2__)
  for (; i < n && (uintptr_t)(to + i) % 32; i++) to[i] = from[i];
  for (; i + 8 <= n; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
#endif
  for (; i < n; i++) to[i] = from[i];
  FENCE_STREAMED();
}

/* Sum of two sources into two destinations; `shared` may be written past the caches. Sources may equal destinations. */
static void add_pair(const float *a, const float *b, float *own, float *shared, size_t n, int streaming) {
  size_t i = 0;
  if (streaming) {
#if defined(__AVX512F__)
    for (; i < n && (uintptr_t)(shared + i) % 64; i++) own[i] = shared[i] = a[i] + b[i];
    for (; i + 16 <= n; i += 16) {
      __m512 v = _mm512_add_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i));
      _mm512_storeu_ps(own + i, v);
      _mm512_stream_ps(shared + i, v);
    }
#elif defined(__AVX2__)
    for (; i < n && (uintptr_t)(shared + i) % 32; i++) own[i] = shared[i] = a[i] + b[i];
    for (; i + 8 <= n; i += 8) {
      __m256 v = _mm256_add_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i));
      _mm256_storeu_ps(own + i, v);
      _mm256_stream_ps(shared + i, v);
    }
#endif
  }
  for (; i < n; i++) { float v = a[i] + b[i]; own[i] = v; shared[i] = v; }
  if (streaming) FENCE_STREAMED();
}

/* Sum over ranks 0, 1, ... of `from[rank]`, a cache-resident block at a time, into every one of `to`. */
static void add_many(float **from, int sources, float **to, int targets, size_t n) {
  enum { BLOCK = 2048 };
  float sum[BLOCK];
  for (size_t o = 0; o < n; o += BLOCK) {
    size_t m = n - o < BLOCK ? n - o : BLOCK;
    memcpy(sum, from[0] + o, m * sizeof(float));
    for (int s = 1; s < sources; s++) for (size_t i = 0; i < m; i++) sum[i] += from[s][o + i];
    for (int t = 0; t < targets; t++) memcpy(to[t] + o, sum, m * sizeof(float));
  }
}

/* Each rank sums its own part of a chunk straight from its private tensor; only the other parts pass through the slots. A slot
 * is free again when it comes round: every rank publishes `packed` of a chunk after it has copied out of the chunk before. */
static void allreduce_private(struct job *j, float *x, size_t n, int streaming) {
  size_t per_chunk = j->chunk / sizeof(float);
  int me = j->rank;
  for (size_t o = 0; o < n; o += per_chunk) {
    size_t m = n - o < per_chunk ? n - o : per_chunk, first = part(j, m, me), last = part(j, m, me + 1), len = last - first;
    unsigned long c = ++j->chunks_done;
    float *mine = x + o, *out = slot(j, me, c);
    copy(out, mine, first, streaming);
    copy(out + last, mine + last, m - last, streaming);
    publish(&j->shared->packed[me], c);
    wait_all(j, j->shared->packed, c);
    if (j->ranks == 2) {
      float *theirs = slot(j, 1 - me, c) + first, *own = mine + first;
      add_pair(own, theirs, own, out + first, len, streaming);
    } else {
      float *from[MAX_RANKS], *to[2] = {mine + first, out + first};
      for (int r = 0; r < j->ranks; r++) from[r] = (r == me ? mine : slot(j, r, c)) + first;
      if (streaming) { add_many(from, j->ranks, to, 1, len); copy(to[1], to[0], len, 1); }
      else add_many(from, j->ranks, to, 2, len);
    }
    publish(&j->shared->reduced[me], c);
    wait_all(j, j->shared->reduced, c);
    for (int r = 0; r < j->ranks; r++) {
      if (r == me) continue;
      size_t a = part(j, m, r), b = part(j, m, r + 1);
      memcpy(mine + a, slot(j, r, c) + a, (b - a) * sizeof(float));
    }
  }
}

/* Every rank sums its part and writes it into all tensors. */
static void allreduce_in_segment(struct job *j, size_t n) {
  size_t first = part(j, n, j->rank), len = part(j, n, j->rank + 1) - first;
  meet(j);
  if (j->ranks == 2) {
    float *a = tensor(j, 0) + first, *b = tensor(j, 1) + first;
    add_pair(a, b, a, b, len, 0);
  } else {
    float *all[MAX_RANKS];
    for (int r = 0; r < j->ranks; r++) all[r] = tensor(j, r) + first;
    add_many(all, j->ranks, all, j->ranks, len);
  }
  meet(j);
}

static void futex(word *w, int op, int value) { syscall(SYS_futex, &w->value, op, value, NULL, NULL, 0); }

/* One sample: the mean of FUTEX_TRIPS round trips between ranks 0 and 1. Rank 0 gives rank 1 time to fall asleep before it
 * starts the clock, and is asleep itself by the time rank 1 has woken and answers. */
static double round_trip(struct job *j) {
  if (j->rank > 1) return 0;
  word *mine = &j->shared->ping[j->rank], *theirs = &j->shared->ping[1 - j->rank];
  double total = 0;
  for (int i = 0; i < FUTEX_TRIPS; i++) {
    double start = 0;
    if (j->rank == 0) {
      for (double until = now() + FUTEX_DELAY; now() < until;) PAUSE();
      start = now();
      atomic_fetch_add(&theirs->value, 1);
      futex(theirs, FUTEX_WAKE, 1);
    }
    while (atomic_load(&mine->value) == 0) futex(mine, FUTEX_WAIT, 0);
    atomic_fetch_sub(&mine->value, 1);
    if (j->rank == 0) total += now() - start;
    else { atomic_fetch_add(&theirs->value, 1); futex(theirs, FUTEX_WAKE, 1); }
  }
  return total / FUTEX_TRIPS;
}

static void check(struct job *j, const float *x, size_t n) {
  float sum = (float)(j->ranks * (j->ranks + 1) / 2);
  if (x[0] != sum || x[n / 2] != sum || x[n - 1] != sum) atomic_store(&j->shared->wrong, 1);
}

/* The command that lies in `shared`, on this rank. */
static void execute(struct job *j) {
  struct shared *s = j->shared;
  size_t n = s->bytes / sizeof(float);
  float *x = s->row == IN_SEGMENT ? tensor(j, j->rank) : j->x;
  for (int i = -s->warmup; i < s->iterations; i++) {
    if (s->row != FUTEX) for (size_t k = 0; k < n; k++) x[k] = (float)(j->rank + 1);
    meet(j);
    double start = now(), took;
    switch (s->row) {
      case MEMCPY: memcpy(j->y, x, s->bytes); break;
      case PRIVATE_CACHED: allreduce_private(j, x, n, 0); break;
      case PRIVATE_STREAMING: allreduce_private(j, x, n, 1); break;
      case IN_SEGMENT: allreduce_in_segment(j, n); break;
      default: break;
    }
    took = s->row == FUTEX ? round_trip(j) : now() - start;
    if (i >= 0) s->seconds[j->rank][i] = took;
    if (s->row != FUTEX && s->row != MEMCPY) check(j, x, n);
    if (s->row == MEMCPY) __asm__ volatile("" : : "r"(j->y) : "memory"); /* the copy may not be left out */
  }
  meet(j);
}

static void report(struct job *j) {
  struct shared *s = j->shared;
  if (atomic_load(&s->wrong)) { fprintf(stderr, "limits: wrong sum in row %s\n", ROW_NAMES[s->row]); exit(1); }
  printf("{\"row\": \"%s\", \"bytes\": %zu, \"ranks\": %d, \"seconds\": [", ROW_NAMES[s->row], s->bytes, j->ranks);
  for (int i = 0; i < s->iterations; i++) {
    double most = 0;
    for (int r = 0; r < j->ranks; r++) if (s->seconds[r][i] > most) most = s->seconds[r][i];
    printf("%s%.9f", i ? ", " : "", most);
  }
  printf("]}\n");
  fflush(stdout);
}

static void command(struct job *j, enum row row, size_t bytes, int warmup, int iterations) {
  struct shared *s = j->shared;
  s->row = row;
  s->bytes = bytes / sizeof(float) * sizeof(float);
  s->warmup = warmup;
  s->iterations = iterations;
  atomic_fetch_add(&s->order.value, 1);
  futex(&s->order, FUTEX_WAKE, INT_MAX);
  execute(j);
  report(j);
}

static void follow(struct job *j) {
  for (int seen = 0;; seen++) {
    while (atomic_load(&j->shared->order.value) == seen) futex(&j->shared->order, FUTEX_WAIT, seen);
    execute(j);
  }
}

static void serve(struct job *j) {
  char name[32];
  size_t bytes;
  int warmup, iterations;
  while (scanf("%31s %zu %d %d", name, &bytes, &warmup, &iterations) == 4) {
    int row = 0;
    while (row < ROWS && strcmp(name, ROW_NAMES[row])) row++;
    errno = EINVAL;
    if (row == ROWS || bytes < sizeof(float) || bytes > j->largest || warmup < 0 || iterations < 1 ||
        iterations > MAX_ITERATIONS || (row == FUTEX && j->ranks < 2)) fail(name);
    command(j, (enum row)row, bytes, warmup, iterations);
  }
}

static void *memory(size_t bytes, int flags) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) fail("mmap");
  memset(p, 0, bytes);
  return p;
}

static int numbers(char *text, size_t *values, int limit) {
  int n = 0;
  for (char *t = strtok(text, ","); t && n < limit; t = strtok(NULL, ",")) values[n++] = strtoull(t, NULL, 10);
  return n;
}

/* A rank that ends before rank 0 has failed: nobody will meet it again. */
static void child_ended(int number) {
  static const char text[] = "limits: a rank died\n";
  ssize_t ignored = write(STDERR_FILENO, text, sizeof text - 1);
  (void)ignored, (void)number;
  _exit(1);
}

static void start_ranks(struct job *j, const size_t *cpus, int bound) {
  pid_t parent = getpid();
  signal(SIGCHLD, child_ended);
  for (int r = 1; r < j->ranks && j->rank == 0; r++) {
    pid_t child = fork();
    if (child < 0) fail("fork");
    if (child > 0) {
      j->children[r] = child;
      continue;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    j->rank = r;
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  if (bound) CPU_SET((int)cpus[j->rank % bound], &set);
  if (bound && sched_setaffinity(0, sizeof set, &set)) fail("sched_setaffinity");
  j->x = memory(j->largest, MAP_PRIVATE);
  j->y = memory(j->largest, MAP_PRIVATE);
}

int main(int argc, char **argv) {
  static size_t cpus[MAX_RANKS], sizes[MAX_SIZES] = {4 << 10, 64 << 10, 1 << 20, 16 << 20, 100 << 20};
  struct job j = {.ranks = 2, .chunk = 512 << 10};
  int count = 5, bound = 0, iterations = 41;
  for (int o; (o = getopt(argc, argv, "n:b:s:i:c:m:")) != -1;) {
    if (o == 'n') j.ranks = atoi(optarg);
    else if (o == 'b') bound = numbers(optarg, cpus, MAX_RANKS);
    else if (o == 's') count = numbers(optarg, sizes, MAX_SIZES);
    else if (o == 'i') iterations = atoi(optarg);
    else if (o == 'c') j.chunk = strtoull(optarg, NULL, 10);
    else if (o == 'm') j.largest = strtoull(optarg, NULL, 10);
    else return 2;
  }
  errno = EINVAL;
  if (j.ranks < 1 || j.ranks > MAX_RANKS) fail("-n");
  if (iterations < 1 || iterations > MAX_ITERATIONS) fail("-i");
  if (j.chunk < 4096 || j.chunk % LINE) fail("-c");
  if (!j.largest) for (int k = 0; k < count; k++) if (sizes[k] > j.largest) j.largest = sizes[k];
  j.largest = (j.largest + 4095) / 4096 * 4096;
  j.crowded = j.ranks > sysconf(_SC_NPROCESSORS_ONLN);
  j.shared = memory(sizeof *j.shared, MAP_SHARED);
  j.slots = memory((size_t)j.ranks * SLOTS * j.chunk, MAP_SHARED);
  j.tensors = memory((size_t)j.ranks * j.largest, MAP_SHARED);
  start_ranks(&j, cpus, bound);
  if (j.rank) follow(&j);
  if (optind < argc && !strcmp(argv[optind], "-")) serve(&j);
  else {
    for (int row = MEMCPY; row < FUTEX; row++)
      for (int k = 0; k < count; k++) command(&j, (enum row)row, sizes[k], 2, iterations);
    if (j.ranks > 1) command(&j, FUTEX, 4, 1, iterations);
  }
  signal(SIGCHLD, SIG_DFL);
  for (int r = 1; r < j.ranks; r++) {
    kill(j.children[r], SIGKILL);
    waitpid(j.children[r], NULL, 0);
  }
  return 0; /* on any other way out the kernel ends the other ranks: see start_ranks */
}
