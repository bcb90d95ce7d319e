/* The order of items: the world's items as they come, those of a process set in the turns that the world's schedule gives them.
 *
 * NCCL's kernels of several communicators run on one stream, so all ranks must enqueue them in one order. Otherwise two ranks
 * can wait for each other's later kernels: a deadlock. The world's schedule, which all ranks read, is that order: an entry of it
 * is the turn of the next item of a process set. The thread that reads such an entry pushes a turn among the world's items. There
 * the CUDA thread waits for the set's next item. The set's own engine hands that over without waiting for a GPU.
 */
#include "calls.h"

#include <stdlib.h>

static const char *const SET_IS_LATE = "an operation of a process set, whose turn it is,";

communicator *cuda_thread_communicator(cuda_thread *t, const device_item *item) {
  return item->queue != NULL ? (communicator *)item->queue : &t->world;
}

/* ---- lists ---- */

static void add(device_item **first, device_item **last, device_item *item) {
  item->next = NULL;
  if (*first == NULL) *first = item;
  else (*last)->next = item;
  *last = item;
}

static device_item *remove_first(device_item **first) {
  device_item *item = *first;
  *first = item->next;
  return item;
}

void cuda_thread_sort(cuda_thread *t, device_item *item) {
  communicator *c = cuda_thread_communicator(t, item);
  if (item->work == DEVICE_CONNECT) cuda_thread_enlist(t, c);
  if (item->queue == NULL || item->work == DEVICE_TURN) add(&t->first, &t->last, item);
  else add(&c->first, &c->last, item);
}

void cuda_thread_enlist(cuda_thread *t, communicator *c) {
  c->next = t->communicators;
  t->communicators = c;
}

void cuda_thread_remove_communicator(cuda_thread *t, communicator *c) {
  communicator **link = &t->communicators;
  while (*link != NULL && *link != c) link = &(*link)->next;
  if (*link != NULL) *link = c->next;
}

/* ---- the next item ---- */

/* Return whether the CUDA thread gives up: a call has failed, or the owner has cancelled. The acquire pairs with
 * cuda_thread_cancel. */
static int gives_up(const cuda_thread *t) { return t->failure.call != NULL || load32_acquire(&t->cancelled); }

/* Remove and return an item of any set. When nothing is enqueued any more, items end without a turn. */
static device_item *of_any_set(cuda_thread *t) {
  for (communicator *c = t->communicators; c != NULL; c = c->next)
    if (c->first != NULL) return remove_first(&c->first);
  return NULL;
}

device_item *cuda_thread_next(cuda_thread *t) {
  while (t->first != NULL) {
    communicator *c = cuda_thread_communicator(t, t->first);
    if (t->first->work != DEVICE_TURN) return remove_first(&t->first);
    if (c->first == NULL && !gives_up(t)) return NULL;
    free(remove_first(&t->first));
    if (c->first != NULL) return remove_first(&c->first);
  }
  return gives_up(t) ? of_any_set(t) : NULL;
}

const char *cuda_thread_awaited(const cuda_thread *t) {
  return t->first != NULL && t->first->work == DEVICE_TURN ? SET_IS_LATE : NULL;
}

/* ---- functions for other threads ---- */

void cuda_thread_push(cuda_thread *t, device_item *item) {
  void *head;
  do {
    head = load_pointer(&t->pushed);
    item->next = head;
  } while (!cas_pointer(&t->pushed, head, item));
  door_ring(&t->door, 1);
}

int cuda_thread_turn(device_queue *queue) {
  device_item *mark = calloc(1, sizeof *mark);
  if (mark == NULL) return -1;
  mark->work = DEVICE_TURN;
  mark->queue = queue;
  cuda_thread_push((cuda_thread *)queue->d, mark);
  return 0;
}

/* ---- connecting and destroying ---- */

/* Publish a communicator's stage, and wake the threads that wait for it. */
static void reached(communicator *c, uint32_t stage) {
  cuda_thread *t = (cuda_thread *)c->queue.d;
  store32_release(&c->stage, stage); /* pairs with cuda_thread_await_stage */
  door_ring(&t->ended, DOOR_EVERYBODY);
}

static void connected(device_item *item, const char *why) {
  reached((communicator *)item->queue, why != NULL ? COMMUNICATOR_FAILED : COMMUNICATOR_CONNECTED);
}

static void destroyed(device_item *item, const char *why) {
  reached((communicator *)item->queue, why != NULL ? COMMUNICATOR_FAILED : COMMUNICATOR_DESTROYED);
}

int cuda_thread_connect_set(cuda_thread *t) {
  reached(t->at, COMMUNICATOR_BEGUN);
  return cuda_thread_connect_ranks(t);
}

/* Push an item of a process set that has no entry. */
static void bring(cuda_thread *t, communicator *c, device_item *item, int work, void (*ended)(device_item *, const char *)) {
  item->queue = &c->queue;
  item->work = work;
  item->ended = ended;
  cuda_thread_push(t, item);
}

void cuda_thread_connect_communicator(cuda_thread *t, communicator *c) { bring(t, c, &c->connecting, DEVICE_CONNECT, connected); }
void cuda_thread_destroy_communicator(cuda_thread *t, communicator *c) { bring(t, c, &c->destroying, DEVICE_DESTROY, destroyed); }

uint32_t cuda_thread_await_stage(cuda_thread *t, communicator *c, uint32_t stage, uint64_t ns) {
  uint32_t count = door_count(&t->ended), now = load32_acquire(&c->stage); /* pairs with reached */
  if (now < stage) door_sleep(&t->ended, count, ns);
  return load32_acquire(&c->stage);
}
