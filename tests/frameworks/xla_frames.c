/* Calls the handler of engine_ext/bindings/xla_call.c as a runtime of XLA does that is made up here, also as an older one that has no
 * futures, with an engine that is made up, too.   xla_frames PATH_OF_THE_LIBRARY */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine_ext/bindings/calls.h"
#include "engine_ext/bindings/xla_ffi.h"
#include "engine_ext/kernels/kernels.h"

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      fprintf(stderr, "line %d: %s, error %s\n", __LINE__, #condition, error_text);  \
      exit(1);                                                                       \
    }                                                                                \
  } while (0)

enum { ALLREDUCE = 0, ALLGATHER = 2, RANKS = 2 };

/* The runtime. An error is its code, a future the address of `available`. */
static char error_text[1000];
static int futures, available;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static xla_ffi_error *error_create(xla_ffi_error_create *args) {
  snprintf(error_text, sizeof error_text, "%s", args->message);
  return (xla_ffi_error *)(intptr_t)args->code;
}

static void error_destroy(xla_ffi_error_destroy *args) { CHECK(args->error == NULL); }

static xla_ffi_error *future_create(xla_ffi_future_create *args) {
  futures++;
  args->future = (xla_ffi_future *)&available;
  return NULL;
}

static void set(int value) {
  pthread_mutex_lock(&lock);
  CHECK(available == 0);
  available = value;
  pthread_cond_signal(&changed);
  pthread_mutex_unlock(&lock);
}

static xla_ffi_error *future_set_available(xla_ffi_future_set *args) {
  CHECK(args->future == (xla_ffi_future *)&available);
  set(-1);
  return NULL;
}

static xla_ffi_error *future_set_error(xla_ffi_future_fail *args) {
  set((int)(intptr_t)args->error);
  return NULL;
}

static xla_ffi_api api = {
    .struct_size = sizeof(xla_ffi_api),
    .version = {sizeof(xla_ffi_version), NULL, 0, 3},
    .error_create = error_create,
    .error_destroy = error_destroy,
    .future_create = future_create,
    .future_set_available = future_set_available,
    .future_set_error = future_set_error,
};

static int wait_for_future(void) {
  pthread_mutex_lock(&lock);
  while (available == 0)
    pthread_cond_wait(&changed, &lock);
  int got = available;
  available = 0;
  pthread_mutex_unlock(&lock);
  return got;
}

/* The engine. It ends each call on a thread of its own, with what `ending` says, and adds 1 to what is reduced. */
static engine_result ending;
static int64_t came[RANKS] = {2, 2};
static int submitted;
static char fault[1000];                /* of the last call that had one */
static engine_call last;
static engine_call_tensor tensors[2];

static void *end(void *argument) {
  (void)argument;
  engine_result result = ending;
  if (last.kind == ALLREDUCE)
    for (uint32_t k = 0; k < last.count; k++)
      ((float *)tensors[k].target)[0] = ((const float *)tensors[k].source)[0] + 1;
  last.done(last.argument, &result);
  return NULL;
}

static void submit(const engine_call *call) {
  pthread_t thread;
  CHECK(call->struct_size == sizeof *call);
  if (call->fault != NULL) {
    engine_result refused = {.status = ENGINE_CALL_REFUSED, .text = call->fault};
    snprintf(fault, sizeof fault, "%s", call->fault);
    call->done(call->argument, &refused);
    return;
  }
  submitted++;
  last = *call;
  memcpy(tensors, call->tensors, call->count * sizeof *tensors);
  pthread_create(&thread, NULL, end, NULL);
  if (call->linger_ns == ENGINE_CALL_FOREVER)
    pthread_join(thread, NULL);
  else
    pthread_detach(thread);
}

static int place(int32_t number, int32_t *rank, int32_t *size) {
  *rank = number;
  *size = RANKS;
  return ENGINE_CALL_OK;
}

static const engine_calls engine = {sizeof engine, ENGINE_CALLS_VERSION, submit, place, NULL, NULL};

/* A call frame. */
static xla_ffi_error *(*handler)(xla_ffi_frame *);
static float in[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}}, out[2][8];
static int64_t dims[2] = {2, 2};
static struct call {
  int32_t kind, op, wire, flags, set, root, optimizer, rank, ranks;
  int64_t linger_ns;
  double prescale, postscale;
  int64_t rows[RANKS];
  int dtype;
  int64_t count, attributes;
  const char *name;                     /* NULL: "a name" */
} plain = {.prescale = 1, .postscale = 1, .rows = {2, 2}, .dtype = XLA_FFI_F32, .count = 1, .attributes = 14};

