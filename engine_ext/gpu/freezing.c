/* Frozen passes: the CUDA thread enqueues the same reduction each time, on a stream of the program, which may be captured.
 *
 * Nothing is negotiated, and the only event waited for is the pass's own. The tensors are ready when the stream reaches the
 * pass, and the stream goes on behind it. A graph reads tables and slab at every launch, which the CUDA thread does not notice.
 * So each pass keeps its own until the CUDA thread is closed. Their communicator blocks, so everything is enqueued when a call
 * returns. With one that does not block, a thread of NCCL would enqueue it, whose calls may spoil the capture.
 */
#include "calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- functions for the owner ---- */

/* Return the bytes of all tables of a pass: each row, for each piece that contains it, to pack and to unpack. While a table is
 * made it needs room for all rows. A table takes at most a quarter of the ring (run_over in launching.c). */
static uint64_t bytes_of_tables(uint64_t slab_bytes, const device_part *parts, int n_parts, int n_rows) {
  uint64_t rows = 1 + (uint64_t)n_rows, bytes = 3 * rows * sizeof(device_row), largest = 0;
  for (int k = 0; k < n_parts; k++)
    for (uint64_t low = 0; low < parts[k].bytes; low += slab_bytes) {
      uint64_t table = cuda_thread_table_bytes(2, lesser(parts[k].bytes - low, slab_bytes));
      bytes += 2 * table;
      if (table > largest) largest = table;
    }
  largest += rows * sizeof(device_row);
  return bytes > 4 * largest ? bytes : 4 * largest;
}

/* Return the bytes of the largest part. */
static uint64_t longest(const device_part *parts, int n_parts) {
  uint64_t most = 0;
  for (int k = 0; k < n_parts; k++)
    if (parts[k].bytes > most) most = parts[k].bytes;
  return most;
}

/* Return a malloc'ed copy; NULL without memory. */
static void *copied(const void *what, size_t size) {
  void *copy = malloc(size + 1);
  return copy != NULL ? memcpy(copy, what, size) : NULL;
}

frozen_pass *cuda_thread_new_pass(const cuda_thread *t, int op, double prescale, double postscale, const device_part *parts,
                                  int n_parts, const device_row *rows, int n_rows) {
  frozen_pass *p = calloc(1, sizeof *p);
  if (p == NULL) return NULL;
  p->item.op = op;
  p->item.prescale = prescale;
  p->item.postscale = postscale;
  p->item.parts = copied(parts, sizeof *parts * (size_t)n_parts);
  p->item.sources = p->item.targets = copied(rows, sizeof *rows * (size_t)n_rows);
  p->item.n_parts = n_parts;
  p->item.n_rows = n_rows;
  p->slab_bytes = lesser(t->slab_bytes, longest(parts, n_parts) / 32 * 32 + 32); /* never 0, which cannot be allocated */
  p->table_bytes = bytes_of_tables(p->slab_bytes, parts, n_parts, n_rows);
  if (p->item.parts != NULL && p->item.sources != NULL) return p;
  cuda_thread_free_pass(p);
  return NULL;
}

void cuda_thread_free_pass(frozen_pass *p) {
  free(p->item.parts);
  free(p->item.sources);
  free(p);
}

static void ended(device_item *item, const char *why) {
  frozen_pass *p = (frozen_pass *)item;
  cuda_thread *t = p->item.owner;
  snprintf(p->why, sizeof p->why, "%s", why != NULL ? why : "");
  store32_release(&p->ended, 1); /* pairs with cuda_thread_await_pass */
  door_ring(&t->ended, DOOR_EVERYBODY);
}

/* Push a request for a pass. */
static void bring(cuda_thread *t, frozen_pass *p, int work) {
  p->item.owner = t;
  p->item.work = work;
  p->item.ended = ended;
  store32_release(&p->ended, 0);
  cuda_thread_push(t, &p->item);
}

void cuda_thread_allocate_pass(cuda_thread *t, frozen_pass *p) { bring(t, p, DEVICE_ALLOCATE_PASS); }

void cuda_thread_connect_pass(cuda_thread *t, frozen_pass *p, const ncclUniqueId *id) {
  if (id != NULL) p->id = *id;
  bring(t, p, DEVICE_CONNECT_PASS);
}

void cuda_thread_replay_pass(cuda_thread *t, frozen_pass *p, void *stream) {
  p->stream = stream;
  bring(t, p, DEVICE_REPLAY_PASS);
}

int cuda_thread_await_pass(cuda_thread *t, frozen_pass *p, uint64_t ns) {
  uint32_t count = door_count(&t->ended);
  if (!load32_acquire(&p->ended)) door_sleep(&t->ended, count, ns); /* pairs with ended */
  return load32_acquire(&p->ended) != 0;
}

/* ---- resources ---- */

/* Connect all ranks for frozen passes, unless they are connected. */
static int connect(cuda_thread *t, const frozen_pass *p) {
  if (t->graphs.comm != NULL) return 0;
  t->graphs.id = p->id;
  t->graphs.rank = t->world.rank;
  t->graphs.size = t->world.size;
  cuda_thread_enlist(t, &t->graphs);
  t->at = &t->graphs;
  STEP(cuda_thread_join_ranks(t, 1));
  t->graphs.connected = 1;
  return 0;
}

