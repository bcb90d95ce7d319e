/* Frozen passes: the lane enqueues the same reduction each time, on a stream of the program's, which may be captured.
 *
 * Nothing is negotiated and no event is waited for but the pass's own: the tensors are ready when the stream comes to it, and the stream
 * goes on when it is over. A graph reads tables and slab whenever it is launched, of which the lane hears nothing, so each pass has its
 * own until the lane is closed. A communicator that blocks has enqueued all when a call returns; with one that does not, a thread of
 * NCCL's would enqueue it, whose calls may spoil the capture.
 */
#include "calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- for whoever owns it ---- */

/* Bytes of tables that a pass fills: each row for each piece that it is in, to pack and to unpack; and while a table is made, room for all
 * rows. A table is a quarter at most (run_over in launching.c). */
static uint64_t bytes_of_tables(uint64_t slab_bytes, const device_part *parts, int n_parts, int n_rows) {
  uint64_t rows = 1 + (uint64_t)n_rows, bytes = 3 * rows * sizeof(device_row), largest = 0;
  for (int k = 0; k < n_parts; k++)
    for (uint64_t low = 0; low < parts[k].bytes; low += slab_bytes) {
      uint64_t table = lane_table_bytes(2, lesser(parts[k].bytes - low, slab_bytes));
      bytes += 2 * table;
      if (table > largest) largest = table;
    }
  largest += rows * sizeof(device_row);
  return bytes > 4 * largest ? bytes : 4 * largest;
}

static uint64_t longest(const device_part *parts, int n_parts) {
  uint64_t most = 0;
  for (int k = 0; k < n_parts; k++)
    if (parts[k].bytes > most) most = parts[k].bytes;
  return most;
}

static void *copied(const void *what, size_t size) {
  void *copy = malloc(size + 1);
  return copy != NULL ? memcpy(copy, what, size) : NULL;
}

frozen_pass *lane_new_pass(const lane *l, int op, double prescale, double postscale, const device_part *parts, int n_parts,
                           const device_row *rows, int n_rows) {
  frozen_pass *p = calloc(1, sizeof *p);
  if (p == NULL) return NULL;
  p->item.op = op;
  p->item.prescale = prescale;
  p->item.postscale = postscale;
  p->item.parts = copied(parts, sizeof *parts * (size_t)n_parts);
  p->item.sources = p->item.targets = copied(rows, sizeof *rows * (size_t)n_rows);
  p->item.n_parts = n_parts;
  p->item.n_rows = n_rows;
  p->slab_bytes = lesser(l->slab_bytes, longest(parts, n_parts) / 32 * 32 + 32); /* nothing of 0 bytes can be allocated */
  p->table_bytes = bytes_of_tables(p->slab_bytes, parts, n_parts, n_rows);
  if (p->item.parts != NULL && p->item.sources != NULL) return p;
  lane_free_pass(p);
  return NULL;
}

void lane_free_pass(frozen_pass *p) {
  free(p->item.parts);
  free(p->item.sources);
  free(p);
}

static void ended(device_item *item, const char *why) {
  frozen_pass *p = (frozen_pass *)item;
  lane *l = p->item.owner;
  snprintf(p->why, sizeof p->why, "%s", why != NULL ? why : "");
  store32_release(&p->ended, 1); /* pairs with lane_await_pass */
  door_ring(&l->ended, DOOR_EVERYBODY);
}

static void bring(lane *l, frozen_pass *p, int work) {
  p->item.owner = l;
  p->item.work = work;
  p->item.ended = ended;
  store32_release(&p->ended, 0);
  lane_push(l, &p->item);
}

void lane_freeze(lane *l, frozen_pass *p) { bring(l, p, DEVICE_FREEZE); }

void lane_unite(lane *l, frozen_pass *p, const ncclUniqueId *id) {
  if (id != NULL) p->id = *id;
  bring(l, p, DEVICE_UNITE);
}

void lane_repeat(lane *l, frozen_pass *p, void *stream) {
  p->stream = stream;
  bring(l, p, DEVICE_REPEAT);
}

int lane_await_pass(lane *l, frozen_pass *p, uint64_t ns) {
  uint32_t count = door_count(&l->ended);
  if (!load32_acquire(&p->ended)) door_sleep(&l->ended, count, ns); /* pairs with ended */
  return load32_acquire(&p->ended) != 0;
}

/* ---- what is made ---- */

static int connect(lane *l, const frozen_pass *p) {
  if (l->graphs.comm != NULL) return 0;
  l->graphs.id = p->id;
  l->graphs.rank = l->world.rank;
  l->graphs.size = l->world.size;
  lane_enlist(l, &l->graphs);
  l->at = &l->graphs;
  STEP(lane_join_ranks(l, 1));
  l->graphs.connected = 1;
  return 0;
}

