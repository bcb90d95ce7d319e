/* Who knows of what: a vector clock for each stream and each thread of the host.
 *
 * An operation gets its moment when it is enqueued: all that its stream, the events it waits for, and the enqueuing
 * thread knew. So whether two accesses are ordered does not depend on when they ran.
 */
#include "internal.h"

static agent *hosts[AGENTS]; /* those that are threads */
static uint64_t epochs[AGENTS];
static int in_use[AGENTS], n_agents, hosts_are_one;
static struct message {
  struct message *next;
  uintptr_t word;
  moment *what;
} *told;
static pthread_key_t at_exit;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static agent *together;

moment *moment_new(void) {
  moment *m = calloc(1, sizeof *m);
  m->references = 1;
  return m;
}

void moment_join(moment *into, const moment *from) {
  for (int i = 0; i < n_agents; i++)
    if (from->at[i] > into->at[i]) into->at[i] = from->at[i];
}

moment *moment_keep(moment *m) {
  m->references++;
  return m;
}

void moment_drop(moment *m) {
  if (!--m->references) free(m);
}

agent *agent_new(int host) {
  agent *a = calloc(1, sizeof *a);
  int n = n_agents;
  if (n == AGENTS) /* a number again: what its first owner did counts as known, so nothing false is reported */
    for (n = 0; n < AGENTS && in_use[n]; n++) {
    }
  if (n == AGENTS) {
    fprintf(stderr, "stand-in: more than %d streams and threads at once\n", AGENTS);
    abort();
  }
  if (n == n_agents) n_agents++;
  in_use[n] = 1;
  a->number = n;
  a->epoch = ++epochs[n];
  a->now = moment_new();
  a->now->at[n] = a->epoch;
  if (host) hosts[n] = a;
  return a;
}

void agent_done(agent *a) {
  epochs[a->number] = a->epoch;
  in_use[a->number] = 0;
  hosts[a->number] = NULL;
  moment_drop(a->now);
  free(a);
}

static void thread_ended(void *a) {
  stand_lock();
  agent_done(a);
  stand_unlock();
}

static void make_key(void) { pthread_key_create(&at_exit, thread_ended); }

/* A thread begins with what all threads know then: somebody started it, and we do not see who. */
agent *agent_of_thread(void) {
  static __thread agent *self;
  pthread_once(&once, make_key);
  if (hosts_are_one) return together ? together : (together = agent_new(1));
  if (!self) {
    self = agent_new(1);
    for (int i = 0; i < n_agents; i++)
      if (hosts[i] && hosts[i] != self) moment_join(self->now, hosts[i]->now);
    pthread_setspecific(at_exit, self);
  }
  return self;
}

void stand_hosts_are_one(int yes) { hosts_are_one = yes; }

static moment *message(uintptr_t word) {
  struct message *m = told;
  while (m && m->word != word) m = m->next;
  if (!m) {
    m = calloc(1, sizeof *m);
    *m = (struct message){told, word, moment_new()};
    told = m;
  }
  return m->what;
}

void stand_tell(uintptr_t word) {
  agent *self;
  stand_lock();
  self = agent_of_thread();
  moment_join(message(word), self->now);
  self->now->at[self->number] = ++self->epoch;
  stand_unlock();
}

void stand_hear(uintptr_t word) {
  stand_lock();
  moment_join(agent_of_thread()->now, message(word));
  stand_unlock();
}

void stand_host(const void *at, size_t size, int write, const char *what) {
  stand_access access = {(uintptr_t)at, size, write};
  agent *self;
  moment *when;
  stand_lock();
  self = agent_of_thread();
  self->now->at[self->number] = ++self->epoch;
  when = moment_new();
  moment_join(when, self->now);
  memory_check(&access, self->number, self->epoch, when, what);
  moment_drop(when);
  stand_unlock();
}

void thread_learns(const operation *o) {
  if (!MUTANT(clock_without_queries)) moment_join(agent_of_thread()->now, o->when);
}
