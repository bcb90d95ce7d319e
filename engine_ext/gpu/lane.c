#include "calls.h"

#include <stdio.h>
#include <string.h>

enum { NAP_NS = 20000 };                   /* between two polls */
static const uint64_t TICK_NS = 100000000; /* between two looks at the device's progress while no item comes */

const lane_function lane_function_list[LANE_FUNCTIONS] = {
#define X(name, parameters) {#name, 0},
    CUDA_FUNCTIONS(X)
#undef X
#define X(name, parameters, since) {#name, since},
    NCCL_FUNCTIONS(X) NCCL_TEXTS(X)
#undef X
};

/* ---- calls ---- */

int lane_failed(lane *l, const char *call, int code, const char *name, const char *text) {
  lane_failure *f = &l->failure;
  if (f->call == NULL) {
    f->call = call;
    f->code = code;
    snprintf(f->name, sizeof f->name, "%s", name != NULL ? name : "");
    snprintf(f->text, sizeof f->text, "%s", text != NULL ? text : "");
  }
  return -1;
}

void lane_forgive(lane *l) { memset(&l->failure, 0, sizeof l->failure); }

int lane_cancelled(lane *l, const char *call) {
  return load32_acquire(&l->cancelled) ? lane_failed(l, call, LANE_CANCELLED, NULL, NULL) : 0; /* pairs with lane_cancel */
}

int lane_after_cuda(lane *l, const char *call, CUresult code) {
  const char *name = NULL, *text = NULL;
  store_pointer(&l->d.call, NULL);
  if (code == CUDA_SUCCESS) return 0;
  l->f.cuGetErrorName(code, &name);
  l->f.cuGetErrorString(code, &text);
  return lane_failed(l, call, (int)code, name, text);
}

int lane_after_nccl(lane *l, const char *call, ncclResult_t code) {
  char text[sizeof l->failure.text];
  store_pointer(&l->d.call, NULL);
  if (code == ncclSuccess || code == ncclInProgress) return 0;
  snprintf(text, sizeof text, "%s: %s", l->f.ncclGetErrorString(code), l->f.ncclGetLastError(l->at->comm));
  return lane_failed(l, call, (int)code, NULL, text);
}

void lane_nap(void) {
  struct timespec t = {0, NAP_NS};
  nanosleep(&t, NULL);
}

int lane_drain(lane *l, uint64_t limit) {
  uint64_t begun = now_ns();
  for (;;) {
    CUresult code = IN_CALL(cuStreamQuery, l->stream);
    if (code != CUDA_ERROR_NOT_READY) return lane_after_cuda(l, "cuStreamQuery", code);
    store_pointer(&l->d.call, NULL);
    if (limit != 0 ? now_ns() - begun > limit : lane_cancelled(l, "cuStreamQuery")) return 1;
    lane_nap();
  }
}

int lane_settle(lane *l, const char *call) {
  for (;;) {
    ncclResult_t state = ncclInProgress;
    STEP(lane_cancelled(l, call) || NCCL(ncclCommGetAsyncError, l->at->comm, &state));
    if (state != ncclInProgress) return lane_after_nccl(l, call, state);
    store_pointer(&l->d.call, (void *)call); /* this call, not the poll, has not ended */
    lane_nap();
  }
}

/* ---- items ---- */

/* Take the items that were pushed since the last look, oldest first, behind those taken before. */
static void take(lane *l) {
  device_item *item = swap_pointer(&l->pushed, NULL), *oldest = NULL, *next;
  for (; item != NULL; item = next) {
    next = item->next;
    item->next = oldest;
    oldest = item;
  }
  for (; oldest != NULL; oldest = next) {
    next = oldest->next;
    lane_sort(l, oldest);
  }
}

/* Least code of errors that an earlier kernel may have caused, and that the next call reports. */
enum { OF_A_KERNEL = 700 };

/* Describe why an item has ended without being enqueued; returns `text`. */
static const char *why_not(lane *l, char *text, size_t size) {
  const lane_failure *f = &l->failure;
  const char *whose = f->code >= OF_A_KERNEL ? ": it may be the fault of a kernel that ran before" : "";
  const char *what = f->text[0] != 0 ? f->text : f->name;
  if (f->code == LANE_CANCELLED) snprintf(text, size, "%s was given up%s%.400s", f->call, what[0] != 0 ? ": " : "", what);
  else if (f->name[0] != 0) snprintf(text, size, "%s returned %s, %.300s%s", f->call, f->name, what, whose);
  else snprintf(text, size, "%s failed, %.400s", f->call, what);
  return text;
}

/* Look at the device's progress, and at errors that NCCL has found since, such as a broken connection. */
static void look_around(lane *l) {
  ncclResult_t state = ncclSuccess;
  communicator *at = l->at; /* restored at the end: the lane may be in the middle of an item */
  if (lane_look(l)) return;
  for (l->at = l->communicators; l->at != NULL; l->at = l->at->next) {
    if (!l->at->connected) continue;
    if (NCCL(ncclCommGetAsyncError, l->at->comm, &state) || lane_after_nccl(l, "ncclCommGetAsyncError", state)) break;
  }
  l->at = at;
}

