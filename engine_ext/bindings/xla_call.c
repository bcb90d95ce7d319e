/* Collectives as calls of a program that XLA has compiled: one handler of its foreign function interface for all kinds.
 *
 * The handler submits the native call (calls.h) and answers with a future, so that no thread of XLA blocks while ranks wait for
 * each other. The end of the call makes the future available, and XLA runs the rest of the program on the same thread.
 *
 * The attributes of a call say what it does; engine/jax/primitive.py writes them.
 */
#include <errno.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine_ext/bindings/calls.h"
#include "engine_ext/bindings/xla_ffi.h"
#include "engine_ext/kernels/kernels.h"
#include "engine_ext/platform/utf8.h"
#include "engine_ext/shared/names.h"

#define EXPORT __attribute__((visibility("default")))
enum { KIND_LIST(AS_NUMBER) KINDS };
enum { TEXT_BYTES = 600, NAME_SHOWN = 120 };

/* Written by `engine_xla_use` before the handler is registered. */
static const engine_calls *_Atomic table;

/* XLA's dtypes: 1 + the engine's number of each; 0: the engine has none. */
static const uint8_t DTYPES[XLA_FFI_DTYPES] = {
    [XLA_FFI_PRED] = 1 + ENGINE_BOOL,
    [XLA_FFI_S8] = 1 + ENGINE_INT8,
    [XLA_FFI_S16] = 1 + ENGINE_INT16,
    [XLA_FFI_S32] = 1 + ENGINE_INT32,
    [XLA_FFI_S64] = 1 + ENGINE_INT64,
    [XLA_FFI_U8] = 1 + ENGINE_UINT8,
    [XLA_FFI_U16] = 1 + ENGINE_UINT16,
    [XLA_FFI_U32] = 1 + ENGINE_UINT32,
    [XLA_FFI_U64] = 1 + ENGINE_UINT64,
    [XLA_FFI_F16] = 1 + ENGINE_FLOAT16,
    [XLA_FFI_F32] = 1 + ENGINE_FLOAT32,
    [XLA_FFI_F64] = 1 + ENGINE_FLOAT64,
    [XLA_FFI_BF16] = 1 + ENGINE_BFLOAT16,
    [XLA_FFI_C64] = 1 + ENGINE_COMPLEX64,
    [XLA_FFI_C128] = 1 + ENGINE_COMPLEX128,
    [XLA_FFI_F8E5M2] = 1 + ENGINE_FLOAT8_E5M2,
    [XLA_FFI_F8E4M3FN] = 1 + ENGINE_FLOAT8_E4M3FN,
    [XLA_FFI_F8E5M2FNUZ] = 1 + ENGINE_FLOAT8_E5M2FNUZ,
    [XLA_FFI_F8E4M3FNUZ] = 1 + ENGINE_FLOAT8_E4M3FNUZ,
    [XLA_FFI_F8E8M0FNU] = 1 + ENGINE_FLOAT8_E8M0FNU,
};

/* The error code of each ENGINE_CALL_* status. UNAVAILABLE is not among them: runtimes take it for a network error and replace
 * its text. */
static const int CODES[] = {
    [ENGINE_CALL_OK] = XLA_FFI_INTERNAL,
    [ENGINE_CALL_REFUSED] = XLA_FFI_INVALID_ARGUMENT,
    [ENGINE_CALL_MISMATCH] = XLA_FFI_FAILED_PRECONDITION,
    [ENGINE_CALL_DUPLICATE] = XLA_FFI_ALREADY_EXISTS,
    [ENGINE_CALL_JOINED] = XLA_FFI_FAILED_PRECONDITION,
    [ENGINE_CALL_NOT_INITIALIZED] = XLA_FFI_FAILED_PRECONDITION,
    [ENGINE_CALL_FORKED] = XLA_FFI_FAILED_PRECONDITION,
    [ENGINE_CALL_NO_MEMORY] = XLA_FFI_RESOURCE_EXHAUSTED,
    [ENGINE_CALL_FAILED_WORLD] = XLA_FFI_ABORTED,
};

