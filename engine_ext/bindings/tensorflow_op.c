/* TensorFlow's collectives: asynchronous ops and kernels that register through TensorFlow's C API when `tf.load_op_library` loads
 * this library. They submit through the native call (calls.h), whose table `engine_tensorflow_use` receives.
 *
 * TensorFlow passes an asynchronous kernel the address of a callback, a `std::function` that is destroyed when the kernel's
 * function returns. To complete later, the kernel has to move it, and the C API has no function for that. So its four words are
 * moved as libstdc++ lays them out (`relocate`), after a check that the callback has that layout (`is_recognized`).
 *
 * A submitted op is completed by `complete` exactly once, on a thread of the engine or within `compute`. Every path either sets
 * outputs for all results of the op or reports a failure. Otherwise TensorFlow would take arbitrary memory for the result.
 */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bindings/calls.h"
#include "bindings/tensorflow_c.h"
#include "kernels/kernels.h"
#include "platform/hash.h"
#include "platform/utf8.h"

#define EXPORTED __attribute__((visibility("default")))

enum { LINGER_NONE, LINGER_FIRST, LINGER_BRIEFLY, LINGER_FOREVER };   /* attribute `linger`; engine/tensorflow/op.py */
enum { LINGER_NS = 30000, LOOP_NAMES = 64, MOST_LAYOUTS = 32, FEW = 16, LONGEST_NAME = 1024, LONGEST_WAY = 512 };

static const int8_t DTYPES[] = {                  /* by TensorFlow's dtype: 1 + the engine's number; 0: it has none */
    [TF_FLOAT] = ENGINE_FLOAT32 + 1,
    [TF_DOUBLE] = ENGINE_FLOAT64 + 1,
    [TF_INT32] = ENGINE_INT32 + 1,
    [TF_UINT8] = ENGINE_UINT8 + 1,
    [TF_INT16] = ENGINE_INT16 + 1,
    [TF_INT8] = ENGINE_INT8 + 1,
    [TF_COMPLEX64] = ENGINE_COMPLEX64 + 1,
    [TF_INT64] = ENGINE_INT64 + 1,
    [TF_BOOL] = ENGINE_BOOL + 1,
    [TF_BFLOAT16] = ENGINE_BFLOAT16 + 1,
    [TF_UINT16] = ENGINE_UINT16 + 1,
    [TF_COMPLEX128] = ENGINE_COMPLEX128 + 1,
    [TF_HALF] = ENGINE_FLOAT16 + 1,
    [TF_UINT32] = ENGINE_UINT32 + 1,
    [TF_UINT64] = ENGINE_UINT64 + 1,
    [TF_FLOAT8_E5M2] = ENGINE_FLOAT8_E5M2 + 1,
    [TF_FLOAT8_E4M3FN] = ENGINE_FLOAT8_E4M3FN + 1,
    [TF_FLOAT8_E4M3FNUZ] = ENGINE_FLOAT8_E4M3FNUZ + 1,
    [TF_FLOAT8_E5M2FNUZ] = ENGINE_FLOAT8_E5M2FNUZ + 1,
};

static const char TOO_MANY_ROWS[] =
    "UnsupportedTensorError: more than 2,147,483,647 rows came from one rank, and the op tells numbers of rows as int32: reshape "
    "the tensor to fewer rows";

static tensorflow_functions tf;
static const engine_calls *engine;                /* the native call; NULL until engine_tensorflow_use */
static char reason[256];                          /* why there are no ops; empty: there are */
static _Atomic int64_t last_step = -1;            /* step of the last op with LINGER_FIRST */

typedef enum form { REDUCES, SCATTERS, GATHERS, EXCHANGES } form;

typedef struct kernel {                           /* one op of a graph, or one set of attributes in eager mode */
  engine_call call;                               /* all fields but the tensors */
  form form;
  int linger;
  atomic_flag counting;                           /* spin lock over the next two */
  uint32_t running;                               /* unnamed calls of this op in flight */
  int64_t step;                                   /* the step that they belong to */
  char name[];
} kernel;

typedef struct pending {                          /* an op that was submitted */
  uint64_t done[4];                               /* TensorFlow's callback, relocated */
  TF_Context *context;
  TF_Status *failure;                             /* why it could not be submitted properly; NULL: it was */
  kernel *counted;                                /* kernel whose `running` counts this call; NULL: none */
} pending;

