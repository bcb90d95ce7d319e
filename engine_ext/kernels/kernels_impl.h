/* The kernels of one level. kernels_plain.c, kernels_avx2.c and kernels_avx512.c define ENGINE_KERNELS, the name of the table to
 * make, and include this file. The build gives each its instruction set.
 *
 * Loops are left to the compiler's vectoriser, which has to be told one thing: a destination that is exactly a source carries
 * nothing from one iteration to the next. Only float16 and bfloat16, which have conversion instructions of their own, use
 * explicit vectors where the level has these. The portable conversions do the rest of a block, with the same bits.
 */
#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/kernels_numbers.h"
#include "platform/fences.h"

#if defined(__clang__)
#define NO_CARRY _Pragma("clang loop vectorize(assume_safety)")
#else
#define NO_CARRY _Pragma("GCC ivdep")
#endif
/* Loop over the remaining elements, one by one in the source; the compiler may vectorise it. */
#define REST NO_CARRY for (; i < n; i++)

/* VECTORS(T, statement): run the statement for whole vectors of T, where this level has them. */
#define VECTORS(T, ...) VECTORS_##T(__VA_ARGS__)
#if defined(__F16C__)
#define VECTORS_f16(...) for (; i + LANES <= n; i += LANES) { __VA_ARGS__; }
#define VECTORS_bf16(...) VECTORS_f16(__VA_ARGS__)
#else
#define VECTORS_f16(...)
#define VECTORS_bf16(...)
#endif
#define VECTORS_f32(...)
#define VECTORS_f64(...)
#define VECTORS_i8(...)
#define VECTORS_u8(...)
#define VECTORS_i16(...)
#define VECTORS_u16(...)
#define VECTORS_i32(...)
#define VECTORS_i64(...)
#define VECTORS_b8(...)

/* ---- copies ---------------------------------------------------------------------------------------------------------------- */

typedef char vector __attribute__((vector_size(32), aligned(1), may_alias));
enum { VECTOR = sizeof(vector), SHORT_COPY = 1024 };

/* Copy bytes. The C library's memcpy copies more than a few KiB by `rep movsb`. AMD's Zen 3 and 4 run that at a twentieth of the
 * speed if the destination lies 1 to 31 bytes past the source modulo 4096. A NumPy array, 16 bytes into a page, lies so relative
 * to a slot. The empty assembly keeps compilers from turning the loop into a memcpy. */
static void copy(void *dst, const void *src, size_t bytes) {
  char *d = dst;
  const char *s = src;
  if (d == s) return;
  if (bytes < SHORT_COPY) {
    memcpy(d, s, bytes);
    return;
  }
  *(vector *)d = *(const vector *)s;
  size_t at = VECTOR - (uintptr_t)d % VECTOR;
  for (; at + 4 * VECTOR <= bytes; at += 4 * VECTOR) {
    const vector *from = (const vector *)(s + at);
    vector *to = (vector *)(d + at), v0 = from[0], v1 = from[1], v2 = from[2], v3 = from[3];
    to[0] = v0, to[1] = v1, to[2] = v2, to[3] = v3;
    __asm__ volatile("" ::: "memory");
  }
  memcpy(d + at, s + at, bytes - at);
}

/* ---- accumulation: dtype T in accumulator A -------------------------------------------------------------------------------- */

#define WIDEN(T, A)                                                                           \
  static void widen_##T##_##A(void *acc, const void *src, size_t n) {                         \
    A *d = acc;                                                                               \
    const T *s = src;                                                                         \
    size_t i = 0;                                                                             \
    VECTORS(T, store_lanes_##A(d + i, load_lanes_##T(s + i)))                                 \
    REST d[i] = load_##T(s[i]);                                                               \
  }

#define ACCUMULATE(op, T, A)                                                                  \
  static void combine_##op##_##T##_##A(void *acc, const void *first, const void *second, size_t n) { \
    A *d = acc;                                                                               \
    const T *a = first, *b = second;                                                          \
    size_t i = 0;                                                                             \
    VECTORS(T, store_lanes_##A(d + i, op##_lanes(load_lanes_##T(a + i), load_lanes_##T(b + i)))) \
    REST d[i] = op##_##A(load_##T(a[i]), load_##T(b[i]));                                     \
  }                                                                                           \
  static void fold_##op##_##T##_##A(void *acc, const void *src, size_t n) {                   \
    A *d = acc;                                                                               \
    const T *s = src;                                                                         \
    size_t i = 0;                                                                             \
    VECTORS(T, store_lanes_##A(d + i, op##_lanes(load_lanes_##A(d + i), load_lanes_##T(s + i)))) \
    REST d[i] = op##_##A(d[i], load_##T(s[i]));                                               \
  }

