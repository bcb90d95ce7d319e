/* A device (engine_ext/gpu/device.h) without a GPU: it moves nothing, ends what it is given in order, on a thread of its own, and
 * remembers what travelled together. For tests of who travels with whom, where all ranks are threads. */
#include "engine_ext/gpu/device.h"
#include "engine_ext/platform/atomics.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

typedef struct pretended {
  device d; /* first */
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t news;
  device_item *first, *last; /* those that were pushed, oldest first */
  int failed, over;
  uint64_t *log; /* of each item: its rows, then the bytes of each */
  uint64_t words, room;
} pretended;

static int mark(device *d, void *stream, device_mark **made, char *why) {
  (void)d, (void)stream, (void)why;
  *made = calloc(1, sizeof **made);
  return *made == NULL ? -1 : 0;
}

static void unmark(device *d, device_mark *each) {
  (void)d;
  free(each);
}

static void push(device *d, device_item *item) {
  pretended *p = (pretended *)d;
  pthread_mutex_lock(&p->lock);
  item->ticket = ++d->pushed;
  item->next = NULL;
  if (p->last != NULL) p->last->next = item;
  else p->first = item;
  p->last = item;
  pthread_cond_signal(&p->news);
  pthread_mutex_unlock(&p->lock);
}

static int await(device *d, void *stream, uint64_t ticket, char *why) {
  (void)d, (void)stream, (void)ticket, (void)why;
  return 0;
}

static int has_passed(device *d, uint64_t ticket) { return load_acquire(&d->passed) >= ticket; }

static int frozen_rest(device *d) { return d != NULL; } /* it has no frozen passes */

static void stop(device *d) {
  pretended *p = (pretended *)d;
  pthread_mutex_lock(&p->lock);
  p->failed = 1;
  pthread_mutex_unlock(&p->lock);
  store_release(&d->passed, UINT64_MAX);
}

/* The caller holds the lock. */
static void remember(pretended *p, const device_item *item) {
  if (p->words + (uint64_t)item->n_rows + 1 > p->room) abort();
  p->log[p->words++] = (uint64_t)item->n_rows;
  for (int k = 0; k < item->n_rows; k++) p->log[p->words++] = item->targets[k].bytes;
}

static void *work(void *argument) {
  pretended *p = argument;
  pthread_mutex_lock(&p->lock);
  for (;;) {
    device_item *item = p->first;
    if (item == NULL && p->over) break;
    if (item == NULL) {
      pthread_cond_wait(&p->news, &p->lock);
      continue;
    }
    p->first = item->next;
    if (p->first == NULL) p->last = NULL;
    uint64_t ticket = item->ticket;
    int failed = p->failed;
    if (!failed) remember(p, item);
    pthread_mutex_unlock(&p->lock);
    store_release(&p->d.enqueued, ticket);
    if (!failed) store_release(&p->d.passed, ticket);
    item->ended(item, failed ? "the world has failed" : NULL);
    store_release(&p->d.ended, ticket);
    pthread_mutex_lock(&p->lock);
  }
  pthread_mutex_unlock(&p->lock);
  return NULL;
}

API void *pretended_begin(uint64_t *log, uint64_t room) {
  pretended *p = calloc(1, sizeof *p);
  p->log = log;
  p->room = room;
  p->d.mark = mark;
  p->d.unmark = unmark;
  p->d.push = push;
  p->d.wait = await;
  p->d.has_passed = has_passed;
  p->d.frozen_rest = frozen_rest;
  p->d.stop = stop;
  pthread_mutex_init(&p->lock, NULL);
  pthread_cond_init(&p->news, NULL);
  pthread_create(&p->thread, NULL, work, p);
  return p;
}

/* How long the log is when all that was pushed has ended. */
API uint64_t pretended_words(pretended *p) {
  pthread_mutex_lock(&p->lock);
  while (load_acquire(&p->d.ended) < p->d.pushed) {
    pthread_mutex_unlock(&p->lock);
    sched_yield();
    pthread_mutex_lock(&p->lock);
  }
  uint64_t words = p->words;
  pthread_mutex_unlock(&p->lock);
  return words;
}

API void pretended_end(pretended *p) {
  pthread_mutex_lock(&p->lock);
  p->over = 1;
  pthread_cond_signal(&p->news);
  pthread_mutex_unlock(&p->lock);
  pthread_join(p->thread, NULL); /* what it is stays: operations that are freed later ask what it has passed */
  store_release(&p->d.passed, UINT64_MAX);
}