static xla_ffi_error *call(struct call c) {
  xla_ffi_span name = {c.name != NULL ? c.name : "a name!", c.name != NULL ? strlen(c.name) : 6};
  xla_ffi_array rows = {XLA_FFI_S64, RANKS, c.rows};
  xla_ffi_scalar scalars[] = {
      {XLA_FFI_S32, &c.kind},  {XLA_FFI_S32, &c.op},        {XLA_FFI_S32, &c.wire},     {XLA_FFI_S32, &c.flags},
      {XLA_FFI_S32, &c.set},   {XLA_FFI_S32, &c.root},      {XLA_FFI_S32, &c.optimizer}, {XLA_FFI_S32, &c.rank},
      {XLA_FFI_S32, &c.ranks}, {XLA_FFI_S64, &c.linger_ns}, {XLA_FFI_F64, &c.prescale}, {XLA_FFI_F64, &c.postscale},
  };
  const char *names[] = {"name", "rows", "kind", "op", "wire", "flags", "set", "root", "optimizer", "rank", "ranks",
                         "linger_ns", "prescale", "postscale"};
  int types[14] = {XLA_FFI_STRING, XLA_FFI_ARRAY};
  void *values[14] = {&name, &rows};
  xla_ffi_span spans[14], *span_of[14];
  for (int k = 0; k < 14; k++) {
    spans[k] = (xla_ffi_span){names[k], strlen(names[k])};
    span_of[k] = &spans[k];
    if (k >= 2)
      types[k] = XLA_FFI_SCALAR, values[k] = &scalars[k - 2];
  }
  xla_ffi_buffer arguments[2], results[2];
  void *given[2], *made[2];
  int kinds[2] = {XLA_FFI_BUFFER, XLA_FFI_BUFFER};
  for (int k = 0; k < 2; k++) {
    arguments[k] = (xla_ffi_buffer){sizeof(xla_ffi_buffer), NULL, c.dtype, in[k], 2, dims};
    results[k] = (xla_ffi_buffer){sizeof(xla_ffi_buffer), NULL, c.dtype, out[k], 2, dims};
    given[k] = &arguments[k], made[k] = &results[k];
  }
  memset(out, 0, sizeof out);
  error_text[0] = 0;
  xla_ffi_frame frame = {
      .struct_size = sizeof frame,
      .api = &api,
      .stage = XLA_FFI_EXECUTE,
      .arguments = {sizeof(xla_ffi_buffers), NULL, c.count, kinds, given},
      .results = {sizeof(xla_ffi_buffers), NULL, c.count, kinds, made},
      .attributes = {sizeof(xla_ffi_attributes), NULL, c.attributes, types, span_of, values},
  };
  int before = futures;
  xla_ffi_error *error = handler(&frame);
  CHECK((frame.future != NULL) == (futures > before));
  return error;
}

static int code(xla_ffi_error *error) { return (int)(intptr_t)error; }

static void test_versions(void) {
  for (int minor = 0; minor <= 4; minor++) {       /* 0: of version 0.1, which asks without its table */
    xla_ffi_metadata metadata = {.struct_size = sizeof metadata, .version = {sizeof(xla_ffi_version), NULL, 9, 9}};
    xla_ffi_metadata_extension extension = {{sizeof extension, XLA_FFI_METADATA, NULL}, &metadata};
    xla_ffi_extension other = {sizeof other, 77, &extension.base};
    xla_ffi_frame frame = {.struct_size = sizeof frame, .extensions = &other, .api = minor ? &api : NULL};
    api.version.minor = minor;
    CHECK(handler(&frame) == NULL && metadata.version.major == 0 && metadata.version.minor == (minor ? minor : 1));
  }
  CHECK(submitted == 0);
}

static void test_futures(void) {
  CHECK(call(plain) == NULL && wait_for_future() == -1);
  CHECK(out[0][0] == 2 && last.name_bytes == 6 && memcmp(last.name, "a name", 6) == 0);
  CHECK(tensors[0].dtype == ENGINE_FLOAT32 && tensors[0].ndim == 2 && tensors[0].dims[1] == 2);
  struct call group = plain;
  group.count = 2, group.flags = ENGINE_CALL_GROUP | ENGINE_CALL_MARKS_STEP, group.optimizer = 3;
  CHECK(call(group) == NULL && wait_for_future() == -1 && out[1][0] == 6);
  CHECK(last.flags == group.flags && last.optimizer == 3 && last.linger_ns == 0);
  ending = (engine_result){.status = ENGINE_CALL_FAILED_WORLD, .text = "RankDiedError: rank 1 died"};
  CHECK(call(plain) == NULL && wait_for_future() == XLA_FFI_ABORTED);
  CHECK(strcmp(error_text, "RankDiedError: rank 1 died") == 0);
  memset(&ending, 0, sizeof ending);
}