#define ARITHMETIC(T, A)                                                                      \
  WIDEN(T, A) ACCUMULATE(sum, T, A) ACCUMULATE(min, T, A) ACCUMULATE(max, T, A) ACCUMULATE(product, T, A)

ARITHMETIC(f16, f32)
ARITHMETIC(bf16, f32)
ARITHMETIC(f32, f32)
ARITHMETIC(f64, f64)
ARITHMETIC(i8, i8)
ARITHMETIC(u8, u8)
ARITHMETIC(i16, i16)
ARITHMETIC(u16, u16)
ARITHMETIC(i32, i32)
ARITHMETIC(i64, i64)
WIDEN(b8, u8)
ACCUMULATE(or, b8, u8)
ACCUMULATE(and, b8, u8)
/* Average of integers uses float64, because processors divide that in vectors: sums below 2^53 are exact. */
WIDEN(i8, f64)
WIDEN(u8, f64)
WIDEN(i16, f64)
WIDEN(u16, f64)
WIDEN(i32, f64)
ACCUMULATE(sum, i8, f64)
ACCUMULATE(sum, u8, f64)
ACCUMULATE(sum, i16, f64)
ACCUMULATE(sum, u16, f64)
ACCUMULATE(sum, i32, f64)

/* ---- finishing floats: dtype T from accumulator A -------------------------------------------------------------------------- */

/* Last step for an accumulated value before it is rounded. Each case has its own loop, because divisions are slow. */
enum finish { KEEP, MULTIPLY, DIVIDE, DIVIDE_MULTIPLY };

/* Choose the last step for a divisor and a factor. An exact reciprocal turns a division into a `factor`. */
static enum finish how_to_finish(double *divisor, double *factor) {
  double reciprocal = exact_reciprocal(*divisor);
  if (*divisor == 1) return *factor == 1 ? KEEP : MULTIPLY;
  if (*factor != 1) return DIVIDE_MULTIPLY;
  if (reciprocal == 0) return DIVIDE;
  *factor = reciprocal;
  return MULTIPLY;
}

/* The last step of a number or a vector. */
#define KEPT(x) (x)
#define MULTIPLIED(x) ((x) * m)
#define DIVIDED(x) ((x) / d)
#define DIVIDED_MULTIPLIED(x) ((x) / d * m)

#define FINISH_CASE(how, T, X, VECTORS_X)                                                     \
  {                                                                                           \
    VECTORS_X                                                                                 \
    REST t[i] = store_##T(how(X));                                                            \
    break;                                                                                    \
  }
/* Set t to the finished X, where X is of element i; VECTORS_X(how, ...) does the same by vectors. */
#define FINISH_BODY(T, A, X, VECTORS_X, ...)                                                  \
  enum finish how = how_to_finish(&divisor, &factor);                                         \
  A d = (A)divisor, m = (A)factor;                                                            \
  size_t i = 0;                                                                               \
  (void)d, (void)m;                                                                           \
  switch (how) {                                                                              \
    case KEEP: FINISH_CASE(KEPT, T, X, VECTORS_X(KEPT, __VA_ARGS__))                          \
    case MULTIPLY: FINISH_CASE(MULTIPLIED, T, X, VECTORS_X(MULTIPLIED, __VA_ARGS__))          \
    case DIVIDE: FINISH_CASE(DIVIDED, T, X, VECTORS_X(DIVIDED, __VA_ARGS__))                  \
    case DIVIDE_MULTIPLY: FINISH_CASE(DIVIDED_MULTIPLIED, T, X, VECTORS_X(DIVIDED_MULTIPLIED, __VA_ARGS__)) \
  }

