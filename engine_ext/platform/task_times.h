/* Run delay: the time for which a thread has waited for a processor that it could have used.
 *
 * The kernel counts it for every thread: while it was ready to run and another thread, of this process or of a
 * stranger, had the processor; and while its cgroup was throttled, which a thread spends in the same queue. /proc has it as the
 * second number of a thread's schedstat. The file is opened once for the thread that opens it, and then costs one pread, about
 * 1.1 us. What a hypervisor takes from the whole machine, and the time of a stopped or frozen process, are not in it.
 * A kernel that does not count writes zeros, also for how often the thread has run: then nothing is known.
 */
#ifndef ENGINE_PLATFORM_TASK_TIMES_H
#define ENGINE_PLATFORM_TASK_TIMES_H

#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

/* Open the counts of the calling thread. Return a descriptor, or -1 where the system has none. */
static inline int task_times_open(void) { return open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC); }

/* Return a number of the calling thread, from 1 on. Unlike a pthread_t or a thread's number in the kernel, none comes again. Each
 * file that includes this counts by itself. */
static inline uint64_t task_times_thread(void) {
  static _Atomic uint64_t threads;
  static _Thread_local uint64_t mine;
  if (mine == 0) mine = atomic_fetch_add_explicit(&threads, 1, memory_order_relaxed) + 1; /* pairs with nothing */
  return mine;
}

/* Parse the second of three numbers of a schedstat line, which are nanoseconds run, nanoseconds delayed, and times run. Return
 * whether it is known: there are three, and the thread, which runs now, is counted as having run. */
static inline int task_times_parse(const char *text, long length, uint64_t *ns) {
  uint64_t numbers[3] = {0, 0, 0};
  long at = 0, begin;
  for (int number = 0; number < 3; number++, at++) {
    for (begin = at; at < length && text[at] >= '0' && text[at] <= '9'; at++)
      numbers[number] = numbers[number] * 10 + (uint64_t)(text[at] - '0');
    if (at == begin || (number < 2 && (at == length || text[at] != ' '))) return 0;
  }
  *ns = numbers[1];
  return numbers[2] != 0;
}

/* Read the run delay of the thread that opened `fd`, in nanoseconds since its start. Return whether it is known. */
static inline int task_times_delay(int fd, uint64_t *ns) {
  char text[96];
  return fd >= 0 && task_times_parse(text, (long)pread(fd, text, sizeof text, 0), ns);
}
#endif
