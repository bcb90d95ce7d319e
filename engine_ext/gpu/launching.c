/* Work that the lane enqueues for an item: wait for the marks, pack, reduce among the ranks, unpack, record `done`. */
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
_Static_assert((int)LANE_DTYPES == (int)ENGINE_DTYPES, "kernels for all dtypes that are reduced");

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
static int look_at_first(lane *l, uint64_t passed) {
  CUresult code = IN_CALL(cuEventQuery, l->begun[passed % DEVICE_OUTSTANDING]);
  store_pointer(&l->d.call, NULL);
  if (code == CUDA_ERROR_NOT_READY) return 0;
  STEP(lane_after_cuda(l, "cuEventQuery", code));
  store_release(&l->d.begun, passed + 1); /* pairs with device_watch */
  return 0;
}

int lane_look(lane *l) {
  uint64_t passed = l->d.passed;
  while (passed < l->d.enqueued) {
    CUresult code = IN_CALL(cuEventQuery, l->done[passed % DEVICE_OUTSTANDING]);
    store_pointer(&l->d.call, NULL);
    if (code == CUDA_ERROR_NOT_READY) break;
    STEP(lane_after_cuda(l, "cuEventQuery", code));
    if (l->table_ends[passed % DEVICE_OUTSTANDING] > l->table_tail) l->table_tail = l->table_ends[passed % DEVICE_OUTSTANDING];
    passed++;
  }
  if (passed > l->d.passed && load_pointer((void **)&l->d.went_on) != NULL) l->d.went_on(&l->d, passed - l->d.passed);
  store_release(&l->d.passed, passed); /* pairs with has_passed: the device no longer uses these tickets' tensors */
  STEP(lane_read_samples(l));
  return passed < l->d.enqueued && l->d.begun <= passed ? look_at_first(l, passed) : 0;
}

/* Wait until the device has passed a ticket. */
static int await(lane *l, uint64_t ticket) {
  for (;;) {
    STEP(lane_look(l));
    if (l->d.passed >= ticket) return 0;
    STEP(lane_cancelled(l, "cuEventQuery"));
    lane_nap();
  }
}

/* ---- tables of rows ---- */

/* A table has its rows and, if they are several, behind them a number for each piece of the slab, and one for the end. */
uint64_t lane_table_bytes(uint64_t rows, uint64_t bytes) {
  uint64_t numbers = rows > 1 ? (bytes + PIECE - 1) / PIECE + 1 : 0;
  return rows * sizeof(device_row) + up_to(numbers * sizeof(uint32_t), sizeof(uint64_t));
}

/* Reserve room in the ring: returns its address on the host, NULL after a failure, and in `at` the one on the device. The room
 * is used again once the device has passed the item. */
