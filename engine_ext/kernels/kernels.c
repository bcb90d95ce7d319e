/* Selection of the kernels that this process uses, and the check of a reduction's parameters. */
#include "kernels/kernels.h"

#include <errno.h>
#include <string.h>

#include "platform/cpu.h"

extern const engine_kernels engine_kernels_plain;
#if defined(__x86_64__)
extern const engine_kernels engine_kernels_avx2, engine_kernels_avx512;
#endif

static const char *const names[ENGINE_LEVELS] = {"plain", "avx2", "avx512"};

const engine_kernels *engine_kernels_get(int level) {
  switch (level) {
    case ENGINE_PLAIN: return &engine_kernels_plain;
#if defined(__x86_64__)
    case ENGINE_AVX2: return engine_cpu_has_avx2() ? &engine_kernels_avx2 : NULL;
    case ENGINE_AVX512: return engine_cpu_has_avx512() ? &engine_kernels_avx512 : NULL;
#endif
    default: return NULL;
  }
}

int engine_kernels_best(void) {
  int level = ENGINE_LEVELS - 1;
  while (!engine_kernels_get(level)) level--;
  return level;
}

const char *engine_kernels_name(int level) { return level >= 0 && level < ENGINE_LEVELS ? names[level] : NULL; }

int engine_kernels_level(const char *name) {
  if (strcmp(name, "auto") == 0) return engine_kernels_best();
  for (int level = 0; level < ENGINE_LEVELS; level++)
    if (strcmp(name, names[level]) == 0) return engine_kernels_get(level) ? level : -ENOTSUP;
  return -EINVAL;
}

/* Return what isfinite of <math.h> does, without linking libm. */
static int is_finite(double x) { return x - x == 0; }
/* Return whether x is a whole number below 2^53, without linking libm. */
static int is_whole(double x) { return x < 0x1p53 && (double)(long long)x == x; }

/* Return whether tensors of one dtype can travel as another. */
static int can_travel(int tensor, int dtype) {
  return tensor == dtype || (dtype <= ENGINE_BFLOAT16 && (tensor == ENGINE_FLOAT32 || tensor == ENGINE_FLOAT64));
}

int engine_reduction_check(const engine_reduction *r) {
  if (r->dtype < 0 || r->dtype >= ENGINE_DTYPES || r->op < 0 || r->op >= ENGINE_OPS) return -EINVAL;
  if (!can_travel(r->tensor, r->dtype)) return -EINVAL;
  if (r->count < 1 || r->copies < 1 || r->unscaled < ENGINE_EVERY_SOURCE || r->unscaled >= r->count) return -EINVAL;
  if (!is_finite(r->prescale) || !is_finite(r->postscale) || !is_finite(r->divisor) || r->divisor <= 0) return -EINVAL;
  if (!engine_kernels_plain.types[r->dtype].ops[r->op].combine) return -EINVAL;
  if (r->dtype >= ENGINE_INT8 && !is_whole(r->divisor)) return -EINVAL;
  if (r->dtype == ENGINE_BOOL && (r->prescale != 1 || r->divisor != 1 || r->postscale != 1)) return -EINVAL;
  return 0;
}
