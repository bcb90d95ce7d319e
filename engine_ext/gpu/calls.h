/* The CUDA thread's calls: others see which call it is in, the first failure is kept, and a cancelled thread gives up. */
#ifndef ENGINE_GPU_CALLS_H
#define ENGINE_GPU_CALLS_H

#include "cuda_thread.h"

/* Keep a failure unless there is one already; returns -1. */
int cuda_thread_failed(cuda_thread *t, const char *call, int code, const char *name, const char *text);
/* Forget the failure so that the CUDA thread goes on; it must have left nothing behind. */
void cuda_thread_forgive(cuda_thread *t);
/* Return -1 if the CUDA thread was told to give up, which is kept as the failure of `call`; else 0. */
int cuda_thread_cancelled(cuda_thread *t, const char *call);
/* Handle the result of a call: returns 0, or -1 for a failure, which is kept. */
int cuda_thread_after_cuda(cuda_thread *t, const char *call, CUresult code);
int cuda_thread_after_nccl(cuda_thread *t, const char *call, ncclResult_t code);
/* Sleep for a moment between two polls. */
void cuda_thread_nap(void);
/* Wait until the stream is empty, for at most `limit` nanoseconds; 0: until the job is given up. Returns 0 if it is empty, -1
 * after a failure of the device, and 1 if it is not empty yet. */
int cuda_thread_drain(cuda_thread *t, uint64_t limit);
/* Poll a communicator that does not block until nothing is in progress, whatever `call` has returned. */
int cuda_thread_settle(cuda_thread *t, const char *call);

static inline uint64_t lesser(uint64_t x, uint64_t y) { return x < y ? x : y; }

/* Make a call, whose name others see meanwhile; gives its result. */
#define IN_CALL(name, ...) (store_pointer(&t->d.call, (void *)#name), t->f.name(__VA_ARGS__))
/* Make a call; gives 0, or -1 if it failed, which is kept. */
#define CUDA(name, ...) cuda_thread_after_cuda(t, #name, IN_CALL(name, __VA_ARGS__))
#define NCCL(name, ...) cuda_thread_after_nccl(t, #name, IN_CALL(name, __VA_ARGS__))
/* Return -1 from the calling function if `made` is nonzero: a call failed, or the CUDA thread was told to give up before it. */
#define STEP(made) \
  if (made) return -1
#define CUDA_STEP(name, ...) STEP(cuda_thread_cancelled(t, #name) || CUDA(name, __VA_ARGS__))
#define NCCL_STEP(name, ...) STEP(cuda_thread_cancelled(t, #name) || NCCL(name, __VA_ARGS__))

/* ---- the jobs (opening.c) and the items (launching.c) ---- */

/* Do a job, CUDA_THREAD_*. A failure is kept. */
void cuda_thread_work(cuda_thread *t, uint32_t job);
/* End kernels of NCCL after a failure: first, where NCCL can, without freeing memory that other ranks may still read. */
void cuda_thread_quieten(cuda_thread *t);
/* Use every algorithm once before items do, on all ranks together: returns 0, or -1 with a failure that is kept. */
int cuda_thread_warm_up(cuda_thread *t);
/* Enqueue an item: returns 0, or -1 with a failure that is kept. */
int cuda_thread_launch(cuda_thread *t, const device_item *item);
/* Connect the ranks that have the id of `at`, and warm up; cuda_thread_connect_set does so for a process set.
 * cuda_thread_destroy_set ends the communicator when all of its ranks do. */
int cuda_thread_connect_ranks(cuda_thread *t);
int cuda_thread_connect_set(cuda_thread *t);
int cuda_thread_destroy_set(cuda_thread *t);
/* Make a communicator over the ranks that have the id of `at`. */
int cuda_thread_join_ranks(cuda_thread *t, int blocking);
/* Enqueue an item's work, without marks and events, on the CUDA thread's current stream and slab. */
int cuda_thread_run(cuda_thread *t, const device_item *item);
/* Enqueue a sum of the first `bytes` of the slab over the ranks of `at`. */
int cuda_thread_try_sum(cuda_thread *t, uint64_t bytes, int wire);
uint64_t cuda_thread_table_bytes(uint64_t rows, uint64_t bytes); /* size of a table of `rows` that cover `bytes` of the slab */
/* Wait until the first kernels of `at` have run, or NCCL reports a network that does not work. */
int cuda_thread_await_connections(cuda_thread *t);

/* ---- frozen passes (freezing.c) ---- */

