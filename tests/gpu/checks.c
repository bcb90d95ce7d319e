/* What the stand-in finds and a driver does not: accesses that are not ordered, memory used after its end, and faults
 * by order. Each program says how many reports it expects, and what one of them names. */
#include "benchmarks/gpu/litmus/litmus.h"
#include "tests/standins/cuda/stand.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define FUNCTION(name) ((__typeof__(&name))(size_t)optional(#name))

static void finds(int n, const char *text) {
  static char all[8192];
  FUNCTION(stand_report)(all, sizeof all);
  if (FUNCTION(stand_reports)() == n && (!n || strstr(all, text))) return;
  fprintf(stderr, "%d reports, expected %d with \"%s\":\n%s", FUNCTION(stand_reports)(), n, n ? text : "", all);
  _exit(1);
}

/* ---- happens-before ---- */

static void two_streams(int waits) {
  CUdeviceptr x = word(0), y = word(0);
  CUstream a = non_blocking(), b = non_blocking();
  CUevent e = new_event();
  store(x, 1, a);
  OK(cu.cuEventRecord(e, a));
  if (waits) OK(cu.cuStreamWaitEvent(b, e, 0));
  copy_word(y, x, b);
  OK(cu.cuCtxSynchronize());
}

static void wait_orders(void) {
  two_streams(1);
  finds(0, NULL);
}

static void missing_wait_is_found(void) {
  two_streams(0);
  finds(1, "writes and copy on stream");
}

static void wait_before_record_is_found(void) {
  CUdeviceptr x = word(0), y = word(0);
  CUstream a = non_blocking(), b = non_blocking();
  CUevent e = new_event();
  store(x, 1, a);
  OK(cu.cuStreamWaitEvent(b, e, 0));
  OK(cu.cuEventRecord(e, a));
  copy_word(y, x, b);
  OK(cu.cuCtxSynchronize());
  finds(1, "not ordered");
}

static void record_before_its_work_is_found(void) {
  CUdeviceptr x = word(0), y = word(0);
  CUstream a = non_blocking(), b = non_blocking();
  CUevent e = new_event();
  OK(cu.cuEventRecord(e, a));
  store(x, 1, a);
  OK(cu.cuStreamWaitEvent(b, e, 0));
  copy_word(y, x, b);
  OK(cu.cuCtxSynchronize());
  finds(1, "not ordered");
}

static void two_readers_need_no_order(void) {
  CUdeviceptr x = word(0), y = word(0), z = word(0);
  CUstream a = non_blocking(), b = non_blocking();
  copy_word(y, x, a);
  copy_word(z, x, b);
  OK(cu.cuCtxSynchronize());
  finds(0, NULL);
}

static void neighbours_need_no_order(void) {
  CUdeviceptr x;
  CUstream a = non_blocking(), b = non_blocking();
  OK(cu.cuMemAlloc_v2(&x, 8));
  store(x, 1, a);
  store(x + 4, 1, b);
  OK(cu.cuCtxSynchronize());
  finds(0, NULL);
}

static void one_stream_is_ordered(void) {
  CUdeviceptr x = word(0), y = word(0);
  CUstream a = non_blocking();
  store(x, 1, a);
  copy_word(y, x, a);
  store(x, 2, a);
  OK(cu.cuCtxSynchronize());
  finds(0, NULL);
}

static void order_goes_through_a_third_stream(void) {
  CUdeviceptr x = word(0), y = word(0);
  CUstream a = non_blocking(), b = non_blocking(), c = non_blocking();
  CUevent e = new_event();
  for (unsigned i = 0; i < 50; i++) { /* one event for all */
    store(x, i, a);
    OK(cu.cuEventRecord(e, a));
    OK(cu.cuStreamWaitEvent(b, e, 0));
    OK(cu.cuEventRecord(e, b));
    OK(cu.cuStreamWaitEvent(c, e, 0));
    copy_word(y, x, c);
    OK(cu.cuEventRecord(e, c));
    OK(cu.cuStreamWaitEvent(a, e, 0));
  }
  OK(cu.cuCtxSynchronize());
  EXPECT(value_of(y) == 49);
  finds(0, NULL);
}

