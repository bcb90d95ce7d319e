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

int lane_make_timers(lane *l) {
  CUDA_STEP(cuEventCreate, &l->origin, CU_EVENT_DEFAULT);
  for (int k = 0; k < LANE_SAMPLES; k++) {
    device_mark *mark = NULL;
    for (int n = 0; n <= DEVICE_SLICES; n++) CUDA_STEP(cuEventCreate, &l->samples[k].events[n], CU_EVENT_DEFAULT);
    STEP(lane_make_mark(l, 1, &mark));
    l->d.unmark(&l->d, mark);
  }
  for (int k = 0; k < LANE_STANDS; k++) {
    CUDA_STEP(cuEventCreate, &l->stands[k].before, CU_EVENT_DEFAULT);
    CUDA_STEP(cuEventCreate, &l->stands[k].behind, CU_EVENT_DEFAULT);
  }
  return lane_compare_clocks(l);
}

/* Destroy an event, if there is one. */
static void release(lane *l, CUevent *event) {
  if (*event != NULL) CUDA(cuEventDestroy_v2, *event);
  *event = NULL;
}

/* Free a sample, and return its mark to the pool. */
static void free_sample(lane *l, lane_sample *s) {
  s->ticket = 0;
  s->mark->unread = 0;
  l->d.unmark(&l->d, s->mark);
}

void lane_release_timers(lane *l) {
  release(l, &l->origin);
  for (int k = 0; k < LANE_SAMPLES; k++) {
    if (l->samples[k].ticket != 0) free_sample(l, &l->samples[k]); /* release_marks frees the pool later */
    for (int n = 0; n <= DEVICE_SLICES; n++) release(l, &l->samples[k].events[n]);
  }
  for (int k = 0; k < LANE_STANDS; k++) {
    release(l, &l->stands[k].before);
    release(l, &l->stands[k].behind);
  }
}

/* ---- the two clocks ---- */

/* Record the origin: the device passes it between two readings of the host's clock. Later times count from it. */
int lane_compare_clocks(lane *l) {
  uint64_t before = now_ns(), after;
  if (before < l->compare_at) return 0;
  l->compare_at = before + AGAIN_NS;
  l->origin_ns = 0;
  CUDA_STEP(cuEventRecord, l->origin, l->stream);
  do {
    CUresult code = IN_CALL(cuEventQuery, l->origin);
    after = now_ns();
    if (code != CUDA_ERROR_NOT_READY) {
      STEP(lane_after_cuda(l, "cuEventQuery", code));
      l->origin_ns = before + (after - before) / 2;
      l->origin_error = (after - before + 1) / 2;
      l->compare_at = before + COMPARED_NS;
      return 0;
    }
  } while (after - before < PROMPT_NS && load_pointer(&l->pushed) == NULL); /* pairs with lane_push */
  store_pointer(&l->d.call, NULL);
  return 0;
}

/* Measure the nanoseconds between two events; negative if `ended` came first. */
static int elapsed(lane *l, CUevent begun, CUevent ended, int64_t *ns) {
  float ms = 0;
  STEP(CUDA(cuEventElapsedTime, &ms, begun, ended));
  *ns = (int64_t)((double)ms * 1e6);
  return 0;
}

/* Measure the nanoseconds between two events; 0 if `ended` came first. */
static int duration(lane *l, CUevent begun, CUevent ended, uint64_t *ns) {
  int64_t lasted = 0;
  STEP(elapsed(l, begun, ended, &lasted));
  *ns = lasted > 0 ? (uint64_t)lasted : 0;
  return 0;
}

/* ---- an item ---- */

int lane_sample_begins(lane *l, const device_item *item) {
  lane_sample *s = NULL;
  device_mark *mark = NULL;
  for (int k = 0; k < item->n_ready && mark == NULL; k++)
    if (item->ready[k]->timed) mark = item->ready[k];
  for (int k = 0; k < LANE_SAMPLES && mark != NULL; k++)
    if (l->samples[k].ticket == 0) s = &l->samples[k];
  if (s == NULL) return 0;
  CUDA_STEP(cuEventRecord, s->events[0], l->stream);
  mark->unread = 1;
  s->mark = mark;
  s->ticket = item->ticket;
  s->sequence = item->sequence;
  s->bytes = item->bytes;
  s->n = 0;
  l->sampling = s;
  return 0;
}

/* Give the sample's mark back to its item. */
void lane_sample_dropped(lane *l) {
  if (l->sampling == NULL) return;
  l->sampling->ticket = 0;
  l->sampling->mark->unread = 0;
  l->sampling = NULL;
}

