/* The control segment: words that the processes of one world share. docs/architecture/protocol.md says who writes which.
 *
 *   header | coordinator | schedule ring | one page group per rank | the slots of every rank
 *
 * The segments of process sets follow in the same file, each laid out like the world's. The file is a sparse memfd: parts that
 * no process touches cost nothing. Any change of a declaration changes engine_layout(), and ranks with different layouts refuse
 * each other.
 */
#ifndef ENGINE_SHARED_LAYOUT_H
#define ENGINE_SHARED_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "engine_ext/kernels/kernels.h"
#include "engine_ext/platform/hash.h"
#include "engine_ext/shared/names.h"

/* Declares what processes share, and keeps the declaration's text, with macros replaced and without comments. engine_layout()
 * hashes that text, so no declaration inside can be missed. */
#define SHARED(...)                                              \
  __VA_ARGS__                                                    \
  static const char SHARED_TEXT[] = TEXT_OF(__VA_ARGS__);
#define TEXT_OF(...) TEXT_AS_IT_IS(__VA_ARGS__)
#define TEXT_AS_IT_IS(...) #__VA_ARGS__

SHARED(

enum {
  ENGINE_PROTOCOL = 17,
  MAX_RANKS = 256,
  COORDINATOR = 0,             /* the rank that coordinates, in a world and in every process set */
  MAX_DIMS = 13,
  DIM_SPARSE = 10,             /* index in dims of a sparse tensor: number of its sparse dimensions */
  DIM_MOVED = ENGINE_DTYPES,   /* index in dims of a gathered group: number of elements of the dtypes that are not reduced */
  DIM_DIGEST = 12,             /* index in dims of a group: digest of the dtypes and shapes of its tensors */
  DIM_FAULT = 11,              /* index in dims of a sparse tensor with a fault: the index, or the entry's number, at fault */
  IDS = 16384,                 /* most names that travel as one bit */
  ID_WORDS = IDS / 64,
  RING_WORDS = 1 << 17,        /* 64-bit words of the schedule ring: 1 MiB */
  BATCH_ITEMS = 8192,          /* most operations in one entry, which fits the ring even with the rows of MAX_RANKS */
  REQUEST_BYTES = 1 << 18,     /* bytes of the request ring of one rank */
  NAME_BYTES = 1024,           /* most bytes of a tensor's name */
  REASON_BYTES = 1024,         /* longest text beside an abort */
  MAX_GROUP = 1 << 20,         /* most tensors of a group */
  FAILURE_BYTES = 384,         /* most bytes of a text about a call that failed on a rank */
  SLOTS = 4,                   /* slots of one rank: number of chunks that it may be ahead of the slowest */
  SLOT_BYTES = 1 << 20,        /* bytes of one slot: the largest chunk */
  MAX_SOCKETS = 8,             /* most connections of one lane, between two ranks on different hosts */
  DOORS = 4,                   /* doors of a rank, by index: SLEEP_ENGINE, SLEEP_WAITER, DOOR_THREAD; 0 is not used */
  DOOR_THREAD = 3,             /* in the world's segment: a process's engine thread sleeps there for the world and its sets */
  COORDINATOR_OFFSET = 4096,   /* bytes from the segment's start to the coordinator's page; likewise the next two */
  RING_OFFSET = COORDINATOR_OFFSET + 4096,
  PAGES_OFFSET = RING_OFFSET + RING_WORDS * 8
};
/* Parts of words and names that ranks read of each other. */
enum {
  UNNAMED = 256,               /* unnamed operations are called `kind.noname.N`, N being their number modulo this */
  UNNAMED_SHIFT = 56,          /* in rank_page.waits_unnamed: bits above hold the kind */
  ARRIVAL_LAST_BITS = 12,      /* in an arrival (segment.pxd: arrival_last): low bits, the rank that was last, plus 1 */
  ARRIVAL_WAIT_BITS = 20       /* in an arrival, the next bits: microseconds until the batch was closed */
};

enum { KIND_LIST(AS_NUMBER) KINDS };
enum { ALGORITHM_LIST(AS_NUMBER) ALGORITHMS };
enum { ENTRY_LIST(AS_NUMBER) };
enum { LAYOUT_LIST(AS_NUMBER) };
enum { STORES_LIST(AS_NUMBER) STORES };
enum { BETWEEN_LIST(AS_NUMBER) BETWEENS };
enum { CAUSE_LIST(AS_NUMBER) CAUSES };
/* Faults for which an operation cannot be done, whatever other ranks submit: they are reported, and no rank waits. FAULT_INDEX
 * and FAULT_ORDER belong to a sparse tensor. FAULT_CALL: the call failed on this rank before it submitted anything. */
enum { FAULT_NONE, FAULT_INDEX, FAULT_ORDER, FAULTS, FAULT_CALL = FAULTS };
enum {
  WIRE_LIST(AS_NUMBER)
  WIRES,
  WIRE_TUNED8 = 254,           /* of a name, never of an entry that moves data: it travels as the knob `compression` says */
  WIRE_TUNED = 255             /* likewise, but as bf16 where the knob says fp8 */
};
/* rank_page.asleep: the door at which a thread of the rank sleeps, and what wakes it besides a new entry. */
enum {
  SLEEP_ENGINE = 1,            /* the engine thread, with the count of door 1 of this engine; it sleeps at DOOR_THREAD */
  SLEEP_WAITER = 2,            /* a caller, at door 2 */
  SLEEP_DOORS = 3,             /* mask of the two */
  SLEEP_IN_ENTRY = 4,          /* an entry is in progress: progress of other ranks wakes it */
  SLEEP_CYCLE = 8,             /* coordinator: a batch is open, and the sleep ends with the cycle; who relays to it: likewise */
  SLEEP_FULL = 16,             /* coordinator: the schedule is full until cursors pass; also a rank that relays cursors to it */
  SLEEP_RELAY = 32,            /* who relays to a coordinator on another host: submissions and waits of this host wake it */
  SLEEP_COUNT_SHIFT = 8        /* bits above: the door's count at the announcement; if it has moved, some thread has rung */
};
/* Values of engine_entry.flags. */
enum {
  ENTRY_NEEDS_PACK = 1,        /* a shared entry in which some rank must write before others read */
  ENTRY_ALIGN = 4,             /* a barrier that makes the ranks' numbers of unnamed operations equal: dims has the largest
                                * number of each kind */
  ENTRY_FROZEN = 8,            /* a frozen batch: gradients on GPUs that travel together in every pass */
  ENTRY_MEMBERS = 2            /* rank `id` first broadcasts the shapes of the groups' tensors, for ranks that have joined */
};

/* The description of one operation, on which the ranks must agree. Zero-filled before it is set, and compared as bytes. */
typedef struct engine_meta {
  uint8_t kind, dtype, op, layout; /* KIND_*; dtype and op as numbered in kernels.h; LAYOUT_* */
  int32_t root;                /* broadcast: a rank of the world; sparse tensor with a fault: the dimension; reduction: 1 where an
                                * optimizer submits gradients that came after backward, else 0. In an ERROR with FAULT_CALL:
                                * 1 + a rank that waits for ranks that wait for the operation; 0: none */
  double prescale, postscale;  /* factors of the inputs and of the result; 1: not scaled */
  int64_t shared;              /* offset in the arena, the same on every rank; -1: a private tensor */
  uint8_t wire;                /* WIRE_*: the dtype in which floats travel; 0: their own */
  uint8_t fault;               /* FAULT_* */
  uint8_t device;              /* 1: the tensor is in the memory of a GPU; 0: in the host's */
  uint8_t reserved[5];
  uint32_t ndim, group;        /* number of dimensions; number of tensors in a group, 0: one tensor and no group */
  /* Allgather, all-to-all: dims[0] is 0, as it may differ between ranks. Group: the number of elements of each dtype (in an
   * allgather: in one row of each tensor, with one number for all dtypes that are not reduced), and a digest of dtypes and
   * shapes in order. Sparse tensor, which is gathered as a group of indices and values: its shape, the number of its sparse
   * dimensions, and with a fault the index, or the number of the entry, at fault. */
  int64_t dims[MAX_DIMS];
} engine_meta;

/* A rank's request: the full description of an operation, on the rank's request ring. */
typedef struct engine_request {
  uint32_t bytes;              /* length of the whole record, a multiple of 8; 0: the reader goes on at the ring's start */
  uint16_t name_bytes, absent; /* length of the name; 1: submitted without a tensor, 0: with one */
  int64_t rows;                /* allgather: number of this rank's rows; barrier: 1 if this rank may align after it */
  uint64_t submitted;          /* time of the submission, by the coordinator's clock: nanoseconds, monotonic; 0: not known */
  uint32_t text_bytes;         /* length of the text of a failed call */
  uint32_t optimizer;          /* 1 + number of the optimizer whose gradient this is; 0: no gradient */
  int32_t turn;                /* number of a process set that wants a turn on the GPUs, in a request without a name; else 0 */
  uint32_t reserved;
  engine_meta meta;
  /* the name follows; with FAULT_CALL, a text behind it */
} engine_request;

/* Knobs: settings that rank 0 may change while the engine runs. A field has the name of its setting (engine/config/config.py). */
typedef struct engine_knobs {
  uint64_t fusion_threshold;   /* bytes */
  double cycle_time_ms;
  uint32_t version;            /* number of changes since the engine's start */
  uint32_t chunk_bytes;        /* most bytes of a chunk */
  uint8_t stores;              /* STORES_*; STORES_AUTO: the faster kind, as measured */
  uint8_t compression;         /* the WIRE_* that WIRE_TUNED and WIRE_TUNED8 stand for */
  uint8_t sockets_per_lane;    /* number of connections of a lane in use; a larger one than were opened: all */
  uint8_t between_hosts;       /* BETWEEN_* */
  uint8_t padding[4];
} engine_knobs;

/* An entry of the schedule, written by the coordinator before it publishes `tail`. */
typedef struct engine_entry {
  uint32_t words;              /* length of the whole entry in 64-bit words */
  uint8_t type, kind, algorithm, stores; /* ENTRY_*, KIND_*, ALGORITHM_*, STORES_* */
  uint32_t items, flags;       /* number of operations; ENTRY_NEEDS_PACK and the other flags */
  uint64_t sequence;           /* number of the entry in the schedule, from 0 */
  uint64_t bytes;              /* BATCH: bytes of its tensors; ERROR: bytes of its text */
  engine_knobs knobs;          /* in force when the entry was appended: all ranks see a change at the same entry */
  uint32_t chunk, reserved;    /* bytes of one chunk of this entry */
  int32_t id, name_bytes;      /* id and length of the name. JOINED: id is the last rank to join; TURN: the process set; BATCH:
                                * see ENTRY_MEMBERS */
  /* Times of the coordinator's clock in nanoseconds, monotonic. */
  uint64_t closed;             /* when a recorded BATCH or SKIP was closed; 0: it is not recorded */
  uint64_t earliest;           /* when the first rank submitted the last operation of a BATCH; 0: not counted */
  /* A length of time, which any clock measures alike. */
  uint64_t arrival;            /* with `earliest`: which rank submitted that operation last, and how much later, packed as an
                                * arrival (segment.pxd) without the wait; 0: not known */
  engine_meta meta;            /* description of its operations, which are alike except for shapes */
  /* BATCH, SKIP: uint32 ids[items], padded to 8 bytes; an allgather adds uint64 rows[size]. DEFINE: the name. ERROR: name, text.
   * With `closed`, the last words are uint64 arrivals[items]: see lateness.pyx. */
} engine_entry;

/* The first page of a segment. Written as the segment is made, except for the fields with another writer. */
typedef struct segment_header {
  uint64_t magic, layout, bytes;
  uint32_t protocol, size, generation, reserved;
  uint64_t end;                /* in the world's: offset in the file at which the next segment of a process set begins; added
                                * to atomically */
  uint64_t members;            /* in a process set's: digest of its ranks, set by the first one to enter; 0: none has entered */
  uint32_t closed;             /* in a process set's: number of this host's ranks that touch it no more; the last gives its
                                * memory back */
  _Alignas(64) uint64_t abort; /* culprit + 1 | cause << 16 | reporter << 32, set by one compare-and-swap; 0: no failure */
  uint64_t claim;              /* the same, for a failure that this host claims and the coordinator's host has to judge; unused
                                * on that host */
  uint32_t departures;         /* number of ranks that have left: each adds 1 after it has set its own `left` */
  uint32_t state_notices;      /* on the coordinator's host: number of changes of ranks' states that other hosts have to know */
  _Alignas(64) uint64_t ahead; /* with `clocked`: nanoseconds by which the coordinator's clock is ahead of this host's, modulo
                                * 2^64. Written by this host's leader if the coordinator is on another host, like the next two */
  uint64_t ahead_error;        /* greatest error of `ahead`: nanoseconds */
  uint32_t clocked;            /* 1: the clocks have been compared, and `ahead` is valid */
} segment_header;

/* The coordinator's words. It alone writes them; on other hosts, the network thread that receives them. */
typedef struct coordinator_page {
  _Alignas(64) uint64_t tail;  /* schedule words ever appended */
  _Alignas(64) uint64_t drained[MAX_RANKS]; /* by rank: bytes ever read from its request ring */
  _Alignas(64) uint32_t recording; /* 1: a timeline is recorded, or lateness counted, so ranks write `brought` when they submit */
  uint32_t schedule_full;      /* 1: the coordinator appends nothing before cursors have passed */
  uint32_t over;               /* 1: the coordinator's rank leaves, and appends no more */
} coordinator_page;

/* The words of one rank, which that rank alone writes, except `door`; on other hosts, the network thread that receives them. */
typedef struct rank_page {
  _Alignas(64) uint64_t arrivals; /* number of submissions */
  uint64_t waits;              /* number of changes of awaited, wait_all and wait_requests */
  uint64_t request_head;       /* bytes ever written to `requests` */
  uint64_t steps;              /* number of optimizer steps that have ended on this rank */
  uint32_t wait_all, wait_requests, left; /* number of threads that wait for all in flight; 1: one waits for a name without an
                                           * id; 1: left in order */
  uint32_t blocked;            /* number of threads that have waited in this world or set for longer than a tick */
  uint32_t overdue;            /* (id + 1) << 1 | 1 if the stall limit is over, of an overdue operation; 0: none. The
                                * coordinator, which knows who waits for what, answers it */
  uint32_t started;            /* 1: its init() has ended; not sent to other hosts, like `entered` */
  uint32_t entered;            /* in a process set's: 1: the rank has entered the set, which it does once */
  _Alignas(64) uint64_t joined; /* the join in which this rank is, the first being 1; 0: it has not joined. Other ranks read it
                                 * whenever they submit, so its line has no words that change often */
  uint64_t joined_at;          /* when it joined: nanoseconds, monotonic, by the coordinator's clock; 0: not known */
  _Alignas(64) uint32_t asleep; /* SLEEP_* and the door's count; 0: a thread of the rank is awake in the driver's role */
  uint32_t blocked_anywhere;   /* sum of `blocked` over the world and all process sets; in pages of the world alone */
  uint64_t need[3];            /* with SLEEP_IN_ENTRY: numbers of chunks packed, reduced, copied on another rank at which to
                                * wake this one */
  _Alignas(64) uint64_t unnamed[KINDS]; /* by kind: number of unnamed operations that this rank has submitted */
  uint64_t waits_unnamed;      /* (kind + 1) << UNNAMED_SHIFT | number (from 0) of the unnamed operation for which the rank's
                                * only thread has waited longer than a tick; 0: none */
  _Alignas(64) uint32_t door[DOORS]; /* event counts (futexes) on which threads of this rank sleep; any rank adds to them */
  _Alignas(64) uint64_t cursor; /* schedule words that this rank has executed */
  _Alignas(64) uint64_t packed; /* number of chunks that have passed the stage, over the whole schedule; likewise the next two */
  uint64_t reduced, copied;
  _Alignas(64) char reason[REASON_BYTES]; /* text of an abort that this rank reports */
  _Alignas(64) uint64_t ready[ID_WORDS]; /* by id, a bit: submitted where it differs from the coordinator's phase */
  uint64_t absent[ID_WORDS], awaited[ID_WORDS]; /* by id, a bit: submitted without a tensor; by id, a bit: a thread waits for
                                                 * it */
  uint64_t rows[IDS];          /* by id: engine_request.rows of the last submission */
  uint64_t brought[IDS];       /* by id: time of the last submission while `recording`: as joined_at */
  _Alignas(4096) unsigned char requests[REQUEST_BYTES]; /* ring of engine_requests */
} rank_page;

/* The shape of a group's tensor, as it is sent to ranks that have joined (size_exchange.pyx); `dtype` as in kernels.h. */
typedef struct member_shape {
  int64_t rows, row_bytes, dtype;
} member_shape;

) /* SHARED */

