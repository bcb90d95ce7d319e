/* Durations of samples of the enqueued work, by the device's own clock: timed events, beside the events without times that every
 * item has.
 *
 * Every few submissions one gets a timed mark, and its item is a sample. Timed events around the item's stages are read once the
 * device has passed it. Likewise, samples measure how long a program's stream stands still to wait for its gradients.
 */
#include "calls.h"

#include <stdlib.h>

static const int64_t COMPARED_NS = 1000000000; /* between two comparisons of the device's clock with the host's */
static const uint64_t AGAIN_NS = 20000000;     /* likewise, after a comparison that failed */
static const int64_t TOO_OLD_NS = 10000000000; /* age of the origin from which on times are too inexact */
static const uint64_t PROMPT_NS = 1000000;     /* longest duration of a comparison that counts */

/* ---- events ---- */

int cuda_thread_make_timers(cuda_thread *t) {
  CUDA_STEP(cuEventCreate, &t->origin, CU_EVENT_DEFAULT);
  for (int k = 0; k < CUDA_THREAD_SAMPLES; k++) {
    device_mark *mark = NULL;
    for (int n = 0; n <= DEVICE_SLICES; n++) CUDA_STEP(cuEventCreate, &t->samples[k].events[n], CU_EVENT_DEFAULT);
    STEP(cuda_thread_make_mark(t, 1, &mark));
    t->d.unmark(&t->d, mark);
  }
  for (int k = 0; k < CUDA_THREAD_STANDS; k++) {
    CUDA_STEP(cuEventCreate, &t->stands[k].before, CU_EVENT_DEFAULT);
    CUDA_STEP(cuEventCreate, &t->stands[k].behind, CU_EVENT_DEFAULT);
  }
  return cuda_thread_compare_clocks(t);
}

/* Destroy an event, if there is one. */
static void release(cuda_thread *t, CUevent *event) {
  if (*event != NULL) CUDA(cuEventDestroy_v2, *event);
  *event = NULL;
}

/* Free a sample, and return its mark to the pool. */
static void free_sample(cuda_thread *t, cuda_thread_sample *s) {
  s->ticket = 0;
  s->mark->unread = 0;
  t->d.unmark(&t->d, s->mark);
}

void cuda_thread_release_timers(cuda_thread *t) {
  release(t, &t->origin);
  for (int k = 0; k < CUDA_THREAD_SAMPLES; k++) {
    if (t->samples[k].ticket != 0) free_sample(t, &t->samples[k]); /* release_marks frees the pool later */
    for (int n = 0; n <= DEVICE_SLICES; n++) release(t, &t->samples[k].events[n]);
  }
  for (int k = 0; k < CUDA_THREAD_STANDS; k++) {
    release(t, &t->stands[k].before);
    release(t, &t->stands[k].behind);
  }
}

/* ---- the two clocks ---- */

/* Record the origin: the device passes it between two readings of the host's clock. Later times count from it. */
int cuda_thread_compare_clocks(cuda_thread *t) {
  uint64_t before = now_ns(), after;
  if (before < t->compare_at) return 0;
  t->compare_at = before + AGAIN_NS;
  t->origin_ns = 0;
  CUDA_STEP(cuEventRecord, t->origin, t->stream);
  do {
    CUresult code = IN_CALL(cuEventQuery, t->origin);
    after = now_ns();
    if (code != CUDA_ERROR_NOT_READY) {
      STEP(cuda_thread_after_cuda(t, "cuEventQuery", code));
      t->origin_ns = before + (after - before) / 2;
      t->origin_error = (after - before + 1) / 2;
      t->compare_at = before + COMPARED_NS;
      return 0;
    }
  } while (after - before < PROMPT_NS && load_pointer(&t->pushed) == NULL); /* pairs with cuda_thread_push */
  store_pointer(&t->d.call, NULL);
  return 0;
}

/* Measure the nanoseconds between two events; negative if `ended` came first. */
static int elapsed(cuda_thread *t, CUevent begun, CUevent ended, int64_t *ns) {
  float ms = 0;
  STEP(CUDA(cuEventElapsedTime, &ms, begun, ended));
  *ns = (int64_t)((double)ms * 1e6);
  return 0;
}

/* Measure the nanoseconds between two events; 0 if `ended` came first. */
static int duration(cuda_thread *t, CUevent begun, CUevent ended, uint64_t *ns) {
  int64_t lasted = 0;
  STEP(elapsed(t, begun, ended, &lasted));
  *ns = lasted > 0 ? (uint64_t)lasted : 0;
  return 0;
}

/* ---- an item ---- */

int cuda_thread_sample_begins(cuda_thread *t, const device_item *item) {
  cuda_thread_sample *s = NULL;
  device_mark *mark = NULL;
  for (int k = 0; k < item->n_ready && mark == NULL; k++)
    if (item->ready[k]->timed) mark = item->ready[k];
  for (int k = 0; k < CUDA_THREAD_SAMPLES && mark != NULL; k++)
    if (t->samples[k].ticket == 0) s = &t->samples[k];
  if (s == NULL) return 0;
  CUDA_STEP(cuEventRecord, s->events[0], t->stream);
  mark->unread = 1;
  s->mark = mark;
  s->ticket = item->ticket;
  s->sequence = item->sequence;
  s->bytes = item->bytes;
  s->n = 0;
  t->sampling = s;
  return 0;
}

