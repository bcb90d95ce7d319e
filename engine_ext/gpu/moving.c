/* What only moves among the ranks: the rows of each to all, or to each its own. Rows travel from where a tensor lies to where the
 * result is wanted; nothing is packed.
 *
 * Every rank makes the calls of an allgather in the same order and in the same groups. An all-to-all goes in rounds, of which the
 * n-th has the n-th piece of what any rank sends to any other: so none waits in a round for what another sends in a later one.
 */
#include "calls.h"

enum { CALLS = 1024 };                             /* of one group of NCCL's, which takes 2048 */
static const uint64_t LARGEST = (uint64_t)1 << 30; /* bytes of one call */

static inline void *pointer(uint64_t at) { return (void *)(uintptr_t)at; }

static int copy(lane *l, uint64_t target, uint64_t source, uint64_t bytes) {
  if (bytes != 0 && target != 0) CUDA_STEP(cuMemcpyDtoDAsync_v2, target, source, bytes, l->stream);
  return 0;
}

/* ---- a group of calls ---- */

/* Another call follows. Whatever it returns, the group is ended later: a failure is kept. */
static int begin_call(lane *l, int *calls) {
  if (*calls == 0) NCCL_STEP(ncclGroupStart);
  ++*calls;
  return 0;
}

static int end_calls(lane *l, int *calls) {
  if (*calls == 0) return 0;
  *calls = 0;
  NCCL(ncclGroupEnd);
  STEP(l->failure.call != NULL);
  STEP(lane_settle(l, "ncclGroupEnd"));
  return lane_cut(l, DEVICE_NCCL);
}

/* ---- to all ---- */

static int is_even(const lane *l, const device_transfer *p) {
  for (int r = 1; r < l->at->size; r++)
    if (p->received[r] != p->received[0]) return 0;
  return p->received[0] <= LARGEST;
}

/* What rank r has, to all: what comes to a rank without room for it goes to the slab, where nobody reads it. As ranks may pass on what
 * they receive, the slab takes one broadcast of a group. */
static int gather_from(lane *l, const device_item *item, const device_transfer *p, int r, uint64_t begin, int *calls) {
  uint64_t most = item->lacking ? l->slab_bytes : LARGEST;
  for (uint64_t low = 0; low < p->received[r]; low += most) {
    uint64_t to = p->target != 0 ? p->target + begin + low : l->slab, from = r == l->at->rank ? p->source + low : to;
    STEP(begin_call(l, calls));
    NCCL(ncclBroadcast, pointer(from), pointer(to), lesser(most, p->received[r] - low), ncclUint8, r, l->at->comm, l->stream);
    if (item->lacking || *calls == CALLS) STEP(end_calls(l, calls));
  }
  return 0;
}

static int gather_transfer(lane *l, const device_item *item, const device_transfer *p, int *calls) {
  uint64_t begin = 0;
  if (!item->lacking && is_even(l, p)) {
    if (p->received[0] == 0) return 0;
    STEP(begin_call(l, calls));
    NCCL(ncclAllGather, pointer(p->source), pointer(p->target), p->received[0], ncclUint8, l->at->comm, l->stream);
    return *calls == CALLS ? end_calls(l, calls) : 0;
  }
  for (int r = 0; r < l->at->size; begin += p->received[r++])
    STEP(gather_from(l, item, p, r, begin, calls));
  return 0;
}

static int gather(lane *l, const device_item *item) {
  int calls = 0;
  for (int k = 0; k < item->n_transfers; k++) {
    const device_transfer *p = &item->transfers[k];
    STEP(l->at->size == 1 ? copy(l, p->target, p->source, p->received[0]) : gather_transfer(l, item, p, &calls));
  }
  return end_calls(l, &calls);
}

/* ---- to each its own ---- */

/* The pieces from `low` on. Whether there were any: for this rank, which is all that it knows of. */
static int exchange_round(lane *l, const device_transfer *p, uint64_t low, uint64_t most, int *calls) {
  uint64_t from = p->source, to = p->target;
  for (int r = 0; r < l->at->size; from += p->sent[r], to += p->target != 0 ? p->received[r] : 0, r++) {
    if (r == l->at->rank) continue;
    if (low < p->sent[r]) {
      STEP(begin_call(l, calls));
      NCCL(ncclSend, pointer(from + low), lesser(most, p->sent[r] - low), ncclUint8, r, l->at->comm, l->stream);
    }
    if (low < p->received[r]) {
      STEP(begin_call(l, calls));
      NCCL(ncclRecv, pointer(p->target != 0 ? to + low : l->slab), lesser(most, p->received[r] - low), ncclUint8, r, l->at->comm,
           l->stream);
    }
  }
  return 0;
}

static int exchange(lane *l, const device_item *item) {
  const device_transfer *p = item->transfers;
  uint64_t most = item->lacking ? l->slab_bytes : LARGEST, longest = 0, from = p->source, to = p->target;
  int calls = 0;
  for (int r = 0; r < l->at->rank; r++) {
    from += p->sent[r];
    to += p->received[r];
  }
  if (p->target != 0) STEP(copy(l, to, from, p->sent[l->at->rank]));
  for (int r = 0; r < l->at->size; r++) {
    if (r == l->at->rank) continue;
    if (p->sent[r] > longest) longest = p->sent[r];
    if (p->received[r] > longest) longest = p->received[r];
  }
  for (uint64_t low = 0; low < longest; low += most) {
    STEP(exchange_round(l, p, low, most, &calls));
    STEP(end_calls(l, &calls));
  }
  return 0;
}

int lane_move(lane *l, const device_item *item) {
  return item->work == DEVICE_GATHER ? gather(l, item) : exchange(l, item);
}

/* Both ways of an allgather in one group, as items use them; sends and receives are used by what reduces, too. */
int lane_warm_up_moves(lane *l) {
  uint64_t at = l->slab, half = l->slab + l->slab_bytes / 2;
  int calls = 0;
  for (int r = 0; r < l->at->size; r++) {
    STEP(begin_call(l, &calls));
    NCCL(ncclBroadcast, pointer(at + (uint64_t)r * 16), pointer(at + (uint64_t)r * 16), 16, ncclUint8, r, l->at->comm, l->stream);
  }
  STEP(begin_call(l, &calls));
  NCCL(ncclAllGather, pointer(half + (uint64_t)l->at->rank * 16), pointer(half), 16, ncclUint8, l->at->comm, l->stream);
  return end_calls(l, &calls);
}