/* Make a pass's own resources; what its ranks need together; enqueue it. Each returns 0, or -1 with a failure that is kept. */
int cuda_thread_make_pass(cuda_thread *t, frozen_pass *p);
int cuda_thread_connect_pass_ranks(cuda_thread *t, frozen_pass *p);
int cuda_thread_enqueue_pass(cuda_thread *t, frozen_pass *p);
/* Return whether the device has passed all passes that were not captured; for any thread with the context.
 * cuda_thread_passes_are_over waits for that, at most `limit` nanoseconds. */
int cuda_thread_passes_rest(cuda_thread *t);
int cuda_thread_passes_are_over(cuda_thread *t, uint64_t limit);
/* Return whether a graph may contain a pass. */
int cuda_thread_has_captured(const cuda_thread *t);
/* Free a list of passes' resources. */
void cuda_thread_release_memory(const cuda_thread_functions *f, frozen_memory *memory);

/* ---- when graphs outlive the CUDA thread (keeping.c) ---- */

/* Make the keeper unless there is one: returns 0, or -1 without memory. */
int cuda_thread_make_keeper(cuda_thread *t);
/* Return whether the device was idle at some time since this was first asked, as only the driver knows of graphs' launches; for
 * any thread. cuda_thread_graphs_are_over asks anew, and waits at most `limit` nanoseconds. */
int cuda_thread_graphs_rest(cuda_thread *t);
int cuda_thread_graphs_are_over(cuda_thread *t, uint64_t limit);
/* Begin to end the communicator of frozen passes, which waits for all graphs with a pass. `finishes`: finalize it before. */
void cuda_thread_end_graphs(cuda_thread *t, int finishes);
/* Wait for that end, at most `limit` nanoseconds; returns whether it has come. */
int cuda_thread_graphs_have_ended(cuda_thread *t, uint64_t limit);
/* Free the resources of frozen passes. If a graph may still need them after `limit` nanoseconds, leave them, the module and the
 * context to the keeper instead. Returns whether they are left. */
int cuda_thread_release_passes(cuda_thread *t, uint64_t limit);
/* Enqueue an item of transfers (moving.c); use its functions of NCCL once in advance. */
int cuda_thread_move(cuda_thread *t, const device_item *item);
int cuda_thread_warm_up_moves(cuda_thread *t);
/* Find out which tickets the device has passed, publish them in `d`, and read samples. */
int cuda_thread_look(cuda_thread *t);

/* ---- samples (sampling.c) ---- */

/* Create and destroy timed events and marks. */
int cuda_thread_make_timers(cuda_thread *t);
void cuda_thread_release_timers(cuda_thread *t);
/* Begin a sample, once an item's waits are enqueued, if one of its marks is timed; end a slice behind each stage; drop the
 * sample if the item fails. */
int cuda_thread_sample_begins(cuda_thread *t, const device_item *item);
int cuda_thread_end_slice(cuda_thread *t, int stage);
void cuda_thread_sample_dropped(cuda_thread *t);
/* Read the samples that the device has passed. */
int cuda_thread_read_samples(cuda_thread *t);
/* Return whether a measured wait is still to be read. */
int cuda_thread_has_samples(const cuda_thread *t);
/* Compare the device's clock with the host's, unless that was done recently. The stream is empty. */
int cuda_thread_compare_clocks(cuda_thread *t);
/* Return a free stand, which is taken then; NULL: there is none. For threads of the program. */
cuda_thread_stand *cuda_thread_take_stand(cuda_thread *t);

/* ---- the order of items (turns.c) ---- */

/* Put a pushed item into the list where it belongs. */
void cuda_thread_sort(cuda_thread *t, device_item *item);
/* Remove and return the item whose turn it is; NULL: there is none, or it has not come yet. When the CUDA thread gives up, any
 * item. */
device_item *cuda_thread_next(cuda_thread *t);
/* Describe what the CUDA thread waits for if an item of a process set has its turn and has not come; NULL: nothing. */
const char *cuda_thread_awaited(const cuda_thread *t);
/* Add a communicator to those in use, or remove it. */
void cuda_thread_enlist(cuda_thread *t, communicator *c);
void cuda_thread_remove_communicator(cuda_thread *t, communicator *c);
/* Return the communicator of an item. */
communicator *cuda_thread_communicator(cuda_thread *t, const device_item *item);
/* Give the CUDA thread an item, from any thread. */
void cuda_thread_push(cuda_thread *t, device_item *item);
/* Push a turn of a process set (device.turn): returns 0, or -1 without memory. */
int cuda_thread_turn(device_queue *queue);
/* ---- functions for other threads (streams.c) ---- */

/* Fill in the functions of a device. */
void cuda_thread_serve(device *d);
/* Create a mark in the CUDA thread's thread: returns 0, or -1 with a failure that is kept. */
int cuda_thread_make_mark(cuda_thread *t, int timed, device_mark **made);

#endif