static void stream0_orders_blocking_streams(void) {
  CUdeviceptr x = word(0), y = word(0);
  CUstream a = blocking(), b = blocking(), gone;
  store(x, 1, a);
  store(y, 1, NULL);
  copy_word(y, x, b);
  gone = blocking();
  store(x, 2, gone);
  finds(1, "not ordered"); /* two blocking streams are not ordered */
  FUNCTION(stand_clear)();
  OK(cu.cuStreamDestroy_v2(gone));
  rest();
  store(x, 3, NULL);
  OK(cu.cuCtxSynchronize());
  finds(0, NULL);
}

static void stream0_does_not_order_non_blocking_ones(void) {
  CUdeviceptr x = word(0);
  CUstream a = non_blocking();
  store(x, 1, a);
  store(x, 2, NULL);
  OK(cu.cuCtxSynchronize());
  finds(1, "not ordered");
}

/* ---- the host ---- */

static unsigned *pinned(void) {
  void *at;
  OK(cu.cuMemHostAlloc(&at, 4, 0));
  return at;
}

static void query_tells_the_host(void) {
  CUdeviceptr x = word(5);
  CUstream a = non_blocking();
  CUevent e = new_event();
  unsigned *p = pinned();
  OK(cu.cuMemcpyDtoHAsync_v2(p, x, 4, a));
  OK(cu.cuEventRecord(e, a));
  HAPPENS(e);
  FUNCTION(stand_host)(p, 4, 0, "the host");
  EXPECT(*p == 5);
  finds(0, NULL);
}

static void host_that_does_not_ask_is_found(void) {
  CUdeviceptr x = word(5);
  CUstream a = non_blocking();
  unsigned *p = pinned();
  OK(cu.cuMemcpyDtoHAsync_v2(p, x, 4, a));
  rest(); /* it is done, and nobody knows */
  FUNCTION(stand_host)(p, 4, 0, "the host");
  finds(1, "writes and the host reads");
}

static void launch_takes_what_the_host_wrote(void) {
  CUdeviceptr x = word(0);
  CUstream a = non_blocking();
  unsigned *p = pinned();
  FUNCTION(stand_host)(p, 4, 1, "the host");
  OK(cu.cuMemcpyHtoDAsync_v2(x, p, 4, a));
  OK(cu.cuCtxSynchronize());
  finds(0, NULL);
}

static void pinned_source_overwritten_is_found(void) {
  CUdeviceptr x = word(0);
  CUstream a = non_blocking();
  unsigned *p = pinned();
  OK(cu.cuMemcpyHtoDAsync_v2(x, p, 4, a));
  FUNCTION(stand_host)(p, 4, 1, "the host");
  finds(1, "reads and the host writes");
}

static unsigned *result;
static pthread_barrier_t turns;

static void *reads_what_another_thread_awaited(void *tells) {
  FUNCTION(stand_hear)(1); /* it is known from here on, before anybody waits */
  pthread_barrier_wait(&turns);
  pthread_barrier_wait(&turns);
  if (tells) FUNCTION(stand_hear)(7);
  FUNCTION(stand_host)(result, 4, 0, "another thread");
  return NULL;
}

static void another_thread(void *tells) {
  CUdeviceptr x = word(5);
  CUstream a = non_blocking();
  pthread_t thread;
  result = pinned();
  pthread_barrier_init(&turns, NULL, 2);
  pthread_create(&thread, NULL, reads_what_another_thread_awaited, tells);
  pthread_barrier_wait(&turns);
  OK(cu.cuMemcpyDtoHAsync_v2(result, x, 4, a));
  OK(cu.cuStreamSynchronize(a));
  FUNCTION(stand_tell)(7);
  pthread_barrier_wait(&turns);
  pthread_join(thread, NULL);
}

static void threads_tell_each_other(void) {
  another_thread("tells");
  finds(0, NULL);
}

static void thread_that_was_told_nothing_is_found(void) {
  another_thread(NULL);
  finds(1, "another thread reads");
}

static void hosts_may_be_one(void) {
  FUNCTION(stand_hosts_are_one)(1);
  another_thread(NULL);
  finds(0, NULL);
}

/* ---- memory ---- */

static void free_of_what_is_in_use_is_found(void) {
  CUdeviceptr x = word(0);
  store(x, 1, non_blocking());
  OK(cu.cuMemFree_v2(x));
  finds(1, "writes and cuMemFree writes");
}

