/* What an event covers, and for how long. cuda.h: cuEventRecord, cuStreamWaitEvent, cuEventDestroy, cuEventElapsedTime.
 */
#include "programs.h"

void unrecorded_wait_is_nothing(void) {
  CUstream s = non_blocking();
  OK(cu.cuStreamWaitEvent(s, new_event(), 0));
  PASSES(s);
}

void unrecorded_query_succeeds(void) { OK(cu.cuEventQuery(new_event())); }

void record_covers_what_came_before(void) {
  CUdeviceptr x = word(0);
  CUstream s = non_blocking();
  CUevent e = new_event();
  gate *g = shut(s);
  store(x, 1, s);
  OK(cu.cuEventRecord(e, s));
  rest();
  RETURNS(cu.cuEventQuery(e), CUDA_ERROR_NOT_READY);
  EXPECT(value_of(x) == 0);
  open_gate(g);
  OK(cu.cuEventSynchronize(e));
  EXPECT(value_of(x) == 1);
}

void record_covers_nothing_later(void) {
  CUdeviceptr x = word(0);
  CUstream s = non_blocking();
  CUevent e = new_event();
  gate *g;
  store(x, 1, s);
  OK(cu.cuEventRecord(e, s));
  g = shut(s);
  HAPPENS(e);
  open_gate(g);
}

void wait_orders_two_streams(void) {
  CUdeviceptr x = word(0), y = word(0);
  CUstream a = non_blocking(), b = non_blocking();
  CUevent e = new_event();
  gate *g = shut(a);
  store(x, 7, a);
  OK(cu.cuEventRecord(e, a));
  OK(cu.cuStreamWaitEvent(b, e, 0));
  copy_word(y, x, b);
  BLOCKED(b);
  open_gate(g);
  OK(cu.cuStreamSynchronize(b));
  EXPECT(value_of(y) == 7);
}

void wait_covers_no_more_than_the_record(void) {
  CUdeviceptr x = word(0);
  CUstream a = non_blocking(), b = non_blocking();
  CUevent e = new_event();
  gate *g;
  store(x, 7, a);
  OK(cu.cuEventRecord(e, a));
  g = shut_behind(a);
  OK(cu.cuStreamWaitEvent(b, e, 0));
  PASSES(b);
  open_gate(g);
}

void wait_stops_nothing_before_it(void) {
  CUdeviceptr x = word(0);
  CUstream a = non_blocking(), b = non_blocking();
  CUevent e = new_event(), before = new_event();
  gate *g = shut(a);
  OK(cu.cuEventRecord(e, a));
  store(x, 3, b);
  OK(cu.cuEventRecord(before, b));
  OK(cu.cuStreamWaitEvent(b, e, 0));
  HAPPENS(before);
  BLOCKED(b);
  open_gate(g);
}

void record_again_moves_no_wait(void) {
  CUstream a = non_blocking(), b = non_blocking(), c = non_blocking();
  CUevent e = new_event();
  gate *first = shut(a), *second;
  OK(cu.cuEventRecord(e, a));
  OK(cu.cuStreamWaitEvent(b, e, 0));
  second = shut_behind(c);
  OK(cu.cuEventRecord(e, c));
  BLOCKED(b);
  open_gate(first);
  PASSES(b);
  open_gate(second);
}

void record_again_moves_queries(void) {
  CUstream a = non_blocking(), b = non_blocking();
  CUevent e = new_event();
  gate *g;
  OK(cu.cuEventRecord(e, a));
  OK(cu.cuEventSynchronize(e));
  g = shut(b);
  OK(cu.cuEventRecord(e, b));
  rest();
  RETURNS(cu.cuEventQuery(e), CUDA_ERROR_NOT_READY);
  open_gate(g);
}