/* Wait for the targets of transfers. Only the entry told their sizes, so a thread of the framework allocates them now. */
static int await_room(lane *l, const device_item *item) {
  static const char *const what = "the framework's allocator";
  for (;;) {
    uint32_t count = door_count(&l->door);
    if (!load32_acquire(&item->unallocated)) break; /* pairs with set_targets: the targets are there */
    STEP(lane_cancelled(l, what));
    store_pointer(&l->d.call, (void *)what);
    door_sleep(&l->door, count, TICK_NS);
    look_around(l);
    STEP(l->failure.call != NULL);
  }
  store_pointer(&l->d.call, NULL);
  return 0;
}

static int enqueue(lane *l, device_item *item) {
  STEP(l->failure.call != NULL || !l->at->connected || await_room(l, item));
  return lane_launch(l, item);
}

/* Do the work of an item without a ticket. */
static int manage(lane *l, device_item *item) {
  switch (item->work) {
    case DEVICE_CONNECT: return lane_connect_set(l);
    case DEVICE_PART: return lane_part_ranks(l);
    case DEVICE_FREEZE: return lane_make_pass(l, (frozen_pass *)item);
    case DEVICE_UNITE: return lane_unite_pass(l, (frozen_pass *)item);
    default: return lane_enqueue_pass(l, (frozen_pass *)item);
  }
}

/* Enqueue an item and end it; after a failure, only end it. */
static void end_item(lane *l, device_item *item) {
  char text[DEVICE_WHY];
  int moves = item->work < DEVICE_TURN, failed;
  l->at = lane_communicator(l, item);
  if (moves) item->ticket = ++l->tickets;
  failed = moves ? enqueue(l, item) : manage(l, item);
  l->at = &l->world;
  if (failed) why_not(l, text, sizeof text);
  if (failed && item->work == DEVICE_FREEZE && l->failure.code == CUDA_ERROR_OUT_OF_MEMORY) lane_forgive(l);
  item->ended(item, failed ? text : NULL);
  store_release(&l->d.ended, l->tickets); /* pairs with those who wait until the lane has ended all items */
}

/* ---- the thread ---- */

static void *run(void *argument) {
  lane *l = argument;
  for (;;) {
    uint32_t count = door_count(&l->door), job = load32_acquire(&l->job); /* pairs with lane_begin */
    device_item *item;
    take(l);
    if ((item = lane_next(l)) != NULL) {
      end_item(l, item);
    } else if (job != LANE_NOTHING) {
      lane_work(l, job);
      cas32(&l->job, job, LANE_NOTHING); /* pairs with lane_wait; a LANE_CLOSE that came meanwhile stays */
      door_ring(&l->ended, DOOR_EVERYBODY);
      if (job == LANE_CLOSE) return NULL;
    } else if (l->world.connected && !l->quiet && (l->failure.call != NULL || load32_acquire(&l->cancelled))) {
      char text[DEVICE_WHY];
      int somebody_asks = load_pointer((void **)&l->d.failed) != NULL; /* pairs with use_device */
      if (somebody_asks && !load32_acquire(&l->cancelled)) l->d.failed(&l->d, why_not(l, text, sizeof text));
      lane_quieten(l);
    } else {
      int well = l->world.connected && !l->quiet, busy = load_relaxed(&l->d.passed) < load_relaxed(&l->d.enqueued);
      int idle = well && !busy && !lane_has_samples(l);
      int waiting = well && (!idle || l->graphs.connected); /* the lane is not told when a graph runs */
      if (idle && lane_compare_clocks(l)) continue;
      store_pointer(&l->d.call, (void *)lane_awaited(l));
      door_sleep(&l->door, count, waiting ? TICK_NS : 0);
      store_pointer(&l->d.call, NULL);
      if (waiting) look_around(l);
    }
  }
}

int lane_start(lane *l) {
  l->at = &l->world;
  pthread_mutex_init(&l->marks_lock, NULL);
  lane_serve(&l->d);
  return engine_thread_start(&l->thread, run, l);
}

void lane_begin(lane *l, uint32_t job) {
  store32_release(&l->job, job); /* pairs with the thread's look */
  door_ring(&l->door, 1);
}

int lane_wait(lane *l, uint64_t ns) {
  uint32_t count = door_count(&l->ended);
  if (load32_acquire(&l->job) != LANE_NOTHING) door_sleep(&l->ended, count, ns); /* pairs with the thread's release */
  return load32_acquire(&l->job) == LANE_NOTHING;
}

void lane_cancel(lane *l) {
  store32_release(&l->cancelled, 1); /* pairs with lane_cancelled */
  door_ring(&l->door, 1);
}

void lane_join(lane *l) {
  pthread_join(l->thread, NULL);
}
