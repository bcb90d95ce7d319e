/* Runs the threads of one process one at a time, in an order that a seed or a list chooses, and in a time of its own.
 *
 * Every step of the protocol (schedule.h) is a point at which another thread may be let on. A thread that waits on a futex, for
 * a lock or for another thread's end is not let on before it can go on. When nobody can, time jumps to the earliest timeout; a
 * jump of `too_long` or more, or nobody to wait for, is a lost wake-up: the last steps are printed and the process ends.
 *
 * A thread that holds the GIL is never stopped at a point: the others could not go on to give it back. So what Python's side of
 * the engine does under the GIL is one step.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { THREADS = 64, STEPS = 1 << 20, SHOWN = 300, LOST = 70 };
enum { ABSENT, READY, RESTING, ON_WORD, ON_MUTEX, ON_END, DONE };
static const char *const STATES[] = {"absent", "ready", "looks now and then", "waits on a futex", "waits for a lock", "waits for a thread's end", "done"};

typedef struct thread {
  int state;
  char name[32];
  const void *word;     /* what it waits for */
  uint64_t deadline;    /* 0: none */
  uint64_t since;       /* order of waiting; resting: the news there were when it looked */
  const char *where;
  pthread_t self;
  pthread_cond_t turn;
} thread;

typedef struct step {
  uint8_t thread;
  const char *what, *where;
  const void *word;
} step;

extern int PyGILState_Check(void);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static thread threads[THREADS];
static int count, running = -1, active;
static uint64_t now, news, waits, dice, too_long, switch_per_1000;
static step steps[SHOWN];
static uint64_t step_count;
static uint8_t chosen[STEPS];
static uint64_t chosen_count;
static uint8_t *given;
static uint64_t given_count;
static __thread int me = -1;

static uint64_t roll(void) { /* splitmix64 */
  uint64_t z = dice += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

static void lost(const char *why) {
  uint64_t k, shown = step_count < SHOWN ? step_count : SHOWN;
  fprintf(stderr, "%s after %llu steps\n", why, (unsigned long long)step_count);
  for (k = step_count - shown; k < step_count; k++) {
    const step *s = &steps[k % SHOWN];
    fprintf(stderr, "  %-14s %-12s %p in %s\n", threads[s->thread].name, s->what, s->word, s->where);
  }
  for (k = 0; k < (uint64_t)count; k++)
    fprintf(stderr, "%s: %s, last in %s\n", threads[k].name, STATES[threads[k].state], threads[k].where);
  fflush(stderr);
  _exit(LOST);
}

/* Whether thread `k` may go on. Looking again is of no use before somebody else has taken a step. */
static int can_go(int k) {
  return threads[k].state == READY || (threads[k].state == RESTING && threads[k].since != news);
}

/* Who is next. `lock` is held. -1: all are done. */
static int choose(int may_stay) {
  int ready[THREADS], n = 0, k, first = -1, left = 0;
  for (k = 0; k < count; k++) {
    if (can_go(k))
      ready[n++] = k;
    if (threads[k].state != DONE)
      left = 1;
    if (threads[k].state == ON_WORD && threads[k].deadline && (first < 0 || threads[k].deadline < threads[first].deadline))
      first = k;
  }
  if (!left)
    return -1;
  if (n == 0) {
    if (first < 0)
      lost("nobody can go on");
    if (threads[first].deadline > now) {
      if (threads[first].deadline - now >= too_long)
        lost("nobody goes on but by a timeout");
      now = threads[first].deadline;
    }
    threads[first].state = READY;
    return first;
  }
  if (chosen_count < given_count && can_go(given[chosen_count]))
    k = given[chosen_count];
  else if (may_stay && threads[me].state == READY && roll() % 1000 >= switch_per_1000)
    k = me;
  else
    k = ready[roll() % (uint64_t)n];
  threads[k].state = READY;
  if (chosen_count < STEPS)
    chosen[chosen_count++] = (uint8_t)k;
  return k;
}

/* Let somebody go on; returns when it is this thread's turn again. `lock` is held. */
static void pass(int may_stay) {
  int next = choose(may_stay);
  if (next == me)
    return;
  running = next;
  if (next >= 0)
    pthread_cond_signal(&threads[next].turn);
  while (running != me && threads[me].state != DONE)
    pthread_cond_wait(&threads[me].turn, &lock);
}

static void note(const char *what, const char *where, const void *word) {
  steps[step_count++ % SHOWN] = (step){(uint8_t)me, what, where, word};
  threads[me].where = where;
  news++;
  now += 100;
}

static int enrol(const char *name) {
  int id;
  pthread_mutex_lock(&lock);
  id = count++;
  if (count > THREADS)
    abort();
  memset(&threads[id], 0, sizeof(thread));
  pthread_cond_init(&threads[id].turn, NULL);
  snprintf(threads[id].name, sizeof(threads[id].name), "%s", name);
  threads[id].state = READY;
  threads[id].where = "its start";
  pthread_mutex_unlock(&lock);
  return id;
}

static void await_turn(void) {
  threads[me].self = pthread_self();
  while (running != me)
    pthread_cond_wait(&threads[me].turn, &lock);
}

static void end(void) {
  int k;
  pthread_mutex_lock(&lock);
  threads[me].state = DONE;
  news++;
  for (k = 0; k < count; k++)
    if (threads[k].state == ON_END && threads[k].word == &threads[me])
      threads[k].state = READY;
  pass(0);
  me = -1;
  pthread_mutex_unlock(&lock);
}

/* ---- for the harness */

/* A new run. `order`: who goes on at the first points; then the seed decides. */
void schedule_begin(uint64_t seed, uint64_t per_1000, uint64_t jump_ns, const uint8_t *order, uint64_t orders) {
  count = 0, running = -1, active = 1, step_count = chosen_count = waits = news = 0;
  now = 1000000000, dice = seed, switch_per_1000 = per_1000, too_long = jump_ns;
  free(given);
  given = malloc(orders ? orders : 1);
  memcpy(given, order, given ? orders : 0);
  given_count = given ? orders : 0;
}

int schedule_enrol(const char *name) { return enrol(name); }

void schedule_enter(int id) {
  pthread_mutex_lock(&lock);
  me = id;
  await_turn();
  pthread_mutex_unlock(&lock);
}

void schedule_leave(void) { end(); }

/* Let others go on until there may be news; a thread that polls calls it between two looks. */
void schedule_rest(void) {
  pthread_mutex_lock(&lock);
  threads[me].state = RESTING;
  threads[me].since = news;
  threads[me].where = "a loop of looks";
  pass(0);
  pthread_mutex_unlock(&lock);
}

/* Start: everybody is enrolled. */
void schedule_go(void) {
  pthread_mutex_lock(&lock);
  running = choose(0);
  pthread_cond_signal(&threads[running].turn);
  pthread_mutex_unlock(&lock);
}

/* The run is over: what was chosen, and how many steps it had. */
uint64_t schedule_end(uint8_t *order, uint64_t room) {
  active = 0;
  memcpy(order, chosen, chosen_count < room ? chosen_count : room);
  return chosen_count;
}

/* ---- for the engine */

static int free_running(void) { return me < 0 || !active; }

void schedule_point(const char *what, const char *where, const void *word) {
  if (free_running() || PyGILState_Check())
    return;
  pthread_mutex_lock(&lock);
  note(what, where, word);
  pass(1);
  pthread_mutex_unlock(&lock);
}

void schedule_wait(uint32_t *word, uint32_t expected, uint64_t timeout_ns, const char *where) {
  if (free_running())
    return;
  schedule_point("futex_wait", where, word);
  pthread_mutex_lock(&lock);
  if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == expected) {
    threads[me].state = ON_WORD;
    threads[me].word = word;
    threads[me].deadline = timeout_ns ? now + timeout_ns : 0;
    threads[me].since = waits++;
    pass(0);
  }
  pthread_mutex_unlock(&lock);
}

