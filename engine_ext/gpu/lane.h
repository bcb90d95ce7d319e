/* The lane: the one thread of a process that makes the calls of CUDA and NCCL which may block, and what it has opened.
 *
 * Whoever owns it hands it one job at a time (`lane_begin`) and waits for its end (`lane_wait`) as long as it likes: a
 * call may hang in a driver for ever, and then the thread is left alone. Between a job's beginning and its end only the
 * lane touches what it has made, but for `cancelled` and `d.call`. When it is connected it takes items, too, from any
 * thread (`device.push`), and ends them in the order in which they were pushed.
 *
 * lane.c is the thread, turns.c the order of its items, opening.c its jobs, launching.c its items, moving.c those of them that
 * only move, freezing.c frozen passes, keeping.c what is theirs when graphs outlive the lane, sampling.c how long samples of items
 * take, streams.c what other threads may call.
 */
#ifndef ENGINE_GPU_LANE_H
#define ENGINE_GPU_LANE_H

#include "device.h"
#include "nccl.h"

#include "engine_ext/platform/atomics.h"
#include "engine_ext/platform/doors.h"
#include "engine_ext/platform/threads.h"

/* The functions, in the order of the three lists. It is filled as an array of addresses; 0: the library has no such. */
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

/* One of them: what it is called, and the first version of NCCL that has it; 0: it is the driver's. */
typedef struct lane_function {
  const char *name;
  int since;
} lane_function;
extern const lane_function lane_function_list[LANE_FUNCTIONS];

/* The jobs, in the order in which they are given. */
enum {
  LANE_NOTHING,
  LANE_IDENTIFY, /* which device it is: `identity`; nothing is made */
  LANE_PREPARE,  /* context, stream, kernels, memory, events */
  LANE_NAME,     /* on rank 0: ask for a communicator's `id` */
  LANE_CONNECT,  /* the communicator over all ranks. Those of process sets are connected by items */
  LANE_CLOSE,    /* end what there is of all that, whole or not; and the thread */
  LANE_JOBS
};

enum {
  LANE_KERNELS = 64,     /* most kernels */
  LANE_MARKS = 64,       /* marks that are made beforehand */
  LANE_SAMPLES = 4,      /* most entries under way that are sampled, each with a timed mark */
  LANE_STANDS = 8,       /* most steps under way of which it is measured how long their streams stand */
  LANE_DTYPES = 11,      /* those that are reduced */
  LANE_CANCELLED = -1
};

static const uint32_t LANE_CLOSED = 1u << 31;

/* The call that failed first. */
typedef struct lane_failure {
  const char *call; /* NULL: none has */
  int code;         /* a CUresult, or an ncclResult_t; LANE_CANCELLED: it was given up */
  char name[64];    /* of the code; of NCCL's there is none */
  char text[2048];  /* what the library says of it */
} lane_failure;

typedef struct lane_identity {
  int driver, devices; /* version, as 12090; how many devices this process sees */
  char name[128], pci[32];
  unsigned char uuid[16];
} lane_identity;

/* Numbers of kernels, in `kernels`; -1: there is none. */
typedef struct lane_kernels {
  int pack[LANE_DTYPES][LANE_DTYPES], unpack[LANE_DTYPES][LANE_DTYPES]; /* by the tensor's dtype, and the one that travels */
  int pack_bytes, unpack_bytes;
  int reduce[LANE_DTYPES];
} lane_kernels;

/* An entry that is sampled: timed events around its stages. The lane's own. */
typedef struct lane_sample {
  uint64_t ticket;         /* 0: there is none */
  uint64_t sequence, bytes;
  device_mark *mark;       /* of one of its tensors; timed */
  int n;                   /* stages so far; one that follows on itself is one */
  int stages[DEVICE_SLICES];
  CUevent events[DEVICE_SLICES + 1]; /* stage k lies between events k and k + 1 */
} lane_sample;

/* A wait of the program's stream that is measured. */
enum { STAND_FREE, STAND_TAKEN, STAND_RECORDED };
typedef struct lane_stand {
  uint32_t state;          /* STAND_*; atomic: FREE to RECORDED by who waits, back by the lane */
  CUevent before, behind;
} lane_stand;

/* How far a communicator of a process set is: it waits for its turn, is being connected, is whole, and is ended. */
enum { COMMUNICATOR_NEW, COMMUNICATOR_BEGUN, COMMUNICATOR_CONNECTED, COMMUNICATOR_PARTED, COMMUNICATOR_FAILED };

/* Ranks that exchange among themselves: all, or those of a process set. */
typedef struct communicator {
  device_queue queue;        /* first: of a process set, what others have of it */
  struct communicator *next; /* the lane's list */
  int rank, size;
  ncclUniqueId id;
  ncclComm_t comm;
  int connected;             /* it is whole */
  device_item *first, *last; /* items of a process set that wait for their turns, oldest first */
  device_item connecting, parting;
  uint32_t stage;            /* COMMUNICATOR_*: set by the lane; atomic */
} communicator;

/* What a frozen pass has of the device. */
typedef struct frozen_memory {
  struct frozen_memory *next;
  CUdeviceptr slab, device_tables;
  char *tables;            /* pinned */
  CUevent done;            /* recorded behind each pass that is not captured */
} frozen_memory;

typedef struct keeper keeper; /* keeping.c */

/* A frozen pass: a reduction of the same tensors each time, which the lane enqueues on a stream of the program's. That may be
 * captured into a CUDA graph, so what its work reads stays as it is, at the same addresses, until the lane is closed. */