/* The attributes of a call. */
typedef struct attributes {
  int32_t kind, op, wire, flags, set, root, optimizer;  /* as in engine_call */
  int32_t rank, ranks;          /* place in the process set for which shapes were computed; ranks = 0: they do not depend on it */
  int64_t linger_ns;            /* as in engine_call */
  double prescale, postscale;
  xla_ffi_span name;
  xla_ffi_array rows;           /* int64; for an allgather or all-to-all: rows from each rank, tensor after tensor */
} attributes;

#define SCALAR(name, dtype) {#name, offsetof(attributes, name), XLA_FFI_SCALAR, dtype, sizeof(((attributes *)0)->name)}
static const struct {
  const char *name;
  size_t offset;
  int type, dtype;
  size_t bytes;
} FIELDS[] = {
    SCALAR(kind, XLA_FFI_S32),
    SCALAR(op, XLA_FFI_S32),
    SCALAR(wire, XLA_FFI_S32),
    SCALAR(flags, XLA_FFI_S32),
    SCALAR(set, XLA_FFI_S32),
    SCALAR(root, XLA_FFI_S32),
    SCALAR(optimizer, XLA_FFI_S32),
    SCALAR(rank, XLA_FFI_S32),
    SCALAR(ranks, XLA_FFI_S32),
    SCALAR(linger_ns, XLA_FFI_S64),
    SCALAR(prescale, XLA_FFI_F64),
    SCALAR(postscale, XLA_FFI_F64),
    {"name", offsetof(attributes, name), XLA_FFI_STRING, 0, sizeof(xla_ffi_span)},
    {"rows", offsetof(attributes, rows), XLA_FFI_ARRAY, XLA_FFI_S64, sizeof(xla_ffi_array)},
};
enum { FIELD_COUNT = sizeof FIELDS / sizeof *FIELDS };

/* A name as errors show it. */
typedef struct shown_name { char text[NAME_SHOWN]; } shown_name;

/* A submitted call that is not over. The handler makes it; it is freed when the call is over. */
typedef struct pending {
  const xla_ffi_api *api;
  xla_ffi_future *future;       /* NULL: the handler waits for `over` itself, and then reads `error` */
  sem_t over;                   /* posted when the call is over, if there is no future */
  xla_ffi_error *error;         /* the error of that call, or NULL */
  int32_t gathers, ranks;       /* whether the engine allocates the result; ranks of the process set */
  uint32_t count;
  shown_name name;
  engine_call_tensor *tensors;  /* [count]; both arrays lie behind this structure */
  int64_t *rows;                /* [count][ranks] for a call that gathers; then one more row of `ranks` for comparison */
} pending;

/* Do nothing at the end of a call. */
static void ignore(void *argument, engine_result *result) { (void)argument, (void)result; }

/* Make an error of the runtime. */
static xla_ffi_error *error_of(const xla_ffi_api *api, int code, const char *text) {
  xla_ffi_error_create create = {sizeof create, NULL, text, code};
  return api->error_create(&create);
}

/* Return a call's name as errors show it. */
static shown_name show(const attributes *a) {
  shown_name shown;
  utf8_show(a->name.data, a->name.size, shown.text, sizeof shown.text);
  return shown;
}

/* Destroy an error; NULL: do nothing. */
static void drop(const xla_ffi_api *api, xla_ffi_error *error) {
  xla_ffi_error_destroy destroy = {sizeof destroy, NULL, error};
  if (error != NULL)
    api->error_destroy(&destroy);
}

/* Return whether the runtime has futures. */
static int has_futures(const xla_ffi_api *api) {
  return api->struct_size >= sizeof *api && api->future_create != NULL && api->future_set_available != NULL &&
         api->future_set_error != NULL;
}

/* Answer the runtime's question for the handler's version with the runtime's own version, since it refuses a newer handler.
 * Runtimes of version 0.1 ask without their table of functions. Return whether that was asked. */
