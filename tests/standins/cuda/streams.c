/* Streams are queues. What an operation has to wait for is settled when it is enqueued. */
#include "internal.h"

stream *streams;
static uint64_t n_operations;
static int n_streams;

operation *operation_keep(operation *o) {
  if (o) o->references++;
  return o;
}

void operation_drop(operation *o) {
  if (!o || --o->references) return;
  for (int i = 0; i < o->n_needs; i++) operation_drop(o->needs[i]);
  free(o->needs);
  moment_drop(o->when);
  if (o->own.drop) o->own.drop(o->own.data);
  free(o);
}

stream *stream_make(context *c, int flags, int priority) {
  stream *s = calloc(1, sizeof *s), **end = &streams;
  *s = (stream){.context = c, .flags = flags, .priority = priority, .agent = agent_new(0)};
  snprintf(s->name, sizeof s->name, "stream %d", n_streams++);
  while (*end) end = &(*end)->next;
  return *end = s;
}

/* Of the thread: made when it is first used. */
static stream *per_thread(context *c) {
  static __thread stream *mine;
  if (!mine || mine->context != c) mine = stream_make(c, 0, 0);
  return mine;
}

stream *stream_of(CUstream handle, CUresult *wrong) {
  context *c = context_current();
  stream *s = streams;
  *wrong = CUDA_SUCCESS;
  if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
    if (!c) return *wrong = CUDA_ERROR_INVALID_CONTEXT, NULL;
    if (handle == CU_STREAM_PER_THREAD) return per_thread(c);
    if (legacy_is_captured(c)) return *wrong = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, NULL;
    return c->legacy;
  }
  while (s && (s != (stream *)handle || s->destroyed)) s = s->next;
  if (!s) *wrong = CUDA_ERROR_INVALID_HANDLE;
  return s;
}

int streams_busy(void) {
  for (stream *s = streams; s; s = s->next)
    if (s->head) return 1;
  return 0;
}

/* ---- stream 0 ---- */

static int is_legacy(const stream *s) { return s == s->context->legacy; }

/* Whether what is put into `s` waits for what is in `other`, as the rules of stream 0 say. */
int barrier(const stream *s, const stream *other) {
  if (MUTANT(stream0_no_barrier) || s == other) return 0;
  if (s->context != other->context && !MUTANT(stream0_crosses_contexts)) return 0;
  if (!MUTANT(stream0_stops_all) && ((s->flags | other->flags) & CU_STREAM_NON_BLOCKING)) return 0;
  return is_legacy(s) || is_legacy(other);
}

/* A destroyed stream is empty. What it did, stream 0 has to know of. */
void stream_gone(stream *s) {
  stream **each = &streams, *legacy = s->context->legacy;
  while (*each != s) each = &(*each)->next;
  *each = s->next;
  if (s->last && barrier(legacy, s)) {
    if (!legacy->past) legacy->past = moment_new();
    moment_join(legacy->past, s->last->when);
  }
  operation_drop(s->last);
  s->last = NULL;
  agent_done(s->agent); /* the stream itself stays: events name it */
}

/* ---- enqueuing ---- */

static void need(operation *o, operation *other) {
  if (!other) return;
  if (!MUTANT(clock_without_waits)) moment_join(o->when, other->when);
  if (other->state == DONE) return;
  o->needs = realloc(o->needs, sizeof *o->needs * (size_t)(o->n_needs + 1));
  o->needs[o->n_needs++] = operation_keep(other);
}

CUresult stream_put(stream *s, const stand_operation *what, operation *other, operation **made) {
  operation *o;
  stand_access *accesses = NULL;
  if (s->capture) {
    if (other || made) return CUDA_ERROR_UNKNOWN; /* events and waits have their own way into a capture */
    return capture_put(s, what);
  }
  o = calloc(1, sizeof *o);
  *o = (operation){
      .references = 1, .number = ++n_operations, .born = now(), .stream = s, .when = moment_new(), .own = *what};
  snprintf(o->what, sizeof o->what, "%s on %s", what->what, s->name);
  if (!MUTANT(clock_without_launches)) moment_join(o->when, agent_of_thread()->now);
  if (s->last && !MUTANT(clock_without_streams)) moment_join(o->when, s->last->when);
  if (s->past) moment_join(o->when, s->past);
  need(o, other);
  for (stream *each = streams; each; each = each->next)
    if (barrier(s, each)) need(o, each->last);
  o->agent = s->agent->number;
  o->when->at[o->agent] = o->epoch = ++s->agent->epoch;
  if (what->n_accesses) {
    accesses = malloc(sizeof *accesses * (size_t)what->n_accesses);
    memcpy(accesses, what->accesses, sizeof *accesses * (size_t)what->n_accesses);
    for (int i = 0; i < what->n_accesses; i++) memory_check(&accesses[i], o->agent, o->epoch, o->when, o->what);
    free(accesses);
  }
  o->own.accesses = NULL; /* the caller's */
  if (s->tail) s->tail->next = o;
  else s->head = o;
  s->tail = o;
  operation_drop(s->last);
  s->last = operation_keep(o);
  if (made) *made = operation_keep(o);
  pthread_cond_broadcast(&changed);
  return CUDA_SUCCESS;
}

