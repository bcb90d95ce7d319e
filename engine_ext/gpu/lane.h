/* The lane: the one thread of a process that makes the CUDA and NCCL calls that may block, and everything that it has opened.
 *
 * The owner gives it one job at a time (`lane_begin`) and waits for its end (`lane_wait`) as long as it likes. A call may
 * hang in a driver forever; then the thread is abandoned. Between the beginning and the end of a job, only the lane touches
 * what it has made, except `cancelled` and `d.call`. Once connected, the lane also takes items from any thread
 * (`device.push`), and ends them in order: the world's as they were pushed, those of process sets in their turns.
 *
 * lane.c has the thread, turns.c the order of items, opening.c the jobs, launching.c the items, moving.c items that only move
 * data, freezing.c frozen passes, keeping.c their resources when graphs outlive the lane, sampling.c the durations of samples,
 * and streams.c the functions that other threads may call.
 */
#ifndef ENGINE_GPU_LANE_H
#define ENGINE_GPU_LANE_H

#include "device.h"
#include "nccl.h"

#include "engine_ext/platform/atomics.h"
#include "engine_ext/platform/doors.h"
#include "engine_ext/platform/threads.h"

/* The libraries' functions, in the order of the three lists. Filled as an array of addresses; 0: the library lacks it. */
typedef struct lane_functions {
#define X(name, parameters) CUresult(*name) parameters;
  CUDA_FUNCTIONS(X)
#undef X
#define X(name, parameters, since) ncclResult_t(*name) parameters;
  NCCL_FUNCTIONS(X)
#undef X
#define X(name, parameters, since) const char *(*name)parameters;
  NCCL_TEXTS(X)
#undef X
} lane_functions;

enum { LANE_FUNCTIONS = sizeof(lane_functions) / sizeof(void (*)(void)) };

/* A function's name, and the first version of NCCL that has it; 0: it belongs to the CUDA driver. */
typedef struct lane_function {
  const char *name;
  int since;
} lane_function;
extern const lane_function lane_function_list[LANE_FUNCTIONS];

/* The jobs, in the order in which they are given. */
enum {
  LANE_NOTHING,
  LANE_IDENTIFY, /* find out which device it is and fill in `identity`; creates nothing */
  LANE_PREPARE,  /* create context, stream, kernels, memory and events */
  LANE_NAME,     /* on rank 0: ask NCCL for a communicator's `id` */
  LANE_CONNECT,  /* create the communicator over all ranks; items create those of process sets */
  LANE_CLOSE,    /* destroy every resource, including partly initialized ones, and end the thread */
  LANE_JOBS
};

enum {
  LANE_KERNELS = 64,     /* most kernels */
  LANE_MARKS = 64,       /* marks that are made in advance */
  LANE_SAMPLES = 4,      /* most sampled entries in flight, each with a timed mark */
  LANE_STANDS = 8,       /* most steps in flight for which the time that their streams stand still is measured */
  LANE_DTYPES = 11,      /* dtypes that can be reduced */
  LANE_CANCELLED = -1
};

static const uint32_t LANE_CLOSED = 1u << 31;   /* bit of `visitors`: no more threads may enter */

/* The first call that failed. */
typedef struct lane_failure {
  const char *call; /* NULL: none has failed */
  int code;         /* a CUresult or an ncclResult_t; LANE_CANCELLED: the call was given up */
  char name[64];    /* name of the code; "" for NCCL, whose codes have none */
  char text[2048];  /* the library's explanation */
} lane_failure;

/* The device's identity, as LANE_IDENTIFY finds it. */
typedef struct lane_identity {
  int driver, devices; /* driver version, such as 12090; number of devices that this process sees */
  char name[128], pci[32];
  unsigned char uuid[16];
} lane_identity;

/* Numbers of kernels, as indices of `kernels`; -1: there is no such kernel. */
typedef struct lane_kernels {
  int pack[LANE_DTYPES][LANE_DTYPES], unpack[LANE_DTYPES][LANE_DTYPES]; /* by the tensor's dtype and the travelling dtype */
  int pack_bytes, unpack_bytes;
  int reduce[LANE_DTYPES];
} lane_kernels;