/* Give the sample's mark back to its item. */
void cuda_thread_sample_dropped(cuda_thread *t) {
  if (t->sampling == NULL) return;
  t->sampling->ticket = 0;
  t->sampling->mark->unread = 0;
  t->sampling = NULL;
}

int cuda_thread_end_slice(cuda_thread *t, int stage) {
  cuda_thread_sample *s = t->sampling;
  if (s == NULL) return 0;
  if (s->n == 0 || s->stages[s->n - 1] != stage) {
    if (s->n == DEVICE_SLICES) { /* an entry of too many pieces is no sample */
      cuda_thread_sample_dropped(t);
      return 0;
    }
    s->stages[s->n++] = stage;
  }
  CUDA_STEP(cuEventRecord, s->events[s->n], t->stream);
  return 0;
}

/* ---- reading ---- */

/* Add slice k to the durations, and store its times if the host's time of the origin is known. */
static int read_slice(cuda_thread *t, const cuda_thread_sample *s, int k, device_sample *sample) {
  device_slice *slice = &sample->slices[k];
  uint64_t lasted = 0;
  int64_t begun = 0;
  STEP(duration(t, s->events[k], s->events[k + 1], &lasted));
  sample->ns[s->stages[k]] += lasted;
  if (t->origin_ns == 0) return 0;
  STEP(elapsed(t, t->origin, s->events[k], &begun));
  slice->stage = s->stages[k];
  slice->begun = t->origin_ns + (uint64_t)begun;
  slice->ended = slice->begun + lasted;
  sample->n_slices = k + 1;
  return 0;
}

/* Make the sample's first event the origin if the old one is long ago: CUDA tells milliseconds as a float of 24 bits, which
 * resolves microseconds after ten seconds. */
static int move_origin(cuda_thread *t, cuda_thread_sample *s) {
  CUevent event = s->events[0];
  int64_t since = 0;
  if (t->origin_ns == 0) return 0;
  STEP(elapsed(t, t->origin, event, &since));
  if (since < COMPARED_NS) return 0;
  if (since > TOO_OLD_NS) {
    t->origin_ns = t->compare_at = 0; /* until the next comparison the host's time of samples is unknown */
    return 0;
  }
  s->events[0] = t->origin;
  t->origin = event;
  t->origin_ns += (uint64_t)since;
  return 0;
}

/* Read a sample that the device has passed, free it and hand it to the owner. */
static int read_sample(cuda_thread *t, cuda_thread_sample *s) {
  device_sample sample = {
      .sequence = s->sequence, .bytes = s->bytes, .has = (1u << DEVICE_EXPOSED) - 1, .error_ns = t->origin_error};
  STEP(duration(t, s->mark->event, s->events[0], &sample.ns[DEVICE_QUEUE]));
  for (int k = 0; k < s->n; k++) STEP(read_slice(t, s, k, &sample));
  STEP(move_origin(t, s));
  free_sample(t, s);
  if (load_pointer((void **)&t->d.sampled) != NULL) t->d.sampled(&t->d, &sample);
  return 0;
}

/* Read, free and hand over a measured wait, if the program's stream has passed it. */
static int read_stand(cuda_thread *t, cuda_thread_stand *stand) {
  device_sample sample = {.has = 1u << DEVICE_EXPOSED};
  CUresult code;
  if (load32_acquire(&stand->state) != STAND_RECORDED) return 0; /* pairs with wait_for: both events are recorded */
  code = IN_CALL(cuEventQuery, stand->behind);
  store_pointer(&t->d.call, NULL);
  if (code == CUDA_ERROR_NOT_READY) return 0;
  STEP(cuda_thread_after_cuda(t, "cuEventQuery", code));
  STEP(duration(t, stand->before, stand->behind, &sample.ns[DEVICE_EXPOSED]));
  store32_release(&stand->state, STAND_FREE); /* pairs with cuda_thread_take_stand */
  if (load_pointer((void **)&t->d.sampled) != NULL) t->d.sampled(&t->d, &sample);
  return 0;
}

int cuda_thread_read_samples(cuda_thread *t) {
  for (int k = 0; k < CUDA_THREAD_SAMPLES; k++) {
    cuda_thread_sample *s = &t->samples[k];
    if (s->ticket != 0 && s != t->sampling && s->ticket <= t->d.passed) STEP(read_sample(t, s));
  }
  for (int k = 0; k < CUDA_THREAD_STANDS; k++) STEP(read_stand(t, &t->stands[k]));
  return 0;
}

int cuda_thread_has_samples(const cuda_thread *t) {
  for (int k = 0; k < CUDA_THREAD_STANDS; k++)
    if (load32_relaxed(&t->stands[k].state) == STAND_RECORDED) return 1;
  return 0;
}

cuda_thread_stand *cuda_thread_take_stand(cuda_thread *t) {
  for (int k = 0; k < CUDA_THREAD_STANDS; k++)
    if (cas32(&t->stands[k].state, STAND_FREE, STAND_TAKEN)) return &t->stands[k]; /* pairs with read_stand */
  return NULL;
}
