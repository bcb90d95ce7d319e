/* An open GPU, as the other planes see it: what they hand to the lane, and the functions by which they do.
 *
 * Nothing of the plane is loaded before a GPU is opened, so others reach it through this struct alone. docs/architecture/gpu.md
 * says which thread calls what.
 */
#ifndef ENGINE_GPU_DEVICE_H
#define ENGINE_GPU_DEVICE_H

#include <stdint.h>

typedef struct device device;
typedef struct device_item device_item;

enum {
  DEVICE_WHY = 512,        /* bytes of the text of what failed */
  DEVICE_OUTSTANDING = 64, /* most items that are enqueued and that the device has not passed */
  DEVICE_NAME = 64         /* bytes of the name of what travels, cut if it is longer */
};

/* An event on the stream of whoever has submitted tensors: they are ready when the device has passed it. */
typedef struct device_mark {
  struct device_mark *next; /* in the pool of those that nobody uses */
  void *event;
  int timed; /* its event tells the time, and what is waited for by it is a sample; there are few such marks */
  int held;  /* the lane's: a sample has yet to read it, so it is not in the pool */
} device_mark;

/* What is timed of a sampled entry, and of a step; stage_names in names.h. */
enum {
  DEVICE_QUEUE,   /* from when one of its tensors was ready to when the lane's stream came to it */
  DEVICE_PACK,
  DEVICE_NCCL,    /* among the ranks, reductions in rank order included */
  DEVICE_UNPACK,
  DEVICE_EXPOSED, /* of a step, and not of an entry: how long the program's stream stood where it waits for its gradients */
  DEVICE_STAGES,
  DEVICE_SLICES = 32 /* most parts of a sampled entry */
};

/* A part of a sampled entry: times by the host's clock, as far as the lane knows how the device's compares. */
typedef struct device_slice {
  int stage;
  uint64_t begun, ended;
} device_slice;

/* Durations by the device's clock. An entry has all stages but the last, a step that one alone. */
typedef struct device_sample {
  uint64_t sequence, bytes;  /* of the entry */
  uint64_t ns[DEVICE_STAGES];
  unsigned has;              /* bit k: there is stage k */
  uint64_t error_ns;         /* by which slices may be early or late on the host's clock, drift aside */
  int n_slices;              /* 0: it is not known when they were */
  device_slice slices[DEVICE_SLICES];
} device_sample;

/* One tensor in the slab. The kernels read it as it lies (kernels.cu, `row`). */
typedef struct device_row {
  uint64_t tensor; /* its address; 0: this rank has none */
  uint64_t offset; /* where it lies in the slab, in bytes */
  uint64_t bytes;  /* how many it takes there */
} device_row;

/* Rows of one dtype that travel in one dtype. Their offsets count from the part's beginning. */
typedef struct device_part {
  int dtype, wire;   /* enum engine_dtype */
  int begin, end;    /* rows of the item */
  uint64_t bytes;    /* of the slab: up to the end of the last row */
  uint64_t identity; /* of the reduction in `wire`, repeated to eight bytes: what a rank without a tensor contributes */
  uint64_t place;    /* address at which all of it is wanted, laid out as in the slab, and which nobody else uses; 0: there is none */
} device_part;

/* A tensor of which ranks get rows as they are, one rank's behind the other's. */
typedef struct device_transfer {
  uint64_t source, target;   /* addresses; 0: this rank has none, and does not want what comes */
  uint64_t *sent, *received; /* bytes by rank; of an allgather, which sends the same to all, `sent` is not looked at */
} device_transfer;

/* What an item does. Those from DEVICE_TURN on have no ticket. */
enum {
  DEVICE_REDUCE,   /* every rank gets the reduction of what all have */
  DEVICE_SPREAD,   /* every rank gets the tensors of `root` */
  DEVICE_SCATTER,  /* every rank gets its part of the reduction: there is a part for each rank, of each dtype in turn */
  DEVICE_GATHER,   /* every rank gets what all have: transfers */
  DEVICE_EXCHANGE, /* every rank gets what each has for it: one transfer */
  DEVICE_TURN,     /* the lane's own: in the order of the world's items, the place of the next one of a process set */
  DEVICE_CONNECT,  /* likewise: connect the ranks of a process set, or part them */
  DEVICE_PART,
  DEVICE_FREEZE,   /* the lane's own: allocate what a frozen pass needs, connect its ranks, or enqueue one on the program's stream */
  DEVICE_UNITE,
  DEVICE_REPEAT
};

