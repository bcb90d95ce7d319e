/* An open GPU, as the other planes see it: the data that they pass to the CUDA thread, and the functions that they call.
 *
 * The GPU plane is loaded only when a GPU is opened, so the other planes reach it through this struct alone.
 * docs/architecture/gpu.md says which thread calls which function.
 */
#ifndef ENGINE_GPU_DEVICE_H
#define ENGINE_GPU_DEVICE_H

#include <stdint.h>

typedef struct device device;
typedef struct device_item device_item;

enum {
  DEVICE_WHY = 512,        /* bytes of an error text */
  DEVICE_OUTSTANDING = 64, /* most items that are enqueued and that the device has not passed */
  DEVICE_NAME = 64         /* bytes of a tensor's name; longer names are cut */
};

/* An event on the stream on which tensors were submitted: they are ready once the device has passed it. */
typedef struct device_mark {
  struct device_mark *next; /* in the pool of unused marks */
  void *event;
  int timed; /* 1: the event records the time, so an item with this mark is a sample; there are few such marks */
  int unread; /* 1: a sample has yet to read the mark, so `unmark` leaves it out of the pool; the CUDA thread alone writes it */
} device_mark;

/* Stages whose durations are measured; stage_names in names.h has their names. */
enum {
  DEVICE_QUEUE,   /* from when a tensor of the entry was ready until the CUDA thread's stream reached the entry */
  DEVICE_PACK,
  DEVICE_NCCL,    /* among the ranks, reductions in rank order included */
  DEVICE_UNPACK,
  DEVICE_EXPOSED, /* of a step, not of an entry: how long the program's stream stood still to wait for its gradients */
  DEVICE_STAGES,
  DEVICE_SLICES = 32 /* most parts of a sampled entry */
};

/* One part of a sampled entry: nanoseconds of the host's monotonic clock, converted from the device's clock. */
typedef struct device_slice {
  int stage;
  uint64_t begun, ended;
} device_slice;

/* Durations by the device's clock. An entry has all stages except DEVICE_EXPOSED; a step has that one alone. */
typedef struct device_sample {
  uint64_t sequence, bytes;  /* of the entry */
  uint64_t ns[DEVICE_STAGES];
  unsigned has;              /* bit k: stage k was measured */
  uint64_t error_ns;         /* largest error of the slices' times on the host's clock, drift not counted */
  int n_slices;              /* 0: the times of the slices are unknown */
  device_slice slices[DEVICE_SLICES];
} device_sample;

/* One tensor in the slab. The kernels read this struct in place (kernels.cu, `row`). */
typedef struct device_row {
  uint64_t tensor; /* its address; 0: this rank has none */
  uint64_t offset; /* its place in the slab, in bytes */
  uint64_t bytes;  /* its size in the slab */
} device_row;

/* Rows of one dtype that travel in one dtype. Their offsets count from the beginning of the part. */
typedef struct device_part {
  int dtype, wire;   /* enum engine_dtype: of the tensors, and of what travels */
  int begin, end;    /* rows of the item: [begin, end) */
  uint64_t bytes;    /* of the slab: up to the end of the last row */
  uint64_t identity; /* identity of the reduction in `wire`, repeated to eight bytes: contributed where a rank has no tensor */
  uint64_t place;    /* address where the whole result is wanted, laid out as the slab and used by nobody else; 0: none */
} device_part;

/* A tensor of rows that ranks get unchanged, in the order of the ranks that send them. */
typedef struct device_transfer {
  uint64_t source, target;   /* addresses; 0: this rank has no tensor, and does not want the result */
  uint64_t *sent, *received; /* bytes by rank; an allgather does not read `sent`, since it sends the same to all */
} device_transfer;

/* Kinds of work of an item. Items from DEVICE_TURN on have no ticket. */
enum {
  DEVICE_ALLREDUCE,   /* every rank gets the reduction of all ranks' tensors */
  DEVICE_BROADCAST,   /* every rank gets the tensors of `root` */
  DEVICE_REDUCESCATTER,  /* every rank gets its part of the reduction; for each dtype in turn, there is one part for each rank */
  DEVICE_ALLGATHER,   /* every rank gets the rows of all ranks: transfers */
  DEVICE_ALLTOALL, /* every rank gets the rows that each rank sends it: one transfer */
  /* The CUDA thread's own: */
  DEVICE_TURN,          /* among the world's items, the place of the next item of a process set */
  DEVICE_CONNECT,       /* connect the ranks of a process set */
  DEVICE_DESTROY,       /* destroy the communicator of a process set */
  DEVICE_ALLOCATE_PASS, /* allocate what a frozen pass needs */
  DEVICE_CONNECT_PASS,  /* connect the ranks of a frozen pass */
  DEVICE_REPLAY_PASS    /* enqueue a frozen pass on the program's stream */
};