static void test_an_older_runtime(void) {
  int before = futures, calls = submitted;
  struct call group = plain;
  group.flags = ENGINE_CALL_GROUP;
  api.struct_size = offsetof(xla_ffi_api, future_create);
  CHECK(call(group) == NULL && out[0][0] == 2 && last.linger_ns == ENGINE_CALL_FOREVER);
  ending = (engine_result){.status = ENGINE_CALL_MISMATCH, .text = "MismatchError: no"};
  CHECK(code(call(group)) == XLA_FFI_FAILED_PRECONDITION && strcmp(error_text, "MismatchError: no") == 0);
  memset(&ending, 0, sizeof ending);
  CHECK(code(call(plain)) == XLA_FFI_UNIMPLEMENTED && strstr(error_text, "has no futures") != NULL);
  CHECK(strcmp(fault, error_text) == 0);
  CHECK(submitted == calls + 2 && futures == before);
  api.struct_size = sizeof api;
}

static void test_gathered_rows(void) {
  struct call gather = plain;
  gather.kind = ALLGATHER, gather.ranks = RANKS;
  for (int wrong = 0; wrong < 2; wrong++) {
    came[1] = 2 + wrong;
    ending = (engine_result){.ranks = RANKS, .rows = came, .memory = malloc(32), .bytes = 32};
    for (int k = 0; k < 8; k++)
      ((float *)ending.memory)[k] = (float)k;
    CHECK(call(gather) == NULL && wait_for_future() == (wrong ? XLA_FFI_FAILED_PRECONDITION : -1));
    CHECK(wrong ? strstr(error_text, "rank 1 of the process set sent 3 rows") != NULL : out[0][7] == 7);
  }
  memset(&ending, 0, sizeof ending);
  gather.rank = 1;      /* it was compiled for another rank */
  CHECK(code(call(gather)) == XLA_FFI_FAILED_PRECONDITION && strstr(error_text, "clear_caches") != NULL);
  CHECK(strcmp(fault, error_text) == 0);          /* the other ranks are told */
}

static void test_what_cannot_be(void) {
  struct call wrong = plain;
  int calls = submitted;
  wrong.dtype = 29;     /* a dtype that the engine does not have */
  CHECK(code(call(wrong)) == XLA_FFI_INVALID_ARGUMENT && strstr(error_text, "UnsupportedTensorError") == error_text);
  CHECK(strcmp(fault, error_text) == 0);
  wrong = plain;
  wrong.attributes = 13;
  CHECK(code(call(wrong)) == XLA_FFI_INTERNAL && strstr(error_text, "postscale") != NULL);
  CHECK(submitted == calls);
}

/* Names of characters of two to four bytes, each moved by a byte, so that the last that is shown ends anywhere. */
static void test_long_names(void) {
  static const char *const CHARACTERS[] = {"\xc3\xb6", "\xe2\x82\xac", "\xf0\x9f\x98\x80"};
  for (int which = 0; which < 3; which++)
    for (int before = 0; before < 5; before++) {
      char name[300] = "xxxxx";
      struct call wrong = plain;
      size_t length = (size_t)before, each = strlen(CHARACTERS[which]);
      for (; length + each < sizeof name; length += each)
        memcpy(name + length, CHARACTERS[which], each + 1);
      wrong.dtype = 29, wrong.name = name;
      CHECK(code(call(wrong)) == XLA_FFI_INVALID_ARGUMENT);
      const char *begin = strchr(error_text, '\'') + 1, *end = strchr(begin, '\'');
      size_t shown = (size_t)(end - begin);
      CHECK(shown > 115 && shown < 120 && memcmp(begin, name, shown) == 0 && (shown - (size_t)before) % each == 0);
    }
}

int main(int argc, char **argv) {
  void *library = dlopen(argc > 1 ? argv[1] : "", RTLD_NOW);
  CHECK(library != NULL);
  void (*use)(const engine_calls *);
  *(void **)&handler = dlsym(library, "engine_xla_collective");
  *(void **)&use = dlsym(library, "engine_xla_use");
  test_versions();
  CHECK(code(call(plain)) == XLA_FFI_INTERNAL);    /* nobody has said where the engine is */
  use(&engine);
  test_futures();
  test_an_older_runtime();
  test_gathered_rows();
  test_what_cannot_be();
  test_long_names();
  puts("all is well");
}
