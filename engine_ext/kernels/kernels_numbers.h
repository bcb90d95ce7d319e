/* Number formats for kernels_impl.h: conversions between storage and accumulator, operations on two accumulators, and float16 by
 * whole vectors where the level has the instructions. The portable conversions give the bits of the F16C instructions. */
#ifndef ENGINE_KERNELS_NUMBERS_H
#define ENGINE_KERNELS_NUMBERS_H

#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

_Static_assert(FLT_EVAL_METHOD == 0, "float32 must be computed in float32");

/* Types through which void pointers are read. Callers' buffers have types of their own, hence may_alias. */
#define ALIASED __attribute__((may_alias))
typedef uint16_t ALIASED f16;
typedef uint16_t ALIASED bf16;
typedef float ALIASED f32;
typedef double ALIASED f64;
typedef int8_t ALIASED i8;
typedef uint8_t ALIASED u8;
typedef int16_t ALIASED i16;
typedef uint16_t ALIASED u16;
typedef int32_t ALIASED i32;
typedef int64_t ALIASED i64;
typedef uint8_t ALIASED b8;

/* Return the bits of a float. */
static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

/* Return the float with these bits. */
static inline float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Return yes ? a : b without a branch. Compilers turn ?: into one, and then do not vectorise. */
static inline uint32_t choose(int yes, uint32_t a, uint32_t b) {
  uint32_t mask = -(uint32_t)yes;
  return (mask & a) | (~mask & b);
}

#if defined(__aarch64__)
/* float16 is part of every aarch64, and vectorised. memcpy is used because __fp16 is a storage type. */
static inline float load_f16(uint16_t h) {
  __fp16 x;
  memcpy(&x, &h, sizeof x);
  return x;
}

static inline uint16_t store_f16(float x) {
  __fp16 half = (__fp16)x;
  uint16_t h;
  memcpy(&h, &half, sizeof h);
  return h;
}
#else
/* Magnitudes are compared as signed integers, because SSE2 has no other comparison. */
static inline float load_f16(uint16_t h) {
  int32_t magnitude = h & 0x7fff;
  uint32_t shifted = (uint32_t)magnitude << 13;
  uint32_t denormal = bits_of((float)magnitude * 0x1p-24f);
  uint32_t quiet = (uint32_t)(magnitude > 0x7c00) << 22;
  uint32_t bits = choose(magnitude < 0x400, denormal, shifted + 0x38000000u); /* exponent bias 15 -> 127 */
  bits = choose(magnitude > 0x7bff, shifted | 0x7f800000u | quiet, bits);
  return of_bits(bits | (uint32_t)(h & 0x8000) << 16);
}

static inline uint16_t store_f16(float x) {
  uint32_t bits = bits_of(x);
  int32_t magnitude = bits & 0x7fffffff;
  uint32_t sign = bits >> 16 & 0x8000;
  /* Adding 0.5 puts the last place of the float at 2^-24, that of a float16 denormal, so that the addition rounds. */
  uint32_t denormal = bits_of(of_bits((uint32_t)magnitude) + 0.5f) - 0x3f000000u;
  uint32_t normal = ((uint32_t)magnitude - 0x38000000u + 0xfff + ((uint32_t)magnitude >> 13 & 1)) >> 13;
  uint32_t nan = 0x7e00u | ((uint32_t)magnitude >> 13 & 0x3ff);
  uint32_t half = choose(magnitude < 0x38800000, denormal, normal);
  half = choose(magnitude > 0x477fefff, 0x7c00u, half); /* 65520 and above */
  half = choose(magnitude > 0x7f800000, nan, half);
  return (uint16_t)(half | sign);
}
#endif

static inline float load_bf16(uint16_t h) { return of_bits((uint32_t)h << 16); }

static inline uint16_t store_bf16(float x) {
  uint32_t bits = bits_of(x);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (uint16_t)choose((int32_t)(bits & 0x7fffffff) > 0x7f800000, bits >> 16 | 0x40, rounded);
}

#define SAME(T)                                   \
  static inline T load_##T(T x) { return x; }     \
  static inline T store_##T(T x) { return x; }
SAME(f32)
SAME(f64)
SAME(i8)
SAME(u8)
SAME(i16)
SAME(u16)
SAME(i32)
SAME(i64)
#undef SAME
static inline u8 load_b8(u8 x) { return x != 0; }

/* Define sum_A, product_A, min_A and max_A. `x != x` makes NaN win on either side; `|` avoids a branch. */
#define ORDER(A)                                                                              \
  static inline A min_##A(A x, A y) { return ((x < y) | (x != x)) ? x : y; }                  \
  static inline A max_##A(A x, A y) { return ((x > y) | (x != x)) ? x : y; }
#define FLOAT(A)                                                                              \
  static inline A sum_##A(A x, A y) { return x + y; }                                         \
  static inline A product_##A(A x, A y) { return x * y; }                                     \
  ORDER(A)
/* Compute unsigned, because signed overflow is undefined and these operations wrap. U is at least as wide as unsigned int, since
 * narrower types would be promoted to int. */
#define INTEGER(A, U)                                                                         \
  static inline A sum_##A(A x, A y) { return (A)((U)x + (U)y); }                              \
  static inline A product_##A(A x, A y) { return (A)((U)x * (U)y); }                          \
  ORDER(A)
