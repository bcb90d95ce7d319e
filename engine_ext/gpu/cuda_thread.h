/* The CUDA thread: the one thread of a process that makes the CUDA and NCCL calls that may block, and everything that it has
 * opened.
 *
 * The owner gives it one job at a time (`cuda_thread_begin`) and waits for its end (`cuda_thread_wait`) as long as it likes. A
 * call may hang in a driver forever; then the thread is abandoned. Between the beginning and the end of a job, only the CUDA
 * thread touches what it has made, except `cancelled` and `d.call`. Once connected, the CUDA thread also takes items from any
 * thread (`device.push`), and ends them in order: the world's as they were pushed, those of process sets in their turns.
 *
 * cuda_thread.c has the thread, turns.c the order of items, opening.c the jobs, launching.c the items, moving.c items that only
 * move data, freezing.c frozen passes, keeping.c their resources when graphs outlive the CUDA thread, sampling.c the durations of
 * samples, and streams.c the functions that other threads may call.
 */
#ifndef ENGINE_GPU_CUDA_THREAD_H
#define ENGINE_GPU_CUDA_THREAD_H

#include "device.h"
#include "nccl.h"

#include "engine_ext/platform/atomics.h"
#include "engine_ext/platform/doors.h"
#include "engine_ext/platform/threads.h"

/* The libraries' functions, in the order of the three lists. Filled as an array of addresses; 0: the library lacks it. */
typedef struct cuda_thread_functions {
#define X(name, parameters) CUresult(*name) parameters;
  CUDA_FUNCTIONS(X)
#undef X
#define X(name, parameters, since) ncclResult_t(*name) parameters;
  NCCL_FUNCTIONS(X)
#undef X
#define X(name, parameters, since) const char *(*name)parameters;
  NCCL_TEXTS(X)
#undef X
} cuda_thread_functions;

enum { CUDA_THREAD_FUNCTIONS = sizeof(cuda_thread_functions) / sizeof(void (*)(void)) };

/* A function's name, and the first version of NCCL that has it; 0: it belongs to the CUDA driver. */
typedef struct cuda_thread_function {
  const char *name;
  int since;
} cuda_thread_function;
extern const cuda_thread_function cuda_thread_function_list[CUDA_THREAD_FUNCTIONS];

/* The jobs, in the order in which they are given. */
enum {
  CUDA_THREAD_NOTHING,
  CUDA_THREAD_IDENTIFY, /* find out which device it is and fill in `identity`; creates nothing */
  CUDA_THREAD_PREPARE,  /* create context, stream, kernels, memory and events */
  CUDA_THREAD_NAME,     /* on rank 0: ask NCCL for a communicator's `id` */
  CUDA_THREAD_CONNECT,  /* create the communicator over all ranks; items create those of process sets */
  CUDA_THREAD_CLOSE,    /* destroy every resource, including partly initialized ones, and end the thread */
  CUDA_THREAD_JOBS
};

enum {
  CUDA_THREAD_KERNELS = 64,     /* most kernels */
  CUDA_THREAD_MARKS = 64,       /* marks that are made in advance */
  CUDA_THREAD_SAMPLES = 4,      /* most sampled entries in flight, each with a timed mark */
  CUDA_THREAD_STANDS = 8,       /* most steps in flight for which the time that their streams stand still is measured */
  CUDA_THREAD_DTYPES = 11,      /* dtypes that can be reduced */
  CUDA_THREAD_CANCELLED = -1
};

static const uint32_t CUDA_THREAD_CLOSED = 1u << 31;   /* bit of `visitors`: no more threads may enter */

/* The first call that failed. */
typedef struct cuda_thread_failure {
  const char *call; /* NULL: none has failed */
  int code;         /* a CUresult or an ncclResult_t; CUDA_THREAD_CANCELLED: the call was given up */
  char name[64];    /* name of the code; "" for NCCL, whose codes have none */
  char text[2048];  /* the library's explanation */
} cuda_thread_failure;

/* The device's identity, as CUDA_THREAD_IDENTIFY finds it. */
typedef struct cuda_thread_identity {
  int driver, devices; /* driver version, such as 12090; number of devices that this process sees */
  char name[128], pci[32];
  unsigned char uuid[16];
} cuda_thread_identity;

/* Numbers of kernels, as indices of `kernels`; -1: there is no such kernel. */
typedef struct cuda_thread_kernels {
  int pack[CUDA_THREAD_DTYPES][CUDA_THREAD_DTYPES];   /* by the tensor's dtype and the travelling dtype */
  int unpack[CUDA_THREAD_DTYPES][CUDA_THREAD_DTYPES]; /* likewise */
  int pack_bytes, unpack_bytes;
  int reduce[CUDA_THREAD_DTYPES];
} cuda_thread_kernels;

