/* The thread that runs operations, one step at a time under the lock, in an order that the policy chooses.
 *
 * eager: whatever can run, oldest first. lazy: only what a host waits for, here or at a peer, newest first; else after
 * a pause, so that programs end. drawn: any that can run, by the seed, with pauses.
 */
#include "internal.h"

#include <signal.h>
#include <time.h>

pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
operation *running;
static const double PAUSE = 5; /* ms that a lazy operation waits for somebody to want it */

uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void stand_poke(void) { pthread_cond_broadcast(&changed); }

void operation_demand(operation *o) {
  if (o->demanded || o->state == DONE) return;
  o->demanded = 1;
  if (o->own.want) o->own.want(o->own.data);
  for (operation *each = o->stream->head; each && each != o; each = each->next) operation_demand(each);
  for (int i = 0; i < o->n_needs; i++) operation_demand(o->needs[i]);
  stand_poke();
}

static void finish(operation *o) {
  stream *s = o->stream;
  operation **each = &s->head;
  while (*each != o) each = &(*each)->next;
  *each = o->next;
  for (s->tail = s->head; s->tail && s->tail->next;) s->tail = s->tail->next;
  o->next = NULL;
  o->state = DONE;
  o->done_at = now();
  for (int i = 0; i < o->n_needs; i++) operation_drop(o->needs[i]);
  o->n_needs = 0;
  operation_drop(o);
  if (s->destroyed && !s->head) stream_gone(s);
  stand_poke();
}

static int ready(const operation *o) {
  for (int i = 0; i < o->n_needs; i++)
    if (o->needs[i]->state != DONE) return 0;
  return 1;
}

/* Whether the policy lets it begin. */
static int may_begin(operation *o) {
  if (stand_policy_now != 'l' || o->demanded || now() - o->born > (uint64_t)(PAUSE * 1e6)) return 1;
  return 0;
}

/* What a peer waits for is demanded as if a host here did. */
static void hear_peers(void) {
  for (stream *s = streams; s; s = s->next)
    for (operation *o = s->head; o; o = o->next)
      if (!o->demanded && o->own.wanted && o->own.wanted(o->own.data)) operation_demand(o);
}

/* All that could do a step now, in the order of the policy. */
static int candidates(operation **list, int room) {
  int n = 0;
  for (stream *s = streams; s; s = s->next) {
    operation *o = s->head;
    if (o && MUTANT(stream_out_of_order) && o->next && ready(o->next)) o = o->next;
    if (!o || n == room) continue;
    if (o->state == RUNNING || (ready(o) && may_begin(o))) list[n++] = o;
  }
  for (int i = 1; i < n; i++) { /* by number; drawn: shuffled */
    int j = i, newest = stand_policy_now == 'l';
    operation *o = list[i];
    if (stand_policy_now == 'd') {
      j = (int)(stand_random() % (unsigned)(i + 1));
      list[i] = list[j];
    } else {
      for (; j && (list[j - 1]->number > o->number) != newest; j--) list[j] = list[j - 1];
    }
    list[j] = o;
  }
  return n;
}

static int step_one(void) {
  operation *list[AGENTS];
  int n = candidates(list, AGENTS), done;
  for (int i = 0; i < n; i++) {
    running = list[i];
    running->state = RUNNING;
    done = running->own.step(running->own.data);
    if (done) finish(running);
    running = NULL;
    if (done) return 1;
  }
  return 0;
}

static void *execute(void *unused) {
  stand_lock();
  for (;;) {
    if (stand_policy_now == 'l') hear_peers();
    if (stand_policy_now == 'd' && streams_busy() && stand_random() % 8 == 0)
      lock_wait((double)(stand_random() % 1000) / 1e3);
    if (!step_one()) lock_wait(streams_busy() ? 0.2 : 100);
  }
  return unused;
}

void thread_start(void *(*body)(void *)) {
  pthread_t thread;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_create(&thread, NULL, body, NULL);
  pthread_detach(thread);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void executor_start(void) { thread_start(execute); }

/* Says what each stream is at, which is why a host waits in vain. */
static void tell_deadlock(const operation *o) {
  char text[800] = "", about[160];
  size_t n = 0;
  for (stream *s = streams; s; s = s->next)
    if (s->head && n < sizeof text - 300) {
      about[0] = 0;
      if (s->head->own.describe) s->head->own.describe(s->head->own.data, about, sizeof about);
      else if (s->head->n_needs) snprintf(about, sizeof about, "waits for %s", s->head->needs[0]->what);
      n += (size_t)snprintf(text + n, sizeof text - n, "; %s%s%s", s->head->what, about[0] ? ": " : "", about);
    }
  stand_found("deadlock: a host waits for %s%s", o->what, text);
}

CUresult operation_await(operation *o) {
  uint64_t end = now() + (uint64_t)(stand_deadline_now() * 1e6);
  operation_demand(o);
  while (o->state != DONE && now() < end) lock_wait(1);
  if (o->state != DONE) {
    tell_deadlock(o);
    return CUDA_ERROR_LAUNCH_TIMEOUT;
  }
  thread_learns(o);
  return CUDA_SUCCESS;
}
