#include "platform/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* __builtin_cpu_supports also asks the operating system (XGETBV) whether it saves the registers. In some compilers it does not
 * know F16C, which uses the registers of AVX. */
int engine_cpu_has_avx2(void) {
  unsigned a, b, c, d;
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

int engine_cpu_has_avx512(void) {
  return engine_cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

#else

int engine_cpu_has_avx2(void) { return 0; }
int engine_cpu_has_avx512(void) { return 0; }

#endif