/* A sampled entry: timed events around its stages. The CUDA thread alone uses it. */
typedef struct cuda_thread_sample {
  uint64_t ticket;         /* 0: this slot is free */
  uint64_t sequence, bytes;
  device_mark *mark;       /* timed mark of one of the entry's tensors */
  int n;                   /* number of slices so far; consecutive pieces of one stage are one slice */
  int stages[DEVICE_SLICES];
  CUevent events[DEVICE_SLICES + 1]; /* slice k lies between events k and k + 1 */
} cuda_thread_sample;

/* A measured wait of the program's stream. */
enum { STAND_FREE, STAND_TAKEN, STAND_RECORDED };
typedef struct cuda_thread_stand {
  uint32_t state;          /* STAND_*; atomic: a waiter sets TAKEN, then RECORDED (FREE on failure), the CUDA thread FREE */
  CUevent before, behind;
} cuda_thread_stand;

/* States of a process set's communicator: waits for its turn, is being connected, is connected, was ended, has failed. */
enum { COMMUNICATOR_NEW, COMMUNICATOR_BEGUN, COMMUNICATOR_CONNECTED, COMMUNICATOR_DESTROYED, COMMUNICATOR_FAILED };

/* Ranks that communicate with each other: all ranks, or those of a process set. */
typedef struct communicator {
  device_queue queue;        /* first: the part that other planes see; of a process set only */
  struct communicator *next; /* the CUDA thread's list */
  int rank, size;
  ncclUniqueId id;
  ncclComm_t comm;
  int connected;             /* 1: it is complete and can be used */
  device_item *first, *last; /* items of a process set that wait for their turns, oldest first */
  device_item connecting, destroying; /* the items DEVICE_CONNECT and DEVICE_DESTROY of a process set */
  uint32_t stage;            /* COMMUNICATOR_*: set by the CUDA thread; atomic */
} communicator;

/* The resources of a frozen pass on the device. */
typedef struct frozen_memory {
  struct frozen_memory *next;
  CUdeviceptr slab, device_tables;
  char *tables;            /* pinned */
  CUevent done;            /* recorded behind each pass that is not captured */
} frozen_memory;

typedef struct keeper keeper; /* keeping.c */

/* A frozen pass: a reduction of the same tensors each time, which the CUDA thread enqueues on a stream of the program. That
 * stream may be captured into a CUDA graph, so everything that the pass reads stays unchanged, at the same addresses, until
 * CUDA_THREAD_CLOSE. */
typedef struct frozen_pass {
  device_item item;        /* first */
  struct frozen_pass *next; /* the CUDA thread's list */
  CUstream stream;         /* stream on which it is enqueued this time */
  frozen_memory *memory;
  ncclUniqueId id;         /* id by which the ranks connect, unless they are connected */
  uint64_t slab_bytes, table_bytes;
  uint32_t ran, captured;  /* 1: it was ever enqueued to run at once; 1: it was ever captured into a graph; atomic */
  uint32_t ended;          /* 1: the last request for it has ended; atomic */
  char why[DEVICE_WHY];    /* why that request failed; "": it succeeded */
} frozen_pass;

