/* The lane's calls of CUDA and NCCL: others see which call it is in, the first failure is kept, and a cancelled lane gives up. */
#ifndef ENGINE_GPU_CALLS_H
#define ENGINE_GPU_CALLS_H

#include "lane.h"

/* Keep a failure unless there is one already; returns -1. */
int lane_failed(lane *l, const char *call, int code, const char *name, const char *text);
/* Forget the failure so that the lane goes on; it must have left nothing behind. */
void lane_forgive(lane *l);
/* Return -1 if the lane was told to give up, which is kept as the failure of `call`; else 0. */
int lane_cancelled(lane *l, const char *call);
/* Handle the result of a call: returns 0, or -1 for a failure, which is kept. */
int lane_after_cuda(lane *l, const char *call, CUresult code);
int lane_after_nccl(lane *l, const char *call, ncclResult_t code);
/* Sleep for a moment between two polls. */
void lane_nap(void);
/* Wait until the stream is empty, for at most `limit` nanoseconds; 0: until the job is given up. Returns 0 if it is empty, -1
 * after a failure of the device, and 1 if it is not empty yet. */
int lane_drain(lane *l, uint64_t limit);
/* Poll a communicator that does not block until nothing is in progress, whatever `call` has returned. */
int lane_settle(lane *l, const char *call);

static inline uint64_t lesser(uint64_t x, uint64_t y) { return x < y ? x : y; }

/* Make a call, whose name others see meanwhile; gives its result. */
#define IN_CALL(name, ...) (store_pointer(&l->d.call, (void *)#name), l->f.name(__VA_ARGS__))
/* Make a call; gives 0, or -1 if it failed, which is kept. */
#define CUDA(name, ...) lane_after_cuda(l, #name, IN_CALL(name, __VA_ARGS__))
#define NCCL(name, ...) lane_after_nccl(l, #name, IN_CALL(name, __VA_ARGS__))
/* Return -1 from the calling function if `made` is nonzero: a call failed, or the lane was told to give up before it. */
#define STEP(made) \
  if (made) return -1
#define CUDA_STEP(name, ...) STEP(lane_cancelled(l, #name) || CUDA(name, __VA_ARGS__))
#define NCCL_STEP(name, ...) STEP(lane_cancelled(l, #name) || NCCL(name, __VA_ARGS__))

/* ---- the jobs (opening.c) and the items (launching.c) ---- */

/* Do a job, LANE_*. A failure is kept. */
void lane_work(lane *l, uint32_t job);
/* End kernels of NCCL after a failure: first, where NCCL can, without freeing memory that other ranks may still read. */
void lane_quieten(lane *l);
/* Use every algorithm once before items do, on all ranks together: returns 0, or -1 with a failure that is kept. */
int lane_warm_up(lane *l);
/* Enqueue an item: returns 0, or -1 with a failure that is kept. */
int lane_launch(lane *l, const device_item *item);
/* Connect the ranks that have the id of `at`, and warm up; lane_connect_set does so for a process set. lane_part_ranks ends the
 * communicator when all of its ranks do. */
int lane_connect_ranks(lane *l);
int lane_connect_set(lane *l);
int lane_part_ranks(lane *l);
/* Make a communicator over the ranks that have the id of `at`. */
int lane_join_ranks(lane *l, int blocking);
/* Enqueue an item's work, without marks and events, on the lane's current stream and slab. */
int lane_run(lane *l, const device_item *item);
/* Enqueue a sum of the first `bytes` of the slab over the ranks of `at`. */
int lane_try_sum(lane *l, uint64_t bytes, int wire);
uint64_t lane_table_bytes(uint64_t rows, uint64_t bytes); /* size of a table of `rows` that cover `bytes` of the slab */
/* Wait until the first kernels of `at` have run, or NCCL reports a network that does not work. */
int lane_await_connections(lane *l);

/* ---- frozen passes (freezing.c) ---- */

