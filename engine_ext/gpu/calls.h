/* How the lane calls CUDA and NCCL: others see in which call it is, the first failure is kept, and it gives up when told to. */
#ifndef ENGINE_GPU_CALLS_H
#define ENGINE_GPU_CALLS_H

#include "lane.h"

/* Keep the first failure; returns -1. */
int lane_failed(lane *l, const char *call, int code, const char *name, const char *text);
/* Forget it: nothing of it is left, and the lane goes on. */
void lane_forgive(lane *l);
/* Whether the lane is to give up, which is kept as the failure of `call`. */
int lane_cancelled(lane *l, const char *call);
/* What a call has returned: 0, or -1 for a failure, which is kept. */
int lane_after_cuda(lane *l, const char *call, CUresult code);
int lane_after_nccl(lane *l, const char *call, ncclResult_t code);
/* Sleep for a moment between two looks at something that goes on elsewhere. */
void lane_nap(void);
/* Wait until the stream is empty, or for `limit`; 0: until it is or the job is given up. Returns 1 if it is not. */
int lane_drain(lane *l, uint64_t limit);
/* A communicator that does not block: ask until nothing is in progress, whatever `call` has returned. */
int lane_settle(lane *l, const char *call);

static inline uint64_t lesser(uint64_t x, uint64_t y) { return x < y ? x : y; }

/* A call, while others see which one it is; what it returned. */
#define IN_CALL(name, ...) (store_pointer(&l->d.call, (void *)#name), l->f.name(__VA_ARGS__))
/* Whether it failed, which is kept. */
#define CUDA(name, ...) lane_after_cuda(l, #name, IN_CALL(name, __VA_ARGS__))
#define NCCL(name, ...) lane_after_nccl(l, #name, IN_CALL(name, __VA_ARGS__))
/* The same for what may be given up: `return` if it was, or has failed. */
#define STEP(made) \
  if (made) return -1
#define CUDA_STEP(name, ...) STEP(lane_cancelled(l, #name) || CUDA(name, __VA_ARGS__))
#define NCCL_STEP(name, ...) STEP(lane_cancelled(l, #name) || NCCL(name, __VA_ARGS__))

/* ---- the jobs (opening.c) and the items (launching.c) ---- */

void lane_work(lane *l, uint32_t job);
/* End the communicator's kernels, as far as that goes without freeing what other ranks may still read. */
void lane_quieten(lane *l);
/* Use once what items use, on all ranks together: 0, or -1 with a failure that is kept. */
int lane_warm_up(lane *l);
/* Enqueue an item: 0, or -1 with a failure that is kept. */
int lane_launch(lane *l, const device_item *item);
/* Connect `at` the ranks that have its id, with its first uses; end it when all its ranks do. `lane_connect_set`: of a process set. */
int lane_connect_ranks(lane *l);
int lane_connect_set(lane *l);
int lane_part_ranks(lane *l);
/* Make a communicator over the ranks that have the id of `at`. */
int lane_join_ranks(lane *l, int blocking);
/* What an item does among the ranks, on the lane's stream as it is now; and sum, of the slab as it is, so many bytes. */
int lane_run(lane *l, const device_item *item);
int lane_try_sum(lane *l, uint64_t bytes, int wire);
uint64_t lane_table_bytes(uint64_t rows, uint64_t bytes); /* of a table whose rows take so many bytes of the slab */
int lane_await_connections(lane *l);

/* ---- frozen passes (freezing.c) ---- */

int lane_make_pass(lane *l, frozen_pass *p);
int lane_unite_pass(lane *l, frozen_pass *p);
int lane_enqueue_pass(lane *l, frozen_pass *p);
/* Whether the device has passed all that were not captured; in any thread with the context. `lane_passes_are_over` waits for that. */
int lane_passes_rest(lane *l);
int lane_passes_are_over(lane *l, uint64_t limit);
/* Whether a graph may have one of them. */
int lane_has_captured(const lane *l);
void lane_release_memory(const lane_functions *f, frozen_memory *memory);

/* ---- when graphs outlive the lane (keeping.c) ---- */

/* 0, or -1 without memory. */
int lane_hire_keeper(lane *l);
/* Whether the device has come to rest since the first time that this was asked: launches of graphs are known to the driver alone. In
 * any thread. `lane_graphs_are_over` asks anew, and waits at most so long. */
int lane_graphs_rest(lane *l);
int lane_graphs_are_over(lane *l, uint64_t limit);
/* End the communicator of frozen passes, which waits for all graphs that have one; `finishes`: not before NCCL has sent all. */
void lane_end_graphs(lane *l, int finishes);
/* Wait for that, at most so long; whether it has ended. */
int lane_graphs_have_ended(lane *l, uint64_t limit);
/* Free what frozen passes have, or leave it to the keeper, and with it the module and the context, if a graph may still need that
 * after so long. Whether it is left. */
int lane_release_passes(lane *l, uint64_t limit);
/* Enqueue what transfers bring (moving.c), and use once what that uses. */
int lane_move(lane *l, const device_item *item);
int lane_warm_up_moves(lane *l);
/* Look which tickets the device has passed. */
int lane_look(lane *l);

/* ---- samples (sampling.c) ---- */

/* Timed events and marks: made, and destroyed. */
int lane_make_timers(lane *l);
void lane_release_timers(lane *l);
/* An item is sampled if one of its marks is timed. What it waits for is enqueued; then, behind each of its stages; and if it fails. */
int lane_sample_begins(lane *l, const device_item *item);
int lane_cut(lane *l, int stage);
void lane_sample_dropped(lane *l);
/* Read what the device has passed. */
int lane_read_samples(lane *l);
int lane_has_samples(const lane *l);
/* Compare the device's clock with the host's, if that is long ago. The stream is empty. */
int lane_compare_clocks(lane *l);
/* In a thread of the program: a stand whose events nobody uses, or NULL. */
lane_stand *lane_take_stand(lane *l);

/* ---- the order of items (turns.c) ---- */

/* Put an item where it belongs that another thread has pushed. */
void lane_sort(lane *l, device_item *item);
/* The item whose turn it is, which is not in any list any more; NULL: there is none, or it has not come yet. When the lane is to give
 * up, whatever there is. */
device_item *lane_next(lane *l);
/* What the lane waits for if an item of a process set has its turn and has not come; NULL: it has, or there is none. */
const char *lane_awaited(const lane *l);
/* The lane works with this communicator from now on, or no more. */
void lane_enlist(lane *l, communicator *c);
void lane_strike(lane *l, communicator *c);
/* The communicator of an item. */
communicator *lane_communicator(lane *l, const device_item *item);
/* Hand the lane something, from any thread. */
void lane_push(lane *l, device_item *item);
int lane_turn(device_queue *queue);
/* ---- what other threads call (streams.c) ---- */

void lane_serve(device *d);
int lane_make_mark(lane *l, int timed, device_mark **made);

#endif