void event_destroyed_while_pending(void) {
  CUdeviceptr x = word(0), y = word(0);
  CUstream a = non_blocking(), b = non_blocking();
  CUevent e = new_event();
  gate *g = shut(a);
  store(x, 9, a);
  OK(cu.cuEventRecord(e, a));
  OK(cu.cuStreamWaitEvent(b, e, 0));
  OK(cu.cuEventDestroy_v2(e));
  copy_word(y, x, b);
  BLOCKED(b);
  open_gate(g);
  OK(cu.cuStreamSynchronize(b));
  EXPECT(value_of(y) == 9);
}

void elapsed_time_needs_both_events(void) {
  CUstream s = non_blocking();
  CUevent start, end, untimed = new_event();
  float ms = -1;
  gate *g;
  OK(cu.cuEventCreate(&start, CU_EVENT_DEFAULT));
  OK(cu.cuEventCreate(&end, CU_EVENT_DEFAULT));
  RETURNS(cu.cuEventElapsedTime(&ms, start, end), CUDA_ERROR_INVALID_HANDLE);
  OK(cu.cuEventRecord(start, s));
  g = shut(s);
  OK(cu.cuEventRecord(end, s));
  OK(cu.cuEventRecord(untimed, s));
  RETURNS(cu.cuEventElapsedTime(&ms, start, end), CUDA_ERROR_NOT_READY);
  rest();
  open_gate(g);
  OK(cu.cuStreamSynchronize(s));
  OK(cu.cuEventElapsedTime(&ms, start, end));
  EXPECT(ms > 5 && ms < 20000);
  RETURNS(cu.cuEventElapsedTime(&ms, start, untimed), CUDA_ERROR_INVALID_HANDLE);
}

/* How long one stream was behind another: a timed event that was waited for, and one on the stream that waited. */
void elapsed_time_of_a_stream_behind_another(void) {
  CUstream a = non_blocking(), b = non_blocking();
  CUevent start, end;
  float ms = -1;
  gate *g;
  OK(cu.cuEventCreate(&start, CU_EVENT_DEFAULT));
  OK(cu.cuEventCreate(&end, CU_EVENT_DEFAULT));
  OK(cu.cuEventRecord(start, a));
  OK(cu.cuStreamSynchronize(a));
  OK(cu.cuStreamWaitEvent(b, start, 0));
  g = shut(b);
  OK(cu.cuEventRecord(end, b));
  rest();
  RETURNS(cu.cuEventElapsedTime(&ms, start, end), CUDA_ERROR_NOT_READY);
  open_gate(g);
  OK(cu.cuStreamSynchronize(b));
  OK(cu.cuEventElapsedTime(&ms, start, end));
  EXPECT(ms > 5 && ms < 20000);
}

static gate *later;
static int opened;

static void *opens_later(void *unused) {
  rest();
  __atomic_store_n(&opened, 1, __ATOMIC_SEQ_CST);
  open_gate(later);
  return unused;
}

void synchronize_returns_when_all_is_done(void) {
  CUstream s = non_blocking();
  CUevent e = new_event();
  pthread_t thread;
  later = shut(s);
  OK(cu.cuEventRecord(e, s));
  EXPECT(pthread_create(&thread, NULL, opens_later, NULL) == 0);
  OK(cu.cuEventSynchronize(e));
  EXPECT(__atomic_load_n(&opened, __ATOMIC_SEQ_CST));
  pthread_join(thread, NULL);
}

void events_across_contexts(void) {
  CUcontext other = second_context();
  CUstream a = non_blocking(), b;
  CUevent e = new_event();
  gate *g;
  OK(cu.cuCtxPushCurrent_v2(other));
  b = non_blocking();
  OK(cu.cuCtxPopCurrent_v2(NULL));
  RETURNS(cu.cuEventRecord(e, b), CUDA_ERROR_INVALID_HANDLE); /* recorded: of its own context only */
  g = shut(a);
  OK(cu.cuEventRecord(e, a));
  OK(cu.cuStreamWaitEvent(b, e, 0)); /* waited for: by any */
  BLOCKED(b);
  open_gate(g);
  PASSES(b);
}
