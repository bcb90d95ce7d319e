/* Hands callbacks to the kernels of engine_ext/bindings/tensorflow_op.c as TensorFlow does, also forged ones, with a TensorFlow and an
 * engine that are made up here. It includes that file, since TensorFlow alone calls what is in it. */
#include <pthread.h>
#include <sched.h>

#include "bindings/tensorflow_op.c"

#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) {                                            \
      fprintf(stderr, "line %d: %s\n", __LINE__, #condition);      \
      exit(1);                                                     \
    }                                                              \
  } while (0)

enum { CALLS = 10000, RANKS = 2, STEPS = 100000, ITERATIONS = 2, SPINS = 2000 };

/* A callback as libstdc++ lays out std::function, made by this program: how often each was run and destroyed. */
typedef struct callback {
  uint32_t *runs, *destructions;
  bool (*manage)(void *, const void *, int);
  void (*invoke)(const void *);
} callback;

static bool manage(void *to, const void *from, int operation) {
  (void)from;
  CHECK(operation == 3);
  ++*((callback *)to)->destructions;
  return false;
}

static void invoke(const void *functor) { ++*((const callback *)functor)->runs; }

/* TensorFlow. */
static int failures, last_code;

static void run_done(TF_Done *done) {
  const callback *given = (const callback *)(void *)done;
  if (given->invoke == invoke) given->invoke(given);
}
static TF_Status *new_status(void) { return (TF_Status *)calloc(1, sizeof(int)); }
static void delete_status(TF_Status *status) { free(status); }
static void set_status(TF_Status *status, int code, const char *text) { (void)text, *(int *)status = code; }
static int get_code(const TF_Status *status) { return *(const int *)status; }
static void fail_context(TF_Context *context, TF_Status *status) { (void)context, failures++, last_code = *(int *)status; }
static int num_inputs(TF_Context *context) { return (void)context, 0; }
static int64_t zero(TF_Context *context) { return (void)context, 0; }

/* The engine: keeps calls until they are ended. */
static engine_call kept[CALLS];
static uint32_t count;

static void keep(const engine_call *call) { kept[count++] = *call; }

static void end_kept(uint32_t k, int status) {
  engine_result result = {.status = status, .ranks = RANKS, .text = "MismatchError: made up"};
  kept[k].done(kept[k].argument, &result);
}

/* Iterations of a loop: calls without a name of one op, in one step, at once. The order of all is that of the step. */
static kernel *loop;
static _Atomic int64_t step_now, ready, refused;

static int64_t step_id(TF_Context *context) { return (void)context, atomic_load(&step_now); }

/* Spins, so that both threads go on within nanoseconds of each other. */
static void await(int64_t number) {
  for (int spins = 0; atomic_load(&ready) < number; spins++)
    if (spins > SPINS) sched_yield();
}

static void *iterate(void *number) {
  for (int64_t step = 1; step <= STEPS; step++) {
    pending p = {0};
    TF_Status *status = new_status();
    if (number == NULL) atomic_store(&step_now, step);
    atomic_fetch_add(&ready, 1);
    await((2 * step - 1) * ITERATIONS);
    expect_order(loop, NULL, &p, status);
    if (get_code(status) != 0) atomic_fetch_add(&refused, 1);
    delete_status(status);
    atomic_fetch_add(&ready, 1);
    await(2 * step * ITERATIONS);
    count_ended(p.counted);
  }
  return NULL;
}

static void test_iterations_of_one_step_are_in_order(void) {
  pthread_t other;
  pending first = {0}, second = {0};
  TF_Status *status = new_status();
  loop = calloc(1, sizeof *loop + 1);
  loop->call.flags = ENGINE_CALL_UNNAMED;
  tf.StepId = step_id;
  pthread_create(&other, NULL, iterate, loop);
  iterate(NULL);
  pthread_join(other, NULL);
  CHECK(refused == 0 && loop->running == 0);
  step_now = 7;
  expect_order(loop, NULL, &first, status);
  CHECK(get_code(status) == 0);
  step_now = 8;
  expect_order(loop, NULL, &second, status);     /* while the other step is in flight */
  CHECK(get_code(status) == TF_FAILED_PRECONDITION);
  delete_status(status);
  free(loop);
}

int main(void) {
  static const engine_calls table = {.struct_size = sizeof table, .version = ENGINE_CALLS_VERSION, .submit = keep};
  static uint32_t runs[CALLS], destructions[CALLS];
  kernel *op = calloc(1, sizeof *op + 1);
  uint64_t forged[4] = {0};
  int k;
  tf.RunAsyncOpKernelDoneCallback = run_done, tf.OpKernelContext_Failure = fail_context;
  tf.NewStatus = new_status, tf.DeleteStatus = delete_status, tf.SetStatus = set_status, tf.GetCode = get_code;
  tf.NumInputs = num_inputs, tf.StepId = tf.GetIterId = zero;
  op->form = REDUCES, op->call.struct_size = sizeof op->call;

  for (k = 0; k < 4; k++) {                 /* no functions; one in the stack, in the heap, at an address without memory */
    uint64_t places[] = {0, (uint64_t)(uintptr_t)forged, (uint64_t)(uintptr_t)op, 8};
    engine_tensorflow_use(&table);
    forged[2] = (uint64_t)(uintptr_t)manage, forged[3] = places[k];
    compute(op, NULL, (TF_Done *)(void *)forged);
    CHECK(failures == k + 1 && last_code == TF_INTERNAL && count == 0);
    forged[2] = places[k], forged[3] = (uint64_t)(uintptr_t)invoke;
    CHECK(!is_recognized((TF_Done *)(void *)forged));
  }

  for (k = 0; k < CALLS; k++) {             /* whose callback on the stack is gone before the call ends */
    callback done = {&runs[k], &destructions[k], manage, invoke};
    compute(op, NULL, (TF_Done *)(void *)&done);
    CHECK(done.manage == NULL && done.invoke == NULL);   /* empty: whoever runs or destroys it again does nothing of ours */
    memset(&done, 0x55, sizeof done);
  }
  CHECK(count == CALLS && failures == 4);
  for (k = CALLS - 1; k >= 0; k--) {
    CHECK(runs[k] == 0);
    end_kept((uint32_t)k, k % 2 ? ENGINE_CALL_MISMATCH : ENGINE_CALL_OK);
  }
  for (k = 0; k < CALLS; k++) CHECK(runs[k] == 1 && destructions[k] == 1);
  CHECK(failures == 4 + CALLS / 2 && last_code == TF_FAILED_PRECONDITION);
  free(op);
  test_iterations_of_one_step_are_in_order();
  puts("all is well");
  return 0;
}