#define SEGMENT_MAGIC 0x31656e69676e6567u /* "gengine1" */
_Static_assert(sizeof(segment_header) <= 4096 && sizeof(coordinator_page) <= 4096, "header and coordinator have a page each");
_Static_assert(sizeof(rank_page) % 4096 == 0, "pages of ranks are whole pages");
_Static_assert(sizeof(engine_entry) % 8 == 0 && sizeof(engine_request) % 8 == 0 && sizeof(engine_meta) % 8 == 0, "words");
_Static_assert(sizeof(engine_entry) / 8 + BATCH_ITEMS / 2 + MAX_RANKS + BATCH_ITEMS < RING_WORDS / 4, "the largest entry fits the ring");

/* A hash of every name, type and place of a field that another process would read, and of every number and constant above. The
 * sizes show how the compiler lays the text out. The functions below are not in it: a change of where something lies, or of the
 * parts of a word, needs a new ENGINE_PROTOCOL. */
static inline uint64_t engine_layout(void) {
  static const char numbers[] = TEXT_OF(ENGINE_DTYPE_LIST(ENGINE_DTYPE_NUMBER) ENGINE_DTYPE_LIST(ENGINE_DTYPE_BYTES)
                                        ENGINE_OP_LIST(ENGINE_OP_NUMBER));
  uint64_t h = fnv_text(fnv_text(fnv_begin(), SHARED_TEXT, sizeof SHARED_TEXT), numbers, sizeof numbers);
  return fnv(fnv(fnv(fnv(h, ENGINE_DTYPES), sizeof(rank_page)), sizeof(engine_entry)), sizeof(engine_request));
}