typedef struct cuda_thread {
  device d; /* first: the part that other planes see */
  cuda_thread_functions f;
  const char *image;       /* PTX; it and the kernels' `names` belong to the owner */
  const char **names;
  int n_kernels;
  cuda_thread_kernels known;
  int ordered;             /* 1: sums of all dtypes are made in rank order, as in host memory; 0: by NCCL where it can */
  uint64_t slab_bytes;     /* a multiple of 32 */
  uint64_t table_bytes;
  ncclUniqueId id;         /* valid after CUDA_THREAD_NAME */

  pthread_t thread;
  uint32_t door, ended;    /* doors: rung to wake the CUDA thread; rung by the cuda_thread */
  uint32_t job;            /* CUDA_THREAD_*: set by the owner, to CUDA_THREAD_NOTHING at the job's end by the thread; atomic */
  uint32_t cancelled;      /* 1, set by the owner: give up as soon as a call returns; atomic */
  void *pushed;            /* stack of items that the CUDA thread has not taken yet; atomic */
  device_item *first, *last; /* the CUDA thread's: items of the world and turns of process sets that it has taken, oldest first */
  uint64_t tickets;        /* the CUDA thread's: number of tickets given */

  cuda_thread_failure failure;
  cuda_thread_identity identity;
  CUdevice device;
  CUcontext context;       /* the primary context, retained; NULL: not retained */
  CUstream stream;
  CUmodule module;
  CUfunction kernels[CUDA_THREAD_KERNELS];
  CUevent begun[DEVICE_OUTSTANDING], done[DEVICE_OUTSTANDING]; /* rings by ticket: recorded before and behind the item's work */
  pthread_mutex_t marks_lock;
  uint32_t visitors;       /* number of program threads in calls, plus CUDA_THREAD_CLOSED once no more may enter; atomic */
  device_mark *marks;      /* pool of unused marks without times; under marks_lock */
  int n_marks;             /* number of marks that the CUDA thread has made */
  device_mark *timed;      /* pool of unused timed marks; under marks_lock, like the next two fields */
  uint32_t until_timed, drawn; /* submissions until the next timed mark; state of the random numbers */
  cuda_thread_sample samples[CUDA_THREAD_SAMPLES];
  cuda_thread_sample *sampling;   /* sample of the item that is being enqueued; NULL: it is not sampled */
  cuda_thread_stand stands[CUDA_THREAD_STANDS];
  CUevent origin;          /* timed event, which the device passed at `origin_ns` */
  uint64_t origin_ns, origin_error, compare_at; /* host's clock: time of `origin` (0: unknown), its error, next comparison */
  CUdeviceptr slab;
  char *tables;            /* pinned: ring of tables for kernels; `device_tables` is its copy on the device */
  CUdeviceptr device_tables;
  uint64_t table_head, table_tail;           /* bytes of the ring ever used, and those that the device has passed */
  uint64_t table_ends[DEVICE_OUTSTANDING];     /* ring by ticket: `table_head` behind the item */
  communicator world;
  communicator graphs;     /* of all ranks, for frozen passes: its calls block, so a capture is complete when one returns */
  frozen_pass *passes;     /* list of the passes that the CUDA thread has made; atomic */
  keeper *keeper;          /* holder of their resources; NULL: there is no pass */
  communicator *communicators; /* communicators in use, complete or not, the newest first */
  communicator *at;        /* communicator of the work in progress */
  int quiet;               /* 1, after a failure: the communicators were ended, and the stream is empty or was given up */
  int left;                /* 1, after CUDA_THREAD_CLOSE: some work or call did not end, and nothing that it may use was freed */
} cuda_thread;

/* Start the thread; returns 0 or an errno. Fields that the owner has not set are 0. */
int cuda_thread_start(cuda_thread *t);
/* Give the CUDA thread a job, once the last one has ended. */
void cuda_thread_begin(cuda_thread *t, uint32_t job);
/* Wait for the job's end, at most `ns` nanoseconds; returns whether it has ended. */
int cuda_thread_wait(cuda_thread *t, uint64_t ns);
/* Give up the current job and all later ones except CUDA_THREAD_CLOSE. */
void cuda_thread_cancel(cuda_thread *t);
/* Join the thread, after CUDA_THREAD_CLOSE has ended. */
void cuda_thread_join(cuda_thread *t);

/* ---- process sets (turns.c). The CUDA thread's owner keeps a communicator until it is destroyed, or as
 * long as the CUDA thread. ---- */

/* Connect the ranks of a process set, or end their communicator, in its turn. The CUDA thread forgets a communicator that it
 * ended. */
void cuda_thread_connect_communicator(cuda_thread *t, communicator *c);
void cuda_thread_destroy_communicator(cuda_thread *t, communicator *c);
/* Wait until a communicator has reached `stage` or failed, at most `ns` nanoseconds; returns the stage that it has reached. */
uint32_t cuda_thread_await_stage(cuda_thread *t, communicator *c, uint32_t stage, uint64_t ns);

/* ---- frozen passes (freezing.c). Each has one request at a time. ---- */

/* Return a new pass over these tensors, whose parts are as an item's; NULL without memory. The owner frees it after the CUDA
 * thread. */
frozen_pass *cuda_thread_new_pass(const cuda_thread *t, int op, double prescale, double postscale, const device_part *parts,
                                  int n_parts, const device_row *rows, int n_rows);
void cuda_thread_free_pass(frozen_pass *p);
/* Have the CUDA thread allocate what the pass needs on this rank. Once all ranks have done so, cuda_thread_connect_pass makes
 * what they need together. The first pass connects the ranks by `id`; NULL: they are connected. */
void cuda_thread_allocate_pass(cuda_thread *t, frozen_pass *p);
void cuda_thread_connect_pass(cuda_thread *t, frozen_pass *p, const ncclUniqueId *id);
/* Have the CUDA thread enqueue the pass on a stream of the program, behind earlier work. */
void cuda_thread_replay_pass(cuda_thread *t, frozen_pass *p, void *stream);
/* Wait for the end of the last request, at most `ns` nanoseconds; returns whether it has ended. */
int cuda_thread_await_pass(cuda_thread *t, frozen_pass *p, uint64_t ns);

#endif
