/* The contract of a carrier: a second way for large parts of tensors between ranks of different hosts, beside the TCP
 * connections of a lane. MPI is one (transport/mpi.pyx). Other carriers come from outside and need this header alone;
 * docs/architecture/carriers.md shows how.
 *
 * The lane announces each message on its connection, with its length and place. So a carrier needs no headers, no matching
 * beyond order, and no detection of dead ranks: their connections end. Short parts, and parts that the carrier does not take, go
 * over the connection.
 *
 * A carrier promises:
 *   - Order. Messages of one channel from one rank to another arrive in the order in which they were sent. A message may come
 *     before its receiver has called `receive` or opened the channel. Then the carrier keeps it or has its sender try again.
 *   - Memory. It reads sent bytes and writes received bytes only within the memory that was passed to `open`. It never writes
 *     more than `nbytes` of a message: a longer one is FAILED. When `progress` counts a message as sent, its bytes may be
 *     overwritten or unmapped, and it arrives without another call in the sender. When `progress` counts it as arrived, every
 *     thread of every process that maps the memory can read it.
 *   - Time. No function waits for another rank, sleeps, or takes Python's GIL.
 *   - Threads. `send`, `sum_memory` and `sum` are called by one thread at a time, which may change. `receive`, `progress` and
 *     `summed` are called by another thread, at the same time as those. `close` is the last call, alone. Different channels are
 *     called concurrently, also while another one is opened.
 *   - Failure. A carrier that cannot go on returns FAILED, and need not say which rank is at fault: the world ends, and names
 *     the rank behind that lane. After FAILED only `close` is called for that rank.
 *   - Fork. A child of the process calls nothing and frees nothing. Descriptors are closed on exec.
 */
#ifndef ENGINE_TRANSPORT_CARRIER_H
#define ENGINE_TRANSPORT_CARRIER_H

#include <stdint.h>

#define ENGINE_CARRIER_CAPSULE "engine_carrier_provider"
#define ENGINE_CARRIER_VERSION 1
#define ENGINE_CARRIER_MESSAGES 512 /* most messages in flight from one rank to another in one channel, as either side counts */

enum {
  ENGINE_CARRIER_FAILED = -1,
  ENGINE_CARRIER_BUSY = 0,          /* not now, or not yet */
  ENGINE_CARRIER_DONE = 1
};

typedef struct engine_carrier engine_carrier;

/* One channel between ranks. `rank` is always the number of the other rank in the world. */
struct engine_carrier {
  uint32_t least_bytes;             /* shorter parts go over the connection; less than 16 KiB means 16 KiB */
  /* Begin to send. Returns DONE, or BUSY: these bytes go over the connection instead. Failures are returned by `progress`. */
  int (*send)(engine_carrier *carrier, int rank, const void *source, uint32_t nbytes);
  /* Begin to receive the next message from `rank`, which was sent with `nbytes`. Returns DONE: it has begun; or FAILED. */
  int (*receive)(engine_carrier *carrier, int rank, void *target, uint32_t nbytes);
  /* Advance the messages from and to `rank`. Adds to `sent` the number of messages to it that were sent since the last call, and
   * to `arrived` the number of messages from it that have arrived. Returns DONE or FAILED. It is called repeatedly while messages
   * are in flight, and only then: `send` itself has to look for credits and the like that are given back. */
  int (*progress)(engine_carrier *carrier, int rank, uint64_t *sent, uint64_t *arrived);
  /* Cancel messages in flight, give back the memory and free the carrier. Returns DONE, or BUSY: messages may still be read or
   * written, so the memory stays mapped, and the provider stays, until the process ends. */
  int (*close)(engine_carrier *carrier);
  /* Sums over all ranks. If the carrier has none, all three are NULL, and `between_hosts=mpi` is refused. One sum goes on at a
   * time; all ranks of the world make the same sums in the same order. */
  /* Return memory for `nbytes`, zeroed when it is new, which is valid until the next call; NULL if there is none. */
  void *(*sum_memory)(engine_carrier *carrier, uint64_t nbytes);
  /* Begin to replace `count` floats of `item_bytes`, four or eight, in that memory by the sums over all ranks. Returns DONE: it
   * has begun; or FAILED. */
  int (*sum)(engine_carrier *carrier, void *memory, uint64_t count, int item_bytes);
  /* Advance the sum. Returns DONE: the sums are complete; BUSY or FAILED. */
  int (*summed)(engine_carrier *carrier);
};

/* A provider of carriers. A capsule named ENGINE_CARRIER_CAPSULE points to it and keeps it alive. */
typedef struct engine_carrier_provider engine_carrier_provider;
struct engine_carrier_provider {
  uint32_t version;                 /* ENGINE_CARRIER_VERSION */
  uint32_t channels;                /* number of channels for the world and all process sets that are ever formed in it, equal on
                                     * all ranks; later sets use connections */
  /* Open channel 0 for the world, or another for a process set, whose ranks pass the same number. Messages are sent from and
   * received into `memory`; the carrier must not touch other parts of it. Returns NULL without memory, or with a Python
   * exception. Called with the GIL; must not wait. */
  engine_carrier *(*open)(engine_carrier_provider *provider, uint32_t channel, void *memory, uint64_t nbytes);
};
#endif