/* ---- completion of an op --------------------------------------------------------------------------------------------------- */

/* Report a failure of the op to TensorFlow. */
static void fail(TF_Context *context, int code, const char *text) {
  TF_Status *status = tf.NewStatus();
  tf.SetStatus(status, code, text);
  tf.OpKernelContext_Failure(context, status);
  tf.DeleteStatus(status);
}

/* Return TensorFlow's error code for an ENGINE_CALL_* status. */
static int code_of(int status) {
  switch (status) {
    case ENGINE_CALL_REFUSED: return TF_INVALID_ARGUMENT;
    case ENGINE_CALL_DUPLICATE: return TF_ALREADY_EXISTS;
    case ENGINE_CALL_NO_MEMORY: return TF_RESOURCE_EXHAUSTED;
    case ENGINE_CALL_FAILED_WORLD: return TF_ABORTED;   /* not UNAVAILABLE, which TensorFlow rewrites */
    default: return TF_FAILED_PRECONDITION;
  }
}

/* Free the memory of a tensor that TensorFlow has taken over. */
static void release(void *data, size_t bytes, void *argument) {
  (void)bytes, (void)argument;
  free(data);
}

/* Return whether a libstdc++ std::function lies at `done`: {functor, functor, manager, invoker}, of which the last two are
 * functions of a library. Asking the loader is slow where many libraries are loaded, so its answers are kept. */
static bool is_recognized(const TF_Done *done) {
  static _Atomic uint64_t known[MOST_LAYOUTS][2];
  static _Atomic uint32_t count;
  const uint64_t *words = (const uint64_t *)(const void *)done;
  uint32_t seen = atomic_load_explicit(&count, memory_order_acquire);   /* pairs with the release below */
  uint32_t k;
  Dl_info found;
  for (k = 0; k < seen && k < MOST_LAYOUTS; k++) {
    if (known[k][0] == words[2] && known[k][1] == words[3]) return true;
  }
  if (!words[2] || !words[3] || !dladdr((void *)words[2], &found) || !dladdr((void *)words[3], &found)) return false;
  static atomic_flag adding = ATOMIC_FLAG_INIT;
  if (seen < MOST_LAYOUTS && !atomic_flag_test_and_set(&adding)) {
    if (atomic_load(&count) == seen) {
      known[seen][0] = words[2];
      known[seen][1] = words[3];
      atomic_store_explicit(&count, seen + 1, memory_order_release);
    }
    atomic_flag_clear(&adding);
  }
  return true;
}

/* Move TensorFlow's callback to `to` and leave an empty one behind. */
static void relocate(uint64_t to[4], TF_Done *done) {
  uint64_t *words = (uint64_t *)(void *)done;
  memcpy(to, words, 4 * sizeof *to);
  words[2] = words[3] = 0;                        /* empty: its destructor does nothing */
}

/* Call a relocated callback, and destroy it. */
static void run_and_destroy(uint64_t done[4]) {
  bool (*manage)(void *, const void *, int) = (bool (*)(void *, const void *, int))done[2];
  tf.RunAsyncOpKernelDoneCallback((TF_Done *)(void *)done);
  manage(done, done, 3);                          /* 3: destroy the functor */
}

/* Set output `k` of an allgather or all-to-all, of `rows` rows. It takes over the result's memory, or gets a copy from a gathered
 * group. */
static void put_rows(pending *p, engine_result *result, int k, int64_t rows, TF_Status *status) {
  int64_t dims[TF_MOST_DIMS];
  TF_Tensor *input = NULL, *output;
  size_t bytes;
  int d, ndim, dtype;
  tf.GetInput(p->context, k, &input, status);
  if (tf.GetCode(status) != TF_OK) return;
  ndim = tf.NumDims(input), dtype = tf.TensorType(input);
  dims[0] = rows;
  bytes = (size_t)dtype_bytes(DTYPES[dtype] - 1) * (size_t)rows;
  for (d = 1; d < ndim; d++) {
    dims[d] = tf.Dim(input, d);
    bytes *= (size_t)dims[d];
  }
  tf.DeleteTensor(input);
  if (ndim < 1) ndim = 1;
  if (!result->count && result->memory != NULL && bytes) {
    output = tf.NewTensor(dtype, dims, ndim, result->memory, bytes, release, NULL);
    if (output == NULL) {
      tf.SetStatus(status, TF_INTERNAL, "EngineError: TensorFlow does not take what was received as a tensor");
      return;
    }
    result->memory = NULL;
    tf.SetOutput(p->context, k, output, status);
  } else {
    output = tf.AllocateOutput(p->context, k, dtype, dims, ndim, bytes, status);
    if (tf.GetCode(status) == TF_OK && bytes) engine->part_copy(result, (uint32_t)k, tf.TensorData(output));
  }
  if (output != NULL) tf.DeleteTensor(output);
}