typedef struct frozen_pass {
  device_item item;        /* first */
  struct frozen_pass *next; /* the lane's list */
  CUstream stream;         /* on which it is enqueued this time */
  frozen_memory *memory;
  ncclUniqueId id;         /* by which the ranks connect, if they have not yet */
  uint64_t slab_bytes, table_bytes;
  uint32_t ran, captured;  /* whether any ever was enqueued for the device to run at once, or into a graph; atomic */
  uint32_t ended;          /* the last job with it has; atomic */
  char why[DEVICE_WHY];    /* "": that went well */
} frozen_pass;

typedef struct lane {
  device d; /* first: what others have of the lane */
  lane_functions f;
  const char *image;       /* PTX, and the names of its kernels: the owner's */
  const char **names;
  int n_kernels;
  lane_kernels known;
  int ordered;             /* sums of all dtypes are made in rank order, as host memory's are; 0: by NCCL where it has them */
  uint64_t slab_bytes;     /* a multiple of 32 */
  uint64_t table_bytes;
  ncclUniqueId id;         /* after LANE_NAME */

  pthread_t thread;
  uint32_t door, ended;    /* rung for the lane; rung by it */
  uint32_t job;            /* LANE_*: set by the owner, LANE_NOTHING by the lane at the job's end */
  uint32_t cancelled;      /* by the owner: give up as soon as a call returns */
  void *pushed;            /* stack of items that the lane has not taken yet */
  device_item *first, *last; /* the lane's: items of the world, and turns of process sets, that it has taken, oldest first */
  uint64_t tickets;        /* the lane's: those that it has given */

  lane_failure failure;
  lane_identity identity;
  CUdevice device;
  CUcontext context;       /* the primary one, retained; NULL: not */
  CUstream stream;
  CUmodule module;
  CUfunction kernels[LANE_KERNELS];
  CUevent begun[DEVICE_OUTSTANDING], done[DEVICE_OUTSTANDING]; /* by ticket, in turn: recorded before the item's work, and behind */
  pthread_mutex_t marks_lock;
  uint32_t visitors;       /* threads of the program that are in calls; and LANE_CLOSED, when no more may come; atomic */
  device_mark *marks;      /* those that nobody uses; under their lock, as the next */
  int n_marks;             /* ever made */
  device_mark *timed;      /* those of them that are timed, and what decides who gets one; under their lock, too */
  uint32_t until_timed, drawn;
  lane_sample samples[LANE_SAMPLES];
  lane_sample *sampling;   /* that of the item which is being enqueued; NULL: it is none */
  lane_stand stands[LANE_STANDS];
  CUevent origin;          /* timed: the device passed it at `origin_ns` of the host's clock; 0: that is not known */
  uint64_t origin_ns, origin_error, compare_at; /* when clocks are compared next, at the earliest */
  CUdeviceptr slab;
  char *tables;            /* pinned: tables for kernels, a ring; and where the device has the same */
  CUdeviceptr device_tables;
  uint64_t table_head, table_tail;           /* bytes of the ring ever used, and those that the device has passed */
  uint64_t table_ends[DEVICE_OUTSTANDING];     /* by ticket, in turn: `table_head` behind the item */
  communicator world;
  communicator graphs;     /* all ranks' again, for frozen passes: it blocks, so that a capture has all when a call returns */
  frozen_pass *passes;     /* the lane's list of those that were made; atomic */
  keeper *keeper;          /* of what they have; NULL: none was made */
  communicator *communicators; /* those that it works with, whole or not: the last one first */
  communicator *at;        /* the one among whose ranks is worked now */
  int quiet;               /* after a failure: the communicators were ended, and the stream is empty or was given up */
  int left;                /* after LANE_CLOSE: work, or a call of a thread of the program, that did not end; nothing that it may use was freed */
} lane;

/* Start the thread; returns 0 or an errno. All of the struct is 0 but for what the owner has set. */
int lane_start(lane *l);
/* Hand it a job. The last one has ended. */
void lane_begin(lane *l, uint32_t job);
/* Wait at most so long; whether the job has ended. */
int lane_wait(lane *l, uint64_t ns);
/* Give up what is under way, and all that comes but for LANE_CLOSE. */
void lane_cancel(lane *l);
/* After LANE_CLOSE has ended: the thread's end. */
void lane_join(lane *l);

/* ---- process sets (turns.c). The lane's owner keeps a communicator until it is parted, or as
 * long as the lane. ---- */

/* Connect the ranks of a process set, or part them, in their turn; of one that is parted the lane knows nothing any more. */
void lane_connect(lane *l, communicator *c);
void lane_part(lane *l, communicator *c);
/* Wait at most so long until a communicator is so far, or has failed; what it has come to. */
uint32_t lane_await_stage(lane *l, communicator *c, uint32_t stage, uint64_t ns);

/* ---- frozen passes (freezing.c). One thing at a time is done with each. ---- */

/* A pass over these tensors, in parts as an item has them; NULL without memory. The owner frees it, after the lane's end. */
frozen_pass *lane_new_pass(const lane *l, int op, double prescale, double postscale, const device_part *parts, int n_parts,
                           const device_row *rows, int n_rows);
void lane_free_pass(frozen_pass *p);
/* Have the lane allocate what it needs; then, when all ranks have that, make what they need together. They are connected with the first
 * pass, by this id; NULL: they are. */
void lane_freeze(lane *l, frozen_pass *p);
void lane_unite(lane *l, frozen_pass *p, const ncclUniqueId *id);
/* Have the lane enqueue it on a stream of the program's, behind what is there. */
void lane_repeat(lane *l, frozen_pass *p, void *stream);
/* Wait at most so long until that has ended; whether it has. */
int lane_await_pass(lane *l, frozen_pass *p, uint64_t ns);

#endif