static void free_after_a_synchronize_is_fine(void) {
  CUdeviceptr x = word(0);
  CUstream a = non_blocking();
  store(x, 1, a);
  OK(cu.cuStreamSynchronize(a));
  OK(cu.cuMemFree_v2(x));
  finds(0, NULL);
}

static void use_after_free_is_found(void) {
  CUdeviceptr x = word(0);
  OK(cu.cuMemFree_v2(x));
  store(x, 1, non_blocking());
  finds(1, "was freed");
  RETURNS(cu.cuMemFree_v2(x), CUDA_ERROR_INVALID_VALUE);
  finds(2, "freed twice");
}

static void freed_memory_is_poisoned(void) {
  CUdeviceptr x = word(0);
  unsigned char *at = FUNCTION(stand_pointer)(x);
  OK(cu.cuMemFree_v2(x));
  EXPECT(at[0] == 0xdb && at[3] == 0xdb);
}

static void new_memory_is_not_zero(void) {
  CUdeviceptr x;
  OK(cu.cuMemAlloc_v2(&x, 64));
  EXPECT(*(unsigned char *)FUNCTION(stand_pointer)(x));
}

static void writes_beside_an_allocation_are_found(void) {
  CUdeviceptr x = word(0);
  RETURNS(cu.cuMemsetD8Async(x, 0, 5, NULL), CUDA_ERROR_INVALID_VALUE);
  ((char *)FUNCTION(stand_pointer)(x))[4] = 0;
  OK(cu.cuMemFree_v2(x));
  finds(1, "byte 4 beside the 4");
}

static void writes_far_beside_an_allocation_crash(void) {
  CUdeviceptr x = word(0), next = word(0);
  EXPECT(next > x);
  *(volatile char *)FUNCTION(stand_pointer)(x + 256) = 1;
}

static void memory_given_to_another_stream_is_found(void) { /* a caching allocator that does not wait */
  CUdeviceptr x = word(0), y = word(0);
  CUstream a = non_blocking(), b = non_blocking();
  stand_access poison = {(uintptr_t)x, 4, 1};
  copy_word(y, x, b);
  OK(FUNCTION(stand_compute)(a, &poison, 1, 0, "reuse"));
  finds(1, "reuse on stream");
}

/* ---- computes, kernels ---- */

static void computes_copy_and_poison(void) {
  CUdeviceptr x = word(0x11223344), y = word(0), z = word(0);
  CUstream a = non_blocking();
  stand_access accesses[] = {{(uintptr_t)x, 4, 0}, {(uintptr_t)y, 4, 1}, {(uintptr_t)z, 4, 1}};
  OK(FUNCTION(stand_compute)(a, accesses, 3, 3, "gradient"));
  OK(cu.cuStreamSynchronize(a));
  EXPECT(value_of(y) == 0x11223344 && value_of(z) == 0xdbdbdbdb);
  finds(0, NULL);
}

static int what_store_writes(const stand_launch *l, void **parameters, stand_access *accesses, int room) {
  (void)l;
  (void)room;
  accesses[0] = (stand_access){*(CUdeviceptr *)parameters[0], 4, 1};
  return 1;
}

static void kernels_are_asked_when_they_run(void) {
  CUdeviceptr x = word(0), y = word(0);
  unsigned value = 3;
  void *arguments[] = {&x, &value};
  CUfunction f;
  FUNCTION(stand_register_accesses)("litmus_store", what_store_writes);
  f = store_kernel();
  OK(cu.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, non_blocking(), arguments, NULL));
  copy_word(y, x, non_blocking());
  OK(cu.cuCtxSynchronize());
  finds(1, "litmus_store on stream");
}

static void kernel_without_a_function_is_named(void) {
  static const char *ptx = ".version 6.0\n.target sm_60\n.visible .entry nobodys(.param .u64 a) { ret; }\n";
  CUmodule m;
  CUfunction f;
  OK(cu.cuModuleLoadDataEx(&m, ptx, 0, NULL, NULL));
  RETURNS(cu.cuModuleGetFunction(&f, m, "unknown"), CUDA_ERROR_NOT_FOUND);
  finds(0, NULL);
  RETURNS(cu.cuModuleGetFunction(&f, m, "nobodys"), CUDA_ERROR_NOT_FOUND);
  finds(1, "no C function for the kernel nobodys");
}

