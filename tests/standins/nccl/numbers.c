/* Sums and the like as NCCL makes them: in the type of the data, rounded at each hop, in an order that nobody promises.
 */
#include "internal.h"

#include <math.h>

const char *const dtype_names[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                   "uint64", "float16", "float32", "float64", "bfloat16"};

size_t dtype_size(int dtype) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return dtype >= 0 && dtype < 10 ? sizes[dtype] : 0;
}

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static float of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static float from_half(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 31) return of_bits(sign | 0x7f800000 | mantissa << 13);
  if (exponent) return of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
  return sign ? -ldexpf((float)mantissa, -24) : ldexpf((float)mantissa, -24);
}

static uint16_t to_half(float value) {
  uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return 0x7fff; /* as the device writes a NaN */
  if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (size < 0x38800000) return (uint16_t)(sign | (uint32_t)lrintf(ldexpf(fabsf(value), 24)));
  size += 0xfff + (size >> 13 & 1);
  return (uint16_t)(sign | (size - 0x38000000) >> 13);
}

static float from_bfloat(uint16_t b) { return of_bits((uint32_t)b << 16); }

static uint16_t to_bfloat(float value) {
  uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The order in which the ranks' parts are taken: another for each 256 elements of each call, the same on all ranks. */
static void draw_order(int *order, int n, uint64_t seed) {
  for (int i = 0; i < n; i++) {
    int j;
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    j = (int)((seed >> 33) % (unsigned)(i + 1));
    order[i] = order[j];
    order[j] = i;
  }
}

#define PLUS(a, b) ((a) + (b))
#define TIMES(a, b) ((a) * (b))
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define SMALLER(a, b) ((a) < (b) ? (a) : (b))

/* `type` is how values are stored, `wide` how one operation works on them; `read` and `write` go between. */
#define FOLD(type, wide, read, write, max, min, average)                  \
  for (size_t i = block; i < end; i++) {                                  \
    wide sum = 0;                                                         \
    for (int k = 0; k < n; k++) {                                         \
      wide x = read(((const type *)from[order[k]])[first + i]);           \
      if (op == ncclAvg && average) x = read(write(x * (wide)(1.0 / n))); \
      if (!k) sum = x;                                                    \
      else if (op == ncclProd) sum = read(write(TIMES(sum, x)));          \
      else if (op == ncclMax) sum = max(sum, x);                          \
      else if (op == ncclMin) sum = min(sum, x);                          \
      else sum = read(write(PLUS(sum, x)));                               \
    }                                                                     \
    if (op == ncclAvg && !average) sum = (wide)(sum / (wide)n);           \
    ((type *)to)[i] = write(sum);                                         \
  }                                                                       \
  break
#define INTEGERS(type, wide) FOLD(type, wide, (wide), (type), LARGER, SMALLER, 0)

/* Elements `first` to `first + count` of the ranks' parts. */
void reduce(void *to, char *const *from, int n, size_t first, size_t count, int dtype, int op, uint64_t seed) {
  int order[RANKS];
  for (size_t block = 0; block < count; block += 256) {
    size_t end = block + 256 < count ? block + 256 : count;
    draw_order(order, n, seed + (first + block) / 256);
    switch (dtype) {
      case ncclInt8: INTEGERS(int8_t, int8_t);
      case ncclUint8: INTEGERS(uint8_t, uint8_t);
      case ncclInt32: INTEGERS(uint32_t, int32_t);
      case ncclUint32: INTEGERS(uint32_t, uint32_t);
      case ncclInt64: INTEGERS(uint64_t, int64_t);
      case ncclUint64: INTEGERS(uint64_t, uint64_t);
      case ncclFloat16: FOLD(uint16_t, float, from_half, to_half, fmaxf, fminf, 1);
      case ncclBfloat16: FOLD(uint16_t, float, from_bfloat, to_bfloat, fmaxf, fminf, 1);
      case ncclFloat32: FOLD(float, float, (float), (float), fmaxf, fminf, 1);
      case ncclFloat64: FOLD(double, double, (double), (double), fmax, fmin, 1);
    }
  }
}
