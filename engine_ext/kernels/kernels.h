/* Reduction kernels: they combine the values of several ranks into one, element by element.
 *
 * One source (kernels_impl.h) is compiled once per level, and every level gives equal bits for equal inputs: the order of
 * operations is rank order, nothing is reassociated or contracted, conversions round to nearest even. Only the sign and payload
 * of a NaN may differ between levels; whether a value is NaN may not.
 *
 * Semantics (docs/reference/operations.md has the table for users):
 * - float16 and bfloat16 accumulate in float32 and are rounded once; float32 and float64 accumulate in themselves.
 * - float32 and float64 may travel as float16 or bfloat16: every rank's values are rounded to that dtype and reduced in it, and
 *   the result is widened. float64 goes through float32 on the way.
 * - Integers wrap. Average truncates the quotient toward zero (and saturates if the divisor is less than the number of sources);
 *   its sum is exact, except that int64 wraps.
 * - Bool: any nonzero byte is true; Sum and Max are OR, Min and Product are AND; results are 0 or 1. No Average, no factors.
 * - Min and Max of NaN and anything are NaN; of equal values (-0 and +0 too) the later rank's is taken.
 *
 * Pointers need the alignment of their element type, no more. Kernels are pure: no state, no allocation, no errors. They rely on
 * round-to-nearest without flushing of denormals, which the caller sets (platform/cpu.h).
 */
#ifndef ENGINE_KERNELS_H
#define ENGINE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Every dtype: number, name, bytes of one element. Those up to bool have reduction kernels. The others are only moved, as bytes:
 * by broadcast, allgather and alltoall. */
#define ENGINE_DTYPE_LIST(ROW)                         \
  ROW(ENGINE_FLOAT16, "float16", 2)                    \
  ROW(ENGINE_BFLOAT16, "bfloat16", 2)                  \
  ROW(ENGINE_FLOAT32, "float32", 4)                    \
  ROW(ENGINE_FLOAT64, "float64", 8)                    \
  ROW(ENGINE_INT8, "int8", 1)                          \
  ROW(ENGINE_UINT8, "uint8", 1)                        \
  ROW(ENGINE_INT16, "int16", 2)                        \
  ROW(ENGINE_UINT16, "uint16", 2)                      \
  ROW(ENGINE_INT32, "int32", 4)                        \
  ROW(ENGINE_INT64, "int64", 8)                        \
  ROW(ENGINE_BOOL, "bool", 1)                          \
  ROW(ENGINE_UINT32, "uint32", 4)                      \
  ROW(ENGINE_UINT64, "uint64", 8)                      \
  ROW(ENGINE_COMPLEX32, "complex32", 4)                \
  ROW(ENGINE_COMPLEX64, "complex64", 8)                \
  ROW(ENGINE_COMPLEX128, "complex128", 16)             \
  ROW(ENGINE_FLOAT8_E4M3FN, "float8_e4m3fn", 1)        \
  ROW(ENGINE_FLOAT8_E4M3FNUZ, "float8_e4m3fnuz", 1)    \
  ROW(ENGINE_FLOAT8_E5M2, "float8_e5m2", 1)            \
  ROW(ENGINE_FLOAT8_E5M2FNUZ, "float8_e5m2fnuz", 1)    \
  ROW(ENGINE_FLOAT8_E8M0FNU, "float8_e8m0fnu", 1)
#define ENGINE_DTYPE_NUMBER(number, name, bytes) number,
#define ENGINE_DTYPE_NAME(number, name, bytes) name,
#define ENGINE_DTYPE_BYTES(number, name, bytes) bytes,

enum engine_dtype { ENGINE_DTYPE_LIST(ENGINE_DTYPE_NUMBER) ENGINE_ALL_DTYPES, ENGINE_DTYPES = ENGINE_BOOL + 1 };
static const char *const ENGINE_DTYPE_NAMES[] = {ENGINE_DTYPE_LIST(ENGINE_DTYPE_NAME)};
static const uint8_t ENGINE_ITEM_BYTES[] = {ENGINE_DTYPE_LIST(ENGINE_DTYPE_BYTES)};
/* Return the bytes of one element. */
static inline int64_t dtype_bytes(int dtype) { return ENGINE_ITEM_BYTES[dtype]; }