FLOAT(f32)
FLOAT(f64)
INTEGER(i8, uint32_t)
INTEGER(u8, uint32_t)
INTEGER(i16, uint32_t)
INTEGER(u16, uint32_t)
INTEGER(i32, uint32_t)
INTEGER(i64, uint64_t)
#undef ORDER
#undef FLOAT
#undef INTEGER
static inline u8 or_u8(u8 x, u8 y) { return x | y; }
static inline u8 and_u8(u8 x, u8 y) { return x & y; }

/* Convert toward zero, saturating. Each comparison is written so that NaN (which no finite factor makes) takes the bound. */
#define SATURATE(T, LOW, HIGH)                                     \
  static inline T saturate_##T(double x) {                         \
    x = x > (LOW) ? x : (LOW);                                     \
    return (T)(x < (HIGH) ? x : (HIGH));                           \
  }
SATURATE(i8, INT8_MIN, INT8_MAX)
SATURATE(u8, 0, UINT8_MAX)
SATURATE(i16, INT16_MIN, INT16_MAX)
SATURATE(u16, 0, UINT16_MAX)
SATURATE(i32, INT32_MIN, INT32_MAX)
#undef SATURATE
static inline i64 saturate_i64(double x) {
  const double below = 0x1.fffffffffffffp62; /* the largest double below 2^63 */
  x = x > -0x1p63 ? x : -0x1p63;
  i64 inside = (i64)(x < below ? x : below);
  return x < 0x1p63 ? inside : INT64_MAX;
}

/* Return 1/x for powers of two, where multiplying by it gives the bits of dividing by x; else 0. */
static inline double exact_reciprocal(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (bits & 0xfffffffffffffull) == 0 && x >= 0x1p-60 && x <= 0x1p60 ? 1 / x : 0;
}

/* ---- vectors of float32, for the dtypes whose conversions compilers vectorise badly or not at all ---- */

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float lanes __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));

static inline lanes load_lanes_f32(const f32 *p) {
  lanes x;
  memcpy(&x, p, sizeof x);
  return x;
}
static inline void store_lanes_f32(f32 *p, lanes x) { memcpy(p, &x, sizeof x); }

static inline lanes sum_lanes(lanes x, lanes y) { return x + y; }
static inline lanes product_lanes(lanes x, lanes y) { return x * y; }

/* MINPS is x < y ? x : y, so only a NaN in x needs extra work. */
#if defined(__AVX512F__)
#define ORDER(name, instruction)                                                                              \
  static inline lanes name(lanes x, lanes y) {                                                                \
    return _mm512_mask_mov_ps(_mm512_##instruction##_ps(x, y), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);    \
  }
#elif defined(__AVX2__)
#define ORDER(name, instruction)                                                                              \
  static inline lanes name(lanes x, lanes y) {                                                                \
    return _mm256_blendv_ps(_mm256_##instruction##_ps(x, y), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));           \
  }
#else
#define COMPARES_min <
#define COMPARES_max >
#define ORDER(name, instruction)                                                                              \
  static inline lanes name(lanes x, lanes y) {                                                                \
    words first = (words)(x COMPARES_##instruction y) | (words)(x != x);                                      \
    return (lanes)((first & (words)x) | (~first & (words)y));                                                 \
  }
#endif
ORDER(min_lanes, min)
ORDER(max_lanes, max)
#undef ORDER

#if defined(__AVX512F__)
static inline lanes load_lanes_f16(const f16 *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
static inline void store_lanes_f16(f16 *p, lanes x) {
  _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline lanes load_lanes_bf16(const bf16 *p) {
  return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16);
}
static inline void store_lanes_bf16(bf16 *p, lanes x) {
  words bits = (words)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  __m512i half = _mm512_mask_mov_epi32((__m512i)rounded, nan, (__m512i)(bits >> 16 | 0x40));
  _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16(half));
}
#elif defined(__AVX2__)
static inline lanes load_lanes_f16(const f16 *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
static inline void store_lanes_f16(f16 *p, lanes x) {
  _mm_storeu_si128((void *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline lanes load_lanes_bf16(const bf16 *p) {
  return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16);
}
static inline void store_lanes_bf16(bf16 *p, lanes x) {
  words bits = (words)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  words nan = (words)(x != x);
  __m256i half = (__m256i)((nan & (bits >> 16 | 0x40)) | (~nan & rounded));
  _mm_storeu_si128((void *)p, _mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}
#endif

/* 2 * LANES bfloat16 as they lie in memory. Every 32-bit word holds two, one in its upper and one in its lower half; the upper
 * half of a float is a bfloat16. This needs no shuffles, so every processor is fast at it. */
typedef struct halves {
  lanes upper, lower;
} halves;

/* Load 2 * LANES bfloat16 as two vectors of floats. */
static inline halves load_halves(const bf16 *p) {
  words both;
  memcpy(&both, p, sizeof both);
  return (halves){(lanes)(both & 0xffff0000u), (lanes)(both << 16)};
}

/* Round and store floats that were computed from bfloat16 alone. The lower half of such a NaN is zero, so rounding leaves it a
 * NaN. */
static inline void store_halves(bf16 *p, lanes upper, lanes lower) {
  words u = (words)upper, l = (words)lower;
  u += (u >> 16 & 1) + 0x7fff;
  l += (l >> 16 & 1) + 0x7fff;
  words both = (u & 0xffff0000u) | l >> 16;
  memcpy(p, &both, sizeof both);
}

#endif