static void newer_ptx_is_refused_with_a_log(void) {
  char log[256] = "";
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void *values[] = {log, (void *)sizeof log};
  CUmodule m;
  RETURNS(cu.cuModuleLoadDataEx(&m, ".version 9.9\n.target sm_60\n", 2, options, values),
          CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
  EXPECT(strstr(log, "9.9"));
}

/* ---- faults ---- */

static void call_fails_by_order(void) {
  CUstream a = non_blocking();
  CUevent e = new_event();
  FUNCTION(stand_fail)("cuEventRecord", 2, 1);
  OK(cu.cuEventRecord(e, a));
  RETURNS(cu.cuEventRecord(e, a), CUDA_ERROR_INVALID_VALUE);
  OK(cu.cuEventRecord(e, a));
}

static void lost_context_stays_lost(void) {
  CUstream a = non_blocking();
  CUevent e = new_event();
  FUNCTION(stand_fail)("cuStreamDestroy", 1, CUDA_ERROR_ILLEGAL_ADDRESS); /* _v2 */
  RETURNS(cu.cuStreamDestroy_v2(a), CUDA_ERROR_ILLEGAL_ADDRESS);
  RETURNS(cu.cuEventQuery(e), CUDA_ERROR_ILLEGAL_ADDRESS);
}

static void loading_behind_a_waiting_stream_is_a_deadlock(void) {
  CUstream a = non_blocking();
  CUdeviceptr x;
  gate *g = shut(a);
  FUNCTION(stand_deadline)(100);
  FUNCTION(stand_loading_waits)(1);
  OK(cu.cuMemAlloc_v2(&x, 4));
  finds(1, "deadlock: cuMemAlloc");
  open_gate(g);
}

static void deadlocks_say_who_waits_for_what(void) {
  CUstream a = non_blocking(), b = non_blocking();
  CUevent e = new_event();
  gate *g = shut(a);
  OK(cu.cuEventRecord(e, a));
  OK(cu.cuStreamWaitEvent(b, e, 0));
  FUNCTION(stand_deadline)(100);
  RETURNS(cu.cuStreamSynchronize(b), CUDA_ERROR_LAUNCH_TIMEOUT);
  finds(1, "waits for record on stream");
  open_gate(g);
}

static void calls_are_counted(void) {
  long before = FUNCTION(stand_calls)("cuMemAlloc");
  word(0);
  EXPECT(FUNCTION(stand_calls)("cuMemAlloc") == before + 1);
}

static void child_may_call_nothing(void) {
  pid_t child = fork();
  if (!child) cu.cuEventQuery(NULL), _exit(0);
  int status;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

#define CHECK(name) {#name, name}
const program programs[] = {
    CHECK(wait_orders),
    CHECK(missing_wait_is_found),
    CHECK(wait_before_record_is_found),
    CHECK(record_before_its_work_is_found),
    CHECK(two_readers_need_no_order),
    CHECK(neighbours_need_no_order),
    CHECK(one_stream_is_ordered),
    CHECK(order_goes_through_a_third_stream),
    CHECK(stream0_orders_blocking_streams),
    CHECK(stream0_does_not_order_non_blocking_ones),
    CHECK(query_tells_the_host),
    CHECK(host_that_does_not_ask_is_found),
    CHECK(launch_takes_what_the_host_wrote),
    CHECK(pinned_source_overwritten_is_found),
    CHECK(threads_tell_each_other),
    CHECK(thread_that_was_told_nothing_is_found),
    CHECK(hosts_may_be_one),
    CHECK(free_of_what_is_in_use_is_found),
    CHECK(free_after_a_synchronize_is_fine),
    CHECK(use_after_free_is_found),
    CHECK(freed_memory_is_poisoned),
    CHECK(new_memory_is_not_zero),
    CHECK(writes_beside_an_allocation_are_found),
    CHECK(writes_far_beside_an_allocation_crash),
    CHECK(memory_given_to_another_stream_is_found),
    CHECK(computes_copy_and_poison),
    CHECK(kernels_are_asked_when_they_run),
    CHECK(kernel_without_a_function_is_named),
    CHECK(newer_ptx_is_refused_with_a_log),
    CHECK(call_fails_by_order),
    CHECK(lost_context_stays_lost),
    CHECK(loading_behind_a_waiting_stream_is_a_deadlock),
    CHECK(deadlocks_say_who_waits_for_what),
    CHECK(calls_are_counted),
    CHECK(child_may_call_nothing),
    {NULL, NULL},
};
