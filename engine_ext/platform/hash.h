/* FNV-1a, the only hash of the engine: for names, shapes, memory, and the layout of shared structs. */
#ifndef ENGINE_PLATFORM_HASH_H
#define ENGINE_PLATFORM_HASH_H

#include <stddef.h>
#include <stdint.h>

/* Return the initial hash. */
static inline uint64_t fnv_begin(void) { return 14695981039346656037u; }
/* Extend the hash `h` by `item`: a byte, or a word. */
static inline uint64_t fnv(uint64_t h, uint64_t item) { return (h ^ item) * 1099511628211u; }
/* Extend the hash `h` by a text. */
static inline uint64_t fnv_text(uint64_t h, const char *text, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) h = fnv(h, (unsigned char)text[i]);
  return h;
}
#endif
