/* Functions for threads of the program: they mark when tensors are ready, and have streams wait for enqueued work.
 *
 * They use the device's context, whatever the thread's own is, and must not spoil a capture of another thread. A stream is used
 * only within the call that passed it, since a framework may destroy it afterwards.
 */
#include "calls.h"

#include <stdio.h>
#include <stdlib.h>

static inline cuda_thread *cuda_thread_of(device *d) { return (cuda_thread *)d; }

/* Write into `why` that a call failed; returns -1. */
static int refused(cuda_thread *t, const char *call, CUresult code, char *why) {
  const char *name = NULL;
  t->f.cuGetErrorName(code, &name);
  snprintf(why, DEVICE_WHY, "%s returned %s", call, name != NULL ? name : "an unknown error");
  return -1;
}

/* Make a call in such a thread. A failure is reported to the caller and does not become the CUDA thread's. */
#define TRY(name, ...)                                                                      \
  do {                                                                                      \
    CUresult code_ = t->f.name(__VA_ARGS__);                                                \
    if (code_ != CUDA_SUCCESS) return refused(t, #name, code_, why);                        \
  } while (0)

/* A call of a program thread: what it has to restore when it ends. */
typedef struct visit {
  int pushed;               /* 1: the device's context was pushed, and has to be popped */
  CUstreamCaptureMode mode; /* the thread's own capture mode */
} visit;

/* Give the calling thread the device's context and a capture mode in which its calls spoil no capture. */
static int take_context(cuda_thread *t, visit *v, char *why) {
  CUcontext context;
  v->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  TRY(cuCtxGetCurrent, &context);
  v->pushed = context != t->context;
  if (v->pushed) TRY(cuCtxPushCurrent_v2, t->context);
  CUresult code = t->f.cuThreadExchangeStreamCaptureMode(&v->mode);
  if (code == CUDA_SUCCESS) return 0;
  if (v->pushed) t->f.cuCtxPopCurrent_v2(&context);
  return refused(t, "cuThreadExchangeStreamCaptureMode", code, why);
}

/* End a visit: restore the thread's context and capture mode. */
static void leave(cuda_thread *t, visit *v) {
  CUcontext ours;
  t->f.cuThreadExchangeStreamCaptureMode(&v->mode);
  if (v->pushed) t->f.cuCtxPopCurrent_v2(&ours);
  add32(&t->visitors, (uint32_t)-1); /* pairs with see_visitors_out */
}

/* Begin a visit: returns 0, or -1 and `why`. Only a thread that has entered may leave. */
static int enter(cuda_thread *t, visit *v, char *why) {
  if (add32(&t->visitors, 1) & CUDA_THREAD_CLOSED) { /* pairs with see_visitors_out */
    add32(&t->visitors, (uint32_t)-1);
    snprintf(why, DEVICE_WHY, "it has been closed");
    return -1;
  }
  if (take_context(t, v, why) == 0) return 0;
  add32(&t->visitors, (uint32_t)-1);
  return -1;
}

enum { TIMED_EVERY = 16 }; /* mean number of submissions for one that is timed */

/* Return whether the next mark is timed, if one is free. Distances are random, since tensors come in the same order in every
 * step. The caller holds marks_lock. */
static int is_time(cuda_thread *t) {
  if (t->timed == NULL || t->until_timed-- != 0) return 0;
  t->drawn = t->drawn * 1103515245 + 12345;
  t->until_timed = (t->drawn >> 16) % (2 * TIMED_EVERY - 1);
  return 1;
}

/* Take a mark from its pool; NULL: the pool is empty. */
static device_mark *from_pool(cuda_thread *t) {
  device_mark *mark, **pool;
  pthread_mutex_lock(&t->marks_lock);
  pool = is_time(t) ? &t->timed : &t->marks;
  mark = *pool;
  if (mark != NULL) *pool = mark->next;
  pthread_mutex_unlock(&t->marks_lock);
  return mark;
}

static void unmark(device *d, device_mark *mark) {
  cuda_thread *t = cuda_thread_of(d);
  device_mark **pool = mark->timed ? &t->timed : &t->marks;
  if (mark->unread) return; /* the CUDA thread calls, which has yet to read it */
  pthread_mutex_lock(&t->marks_lock);
  mark->next = *pool;
  *pool = mark;
  pthread_mutex_unlock(&t->marks_lock);
}

int cuda_thread_make_mark(cuda_thread *t, int timed, device_mark **made) {
  device_mark *mark = calloc(1, sizeof *mark);
  CUevent event = NULL;
  if (mark == NULL) return cuda_thread_failed(t, "cuEventCreate", CUDA_ERROR_OUT_OF_MEMORY, NULL, "no memory for a mark");
  if (CUDA(cuEventCreate, &event, timed ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING)) {
    free(mark);
    return -1;
  }
  mark->event = event;
  mark->timed = timed;
  t->n_marks++;
  *made = mark;
  return 0;
}

/* Create one more mark in a thread of the program, since more operations are in flight than there are marks. */
static int another_mark(cuda_thread *t, device_mark **made, char *why) {
  CUevent event = NULL;
  TRY(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
  *made = calloc(1, sizeof **made);
  if (*made == NULL) {
    t->f.cuEventDestroy_v2(event);
    snprintf(why, DEVICE_WHY, "no memory for a mark");
    return -1;
  }
  (*made)->event = event;
  return 0;
}

/* Refuse a stream that is being captured: what the ranks agree on cannot be captured, and captured work cannot be waited for. */
static int expect_no_capture(cuda_thread *t, CUstream stream, char *why) {
  CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
  TRY(cuStreamIsCapturing, stream, &capturing);
  if (capturing == CU_STREAM_CAPTURE_STATUS_NONE) return 0;
  snprintf(why, DEVICE_WHY, "the stream is being captured into a CUDA graph, and what the ranks agree on cannot be captured");
  return -1;
}

/* Record a mark on a stream. */
static int record(cuda_thread *t, CUstream stream, device_mark **made, char *why) {
  device_mark *mark = NULL;
  CUresult code;
  if (expect_no_capture(t, stream, why)) return -1;
  mark = from_pool(t);
  if (mark == NULL && another_mark(t, &mark, why)) return -1;
  code = t->f.cuEventRecord(mark->event, stream);
  if (code != CUDA_SUCCESS) {
    unmark(&t->d, mark);
    return refused(t, "cuEventRecord", code, why);
  }
  *made = mark;
  return 0;
}

static int mark_stream(device *d, void *stream, device_mark **made, char *why) {
  cuda_thread *t = cuda_thread_of(d);
  visit v;
  int status;
  if (enter(t, &v, why)) return -1;
  status = record(t, stream, made, why);
  leave(t, &v);
  return status;
}

/* Have a stream wait for a ticket. */
static int let_wait(cuda_thread *t, CUstream stream, uint64_t ticket, char *why) {
  if (expect_no_capture(t, stream, why)) return -1;
  /* The event may be a later ticket's by now, which is passed later: work on the CUDA thread's stream is passed in order. */
  TRY(cuStreamWaitEvent, stream, t->done[(ticket - 1) % DEVICE_OUTSTANDING], 0);
  return 0;
}

/* Have a stream wait for a ticket between two timed events, between which it does nothing else. */
static int let_stand(cuda_thread *t, cuda_thread_stand *stand, CUstream stream, uint64_t ticket, char *why) {
  if (expect_no_capture(t, stream, why)) return -1;
  TRY(cuEventRecord, stand->before, stream);
  if (load_acquire(&t->d.passed) < ticket && let_wait(t, stream, ticket, why)) return -1; /* pairs with cuda_thread_look */
  TRY(cuEventRecord, stand->behind, stream);
  return 0;
}

static int wait_for(device *d, void *stream, uint64_t ticket, int measured, char *why) {
  cuda_thread *t = cuda_thread_of(d);
  cuda_thread_stand *stand = NULL;
  visit v;
  int status, passed = load_acquire(&d->passed) >= ticket; /* pairs with cuda_thread_look */
  if (passed && !measured) return 0;
  if (enter(t, &v, why)) return passed ? 0 : -1;
  if (measured) stand = cuda_thread_take_stand(t);
  if (stand != NULL) status = let_stand(t, stand, stream, ticket, why);
  else status = passed ? 0 : let_wait(t, stream, ticket, why);
  if (stand != NULL) store32_release(&stand->state, status == 0 ? STAND_RECORDED : STAND_FREE); /* pairs with read_stand */
  leave(t, &v);
  return passed ? 0 : status;
}

static int relax(device *d, char *why) {
  cuda_thread *t = cuda_thread_of(d);
  visit v;
  if (enter(t, &v, why)) return -1;
  v.mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* in which `leave` leaves the thread */
  leave(t, &v);
  return 0;
}

static int has_passed(device *d, uint64_t ticket) {
  cuda_thread *t = cuda_thread_of(d);
  char why[DEVICE_WHY];
  visit v;
  CUresult code;
  if (load_acquire(&d->passed) >= ticket) return 1; /* pairs with cuda_thread_look, and with close_all */
  if (load_acquire(&d->enqueued) < ticket || enter(t, &v, why)) return 0;
  code = t->f.cuEventQuery(t->done[(ticket - 1) % DEVICE_OUTSTANDING]);
  leave(t, &v);
  return code == CUDA_SUCCESS || load_acquire(&d->passed) >= ticket; /* the event may be a later ticket's by now */
}

static int frozen_rest(device *d) {
  cuda_thread *t = cuda_thread_of(d);
  char why[DEVICE_WHY];
  visit v;
  int over;
  if (load_pointer((void **)&t->passes) == NULL) return 1; /* pairs with cuda_thread_make_pass */
  if (enter(t, &v, why)) return 1;
  over = cuda_thread_passes_rest(t) && (!cuda_thread_has_captured(t) || cuda_thread_graphs_rest(t));
  leave(t, &v);
  return over;
}

static void push(device *d, device_item *item) {
  add64(&d->pushed, 1); /* pairs with has_ended_all */
  cuda_thread_push(cuda_thread_of(d), item);
}

static void stop(device *d) { cuda_thread_cancel(cuda_thread_of(d)); }

static void set_targets(device *d, device_item *item) {
  store32_release(&item->unallocated, 0); /* pairs with await_room. The CUDA thread may free it from now on. */
  door_ring(&cuda_thread_of(d)->door, 1);
}

void cuda_thread_serve(device *d) {
  d->mark = mark_stream;
  d->unmark = unmark;
  d->push = push;
  d->turn = cuda_thread_turn;
  d->set_targets = set_targets;
  d->wait = wait_for;
  d->relax = relax;
  d->has_passed = has_passed;
  d->frozen_rest = frozen_rest;
  d->stop = stop;
}
