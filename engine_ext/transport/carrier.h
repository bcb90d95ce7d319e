/* The contract of a carrier: a second way for large parts of tensors between ranks of different hosts, beside the TCP
 * connections of a lane. MPI is one (transport/mpi.pyx). Others come from outside, with this header alone:
 * docs/architecture/carriers.md shows how.
 *
 * The lane announces each message on its connection, with its length and place. So a carrier needs no headers, no matching
 * beyond order, and no detection of dead ranks: a connection that ends tells of them. What is short, and what the carrier does
 * not take, goes over the connection.
 *
 * What a carrier promises:
 *   - Order. Messages of one channel from one rank to another arrive in the order in which they were sent.
 *   - Memory. What is sent is read, and what is received is written, within the memory that `open` was given. The sender leaves
 *     its bytes as they are until the receiver has them. When `progress` counts a message as arrived, all of its bytes can be
 *     read by any thread of any process that maps the memory.
 *   - Time. No function waits for another rank or sleeps.
 *   - Threads. `send` and `sum` are called by one thread at a time, not always the same; `receive`, `progress` and `summed` by
 *     another thread, at the same time as those. `close` is the last call, alone. No caller holds the GIL. Carriers of several
 *     channels are called side by side.
 *   - Failure. A carrier that cannot go on says so by FAILED, and need not say for whose sake: the world ends, naming a rank.
 */
#ifndef ENGINE_TRANSPORT_CARRIER_H
#define ENGINE_TRANSPORT_CARRIER_H

#include <stdint.h>

#define ENGINE_CARRIER_CAPSULE "engine_carrier_provider"
#define ENGINE_CARRIER_VERSION 1
#define ENGINE_CARRIER_MESSAGES 512 /* most that are under way from one rank to another, in one channel */

enum {
  ENGINE_CARRIER_FAILED = -1,
  ENGINE_CARRIER_BUSY = 0,          /* not now, or not yet */
  ENGINE_CARRIER_DONE = 1
};

typedef struct engine_carrier engine_carrier;

/* One channel between ranks. `rank` is always the other one's, in the world. */
struct engine_carrier {
  uint32_t least_bytes;             /* shorter parts go over the connection */
  /* Begin to send. BUSY: these bytes go over the connection instead. */
  int (*send)(engine_carrier *carrier, int rank, const void *source, uint32_t nbytes);
  /* Begin to receive the next message from `rank`, which was sent with as many bytes. FAILED, or DONE: it has begun. */
  int (*receive)(engine_carrier *carrier, int rank, void *target, uint32_t nbytes);
  /* Go on with what is under way from and to `rank`, and add to both counts how many messages to it may be overwritten, and how
   * many from it have arrived, since the last call. FAILED, or DONE. It is called again and again while there are any. */
  int (*progress)(engine_carrier *carrier, int rank, uint64_t *sent, uint64_t *arrived);
  /* Cancel what is under way and free the carrier. BUSY: its messages may still be read or written. Then the memory stays mapped
   * until the process ends, and so does the carrier. */
  int (*close)(engine_carrier *carrier);
  /* NULL, all three, where there are no sums: `between_hosts=mpi` is refused. One sum goes on at a time; all ranks of the world
   * make the same ones in the same order. */
  /* Memory for so many bytes, kept until the next call; NULL if there is none. */
  void *(*sum_memory)(engine_carrier *carrier, uint64_t nbytes);
  /* Begin to replace `count` floats of `item_bytes`, four or eight, there by the sums over all ranks. FAILED, or DONE: it has
   * begun. */
  int (*sum)(engine_carrier *carrier, uint64_t count, int item_bytes);
  /* Go on with it: FAILED, BUSY, or DONE: the sums are there. */
  int (*summed)(engine_carrier *carrier);
};

/* What a capsule of the name above points to, and keeps alive. */
typedef struct engine_carrier_provider engine_carrier_provider;
struct engine_carrier_provider {
  uint32_t version;                 /* ENGINE_CARRIER_VERSION */
  uint32_t channels;                /* how many can be opened; equal on all ranks. Process sets beyond them use connections */
  /* Open channel 0 of the world, or another for a process set, whose ranks give it the same number. `memory` is where messages
   * are sent from and received to. NULL: there is no memory for it. Called with the GIL, and must not wait. */
  engine_carrier *(*open)(engine_carrier_provider *provider, uint32_t channel, void *memory, uint64_t nbytes);
};
#endif