static int tells_version(const xla_ffi_frame *frame) {
  xla_ffi_extension *extension = frame->extensions;
  for (; extension != NULL; extension = extension->next)
    if (extension->type == XLA_FFI_METADATA) {
      xla_ffi_metadata *metadata = ((xla_ffi_metadata_extension *)extension)->metadata;
      metadata->version.major = frame->api != NULL ? frame->api->version.major : 0;
      metadata->version.minor = frame->api != NULL ? frame->api->version.minor : 1;
      metadata->traits = 0;
      return 1;
    }
  return 0;
}

/* Read the attributes of a call. Return NULL, or the name of an attribute that is missing or of another type. */
static const char *read_attributes(const xla_ffi_attributes *given, attributes *out) {
  for (int f = 0; f < FIELD_COUNT; f++) {
    int64_t k = 0;
    for (; k < given->size; k++)
      if (given->names[k]->size == strlen(FIELDS[f].name) &&
          memcmp(given->names[k]->data, FIELDS[f].name, given->names[k]->size) == 0)
        break;
    if (k == given->size || given->types[k] != FIELDS[f].type)
      return FIELDS[f].name;
    const void *value = given->values[k];
    if (FIELDS[f].type == XLA_FFI_SCALAR) {
      const xla_ffi_scalar *scalar = value;
      if (scalar->dtype != FIELDS[f].dtype)
        return FIELDS[f].name;
      value = scalar->value;
    } else if (FIELDS[f].type == XLA_FFI_ARRAY && ((const xla_ffi_array *)value)->dtype != FIELDS[f].dtype)
      return FIELDS[f].name;
    memcpy((char *)out + FIELDS[f].offset, value, FIELDS[f].bytes);
  }
  return NULL;
}

/* Fill in a tensor. Return whether the engine has its dtype. */
static int read_tensor(const xla_ffi_buffer *source, const xla_ffi_buffer *result, engine_call_tensor *tensor) {
  if (source->dtype < 0 || source->dtype >= XLA_FFI_DTYPES || DTYPES[source->dtype] == 0)
    return 0;
  tensor->source = source->data;
  tensor->target = result->data;
  tensor->dtype = DTYPES[source->dtype] - 1;
  tensor->ndim = (int32_t)(source->rank < ENGINE_CALL_DIMS ? source->rank : ENGINE_CALL_DIMS);
  for (int64_t d = 0; d < source->rank; d++)
    if (d < ENGINE_CALL_DIMS)
      tensor->dims[d] = source->dims[d];
    else
      tensor->dims[ENGINE_CALL_DIMS - 1] *= source->dims[d];    /* dimensions beyond the last entry are merged into it */
  return 1;
}

/* Compare the received rows with those that the program was compiled for, and copy them into its results. */
static xla_ffi_error *deliver(pending *call, const engine_result *result) {
  const engine_calls *calls = atomic_load_explicit(&table, memory_order_relaxed);
  char text[TEXT_BYTES];
  int64_t *came = call->rows + (size_t)call->count * (size_t)call->ranks;
  for (uint32_t k = 0; k < call->count; k++) {
    const int64_t *expected = call->rows + (size_t)k * (size_t)call->ranks;
    if (result->count != 0)
      calls->part_rows(result, k, came);
    else
      memcpy(came, result->rows, sizeof *came * (size_t)call->ranks);
    for (int32_t r = 0; r < call->ranks; r++)
      if (came[r] != expected[r]) {
        snprintf(text, sizeof text,
                 "MismatchError: rank %d of the process set sent %lld rows in tensor %u of '%s', and this rank's program was "
                 "compiled for %lld: under jit the number of rows is equal on all ranks. Call it outside of jit if it differs",
                 (int)r, (long long)came[r], k, call->name.text, (long long)expected[r]);
        return error_of(call->api, XLA_FFI_FAILED_PRECONDITION, text);
      }
    if (result->count != 0)
      calls->part_copy(result, k, call->tensors[k].target);
    else if (result->bytes != 0)
      memcpy(call->tensors[k].target, result->memory, result->bytes);
  }
  return NULL;
}

