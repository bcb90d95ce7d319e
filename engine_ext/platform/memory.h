/* Anonymous files in memory, and aligned memory. */
#ifndef ENGINE_PLATFORM_MEMORY_H
#define ENGINE_PLATFORM_MEMORY_H

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* glibc has memfd_create since 2.27, and headers have the number of its system call since Linux 3.17. Compilers for many
 * distributions, such as conda's, bring older versions of both, so the system call is made directly. */
#if defined(SYS_memfd_create)
enum { ENGINE_MEMFD_CREATE = SYS_memfd_create };
#elif defined(__x86_64__)
enum { ENGINE_MEMFD_CREATE = 319 };
#elif defined(__aarch64__) || defined(__riscv)
enum { ENGINE_MEMFD_CREATE = 279 };
#else
#error "the headers of this kernel are older than Linux 3.17, and have no memfd_create"
#endif

/* Allocate memory for received bytes, at a multiple of 64, which frameworks require of tensors that they take over. free() frees
 * it. Return NULL without memory. */
static inline char *engine_memory_take(uint64_t bytes) {
  void *memory = NULL;
  return posix_memalign(&memory, 64, bytes ? bytes : 1) == 0 ? (char *)memory : NULL;
}

/* Make an empty file in memory, closed on exec; return its descriptor, or -errno. */
static inline int engine_memory_file(const char *name) {
  const unsigned close_on_exec = 1; /* MFD_CLOEXEC */
  long fd = syscall(ENGINE_MEMFD_CREATE, name, close_on_exec);
  return fd < 0 ? -errno : (int)fd;
}
#endif