/* Every reduction: number and name. ENGINE_OPS counts those that combine element by element. Adasum (operations/adasum.pyx) is
 * built from `inner` and `weigh`. */
#define ENGINE_OP_LIST(ROW)      \
  ROW(ENGINE_SUM, "sum")         \
  ROW(ENGINE_AVERAGE, "average") \
  ROW(ENGINE_MIN, "min")         \
  ROW(ENGINE_MAX, "max")         \
  ROW(ENGINE_PRODUCT, "product") \
  ROW(ENGINE_ADASUM, "adasum")
#define ENGINE_OP_NUMBER(number, name) number,
#define ENGINE_OP_NAME(number, name) name,

enum engine_op { ENGINE_OP_LIST(ENGINE_OP_NUMBER) ENGINE_OPS = ENGINE_ADASUM };
static const char *const ENGINE_OP_NAMES[] = {ENGINE_OP_LIST(ENGINE_OP_NAME)};
_Static_assert(sizeof ENGINE_OP_NAMES / sizeof *ENGINE_OP_NAMES == ENGINE_ADASUM + 1, "Adasum is the last");

enum engine_level { ENGINE_PLAIN = 0, ENGINE_AVX2 = 1, ENGINE_AVX512 = 2, ENGINE_LEVELS = 3 };

/* Kernels by which one operation accumulates one dtype T in its accumulator type A. If all pointers are null, the operation is
 * refused. The destination may be exactly an input of the same element size; no other overlap is allowed. */
typedef struct engine_accumulation {
  size_t size;                                                        /* bytes of A */
  void (*widen)(void *acc, const void *src, size_t n);                /* A acc = src */
  void (*combine)(void *acc, const void *a, const void *b, size_t n); /* A acc = a op b */
  void (*fold)(void *acc, const void *src, size_t n);                 /* A acc = acc op src */
  /* T dst = acc / divisor * factor: division, then multiplication, both in A (integers multiply in double and saturate), then
   * one rounding to T. Either is skipped when it is 1. For integers the divisor is a positive whole number. */
  void (*finish)(void *dst, const void *acc, double divisor, double factor, size_t n);
} engine_accumulation;

/* Kernels of one dtype T. */
typedef struct engine_dtype_kernels {
  size_t size; /* bytes of T */
  /* T dst = factor * src, rounded to T. float16, bfloat16 and float32 multiply in float32, with the factor rounded to it too; the
   * rest in double. Integers truncate toward zero and saturate. Null for bool. In place is allowed. */
  void (*scale)(void *dst, const void *src, double factor, size_t n);
  engine_accumulation ops[ENGINE_OPS];
} engine_dtype_kernels;

enum { ENGINE_NO_SOURCE = -1, ENGINE_EVERY_SOURCE = -2 };
enum { ENGINE_INNER_LANES = 8, ENGINE_INNER_ROWS = 256 };
enum { ENGINE_BLOCK = 64 }; /* elements that share a scale, see `encode` */

/* Parameters that are constant over the pieces of one reduction. T is the dtype that travels: that of sources packed by other
 * ranks, and of every destination but the first. */
typedef struct engine_reduction {
  int dtype, op;     /* T; ENGINE_SUM .. */
  int tensor;        /* dtype of unscaled sources and of the first destination: T, or float32 or float64 if T is a half */
  int count;         /* number of sources, at least 1, reduced in the order 0 .. count - 1 */
  int unscaled;      /* index of the source that is unpacked tensor data, or one of the two constants above */
  int copies;        /* number of destinations, at least 1 */
  int streaming;     /* nonzero: destinations after the first are written with streaming stores */
  double prescale;   /* rounds to T exactly as `pack` does, so it does not matter where a source is scaled; 1: none */
  double divisor;    /* divisor of Average; 1 for other operations */
  double postscale;  /* 1: none */
} engine_reduction;