#define FINISH_VECTORS(how, T, A) VECTORS(T, store_lanes_##T(t + i, how(load_lanes_##A(a + i))))
#define FINISH_FLOAT(T, A)                                                                    \
  static void finish_##T(void *dst, const void *acc, double divisor, double factor, size_t n) { \
    T *t = dst;                                                                               \
    const A *a = acc;                                                                         \
    FINISH_BODY(T, A, a[i], FINISH_VECTORS, T, A)                                             \
  }                                                                                           \
  static void scale_##T(void *dst, const void *src, double factor, size_t n) {                \
    T *t = dst;                                                                               \
    const T *s = src;                                                                         \
    A m = (A)factor;                                                                          \
    size_t i = 0;                                                                             \
    VECTORS(T, store_lanes_##T(t + i, MULTIPLIED(load_lanes_##T(s + i))))                     \
    REST t[i] = store_##T(MULTIPLIED(load_##T(s[i])));                                        \
  }

/* The most frequent case, the sum or average of two ranks, in one pass without an accumulator in memory. */
#define PAIR_SUM(T, A)                                                                        \
  static void pair_sum_##T(void *dst, const void *first, const void *second, double divisor, double factor, size_t n) { \
    T *t = dst;                                                                               \
    const T *a = first, *b = second;                                                          \
    FINISH_BODY(T, A, load_##T(a[i]) + load_##T(b[i]), PAIR_VECTORS_##T, )                    \
  }
#define PAIR_VECTORS_f16(how, ...) VECTORS_f16(store_lanes_f16(t + i, how(load_lanes_f16(a + i) + load_lanes_f16(b + i))))
#define PAIR_VECTORS_bf16(how, ...)                                                           \
  for (; i + 2 * LANES <= n; i += 2 * LANES) {                                                \
    halves x = load_halves(a + i), y = load_halves(b + i);                                    \
    store_halves(t + i, how(x.upper + y.upper), how(x.lower + y.lower));                      \
  }
#define PAIR_VECTORS_f32(...)
#define PAIR_VECTORS_f64(...)

FINISH_FLOAT(f16, f32)
FINISH_FLOAT(bf16, f32)
FINISH_FLOAT(f32, f32)
FINISH_FLOAT(f64, f64)
PAIR_SUM(f16, f32)
PAIR_SUM(bf16, f32)
PAIR_SUM(f32, f32)
PAIR_SUM(f64, f64)

/* ---- float32 and float64 that travel as a half ----------------------------------------------------------------------------- */

/* Conversions between a tensor's dtype and the narrower dtype that travels: `narrow` with a factor, like `scale`, and `widen`
 * back. */
#define NARROW(T)                                                                             \
  static void narrow_f32_##T(void *dst, const void *src, double factor, size_t n) {           \
    T *t = dst;                                                                               \
    const f32 *s = src;                                                                       \
    f32 m = (f32)factor;                                                                      \
    size_t i = 0;                                                                             \
    VECTORS(T, store_lanes_##T(t + i, MULTIPLIED(load_lanes_f32(s + i))))                     \
    REST t[i] = store_##T(MULTIPLIED(s[i]));                                                  \
  }                                                                                           \
  static void narrow_f64_##T(void *dst, const void *src, double m, size_t n) {                \
    f32 single[SINGLES];                                                                      \
    for (size_t at = 0; at < n; at += SINGLES) {                                              \
      const f64 *s = (const f64 *)src + at;                                                   \
      size_t count = n - at < SINGLES ? n - at : SINGLES;                                     \
      for (size_t i = 0; i < count; i++) single[i] = (f32)MULTIPLIED(s[i]);                   \
      narrow_f32_##T((T *)dst + at, single, 1, count);                                        \
    }                                                                                         \
  }                                                                                           \
  static void widen_##T##_f64(void *dst, const void *src, size_t n) {                         \
    f32 single[SINGLES];                                                                      \
    for (size_t at = 0; at < n; at += SINGLES) {                                              \
      f64 *t = (f64 *)dst + at;                                                               \
      size_t count = n - at < SINGLES ? n - at : SINGLES;                                     \
      widen_##T##_f32(single, (const T *)src + at, count);                                    \
      for (size_t i = 0; i < count; i++) t[i] = single[i];                                    \
    }                                                                                         \
  }
enum { SINGLES = 512 };

NARROW(f16)
NARROW(bf16)

