/* Kernels of Adasum (operations/adasum.pyx): inner products of rows, and weighted sums of rows. Both compute in float64. Part of
 * kernels_impl.h. An element's position fixes the order of additions, so that all levels give equal bits. */
#ifndef ENGINE_KERNELS_ADASUM_H
#define ENGINE_KERNELS_ADASUM_H

enum {
  OCTET = ENGINE_INNER_LANES,
  WIDE = 4096,    /* most numbers of all rows in one block: 32 KiB, which the first-level cache holds */
  WIDE_ROW = 512, /* most numbers of one row in a block */
  ROWS_AT_ONCE = 4  /* rows that add_rows takes in one pass */
};
typedef double octet __attribute__((vector_size(OCTET * sizeof(double))));
_Static_assert(WIDE / ENGINE_INNER_ROWS >= OCTET, "a block holds some numbers of every row");

/* Widen at most WIDE_ROW elements to float64. Exact. */
static void widen_to_f64(int dtype, f64 *wide, const void *src, size_t n) {
  _Alignas(64) f32 single[WIDE_ROW];
  const f32 *s = src;
  size_t i = 0;
  if (dtype == ENGINE_FLOAT64) {
    memcpy(wide, src, n * sizeof(f64));
    return;
  }
  if (dtype != ENGINE_FLOAT32) {
    (dtype == ENGINE_FLOAT16 ? widen_f16_f32 : widen_bf16_f32)(single, src, n);
    s = single;
  }
  REST wide[i] = s[i];
}

/* Round float64 to the dtype once; for float16 and bfloat16 to float32 first. */
static void narrow_from_f64(int dtype, void *dst, const f64 *wide, size_t n) {
  _Alignas(64) f32 single[WIDE_ROW];
  f32 *d = dtype == ENGINE_FLOAT32 ? dst : single;
  size_t i = 0;
  if (dtype == ENGINE_FLOAT64) {
    memcpy(dst, wide, n * sizeof(f64));
    return;
  }
  REST d[i] = (f32)wide[i];
  if (dtype == ENGINE_FLOAT16) finish_f16(dst, single, 1, 1, n);
  if (dtype == ENGINE_BFLOAT16) finish_bf16(dst, single, 1, 1, n);
}

/* totals[k] += a * row k of b. Several rows in one pass, because their additions do not depend on one another. */
static inline __attribute__((always_inline)) void add_rows(
    double *totals, const f64 *a, const f64 *b, size_t stride, int rows, size_t n) {
  octet sums[ROWS_AT_ONCE], x, y;
  memcpy(sums, totals, (size_t)rows * sizeof(octet));
  for (size_t i = 0; i < n; i += OCTET) {
    memcpy(&x, a + i, sizeof x);
    for (int k = 0; k < rows; k++) {
      memcpy(&y, b + (size_t)k * stride + i, sizeof y);
      sums[k] += x * y;
    }
  }
  memcpy(totals, sums, (size_t)rows * sizeof(octet));
}

/* Add the products of each pair of rows to their lanes: see engine_kernels.inner. */
static void inner(int dtype, double *totals, const void *const *rows, int count, size_t n) {
  _Alignas(64) f64 wide[WIDE];
  size_t element = ENGINE_KERNELS.types[dtype].size;
  size_t most = (size_t)(WIDE / count / OCTET * OCTET);
  if (most > WIDE_ROW) most = WIDE_ROW;
  for (size_t at = 0; at < n; at += most) {
    size_t m = n - at < most ? n - at : most, whole = (m + OCTET - 1) / OCTET * OCTET;
    double *pair = totals;
    for (int r = 0; r < count; r++) {
      widen_to_f64(dtype, wide + (size_t)r * most, (const char *)rows[r] + at * element, m);
      for (size_t i = m; i < whole; i++) wide[(size_t)r * most + i] = 0;
    }
    for (int r = 0; r < count; r++) {
      const f64 *a = wide + (size_t)r * most;
      for (int q = r, together; q < count; q += together, pair += together * OCTET) {
        const f64 *b = wide + (size_t)q * most;
        together = count - q < ROWS_AT_ONCE ? count - q : ROWS_AT_ONCE;
        switch (together) {
          case 1: add_rows(pair, a, b, most, 1, whole); break;
          case 2: add_rows(pair, a, b, most, 2, whole); break;
          case 3: add_rows(pair, a, b, most, 3, whole); break;
          default: add_rows(pair, a, b, most, ROWS_AT_ONCE, whole);
        }
      }
    }
  }
}

/* sum += weight * x; for the first row, sum = weight * x. */
static void add_weighted(f64 *sum, double weight, const f64 *x, int first, size_t n) {
  size_t i = 0;
  if (first) {
    REST sum[i] = weight * x[i];
  } else {
    REST sum[i] += weight * x[i];
  }
}

/* Store the weighted sum of rows in `dst`: see engine_kernels.weigh. */
static void weigh(int dtype, void *dst, const void *const *rows, const double *weights, int count, size_t n) {
  _Alignas(64) f64 sum[WIDE_ROW], wide[WIDE_ROW];
  size_t element = ENGINE_KERNELS.types[dtype].size;
  for (size_t at = 0; at < n; at += WIDE_ROW) {
    size_t m = n - at < WIDE_ROW ? n - at : WIDE_ROW;
    for (int r = 0; r < count; r++) {
      widen_to_f64(dtype, wide, (const char *)rows[r] + at * element, m);
      add_weighted(sum, weights[r], wide, r == 0, m);
    }
    narrow_from_f64(dtype, (char *)dst + at * element, sum, m);
  }
}

#endif
