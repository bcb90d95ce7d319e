/* Instruction sets of the processor, and the floating-point environment of the calling thread. */
#ifndef ENGINE_PLATFORM_CPU_H
#define ENGINE_PLATFORM_CPU_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Return nonzero if processor and operating system both support the set: AVX2 with F16C; AVX-512 F, BW, VL, DQ with F16C. */
int engine_cpu_has_avx2(void);
int engine_cpu_has_avx512(void);

/* Return the thread's rounding mode and treatment of denormals. A waiter runs the engine on a thread of the user. Its setting
 * (torch.set_flush_denormal changes it) must neither reach the kernels nor be lost:
 *
 *   uint64_t theirs = engine_float_enter();
 *   ...
 *   engine_float_leave(theirs);
 */
static inline uint64_t engine_float_save(void) {
#if defined(__x86_64__)
  return _mm_getcsr();
#elif defined(__aarch64__)
  uint64_t fpcr;
  __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
  return fpcr;
#else
  return 0;
#endif
}

/* Set the thread's floating-point environment to one that engine_float_save returned. */
static inline void engine_float_restore(uint64_t saved) {
  /* The clobber keeps the compiler from moving the kernels' loads and stores, and so their arithmetic, across the change. */
#if defined(__x86_64__)
  __asm__ volatile("" ::: "memory");
  _mm_setcsr((unsigned)saved);
  __asm__ volatile("" ::: "memory");
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" : : "r"(saved) : "memory");
#else
  (void)saved;
#endif
}

#if defined(__x86_64__)
enum { ENGINE_FLOAT_DEFAULT = 0x1F80 }; /* exceptions masked, round to nearest even, no flushing */
#else
enum { ENGINE_FLOAT_DEFAULT = 0 };
#endif

/* Set the default floating-point environment; return the previous one for engine_float_leave. */
static inline uint64_t engine_float_enter(void) {
  uint64_t saved = engine_float_save();
  if (saved != ENGINE_FLOAT_DEFAULT) engine_float_restore(ENGINE_FLOAT_DEFAULT);
  return saved;
}

/* Restore the floating-point environment that engine_float_enter returned. */
static inline void engine_float_leave(uint64_t saved) {
  if (engine_float_save() != saved) engine_float_restore(saved);
}

/* Prefetch memory that will be read soon; a wrong address does no harm. */
static inline void engine_prefetch_read(const void *memory, size_t bytes) {
  uintptr_t line = (uintptr_t)memory & ~(uintptr_t)63, end = (uintptr_t)memory + bytes;
  for (; line < end; line += 64) __builtin_prefetch((const void *)line, 0);
}

/* Prefetch memory that will be written soon; a wrong address does no harm. */
static inline void engine_prefetch(const void *memory, size_t bytes) {
  uintptr_t line = (uintptr_t)memory & ~(uintptr_t)63, end = (uintptr_t)memory + bytes;
  for (; line < end; line += 64) __builtin_prefetch((const void *)line, 1);
}
#endif
