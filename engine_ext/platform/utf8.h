/* Texts that are shown. A name may be any bytes, and where a text is cut, a character may be; frameworks that cannot decode a text
 * raise something else in its place. */
#ifndef ENGINE_PLATFORM_UTF8_H
#define ENGINE_PLATFORM_UTF8_H

#include <stddef.h>
#include <string.h>

/* Whether a byte is in a sequence of UTF-8, behind its first. */
static inline int utf8_continues(unsigned char byte) { return (byte & 0xC0) == 0x80; }

/* The length of the sequence of UTF-8 that begins here, in a text that ends with 0; 0: none does. */
static inline int utf8_sequence_bytes(const unsigned char *at) {
  if (at[0] < 0x80) return 1;
  if (at[0] >= 0xC2 && at[0] <= 0xDF) return utf8_continues(at[1]) ? 2 : 0;
  if (at[0] >= 0xE0 && at[0] <= 0xEF && utf8_continues(at[1]) && utf8_continues(at[2])) {
    if ((at[0] == 0xE0 && at[1] < 0xA0) || (at[0] == 0xED && at[1] > 0x9F)) return 0; /* too long; half a pair of UTF-16 */
    return 3;
  }
  if (at[0] >= 0xF0 && at[0] <= 0xF4 && utf8_continues(at[1]) && utf8_continues(at[2]) && utf8_continues(at[3]))
    return (at[0] == 0xF0 && at[1] < 0x90) || (at[0] == 0xF4 && at[1] > 0x8F) ? 0 : 4;
  return 0;
}

/* Put a question mark for what is not UTF-8. */
static inline void utf8_repair(char *text) {
  unsigned char *at = (unsigned char *)text;
  while (at[0]) {
    int length = utf8_sequence_bytes(at);
    if (length == 0) at[0] = '?';
    at += length > 1 ? length : 1;
  }
}

/* How many of the first `room` bytes of a text of `bytes` are whole characters. */
static inline size_t utf8_whole(const char *text, size_t bytes, size_t room) {
  size_t length = room, least = room > 3 ? room - 3 : 0;
  if (bytes <= room) return bytes;
  while (length > least && utf8_continues((unsigned char)text[length])) length--;
  return utf8_continues((unsigned char)text[length]) ? room : length; /* no UTF-8: as well here as elsewhere */
}

/* Copy as much of a name as `room` bytes show, as UTF-8 that ends with 0. */
static inline void utf8_show(const char *name, size_t bytes, char *shown, size_t room) {
  size_t length = utf8_whole(name, bytes, room - 1);
  memcpy(shown, name, length);
  shown[length] = 0;
  utf8_repair(shown);
}

#endif
