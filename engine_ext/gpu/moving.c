/* Items that only move rows among the ranks: allgather and all-to-all. Rows travel directly from a tensor to the result, without
 * packing.
 *
 * Every rank makes the calls of an allgather in the same order and in the same groups. An all-to-all goes in rounds. The n-th
 * round has the n-th piece of everything that any rank sends to any other, so no rank waits in a round for a later round.
 */
#include "calls.h"

enum { CALLS = 1024 };                             /* of one group of NCCL's, which takes 2048 */
static const uint64_t LARGEST = (uint64_t)1 << 30; /* bytes of one call */

static inline void *pointer(uint64_t at) { return (void *)(uintptr_t)at; }

static int copy(cuda_thread *t, uint64_t target, uint64_t source, uint64_t bytes) {
  if (bytes != 0 && target != 0) CUDA_STEP(cuMemcpyDtoDAsync_v2, target, source, bytes, t->stream);
  return 0;
}

/* ---- a group of calls ---- */

/* Count a call, and begin a group before its first one. The group is ended even if a call fails, since the failure is kept. */
static int begin_call(cuda_thread *t, int *calls) {
  if (*calls == 0) NCCL_STEP(ncclGroupStart);
  ++*calls;
  return 0;
}

/* End the group, if one has begun, and wait until NCCL has enqueued it. */
static int end_calls(cuda_thread *t, int *calls) {
  if (*calls == 0) return 0;
  *calls = 0;
  NCCL(ncclGroupEnd);
  STEP(t->failure.call != NULL);
  STEP(cuda_thread_settle(t, "ncclGroupEnd"));
  return cuda_thread_end_slice(t, DEVICE_NCCL);
}

/* ---- to all ---- */

/* Return whether all ranks send equally many bytes, and few enough for one call. */
static int is_even(const cuda_thread *t, const device_transfer *p) {
  for (int r = 1; r < t->at->size; r++)
    if (p->received[r] != p->received[0]) return 0;
  return p->received[0] <= LARGEST;
}

/* Broadcast the rows of rank r. A rank without a target receives them into the slab, where nobody reads them. Ranks may forward
 * what they receive, so a group has only one broadcast into the slab. */
static int gather_from(cuda_thread *t, const device_item *item, const device_transfer *p, int r, uint64_t begin, int *calls) {
  uint64_t most = item->lacking ? t->slab_bytes : LARGEST;
  for (uint64_t low = 0; low < p->received[r]; low += most) {
    uint64_t to = p->target != 0 ? p->target + begin + low : t->slab, from = r == t->at->rank ? p->source + low : to;
    STEP(begin_call(t, calls));
    NCCL(ncclBroadcast, pointer(from), pointer(to), lesser(most, p->received[r] - low), ncclUint8, r, t->at->comm, t->stream);
    if (item->lacking || *calls == CALLS) STEP(end_calls(t, calls));
  }
  return 0;
}

static int gather_transfer(cuda_thread *t, const device_item *item, const device_transfer *p, int *calls) {
  uint64_t begin = 0;
  if (!item->lacking && is_even(t, p)) {
    if (p->received[0] == 0) return 0;
    STEP(begin_call(t, calls));
    NCCL(ncclAllGather, pointer(p->source), pointer(p->target), p->received[0], ncclUint8, t->at->comm, t->stream);
    return *calls == CALLS ? end_calls(t, calls) : 0;
  }
  for (int r = 0; r < t->at->size; begin += p->received[r++])
    STEP(gather_from(t, item, p, r, begin, calls));
  return 0;
}

static int gather(cuda_thread *t, const device_item *item) {
  int calls = 0;
  for (int k = 0; k < item->n_transfers; k++) {
    const device_transfer *p = &item->transfers[k];
    STEP(t->at->size == 1 ? copy(t, p->target, p->source, p->received[0]) : gather_transfer(t, item, p, &calls));
  }
  return end_calls(t, &calls);
}

/* ---- to each its own ---- */

/* Add the calls of one round: this rank's sends and receives of pieces of at most `most` bytes, from byte `low` on. */
static int exchange_round(cuda_thread *t, const device_transfer *p, uint64_t low, uint64_t most, int *calls) {
  uint64_t from = p->source, to = p->target;
  for (int r = 0; r < t->at->size; from += p->sent[r], to += p->target != 0 ? p->received[r] : 0, r++) {
    if (r == t->at->rank) continue;
    if (low < p->sent[r]) {
      STEP(begin_call(t, calls));
      NCCL(ncclSend, pointer(from + low), lesser(most, p->sent[r] - low), ncclUint8, r, t->at->comm, t->stream);
    }
    if (low < p->received[r]) {
      STEP(begin_call(t, calls));
      NCCL(ncclRecv, pointer(p->target != 0 ? to + low : t->slab), lesser(most, p->received[r] - low), ncclUint8, r, t->at->comm,
           t->stream);
    }
  }
  return 0;
}

static int exchange(cuda_thread *t, const device_item *item) {
  const device_transfer *p = item->transfers;
  uint64_t most = item->lacking ? t->slab_bytes : LARGEST, longest = 0, from = p->source, to = p->target;
  int calls = 0;
  for (int r = 0; r < t->at->rank; r++) {
    from += p->sent[r];
    to += p->received[r];
  }
  if (p->target != 0) STEP(copy(t, to, from, p->sent[t->at->rank]));
  for (int r = 0; r < t->at->size; r++) {
    if (r == t->at->rank) continue;
    if (p->sent[r] > longest) longest = p->sent[r];
    if (p->received[r] > longest) longest = p->received[r];
  }
  for (uint64_t low = 0; low < longest; low += most) {
    STEP(exchange_round(t, p, low, most, &calls));
    STEP(end_calls(t, &calls));
  }
  return 0;
}

int cuda_thread_move(cuda_thread *t, const device_item *item) {
  return item->work == DEVICE_ALLGATHER ? gather(t, item) : exchange(t, item);
}

/* Use both ways of an allgather in one group, as items do. cuda_thread_warm_up uses sends and receives, as reductions need them.
 * */
int cuda_thread_warm_up_moves(cuda_thread *t) {
  uint64_t at = t->slab, half = t->slab + t->slab_bytes / 2;
  int calls = 0;
  for (int r = 0; r < t->at->size; r++) {
    STEP(begin_call(t, &calls));
    NCCL(ncclBroadcast, pointer(at + (uint64_t)r * 16), pointer(at + (uint64_t)r * 16), 16, ncclUint8, r, t->at->comm, t->stream);
  }
  STEP(begin_call(t, &calls));
  NCCL(ncclAllGather, pointer(half + (uint64_t)t->at->rank * 16), pointer(half), 16, ncclUint8, t->at->comm, t->stream);
  return end_calls(t, &calls);
}