void schedule_wake(uint32_t *word, int most, const char *where) {
  int k, first;
  schedule_point("futex_wake", where, word);
  pthread_mutex_lock(&lock);
  for (; most > 0; most--) {
    first = -1;
    for (k = 0; k < count; k++)
      if (threads[k].state == ON_WORD && threads[k].word == word && (first < 0 || threads[k].since < threads[first].since))
        first = k;
    if (first < 0)
      break;
    threads[first].state = READY;
  }
  pthread_mutex_unlock(&lock);
}

uint64_t schedule_now(void) { return now += 10; }

int schedule_lock(pthread_mutex_t *mutex, const char *where) {
  if (free_running())
    return pthread_mutex_lock(mutex);
  schedule_point("lock", where, mutex);
  while (pthread_mutex_trylock(mutex) != 0) {
    pthread_mutex_lock(&lock);
    threads[me].state = ON_MUTEX;
    threads[me].word = mutex;
    pass(0);
    pthread_mutex_unlock(&lock);
  }
  return 0;
}

int schedule_unlock(pthread_mutex_t *mutex, const char *where) {
  int k, status = pthread_mutex_unlock(mutex);
  if (free_running())
    return status;
  pthread_mutex_lock(&lock);
  for (k = 0; k < count; k++)
    if (threads[k].state == ON_MUTEX && threads[k].word == mutex)
      threads[k].state = READY;
  pthread_mutex_unlock(&lock);
  schedule_point("unlock", where, mutex);
  return status;
}

typedef struct begin {
  void *(*start)(void *);
  void *argument;
  int id;
} begin;

static void *run(void *argument) {
  begin b = *(begin *)argument;
  void *result;
  free(argument);
  schedule_enter(b.id);
  result = b.start(b.argument);
  end();
  return result;
}

int schedule_create(pthread_t *created, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
  char name[32];
  begin *b;
  int status, id;
  if (!active)
    return pthread_create(created, attributes, start, argument);
  b = malloc(sizeof(begin));
  if (b == NULL)
    return 12;
  snprintf(name, sizeof(name), "engine %d", count);
  id = enrol(name);
  *b = (begin){start, argument, id};
  status = pthread_create(created, attributes, run, b);
  if (status == 0)
    threads[id].self = *created;
  return status;
}

int schedule_join(pthread_t thread_of, void **result) {
  int k;
  if (!free_running()) {
    pthread_mutex_lock(&lock);
    for (k = 0; k < count; k++) {
      if (k != me && threads[k].state != DONE && pthread_equal(threads[k].self, thread_of)) {
        threads[me].state = ON_END;
        threads[me].word = &threads[k];
        pass(0);
        break;
      }
    }
    pthread_mutex_unlock(&lock);
  }
  return pthread_join(thread_of, result);
}
