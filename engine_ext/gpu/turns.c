/* The order of items: the world's items as they come, those of a process set in the turns that the world's schedule gives them.
 *
 * NCCL's kernels of several communicators run on one stream, so all ranks must enqueue them in one order. Otherwise two ranks
 * can wait for each other's later kernels: a deadlock. The world's schedule, which all ranks read, is that order: an entry of it
 * is the turn of the next item of a process set. The thread that reads such an entry pushes a turn among the world's items. There
 * the lane waits for the set's next item. The set's own engine hands that over without waiting for a GPU.
 */
#include "calls.h"

#include <stdlib.h>

static const char *const SET_IS_LATE = "an operation of a process set, whose turn it is,";

communicator *lane_communicator(lane *l, const device_item *item) {
  return item->queue != NULL ? (communicator *)item->queue : &l->world;
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

void lane_sort(lane *l, device_item *item) {
  communicator *c = lane_communicator(l, item);
  if (item->work == DEVICE_CONNECT) lane_enlist(l, c);
  if (item->queue == NULL || item->work == DEVICE_TURN) add(&l->first, &l->last, item);
  else add(&c->first, &c->last, item);
}

void lane_enlist(lane *l, communicator *c) {
  c->next = l->communicators;
  l->communicators = c;
}

void lane_remove_communicator(lane *l, communicator *c) {
  communicator **link = &l->communicators;
  while (*link != NULL && *link != c) link = &(*link)->next;
  if (*link != NULL) *link = c->next;
}

/* ---- the next item ---- */

/* Return whether the lane gives up: a call has failed, or the owner has cancelled. The acquire pairs with lane_cancel. */
static int gives_up(const lane *l) { return l->failure.call != NULL || load32_acquire(&l->cancelled); }

/* Remove and return an item of any set. When nothing is enqueued any more, items end without a turn. */
static device_item *of_any_set(lane *l) {
  for (communicator *c = l->communicators; c != NULL; c = c->next)
    if (c->first != NULL) return remove_first(&c->first);
  return NULL;
}

device_item *lane_next(lane *l) {
  while (l->first != NULL) {
    communicator *c = lane_communicator(l, l->first);
    if (l->first->work != DEVICE_TURN) return remove_first(&l->first);
    if (c->first == NULL && !gives_up(l)) return NULL;
    free(remove_first(&l->first));
    if (c->first != NULL) return remove_first(&c->first);
  }
  return gives_up(l) ? of_any_set(l) : NULL;
}

const char *lane_awaited(const lane *l) { return l->first != NULL && l->first->work == DEVICE_TURN ? SET_IS_LATE : NULL; }

/* ---- functions for other threads ---- */

void lane_push(lane *l, device_item *item) {
  void *head;
  do {
    head = load_pointer(&l->pushed);
    item->next = head;
  } while (!cas_pointer(&l->pushed, head, item));
  door_ring(&l->door, 1);
}

int lane_turn(device_queue *queue) {
  device_item *mark = calloc(1, sizeof *mark);
  if (mark == NULL) return -1;
  mark->work = DEVICE_TURN;
  mark->queue = queue;
  lane_push((lane *)queue->d, mark);
  return 0;
}

/* ---- connecting and parting ---- */

/* Publish a communicator's stage, and wake the threads that wait for it. */
static void reached(communicator *c, uint32_t stage) {
  lane *l = (lane *)c->queue.d;
  store32_release(&c->stage, stage); /* pairs with lane_await_stage */
  door_ring(&l->ended, DOOR_EVERYBODY);
}

static void connected(device_item *item, const char *why) {
  reached((communicator *)item->queue, why != NULL ? COMMUNICATOR_FAILED : COMMUNICATOR_CONNECTED);
}

static void parted(device_item *item, const char *why) {
  reached((communicator *)item->queue, why != NULL ? COMMUNICATOR_FAILED : COMMUNICATOR_PARTED);
}

int lane_connect_set(lane *l) {
  reached(l->at, COMMUNICATOR_BEGUN);
  return lane_connect_ranks(l);
}

/* Push an item of a process set that has no entry. */
static void bring(lane *l, communicator *c, device_item *item, int work, void (*ended)(device_item *, const char *)) {
  item->queue = &c->queue;
  item->work = work;
  item->ended = ended;
  lane_push(l, item);
}

void lane_connect(lane *l, communicator *c) { bring(l, c, &c->connecting, DEVICE_CONNECT, connected); }
void lane_part(lane *l, communicator *c) { bring(l, c, &c->parting, DEVICE_PART, parted); }

uint32_t lane_await_stage(lane *l, communicator *c, uint32_t stage, uint64_t ns) {
  uint32_t count = door_count(&l->ended), now = load32_acquire(&c->stage); /* pairs with reached */
  if (now < stage) door_sleep(&l->ended, count, ns);
  return load32_acquire(&c->stage);
}
