/* Stream capture, and what other threads may call meanwhile. cuda.h: cuStreamBeginCapture,
 * cuThreadExchangeStreamCaptureMode, cuStreamIsCapturing. */
#include "programs.h"

#define GLOBAL CU_STREAM_CAPTURE_MODE_GLOBAL
#define LOCAL CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
#define RELAXED CU_STREAM_CAPTURE_MODE_RELAXED

static CUgraphExec finished(CUstream s) {
  CUgraph g;
  CUgraphExec made;
  OK(cu.cuStreamEndCapture(s, &g));
  OK(cu.cuGraphInstantiateWithFlags(&made, g, 0));
  OK(cu.cuGraphDestroy(g));
  return made;
}

void capture_runs_nothing(void) {
  CUdeviceptr x = word(0);
  CUstream s = non_blocking(), other = non_blocking();
  CUgraphExec g;
  OK(cu.cuStreamBeginCapture_v2(s, RELAXED));
  store(x, 4, s);
  g = finished(s);
  rest();
  EXPECT(value_of(x) == 0);
  for (unsigned i = 0; i < 2; i++) {
    store(x, 9, other);
    OK(cu.cuStreamSynchronize(other));
    OK(cu.cuGraphLaunch(g, other));
    OK(cu.cuStreamSynchronize(other));
    EXPECT(value_of(x) == 4);
  }
  OK(cu.cuGraphExecDestroy(g));
}

void graph_keeps_the_order(void) {
  CUdeviceptr x = word(1), y = word(0);
  CUstream s = non_blocking();
  OK(cu.cuStreamBeginCapture_v2(s, RELAXED));
  copy_word(y, x, s);
  store(x, 2, s);
  OK(cu.cuGraphLaunch(finished(s), s));
  OK(cu.cuStreamSynchronize(s));
  EXPECT(value_of(x) == 2 && value_of(y) == 1);
}

void capture_tells_its_state(void) {
  CUstream s = non_blocking();
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  CUgraph g;
  OK(cu.cuStreamIsCapturing(s, &status));
  EXPECT(status == CU_STREAM_CAPTURE_STATUS_NONE);
  OK(cu.cuStreamBeginCapture_v2(s, RELAXED));
  OK(cu.cuStreamIsCapturing(s, &status));
  EXPECT(status == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  OK(cu.cuStreamEndCapture(s, &g));
  OK(cu.cuStreamIsCapturing(s, &status));
  EXPECT(status == CU_STREAM_CAPTURE_STATUS_NONE);
}

void stream0_is_unusable_while_a_blocking_stream_captures(void) {
  CUstream s = blocking();
  CUstreamCaptureStatus status;
  CUgraph g;
  OK(cu.cuStreamBeginCapture_v2(s, RELAXED));
  RETURNS(cu.cuStreamIsCapturing(CU_STREAM_LEGACY, &status), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  OK(cu.cuStreamEndCapture(s, &g)); /* asking did not spoil it */
}

/* ---- other threads ---- */

static CUevent asked;
static CUresult answer;

static void ask(CUstreamCaptureMode mode) {
  OK(cu.cuCtxSetCurrent(first_context));
  OK(cu.cuThreadExchangeStreamCaptureMode(&mode));
  answer = cu.cuEventQuery(asked);
}

static void ask_in_global_mode(void *unused) { ask(((void)unused, GLOBAL)); }
static void ask_in_local_mode(void *unused) { ask(((void)unused, LOCAL)); }
static void ask_in_relaxed_mode(void *unused) { ask(((void)unused, RELAXED)); }

/* Another thread asks for an event while this one captures: what it gets, and what the capture ends with. */
static CUresult end_after(CUstreamCaptureMode mode, void (*other)(void *)) {
  CUstream s = non_blocking();
  CUgraph g;
  asked = new_event();
  OK(cu.cuStreamBeginCapture_v2(s, mode));
  on_thread(other, NULL);
  return cu.cuStreamEndCapture(s, &g);
}

void query_of_another_thread_spoils_a_capture(void) {
  RETURNS(end_after(GLOBAL, ask_in_global_mode), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  RETURNS(answer, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

void relaxed_threads_may_query(void) {
  OK(end_after(GLOBAL, ask_in_relaxed_mode));
  OK(answer);
}

void local_captures_concern_nobody_else(void) {
  OK(end_after(LOCAL, ask_in_global_mode));
  OK(answer);
  OK(end_after(GLOBAL, ask_in_local_mode));
  OK(answer);
}

void capturing_thread_may_not_allocate(void) {
  CUstream s = non_blocking();
  CUdeviceptr x;
  CUgraph g;
  OK(cu.cuStreamBeginCapture_v2(s, LOCAL));
  RETURNS(cu.cuMemAlloc_v2(&x, 4), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  RETURNS(cu.cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

void mode_is_exchanged(void) {
  CUstreamCaptureMode mode = RELAXED;
  OK(cu.cuThreadExchangeStreamCaptureMode(&mode));
  EXPECT(mode == GLOBAL);
  OK(cu.cuThreadExchangeStreamCaptureMode(&mode));
  EXPECT(mode == RELAXED);
}

/* ---- several streams ---- */

void captured_streams_must_be_joined(void) {
  CUdeviceptr x = word(0);
  CUstream a = non_blocking(), b = non_blocking();
  CUevent fork = new_event(), join = new_event();
  CUgraph g;
  OK(cu.cuStreamBeginCapture_v2(a, RELAXED));
  OK(cu.cuEventRecord(fork, a));
  OK(cu.cuStreamWaitEvent(b, fork, 0));
  store(x, 1, b);
  RETURNS(cu.cuStreamEndCapture(a, &g), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  OK(cu.cuStreamBeginCapture_v2(a, RELAXED));
  OK(cu.cuEventRecord(fork, a));
  OK(cu.cuStreamWaitEvent(b, fork, 0));
  store(x, 1, b);
  OK(cu.cuEventRecord(join, b));
  OK(cu.cuStreamWaitEvent(a, join, 0));
  OK(cu.cuGraphLaunch(finished(a), a));
  OK(cu.cuStreamSynchronize(a));
  EXPECT(value_of(x) == 1);
}

void capture_waits_for_nothing_outside(void) {
  CUstream a = non_blocking(), b = non_blocking();
  CUevent e = new_event();
  CUgraph g;
  OK(cu.cuEventRecord(e, b));
  OK(cu.cuStreamBeginCapture_v2(a, RELAXED));
  RETURNS(cu.cuStreamWaitEvent(a, e, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  RETURNS(cu.cuStreamEndCapture(a, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

void captured_events_cannot_be_asked(void) {
  CUstream a = non_blocking();
  CUevent e = new_event();
  CUgraph g;
  OK(cu.cuStreamBeginCapture_v2(a, RELAXED));
  OK(cu.cuEventRecord(e, a));
  RETURNS(cu.cuEventQuery(e), CUDA_ERROR_CAPTURED_EVENT);
  EXPECT(cu.cuStreamEndCapture(a, &g) != CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
}