/* A sampled entry: timed events around its stages. The lane alone uses it. */
typedef struct lane_sample {
  uint64_t ticket;         /* 0: this slot is free */
  uint64_t sequence, bytes;
  device_mark *mark;       /* timed mark of one of the entry's tensors */
  int n;                   /* number of slices so far; consecutive pieces of one stage are one slice */
  int stages[DEVICE_SLICES];
  CUevent events[DEVICE_SLICES + 1]; /* slice k lies between events k and k + 1 */
} lane_sample;

/* A measured wait of the program's stream. */
enum { STAND_FREE, STAND_TAKEN, STAND_RECORDED };
typedef struct lane_stand {
  uint32_t state;          /* STAND_*; atomic: the waiting thread sets TAKEN, then RECORDED or, on failure, FREE; the lane FREE */
  CUevent before, behind;
} lane_stand;

/* States of a process set's communicator: waits for its turn, is being connected, is connected, was ended, has failed. */
enum { COMMUNICATOR_NEW, COMMUNICATOR_BEGUN, COMMUNICATOR_CONNECTED, COMMUNICATOR_PARTED, COMMUNICATOR_FAILED };

/* Ranks that communicate with each other: all ranks, or those of a process set. */
typedef struct communicator {
  device_queue queue;        /* first: the part that other planes see; of a process set only */
  struct communicator *next; /* the lane's list */
  int rank, size;
  ncclUniqueId id;
  ncclComm_t comm;
  int connected;             /* 1: it is complete and can be used */
  device_item *first, *last; /* items of a process set that wait for their turns, oldest first */
  device_item connecting, parting; /* the items DEVICE_CONNECT and DEVICE_PART of a process set */
  uint32_t stage;            /* COMMUNICATOR_*: set by the lane; atomic */
} communicator;

/* The resources of a frozen pass on the device. */
typedef struct frozen_memory {
  struct frozen_memory *next;
  CUdeviceptr slab, device_tables;
  char *tables;            /* pinned */
  CUevent done;            /* recorded behind each pass that is not captured */
} frozen_memory;

typedef struct keeper keeper; /* keeping.c */

/* A frozen pass: a reduction of the same tensors each time, which the lane enqueues on a stream of the program. That stream may
 * be captured into a CUDA graph, so everything that the pass reads stays unchanged, at the same addresses, until LANE_CLOSE. */
typedef struct frozen_pass {
  device_item item;        /* first */
  struct frozen_pass *next; /* the lane's list */
  CUstream stream;         /* stream on which it is enqueued this time */
  frozen_memory *memory;
  ncclUniqueId id;         /* id by which the ranks connect, unless they are connected */
  uint64_t slab_bytes, table_bytes;
  uint32_t ran, captured;  /* 1: it was ever enqueued to run at once; 1: it was ever captured into a graph; atomic */
  uint32_t ended;          /* 1: the last request for it has ended; atomic */
  char why[DEVICE_WHY];    /* why that request failed; "": it succeeded */
} frozen_pass;

