/* Numbers for kernels_impl.h: conversions between storage and accumulator, the operations on two accumulators, and, where the
 * level has the instructions, float16 by whole vectors. The portable conversions give the bits of the F16C instructions. */
#ifndef ENGINE_DATA_KERNELS_NUMBERS_H
#define ENGINE_DATA_KERNELS_NUMBERS_H

#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

_Static_assert(FLT_EVAL_METHOD == 0, "float32 must be computed in float32");

/* What a void pointer is read as. Callers' buffers have types of their own, hence may_alias. */
#define ALIASED __attribute__((may_alias))
typedef uint16_t ALIASED f16;
typedef uint16_t ALIASED bf16;
typedef float ALIASED f32;
typedef double ALIASED f64;
typedef int8_t ALIASED i8;
typedef uint8_t ALIASED u8;
typedef int32_t ALIASED i32;
typedef int64_t ALIASED i64;
typedef uint8_t ALIASED b8;

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* yes ? a : b, without the branch that compilers make of ?: and then do not vectorise. */
static inline uint32_t choose(int yes, uint32_t a, uint32_t b) {
  uint32_t mask = -(uint32_t)yes;
  return (mask & a) | (~mask & b);
}

/* Magnitudes are compared as signed integers because SSE2 has no other comparison. */
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
  /* Adding 0.5 puts the last place of the float at 2^-24, that of a float16 denormal: the addition rounds. */
  uint32_t denormal = bits_of(of_bits((uint32_t)magnitude) + 0.5f) - 0x3f000000u;
  uint32_t normal = ((uint32_t)magnitude - 0x38000000u + 0xfff + ((uint32_t)magnitude >> 13 & 1)) >> 13;
  uint32_t nan = 0x7e00u | ((uint32_t)magnitude >> 13 & 0x3ff);
  uint32_t half = choose(magnitude < 0x38800000, denormal, normal);
  half = choose(magnitude > 0x477fefff, 0x7c00u, half); /* from 65520 on */
  half = choose(magnitude > 0x7f800000, nan, half);
  return (uint16_t)(half | sign);
}

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
SAME(i32)
SAME(i64)
#undef SAME
static inline u8 load_b8(u8 x) { return x != 0; }

/* sum_A, product_A, min_A, max_A. `x != x` makes NaN win whichever side it is on; `|` avoids a branch. */
#define ORDER(A)                                                                              \
  static inline A min_##A(A x, A y) { return (x < y) | (x != x) ? x : y; }                    \
  static inline A max_##A(A x, A y) { return (x > y) | (x != x) ? x : y; }
#define FLOAT(A)                                                                              \
  static inline A sum_##A(A x, A y) { return x + y; }                                         \
  static inline A product_##A(A x, A y) { return x * y; }                                     \
  ORDER(A)
/* Unsigned, because signed overflow is undefined and ours wraps. U is at least as wide as unsigned int for the same reason:
 * narrower types would be promoted to int. */
#define INTEGER(A, U)                                                                         \
  static inline A sum_##A(A x, A y) { return (A)((U)x + (U)y); }                              \
  static inline A product_##A(A x, A y) { return (A)((U)x * (U)y); }                          \
  ORDER(A)
FLOAT(f32)
FLOAT(f64)
INTEGER(i8, uint32_t)
INTEGER(u8, uint32_t)
INTEGER(i32, uint32_t)
INTEGER(i64, uint64_t)
#undef ORDER
#undef FLOAT
#undef INTEGER
static inline u8 or_u8(u8 x, u8 y) { return x | y; }
static inline u8 and_u8(u8 x, u8 y) { return x & y; }

/* Toward zero, saturating. Each comparison is written so that NaN (no finite factor makes one) takes the bound. */
#define SATURATE(T, LOW, HIGH)                                     \
  static inline T saturate_##T(double x) {                         \
    x = x > (LOW) ? x : (LOW);                                     \
    return (T)(x < (HIGH) ? x : (HIGH));                           \
  }
SATURATE(i8, INT8_MIN, INT8_MAX)
SATURATE(u8, 0, UINT8_MAX)
SATURATE(i32, INT32_MIN, INT32_MAX)
#undef SATURATE
static inline i64 saturate_i64(double x) {
  const double below = 0x1.fffffffffffffp62; /* the last double under 2^63 */
  x = x > -0x1p63 ? x : -0x1p63;
  i64 inside = (i64)(x < below ? x : below);
  return x < 0x1p63 ? inside : INT64_MAX;
}

/* 1/x where multiplying by it gives the bits of dividing by x: powers of two. Otherwise 0. */
static inline double exact_reciprocal(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (bits & 0xfffffffffffffull) == 0 && x >= 0x1p-60 && x <= 0x1p60 ? 1 / x : 0;
}

/* Vectors of float32 and their loads and stores, for the dtypes whose conversions compilers vectorise badly or not at all. */
#if defined(__AVX512F__)
enum { LANES = 16 };
typedef __m512 lanes;
static inline lanes lanes_of(float x) { return _mm512_set1_ps(x); }
static inline lanes load_lanes_f32(const f32 *p) { return _mm512_loadu_ps(p); }
static inline lanes load_lanes_f16(const f16 *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
static inline void store_lanes_f32(f32 *p, lanes x) { _mm512_storeu_ps(p, x); }
static inline void store_lanes_f16(f16 *p, lanes x) {
  _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline lanes load_lanes_bf16(const bf16 *p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline void store_lanes_bf16(bf16 *p, lanes x) {
  __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
  __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16(rounded));
}
static inline lanes sum_lanes(lanes x, lanes y) { return _mm512_add_ps(x, y); }
static inline lanes product_lanes(lanes x, lanes y) { return _mm512_mul_ps(x, y); }
static inline lanes quotient_lanes(lanes x, lanes y) { return _mm512_div_ps(x, y); }
static inline lanes min_lanes(lanes x, lanes y) {
  return _mm512_mask_mov_ps(_mm512_min_ps(x, y), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}
static inline lanes max_lanes(lanes x, lanes y) {
  return _mm512_mask_mov_ps(_mm512_max_ps(x, y), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}
#elif defined(__AVX2__) && defined(__F16C__)
enum { LANES = 8 };
typedef __m256 lanes;
static inline lanes lanes_of(float x) { return _mm256_set1_ps(x); }
static inline lanes load_lanes_f32(const f32 *p) { return _mm256_loadu_ps(p); }
static inline lanes load_lanes_f16(const f16 *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
static inline void store_lanes_f32(f32 *p, lanes x) { _mm256_storeu_ps(p, x); }
static inline void store_lanes_f16(f16 *p, lanes x) {
  _mm_storeu_si128((void *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline lanes load_lanes_bf16(const bf16 *p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline void store_lanes_bf16(bf16 *p, lanes x) {
  __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
  __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
  _mm_storeu_si128((void *)p, _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}
static inline lanes sum_lanes(lanes x, lanes y) { return _mm256_add_ps(x, y); }
static inline lanes product_lanes(lanes x, lanes y) { return _mm256_mul_ps(x, y); }
static inline lanes quotient_lanes(lanes x, lanes y) { return _mm256_div_ps(x, y); }
/* MINPS is x < y ? x : y, so only a NaN in x needs care. */
static inline lanes min_lanes(lanes x, lanes y) {
  return _mm256_blendv_ps(_mm256_min_ps(x, y), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
static inline lanes max_lanes(lanes x, lanes y) {
  return _mm256_blendv_ps(_mm256_max_ps(x, y), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
#endif

#endif
