/* The contract of a carrier: a second way for large parts of tensors between ranks of different hosts, beside the TCP
 * connections of a lane. MPI is one (transport/mpi.pyx). Others come from outside, with this header alone:
 * docs/architecture/carriers.md shows how.
 *
 * The lane announces each message on its connection, with its length and place. So a carrier needs no headers, no matching
 * beyond order, and no detection of dead ranks: a connection that ends tells of them. What is short, and what the carrier does
 * not take, goes over the connection.
 *
 * What a carrier promises:
 *   - Order. Messages of one channel from one rank to another arrive in the order in which they were sent. One may come before
 *     its receiver has called `receive`, or opened the channel: then the carrier keeps it or has its sender try again.
 *   - Memory. It reads what is sent, and writes what is received, within the memory that `open` was given; never more than
 *     `nbytes` of a message, also if its sender sends more: that is FAILED. When `progress` counts a message as sent, its bytes
 *     may be overwritten or unmapped, and it arrives without another call in the sender. When `progress` counts it as arrived,
 *     every thread of every process that maps the memory can read it.
 *   - Time. No function waits for another rank, sleeps, or takes Python's GIL.
 *   - Threads. `send`, `sum_memory` and `sum` are called by one thread at a time, not always the same; `receive`, `progress` and
 *     `summed` by another one, at the same time as those. `close` is the last call, alone. Channels are called side by side, also
 *     while another one is opened.
 *   - Failure. A carrier that cannot go on says so by FAILED, and need not say for whose sake: the world ends, and names the
 *     rank behind that lane. After FAILED nothing but `close` is called for that rank.
 *   - Fork. A child of the process calls nothing, and frees nothing. Descriptors are closed on exec.
 */
#ifndef ENGINE_TRANSPORT_CARRIER_H
#define ENGINE_TRANSPORT_CARRIER_H

#include <stdint.h>

#define ENGINE_CARRIER_CAPSULE "engine_carrier_provider"
#define ENGINE_CARRIER_VERSION 1
#define ENGINE_CARRIER_MESSAGES 512 /* most that are under way from one rank to another, in one channel, as either counts them */

enum {
  ENGINE_CARRIER_FAILED = -1,
  ENGINE_CARRIER_BUSY = 0,          /* not now, or not yet */
  ENGINE_CARRIER_DONE = 1
};

typedef struct engine_carrier engine_carrier;

/* One channel between ranks. `rank` is always the other one's, in the world. */
struct engine_carrier {
  uint32_t least_bytes;             /* shorter parts go over the connection; less than 16 KiB means 16 KiB */
  /* Begin to send: DONE, or BUSY: these bytes go over the connection instead. It does not say FAILED: `progress` does. */
  int (*send)(engine_carrier *carrier, int rank, const void *source, uint32_t nbytes);
  /* Begin to receive the next message from `rank`, which was sent with as many bytes. FAILED, or DONE: it has begun. */
  int (*receive)(engine_carrier *carrier, int rank, void *target, uint32_t nbytes);
  /* Go on with what is under way from and to `rank`, and add to both counts how many messages to it were sent, and how many from
   * it have arrived, since the last call. FAILED, or DONE. It is called again and again while there are any, and not else: what
   * is given back meanwhile, such as credits, `send` has to look for. */
  int (*progress)(engine_carrier *carrier, int rank, uint64_t *sent, uint64_t *arrived);
  /* Cancel what is under way, give back the memory and free the carrier. BUSY: messages may still be read or written. Then the
   * memory stays mapped, and the provider stays, until the process ends. */
  int (*close)(engine_carrier *carrier);
  /* All three NULL where there are no sums: `between_hosts=mpi` is refused. One sum goes on at a time; all ranks of the world make
   * the same ones in the same order. */
  /* Memory for so many bytes, zeroed when it is new, until the next call; NULL if there is none. */
  void *(*sum_memory)(engine_carrier *carrier, uint64_t nbytes);
  /* Begin to replace `count` floats of `item_bytes`, four or eight, in that memory by the sums over all ranks. FAILED, or DONE: it
   * has begun. */
  int (*sum)(engine_carrier *carrier, void *memory, uint64_t count, int item_bytes);
  /* Go on with it: FAILED, BUSY, or DONE: the sums are there. */
  int (*summed)(engine_carrier *carrier);
};

/* What a capsule of the name above points to, and keeps alive. */
typedef struct engine_carrier_provider engine_carrier_provider;
struct engine_carrier_provider {
  uint32_t version;                 /* ENGINE_CARRIER_VERSION */
  uint32_t channels;                /* how many there are for the world and all process sets that are ever formed in it, equal on
                                     * all ranks; later sets use connections */
  /* Open channel 0 for the world, or another for a process set, whose ranks give it the same number. `memory` is what messages are
   * sent from and received to; other parts of it are not the carrier's. NULL: there is no memory for it, or a Python exception
   * says why. Called with the GIL; must not wait. */
  engine_carrier *(*open)(engine_carrier_provider *provider, uint32_t channel, void *memory, uint64_t nbytes);
};
#endif
