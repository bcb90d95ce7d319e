#include "calls.h"

#include <stdio.h>
#include <string.h>

enum { NAP_NS = 20000 };                   /* between two polls */
static const uint64_t TICK_NS = 100000000; /* between two looks at the device's progress while no item comes */

const cuda_thread_function cuda_thread_function_list[CUDA_THREAD_FUNCTIONS] = {
#define X(name, parameters) {#name, 0},
    CUDA_FUNCTIONS(X)
#undef X
#define X(name, parameters, since) {#name, since},
    NCCL_FUNCTIONS(X) NCCL_TEXTS(X)
#undef X
};

/* ---- calls ---- */

int cuda_thread_failed(cuda_thread *t, const char *call, int code, const char *name, const char *text) {
  cuda_thread_failure *f = &t->failure;
  if (f->call == NULL) {
    f->call = call;
    f->code = code;
    snprintf(f->name, sizeof f->name, "%s", name != NULL ? name : "");
    snprintf(f->text, sizeof f->text, "%s", text != NULL ? text : "");
  }
  return -1;
}

void cuda_thread_forgive(cuda_thread *t) { memset(&t->failure, 0, sizeof t->failure); }

int cuda_thread_cancelled(cuda_thread *t, const char *call) {
  /* The acquire pairs with cuda_thread_cancel. */
  return load32_acquire(&t->cancelled) ? cuda_thread_failed(t, call, CUDA_THREAD_CANCELLED, NULL, NULL) : 0;
}

int cuda_thread_after_cuda(cuda_thread *t, const char *call, CUresult code) {
  const char *name = NULL, *text = NULL;
  store_pointer(&t->d.call, NULL);
  if (code == CUDA_SUCCESS) return 0;
  t->f.cuGetErrorName(code, &name);
  t->f.cuGetErrorString(code, &text);
  return cuda_thread_failed(t, call, (int)code, name, text);
}

int cuda_thread_after_nccl(cuda_thread *t, const char *call, ncclResult_t code) {
  char text[sizeof t->failure.text];
  store_pointer(&t->d.call, NULL);
  if (code == ncclSuccess || code == ncclInProgress) return 0;
  snprintf(text, sizeof text, "%s: %s", t->f.ncclGetErrorString(code), t->f.ncclGetLastError(t->at->comm));
  return cuda_thread_failed(t, call, (int)code, NULL, text);
}

void cuda_thread_nap(void) {
  struct timespec t = {0, NAP_NS};
  nanosleep(&t, NULL);
}

int cuda_thread_drain(cuda_thread *t, uint64_t limit) {
  uint64_t begun = now_ns();
  for (;;) {
    CUresult code = IN_CALL(cuStreamQuery, t->stream);
    if (code != CUDA_ERROR_NOT_READY) return cuda_thread_after_cuda(t, "cuStreamQuery", code);
    store_pointer(&t->d.call, NULL);
    if (limit != 0 ? now_ns() - begun > limit : cuda_thread_cancelled(t, "cuStreamQuery")) return 1;
    cuda_thread_nap();
  }
}

int cuda_thread_settle(cuda_thread *t, const char *call) {
  for (;;) {
    ncclResult_t state = ncclInProgress;
    STEP(cuda_thread_cancelled(t, call) || NCCL(ncclCommGetAsyncError, t->at->comm, &state));
    if (state != ncclInProgress) return cuda_thread_after_nccl(t, call, state);
    store_pointer(&t->d.call, (void *)call); /* this call, not the poll, has not ended */
    cuda_thread_nap();
  }
}

/* ---- items ---- */

/* Take the items that were pushed since the last look, oldest first, behind those taken before. */
static void take(cuda_thread *t) {
  device_item *item = swap_pointer(&t->pushed, NULL), *oldest = NULL, *next;
  for (; item != NULL; item = next) {
    next = item->next;
    item->next = oldest;
    oldest = item;
  }
  for (; oldest != NULL; oldest = next) {
    next = oldest->next;
    cuda_thread_sort(t, oldest);
  }
}

/* Least code of errors that an earlier kernel may have caused, and that the next call reports. */
enum { OF_A_KERNEL = 700 };

/* Describe why an item has ended without being enqueued; returns `text`. */
static const char *why_not(cuda_thread *t, char *text, size_t size) {
  const cuda_thread_failure *f = &t->failure;
  const char *whose = f->code >= OF_A_KERNEL ? ": it may be the fault of a kernel that ran before" : "";
  const char *what = f->text[0] != 0 ? f->text : f->name;
  if (f->code == CUDA_THREAD_CANCELLED) snprintf(text, size, "%s was given up%s%.400s", f->call, what[0] != 0 ? ": " : "", what);
  else if (f->name[0] != 0) snprintf(text, size, "%s returned %s, %.300s%s", f->call, f->name, what, whose);
  else snprintf(text, size, "%s failed, %.400s", f->call, what);
  return text;
}

/* Look at the device's progress, and at errors that NCCL has found since, such as a broken connection. */
static void look_around(cuda_thread *t) {
  ncclResult_t state = ncclSuccess;
  communicator *at = t->at; /* restored at the end: the CUDA thread may be in the middle of an item */
  if (cuda_thread_look(t)) return;
  for (t->at = t->communicators; t->at != NULL; t->at = t->at->next) {
    if (!t->at->connected) continue;
    if (NCCL(ncclCommGetAsyncError, t->at->comm, &state) || cuda_thread_after_nccl(t, "ncclCommGetAsyncError", state)) break;
  }
  t->at = at;
}