/* The table of kernels of one level. */
typedef struct engine_kernels {
  /* Copy bytes at any alignment. `copy_streaming` bypasses the caches of the destination and ends with a store fence. */
  void (*copy)(void *dst, const void *src, size_t bytes);
  void (*copy_streaming)(void *dst, const void *src, size_t bytes);

  /* T dst = src, or prescale * src: the packed values that a rank offers to others. If the tensor has another dtype, multiply in
   * that, round to float32, then to T. */
  void (*pack)(int dtype, int tensor, double prescale, int streaming, void *dst, const void *src, size_t n);
  /* The inverse of `pack` without a factor: T src to the tensor's dtype. Exact. */
  void (*unpack)(int dtype, int tensor, void *dst, const void *src, size_t n);

  /* Reduce `n` elements of every source into every destination. A destination may be exactly a source; no other overlap.
   * Streaming stores are fenced before it returns. */
  void (*reduce)(const engine_reduction *r, const void *const *sources, void *const *destinations, size_t n);

  /* The same reduction in several calls, each with some of the sources, in order, with the same bits. `before` holds the
   * accumulators of the sources so far, as in engine_accumulation; null: these are the first sources. `reduce_onward` writes
   * accumulators to `after`, which must differ from `before`. `reduce_last` divides, scales and rounds. */
  void (*reduce_onward)(const engine_reduction *r, const void *before, const void *const *sources, void *after, size_t n);
  void (*reduce_last)(const engine_reduction *r, const void *before, const void *const *sources, void *const *destinations,
                      size_t n);

  engine_dtype_kernels types[ENGINE_DTYPES];

  /* Floats only. Add the products of each pair of `count` (at most ENGINE_INNER_ROWS) rows to their lanes, in float64. Each
   * pair (0, 0), (0, 1), .. (1, 1), (1, 2), .. has ENGINE_INNER_LANES numbers; element i goes to lane i modulo
   * ENGINE_INNER_LANES. A row may come in several calls with the same bits, if all but the last have a multiple of
   * ENGINE_INNER_LANES elements. */
  void (*inner)(int dtype, double *lanes, const void *const *rows, int count, size_t n);

  /* Floats only. dst = the sum of weights[r] * rows[r], r = 0 .. count - 1, in float64, rounded at the end (to float32 first
   * for float16 and bfloat16). `dst` may be exactly a row. */
  void (*weigh)(int dtype, void *dst, const void *const *rows, const double *weights, int count, size_t n);

  /* Block scaling (kernels_blocks.h): float32 as float8 e4m3, with an E8M0 scale for each ENGINE_BLOCK elements; the last block
   * may be short. Rounds to nearest, ties to even. A block with an infinity or a NaN becomes NaN; zeros keep their sign. */
  void (*encode)(uint8_t *scales, uint8_t *codes, const float *src, size_t n);
  void (*decode)(float *dst, const uint8_t *scales, const uint8_t *codes, size_t n); /* exact */
  void (*decode_add)(float *acc, const uint8_t *scales, const uint8_t *codes, size_t n); /* acc += decoded */
  /* Floats only. `to_float`: float32 dst = factor * src, computed in float64 for float64 and in float32 for the rest.
   * `from_float`: back to the dtype, rounded. */
  void (*to_float)(int dtype, double factor, float *dst, const void *src, size_t n);
  void (*from_float)(int dtype, void *dst, const float *src, size_t n);
} engine_kernels;

/* Return the kernels of a level, or null if this build or this processor lacks it. Plain always exists. */
const engine_kernels *engine_kernels_get(int level);
/* Return the fastest level that this processor runs. */
int engine_kernels_best(void);
/* Return "plain", "avx2" or "avx512"; null for no level. */
const char *engine_kernels_name(int level);
/* Return the level of a name, "auto" for the best; -EINVAL for an unknown name, -ENOTSUP for one this processor lacks. */
int engine_kernels_level(const char *name);
/* Return 0, or -EINVAL for a reduction that `reduce` cannot do: unknown dtype or op, a tensor that cannot travel as that dtype, a
 * count out of range, bool with Average or factors, a factor that is not finite, or a divisor that is not finite and positive
 * (for integers: a positive whole number). */
int engine_reduction_check(const engine_reduction *r);

#endif