CUresult stand_enqueue(CUstream handle, const stand_operation *what) {
  CUresult wrong;
  stream *s;
  stand_lock();
  s = stream_of(handle, &wrong);
  if (s && s->capture && what->wanted && !what->again)
    wrong = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; /* each launch of it meets its peers anew */
  else if (s) wrong = stream_put(s, what, NULL, NULL);
  stand_unlock();
  return wrong;
}

int stand_captures(CUstream handle) {
  CUresult wrong;
  stream *s;
  int yes;
  stand_lock();
  s = stream_of(handle, &wrong);
  yes = s && s->capture;
  stand_unlock();
  return yes;
}

/* ---- the driver's functions ---- */

static int nothing(void *data) {
  (void)data;
  return 1;
}

static int as_mutants_wait(void *data) { return ((event *)data)->at && ((event *)data)->at->state == DONE; }

STAND_API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  ENTER(NEEDS_CONTEXT);
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuStreamCreateWithPriority(CUstream *made, unsigned flags, int priority) {
  ENTER(NEEDS_CONTEXT);
  if (flags > CU_STREAM_NON_BLOCKING) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!MUTANT(priority_not_clamped)) priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
  *made = (CUstream)stream_make(context_current(), (int)flags, priority);
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuStreamGetPriority(CUstream handle, int *priority) {
  CUresult wrong;
  stream *s;
  ENTER(0);
  s = stream_of(handle, &wrong);
  if (s) *priority = s->priority;
  LEAVE(wrong);
}

STAND_API CUresult cuStreamDestroy_v2(CUstream handle) {
  CUresult wrong;
  stream *s;
  ENTER(0);
  s = stream_of(handle, &wrong);
  if (!s) LEAVE(wrong);
  if (is_legacy(s)) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (s->capture) capture_invalidate(s->capture);
  s->destroyed = 1; /* the executor frees it when it is empty */
  if (MUTANT(destroyed_stream_drops_work))
    for (operation *o = s->head; o; o = o->next) o->own.step = nothing;
  pthread_cond_broadcast(&changed);
  LEAVE(CUDA_SUCCESS);
}

/* Stream 0 as a host sees it: with all that it waits for. */
CUresult stream_await(stream *s) {
  CUresult result = CUDA_SUCCESS;
  if (MUTANT(synchronize_does_nothing)) return result;
  for (stream *each = streams; each && !result; each = each->next)
    if (each == s || (is_legacy(s) && barrier(s, each))) {
      operation *last = operation_keep(each->last);
      if (last) result = operation_await(last);
      operation_drop(last);
    }
  return result;
}

static CUresult asks(stream *s) { /* a host asks for the state of a stream */
  if (!s->capture) return CUDA_SUCCESS;
  capture_invalidate(s->capture);
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

STAND_API CUresult cuStreamSynchronize(CUstream handle) {
  CUresult wrong;
  stream *s;
  ENTER(UNSAFE);
  s = stream_of(handle, &wrong);
  if (s && !(wrong = asks(s))) wrong = stream_await(s);
  LEAVE(wrong);
}

STAND_API CUresult cuCtxSynchronize(void) {
  context *c;
  CUresult result = CUDA_SUCCESS;
  ENTER(NEEDS_CONTEXT | UNSAFE);
  c = context_current();
  for (stream *s = streams; s && !result; s = s->next)
    if (s->context == c) result = asks(s); /* one that captures spoils it for all */
  for (stream *s = streams; s && !result; s = s->next)
    if (s->context == c) result = stream_await(s);
  LEAVE(result);
}

STAND_API CUresult cuStreamQuery(CUstream handle) {
  CUresult wrong;
  stream *s;
  ENTER(UNSAFE);
  s = stream_of(handle, &wrong);
  if (!s || (wrong = asks(s))) LEAVE(wrong);
  for (stream *each = streams; each; each = each->next)
    if (each == s || (is_legacy(s) && barrier(s, each))) {
      if (each->head && !MUTANT(query_always_ready)) LEAVE(CUDA_ERROR_NOT_READY);
      if (each->last) thread_learns(each->last);
    }
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuStreamWaitEvent(CUstream handle, CUevent which, unsigned flags) {
  stand_operation wait = {.what = "wait", .step = nothing};
  CUresult wrong;
  operation *made, *at;
  stream *s;
  event *e;
  ENTER(0);
  e = event_of(which);
  s = stream_of(handle, &wrong);
  if (!s) LEAVE(wrong);
  if (!e) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (flags) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (e->capture || s->capture) LEAVE(capture_wait(s, e));
  at = e->at;
  if (at && (MUTANT(event_covers_too_much) || MUTANT(wait_covers_too_much))) at = e->where->last;
  if (MUTANT(wait_does_nothing)) at = NULL;
  if (!at && !MUTANT(unrecorded_wait_blocks)) {
    /* An empty set of work: nothing is waited for, but stream 0 acts. */
    LEAVE(stream_put(s, &wait, NULL, NULL));
  }
  if (!at || MUTANT(rerecord_moves_waits)) wait.step = as_mutants_wait, wait.data = e;
  wrong = stream_put(s, &wait, MUTANT(rerecord_moves_waits) ? NULL : at, &made);
  if (!wrong) {
    made->is_wait = 1;
    operation_drop(made);
  }
  LEAVE(wrong);
}