/* Make a pass's own resources; what its ranks need together; enqueue it. Each returns 0, or -1 with a failure that is kept. */
int lane_make_pass(lane *l, frozen_pass *p);
int lane_unite_pass(lane *l, frozen_pass *p);
int lane_enqueue_pass(lane *l, frozen_pass *p);
/* Return whether the device has passed all passes that were not captured; for any thread with the context. lane_passes_are_over
 * waits for that, at most `limit` nanoseconds. */
int lane_passes_rest(lane *l);
int lane_passes_are_over(lane *l, uint64_t limit);
/* Return whether a graph may contain a pass. */
int lane_has_captured(const lane *l);
/* Free a list of passes' resources. */
void lane_release_memory(const lane_functions *f, frozen_memory *memory);

/* ---- when graphs outlive the lane (keeping.c) ---- */

/* Make the keeper unless there is one: returns 0, or -1 without memory. */
int lane_make_keeper(lane *l);
/* Return whether the device was idle at some time since this was first asked, as only the driver knows of graphs' launches; for
 * any thread. lane_graphs_are_over asks anew, and waits at most `limit` nanoseconds. */
int lane_graphs_rest(lane *l);
int lane_graphs_are_over(lane *l, uint64_t limit);
/* Begin to end the communicator of frozen passes, which waits for all graphs with a pass. `finishes`: finalize it before. */
void lane_end_graphs(lane *l, int finishes);
/* Wait for that end, at most `limit` nanoseconds; returns whether it has come. */
int lane_graphs_have_ended(lane *l, uint64_t limit);
/* Free the resources of frozen passes. If a graph may still need them after `limit` nanoseconds, leave them, the module and the
 * context to the keeper instead. Returns whether they are left. */
int lane_release_passes(lane *l, uint64_t limit);
/* Enqueue an item of transfers (moving.c); use its functions of NCCL once in advance. */
int lane_move(lane *l, const device_item *item);
int lane_warm_up_moves(lane *l);
/* Find out which tickets the device has passed, publish them in `d`, and read samples. */
int lane_look(lane *l);

/* ---- samples (sampling.c) ---- */

/* Create and destroy timed events and marks. */
int lane_make_timers(lane *l);
void lane_release_timers(lane *l);
/* Begin a sample, once an item's waits are enqueued, if one of its marks is timed; end a slice behind each stage; drop the
 * sample if the item fails. */
int lane_sample_begins(lane *l, const device_item *item);
int lane_end_slice(lane *l, int stage);
void lane_sample_dropped(lane *l);
/* Read the samples that the device has passed. */
int lane_read_samples(lane *l);
/* Return whether a measured wait is still to be read. */
int lane_has_samples(const lane *l);
/* Compare the device's clock with the host's, unless that was done recently. The stream is empty. */
int lane_compare_clocks(lane *l);
/* Return a free stand, which is taken then; NULL: there is none. For threads of the program. */
lane_stand *lane_take_stand(lane *l);

/* ---- the order of items (turns.c) ---- */

/* Put a pushed item into the list where it belongs. */
void lane_sort(lane *l, device_item *item);
/* Remove and return the item whose turn it is; NULL: there is none, or it has not come yet. When the lane gives up, any item. */
device_item *lane_next(lane *l);
/* Describe what the lane waits for if an item of a process set has its turn and has not come; NULL: nothing. */
const char *lane_awaited(const lane *l);
/* Add a communicator to those in use, or remove it. */
void lane_enlist(lane *l, communicator *c);
void lane_remove_communicator(lane *l, communicator *c);
/* Return the communicator of an item. */
communicator *lane_communicator(lane *l, const device_item *item);
/* Give the lane an item, from any thread. */
void lane_push(lane *l, device_item *item);
/* Push a turn of a process set (device.turn): returns 0, or -1 without memory. */
int lane_turn(device_queue *queue);
/* ---- functions for other threads (streams.c) ---- */

/* Fill in the functions of a device. */
void lane_serve(device *d);
/* Create a mark in the lane's thread: returns 0, or -1 with a failure that is kept. */
int lane_make_mark(lane *l, int timed, device_mark **made);

#endif