/* Set the outputs of an allgather or all-to-all: the rows of all ranks, and the number of rows of each rank. */
static void put_gathered(pending *p, engine_result *result, TF_Status *status) {
  int count = result->count ? (int)result->count : 1, k, r;
  int64_t shape[2] = {count, result->ranks}, *rows = malloc((size_t)result->ranks * sizeof *rows), total;
  size_t bytes = (size_t)count * (size_t)result->ranks * sizeof(int32_t);
  TF_Tensor *counts = tf.AllocateOutput(p->context, count, TF_INT32, shape, 2, bytes, status);
  int32_t *values = counts != NULL ? tf.TensorData(counts) : NULL;
  if (rows == NULL && tf.GetCode(status) == TF_OK) tf.SetStatus(status, TF_RESOURCE_EXHAUSTED, "no memory for numbers of rows");
  for (k = 0; k < count && tf.GetCode(status) == TF_OK; k++) {
    if (result->count) {
      engine->part_rows(result, (uint32_t)k, rows);
    } else {
      memcpy(rows, result->rows, (size_t)result->ranks * sizeof *rows);
    }
    for (total = 0, r = 0; r < result->ranks; r++) {
      if (rows[r] > INT32_MAX) {
        tf.SetStatus(status, TF_INVALID_ARGUMENT, TOO_MANY_ROWS);
        break;
      }
      *values++ = (int32_t)rows[r];
      total += rows[r];
    }
    if (tf.GetCode(status) == TF_OK) put_rows(p, result, k, total, status);
  }
  if (counts != NULL) tf.DeleteTensor(counts);
  free(rows);
}

/* Lock `running` and `step` of a kernel. */
static void begin_counting(kernel *op) {
  while (atomic_flag_test_and_set_explicit(&op->counting, memory_order_acquire)) {   /* held for three instructions */
  }
}

/* Unlock `running` and `step` of a kernel; pairs with begin_counting. */
static void end_counting(kernel *op) { atomic_flag_clear_explicit(&op->counting, memory_order_release); }

/* Count a call that begins; return whether no call of another step is in flight. */
static bool count_running(kernel *op, int64_t step) {
  bool alone;
  begin_counting(op);
  if (op->running++ == 0) op->step = step;
  alone = op->step == step;
  end_counting(op);
  return alone;
}

/* Count a call that has ended. */
static void count_ended(kernel *op) {
  begin_counting(op);
  op->running--;
  end_counting(op);
}

/* Complete an op; the engine calls this at its end. */
static void complete(void *argument, engine_result *result) {
  pending *p = argument;
  TF_Status *status;
  if (p->failure != NULL) {
    tf.OpKernelContext_Failure(p->context, p->failure);
    tf.DeleteStatus(p->failure);
  } else if (result->status != ENGINE_CALL_OK) {
    fail(p->context, code_of(result->status), result->text);
  } else if (result->rows != NULL) {
    status = tf.NewStatus();
    put_gathered(p, result, status);
    if (tf.GetCode(status) != TF_OK) tf.OpKernelContext_Failure(p->context, status);
    tf.DeleteStatus(status);
  }
  free(result->memory);
  if (p->counted != NULL) count_ended(p->counted);
  run_and_destroy(p->done);                       /* the context and the kernel may be gone now */
  free(p);
}

/* ---- submission ------------------------------------------------------------------------------------------------------------ */

typedef struct shape {                            /* of an input, and then of its output */
  int dtype, ndim;                                /* TensorFlow's number of the dtype; number of dimensions */
  int64_t dims[TF_MOST_DIMS];
} shape;