/* Wait for the targets of transfers. Only the entry told their sizes, so a thread of the framework allocates them now. */
static int await_room(cuda_thread *t, const device_item *item) {
  static const char *const what = "the framework's allocator";
  for (;;) {
    uint32_t count = door_count(&t->door);
    if (!load32_acquire(&item->unallocated)) break; /* pairs with set_targets: the targets are there */
    STEP(cuda_thread_cancelled(t, what));
    store_pointer(&t->d.call, (void *)what);
    door_sleep(&t->door, count, TICK_NS);
    look_around(t);
    STEP(t->failure.call != NULL);
  }
  store_pointer(&t->d.call, NULL);
  return 0;
}

static int enqueue(cuda_thread *t, device_item *item) {
  STEP(t->failure.call != NULL || !t->at->connected || await_room(t, item));
  return cuda_thread_launch(t, item);
}

/* Do the work of an item without a ticket. */
static int manage(cuda_thread *t, device_item *item) {
  switch (item->work) {
    case DEVICE_CONNECT: return cuda_thread_connect_set(t);
    case DEVICE_DESTROY: return cuda_thread_destroy_set(t);
    case DEVICE_ALLOCATE_PASS: return cuda_thread_make_pass(t, (frozen_pass *)item);
    case DEVICE_CONNECT_PASS: return cuda_thread_connect_pass_ranks(t, (frozen_pass *)item);
    default: return cuda_thread_enqueue_pass(t, (frozen_pass *)item);
  }
}

/* Enqueue an item and end it; after a failure, only end it. */
static void end_item(cuda_thread *t, device_item *item) {
  char text[DEVICE_WHY];
  int moves = item->work < DEVICE_TURN, failed;
  t->at = cuda_thread_communicator(t, item);
  if (moves) item->ticket = ++t->tickets;
  failed = moves ? enqueue(t, item) : manage(t, item);
  t->at = &t->world;
  if (failed) why_not(t, text, sizeof text);
  if (failed && item->work == DEVICE_ALLOCATE_PASS && t->failure.code == CUDA_ERROR_OUT_OF_MEMORY) cuda_thread_forgive(t);
  item->ended(item, failed ? text : NULL);
  store_release(&t->d.ended, t->tickets); /* pairs with those who wait until the CUDA thread has ended all items */
}

/* ---- the thread ---- */

static void *run(void *argument) {
  cuda_thread *t = argument;
  for (;;) {
    uint32_t count = door_count(&t->door), job = load32_acquire(&t->job); /* pairs with cuda_thread_begin */
    device_item *item;
    take(t);
    if ((item = cuda_thread_next(t)) != NULL) {
      end_item(t, item);
    } else if (job != CUDA_THREAD_NOTHING) {
      cuda_thread_work(t, job);
      cas32(&t->job, job, CUDA_THREAD_NOTHING); /* pairs with cuda_thread_wait; a CUDA_THREAD_CLOSE that came meanwhile stays */
      door_ring(&t->ended, DOOR_EVERYBODY);
      if (job == CUDA_THREAD_CLOSE) return NULL;
    } else if (t->world.connected && !t->quiet && (t->failure.call != NULL || load32_acquire(&t->cancelled))) {
      char text[DEVICE_WHY];
      int somebody_asks = load_pointer((void **)&t->d.failed) != NULL; /* pairs with use_device */
      if (somebody_asks && !load32_acquire(&t->cancelled)) t->d.failed(&t->d, why_not(t, text, sizeof text));
      cuda_thread_quieten(t);
    } else {
      int well = t->world.connected && !t->quiet, busy = load_relaxed(&t->d.passed) < load_relaxed(&t->d.enqueued);
      int idle = well && !busy && !cuda_thread_has_samples(t);
      int waiting = well && (!idle || t->graphs.connected); /* the CUDA thread is not told when a graph runs */
      if (idle && cuda_thread_compare_clocks(t)) continue;
      store_pointer(&t->d.call, (void *)cuda_thread_awaited(t));
      door_sleep(&t->door, count, waiting ? TICK_NS : 0);
      store_pointer(&t->d.call, NULL);
      if (waiting) look_around(t);
    }
  }
}

int cuda_thread_start(cuda_thread *t) {
  t->at = &t->world;
  pthread_mutex_init(&t->marks_lock, NULL);
  cuda_thread_serve(&t->d);
  return engine_thread_start(&t->thread, run, t);
}

void cuda_thread_begin(cuda_thread *t, uint32_t job) {
  store32_release(&t->job, job); /* pairs with the thread's look */
  door_ring(&t->door, 1);
}

int cuda_thread_wait(cuda_thread *t, uint64_t ns) {
  uint32_t count = door_count(&t->ended);
  if (load32_acquire(&t->job) != CUDA_THREAD_NOTHING) door_sleep(&t->ended, count, ns); /* pairs with the thread's release */
  return load32_acquire(&t->job) == CUDA_THREAD_NOTHING;
}

void cuda_thread_cancel(cuda_thread *t) {
  store32_release(&t->cancelled, 1); /* pairs with cuda_thread_cancelled */
  door_ring(&t->door, 1);
}

void cuda_thread_join(cuda_thread *t) {
  pthread_join(t->thread, NULL);
}
