/* What the stand-in for libcuda offers beside the driver's API: to tests, to kernels, and to the stand-in for libnccl.
 */
#ifndef STAND_H
#define STAND_H

#include "engine_ext/gpu/cuda.h"

#include <stdint.h>

#define STAND_API __attribute__((visibility("default")))

/* The driver's functions, as the engine declares them. */
#define X(name, parameters) STAND_API CUresult name parameters;
CUDA_FUNCTIONS(X)
#undef X

/* ---- how it runs ---- */

STAND_API void stand_seed(uint64_t seed);
STAND_API int stand_policy(const char *policy); /* "eager", "lazy" or "drawn"; else -1 */
/* Milliseconds after which a host that waits for a device reports a deadlock, and gets CUDA_ERROR_LAUNCH_TIMEOUT. */
STAND_API void stand_deadline(double milliseconds);

/* ---- faults ---- */

enum { STAND_HANG = -1, STAND_KILL = -2, STAND_STOP = -3 }; /* codes of what a call does instead of returning */
/* The n-th call from now of a function, 1 being the next, returns `code` instead of doing anything. Names without _v2
 * will do. */
STAND_API void stand_fail(const char *call, int n, int code);
/* Loading and allocating waits until every stream is empty, as a driver may (lazy loading). */
STAND_API void stand_loading_waits(int yes);

/* ---- what it found ---- */

STAND_API int stand_reports(void);                      /* how many */
STAND_API size_t stand_report(char *text, size_t size); /* the texts, one a line; returns the length */
STAND_API void stand_clear(void);
STAND_API long stand_calls(const char *call); /* how often a function was called */

/* ---- happens-before ---- */

typedef struct stand_access {
  uintptr_t at;
  size_t size;
  int write;
} stand_access;
/* The calling thread reads or writes memory of the device's view itself: pinned memory, or memory that it hands on. */
STAND_API void stand_host(const void *at, size_t size, int write, const char *what);
/* One thread tells, another hears: what the first knew then, the second knows now. A lock or a flag of the program. */
STAND_API void stand_tell(uintptr_t word);
STAND_API void stand_hear(uintptr_t word);
/* All threads of the host know what any of them knows: for programs whose own locks are checked elsewhere. */
STAND_API void stand_hosts_are_one(int yes);

/* ---- work ---- */

/* Where the executor finds device memory; pinned memory is where it is. Kernels use this, hosts only to look. */
STAND_API void *stand_pointer(CUdeviceptr at);

typedef struct stand_launch {
  unsigned grid[3], block[3], shared;
} stand_launch;
/* A kernel: called once per launch; `parameters` as cuLaunchKernel took them, but copies. */
typedef void stand_kernel(const stand_launch *launch, void **parameters);
/* What it reads and writes, asked just before it runs: returns how many of at most `room` it wrote down. */
typedef int stand_accesses(const stand_launch *launch, void **parameters, stand_access *accesses, int room);
STAND_API void stand_register_kernel(const char *name, stand_kernel *kernel);
/* Kernels that begin from now on take so long; the device goes on with other streams meanwhile. */
STAND_API void stand_kernels_take(double milliseconds);
STAND_API void stand_register_accesses(const char *name, stand_accesses *accesses);

/* What "the framework computes" is: after `delay` milliseconds copies reads[i] to writes[i]; a write without a read is
 * poisoned. */
STAND_API CUresult stand_compute(CUstream stream, const stand_access *accesses, int n, double delay, const char *what);

/* An operation of one's own. `step` is called under the stand-in's lock until it returns 1; `wanted` tells whether a
 * peer waits for it, `want` is called once when somebody here does; `drop` frees `data`. All but `step` may be NULL. */
typedef struct stand_operation {
  const char *what;
  int (*step)(void *data);
  int (*wanted)(void *data);
  void (*want)(void *data);
  void (*describe)(void *data, char *text, size_t size); /* what it waits for */
  void (*drop)(void *data);
  /* In a graph: the data of one launch of it, which `drop` frees. What meets peers cannot be captured without. */
  void *(*again)(void *data);
  void (*released)(void *data); /* there is no graph any more that has it, nor will be */
  void *data;
  const stand_access *accesses;
  int n_accesses;
} stand_operation;
STAND_API CUresult stand_enqueue(CUstream stream, const stand_operation *operation);
STAND_API int stand_captures(CUstream stream); /* whether what is enqueued there becomes a node of a graph */

/* ---- for the stand-in for libnccl ---- */

STAND_API void stand_lock(void);
STAND_API void stand_unlock(void);
STAND_API void stand_poke(void); /* something outside changed: look at all operations again */
STAND_API void stand_found(const char *format, ...) __attribute__((format(printf, 1, 2)));
STAND_API uint64_t stand_random(void);
STAND_API uint64_t stand_seed_now(void);
STAND_API int stand_is_lazy(void);
STAND_API int stand_injected(const char *call); /* counts a call; the code that it is to return, or 0 */
STAND_API double stand_deadline_now(void);
STAND_API void stand_sticky(CUresult code); /* the device has failed: every call returns this from now on */
STAND_API void stand_sleep(double milliseconds);

#endif