static const char *const KIND_NAMES[] = {KIND_LIST(AS_NAME)};
static const char *const ALGORITHM_NAMES[] = {ALGORITHM_LIST(AS_NAME)};
static const char *const ENTRY_NAMES[] = {ENTRY_LIST(AS_NAME)};
static const char *const LAYOUT_NAMES[] = {LAYOUT_LIST(AS_NAME)};
static const char *const STORES_NAMES[] = {STORES_LIST(AS_NAME)};
static const char *const BETWEEN_NAMES[] = {BETWEEN_LIST(AS_NAME)};
static const char *const WIRE_NAMES[] = {WIRE_LIST(AS_NAME)};
static const char *const CAUSE_NAMES[] = {CAUSE_LIST(AS_NAME)};

_Static_assert((int)DIM_MOVED < (int)DIM_DIGEST && (int)DIM_DIGEST < (int)MAX_DIMS, "every dtype");
_Static_assert((int)KINDS <= (int)MAX_DIMS, "a barrier tells a number for every kind");
/* Return whether tensors of `dtype` are compressed by a wire: floats that are wider than what travels. */
static inline int wire_compresses(int wire, int dtype) {
  if (wire == WIRE_FP8 || wire == WIRE_TUNED8) return dtype <= ENGINE_FLOAT64;
  return wire != WIRE_NONE && (dtype == ENGINE_FLOAT32 || dtype == ENGINE_FLOAT64);
}
/* Return the dtype in which a tensor of `dtype` travels; `wire` is an entry's. */
static inline int wire_dtype(int wire, int dtype) {
  static const uint8_t dtypes[WIRES] = {
      [WIRE_FP16] = ENGINE_FLOAT16, [WIRE_BF16] = ENGINE_BFLOAT16, [WIRE_FP8] = ENGINE_FLOAT8_E4M3FN};
  return wire < WIRES && wire_compresses(wire, dtype) ? dtypes[wire] : dtype;
}
/* Add the bytes of `rows` rows to `total`. Return 0, and leave `total`, if no rank can have so many. All numbers that other
 * ranks have sent are multiplied and added here, so that nothing wraps. */
