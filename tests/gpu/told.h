/* For a CUDA thread that is compiled with this in front: the words by which threads learn from it how far the device is are told
 * to the stand-in. Who acquires a word then knows what the thread knew that released it. A relaxed load or store tells nothing.
 */
#include "engine_ext/platform/atomics.h"

void stand_tell(uintptr_t word);
void stand_hear(uintptr_t word);

static inline void told_release(uint64_t *word, uint64_t value) {
  stand_tell((uintptr_t)word);
  store_release(word, value);
}

static inline uint64_t told_acquire(const uint64_t *word) {
  uint64_t value = load_acquire(word);
  stand_hear((uintptr_t)word);
  return value;
}

#define store_release told_release
#define load_acquire told_acquire