/* What NCCL connects and allocates when it first moves so many bytes it does now, and in no capture. */
static int try_sums(lane *l, const frozen_pass *p) {
  l->at = &l->graphs;
  for (int k = 0; k < p->item.n_parts && l->at->size > 1; k++) {
    const device_part *part = &p->item.parts[k];
    for (uint64_t low = 0; low < part->bytes; low += p->slab_bytes)
      STEP(lane_try_sum(l, lesser(part->bytes - low, p->slab_bytes), part->wire));
  }
  return lane_await_connections(l);
}

static int allocate(lane *l, frozen_pass *p) {
  frozen_memory *m = p->memory;
  CUDA_STEP(cuMemAlloc_v2, &m->slab, p->slab_bytes);
  CUDA_STEP(cuMemAlloc_v2, &m->device_tables, p->table_bytes);
  CUDA_STEP(cuMemHostAlloc, (void **)&m->tables, p->table_bytes, 0);
  CUDA_STEP(cuEventCreate, &m->done, CU_EVENT_DISABLE_TIMING);
  return 0;
}

/* All that needs no other rank, before any of them waits in NCCL for the others. */
int lane_make_pass(lane *l, frozen_pass *p) {
  STEP(l->failure.call != NULL);
  if (lane_hire_keeper(l)) return lane_failed(l, "malloc", CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", NULL);
  p->memory = calloc(1, sizeof *p->memory);
  if (p->memory == NULL) return lane_failed(l, "malloc", CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", NULL);
  if (allocate(l, p) == 0) {
    p->next = l->passes;
    store_pointer((void **)&l->passes, p); /* pairs with frozen_rest */
    return 0;
  }
  lane_release_memory(&l->f, p->memory);
  p->memory = NULL;
  return -1;
}

int lane_unite_pass(lane *l, frozen_pass *p) {
  STEP(l->failure.call != NULL);
  STEP(connect(l, p));
  return try_sums(l, p);
}

/* ---- a pass ---- */

/* Enqueue it as an item, with all that an item uses put in the place of the lane's. */
static int run_there(lane *l, frozen_pass *p) {
  CUstream stream = l->stream;
  CUdeviceptr slab = l->slab, device_tables = l->device_tables;
  char *tables = l->tables;
  uint64_t slab_bytes = l->slab_bytes, table_bytes = l->table_bytes, head = l->table_head, tail = l->table_tail;
  int status;
  l->at = &l->graphs;
  l->stream = p->stream;
  l->slab = p->memory->slab;
  l->slab_bytes = p->slab_bytes;
  l->tables = p->memory->tables;
  l->device_tables = p->memory->device_tables;
  l->table_bytes = p->table_bytes;
  l->table_head = l->table_tail = 0; /* the same rows as ever are written where they are */
  p->item.work = DEVICE_REDUCE;
  status = lane_run(l, &p->item);
  l->stream = stream;
  l->slab = slab;
  l->slab_bytes = slab_bytes;
  l->tables = tables;
  l->device_tables = device_tables;
  l->table_bytes = table_bytes;
  l->table_head = head;
  l->table_tail = tail;
  return status;
}

int lane_enqueue_pass(lane *l, frozen_pass *p) {
  CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
  int failed;
  STEP(l->failure.call != NULL);
  CUDA_STEP(cuStreamIsCapturing, p->stream, &capturing);
  if (capturing != CU_STREAM_CAPTURE_STATUS_NONE) {
    store32_release(&p->captured, 1); /* pairs with lane_has_captured */
    return run_there(l, p);
  }
  if (p->ran) CUDA_STEP(cuStreamWaitEvent, p->stream, p->memory->done, 0); /* on another stream it may be in the slab still */
  failed = run_there(l, p);
  STEP(CUDA(cuEventRecord, p->memory->done, p->stream)); /* of what was enqueued before a failure, too */
  store32_release(&p->ran, 1); /* pairs with lane_passes_rest */
  return failed;
}

/* ---- the end ---- */

/* A failure of the device is for others to tell: nothing runs then. */
int lane_passes_rest(lane *l) {
  for (const frozen_pass *p = load_pointer((void *const *)&l->passes); p != NULL; p = p->next)
    if (load32_acquire(&p->ran) && l->f.cuEventQuery(p->memory->done) == CUDA_ERROR_NOT_READY) return 0;
  return 1;
}

int lane_passes_are_over(lane *l, uint64_t limit) {
  uint64_t begun = now_ns();
  while (!lane_passes_rest(l)) {
    if (now_ns() - begun > limit) return 0;
    lane_nap();
  }
  return 1;
}

int lane_has_captured(const lane *l) {
  for (const frozen_pass *p = load_pointer((void *const *)&l->passes); p != NULL; p = p->next)
    if (load32_acquire(&p->captured)) return 1;
  return 0;
}

void lane_release_memory(const lane_functions *f, frozen_memory *memory) {
  for (frozen_memory *next; memory != NULL; memory = next) {
    next = memory->next;
    if (memory->done != NULL) f->cuEventDestroy_v2(memory->done);
    if (memory->tables != NULL) f->cuMemFreeHost(memory->tables);
    if (memory->device_tables != 0) f->cuMemFree_v2(memory->device_tables);
    if (memory->slab != 0) f->cuMemFree_v2(memory->slab);
    free(memory);
  }
}
