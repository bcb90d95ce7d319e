/* An event is a place in a stream: that of its last record. */
#include "internal.h"

static event *events;

event *event_of(CUevent handle) {
  event *e = events;
  while (e && e != (event *)handle) e = e->next;
  return e;
}

STAND_API CUresult cuEventCreate(CUevent *made, unsigned flags) {
  event *e;
  ENTER(NEEDS_CONTEXT);
  if (flags & ~7u) LEAVE(CUDA_ERROR_INVALID_VALUE);
  e = calloc(1, sizeof *e);
  *e = (event){.next = events, .context = context_current(), .flags = (int)flags};
  events = e;
  *made = (CUevent)e;
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuEventDestroy_v2(CUevent handle) {
  event **e = &events, *gone;
  ENTER(0);
  while (*e && *e != (event *)handle) e = &(*e)->next;
  if (!(gone = *e)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (MUTANT(destroyed_event_drops_wait))
    for (stream *s = streams; s; s = s->next)
      for (operation *o = s->head; o; o = o->next)
        for (int i = 0; i < o->n_needs; i++)
          if (o->is_wait && o->needs[i] == gone->at) operation_drop(o->needs[i]), o->needs[i] = o->needs[--o->n_needs];
  *e = gone->next;
  operation_drop(gone->at);
  free(gone->knows);
  free(gone);
  LEAVE(CUDA_SUCCESS);
}

static int nothing(void *data) {
  (void)data;
  return 1;
}

STAND_API CUresult cuEventRecord(CUevent which, CUstream handle) {
  static const stand_operation record = {.what = "record", .step = nothing};
  CUresult wrong;
  operation *made;
  stream *s;
  event *e;
  ENTER(0);
  e = event_of(which);
  s = stream_of(handle, &wrong);
  if (!e) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (!s) LEAVE(wrong);
  if (s->context != e->context && !MUTANT(events_need_no_context)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (s->capture) LEAVE(capture_record(e, s));
  if (MUTANT(rerecord_is_ignored) && e->at) LEAVE(CUDA_SUCCESS);
  wrong = stream_put(s, &record, NULL, &made);
  if (wrong) LEAVE(wrong);
  operation_drop(e->at);
  e->at = made;
  e->where = s;
  e->capture = NULL;
  LEAVE(CUDA_SUCCESS);
}

/* A host asks for an event of a capture: that capture is spoilt. */
static CUresult asks(event *e) {
  if (!e->capture) return CUDA_SUCCESS;
  capture_invalidate(e->capture);
  return CUDA_ERROR_CAPTURED_EVENT;
}

static operation *covered(const event *e) { return MUTANT(event_covers_too_much) && e->at ? e->where->last : e->at; }

STAND_API CUresult cuEventQuery(CUevent which) {
  CUresult wrong;
  event *e;
  ENTER(UNSAFE);
  if (!(e = event_of(which))) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if ((wrong = asks(e))) LEAVE(wrong);
  if (!e->at) LEAVE(MUTANT(unrecorded_query_not_ready) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
  if (covered(e)->state != DONE && !MUTANT(query_always_ready)) LEAVE(CUDA_ERROR_NOT_READY);
  thread_learns(e->at);
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuEventSynchronize(CUevent which) {
  CUresult wrong;
  event *e;
  ENTER(UNSAFE);
  if (!(e = event_of(which))) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if ((wrong = asks(e))) LEAVE(wrong);
  if (e->at && !MUTANT(synchronize_does_nothing)) {
    operation *at = operation_keep(covered(e));
    wrong = operation_await(at);
    operation_drop(at);
  }
  LEAVE(wrong);
}

STAND_API CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
  event *a, *b;
  ENTER(0);
  a = event_of(start);
  b = event_of(end);
  if (!a || !b || !a->at || !b->at || ((a->flags | b->flags) & CU_EVENT_DISABLE_TIMING))
    LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if ((a->at->state != DONE || b->at->state != DONE) && !MUTANT(elapsed_of_pending)) LEAVE(CUDA_ERROR_NOT_READY);
  *milliseconds = (float)((double)b->at->done_at - (double)a->at->done_at) / 1e6f;
  LEAVE(CUDA_SUCCESS);
}

void events_forget(const capture *c) {
  for (event *e = events; e; e = e->next)
    if (e->capture == c) e->capture = NULL;
}
