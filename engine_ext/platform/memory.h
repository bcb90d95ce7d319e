/* Memory without a name in any file system. */
#ifndef ENGINE_PLATFORM_MEMORY_H
#define ENGINE_PLATFORM_MEMORY_H

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The C library has memfd_create since glibc 2.27, its headers the call's number since Linux 3.17. Compilers for many
 * distributions, such as conda's, bring older ones of both, so that the kernel is asked directly. */
#if defined(SYS_memfd_create)
enum { ENGINE_MEMFD_CREATE = SYS_memfd_create };
#elif defined(__x86_64__)
enum { ENGINE_MEMFD_CREATE = 319 };
#elif defined(__aarch64__) || defined(__riscv)
enum { ENGINE_MEMFD_CREATE = 279 };
#else
#error "the headers of this kernel are older than Linux 3.17, and have no memfd_create"
#endif

/* Memory for what a collective receives, to be freed by free(): at a multiple of 64, which frameworks want of a tensor that
 * they are to take over. NULL without memory. */
static inline char *engine_memory_take(uint64_t bytes) {
  void *memory = NULL;
  return posix_memalign(&memory, 64, bytes ? bytes : 1) == 0 ? (char *)memory : NULL;
}

/* An empty file in memory, closed on exec: its descriptor, or -errno. */
static inline int engine_memory_file(const char *name) {
  const unsigned close_on_exec = 1; /* MFD_CLOEXEC */
  long fd = syscall(ENGINE_MEMFD_CREATE, name, close_on_exec);
  return fd < 0 ? -errno : (int)fd;
}
#endif