/* Describe input `k` in `tensor` and `seen`. The context keeps it in place until the op is done. */
static bool look(TF_Context *context, int k, engine_call_tensor *tensor, shape *seen, TF_Status *status) {
  TF_Tensor *input = NULL;
  int d;
  tf.GetInput(context, k, &input, status);
  if (tf.GetCode(status) != TF_OK) return false;
  seen->dtype = tf.TensorType(input), seen->ndim = tf.NumDims(input);
  for (d = 0; d < seen->ndim; d++) {
    seen->dims[d] = tf.Dim(input, d);
    if (d < ENGINE_CALL_DIMS) tensor->dims[d] = seen->dims[d];
  }
  tensor->dtype = seen->dtype > 0 && seen->dtype < (int)sizeof DTYPES ? DTYPES[seen->dtype] - 1 : -1;
  tensor->ndim = seen->ndim;
  tensor->source = tf.TensorData(input);
  tensor->target = NULL;
  tf.DeleteTensor(input);                         /* else its buffer would have two owners, and could not be forwarded */
  return true;
}

/* Find memory for output `k`: that of input `k` if the shape is the same and nobody else needs it, else new memory. */
static bool place(const kernel *op, TF_Context *context, int k, engine_call_tensor *tensor, shape *seen, TF_Status *status) {
  int forwarded = -1, d;
  int32_t rank, size;
  size_t bytes;
  TF_Tensor *output;
  if (tensor->dtype < 0) return true;             /* the engine refuses it */
  if (op->form == SCATTERS) {
    if (seen->ndim < 1 || engine->place(op->call.set, &rank, &size) != ENGINE_CALL_OK) return true;
    seen->dims[0] = seen->dims[0] / size + (rank < seen->dims[0] % size);
    bytes = (size_t)dtype_bytes(tensor->dtype);
    for (d = 0; d < seen->ndim; d++) bytes *= (size_t)seen->dims[d];
    output = tf.AllocateOutput(context, k, seen->dtype, seen->dims, seen->ndim, bytes, status);
  } else {
    output = tf.ForwardInputOrAllocateOutput(context, &k, 1, k, seen->dims, seen->ndim, &forwarded, status);
  }
  if (output == NULL) return false;
  tensor->target = tf.TensorData(output);
  tf.DeleteTensor(output);
  return true;
}

/* Describe the tensors of an op, and find memory for its results. */
static bool describe(const kernel *op, TF_Context *context, engine_call *call, engine_call_tensor *tensors, TF_Status *status) {
  shape seen;
  uint32_t k;
  for (k = 0; k < call->count; k++) {
    if (!look(context, (int)k, &tensors[k], &seen, status)) return false;
    if (op->form == GATHERS && !seen.ndim) {      /* a scalar is one row */
      tensors[k].ndim = 1;
      tensors[k].dims[0] = 1;
    }
    if ((op->form == REDUCES || op->form == SCATTERS) && !place(op, context, (int)k, &tensors[k], &seen, status)) return false;
  }
  call->tensors = tensors;
  return true;
}

/* Return the rows that an all-to-all sends to each rank, as its second input gives them, or equal shares if that is empty. The
 * caller frees the array. Return NULL with an error in `status`, or without one if there is no engine. */
static int64_t *find_splits(const kernel *op, TF_Context *context, const engine_call_tensor *tensor, TF_Status *status) {
  char text[256];
  TF_Tensor *given = NULL;
  int64_t *splits = NULL, count, rows = tensor->ndim > 0 ? tensor->dims[0] : 0;
  int32_t rank, size, r;
  if (engine->place(op->call.set, &rank, &size) != ENGINE_CALL_OK) return NULL;   /* `submit` reports that */
  tf.GetInput(context, 1, &given, status);
  if (tf.GetCode(status) != TF_OK) return NULL;
  count = tf.TensorElementCount(given);
  if (count && count != size) {
    snprintf(text, sizeof text, "ArgumentError: splits says how many rows go to each of %d ranks, but has %lld numbers", size,
             (long long)count);
    tf.SetStatus(status, TF_INVALID_ARGUMENT, text);
  } else if (!count && rows % size) {
    snprintf(text, sizeof text, "ArgumentError: %lld rows cannot be divided equally between %d ranks: give splits",
             (long long)rows, size);
    tf.SetStatus(status, TF_INVALID_ARGUMENT, text);
  } else if ((splits = malloc((size_t)size * sizeof *splits)) == NULL) {
    tf.SetStatus(status, TF_RESOURCE_EXHAUSTED, "MemoryError: no memory for splits");
  } else if (count) {
    memcpy(splits, tf.TensorData(given), (size_t)size * sizeof *splits);
  } else {
    for (r = 0; r < size; r++) splits[r] = rows / size;
  }
  tf.DeleteTensor(given);
  return splits;
}

