/* Work that the CUDA thread enqueues for an item: wait for the marks, pack, reduce among the ranks, unpack, record `done`. */
#include "calls.h"

#include "engine_ext/kernels/kernels.h"

#include <string.h>

enum {
  PIECE = 2048,       /* bytes of the slab that a warp of a kernel takes at a time (kernels.cu) */
  WARP = 32,          /* threads of a warp */
  THREADS = 256,      /* threads of a block */
  BLOCKS = 4096,      /* most blocks of a kernel */
  VECTOR = 16         /* bytes that kernels read at once, where they are aligned */
};
_Static_assert((int)CUDA_THREAD_DTYPES == (int)ENGINE_DTYPES, "kernels for all dtypes that are reduced");

/* NCCL's dtypes, by enum engine_dtype; -1: NCCL has none. */
static const int NCCL_DTYPES[ENGINE_DTYPES] = {
    [ENGINE_FLOAT16] = ncclFloat16, [ENGINE_BFLOAT16] = ncclBfloat16, [ENGINE_FLOAT32] = ncclFloat32,
    [ENGINE_FLOAT64] = ncclFloat64, [ENGINE_INT8] = ncclInt8,         [ENGINE_UINT8] = ncclUint8,
    [ENGINE_INT16] = -1,            [ENGINE_UINT16] = -1,             [ENGINE_INT32] = ncclInt32,
    [ENGINE_INT64] = ncclInt64,     [ENGINE_BOOL] = -1,
};