/* ---- finishing integers ---------------------------------------------------------------------------------------------------- */

#define FINISH_INTEGER(T)                                                                     \
  static void finish_##T(void *dst, const void *acc, double divisor, double factor, size_t n) { \
    T *t = dst;                                                                               \
    const T *a = acc;                                                                         \
    T d = (T)divisor;                                                                         \
    size_t i = 0;                                                                             \
    if (divisor == 1 && factor == 1) {                                                        \
      REST t[i] = a[i];                                                                       \
    } else if (divisor == 1) {                                                                \
      REST t[i] = saturate_##T((double)a[i] * factor);                                        \
    } else if (factor == 1) {                                                                 \
      REST t[i] = (T)(a[i] / d);                                                              \
    } else {                                                                                  \
      REST t[i] = saturate_##T((double)(a[i] / d) * factor);                                  \
    }                                                                                         \
  }                                                                                           \
  static void scale_##T(void *dst, const void *src, double factor, size_t n) {                \
    T *t = dst;                                                                               \
    const T *s = src;                                                                         \
    size_t i = 0;                                                                             \
    REST t[i] = saturate_##T((double)s[i] * factor);                                          \
  }
/* A quotient of whole numbers below 2^52 that is not whole differs from the next whole number by more than its rounding error. So
 * truncating the rounded quotient is exact. */
#define FINISH_AVERAGE(T)                                                                     \
  static void finish_average_##T(void *dst, const void *acc, double divisor, double factor, size_t n) { \
    T *t = dst;                                                                               \
    const f64 *a = acc;                                                                       \
    size_t i = 0;                                                                             \
    if (factor == 1) {                                                                        \
      REST t[i] = saturate_##T(a[i] / divisor);                                               \
    } else {                                                                                  \
      REST t[i] = saturate_##T((double)saturate_##T(a[i] / divisor) * factor);                \
    }                                                                                         \
  }

FINISH_INTEGER(i8)
FINISH_INTEGER(u8)
FINISH_INTEGER(i16)
FINISH_INTEGER(u16)
FINISH_INTEGER(i32)
FINISH_INTEGER(i64)
FINISH_AVERAGE(i8)
FINISH_AVERAGE(u8)
FINISH_AVERAGE(i16)
FINISH_AVERAGE(u16)
FINISH_AVERAGE(i32)

/* Finish bool: copy the accumulator. */
static void finish_b8(void *dst, const void *acc, double divisor, double factor, size_t n) {
  (void)divisor, (void)factor;
  copy(dst, acc, n);
}

/* ---- streaming copies ------------------------------------------------------------------------------------------------------ */

#if defined(__x86_64__)
enum { LINE = 64 };

static inline void stream_line(char *dst, const char *src) { /* dst is aligned to LINE */
#if defined(__AVX512F__)
  _mm512_stream_si512((void *)dst, _mm512_loadu_si512(src));
#elif defined(__AVX2__)
  for (int k = 0; k < LINE; k += 32) _mm256_stream_si256((void *)(dst + k), _mm256_loadu_si256((const void *)(src + k)));
#else
  for (int k = 0; k < LINE; k += 16) _mm_stream_si128((void *)(dst + k), _mm_loadu_si128((const void *)(src + k)));
#endif
}

/* Copy with streaming stores, without the final fence. Partial lines are written through the cache. */
static void stream(void *dst, const void *src, size_t bytes) {
  char *d = dst;
  const char *s = src;
  size_t head = -(uintptr_t)d % LINE;
  if (bytes < head + LINE) {
    memcpy(d, s, bytes);
    return;
  }
  memcpy(d, s, head);
  size_t at = head;
  for (; at + LINE <= bytes; at += LINE) stream_line(d + at, s + at);
  memcpy(d + at, s + at, bytes - at);
}

/* Fence the streaming stores of this thread. */
static void stream_end(void) { stream_fence(FENCE_STREAM); }
#else
/* There is no portable streaming store: cached ones are correct everywhere. */
static void stream(void *dst, const void *src, size_t bytes) { copy(dst, src, bytes); }
/* Do nothing: cached stores need no fence here. */
static void stream_end(void) {}
#endif

static void copy_streaming(void *dst, const void *src, size_t bytes) {
  stream(dst, src, bytes);
  stream_end();
}

