/* The native call: how compiled code of a framework submits a collective and hears of its end, without Python.
 *
 * The extension `engine_ext.bindings.calls` hands out one table of functions (its `TABLE`, a capsule, and `address()`). A
 * library that uses it includes this header and links nothing. Every function may be called on any thread, with or without
 * the GIL, and by several threads at once.
 *
 * The rules for `submit`:
 *   - `done` is called exactly once for each call, whatever becomes of it: on a thread of the engine that holds no lock and
 *     may be kept as long as the framework likes, or by `submit` itself before it returns. Never on the thread that moves
 *     data, and never with the GIL.
 *   - `call`, its `name`, `tensors` and `splits` are read before `submit` returns. What `source` and `target` point to has to
 *     stay in place until `done` is called.
 *   - `submit` blocks for `linger_ns` at most. While it does, this thread does the engine's work, so that a call that is
 *     alone is done when it returns. With 0 it never waits. Who lingers does not hold the GIL.
 *   - Operations of one name meet by name; those without meet by the order in which each rank submits them.
 *   - A call that is refused on one rank fails on the others, too, which are told why: also one whose name is in flight here.
 *     So whoever makes calls, and finds that it cannot make one, submits it with a `fault`.
 *   - The ranks compare what they submit: kind, dtype, shape, operation, factors, wire, and of a group the shapes and dtypes
 *     of all its tensors. A difference fails the call on every rank, and nothing else.
 */
#ifndef ENGINE_BINDINGS_CALLS_H
#define ENGINE_BINDINGS_CALLS_H

#include <stdint.h>

#define ENGINE_CALLS_CAPSULE "engine_calls"
#define ENGINE_CALLS_VERSION 2
#define ENGINE_CALL_DIMS 12       /* most dimensions of a tensor */
#define ENGINE_CALL_FOREVER UINT64_MAX

/* How a call ended. */
enum {
  ENGINE_CALL_OK,
  ENGINE_CALL_REFUSED,            /* it cannot be called so; the other ranks are told, and their calls of that name fail */
  ENGINE_CALL_MISMATCH,           /* ranks disagree on it, or it failed on another rank; the engine goes on */
  ENGINE_CALL_DUPLICATE,          /* this rank has an operation of that name in flight */
  ENGINE_CALL_JOINED,             /* this rank has joined, and submits nothing until all have */
  ENGINE_CALL_NOT_INITIALIZED,    /* there is no engine, or it was shut down, or the process set was removed */
  ENGINE_CALL_FORKED,             /* this process is a forked child of the rank */
  ENGINE_CALL_NO_MEMORY,
  ENGINE_CALL_FAILED_WORLD        /* a rank died, raised, left, stalled or was lost: every call fails from now on */
};

/* Flags of a call. */
enum {
  ENGINE_CALL_GROUP = 1,          /* all tensors make one operation, also if there is one; without it there is one tensor */
  ENGINE_CALL_UNNAMED = 2,        /* the next operation of its kind without a name; `name` is not looked at */
  ENGINE_CALL_MARKS_STEP = 4      /* its end is the end of a step of optimizer `optimizer` */
};

typedef struct engine_call_tensor {
  const void *source;             /* contiguous, aligned to an element; may be NULL where there are no elements */
  void *target;                   /* the result, as large as `source` (of a reduce-scatter: this rank's rows of it); is the
                                   * source itself, or lies apart from all tensors and results of the call; not looked at
                                   * where the engine allocates the result (allgather, alltoall) */
  int32_t dtype, ndim;            /* ENGINE_FLOAT32 .. of kernels/kernels.h */
  int64_t dims[ENGINE_CALL_DIMS];
} engine_call_tensor;

/* What has become of a call. It and what it points to are gone when `done` returns, except `memory`. Texts are UTF-8. */
typedef struct engine_result {
  int32_t status, ranks;          /* ENGINE_CALL_*; number of ranks in the process set */
  const char *text;               /* why it failed: the class of engine.errors, a colon, and its message; NULL if it did not */
  char *memory;                   /* what was gathered or exchanged: now the callee's, to be freed by free(); begins at a
                                   * multiple of 64. NULL where there is a target, or if the call failed. */
  uint64_t bytes;                 /* of `memory` */
  const int64_t *rows;            /* rows that came from each rank; of a group: see `part_rows` */
  uint32_t count, padding;        /* number of tensors in the group; 0: no group */
  struct engine_parts *parts;     /* the engine's: where the tensor after the last that `part_copy` has copied begins */
} engine_result;

typedef void (*engine_done)(void *argument, engine_result *result);

typedef struct engine_call {
  uint32_t struct_size;           /* sizeof(engine_call) */
  int32_t set;                    /* 0: the world; else the number of the process set (ProcessSet.process_set_id) */
  uint8_t kind, op, wire, flags;  /* the number of an operation in shared/names.h; ENGINE_SUM .. of kernels/kernels.h; WIRE_*
                                   * (the dtype in which float32 and float64 travel) or WIRE_TUNED; ENGINE_CALL_* */
  int32_t root;                   /* of a broadcast: a rank of the world */
  double prescale, postscale;     /* factors of the inputs and of the result of a reduction; 1: none */
  const char *name;               /* UTF-8, not terminated */
  uint32_t name_bytes, count;     /* length of the name; number of tensors */
  const engine_call_tensor *tensors;
  const int64_t *splits;          /* of an all-to-all: rows for each rank */
  engine_done done;
  void *argument;
  uint64_t linger_ns;             /* how long `submit` may wait for the end; ENGINE_CALL_FOREVER: until it has come */
  int32_t optimizer, padding;     /* with ENGINE_CALL_MARKS_STEP: number of the optimizer */
  const char *fault;              /* NULL; or why there is no such call, as a `text` says it: then it is refused, and of the
                                   * rest only what names the operation and its end is looked at */
} engine_call;

typedef struct engine_calls {
  uint32_t struct_size, version;  /* sizeof(engine_calls); ENGINE_CALLS_VERSION */
  void (*submit)(const engine_call *call);
  /* This rank's number in a process set, and how many ranks it has: ENGINE_CALL_OK, or ENGINE_CALL_NOT_INITIALIZED. */
  int (*place)(int32_t set, int32_t *rank, int32_t *size);
  /* Of a gathered group: the rows of tensor `k` that came from each rank, into rows[ranks]; the bytes of all of them. */
  uint64_t (*part_rows)(const engine_result *result, uint32_t k, int64_t *rows);
  /* Copy tensor `k` of a gathered group, the rows of all ranks one after the other's, to `target`. In order it is quick. */
  void (*part_copy)(const engine_result *result, uint32_t k, void *target);
} engine_calls;

#endif
