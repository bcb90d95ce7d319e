/* Block scaling: float32 as float8 e4m3 (torch's float8_e4m3fn), with a power of two in the format E8M0 for each ENGINE_BLOCK
 * elements. Part of kernels_impl.h.
 *
 * The scale of a block is the least power of two that brings its largest magnitude to at most 448, the largest e4m3. It is at
 * least 2^-117, so that no product `code * scale` is denormal. Every product is exact in float32, and the largest magnitude is
 * found with integers, so all levels give equal bits. A block that holds an infinity or a NaN is NaN as a whole.
 */
#ifndef ENGINE_KERNELS_BLOCKS_H
#define ENGINE_KERNELS_BLOCKS_H

enum {
  SCALE_BIAS = 127,      /* the E8M0 byte of 2^0 */
  SCALE_LEAST = 10,      /* the E8M0 byte of 2^-117 */
  SCALE_NAN = 255,
  QUIET_NAN = 0x7fc00000 /* the only NaN that decoding makes: equal bits on all ranks */
};

/* Return the scale byte for a block's largest magnitude, given as float bits. 448 is 1.75 * 2^8. */
static inline uint8_t scale_byte(int32_t largest) {
  int32_t byte = (largest >> 23) - 8 + ((largest & 0x7fffff) > 0x600000);
  if (largest >= 0x7f800000) return SCALE_NAN;
  return (uint8_t)(byte < SCALE_LEAST ? SCALE_LEAST : byte);
}

/* Return the nearest e4m3, ties to even, of a magnitude of at most 448. For results that are denormal as e4m3, adding 2^14 puts
 * the last place of the float at 2^-9, so that the addition rounds. */
static inline uint8_t store_e4m3(float x) {
  uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff;
  uint32_t denormal = bits_of(of_bits(magnitude) + 0x1p14f) - 0x46800000u;
  uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - 960; /* exponent bias 127 -> 7 */
  return (uint8_t)(choose((int32_t)magnitude < 0x3c800000, denormal, normal) | (bits >> 24 & 0x80));
}

/* Convert e4m3 to float32, exactly. No operand is a denormal float32, which some processors compute slowly. */
static inline float load_e4m3(uint8_t code) {
  uint32_t magnitude = code & 0x7f;
  int denormal = (int32_t)magnitude < 8;
  uint32_t base = choose(denormal, 0x3c800000u, 0); /* 2^-6, added to the mantissa and subtracted again */
  float x = of_bits((magnitude << 20) + choose(denormal, base, 0x3c000000u)) - of_bits(base);
  return of_bits(bits_of(x) | (uint32_t)(code & 0x80) << 24);
}

/* Encode one whole block. */
static inline void encode_block(uint8_t *scale, uint8_t *codes, const f32 *src) {
  int32_t largest = 0;
  float reciprocal;
  for (int i = 0; i < ENGINE_BLOCK; i++) {
    int32_t magnitude = (int32_t)(bits_of(src[i]) & 0x7fffffff);
    largest = magnitude > largest ? magnitude : largest;
  }
  *scale = scale_byte(largest);
  if (*scale == SCALE_NAN) {
    memset(codes, 0, ENGINE_BLOCK);
    return;
  }
  reciprocal = of_bits((uint32_t)(2 * SCALE_BIAS - *scale) << 23);
  for (int i = 0; i < ENGINE_BLOCK; i++) codes[i] = store_e4m3(src[i] * reciprocal);
}

/* Encode `n` elements: see engine_kernels.encode. */
static void encode(uint8_t *scales, uint8_t *codes, const float *src, size_t n) {
  const f32 *s = src;
  _Alignas(64) f32 last[ENGINE_BLOCK];
  _Alignas(64) uint8_t coded[ENGINE_BLOCK];
  for (; n >= ENGINE_BLOCK; n -= ENGINE_BLOCK, scales++, codes += ENGINE_BLOCK, s += ENGINE_BLOCK) encode_block(scales, codes, s);
  if (n == 0) return;
  memset(last, 0, sizeof last);
  memcpy(last, s, n * sizeof(f32));
  encode_block(scales, coded, last);
  memcpy(codes, coded, n);
}

/* Return the number of a scale byte. Bytes that no encoder writes have a number too. */
static inline float scale_of(uint8_t byte) { return of_bits(byte == SCALE_NAN ? QUIET_NAN : (uint32_t)byte << 23); }

/* Decode `n` elements, and add them to `dst` if `adds`, which is a constant for each caller. A NaN block makes all its elements
 * NaN. */
static inline void decode_blocks(float *dst, const uint8_t *scales, const uint8_t *codes, size_t n, int adds) {
  f32 *d = dst;
  for (; n; scales++) {
    size_t count = n < ENGINE_BLOCK ? n : ENGINE_BLOCK;
    float scale = scale_of(*scales);
    if (*scales == SCALE_NAN) {
      for (size_t i = 0; i < count; i++) d[i] = scale;
    } else if (count == ENGINE_BLOCK && adds) {
      for (int i = 0; i < ENGINE_BLOCK; i++) d[i] += load_e4m3(codes[i]) * scale;
    } else if (count == ENGINE_BLOCK) {
      for (int i = 0; i < ENGINE_BLOCK; i++) d[i] = load_e4m3(codes[i]) * scale;
    } else {
      for (size_t i = 0; i < count; i++) {
        float value = load_e4m3(codes[i]) * scale;
        d[i] = adds ? d[i] + value : value;
      }
    }
    d += count, codes += count, n -= count;
  }
}

static void decode(float *dst, const uint8_t *scales, const uint8_t *codes, size_t n) { decode_blocks(dst, scales, codes, n, 0); }

static void decode_add(float *acc, const uint8_t *scales, const uint8_t *codes, size_t n) {
  decode_blocks(acc, scales, codes, n, 1);
}

/* Convert to float32 and multiply by `factor`: see engine_kernels.to_float. */
static void to_float(int dtype, double factor, float *dst, const void *src, size_t n) {
  const f64 *wide = src;
  f32 *d = dst;
  size_t i = 0;
  if (dtype == ENGINE_FLOAT64) {
    REST d[i] = (f32)(wide[i] * factor);
    return;
  }
  if (dtype == ENGINE_FLOAT32) {
    if (factor == 1) copy(dst, src, n * sizeof(f32));
    else scale_f32(dst, src, factor, n);
    return;
  }
  if (dtype == ENGINE_FLOAT16) widen_f16_f32(dst, src, n);
  else if (dtype == ENGINE_BFLOAT16) widen_bf16_f32(dst, src, n);
  else return; /* no other dtype is encoded */
  if (factor != 1) scale_f32(dst, dst, factor, n);
}

/* Round float32 to the dtype. */
static void from_float(int dtype, void *dst, const float *src, size_t n) {
  const f32 *s = src;
  f64 *wide = dst;
  size_t i = 0;
  if (dtype == ENGINE_FLOAT64) {
    REST wide[i] = s[i];
  } else if (dtype == ENGINE_FLOAT32) {
    copy(dst, src, n * sizeof(f32));
  } else if (dtype == ENGINE_FLOAT16) {
    finish_f16(dst, src, 1, 1, n);
  } else if (dtype == ENGINE_BFLOAT16) {
    finish_bf16(dst, src, 1, 1, n);
  }
}

#endif