/* ---- whole reductions ------------------------------------------------------------------------------------------------------ */

extern const engine_kernels ENGINE_KERNELS;

static void (*const pair_sums[])(void *dst, const void *first, const void *second, double divisor, double factor, size_t n) = {
    [ENGINE_FLOAT16] = pair_sum_f16,
    [ENGINE_BFLOAT16] = pair_sum_bf16,
    [ENGINE_FLOAT32] = pair_sum_f32,
    [ENGINE_FLOAT64] = pair_sum_f64,
};

typedef void scaler(void *dst, const void *src, double factor, size_t n);

/* Return the kernel that scales a tensor's elements into the dtype that travels. */
static scaler *scaler_of(int dtype, int tensor) {
  if (tensor == dtype) return ENGINE_KERNELS.types[dtype].scale;
  if (dtype == ENGINE_FLOAT16) return tensor == ENGINE_FLOAT32 ? narrow_f32_f16 : narrow_f64_f16;
  return tensor == ENGINE_FLOAT32 ? narrow_f32_bf16 : narrow_f64_bf16;
}

/* Convert elements that have travelled to the tensor's dtype. */
static void unpack(int dtype, int tensor, void *dst, const void *src, size_t n) {
  if (tensor == dtype) copy(dst, src, n * ENGINE_KERNELS.types[dtype].size);
  else if (dtype == ENGINE_FLOAT16) (tensor == ENGINE_FLOAT32 ? widen_f16_f32 : widen_f16_f64)(dst, src, n);
  else (tensor == ENGINE_FLOAT32 ? widen_bf16_f32 : widen_bf16_f64)(dst, src, n);
}

/* Reductions work on blocks that stay in the first-level cache: at most BLOCK bytes of T and ACCUMULATORS bytes of A. */
enum { BLOCK = 4096, ACCUMULATORS = 8192 };

typedef struct block {
  _Alignas(64) char accumulators[ACCUMULATORS];
  _Alignas(64) char scaled[2][BLOCK];
  _Alignas(64) char result[BLOCK]; /* used if the tensor's dtype is not T */
} block;

/* Return the number of elements in a block. */
static size_t block_elements(const engine_dtype_kernels *type, const engine_accumulation *acc) {
  size_t by_type = BLOCK / type->size, by_accumulator = ACCUMULATORS / acc->size;
  return by_type < by_accumulator ? by_type : by_accumulator;
}

/* Return elements from `at` on of source `k` as they travel. If they have to be converted or scaled, they are written to
 * `room`. */
static const void *scaled_source(const engine_reduction *r, const void *const *sources, int k, size_t at, size_t n, void *room) {
  int unscaled = r->unscaled == k || r->unscaled == ENGINE_EVERY_SOURCE;
  const void *source = (const char *)sources[k] + at * ENGINE_KERNELS.types[unscaled ? r->tensor : r->dtype].size;
  if (!unscaled || (r->prescale == 1 && r->tensor == r->dtype)) return source;
  scaler_of(r->dtype, r->tensor)(room, source, r->prescale, n);
  return room;
}

/* Reduce one block into `dst`. All input is read before the first byte of `dst` is written, or element by element with it. */
static void reduce_block(const engine_reduction *r, const void *const *sources, size_t at, size_t n, void *dst, block *b) {
  const engine_dtype_kernels *type = &ENGINE_KERNELS.types[r->dtype];
  const engine_accumulation *acc = &type->ops[r->op];
  /* If the accumulator is the result already, the last source is combined straight into the destination. */
  int as_is = acc->size == type->size && r->divisor == 1 && r->postscale == 1;
  const void *first = scaled_source(r, sources, 0, at, n, b->scaled[0]);
  if (r->count == 1) {
    acc->widen(b->accumulators, first, n);
    acc->finish(dst, b->accumulators, r->divisor, r->postscale, n);
    return;
  }
  const void *second = scaled_source(r, sources, 1, at, n, b->scaled[1]);
  if (r->count == 2 && as_is) {
    acc->combine(dst, first, second, n);
    return;
  }
  if (r->count == 2 && r->dtype <= ENGINE_FLOAT64 && r->op <= ENGINE_AVERAGE) {
    pair_sums[r->dtype](dst, first, second, r->divisor, r->postscale, n);
    return;
  }
  acc->combine(b->accumulators, first, second, n);
  for (int k = 2; k < r->count; k++) {
    const void *source = scaled_source(r, sources, k, at, n, b->scaled[0]);
    if (as_is && k == r->count - 1) {
      acc->combine(dst, b->accumulators, source, n);
      return;
    }
    acc->fold(b->accumulators, source, n);
  }
  acc->finish(dst, b->accumulators, r->divisor, r->postscale, n);
}