static device_row *reserve(lane *l, uint64_t bytes, CUdeviceptr *at) {
  uint64_t left = l->table_bytes - l->table_head % l->table_bytes;
  if (left < bytes) l->table_head += left;
  while (l->table_head + bytes - l->table_tail > l->table_bytes) {
    if (l->d.passed < l->d.enqueued) {
      if (await(l, l->d.passed + 1)) return NULL;
    } else {
      if (lane_drain(l, 0)) return NULL; /* the item's own tables fill it */
      l->table_tail = l->table_head;
    }
  }
  *at = l->device_tables + l->table_head % l->table_bytes;
  device_row *rows = (device_row *)(l->tables + l->table_head % l->table_bytes);
  l->table_head += bytes;
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
static int launch(lane *l, int kernel, uint64_t bytes, void **parameters) {
  uint64_t warps = (bytes + PIECE - 1) / PIECE;
  unsigned blocks = (unsigned)lesser((warps + THREADS / WARP - 1) / (THREADS / WARP), BLOCKS);
  CUDA_STEP(cuLaunchKernel, l->kernels[kernel], blocks, 1, 1, THREADS, 1, 1, 0, l->stream, parameters, NULL);
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
static int run_over(lane *l, const move *m, int kernel, int copies, uint64_t *identity, double *divisor, double *factor) {
  uint64_t numbers = lane_table_bytes(2, m->high - m->low) - lane_table_bytes(2, 0);
  uint64_t most = (l->table_bytes / 4 - numbers) / sizeof(device_row) - 1;
  for (int r = m->part->begin; r < m->part->end;) {
    CUdeviceptr table;
    uint64_t left = (uint64_t)(m->part->end - r), room = left > 1 ? lesser(most, left) : 1, base = 0;
    uint64_t reserved = lane_table_bytes(room, m->high - m->low);
    device_row *rows = reserve(l, reserved, &table);
    if (rows == NULL) return -1;
    uint64_t count = fill_table(m, copies, rows, room, &r, &base), used = 0;
    if (count != 0) {
      uint64_t end = rows[count - 1].offset + rows[count - 1].bytes, slab = m->slab + base;
      void *with_identity[] = {&table, &count, &end, &slab, identity, divisor, factor};
      void *without[] = {&table, &count, &end, &slab, divisor, factor};
      number_pieces(rows, count, end);
      used = lane_table_bytes(count, end);
      CUDA_STEP(cuMemcpyHtoDAsync_v2, table, rows, used, l->stream);
      STEP(launch(l, kernel, end, identity != NULL ? with_identity : without));
    }
    l->table_head -= reserved - used; /* give back the unused room: most rows may be of other pieces */
  }
  return 0;
}

/* Pack a piece into the slab, divided and multiplied on the way. */
static int pack(lane *l, const move *m, double divisor, double factor) {
  int dtype = m->part->dtype, wire = m->part->wire, plain = dtype == wire && dtype != ENGINE_BOOL && divisor == 1 && factor == 1;
  uint64_t identity = m->part->identity;
  STEP(run_over(l, m, plain ? l->known.pack_bytes : l->known.pack[dtype][wire], plain, &identity, &divisor, &factor));
  return lane_end_slice(l, DEVICE_PACK);
}

/* Unpack a piece from the slab, divided and multiplied on the way. */
static int unpack(lane *l, const move *m, double divisor, double factor) {
  int dtype = m->part->dtype, wire = m->part->wire;
  int plain = dtype == wire && ((divisor == 1 && factor == 1) || dtype == ENGINE_BOOL);
  STEP(run_over(l, m, plain ? l->known.unpack_bytes : l->known.unpack[dtype][wire], plain, NULL, &divisor, &factor));
  return lane_end_slice(l, DEVICE_UNPACK);
}

/* ---- among the ranks ---- */

/* Wait until a communicator that does not block has enqueued `call`: an event recorded before that would not cover it. */
static int settle(lane *l, const char *call) {
  STEP(lane_settle(l, call));
  return lane_end_slice(l, DEVICE_NCCL);
}

/* Sum over the ranks by NCCL, in an order of its own. */
static int all_reduce(lane *l, CUdeviceptr from, CUdeviceptr to, uint64_t bytes, int wire) {
  NCCL_STEP(ncclAllReduce, (void *)(uintptr_t)from, (void *)(uintptr_t)to, bytes / (uint64_t)dtype_bytes(wire),
            (ncclDataType_t)NCCL_DTYPES[wire], ncclSum, l->at->comm, l->stream);
  return settle(l, "ncclAllReduce");
}

int lane_try_sum(lane *l, uint64_t bytes, int wire) { return all_reduce(l, l->slab, l->slab, bytes, wire); }

static int broadcast(lane *l, CUdeviceptr from, CUdeviceptr to, uint64_t bytes, int root) {
  NCCL_STEP(ncclBroadcast, (void *)(uintptr_t)from, (void *)(uintptr_t)to, bytes, ncclUint8, root, l->at->comm, l->stream);
  return settle(l, "ncclBroadcast");
}

static int reduce_scatter(lane *l, CUdeviceptr from, CUdeviceptr to, uint64_t bytes, int wire) {
  NCCL_STEP(ncclReduceScatter, (void *)(uintptr_t)from, (void *)(uintptr_t)to, bytes / (uint64_t)dtype_bytes(wire),
            (ncclDataType_t)NCCL_DTYPES[wire], ncclSum, l->at->comm, l->stream);
  return settle(l, "ncclReduceScatter");
}

/* Send part r of the slab to each other rank r, and receive this rank's part from it at `parts` + r * `stride`. */
static int exchange(lane *l, CUdeviceptr slab, CUdeviceptr parts, uint64_t stride) {
  NCCL_STEP(ncclGroupStart);
  for (int r = 0; r < l->at->size; r++) {
    if (r == l->at->rank) continue;
    /* A group is ended whatever happens in it: a failure is kept. */
    NCCL(ncclSend, (void *)(uintptr_t)(slab + r * stride), stride, ncclUint8, r, l->at->comm, l->stream);
    NCCL(ncclRecv, (void *)(uintptr_t)(parts + r * stride), stride, ncclUint8, r, l->at->comm, l->stream);
  }
  NCCL(ncclGroupEnd);
  STEP(l->failure.call != NULL);
  return settle(l, "ncclGroupEnd");
}

/* Send every rank's part of the slab to all ranks. */
static int all_gather(lane *l, uint64_t stride) {
  NCCL_STEP(ncclAllGather, (void *)(uintptr_t)(l->slab + (uint64_t)l->at->rank * stride), (void *)(uintptr_t)l->slab, stride,
            ncclUint8, l->at->comm, l->stream);
  return settle(l, "ncclAllGather");
}

/* Reduce this rank's part of the slab in rank order: it receives that part from all others into the slab's second half. */
static int reduce_own(lane *l, int op, const device_part *part, uint64_t stride, double divisor, double factor) {
  uint64_t own = l->slab + (uint64_t)l->at->rank * stride, parts = l->slab + l->slab_bytes / 2;
  uint64_t elements = stride / (uint64_t)dtype_bytes(part->wire);
  unsigned rank = (unsigned)l->at->rank, count = (unsigned)l->at->size, reduction = (unsigned)(op == ENGINE_AVERAGE ? ENGINE_SUM : op);
  void *parameters[] = {&own, &parts, &stride, &own, &rank, &count, &elements, &reduction, &divisor, &factor};
  if (l->at->size > 1) STEP(exchange(l, l->slab, parts, stride));
  STEP(launch(l, l->known.reduce[part->wire], stride, parameters));
  return lane_end_slice(l, DEVICE_NCCL);
}

/* Reduce the first `bytes` of the slab in rank order, for all ranks. */
static int reduce_in_order(lane *l, int op, const device_part *part, uint64_t bytes, double divisor, double factor) {
  uint64_t stride = up_to((bytes + (uint64_t)l->at->size - 1) / (uint64_t)l->at->size, VECTOR);
  STEP(reduce_own(l, op, part, stride, divisor, factor));
  return l->at->size > 1 ? all_gather(l, stride) : 0;
}

/* ---- an item ---- */

/* Return whether a part is reduced in rank order by our kernels: NCCL lacks the reduction, or its result differs from host
 * memory's. NCCL's Min and Max lose a NaN, and a sum of integers may wrap before it is divided. With the setting
 * device_sums=ordered every part is, since NCCL sums and rounds in an order of its own. */
static int is_ordered(const lane *l, int op, const device_part *part) {
  int wire = part->wire, whole = wire >= ENGINE_INT8;
  if (l->at->size == 1) return wire != part->dtype; /* so that the scaled sum is rounded to `wire`, as with several ranks */
  return l->ordered || NCCL_DTYPES[wire] < 0 || (op != ENGINE_SUM && (op != ENGINE_AVERAGE || whole));
}

/* Divisors of tensors before the sum, and behind it. */
typedef struct divisors {
  double before, behind;
} divisors;

/* Average divides behind the sum, except float16 tensors, whose sum could overflow: they are divided before. */
static divisors divisors_of(const lane *l, int op, int wire) {
  double size = op == ENGINE_AVERAGE ? l->at->size : 1;
  return wire == ENGINE_FLOAT16 ? (divisors){size, 1} : (divisors){1, size};
}

/* Reduce the piece [low, high) of a part. If the part has a `place`, that is used instead of the slab, and tensors that lie there
 * already are not copied. */
static int sum_piece(lane *l, const device_item *item, const device_part *part, uint64_t low, uint64_t high) {
  int ordered = is_ordered(l, item->op, part);
  CUdeviceptr slab = part->place != 0 && !ordered ? part->place + low : l->slab;
  const move in = {part, item->sources, low, high, slab}, out = {part, item->targets, low, high, slab};
  if (ordered) {
    STEP(pack(l, &in, 1, item->prescale));
    STEP(reduce_in_order(l, item->op, part, high - low, item->op == ENGINE_AVERAGE ? l->at->size : 1, item->postscale));
    return unpack(l, &out, 1, 1);
  }
  divisors by = divisors_of(l, item->op, part->wire);
  STEP(pack(l, &in, by.before, item->prescale));
  if (l->at->size > 1) STEP(all_reduce(l, slab, slab, high - low, part->wire));
  return unpack(l, &out, by.behind, item->postscale);
}

/* Sum a part of one tensor, which is its own slab. */
static int sum_in_place(lane *l, const device_item *item, const device_part *part) {
  CUdeviceptr from = item->sources[part->begin].tensor, to = item->targets[part->begin].tensor;
  const move in = {part, item->sources, 0, part->bytes, to}, out = {part, item->targets, 0, part->bytes, to};
  divisors by = divisors_of(l, item->op, part->wire);
  if (by.before != 1 || item->prescale != 1 || part->dtype == ENGINE_BOOL || (l->at->size == 1 && from != to)) {
    STEP(pack(l, &in, by.before, item->prescale));
    from = to;
  }
  if (l->at->size > 1) STEP(all_reduce(l, from, to, part->bytes, part->wire));
  return by.behind != 1 || item->postscale != 1 ? unpack(l, &out, by.behind, item->postscale) : 0;
}

/* Broadcast the piece [low, high) of a part. */
static int spread_piece(lane *l, const device_item *item, const device_part *part, uint64_t low, uint64_t high) {
  const move in = {part, item->sources, low, high, l->slab}, out = {part, item->targets, low, high, l->slab};
  CUdeviceptr from = item->sources[part->begin].tensor, to = item->targets[part->begin].tensor;
  if (item->in_place && to != 0) /* the tensor is its own slab; a rank that has joined has no tensor */
    return l->at->size > 1 || from != to ? broadcast(l, from + low, to + low, high - low, item->root) : 0;
  if (l->at->rank == item->root) STEP(pack(l, &in, 1, 1));
  if (l->at->size > 1) STEP(broadcast(l, l->slab, l->slab, high - low, item->root));
  return unpack(l, &out, 1, 1);
}

static int spread_part(lane *l, const device_item *item, const device_part *part) {
  for (uint64_t low = 0; low < part->bytes; low += l->slab_bytes)
    STEP(spread_piece(l, item, part, low, lesser(part->bytes, low + l->slab_bytes)));
  return 0;
}

static int sum_part(lane *l, const device_item *item, const device_part *part) {
  uint64_t piece = l->slab_bytes;
  if (is_ordered(l, item->op, part)) piece = l->slab_bytes / 2 / (VECTOR * (uint64_t)l->at->size) * (VECTOR * (uint64_t)l->at->size);
  else if (item->in_place) return sum_in_place(l, item, part);
  for (uint64_t low = 0; low < part->bytes; low += piece)
    STEP(sum_piece(l, item, part, low, lesser(part->bytes, low + piece)));
  return 0;
}

/* Reduce-scatter the piece [low, high) of each rank's part, each in a window of its own. The bytes behind a shorter part do not
 * matter. */
static int scatter_piece(lane *l, const device_item *item, const device_part *parts, uint64_t low, uint64_t high) {
  uint64_t stride = up_to(high - low, VECTOR), own = l->slab + (uint64_t)l->at->rank * stride;
  const move out = {parts + l->at->rank, item->targets, low, high, own};
  int wire = parts->wire, ordered = is_ordered(l, item->op, parts);
  divisors by = divisors_of(l, item->op, wire);
  for (int r = 0; r < l->at->size; r++) {
    const move in = {parts + r, item->sources, low, high, l->slab + (uint64_t)r * stride};
    STEP(pack(l, &in, ordered ? 1 : by.before, item->prescale));
  }
  if (ordered) {
    STEP(reduce_own(l, item->op, parts, stride, item->op == ENGINE_AVERAGE ? l->at->size : 1, item->postscale));
    return unpack(l, &out, 1, 1);
  }
  STEP(reduce_scatter(l, l->slab, own, stride, wire));
  return unpack(l, &out, by.behind, item->postscale);
}

/* Reduce-scatter one tensor whose parts are equally long; it is its own slab. */
static int scatter_in_place(lane *l, const device_item *item, const device_part *parts, double behind) {
  const device_row *target = &item->targets[parts[l->at->rank].begin];
  const move out = {parts + l->at->rank, item->targets, 0, parts->bytes, target->tensor};
  STEP(reduce_scatter(l, item->sources[parts->begin].tensor, target->tensor, parts->bytes, parts->wire));
  return behind != 1 || item->postscale != 1 ? unpack(l, &out, behind, item->postscale) : 0;
}

/* Reduce-scatter the parts of all ranks, of one dtype. Rank 0 has the longest one. */
static int scatter_parts(lane *l, const device_item *item, const device_part *parts) {
  int ordered = is_ordered(l, item->op, parts);
  uint64_t room = ordered ? l->slab_bytes / 2 : l->slab_bytes, most = room / (VECTOR * (uint64_t)l->at->size) * VECTOR;
  divisors by = divisors_of(l, item->op, parts->wire);
  if (parts->bytes == 0) return 0;
  if (item->in_place && !ordered && by.before == 1 && item->prescale == 1 && parts[l->at->size - 1].bytes == parts->bytes)
    return scatter_in_place(l, item, parts, by.behind);
  for (uint64_t low = 0; low < parts->bytes; low += most)
    STEP(scatter_piece(l, item, parts, low, lesser(parts->bytes, low + most)));
  return 0;
}

static int run_part(lane *l, const device_item *item, const device_part *part) {
  if (part->bytes == 0) return 0;
  return item->work == DEVICE_ALLREDUCE ? sum_part(l, item, part) : spread_part(l, item, part);
}

int lane_run(lane *l, const device_item *item) {
  int scatters = item->work == DEVICE_REDUCESCATTER;
  if (item->n_transfers != 0) return lane_move(l, item);
  for (int k = 0; k < item->n_parts; k += scatters ? l->at->size : 1)
    STEP(scatters ? scatter_parts(l, item, &item->parts[k]) : run_part(l, item, &item->parts[k]));
  return 0;
}

/* A broken network shows only while the first kernels run: they do not end, and NCCL reports an error. */
int lane_await_connections(lane *l) {
  ncclResult_t state = ncclSuccess;
  for (;;) {
    CUresult code = IN_CALL(cuStreamQuery, l->stream);
    if (code != CUDA_ERROR_NOT_READY) return lane_after_cuda(l, "cuStreamQuery", code);
    STEP(lane_cancelled(l, "cuStreamQuery"));
    NCCL_STEP(ncclCommGetAsyncError, l->at->comm, &state);
    STEP(lane_after_nccl(l, "ncclCommGetAsyncError", state));
    lane_nap();
  }
}

/* NCCL connects ranks and allocates memory when an algorithm is first used, which it chooses by function and size. So each is
 * used once, before the program's tensors fill the memory. The slab's content does not matter. */
int lane_warm_up(lane *l) {
  uint64_t stride = l->slab_bytes / 2 / (VECTOR * (uint64_t)l->at->size) * VECTOR;
  if (l->at->size == 1) return 0;
  for (uint64_t bytes = VECTOR; bytes < l->slab_bytes; bytes *= 64) STEP(all_reduce(l, l->slab, l->slab, bytes, ENGINE_FLOAT32));
  STEP(all_reduce(l, l->slab, l->slab, l->slab_bytes, ENGINE_FLOAT32));
  for (uint64_t bytes = VECTOR; bytes < l->slab_bytes; bytes *= 64) STEP(broadcast(l, l->slab, l->slab, bytes, 0));
  STEP(exchange(l, l->slab, l->slab + l->slab_bytes / 2, stride));
  STEP(all_gather(l, VECTOR));
  STEP(all_gather(l, stride));
  STEP(reduce_scatter(l, l->slab, l->slab + (uint64_t)l->at->rank * VECTOR, VECTOR, ENGINE_FLOAT32));
  STEP(reduce_scatter(l, l->slab, l->slab + (uint64_t)l->at->rank * stride, stride, ENGINE_FLOAT32));
  STEP(lane_warm_up_moves(l));
  return lane_await_connections(l);
}

/* Enqueue an item, its waits and its events. */
static int enqueue(lane *l, const device_item *item) {
  int turn = (int)((item->ticket - 1) % DEVICE_OUTSTANDING);
  STEP(lane_look(l));
  if (item->ticket > DEVICE_OUTSTANDING) STEP(await(l, item->ticket - DEVICE_OUTSTANDING));
  for (int k = 0; k < item->n_ready; k++) CUDA_STEP(cuStreamWaitEvent, l->stream, item->ready[k]->event, 0);
  CUDA_STEP(cuEventRecord, l->begun[turn], l->stream);
  STEP(lane_sample_begins(l, item));
  STEP(lane_run(l, item));
  l->table_ends[turn] = l->table_head;
  CUDA_STEP(cuEventRecord, l->done[turn], l->stream);
  store_release(&l->d.enqueued, item->ticket); /* pairs with has_passed: the event is recorded */
  return 0;
}

int lane_launch(lane *l, const device_item *item) {
  int status = enqueue(l, item);
  if (status != 0) lane_sample_dropped(l);
  l->sampling = NULL;
  return status;
}
