/* Streams: their order, stream 0, and what a call takes with it. cuda.h: cuStreamDestroy, cuLaunchKernel; the guide's
 * "stream synchronization behavior" and "API synchronization behavior". */
#include "programs.h"

#include <stdlib.h>

void stream_runs_in_order(void) {
  CUdeviceptr x = word(1), y = word(0);
  CUstream s = non_blocking();
  CUevent e = new_event();
  gate *g = shut(s);
  copy_word(y, x, s);
  store(x, 2, s);
  OK(cu.cuEventRecord(e, s));
  rest();
  RETURNS(cu.cuEventQuery(e), CUDA_ERROR_NOT_READY);
  EXPECT(value_of(y) == 0);
  open_gate(g);
  OK(cu.cuStreamSynchronize(s));
  EXPECT(value_of(y) == 1 && value_of(x) == 2);
}

void stream_destroyed_while_pending(void) {
  CUdeviceptr x = word(0);
  CUstream s = non_blocking();
  CUevent e = new_event();
  gate *g = shut(s);
  store(x, 3, s);
  OK(cu.cuEventRecord(e, s));
  OK(cu.cuStreamDestroy_v2(s));
  rest();
  RETURNS(cu.cuEventQuery(e), CUDA_ERROR_NOT_READY);
  open_gate(g);
  OK(cu.cuEventSynchronize(e));
  EXPECT(value_of(x) == 3);
}

void query_tells_whether_a_stream_is_empty(void) {
  CUstream s = non_blocking();
  gate *g;
  OK(cu.cuStreamQuery(s));
  g = shut(s);
  RETURNS(cu.cuStreamQuery(s), CUDA_ERROR_NOT_READY);
  open_gate(g);
  PASSES(s);
}

void priorities_are_clamped(void) {
  int least, greatest, got;
  CUstream s;
  OK(cu.cuCtxGetStreamPriorityRange(&least, &greatest));
  EXPECT(least >= greatest);
  OK(cu.cuStreamCreateWithPriority(&s, CU_STREAM_NON_BLOCKING, greatest - 10));
  OK(cu.cuStreamGetPriority(s, &got));
  EXPECT(got == greatest);
  OK(cu.cuStreamCreateWithPriority(&s, CU_STREAM_NON_BLOCKING, least + 10));
  OK(cu.cuStreamGetPriority(s, &got));
  EXPECT(got == least);
}

/* ---- stream 0 ---- */

void stream0_waits_for_blocking_streams(void) {
  CUstream s = blocking();
  CUdeviceptr x = word(0);
  CUevent e = new_event();
  gate *g = shut(s);
  store(x, 1, CU_STREAM_LEGACY);
  OK(cu.cuEventRecord(e, NULL));
  rest();
  RETURNS(cu.cuEventQuery(e), CUDA_ERROR_NOT_READY);
  EXPECT(value_of(x) == 0);
  open_gate(g);
  OK(cu.cuEventSynchronize(e));
  EXPECT(value_of(x) == 1);
}

void blocking_streams_wait_for_stream0(void) {
  CUstream s = blocking();
  CUdeviceptr x = word(0);
  gate *g = shut(NULL);
  store(x, 1, s);
  BLOCKED(s);
  EXPECT(value_of(x) == 0);
  open_gate(g);
  PASSES(s);
}

void blocking_streams_do_not_wait_for_each_other(void) {
  CUstream a = blocking(), b = blocking();
  CUdeviceptr x = word(0), y = word(0);
  gate *g = shut(a);
  store(x, 1, b);
  PASSES(b);
  store(y, 1, NULL); /* waits for a; and b for it, from now on */
  store(x, 2, b);
  BLOCKED(b);
  EXPECT(value_of(x) == 1);
  open_gate(g);
  PASSES(b);
}

void non_blocking_streams_pass_stream0(void) {
  CUstream s = non_blocking();
  CUdeviceptr x = word(0);
  CUevent e = new_event();
  gate *g = shut(NULL);
  store(x, 1, s);
  PASSES(s);
  open_gate(g);
  PASSES(NULL);
  g = shut(s);
  store(x, 2, NULL);
  OK(cu.cuEventRecord(e, NULL));
  HAPPENS(e);
  open_gate(g);
}

void stream0_is_of_its_context(void) {
  CUcontext other = second_context();
  CUdeviceptr x;
  gate *g;
  OK(cu.cuCtxPushCurrent_v2(other));
  x = word(0);
  OK(cu.cuCtxPopCurrent_v2(NULL));
  g = shut(NULL);
  OK(cu.cuCtxPushCurrent_v2(other));
  store(x, 1, NULL);
  PASSES(NULL);
  OK(cu.cuCtxPopCurrent_v2(NULL));
  open_gate(g);
}

/* ---- what a call takes with it ---- */

void arguments_are_copied_at_the_launch(void) {
  CUdeviceptr x = word(0);
  CUfunction f = store_kernel();
  CUstream s = non_blocking();
  unsigned value = 0;
  void *arguments[] = {&x, &value};
  CUdeviceptr where = x;
  gate *g;
  arguments[0] = &where;
  OK(cu.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, arguments, NULL)); /* loads it */
  OK(cu.cuStreamSynchronize(s));
  g = shut(s);
  value = 1;
  OK(cu.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, arguments, NULL));
  value = 2;
  rest();
  open_gate(g);
  OK(cu.cuStreamSynchronize(s));
  EXPECT(value_of(x) == 1);
}

void pinned_memory_is_read_when_the_copy_runs(void) {
  CUdeviceptr x = word(0);
  CUstream s = non_blocking();
  unsigned *pinned;
  gate *g;
  OK(cu.cuMemHostAlloc((void **)&pinned, 4, 0));
  *pinned = 1;
  g = shut(s);
  OK(cu.cuMemcpyHtoDAsync_v2(x, pinned, 4, s));
  *(volatile unsigned *)pinned = 2;
  open_gate(g);
  OK(cu.cuStreamSynchronize(s));
  EXPECT(value_of(x) == 2);
}

static void *opens_later(void *which) {
  rest();
  open_gate(which);
  return NULL;
}

/* The call may wait for the stream, so another thread opens the gate. */
void pageable_memory_is_read_at_the_call(void) {
  CUdeviceptr x = word(0);
  CUstream s = non_blocking();
  unsigned *pageable = malloc(4);
  pthread_t thread;
  *pageable = 1;
  EXPECT(pthread_create(&thread, NULL, opens_later, shut(s)) == 0);
  OK(cu.cuMemcpyHtoDAsync_v2(x, pageable, 4, s));
  *(volatile unsigned *)pageable = 2;
  pthread_join(thread, NULL);
  OK(cu.cuStreamSynchronize(s));
  EXPECT(value_of(x) == 1);
}