/* Copy one reduced block to every destination. It lies in `result`, which may be the first destination. */
static void deliver(const engine_reduction *r, void *const *destinations, size_t at, size_t n, const void *result) {
  const engine_dtype_kernels *type = &ENGINE_KERNELS.types[r->dtype];
  char *first = (char *)destinations[0] + at * ENGINE_KERNELS.types[r->tensor].size;
  if (result != first) unpack(r->dtype, r->tensor, first, result, n);
  for (int k = 1; k < r->copies; k++) {
    char *other = (char *)destinations[k] + at * type->size;
    if (r->streaming) stream(other, result, n * type->size);
    else copy(other, result, n * type->size);
  }
}

/* Return the memory for a reduced block: the first destination if it has dtype T, else a buffer. */
static void *result_of(const engine_reduction *r, void *const *destinations, size_t at, block *b) {
  return r->tensor == r->dtype ? (char *)destinations[0] + at * ENGINE_KERNELS.types[r->tensor].size : b->result;
}

static void reduce(const engine_reduction *r, const void *const *sources, void *const *destinations, size_t n) {
  const engine_dtype_kernels *type = &ENGINE_KERNELS.types[r->dtype];
  size_t most = block_elements(type, &type->ops[r->op]);
  block b;
  for (size_t at = 0; at < n; at += most) {
    size_t m = n - at < most ? n - at : most;
    void *result = result_of(r, destinations, at, &b);
    reduce_block(r, sources, at, m, result, &b);
    deliver(r, destinations, at, m, result);
  }
  if (r->streaming && r->copies > 1) stream_end();
}

/* ---- reductions in several calls ------------------------------------------------------------------------------------------- */

/* Combine all sources with the accumulators `before`, null for none, and write the accumulators to `total`. If A has the size of
 * T, it is T. */
static void accumulate_block(const engine_reduction *r, const void *before, const void *const *sources, size_t at, size_t n,
                             void *total, block *b) {
  const engine_dtype_kernels *type = &ENGINE_KERNELS.types[r->dtype];
  const engine_accumulation *acc = &type->ops[r->op];
  const void *first = scaled_source(r, sources, 0, at, n, b->scaled[0]);
  int k = 1;
  if (before && acc->size == type->size) {
    acc->combine(total, (const char *)before + at * acc->size, first, n);
  } else if (before) {
    copy(total, (const char *)before + at * acc->size, n * acc->size);
    acc->fold(total, first, n);
  } else if (r->count == 1) {
    acc->widen(total, first, n);
  } else {
    acc->combine(total, first, scaled_source(r, sources, 1, at, n, b->scaled[1]), n);
    k = 2;
  }
  for (; k < r->count; k++) acc->fold(total, scaled_source(r, sources, k, at, n, b->scaled[0]), n);
}

static void reduce_onward(const engine_reduction *r, const void *before, const void *const *sources, void *after, size_t n) {
  const engine_dtype_kernels *type = &ENGINE_KERNELS.types[r->dtype];
  const engine_accumulation *acc = &type->ops[r->op];
  size_t most = block_elements(type, acc);
  block b;
  for (size_t at = 0; at < n; at += most)
    accumulate_block(r, before, sources, at, n - at < most ? n - at : most, (char *)after + at * acc->size, &b);
}

static void reduce_last(const engine_reduction *r, const void *before, const void *const *sources, void *const *destinations,
                        size_t n) {
  const engine_dtype_kernels *type = &ENGINE_KERNELS.types[r->dtype];
  const engine_accumulation *acc = &type->ops[r->op];
  size_t most = block_elements(type, acc);
  block b;
  for (size_t at = 0; at < n; at += most) {
    size_t m = n - at < most ? n - at : most;
    void *result = result_of(r, destinations, at, &b);
    accumulate_block(r, before, sources, at, m, b.accumulators, &b);
    acc->finish(result, b.accumulators, r->divisor, r->postscale, m);
    deliver(r, destinations, at, m, result);
  }
  if (r->streaming && r->copies > 1) stream_end();
}

