/* The native call: compiled code of a framework submits a collective and learns of its end, without Python.
 *
 * The extension `engine_ext.bindings.calls` hands out one table of functions (its `TABLE`, a capsule, and `address()`). A library
 * that uses it includes this header and links nothing. Every function may be called on any thread, with or without the GIL, and
 * by several threads at once.
 *
 * The rules for `submit`:
 *   - `done` is called exactly once for each call, whatever its outcome: by `submit` itself before it returns, or on a thread of
 *     the engine. That thread holds no lock, and the framework may keep it as long as it likes. It is never the thread that moves
 *     data, and never holds the GIL.
 *   - `call`, its `name`, `tensors` and `splits` are read before `submit` returns. The memory of `source` and `target` has to
 *     stay in place until `done` is called.
 *   - `submit` blocks for at most `linger_ns`; with 0 it never waits. Meanwhile this thread does the engine's work, so that a
 *     call that is alone is done when it returns. A caller that lingers must not hold the GIL.
 *   - Named operations are matched by name, unnamed ones by the order in which each rank submits them.
 *   - A call that is refused on one rank also fails on the others, which are told why. That includes a call whose name is in
 *     flight on this rank. So a caller that cannot make a call submits it with a `fault`.
 *   - The ranks compare what they submit: kind, dtype, shape, operation, factors, wire, and for a group the shapes and dtypes of
 *     all its tensors. A difference fails the call on every rank, and nothing else.
 */
#ifndef ENGINE_BINDINGS_CALLS_H
#define ENGINE_BINDINGS_CALLS_H

#include <stdint.h>

#define ENGINE_CALLS_CAPSULE "engine_calls"
#define ENGINE_CALLS_VERSION 2
#define ENGINE_CALL_DIMS 12       /* largest number of dimensions of a tensor */
#define ENGINE_CALL_FOREVER UINT64_MAX

/* Statuses with which a call ends. */
enum {
  ENGINE_CALL_OK,
  ENGINE_CALL_REFUSED,            /* the call is invalid; the other ranks are told, and their calls of that name fail */
  ENGINE_CALL_MISMATCH,           /* the ranks disagree on it, or it failed on another rank; the engine goes on */
  ENGINE_CALL_DUPLICATE,          /* this rank has an operation of that name in flight */
  ENGINE_CALL_JOINED,             /* this rank has joined, and submits nothing until all have */
  ENGINE_CALL_NOT_INITIALIZED,    /* there is no engine, or it was shut down, or the process set was removed */
  ENGINE_CALL_FORKED,             /* this process is a forked child of the rank */
  ENGINE_CALL_NO_MEMORY,
  ENGINE_CALL_FAILED_WORLD        /* a rank died, raised, left, stalled or was lost: every call fails from now on */
};

/* Flags of a call. */
enum {
  ENGINE_CALL_GROUP = 1,          /* all tensors form one operation, even a single one; without it there is one tensor */
  ENGINE_CALL_UNNAMED = 2,        /* the next operation of its kind without a name; `name` is ignored */
  ENGINE_CALL_MARKS_STEP = 4      /* its end is the end of a step of optimizer `optimizer` */
};

typedef struct engine_call_tensor {
  const void *source;             /* contiguous, aligned to an element; may be NULL where there are no elements */
  void *target;                   /* memory for the result, as large as `source`; for a reduce-scatter: this rank's rows of it.
                                   * Either the source itself, or apart from all tensors and results of the call. Ignored where
                                   * the engine allocates the result (allgather, alltoall) */
  int32_t dtype, ndim;            /* ENGINE_FLOAT32 .. of kernels/kernels.h; number of dimensions */
  int64_t dims[ENGINE_CALL_DIMS];
} engine_call_tensor;

/* Outcome of a call. It and the memory it points to are gone when `done` returns, except `memory`. Texts are UTF-8. */
typedef struct engine_result {
  int32_t status, ranks;          /* ENGINE_CALL_*; number of ranks in the process set */
  const char *text;               /* why it failed: the class of engine.errors, a colon, and its message; NULL if it did not */
  char *memory;                   /* the gathered or exchanged bytes, at a multiple of 64; `done` owns them and frees them by
                                   * free(). NULL where there is a target, or if the call failed. */
  uint64_t bytes;                 /* size of `memory` */
  const int64_t *rows;            /* rows that came from each rank; for a group: see `part_rows` */
  uint32_t count, padding;        /* number of tensors in the group; 0: no group */
  struct engine_parts *parts;     /* the engine's: position after the last tensor that `part_copy` has copied */
} engine_result;

typedef void (*engine_done)(void *argument, engine_result *result);

typedef struct engine_call {
  uint32_t struct_size;           /* sizeof(engine_call) */
  int32_t set;                    /* 0: the world; else the number of the process set (ProcessSet.process_set_id) */
  uint8_t kind, op, wire, flags;  /* number of an operation in shared/names.h; ENGINE_SUM .. of kernels/kernels.h; WIRE_* (the
                                   * dtype in which float32 and float64 travel) or WIRE_TUNED; ENGINE_CALL_* */
  int32_t root;                   /* root of a broadcast: a rank of the world */
  double prescale, postscale;     /* factors of the inputs and of the result of a reduction; 1: none */
  const char *name;               /* UTF-8, not terminated */
  uint32_t name_bytes, count;     /* length of the name; number of tensors */
  const engine_call_tensor *tensors;
  const int64_t *splits;          /* for an all-to-all: rows for each rank */
  engine_done done;               /* called once with the outcome */
  void *argument;                 /* first argument of `done` */
  uint64_t linger_ns;             /* NULL; or why this call cannot be made, in the form of `text`. The call is then refused. Of
                                   * the rest only the fields that name the operation and its `done` are used */
  int32_t optimizer, padding;     /* with ENGINE_CALL_MARKS_STEP: number of the optimizer */
  const char *fault;              /* NULL; or why this call cannot be made, in the form of `text`. The call is then refused, and
                                   * only its name, kind, set, `done` and `argument` are used */
} engine_call;

typedef struct engine_calls {
  uint32_t struct_size, version;  /* sizeof(engine_calls); ENGINE_CALLS_VERSION */
  void (*submit)(const engine_call *call);
  /* Write this rank's number in a process set and the number of its ranks. Return ENGINE_CALL_OK or
   * ENGINE_CALL_NOT_INITIALIZED. */
  int (*place)(int32_t set, int32_t *rank, int32_t *size);
  /* Write the rows of tensor `k` of a gathered group from each rank into rows[ranks]; return the bytes of all of them. */
  uint64_t (*part_rows)(const engine_result *result, uint32_t k, int64_t *rows);
  /* Copy tensor `k` of a gathered group to `target`, the rows of all ranks one after another. Ascending order is fast. */
  void (*part_copy)(const engine_result *result, uint32_t k, void *target);
} engine_calls;

#endif
