/* Frames that the hosts of one world exchange, each a header and a payload, on connections that were authenticated at the start.
 *
 * A lane, between two ranks, carries slots and progress. A trunk, between the coordinator's rank and the leader of another host,
 * carries words, requests and the schedule. Numbers have the byte order of the processors, which is the same everywhere
 * (engine_layout() is compared).
 */
#ifndef ENGINE_TRANSPORT_FRAMES_H
#define ENGINE_TRANSPORT_FRAMES_H

#include <stdint.h>

#include "engine_ext/shared/layout.h"

enum {
  FRAME_LEFT = 1,              /* the sender is done: after this its connection may end. No payload */
  /* lanes */
  FRAME_SLOT,                  /* bytes of the sender's slot of chunk `position`, from byte `offset` of the slot on */
  FRAME_PROGRESS,              /* a Progress: the sender's; all bytes of these stages came before. `position`: see lanes.pyx */
  /* trunks, up */
  FRAME_REQUESTS,              /* bytes of the request ring of `rank` from `position` on, which do not wrap */
  /* trunks, down */
  FRAME_SCHEDULE,              /* words of the schedule from `position` on, which do not wrap */
  /* trunks, both */
  FRAME_WORDS,                 /* engine_word[]: of the page of `rank`; -1: of the coordinator's page */
  FRAME_CAUSE,                 /* engine_failure_cause: why the world has ended; on lanes too, from a rank that ends for it */
  FRAME_CLOCK,                 /* engine_times: a leader asks for the time, and the coordinator's rank answers */
  /* lanes, beside FRAME_SLOT */
  FRAME_MESSAGE,               /* like FRAME_SLOT, but the carrier brings the `rank` bytes as its next message. No payload */
  FRAME_PING,                  /* asks whether the other process runs. No payload */
  FRAME_PONG,                  /* the answer to a ping, with the same `position`. No payload */
  FRAMES
};

/* The header of a frame. The meaning of `rank`, `offset` and `position` depends on the type. */
typedef struct engine_frame {
  uint32_t bytes;              /* length of the payload */
  uint16_t type, reserved;     /* FRAME_* */
  int32_t rank;
  uint32_t offset;
  uint64_t position;
} engine_frame;

/* A word of a page that its only writer has changed. */
typedef struct engine_word {
  uint32_t offset;             /* in the page, in bytes */
  uint32_t bytes;              /* 4 or 8 */
  uint64_t value;
} engine_word;

typedef struct engine_failure_cause {
  uint64_t abort;              /* the value of segment_header.abort */
  char reason[REASON_BYTES];
} engine_failure_cause;

/* Times in nanoseconds of monotonic clocks. */
typedef struct engine_times {
  uint64_t asked;              /* leader's clock: when it asked */
  uint64_t received, answered; /* clock of the coordinator's host; 0 in the question */
} engine_times;

enum {
  FRAME_LONGEST = 1 << 20,     /* bytes of a payload */
  FRAME_WORDS_MOST = 4096      /* words in one frame */
};

/* Return whether a host's leader relays this word of a rank's page: the rank alone writes it, and other hosts need it. */
static inline int engine_word_of_rank(const engine_word *word) {
  uint64_t end = (uint64_t)word->offset + word->bytes;
  if ((word->bytes != 4 && word->bytes != 8) || word->offset % word->bytes || end > offsetof(rank_page, requests)) return 0;
  if (word->bytes == 4 && word->offset != offsetof(rank_page, blocked_anywhere) &&
      (word->offset < offsetof(rank_page, wait_all) || word->offset > offsetof(rank_page, overdue))) return 0; /* half a word */
  if (end > offsetof(rank_page, asleep) && word->offset < offsetof(rank_page, blocked_anywhere)) return 0;
  if (word->offset < offsetof(rank_page, left) + 4 && end > offsetof(rank_page, left)) return 0; /* sent over lanes */
  if (end > offsetof(rank_page, need) && word->offset < offsetof(rank_page, unnamed)) return 0;
  if (end > offsetof(rank_page, door) && word->offset < offsetof(rank_page, cursor)) return 0;
  return end <= offsetof(rank_page, packed) || word->offset >= offsetof(rank_page, ready);
}

/* Return whether this word of the coordinator's page, in a world of `size` ranks, is sent to other hosts. The end of the
 * schedule is not, as it comes with the schedule's words. */
static inline int engine_word_of_coordinator(const engine_word *word, int size) {
  if (word->bytes == 8)
    return word->offset % 8 == 0 && word->offset >= offsetof(coordinator_page, drained) &&
           word->offset < offsetof(coordinator_page, drained) + 8 * (uint64_t)size;
  return word->bytes == 4 && (word->offset == offsetof(coordinator_page, recording) ||
                              word->offset == offsetof(coordinator_page, schedule_full) ||
                              word->offset == offsetof(coordinator_page, over));
}

_Static_assert(sizeof(engine_frame) == 24 && sizeof(engine_word) == 16, "frames have no gaps");
_Static_assert((int)FRAME_LONGEST >= (int)SLOT_BYTES && (int)FRAME_LONGEST >= (int)REQUEST_BYTES, "a slot, a request ring");
#endif