/* Complete a call: the `done` of the native call. Making the future available comes last, since it runs the rest of the
 * program. */
static void finish(void *argument, engine_result *result) {
  pending *call = argument;
  xla_ffi_error *error = NULL;
  if (result->status != ENGINE_CALL_OK)
    error = error_of(call->api, CODES[result->status], result->text);
  else if (call->gathers)
    error = deliver(call, result);
  free(result->memory);
  if (call->future == NULL) {
    call->error = error;
    sem_post(&call->over);
    return;
  }
  const xla_ffi_api *api = call->api;
  xla_ffi_future_fail fail = {sizeof fail, NULL, call->future, error};
  xla_ffi_future_set set = {sizeof set, NULL, call->future};
  free(call);
  drop(api, error != NULL ? api->future_set_error(&fail) : api->future_set_available(&set));
}

/* Make a call fail on the other ranks too, and return its error. */
static xla_ffi_error *refuse(const engine_calls *calls, const xla_ffi_api *api, const attributes *a, int code, const char *text) {
  engine_call native = {
      .struct_size = sizeof native,
      .set = a->set,
      .kind = (uint8_t)a->kind,
      .flags = (uint8_t)(a->flags & ENGINE_CALL_UNNAMED),
      .name = a->name.data,
      .name_bytes = (uint32_t)a->name.size,
      .done = ignore,
      .fault = text,
  };
  calls->submit(&native);
  return error_of(api, code, text);
}

/* Make the record of a call with its tensors, or return an error. */
static xla_ffi_error *make_pending(const engine_calls *calls, const xla_ffi_frame *frame, const attributes *a, pending **made) {
  char text[TEXT_BYTES];
  uint32_t count = (uint32_t)frame->arguments.size;
  int gathers = a->kind == KIND_ALLGATHER || a->kind == KIND_ALLTOALL;
  size_t rows = gathers ? (size_t)count * (size_t)a->ranks : 0;
  if (frame->results.size < frame->arguments.size || (gathers && (a->ranks < 1 || a->rows.size != rows)))
    return refuse(calls, frame->api, a, XLA_FFI_INTERNAL, "EngineError: the results of a collective do not fit its arguments");
  pending *call = calloc(1, sizeof *call + count * sizeof *call->tensors + (rows + (size_t)a->ranks) * sizeof *call->rows);
  if (call == NULL)
    return refuse(calls, frame->api, a, XLA_FFI_RESOURCE_EXHAUSTED, "EngineError: no memory for a collective");
  call->api = frame->api;
  call->gathers = gathers;
  call->ranks = a->ranks;
  call->count = count;
  call->tensors = (engine_call_tensor *)(call + 1);
  call->rows = (int64_t *)(call->tensors + count);
  if (rows != 0)
    memcpy(call->rows, a->rows.data, rows * sizeof *call->rows);
  call->name = show(a);
  for (uint32_t k = 0; k < count; k++) {
    const xla_ffi_buffer *source = frame->arguments.values[k];
    if (frame->arguments.types[k] != XLA_FFI_BUFFER || frame->results.types[k] != XLA_FFI_BUFFER ||
        !read_tensor(source, frame->results.values[k], &call->tensors[k])) {
      snprintf(text, sizeof text, "UnsupportedTensorError: tensor %u of '%s' has XLA's dtype %d, which the engine does not have",
               k, call->name.text, source->dtype);
      free(call);
      return refuse(calls, frame->api, a, XLA_FFI_INVALID_ARGUMENT, text);
    }
  }
  *made = call;
  return NULL;
}