typedef struct lane {
  device d; /* first: the part that other planes see */
  lane_functions f;
  const char *image;       /* PTX; it and the kernels' `names` belong to the owner */
  const char **names;
  int n_kernels;
  lane_kernels known;
  int ordered;             /* 1: sums of all dtypes are made in rank order, as in host memory; 0: by NCCL where it can */
  uint64_t slab_bytes;     /* a multiple of 32 */
  uint64_t table_bytes;
  ncclUniqueId id;         /* valid after LANE_NAME */

  pthread_t thread;
  uint32_t door, ended;    /* doors: rung to wake the lane; rung by the lane */
  uint32_t job;            /* LANE_*: set by the owner; the lane sets LANE_NOTHING at the job's end; atomic */
  uint32_t cancelled;      /* 1, set by the owner: give up as soon as a call returns; atomic */
  void *pushed;            /* stack of items that the lane has not taken yet; atomic */
  device_item *first, *last; /* the lane's: items of the world and turns of process sets that it has taken, oldest first */
  uint64_t tickets;        /* the lane's: number of tickets given */

  lane_failure failure;
  lane_identity identity;
  CUdevice device;
  CUcontext context;       /* the primary context, retained; NULL: not retained */
  CUstream stream;
  CUmodule module;
  CUfunction kernels[LANE_KERNELS];
  CUevent begun[DEVICE_OUTSTANDING], done[DEVICE_OUTSTANDING]; /* rings by ticket: recorded before and behind the item's work */
  pthread_mutex_t marks_lock;
  uint32_t visitors;       /* number of program threads that are in calls, plus LANE_CLOSED once no more may enter; atomic */
  device_mark *marks;      /* pool of unused marks without times; under marks_lock */
  int n_marks;             /* number of marks that the lane has made */
  device_mark *timed;      /* pool of unused timed marks; under marks_lock, like the next two fields */
  uint32_t until_timed, drawn; /* submissions until the next timed mark; state of the random numbers */
  lane_sample samples[LANE_SAMPLES];
  lane_sample *sampling;   /* sample of the item that is being enqueued; NULL: it is not sampled */
  lane_stand stands[LANE_STANDS];
  CUevent origin;          /* timed event, which the device passed at `origin_ns` */
  uint64_t origin_ns, origin_error, compare_at; /* host's clock: time of `origin` (0: unknown), its error, next comparison */
  CUdeviceptr slab;
  char *tables;            /* pinned: ring of tables for kernels; `device_tables` is its copy on the device */
  CUdeviceptr device_tables;
  uint64_t table_head, table_tail;           /* bytes of the ring ever used, and those that the device has passed */
  uint64_t table_ends[DEVICE_OUTSTANDING];     /* ring by ticket: `table_head` behind the item */
  communicator world;
  communicator graphs;     /* of all ranks, for frozen passes: its calls block, so a capture is complete when one returns */
  frozen_pass *passes;     /* list of the passes that the lane has made; atomic */
  keeper *keeper;          /* holder of their resources; NULL: there is no pass */
  communicator *communicators; /* communicators in use, complete or not, the newest first */
  communicator *at;        /* communicator of the work in progress */
  int quiet;               /* 1, after a failure: the communicators were ended, and the stream is empty or was given up */
  int left;                /* 1, after LANE_CLOSE: some work or call did not end, and nothing that it may use was freed */
} lane;

/* Start the thread; returns 0 or an errno. Fields that the owner has not set are 0. */
int lane_start(lane *l);
/* Give the lane a job, once the last one has ended. */
void lane_begin(lane *l, uint32_t job);
/* Wait for the job's end, at most `ns` nanoseconds; returns whether it has ended. */
int lane_wait(lane *l, uint64_t ns);
/* Give up the current job and all later ones except LANE_CLOSE. */
void lane_cancel(lane *l);
/* Join the thread, after LANE_CLOSE has ended. */
void lane_join(lane *l);

/* ---- process sets (turns.c). The lane's owner keeps a communicator until it is parted, or as
 * long as the lane. ---- */

/* Connect the ranks of a process set, or end their communicator, in its turn. The lane forgets a communicator that it ended. */
void lane_connect(lane *l, communicator *c);
void lane_part(lane *l, communicator *c);
/* Wait until a communicator has reached `stage` or failed, at most `ns` nanoseconds; returns the stage that it has reached. */
uint32_t lane_await_stage(lane *l, communicator *c, uint32_t stage, uint64_t ns);

/* ---- frozen passes (freezing.c). Each has one request at a time. ---- */

/* Return a new pass over these tensors, whose parts are as an item's; NULL without memory. The owner frees it after the lane. */
frozen_pass *lane_new_pass(const lane *l, int op, double prescale, double postscale, const device_part *parts, int n_parts,
                           const device_row *rows, int n_rows);
void lane_free_pass(frozen_pass *p);
/* Have the lane allocate what the pass needs on this rank. Once all ranks have done so, lane_unite makes what they need
 * together. The first pass connects the ranks by `id`; NULL: they are connected. */
void lane_freeze(lane *l, frozen_pass *p);
void lane_unite(lane *l, frozen_pass *p, const ncclUniqueId *id);
/* Have the lane enqueue the pass on a stream of the program, behind earlier work. */
void lane_repeat(lane *l, frozen_pass *p, void *stream);
/* Wait for the end of the last request, at most `ns` nanoseconds; returns whether it has ended. */
int lane_await_pass(lane *l, frozen_pass *p, uint64_t ns);

#endif