/* The items of a process set. The world's schedule gives each its turn among the items of the world and of other sets. */
typedef struct device_queue {
  device *d;
  struct device_queue *next; /* list of the world's engine; like all fields below, under that engine's lock */
  int number;                /* of the set, equal on all ranks, from 1 on */
  int retired;               /* 1: the set's last turn has been requested */
  uint64_t wanted, asked;    /* on the set's coordinator: turns that the set needs, and turns that it has requested */
  uint64_t handed, given;    /* items that this rank has handed over, and turns that they were given */
  uint64_t since;            /* when the oldest item without a turn was handed over, in running time (platform/clock.h) */
} device_queue;

/* The work for one entry of the schedule. Its maker pushes it, and gets it back through `ended`. */
struct device_item {
  struct device_item *next;
  device_queue *queue; /* of a process set; NULL: the world's */
  uint64_t ticket;  /* number that the CUDA thread gives in its order: 1 for the device's first item */
  uint64_t sequence, bytes; /* of the entry, for samples */
  int work;         /* DEVICE_* */
  int root;         /* of DEVICE_BROADCAST: a rank of the world, or of the set */
  int op;           /* enum engine_op */
  int in_place;     /* 1: there is one row, which every rank has, and which travels in its own dtype: it needs no slab */
  int lacking;      /* 1: some rank has no tensors and no memory for the rows of transfers, which go to its slab instead */
  uint32_t unallocated; /* 1 until `set_targets`: transfers have no targets yet; atomic */
  double prescale, postscale;
  device_part *parts;
  device_row *sources, *targets; /* by row; equal except for `tensor` */
  device_transfer *transfers;
  device_mark **ready;           /* marks for which the device waits first */
  int n_parts, n_rows, n_transfers, n_ready, n_ops;
  void **ops; /* the owner's, like the next two fields */
  struct device_item *next_roomless;
  void *owner;
  /* The CUDA thread calls this once: NULL if everything is enqueued, or `why` it is not. The function frees the item. */
  void (*ended)(struct device_item *item, const char *why);
};

/* Functions that return an int return 0, or -1 and `why`, unless they say otherwise. `turn` fails only without memory. */
struct device {
  int ordinal;     /* the device's number among those that the process sees */
  void *call;      /* name of the CUDA or NCCL call that the CUDA thread is in; NULL: none; atomic */
  uint64_t pushed; /* items ever pushed; atomic, like the next four fields */
  uint64_t ended;  /* tickets that the CUDA thread has ended, with success or not */
  uint64_t enqueued; /* tickets whose work is on the CUDA thread's stream, which runs it in order */
  uint64_t passed; /* tickets that the device is known to have passed; UINT64_MAX: none of our work runs on it any more */
  uint64_t begun;  /* tickets whose work the device is known to have reached: all their marks have been passed */
  char names[DEVICE_OUTSTANDING][DEVICE_NAME]; /* ring of tensors' names, by ticket; the owner's, under its engine's lock */
  /* Record an event on `stream`, the current stream of the calling thread's framework. */
  int (*mark)(device *d, void *stream, device_mark **made, char *why);
  void (*unmark)(device *d, device_mark *mark); /* return a mark, for which nobody will wait, to its pool */
  void (*push)(device *d, device_item *item);   /* give the CUDA thread an item; any thread */
  /* Give the next item of a process set its turn: behind the world's items pushed so far and the turns given so far. */
  int (*turn)(device_queue *queue);
  /* Say that transfers have their targets now, and `ready` the marks from which these can be used. */
  void (*set_targets)(device *d, device_item *item);
  /* Have later work on `stream` wait until the device has passed an enqueued ticket. `measured`: the time that the stream
   * stands still there becomes a sample, unless too many are under way. */
  int (*wait)(device *d, void *stream, uint64_t ticket, int measured, char *why);
  /* Let the calling thread allocate while others capture graphs: from now on none of its calls spoils their captures. */
  int (*relax)(device *d, char *why);
  int (*has_passed)(device *d, uint64_t ticket); /* 1: the device has passed a ticket; 0: it has not, or this is unknown */
  int (*frozen_rest)(device *d); /* 1: the device has passed all work without a ticket: frozen passes and graphs of them */
  void (*stop)(device *d);                       /* the world has failed: have the CUDA thread give up what it has not enqueued */
  void *owner;
  /* The CUDA thread calls this when the device has failed, with or without an item. NULL: nobody wants to know. */
  void (*failed)(device *d, const char *why);
  /* The CUDA thread calls these when the device has passed `tickets` more, and when a sample was read. NULL: nobody counts. */
  void (*went_on)(device *d, uint64_t tickets);
  void (*sampled)(device *d, const device_sample *sample);
};

#endif
