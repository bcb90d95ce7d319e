/* Names of numbers. Each list has its numbers in order, from 0, each with the name that counters, timelines, settings and errors
 * use. A list yields an enum, and, where C needs the names, a table. NAMES_TEXT has the names for readers of a page of counters.
 *
 * Names have no spaces. dtypes and reductions are listed in kernels/kernels.h. */
#ifndef ENGINE_SHARED_NAMES_H
#define ENGINE_SHARED_NAMES_H

/* Kinds of operations. */
#define KIND_LIST(ROW)                          \
  ROW(KIND_ALLREDUCE, "allreduce")              \
  ROW(KIND_BROADCAST, "broadcast")              \
  ROW(KIND_ALLGATHER, "allgather")              \
  ROW(KIND_BARRIER, "barrier")                  \
  ROW(KIND_ALLTOALL, "alltoall")                \
  ROW(KIND_REDUCESCATTER, "reducescatter")
/* Algorithms: ways in which an operation moves its bytes. */
#define ALGORITHM_LIST(ROW)                     \
  ROW(ALGORITHM_ONE_SHOT, "one-shot")           \
  ROW(ALGORITHM_TWO_SHOT, "two-shot")           \
  ROW(ALGORITHM_SHARED, "shared")               \
  ROW(ALGORITHM_SCATTER, "scatter")             \
  ROW(ALGORITHM_ADASUM, "adasum")               \
  ROW(ALGORITHM_CHAIN, "chain")                 \
  ROW(ALGORITHM_RING, "ring")                   \
  ROW(ALGORITHM_CARRIER, "mpi")                     \
  ROW(ALGORITHM_DEVICE, "device")               \
  ROW(ALGORITHM_BLOCKS, "blocks")
/* Ways in which a large allreduce travels between hosts. */
#define BETWEEN_LIST(ROW)                       \
  ROW(BETWEEN_AUTO, "auto")                     \
  ROW(BETWEEN_DIRECT, "direct")                 \
  ROW(BETWEEN_CHAIN, "chain")                   \
  ROW(BETWEEN_RING, "ring")                     \
  ROW(BETWEEN_CARRIER, "mpi")
/* Types of schedule entries. */
#define ENTRY_LIST(ROW)                         \
  ROW(ENTRY_PAD, "pad")                         \
  ROW(ENTRY_BATCH, "batch")                     \
  ROW(ENTRY_DEFINE, "define")                   \
  ROW(ENTRY_EVICT, "evict")                     \
  ROW(ENTRY_ERROR, "error")                     \
  ROW(ENTRY_SKIP, "skip")                       \
  ROW(ENTRY_JOINED, "joined")                   \
  ROW(ENTRY_TURN, "turn")
/* Layouts: orders of a tensor's elements in memory. */
#define LAYOUT_LIST(ROW)                        \
  ROW(LAYOUT_ROWS, "rows")                      \
  ROW(LAYOUT_CHANNELS_LAST, "channels_last")    \
  ROW(LAYOUT_CHANNELS_LAST_3D, "channels_last_3d") \
  ROW(LAYOUT_SPARSE, "sparse")
/* Kinds of stores with which results are written. */
#define STORES_LIST(ROW)                        \
  ROW(STORES_CACHED, "cached")                  \
  ROW(STORES_STREAMING, "streaming")            \
  ROW(STORES_AUTO, "auto")
/* Wires: values of engine_meta.wire in an entry, as the knob `compression` names them. */
#define WIRE_LIST(ROW)                          \
  ROW(WIRE_NONE, "none")                        \
  ROW(WIRE_FP16, "fp16")                        \
  ROW(WIRE_BF16, "bf16")                        \
  ROW(WIRE_FP8, "fp8")
/* Causes of a world's failure. */
#define CAUSE_LIST(ROW)                         \
  ROW(CAUSE_NONE, "none")                       \
  ROW(CAUSE_DIED, "died")                       \
  ROW(CAUSE_RAISED, "raised")                   \
  ROW(CAUSE_LEFT, "left")                       \
  ROW(CAUSE_STALLED, "stalled")                 \
  ROW(CAUSE_LOST, "lost")
/* States of the engine of a page of counters. */
#define COUNTED_LIST(ROW)                       \
  ROW(COUNTED_NEW, "new")                       \
  ROW(COUNTED_RUNNING, "running")               \
  ROW(COUNTED_ENDED, "ended")                   \
  ROW(COUNTED_FAILED, "failed")                 \
  ROW(COUNTED_RESETTING, "resetting")
/* Reasons for which a batch was closed. */
#define CLOSED_LIST(ROW)                        \
  ROW(CLOSED_FULL, "full")                      \
  ROW(CLOSED_WHOLE_STEP, "whole_step")          \
  ROW(CLOSED_AWAITED, "awaited")                \
  ROW(CLOSED_CYCLE_TIME, "cycle_time")          \
  ROW(CLOSED_FROZEN, "frozen")
/* Phases of the tuner. */
#define PHASE_LIST(ROW)                         \
  ROW(PHASE_OFF, "off")                         \
  ROW(PHASE_WAITING, "waiting")                 \
  ROW(PHASE_SEARCHING, "searching")             \
  ROW(PHASE_WATCHING, "watching")               \
  ROW(PHASE_LOST, "lost")                       \
  ROW(PHASE_LEFT, "left")                       \
  ROW(PHASE_RESTING, "resting")

/* Timed stages of tensors on a GPU: DEVICE_* of gpu/device.h, which this plane does not know. */
#define STAGE_LIST(ROW)                         \
  ROW(STAGE_QUEUE, "queue")                     \
  ROW(STAGE_PACK, "pack")                       \
  ROW(STAGE_NCCL, "nccl")                       \
  ROW(STAGE_UNPACK, "unpack")                   \
  ROW(STAGE_EXPOSED, "exposed")

/* Causes of a late step, as the rank judges it: a part of its own step, or another rank. */
#define LATE_LIST(ROW)                          \
  ROW(LATE_INPUT, "input")                      \
  ROW(LATE_COMPUTE, "compute")                  \
  ROW(LATE_GC, "gc")                            \
  ROW(LATE_CPU, "cpu")                          \
  ROW(LATE_NETWORK, "network")                  \
  ROW(LATE_RANK, "rank")

/* Uses of a row: a member of an enum, an entry of a table, a word of a line. */
#define AS_NUMBER(number, name) number,
#define AS_NAME(number, name) name,
#define AS_WORD(number, name) " " name

/* A line "list = name name ..." for each list that a page of counters needs. */
#define NAMES_TEXT                              \
  "states =" COUNTED_LIST(AS_WORD) "\n"            \
  "causes =" CAUSE_LIST(AS_WORD) "\n"              \
  "operations =" KIND_LIST(AS_WORD) "\n"           \
  "algorithms =" ALGORITHM_LIST(AS_WORD) "\n"      \
  "reasons =" CLOSED_LIST(AS_WORD) "\n"            \
  "stores =" STORES_LIST(AS_WORD) "\n"             \
  "between_hosts =" BETWEEN_LIST(AS_WORD) "\n"     \
  "compressions =" WIRE_LIST(AS_WORD) "\n"         \
  "phases =" PHASE_LIST(AS_WORD) "\n"             \
  "stages =" STAGE_LIST(AS_WORD) "\n"            \
  "late_causes =" LATE_LIST(AS_WORD) "\n"
#endif