static inline uint64_t up_to(uint64_t x, uint64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

/* ---- the device's progress ---- */

/* Publish in `d.begun` whether the device has reached the work of the ticket behind `passed`. */
static int look_at_first(cuda_thread *t, uint64_t passed) {
  CUresult code = IN_CALL(cuEventQuery, t->begun[passed % DEVICE_OUTSTANDING]);
  store_pointer(&t->d.call, NULL);
  if (code == CUDA_ERROR_NOT_READY) return 0;
  STEP(cuda_thread_after_cuda(t, "cuEventQuery", code));
  store_release(&t->d.begun, passed + 1); /* pairs with device_watch */
  return 0;
}

int cuda_thread_look(cuda_thread *t) {
  uint64_t passed = t->d.passed;
  while (passed < t->d.enqueued) {
    CUresult code = IN_CALL(cuEventQuery, t->done[passed % DEVICE_OUTSTANDING]);
    store_pointer(&t->d.call, NULL);
    if (code == CUDA_ERROR_NOT_READY) break;
    STEP(cuda_thread_after_cuda(t, "cuEventQuery", code));
    if (t->table_ends[passed % DEVICE_OUTSTANDING] > t->table_tail) t->table_tail = t->table_ends[passed % DEVICE_OUTSTANDING];
    passed++;
  }
  if (passed > t->d.passed && load_pointer((void **)&t->d.went_on) != NULL) t->d.went_on(&t->d, passed - t->d.passed);
  store_release(&t->d.passed, passed); /* pairs with has_passed: the device no longer uses these tickets' tensors */
  STEP(cuda_thread_read_samples(t));
  return passed < t->d.enqueued && t->d.begun <= passed ? look_at_first(t, passed) : 0;
}

/* Wait until the device has passed a ticket. */
static int await(cuda_thread *t, uint64_t ticket) {
  for (;;) {
    STEP(cuda_thread_look(t));
    if (t->d.passed >= ticket) return 0;
    STEP(cuda_thread_cancelled(t, "cuEventQuery"));
    cuda_thread_nap();
  }
}

/* ---- tables of rows ---- */

/* A table has its rows and, if they are several, behind them a number for each piece of the slab, and one for the end. */
uint64_t cuda_thread_table_bytes(uint64_t rows, uint64_t bytes) {
  uint64_t numbers = rows > 1 ? (bytes + PIECE - 1) / PIECE + 1 : 0;
  return rows * sizeof(device_row) + up_to(numbers * sizeof(uint32_t), sizeof(uint64_t));
}

/* Reserve room in the ring: returns its address on the host, NULL after a failure, and in `at` the one on the device. The room
 * is used again once the device has passed the item. */
static device_row *reserve(cuda_thread *t, uint64_t bytes, CUdeviceptr *at) {
  uint64_t left = t->table_bytes - t->table_head % t->table_bytes;
  if (left < bytes) t->table_head += left;
  while (t->table_head + bytes - t->table_tail > t->table_bytes) {
    if (t->d.passed < t->d.enqueued) {
      if (await(t, t->d.passed + 1)) return NULL;
    } else {
      if (cuda_thread_drain(t, 0)) return NULL; /* the item's own tables fill it */
      t->table_tail = t->table_head;
    }
  }
  *at = t->device_tables + t->table_head % t->table_bytes;
  device_row *rows = (device_row *)(t->tables + t->table_head % t->table_bytes);
  t->table_head += bytes;
  return rows;
}

/* Write behind the rows the numbers by which kernels find the rows of a piece (for_each_piece in kernels.cu). */
static void number_pieces(device_row *rows, uint64_t count, uint64_t end) {
  if (count == 1) return;
  uint32_t *numbers = (uint32_t *)(rows + count), row = 0;
  for (uint64_t begin = 0; begin < end; begin += PIECE) {
    while (rows[row].offset + rows[row].bytes <= begin) row++; /* the last one ends at `end` */
    *numbers++ = 2 * row + (rows[row].offset < begin);
  }
  *numbers = 2 * (uint32_t)count;
}

/* The work of a kernel: the rows of a part that lie in its piece [low, high), which is at `slab`. */
typedef struct move {
  const device_part *part;
  const device_row *rows;
  uint64_t low, high;
  CUdeviceptr slab;
} move;

/* Launch a kernel with enough warps for `bytes` of the slab, but at most BLOCKS blocks. */
static int launch(cuda_thread *t, int kernel, uint64_t bytes, void **parameters) {
  uint64_t warps = (bytes + PIECE - 1) / PIECE;
  unsigned blocks = (unsigned)lesser((warps + THREADS / WARP - 1) / (THREADS / WARP), BLOCKS);
  CUDA_STEP(cuLaunchKernel, t->kernels[kernel], blocks, 1, 1, THREADS, 1, 1, 0, t->stream, parameters, NULL);
  return 0;
}

/* Return whether a row's tensor is its place in the slab, so that it need not be copied. */
static inline int is_there(const move *m, const device_row *row) { return row->tensor - row->offset == m->slab - m->low; }

/* Fill a table with at most `room` rows of the piece, from row *r on, and advance *r. Offsets count from the first row's, which
 * lies at *base in the slab. Returns the number of rows. With `copies`, rows that need no copy are left out. */
static uint64_t fill_table(const move *m, int copies, device_row *rows, uint64_t room, int *r, uint64_t *base) {
  uint64_t wire = (uint64_t)dtype_bytes(m->part->wire), tensor = (uint64_t)dtype_bytes(m->part->dtype), count = 0;
  for (; *r < m->part->end && count < room; (*r)++) {
    const device_row *row = &m->rows[*r];
    uint64_t first = row->offset < m->low ? m->low - row->offset : 0, last = row->bytes;
    if (row->offset >= m->high) {
      *r = m->part->end;
      break;
    }
    if (row->offset + last > m->high) last = m->high - row->offset;
    if (first >= last || (copies && is_there(m, row))) continue;
    if (count == 0) *base = row->offset + first - m->low;
    rows[count].tensor = row->tensor != 0 ? row->tensor + first / wire * tensor : 0;
    rows[count].offset = row->offset + first - m->low - *base;
    rows[count++].bytes = last - first;
  }
  return count;
}

/* Run a kernel over the piece, with as many tables as it takes. A piece of several rows is no longer than the slab. The kernel's
 * parameters are table, rows, end and slab, then `identity` unless NULL, `divisor` and `factor`. */
static int run_over(cuda_thread *t, const move *m, int kernel, int copies, uint64_t *identity, double *divisor, double *factor) {
  uint64_t numbers = cuda_thread_table_bytes(2, m->high - m->low) - cuda_thread_table_bytes(2, 0);
  uint64_t most = (t->table_bytes / 4 - numbers) / sizeof(device_row) - 1;
  for (int r = m->part->begin; r < m->part->end;) {
    CUdeviceptr table;
    uint64_t left = (uint64_t)(m->part->end - r), room = left > 1 ? lesser(most, left) : 1, base = 0;
    uint64_t reserved = cuda_thread_table_bytes(room, m->high - m->low);
    device_row *rows = reserve(t, reserved, &table);
    if (rows == NULL) return -1;
    uint64_t count = fill_table(m, copies, rows, room, &r, &base), used = 0;
    if (count != 0) {
      uint64_t end = rows[count - 1].offset + rows[count - 1].bytes, slab = m->slab + base;
      void *with_identity[] = {&table, &count, &end, &slab, identity, divisor, factor};
      void *without[] = {&table, &count, &end, &slab, divisor, factor};
      number_pieces(rows, count, end);
      used = cuda_thread_table_bytes(count, end);
      CUDA_STEP(cuMemcpyHtoDAsync_v2, table, rows, used, t->stream);
      STEP(launch(t, kernel, end, identity != NULL ? with_identity : without));
    }
    t->table_head -= reserved - used; /* give back the unused room: most rows may be of other pieces */
  }
  return 0;
}

/* Pack a piece into the slab, divided and multiplied on the way. */
static int pack(cuda_thread *t, const move *m, double divisor, double factor) {
  int dtype = m->part->dtype, wire = m->part->wire, plain = dtype == wire && dtype != ENGINE_BOOL && divisor == 1 && factor == 1;
  uint64_t identity = m->part->identity;
  STEP(run_over(t, m, plain ? t->known.pack_bytes : t->known.pack[dtype][wire], plain, &identity, &divisor, &factor));
  return cuda_thread_end_slice(t, DEVICE_PACK);
}

/* Unpack a piece from the slab, divided and multiplied on the way. */
static int unpack(cuda_thread *t, const move *m, double divisor, double factor) {
  int dtype = m->part->dtype, wire = m->part->wire;
  int plain = dtype == wire && ((divisor == 1 && factor == 1) || dtype == ENGINE_BOOL);
  STEP(run_over(t, m, plain ? t->known.unpack_bytes : t->known.unpack[dtype][wire], plain, NULL, &divisor, &factor));
  return cuda_thread_end_slice(t, DEVICE_UNPACK);
}

/* ---- among the ranks ---- */

/* Wait until a communicator that does not block has enqueued `call`: an event recorded before that would not cover it. */
static int settle(cuda_thread *t, const char *call) {
  STEP(cuda_thread_settle(t, call));
  return cuda_thread_end_slice(t, DEVICE_NCCL);
}

/* Sum over the ranks by NCCL, in an order of its own. */
static int all_reduce(cuda_thread *t, CUdeviceptr from, CUdeviceptr to, uint64_t bytes, int wire) {
  NCCL_STEP(ncclAllReduce, (void *)(uintptr_t)from, (void *)(uintptr_t)to, bytes / (uint64_t)dtype_bytes(wire),
            (ncclDataType_t)NCCL_DTYPES[wire], ncclSum, t->at->comm, t->stream);
  return settle(t, "ncclAllReduce");
}

int cuda_thread_try_sum(cuda_thread *t, uint64_t bytes, int wire) { return all_reduce(t, t->slab, t->slab, bytes, wire); }

static int broadcast(cuda_thread *t, CUdeviceptr from, CUdeviceptr to, uint64_t bytes, int root) {
  NCCL_STEP(ncclBroadcast, (void *)(uintptr_t)from, (void *)(uintptr_t)to, bytes, ncclUint8, root, t->at->comm, t->stream);
  return settle(t, "ncclBroadcast");
}

static int reduce_scatter(cuda_thread *t, CUdeviceptr from, CUdeviceptr to, uint64_t bytes, int wire) {
  NCCL_STEP(ncclReduceScatter, (void *)(uintptr_t)from, (void *)(uintptr_t)to, bytes / (uint64_t)dtype_bytes(wire),
            (ncclDataType_t)NCCL_DTYPES[wire], ncclSum, t->at->comm, t->stream);
  return settle(t, "ncclReduceScatter");
}

/* Send part r of the slab to each other rank r, and receive this rank's part from it at `parts` + r * `stride`. */
static int exchange(cuda_thread *t, CUdeviceptr slab, CUdeviceptr parts, uint64_t stride) {
  NCCL_STEP(ncclGroupStart);
  for (int r = 0; r < t->at->size; r++) {
    if (r == t->at->rank) continue;
    /* A group is ended whatever happens in it: a failure is kept. */
    NCCL(ncclSend, (void *)(uintptr_t)(slab + r * stride), stride, ncclUint8, r, t->at->comm, t->stream);
    NCCL(ncclRecv, (void *)(uintptr_t)(parts + r * stride), stride, ncclUint8, r, t->at->comm, t->stream);
  }
  NCCL(ncclGroupEnd);
  STEP(t->failure.call != NULL);
  return settle(t, "ncclGroupEnd");
}

/* Send every rank's part of the slab to all ranks. */
static int all_gather(cuda_thread *t, uint64_t stride) {
  NCCL_STEP(ncclAllGather, (void *)(uintptr_t)(t->slab + (uint64_t)t->at->rank * stride), (void *)(uintptr_t)t->slab, stride,
            ncclUint8, t->at->comm, t->stream);
  return settle(t, "ncclAllGather");
}

/* Reduce this rank's part of the slab in rank order: it receives that part from all others into the slab's second half. */
static int reduce_own(cuda_thread *t, int op, const device_part *part, uint64_t stride, double divisor, double factor) {
  uint64_t own = t->slab + (uint64_t)t->at->rank * stride, parts = t->slab + t->slab_bytes / 2;
  uint64_t elements = stride / (uint64_t)dtype_bytes(part->wire);
  unsigned rank = (unsigned)t->at->rank, count = (unsigned)t->at->size, reduction = (unsigned)(op == ENGINE_AVERAGE ? ENGINE_SUM : op);
  void *parameters[] = {&own, &parts, &stride, &own, &rank, &count, &elements, &reduction, &divisor, &factor};
  if (t->at->size > 1) STEP(exchange(t, t->slab, parts, stride));
  STEP(launch(t, t->known.reduce[part->wire], stride, parameters));
  return cuda_thread_end_slice(t, DEVICE_NCCL);
}

/* Reduce the first `bytes` of the slab in rank order, for all ranks. */
static int reduce_in_order(cuda_thread *t, int op, const device_part *part, uint64_t bytes, double divisor, double factor) {
  uint64_t stride = up_to((bytes + (uint64_t)t->at->size - 1) / (uint64_t)t->at->size, VECTOR);
  STEP(reduce_own(t, op, part, stride, divisor, factor));
  return t->at->size > 1 ? all_gather(t, stride) : 0;
}

/* ---- an item ---- */

/* Return whether a part is reduced in rank order by our kernels: NCCL lacks the reduction, or its result differs from host
 * memory's. NCCL's Min and Max lose a NaN, and a sum of integers may wrap before it is divided. With the setting
 * device_sums=ordered every part is, since NCCL sums and rounds in an order of its own. */
static int is_ordered(const cuda_thread *t, int op, const device_part *part) {
  int wire = part->wire, whole = wire >= ENGINE_INT8;
  if (t->at->size == 1) return wire != part->dtype; /* so that the scaled sum is rounded to `wire`, as with several ranks */
  return t->ordered || NCCL_DTYPES[wire] < 0 || (op != ENGINE_SUM && (op != ENGINE_AVERAGE || whole));
}

/* Divisors of tensors before the sum, and behind it. */
typedef struct divisors {
  double before, behind;
} divisors;

/* Average divides behind the sum, except float16 tensors, whose sum could overflow: they are divided before. */
static divisors divisors_of(const cuda_thread *t, int op, int wire) {
  double size = op == ENGINE_AVERAGE ? t->at->size : 1;
  return wire == ENGINE_FLOAT16 ? (divisors){size, 1} : (divisors){1, size};
}

/* Reduce the piece [low, high) of a part. If the part has a `place`, that is used instead of the slab, and tensors that lie there
 * already are not copied. */
static int sum_piece(cuda_thread *t, const device_item *item, const device_part *part, uint64_t low, uint64_t high) {
  int ordered = is_ordered(t, item->op, part);
  CUdeviceptr slab = part->place != 0 && !ordered ? part->place + low : t->slab;
  const move in = {part, item->sources, low, high, slab}, out = {part, item->targets, low, high, slab};
  if (ordered) {
    STEP(pack(t, &in, 1, item->prescale));
    STEP(reduce_in_order(t, item->op, part, high - low, item->op == ENGINE_AVERAGE ? t->at->size : 1, item->postscale));
    return unpack(t, &out, 1, 1);
  }
  divisors by = divisors_of(t, item->op, part->wire);
  STEP(pack(t, &in, by.before, item->prescale));
  if (t->at->size > 1) STEP(all_reduce(t, slab, slab, high - low, part->wire));
  return unpack(t, &out, by.behind, item->postscale);
}

/* Sum a part of one tensor, which is its own slab. */
static int sum_in_place(cuda_thread *t, const device_item *item, const device_part *part) {
  CUdeviceptr from = item->sources[part->begin].tensor, to = item->targets[part->begin].tensor;
  const move in = {part, item->sources, 0, part->bytes, to}, out = {part, item->targets, 0, part->bytes, to};
  divisors by = divisors_of(t, item->op, part->wire);
  if (by.before != 1 || item->prescale != 1 || part->dtype == ENGINE_BOOL || (t->at->size == 1 && from != to)) {
    STEP(pack(t, &in, by.before, item->prescale));
    from = to;
  }
  if (t->at->size > 1) STEP(all_reduce(t, from, to, part->bytes, part->wire));
  return by.behind != 1 || item->postscale != 1 ? unpack(t, &out, by.behind, item->postscale) : 0;
}

/* Broadcast the piece [low, high) of a part. */
static int spread_piece(cuda_thread *t, const device_item *item, const device_part *part, uint64_t low, uint64_t high) {
  const move in = {part, item->sources, low, high, t->slab}, out = {part, item->targets, low, high, t->slab};
  CUdeviceptr from = item->sources[part->begin].tensor, to = item->targets[part->begin].tensor;
  if (item->in_place && to != 0) /* the tensor is its own slab; a rank that has joined has no tensor */
    return t->at->size > 1 || from != to ? broadcast(t, from + low, to + low, high - low, item->root) : 0;
  if (t->at->rank == item->root) STEP(pack(t, &in, 1, 1));
  if (t->at->size > 1) STEP(broadcast(t, t->slab, t->slab, high - low, item->root));
  return unpack(t, &out, 1, 1);
}

static int spread_part(cuda_thread *t, const device_item *item, const device_part *part) {
  for (uint64_t low = 0; low < part->bytes; low += t->slab_bytes)
    STEP(spread_piece(t, item, part, low, lesser(part->bytes, low + t->slab_bytes)));
  return 0;
}

static int sum_part(cuda_thread *t, const device_item *item, const device_part *part) {
  uint64_t piece = t->slab_bytes;
  if (is_ordered(t, item->op, part)) piece = t->slab_bytes / 2 / (VECTOR * (uint64_t)t->at->size) * (VECTOR * (uint64_t)t->at->size);
  else if (item->in_place) return sum_in_place(t, item, part);
  for (uint64_t low = 0; low < part->bytes; low += piece)
    STEP(sum_piece(t, item, part, low, lesser(part->bytes, low + piece)));
  return 0;
}

/* Reduce-scatter the piece [low, high) of each rank's part, each in a window of its own. The bytes behind a shorter part do not
 * matter. */
static int scatter_piece(cuda_thread *t, const device_item *item, const device_part *parts, uint64_t low, uint64_t high) {
  uint64_t stride = up_to(high - low, VECTOR), own = t->slab + (uint64_t)t->at->rank * stride;
  const move out = {parts + t->at->rank, item->targets, low, high, own};
  int wire = parts->wire, ordered = is_ordered(t, item->op, parts);
  divisors by = divisors_of(t, item->op, wire);
  for (int r = 0; r < t->at->size; r++) {
    const move in = {parts + r, item->sources, low, high, t->slab + (uint64_t)r * stride};
    STEP(pack(t, &in, ordered ? 1 : by.before, item->prescale));
  }
  if (ordered) {
    STEP(reduce_own(t, item->op, parts, stride, item->op == ENGINE_AVERAGE ? t->at->size : 1, item->postscale));
    return unpack(t, &out, 1, 1);
  }
  STEP(reduce_scatter(t, t->slab, own, stride, wire));
  return unpack(t, &out, by.behind, item->postscale);
}

/* Reduce-scatter one tensor whose parts are equally long; it is its own slab. */
static int scatter_in_place(cuda_thread *t, const device_item *item, const device_part *parts, double behind) {
  const device_row *target = &item->targets[parts[t->at->rank].begin];
  const move out = {parts + t->at->rank, item->targets, 0, parts->bytes, target->tensor};
  STEP(reduce_scatter(t, item->sources[parts->begin].tensor, target->tensor, parts->bytes, parts->wire));
  return behind != 1 || item->postscale != 1 ? unpack(t, &out, behind, item->postscale) : 0;
}

/* Reduce-scatter the parts of all ranks, of one dtype. Rank 0 has the longest one. */
static int scatter_parts(cuda_thread *t, const device_item *item, const device_part *parts) {
  int ordered = is_ordered(t, item->op, parts);
  uint64_t room = ordered ? t->slab_bytes / 2 : t->slab_bytes, most = room / (VECTOR * (uint64_t)t->at->size) * VECTOR;
  divisors by = divisors_of(t, item->op, parts->wire);
  if (parts->bytes == 0) return 0;
  if (item->in_place && !ordered && by.before == 1 && item->prescale == 1 && parts[t->at->size - 1].bytes == parts->bytes)
    return scatter_in_place(t, item, parts, by.behind);
  for (uint64_t low = 0; low < parts->bytes; low += most)
    STEP(scatter_piece(t, item, parts, low, lesser(parts->bytes, low + most)));
  return 0;
}

static int run_part(cuda_thread *t, const device_item *item, const device_part *part) {
  if (part->bytes == 0) return 0;
  return item->work == DEVICE_ALLREDUCE ? sum_part(t, item, part) : spread_part(t, item, part);
}

int cuda_thread_run(cuda_thread *t, const device_item *item) {
  int scatters = item->work == DEVICE_REDUCESCATTER;
  if (item->n_transfers != 0) return cuda_thread_move(t, item);
  for (int k = 0; k < item->n_parts; k += scatters ? t->at->size : 1)
    STEP(scatters ? scatter_parts(t, item, &item->parts[k]) : run_part(t, item, &item->parts[k]));
  return 0;
}

/* A broken network shows only while the first kernels run: they do not end, and NCCL reports an error. */
int cuda_thread_await_connections(cuda_thread *t) {
  ncclResult_t state = ncclSuccess;
  for (;;) {
    CUresult code = IN_CALL(cuStreamQuery, t->stream);
    if (code != CUDA_ERROR_NOT_READY) return cuda_thread_after_cuda(t, "cuStreamQuery", code);
    STEP(cuda_thread_cancelled(t, "cuStreamQuery"));
    NCCL_STEP(ncclCommGetAsyncError, t->at->comm, &state);
    STEP(cuda_thread_after_nccl(t, "ncclCommGetAsyncError", state));
    cuda_thread_nap();
  }
}

/* NCCL connects ranks and allocates memory when an algorithm is first used, which it chooses by function and size. So each is
 * used once, before the program's tensors fill the memory. The slab's content does not matter. */
int cuda_thread_warm_up(cuda_thread *t) {
  uint64_t stride = t->slab_bytes / 2 / (VECTOR * (uint64_t)t->at->size) * VECTOR;
  if (t->at->size == 1) return 0;
  for (uint64_t bytes = VECTOR; bytes < t->slab_bytes; bytes *= 64) STEP(all_reduce(t, t->slab, t->slab, bytes, ENGINE_FLOAT32));
  STEP(all_reduce(t, t->slab, t->slab, t->slab_bytes, ENGINE_FLOAT32));
  for (uint64_t bytes = VECTOR; bytes < t->slab_bytes; bytes *= 64) STEP(broadcast(t, t->slab, t->slab, bytes, 0));
  STEP(exchange(t, t->slab, t->slab + t->slab_bytes / 2, stride));
  STEP(all_gather(t, VECTOR));
  STEP(all_gather(t, stride));
  STEP(reduce_scatter(t, t->slab, t->slab + (uint64_t)t->at->rank * VECTOR, VECTOR, ENGINE_FLOAT32));
  STEP(reduce_scatter(t, t->slab, t->slab + (uint64_t)t->at->rank * stride, stride, ENGINE_FLOAT32));
  STEP(cuda_thread_warm_up_moves(t));
  return cuda_thread_await_connections(t);
}

/* Enqueue an item, its waits and its events. */
static int enqueue(cuda_thread *t, const device_item *item) {
  int turn = (int)((item->ticket - 1) % DEVICE_OUTSTANDING);
  STEP(cuda_thread_look(t));
  if (item->ticket > DEVICE_OUTSTANDING) STEP(await(t, item->ticket - DEVICE_OUTSTANDING));
  for (int k = 0; k < item->n_ready; k++) CUDA_STEP(cuStreamWaitEvent, t->stream, item->ready[k]->event, 0);
  CUDA_STEP(cuEventRecord, t->begun[turn], t->stream);
  STEP(cuda_thread_sample_begins(t, item));
  STEP(cuda_thread_run(t, item));
  t->table_ends[turn] = t->table_head;
  CUDA_STEP(cuEventRecord, t->done[turn], t->stream);
  store_release(&t->d.enqueued, item->ticket); /* pairs with has_passed: the event is recorded */
  return 0;
}

int cuda_thread_launch(cuda_thread *t, const device_item *item) {
  int status = enqueue(t, item);
  if (status != 0) cuda_thread_sample_dropped(t);
  t->sampling = NULL;
  return status;
}