/* Submit a call; wait for it if the runtime has no futures. The wait is bounded: the engine ends the call when ranks stall. */
static xla_ffi_error *run(const engine_calls *calls, xla_ffi_frame *frame, const attributes *a, pending *call) {
  engine_call native = {
      .struct_size = sizeof native,
      .set = a->set,
      .root = a->root,
      .kind = (uint8_t)a->kind,
      .op = (uint8_t)a->op,
      .wire = (uint8_t)a->wire,
      .flags = (uint8_t)a->flags,
      .prescale = a->prescale,
      .postscale = a->postscale,
      .name = a->name.data,
      .name_bytes = (uint32_t)a->name.size,
      .count = call->count,
      .tensors = call->tensors,
      .splits = a->kind == KIND_ALLTOALL ? call->rows : NULL,     /* as many rows go to each rank as come from it */
      .done = finish,
      .argument = call,
      .linger_ns = (uint64_t)a->linger_ns,
      .optimizer = a->optimizer,
  };
  if (has_futures(call->api)) {
    xla_ffi_future_create create = {sizeof create, NULL, NULL};
    xla_ffi_error *error = call->api->future_create(&create);
    if (error != NULL) {
      drop(call->api, refuse(calls, call->api, a, XLA_FFI_INTERNAL, "EngineError: the runtime has no future for a collective"));
      free(call);
      return error;
    }
    call->future = frame->future = create.future;
    calls->submit(&native);
    return NULL;
  }
  sem_init(&call->over, 0, 0);
  native.linger_ns = ENGINE_CALL_FOREVER;
  calls->submit(&native);
  while (sem_wait(&call->over) != 0 && errno == EINTR) {
  }
  xla_ffi_error *error = call->error;
  sem_destroy(&call->over);
  free(call);
  return error;
}

/* Return an error if this rank's place in the process set has changed since compilation, and shapes of results depend on it. */
static xla_ffi_error *expect_place(const engine_calls *calls, const xla_ffi_api *api, const attributes *a) {
  char text[TEXT_BYTES];
  int32_t rank, ranks;
  if (a->ranks == 0 || calls->place(a->set, &rank, &ranks) != ENGINE_CALL_OK || (rank == a->rank && ranks == a->ranks))
    return NULL;                /* without an engine `submit` reports that */
  snprintf(text, sizeof text,
           "MismatchError: '%s' was compiled for rank %d of %d, and this is rank %d of %d now: call jax.clear_caches() after "
           "engine.init()",
           show(a).text, a->rank, a->ranks, rank, ranks);
  return refuse(calls, api, a, XLA_FFI_FAILED_PRECONDITION, text);
}

/* The handler for all kinds of collectives. */
EXPORT xla_ffi_error *engine_xla_collective(xla_ffi_frame *frame) {
  const engine_calls *calls = atomic_load_explicit(&table, memory_order_acquire);   /* pairs with engine_xla_use */
  attributes a;
  char text[TEXT_BYTES];
  pending *call = NULL;
  if (tells_version(frame))
    return NULL;
  const char *missing = read_attributes(&frame->attributes, &a);
  if (missing != NULL || calls == NULL) {
    snprintf(text, sizeof text, "EngineError: a program calls a collective without %s: it was compiled by another version",
             missing != NULL ? missing : "engine.jax");
    return error_of(frame->api, XLA_FFI_INTERNAL, text);
  }
  if (!has_futures(frame->api) && !(a.flags & ENGINE_CALL_GROUP)) {
    snprintf(text, sizeof text,
             "UnsupportedOperationError: this jaxlib (FFI %d.%d) has no futures, so that several collectives in one program may "
             "wait for each other: '%s' has to be a grouped call, the only one of its program; or install a later jaxlib",
             frame->api->version.major, frame->api->version.minor, show(&a).text);
    return refuse(calls, frame->api, &a, XLA_FFI_UNIMPLEMENTED, text);
  }
  xla_ffi_error *error = expect_place(calls, frame->api, &a);
  if (error == NULL)
    error = make_pending(calls, frame, &a, &call);
  return error != NULL ? error : run(calls, frame, &a, call);
}

/* Store the table of the native call. Called once, before the handler is registered. */
EXPORT void engine_xla_use(const engine_calls *calls) { atomic_store_explicit(&table, calls, memory_order_release); }