int lane_end_slice(lane *l, int stage) {
  lane_sample *s = l->sampling;
  if (s == NULL) return 0;
  if (s->n == 0 || s->stages[s->n - 1] != stage) {
    if (s->n == DEVICE_SLICES) { /* an entry of too many pieces is no sample */
      lane_sample_dropped(l);
      return 0;
    }
    s->stages[s->n++] = stage;
  }
  CUDA_STEP(cuEventRecord, s->events[s->n], l->stream);
  return 0;
}

/* ---- reading ---- */

/* Add slice k to the durations, and store its times if the host's time of the origin is known. */
static int read_slice(lane *l, const lane_sample *s, int k, device_sample *sample) {
  device_slice *slice = &sample->slices[k];
  uint64_t lasted = 0;
  int64_t begun = 0;
  STEP(duration(l, s->events[k], s->events[k + 1], &lasted));
  sample->ns[s->stages[k]] += lasted;
  if (l->origin_ns == 0) return 0;
  STEP(elapsed(l, l->origin, s->events[k], &begun));
  slice->stage = s->stages[k];
  slice->begun = l->origin_ns + (uint64_t)begun;
  slice->ended = slice->begun + lasted;
  sample->n_slices = k + 1;
  return 0;
}

/* Make the sample's first event the origin if the old one is long ago: CUDA tells milliseconds as a float of 24 bits, which
 * resolves microseconds after ten seconds. */
static int move_origin(lane *l, lane_sample *s) {
  CUevent event = s->events[0];
  int64_t since = 0;
  if (l->origin_ns == 0) return 0;
  STEP(elapsed(l, l->origin, event, &since));
  if (since < COMPARED_NS) return 0;
  if (since > TOO_OLD_NS) {
    l->origin_ns = l->compare_at = 0; /* until the next comparison the host's time of samples is unknown */
    return 0;
  }
  s->events[0] = l->origin;
  l->origin = event;
  l->origin_ns += (uint64_t)since;
  return 0;
}

/* Read a sample that the device has passed, free it and hand it to the owner. */
static int read_sample(lane *l, lane_sample *s) {
  device_sample sample = {
      .sequence = s->sequence, .bytes = s->bytes, .has = (1u << DEVICE_EXPOSED) - 1, .error_ns = l->origin_error};
  STEP(duration(l, s->mark->event, s->events[0], &sample.ns[DEVICE_QUEUE]));
  for (int k = 0; k < s->n; k++) STEP(read_slice(l, s, k, &sample));
  STEP(move_origin(l, s));
  free_sample(l, s);
  if (load_pointer((void **)&l->d.sampled) != NULL) l->d.sampled(&l->d, &sample);
  return 0;
}

/* Read, free and hand over a measured wait, if the program's stream has passed it. */
static int read_stand(lane *l, lane_stand *stand) {
  device_sample sample = {.has = 1u << DEVICE_EXPOSED};
  CUresult code;
  if (load32_acquire(&stand->state) != STAND_RECORDED) return 0; /* pairs with wait_for: both events are recorded */
  code = IN_CALL(cuEventQuery, stand->behind);
  store_pointer(&l->d.call, NULL);
  if (code == CUDA_ERROR_NOT_READY) return 0;
  STEP(lane_after_cuda(l, "cuEventQuery", code));
  STEP(duration(l, stand->before, stand->behind, &sample.ns[DEVICE_EXPOSED]));
  store32_release(&stand->state, STAND_FREE); /* pairs with lane_take_stand */
  if (load_pointer((void **)&l->d.sampled) != NULL) l->d.sampled(&l->d, &sample);
  return 0;
}

int lane_read_samples(lane *l) {
  for (int k = 0; k < LANE_SAMPLES; k++) {
    lane_sample *s = &l->samples[k];
    if (s->ticket != 0 && s != l->sampling && s->ticket <= l->d.passed) STEP(read_sample(l, s));
  }
  for (int k = 0; k < LANE_STANDS; k++) STEP(read_stand(l, &l->stands[k]));
  return 0;
}

int lane_has_samples(const lane *l) {
  for (int k = 0; k < LANE_STANDS; k++)
    if (load32_relaxed(&l->stands[k].state) == STAND_RECORDED) return 1;
  return 0;
}

lane_stand *lane_take_stand(lane *l) {
  for (int k = 0; k < LANE_STANDS; k++)
    if (cas32(&l->stands[k].state, STAND_FREE, STAND_TAKEN)) return &l->stands[k]; /* pairs with read_stand */
  return NULL;
}