/* Return how long to wait for the end, in nanoseconds. For a lone op waiting costs less than being woken. Among many it would
 * keep them from being fused. So among ops that may have company, the first of a step waits and the others do not. */
static uint64_t linger_of(const kernel *op, TF_Context *context) {
  switch (op->linger) {
    case LINGER_FIRST: return atomic_exchange(&last_step, tf.StepId(context)) != tf.StepId(context) ? LINGER_NS : 0;
    case LINGER_BRIEFLY: return LINGER_NS;
    case LINGER_FOREVER: return ENGINE_CALL_FOREVER;
    default: return 0;
  }
}

/* Refuse unnamed calls whose order TensorFlow does not keep, because their function runs several times at once. Ranks match such
 * calls by order. */
static void expect_order(kernel *op, TF_Context *context, pending *p, TF_Status *status) {
  int64_t step = tf.StepId(context);
  if (!(op->call.flags & ENGINE_CALL_UNNAMED) || op->linger == LINGER_FOREVER) return;
  p->counted = op;
  if (!count_running(op, step)) {
    tf.SetStatus(status, TF_FAILED_PRECONDITION, "EngineError: this call has no name, and its function runs several times at once, "
                 "in an order that the ranks do not share: run it once at a time, as with num_parallel_calls=1 of tf.data");
  }
}

/* Submit an op as a native call. An error found here is submitted as its fault, so that the other ranks learn of it. */
static void submit(kernel *op, TF_Context *context, pending *p) {
  char name[LONGEST_NAME + 8];
  engine_call call = op->call;
  engine_call_tensor few[FEW], *tensors = few;
  int64_t *splits = NULL, loop = tf.GetIterId(context) % LOOP_NAMES;
  TF_Status *status = tf.NewStatus();
  call.count = (uint32_t)tf.NumInputs(context) - (op->form == EXCHANGES);
  call.name = op->name;
  if (loop && call.name_bytes && call.name_bytes <= LONGEST_NAME) {   /* iterations of a loop overlap */
    call.name_bytes = (uint32_t)snprintf(name, sizeof name, "%s#%d", op->name, (int)loop);
    call.name = name;
  }
  call.linger_ns = linger_of(op, context);
  call.done = complete, call.argument = p;
  if (call.count > FEW) tensors = malloc(call.count * sizeof *tensors);
  expect_order(op, context, p, status);
  if (tensors == NULL) {
    tf.SetStatus(status, TF_RESOURCE_EXHAUSTED, "MemoryError: no memory for the description of a group");
  } else if (tf.GetCode(status) == TF_OK && describe(op, context, &call, tensors, status) && op->form == EXCHANGES) {
    call.splits = splits = find_splits(op, context, &tensors[0], status);
  }
  if (tf.GetCode(status) != TF_OK) {              /* the engine refuses it, so that the other ranks learn of it */
    p->failure = status;
    call.fault = tf.Message(status);
  } else {
    tf.DeleteStatus(status);
  }
  engine->submit(&call);
  free(splits);
  if (tensors != few) free(tensors);
}

/* Run an asynchronous op: submit it, or fail it at once. */
static void compute(void *created, TF_Context *context, TF_Done *done) {
  kernel *op = created;
  pending *p;
  if (engine == NULL) {
    fail(context, TF_FAILED_PRECONDITION, "NotInitializedError: import engine.tensorflow before you run this graph");
  } else if (!is_recognized(done)) {
    fail(context, TF_INTERNAL, "EngineError: this build of TensorFlow hands over its callbacks in an unknown layout: set "
         "ENGINE_TENSORFLOW_NATIVE=0");
  } else if ((p = calloc(1, sizeof *p)) == NULL) {
    fail(context, TF_RESOURCE_EXHAUSTED, "MemoryError: no memory for a call");
  } else {
    p->context = context;
    relocate(p->done, done);
    submit(op, context, p);
    return;
  }
  tf.RunAsyncOpKernelDoneCallback(done);
}