/* The items of a process set. Each has its turn among those of the world and of other sets, where the world's schedule says so. */
typedef struct device_queue {
  device *d;
  struct device_queue *next; /* the world's engine's list of them: under its lock, as what follows */
  int number;                /* of the set, equal on all ranks, from 1 on */
  int retired;               /* its last turn is asked for */
  uint64_t wanted, asked;    /* on the set's coordinator: turns that it needs, and those for which it has asked */
  uint64_t handed, given;    /* items that this rank has handed over, and turns that they were given */
  uint64_t since;            /* when the oldest that has none was handed over, as this process sees time pass */
} device_queue;

/* What is done for one entry of the schedule. Whoever makes one pushes it, and gets it back through `ended`. */
struct device_item {
  struct device_item *next;
  device_queue *queue; /* of a process set; NULL: the world's */
  uint64_t ticket;  /* given by the lane, in its order: 1 for the device's first item */
  uint64_t sequence, bytes; /* of the entry, for samples */
  int work;         /* DEVICE_* */
  int root;         /* of DEVICE_SPREAD: a rank of the world, or of the set */
  int op;           /* enum engine_op */
  int in_place;     /* there is one row, which every rank has, and which travels as it is: it needs no slab */
  int lacking;      /* some rank has no tensors, and no memory for what transfers bring: what comes there goes to its slab */
  uint32_t roomless; /* 1 until `give_room`: transfers have no targets yet; atomic */
  double prescale, postscale;
  device_part *parts;
  device_row *sources, *targets; /* by row; `tensor` may differ, the rest does not */
  device_transfer *transfers;
  device_mark **ready;           /* for which the device waits first */
  int n_parts, n_rows, n_transfers, n_ready, n_ops;
  void **ops; /* the owner's, as the next two */
  struct device_item *next_roomless;
  void *owner;
  /* Called by the lane once: all is enqueued, or `why` not. It frees the item. */
  void (*ended)(struct device_item *item, const char *why);
};

/* Functions that return an int return 0, or -1 and `why`; `turn` fails without memory alone. */
struct device {
  int ordinal;     /* the device's number among those that the process sees */
  void *call;      /* the name of the call of CUDA or NCCL that the lane is in; NULL: none; atomic */
  uint64_t pushed; /* items ever pushed; atomic, as the next four */
  uint64_t ended;  /* of these, how many the lane has ended, well or not */
  uint64_t enqueued; /* tickets whose work is on the lane's stream, which passes it in order */
  uint64_t passed; /* tickets that the device is known to have passed. UINT64_MAX: nothing of ours runs on it any more */
  uint64_t begun;  /* tickets to whose work the device is known to have come: all that it waits for first is ready */
  char names[DEVICE_OUTSTANDING][DEVICE_NAME]; /* by ticket, in turn: what travels; the owner's, under its engine's lock */
  /* Record an event on `stream`: the current one of the calling thread's framework. */
  int (*mark)(device *d, void *stream, device_mark **made, char *why);
  void (*unmark)(device *d, device_mark *mark); /* nobody will wait for it */
  void (*push)(device *d, device_item *item);
  /* The next item of a process set has its turn behind all of the world's that were pushed, and all turns that were given. */
  int (*turn)(device_queue *queue);
  /* Parcels have their targets now, and `ready` what makes these usable. */
  void (*give_room)(device *d, device_item *item);
  /* Let what is enqueued on `stream` from now on wait until the device has passed a ticket, which is enqueued. `measured`: how
   * long the stream stands there is a sample, if not too many are under way. */
  int (*wait)(device *d, void *stream, uint64_t ticket, int measured, char *why);
  /* Let the calling thread allocate, while others capture graphs: from now on nothing that it calls spoils a capture of theirs. */
  int (*relax)(device *d, char *why);
  int (*has_passed)(device *d, uint64_t ticket); /* 1 or 0; also 0 when the device does not tell */
  int (*frozen_rest)(device *d); /* whether it has passed all that has no ticket: frozen passes, and graphs of them */
  void (*stop)(device *d);                       /* the world has failed: what is not enqueued yet ends with that */
  void *owner;
  /* Called by the lane: the device has failed, whether there is an item or not. NULL: nobody wants to know. */
  void (*failed)(device *d, const char *why);
  /* Called by the lane: the device has passed so many more tickets; a sample has been read. NULL: nobody counts. */
  void (*went_on)(device *d, uint64_t tickets);
  void (*sampled)(device *d, const device_sample *sample);
};

#endif
