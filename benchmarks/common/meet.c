/* A barrier of processes over one shared page, the same for everything that is measured.
 *
 *   cc -O3 -march=native -shared -fPIC -o libmeet.so meet.c
 *
 * The page is zeroed memory of 64 bytes per rank that all ranks map. Each rank keeps its own count of meetings.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>

typedef struct { _Alignas(64) atomic_ulong met; } place;

/* Returns when all ranks have called it for the `meeting`th time. Spins `spins` times on each rank before it yields. */
void meet(place *page, int rank, int ranks, unsigned long meeting, int spins) {
  /* Release: what this rank did before is visible to whoever sees it here. Pairs with the acquire below. */
  atomic_store_explicit(&page[rank].met, meeting, memory_order_release);
  for (int r = 0; r < ranks; r++)
    for (int n = 0; atomic_load_explicit(&page[r].met, memory_order_acquire) < meeting; n++)
      if (n >= spins) sched_yield();
#if defined(__x86_64__)
      else __builtin_ia32_pause();
#endif
}