static void pack(int dtype, int tensor, double prescale, int streaming, void *dst, const void *src, size_t n) {
  size_t size = ENGINE_KERNELS.types[dtype].size, wide = ENGINE_KERNELS.types[tensor].size;
  scaler *scale = scaler_of(dtype, tensor);
  if (prescale == 1 && tensor == dtype) {
    (streaming ? copy_streaming : copy)(dst, src, n * size);
    return;
  }
  if (!streaming) {
    scale(dst, src, prescale, n);
    return;
  }
  _Alignas(64) char scaled[BLOCK];
  size_t most = BLOCK / size;
  for (size_t at = 0; at < n; at += most) {
    size_t m = n - at < most ? n - at : most;
    scale(scaled, (const char *)src + at * wide, prescale, m);
    stream((char *)dst + at * size, scaled, m * size);
  }
  stream_end();
}

#include "kernels/kernels_adasum.h"
#include "kernels/kernels_blocks.h"

/* ---- table of kernels ------------------------------------------------------------------------------------------------------ */

#define OP(op, T, A, finish) {sizeof(A), widen_##T##_##A, combine_##op##_##T##_##A, fold_##op##_##T##_##A, finish}
#define FLOAT_OPS(T, A)                                                                       \
  {                                                                                           \
    OP(sum, T, A, finish_##T), OP(sum, T, A, finish_##T), OP(min, T, A, finish_##T), OP(max, T, A, finish_##T), \
        OP(product, T, A, finish_##T)                                                         \
  }
#define INTEGER_OPS(T, average)                                                               \
  {                                                                                           \
    OP(sum, T, T, finish_##T), average, OP(min, T, T, finish_##T), OP(max, T, T, finish_##T), \
        OP(product, T, T, finish_##T)                                                         \
  }
#define AVERAGE(T) OP(sum, T, f64, finish_average_##T)
#define OR OP(or, b8, u8, finish_b8)
#define AND OP(and, b8, u8, finish_b8)

const engine_kernels ENGINE_KERNELS = {
    .copy = copy,
    .copy_streaming = copy_streaming,
    .pack = pack,
    .unpack = unpack,
    .reduce = reduce,
    .reduce_onward = reduce_onward,
    .reduce_last = reduce_last,
    .inner = inner,
    .weigh = weigh,
    .encode = encode,
    .decode = decode,
    .decode_add = decode_add,
    .to_float = to_float,
    .from_float = from_float,
    .types = {
        [ENGINE_FLOAT16] = {sizeof(f16), scale_f16, FLOAT_OPS(f16, f32)},
        [ENGINE_BFLOAT16] = {sizeof(bf16), scale_bf16, FLOAT_OPS(bf16, f32)},
        [ENGINE_FLOAT32] = {sizeof(f32), scale_f32, FLOAT_OPS(f32, f32)},
        [ENGINE_FLOAT64] = {sizeof(f64), scale_f64, FLOAT_OPS(f64, f64)},
        [ENGINE_INT8] = {sizeof(i8), scale_i8, INTEGER_OPS(i8, AVERAGE(i8))},
        [ENGINE_UINT8] = {sizeof(u8), scale_u8, INTEGER_OPS(u8, AVERAGE(u8))},
        [ENGINE_INT16] = {sizeof(i16), scale_i16, INTEGER_OPS(i16, AVERAGE(i16))},
        [ENGINE_UINT16] = {sizeof(u16), scale_u16, INTEGER_OPS(u16, AVERAGE(u16))},
        [ENGINE_INT32] = {sizeof(i32), scale_i32, INTEGER_OPS(i32, AVERAGE(i32))},
        [ENGINE_INT64] = {sizeof(i64), scale_i64, INTEGER_OPS(i64, OP(sum, i64, i64, finish_i64))},
        [ENGINE_BOOL] = {sizeof(b8), NULL, {OR, {0, NULL, NULL, NULL, NULL}, AND, OR, AND}},
    },
};