/* ---- kernels --------------------------------------------------------------------------------------------------------------- */

/* Return the integer attribute `name`. */
static int64_t number(TF_Construction *construction, const char *name, TF_Status *status) {
  int64_t value = 0;
  tf.OpKernelConstruction_GetAttrInt64(construction, name, &value, status);
  return value;
}

/* Return the float attribute `name`. */
static double factor(TF_Construction *construction, const char *name, TF_Status *status) {
  int64_t bits = number(construction, name, status);   /* of a double: float attributes have single precision */
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Return the path by which a node was called, empty if it was not inlined. Before inlining, its name had `depth` parts before the
 * last. Inlining puts the names of the calls in front, such as
 * `gradients/StatefulPartitionedCall_1_grad/StatefulPartitionedCall`. */
static TF_Text find_path(TF_Text node, int64_t depth) {
  size_t length = node.bytes;
  for (; depth >= 0 && length; depth--) {
    while (length && node.data[length - 1] != '/') length--;
    if (length) length--;
  }
  return (TF_Text){node.data, length};
}

/* Make a kernel with the name of its operation. If TensorFlow does not order calls (`depth` >= 0), calls of one function are
 * distinguished by their paths, which are equal on ranks that run the same program. Unnamed nodes use their own name. */
static kernel *create_named(TF_Construction *construction, TF_Status *status) {
  int32_t list, length = 0;
  int64_t depth = number(construction, "depth", status);
  TF_Text node = tf.OpKernelConstruction_GetName(construction), path = {NULL, 0};
  kernel *op;
  tf.OpKernelConstruction_GetAttrSize(construction, "operation", &list, &length, status);
  if (depth >= 0) path = find_path(node, depth);
  op = calloc(1, sizeof *op + (size_t)length + node.bytes + 2);
  if (op == NULL) abort();                        /* as TensorFlow does when its own kernels lack memory */
  if (length > 0) tf.OpKernelConstruction_GetAttrString(construction, "operation", op->name, (size_t)length, status);
  if (path.bytes && length > 0) {
    op->name[length++] = '@';
    memcpy(op->name + length, path.data, path.bytes);
    length += (int32_t)path.bytes;
  } else if (path.bytes) {
    memcpy(op->name, node.data, node.bytes);
    length = (int32_t)node.bytes;
  }
  if (path.bytes && length > LONGEST_WAY) {       /* the engine limits the length of names */
    uint64_t hash = fnv_text(fnv_begin(), op->name, (size_t)length);
    length = (int32_t)utf8_whole(op->name, (size_t)length, LONGEST_WAY);
    length += snprintf(op->name + length, 18, "~%016llx", (unsigned long long)hash);
  }
  op->call.name_bytes = (uint32_t)length;
  return op;
}

/* Make the kernel of a collective from the attributes of its node. */
static void *create(TF_Construction *construction, form of) {
  TF_Status *status = tf.NewStatus();
  unsigned char group = 0;
  int64_t optimizer;
  kernel *op = create_named(construction, status);
  uint32_t length = op->call.name_bytes;
  tf.OpKernelConstruction_GetAttrBool(construction, "group", &group, status);
  optimizer = number(construction, "optimizer", status);
  op->form = of, op->linger = (int)number(construction, "linger", status);
  op->call = (engine_call){
      .struct_size = sizeof op->call,
      .set = (int32_t)number(construction, "set", status),
      .kind = (uint8_t)number(construction, "kind", status),
      .op = (uint8_t)number(construction, "op", status),
      .wire = (uint8_t)number(construction, "wire", status),
      .flags = (uint8_t)((group ? ENGINE_CALL_GROUP : 0) | (length > 0 ? 0 : ENGINE_CALL_UNNAMED) |
                         (optimizer >= 0 ? ENGINE_CALL_MARKS_STEP : 0)),
      .root = (int32_t)number(construction, "root", status),
      .prescale = factor(construction, "prescale", status),
      .postscale = factor(construction, "postscale", status),
      .name_bytes = length,
      .optimizer = optimizer >= 0 ? (int32_t)optimizer : 0,
  };
  if (tf.GetCode(status) != TF_OK) tf.OpKernelConstruction_Failure(construction, status);
  tf.DeleteStatus(status);
  return op;
}

static void *create_reduce(TF_Construction *construction) { return create(construction, REDUCES); }
static void *create_scatter(TF_Construction *construction) { return create(construction, SCATTERS); }
static void *create_gather(TF_Construction *construction) { return create(construction, GATHERS); }
static void *create_exchange(TF_Construction *construction) { return create(construction, EXCHANGES); }

/* Make the kernel of an op that tells this rank's number in a process set and the number of its ranks. Its state is the set's
 * number. */
static void *create_place(TF_Construction *construction) {
  TF_Status *status = tf.NewStatus();
  int64_t *set = malloc(sizeof *set);
  if (set == NULL) abort();
  *set = number(construction, "set", status);
  if (tf.GetCode(status) != TF_OK) tf.OpKernelConstruction_Failure(construction, status);
  tf.DeleteStatus(status);
  return set;
}

/* Set output `k` to an int32 scalar. */
static void put_number(TF_Context *context, int k, int32_t value) {
  TF_Status *status = tf.NewStatus();
  TF_Tensor *output = tf.AllocateOutput(context, k, TF_INT32, NULL, 0, sizeof value, status);
  if (output != NULL) {
    memcpy(tf.TensorData(output), &value, sizeof value);
    tf.DeleteTensor(output);
  } else {
    tf.OpKernelContext_Failure(context, status);
  }
  tf.DeleteStatus(status);
}

/* Set the outputs of EnginePlace: this rank's number in a process set, and the number of its ranks. */
static void compute_place(void *created, TF_Context *context) {
  const int64_t *set = created;
  int32_t rank, size;
  if (engine == NULL || engine->place((int32_t)*set, &rank, &size) != ENGINE_CALL_OK) {
    fail(context, TF_FAILED_PRECONDITION,
         "NotInitializedError: this rank is in no such process set: call engine.init(), or ask for a set that it is in. In an "
         "elastic job call this in the function that elastic.run wraps");
    return;
  }
  put_number(context, 0, rank);
  put_number(context, 1, size);
}

/* Set the output of EngineProbe: whether TensorFlow's callbacks have the expected layout. */
static void compute_probe(void *created, TF_Context *context, TF_Done *done) {
  (void)created;
  put_number(context, 0, is_recognized(done));
  tf.RunAsyncOpKernelDoneCallback(done);
}

/* ---- registration ---------------------------------------------------------------------------------------------------------- */

/* Infer that each output has the shape of its input. */
static void infer_same(TF_Shapes *shapes, TF_Status *status) {
  TF_Shape *each = tf.NewShapeHandle();
  int64_t k, count = tf.ShapeInferenceContextNumInputs(shapes);
  for (k = 0; k < count && tf.GetCode(status) == TF_OK; k++) {
    tf.ShapeInferenceContextGetInput(shapes, (int)k, each, status);
    if (tf.GetCode(status) == TF_OK) tf.ShapeInferenceContextSetOutput(shapes, (int)k, each, status);
  }
  tf.DeleteShapeHandle(each);
}

/* Infer unknown shapes: C cannot express a single unknown dimension, so Python sets the shapes. */
static void infer_nothing(TF_Shapes *shapes, TF_Status *status) { tf.ShapeInferenceContextSetUnknownShape(shapes, status); }

static const char *const ATTRIBUTES[] = {
    "kind: int", "set: int", "operation: string", "group: bool", "op: int", "wire: int", "prescale: int", "postscale: int",
    "root: int", "mathematical: bool", "linger: int", "optimizer: int", "depth: int", "T: list(type) >= 0", NULL};
static const char *const SET[] = {"set: int", NULL};

static const struct {
  const char *name, *inputs[2], *outputs[2];
  const char *const *attributes;
  void *(*create)(TF_Construction *);
  void (*compute)(void *, TF_Context *);
  void (*compute_async)(void *, TF_Context *, TF_Done *);
  void (*infer)(TF_Shapes *, TF_Status *);
} OPS[] = {
    {"EngineReduce", {"tensors: T"}, {"results: T"}, ATTRIBUTES, create_reduce, NULL, compute, infer_same},
    {"EngineScatter", {"tensors: T"}, {"results: T"}, ATTRIBUTES, create_scatter, NULL, compute, infer_nothing},
    {"EngineGather", {"tensors: T"}, {"results: T", "rows: int32"}, ATTRIBUTES, create_gather, NULL, compute, infer_nothing},
    {"EngineExchange", {"tensors: T", "splits: int64"}, {"results: T", "rows: int32"}, ATTRIBUTES, create_exchange, NULL, compute,
     infer_nothing},
    {"EnginePlace", {NULL}, {"rank: int32", "size: int32"}, SET, create_place, compute_place, NULL, infer_nothing},
    {"EngineProbe", {NULL}, {"recognized: int32"}, SET, create_place, NULL, compute_probe, infer_nothing},
};

/* Fill the table of TensorFlow's functions; return false with `reason` if one is missing. */
static bool look_up(void) {
  static const char *const symbols[] = {TENSORFLOW_FUNCTIONS(TENSORFLOW_SYMBOL)};
  void **members = (void **)(void *)&tf;
  void *library = dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
  size_t k;
  if (library == NULL) {
    snprintf(reason, sizeof reason, "libtensorflow_framework.so.2 is not loaded");
    return false;
  }
  for (k = 0; k < sizeof symbols / sizeof *symbols; k++) {
    members[k] = dlsym(library, symbols[k]);
    if (members[k] == NULL) {
      snprintf(reason, sizeof reason, "this TensorFlow has no function %s", symbols[k]);
      return false;
    }
  }
  return true;
}

/* Register the definition of op `n`. */
static void define(size_t n, TF_Status *status) {
  TF_OpBuilder *builder = tf.NewOpDefinitionBuilder(OPS[n].name);
  int k;
  for (k = 0; k < 2 && OPS[n].inputs[k] != NULL; k++) tf.OpDefinitionBuilderAddInput(builder, OPS[n].inputs[k]);
  for (k = 0; k < 2 && OPS[n].outputs[k] != NULL; k++) tf.OpDefinitionBuilderAddOutput(builder, OPS[n].outputs[k]);
  for (k = 0; OPS[n].attributes[k] != NULL; k++) tf.OpDefinitionBuilderAddAttr(builder, OPS[n].attributes[k]);
  tf.OpDefinitionBuilderSetIsStateful(builder, true);   /* else TensorFlow folds, merges and drops such ops */
  tf.OpDefinitionBuilderSetShapeInferenceFunction(builder, OPS[n].infer);
  tf.RegisterOpDefinition(builder, status);
}

/* Register the CPU kernel of op `n`. */
static void enlist(size_t n, TF_Status *status) {
  TF_KernelBuilder *builder = OPS[n].compute != NULL
                                  ? tf.NewKernelBuilder(OPS[n].name, "CPU", OPS[n].create, OPS[n].compute, free)
                                  : tf.NewAsyncKernelBuilder(OPS[n].name, "CPU", OPS[n].create, OPS[n].compute_async, free);
  tf.RegisterKernelBuilder(OPS[n].name, builder, status);
}

/* Register all ops when the library is loaded. */
__attribute__((constructor)) static void begin(void) {
  TF_Status *status;
  size_t n;
  if (!look_up()) return;
  status = tf.NewStatus();
  for (n = 0; n < sizeof OPS / sizeof *OPS && tf.GetCode(status) == TF_OK; n++) {
    define(n, status);
    if (tf.GetCode(status) == TF_OK) enlist(n, status);
  }
  if (tf.GetCode(status) != TF_OK) snprintf(reason, sizeof reason, "TensorFlow refuses the op %s", OPS[n - 1].name);
  tf.DeleteStatus(status);
}

/* Return why there are no ops; empty: there are. */
EXPORTED const char *engine_tensorflow_reason(void);
EXPORTED const char *engine_tensorflow_reason(void) { return reason; }

/* Submit through this table from now on. Return NULL, or the reason why the table is unusable. */
EXPORTED const char *engine_tensorflow_use(const engine_calls *table);
EXPORTED const char *engine_tensorflow_use(const engine_calls *table) {
  if (table->struct_size < sizeof *table || table->version != ENGINE_CALLS_VERSION) return "the native call has another version";
  engine = table;
  return NULL;
}