static inline int add_bytes(uint64_t *total, int64_t rows, uint64_t row_bytes) {
  const uint64_t most = (uint64_t)1 << 46;
  uint64_t bytes;
  if (rows < 0 || __builtin_mul_overflow((uint64_t)rows, row_bytes, &bytes) || bytes > most || *total > most - bytes) return 0;
  *total += bytes;
  return 1;
}
/* Like add_bytes, for the bytes that a tensor of a group takes up in a gathered result, padded to `alignment`. */
static inline int add_padded_bytes(uint64_t *total, int64_t rows, uint64_t row_bytes, uint64_t alignment) {
  uint64_t bytes = 0;
  return add_bytes(&bytes, rows, row_bytes) && add_bytes(total, (int64_t)((bytes + alignment - 1) / alignment), alignment);
}
/* The parts behind the header of a BATCH: the ids of its members, and in an allgather the rows of each rank. */
static inline const int32_t *entry_ids(const engine_entry *entry) { return (const int32_t *)(entry + 1); }
static inline const int64_t *entry_rows(const engine_entry *entry) { return (const int64_t *)(entry + 1) + (entry->items + 1) / 2; }

/* Return the bytes of a segment for `size` ranks. */
static inline uint64_t segment_bytes(uint32_t size) {
  return PAGES_OFFSET + (uint64_t)size * (sizeof(rank_page) + (uint64_t)SLOTS * SLOT_BYTES);
}
static inline coordinator_page *segment_coordinator(segment_header *h) {
  return (coordinator_page *)((char *)h + COORDINATOR_OFFSET);
}
static inline uint64_t *segment_schedule(segment_header *h) { return (uint64_t *)((char *)h + RING_OFFSET); }
static inline rank_page *segment_page(segment_header *h, int rank) {
  return (rank_page *)((char *)h + PAGES_OFFSET + (size_t)rank * sizeof(rank_page));
}
/* Return the slot in which a rank offers its chunk number `chunk`. */
static inline char *segment_slot(segment_header *h, int rank, uint64_t chunk) {
  return (char *)h + PAGES_OFFSET + h->size * sizeof(rank_page) + ((size_t)rank * SLOTS + chunk % SLOTS) * SLOT_BYTES;
}
#endif