/* Sum the pieces of a pass once, so that NCCL connects and allocates for these sizes now and not during a capture. */
static int try_sums(cuda_thread *t, const frozen_pass *p) {
  t->at = &t->graphs;
  for (int k = 0; k < p->item.n_parts && t->at->size > 1; k++) {
    const device_part *part = &p->item.parts[k];
    for (uint64_t low = 0; low < part->bytes; low += p->slab_bytes)
      STEP(cuda_thread_try_sum(t, lesser(part->bytes - low, p->slab_bytes), part->wire));
  }
  return cuda_thread_await_connections(t);
}

/* Allocate a pass's memory on the device. A failure leaves what was allocated before. */
static int allocate(cuda_thread *t, frozen_pass *p) {
  frozen_memory *m = p->memory;
  CUDA_STEP(cuMemAlloc_v2, &m->slab, p->slab_bytes);
  CUDA_STEP(cuMemAlloc_v2, &m->device_tables, p->table_bytes);
  CUDA_STEP(cuMemHostAlloc, (void **)&m->tables, p->table_bytes, 0);
  CUDA_STEP(cuEventCreate, &m->done, CU_EVENT_DISABLE_TIMING);
  return 0;
}

/* This is all work that needs no other rank. It may fail before any rank waits in NCCL for the others. */
int cuda_thread_make_pass(cuda_thread *t, frozen_pass *p) {
  STEP(t->failure.call != NULL);
  if (cuda_thread_make_keeper(t))
    return cuda_thread_failed(t, "malloc", CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", NULL);
  p->memory = calloc(1, sizeof *p->memory);
  if (p->memory == NULL) return cuda_thread_failed(t, "malloc", CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", NULL);
  if (allocate(t, p) == 0) {
    p->next = t->passes;
    store_pointer((void **)&t->passes, p); /* pairs with frozen_rest */
    return 0;
  }
  cuda_thread_release_memory(&t->f, p->memory);
  p->memory = NULL;
  return -1;
}

int cuda_thread_connect_pass_ranks(cuda_thread *t, frozen_pass *p) {
  STEP(t->failure.call != NULL);
  STEP(connect(t, p));
  return try_sums(t, p);
}

/* ---- a pass ---- */

/* Enqueue a pass like an item: the CUDA thread's stream, slab and tables are replaced by the pass's meanwhile. */
static int run_there(cuda_thread *t, frozen_pass *p) {
  CUstream stream = t->stream;
  CUdeviceptr slab = t->slab, device_tables = t->device_tables;
  char *tables = t->tables;
  uint64_t slab_bytes = t->slab_bytes, table_bytes = t->table_bytes, head = t->table_head, tail = t->table_tail;
  int status;
  t->at = &t->graphs;
  t->stream = p->stream;
  t->slab = p->memory->slab;
  t->slab_bytes = p->slab_bytes;
  t->tables = p->memory->tables;
  t->device_tables = p->memory->device_tables;
  t->table_bytes = p->table_bytes;
  t->table_head = t->table_tail = 0; /* every repetition writes the same rows to the same place */
  p->item.work = DEVICE_ALLREDUCE;
  status = cuda_thread_run(t, &p->item);
  t->stream = stream;
  t->slab = slab;
  t->slab_bytes = slab_bytes;
  t->tables = tables;
  t->device_tables = device_tables;
  t->table_bytes = table_bytes;
  t->table_head = head;
  t->table_tail = tail;
  return status;
}

int cuda_thread_enqueue_pass(cuda_thread *t, frozen_pass *p) {
  CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
  int failed;
  STEP(t->failure.call != NULL);
  CUDA_STEP(cuStreamIsCapturing, p->stream, &capturing);
  if (capturing != CU_STREAM_CAPTURE_STATUS_NONE) {
    store32_release(&p->captured, 1); /* pairs with cuda_thread_has_captured */
    return run_there(t, p);
  }
  if (p->ran) CUDA_STEP(cuStreamWaitEvent, p->stream, p->memory->done, 0); /* its last run may still use the slab */
  failed = run_there(t, p);
  STEP(CUDA(cuEventRecord, p->memory->done, p->stream)); /* after a failure, too: some work may be enqueued */
  store32_release(&p->ran, 1); /* pairs with cuda_thread_passes_rest */
  return failed;
}

/* ---- the end ---- */

/* After a failure of the device nothing runs, so the answer is 1; others report the failure. */
int cuda_thread_passes_rest(cuda_thread *t) {
  for (const frozen_pass *p = load_pointer((void *const *)&t->passes); p != NULL; p = p->next)
    if (load32_acquire(&p->ran) && t->f.cuEventQuery(p->memory->done) == CUDA_ERROR_NOT_READY) return 0;
  return 1;
}

int cuda_thread_passes_are_over(cuda_thread *t, uint64_t limit) {
  uint64_t begun = now_ns();
  while (!cuda_thread_passes_rest(t)) {
    if (now_ns() - begun > limit) return 0;
    cuda_thread_nap();
  }
  return 1;
}

int cuda_thread_has_captured(const cuda_thread *t) {
  for (const frozen_pass *p = load_pointer((void *const *)&t->passes); p != NULL; p = p->next)
    if (load32_acquire(&p->captured)) return 1;
  return 0;
}

void cuda_thread_release_memory(const cuda_thread_functions *f, frozen_memory *memory) {
  for (frozen_memory *next; memory != NULL; memory = next) {
    next = memory->next;
    if (memory->done != NULL) f->cuEventDestroy_v2(memory->done);
    if (memory->tables != NULL) f->cuMemFreeHost(memory->tables);
    if (memory->device_tables != 0) f->cuMemFree_v2(memory->device_tables);
    if (memory->slab != 0) f->cuMemFree_v2(memory->slab);
    free(memory);
  }
}
