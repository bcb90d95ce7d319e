/* Valid UTF-8 for texts that are shown. A name may hold any bytes, and cutting a text may split a character. Frameworks that
 * cannot decode an error's text raise another error in its place. */
#ifndef ENGINE_PLATFORM_UTF8_H
#define ENGINE_PLATFORM_UTF8_H

#include <stddef.h>
#include <string.h>

/* Return whether a byte continues a UTF-8 sequence. */
static inline int utf8_continues(unsigned char byte) { return (byte & 0xC0) == 0x80; }

/* Return the length of the valid UTF-8 sequence that begins here, in a text that ends with 0; 0: there is none. */
static inline int utf8_sequence_bytes(const unsigned char *at) {
  if (at[0] < 0x80) return 1;
  if (at[0] >= 0xC2 && at[0] <= 0xDF) return utf8_continues(at[1]) ? 2 : 0;
  if (at[0] >= 0xE0 && at[0] <= 0xEF && utf8_continues(at[1]) && utf8_continues(at[2])) {
    if ((at[0] == 0xE0 && at[1] < 0xA0) || (at[0] == 0xED && at[1] > 0x9F)) return 0; /* overlong; half a UTF-16 pair */
    return 3;
  }
  if (at[0] >= 0xF0 && at[0] <= 0xF4 && utf8_continues(at[1]) && utf8_continues(at[2]) && utf8_continues(at[3]))
    return (at[0] == 0xF0 && at[1] < 0x90) || (at[0] == 0xF4 && at[1] > 0x8F) ? 0 : 4;
  return 0;
}

/* Replace bytes that are not valid UTF-8 by question marks. */
static inline void utf8_repair(char *text) {
  unsigned char *at = (unsigned char *)text;
  while (at[0]) {
    int length = utf8_sequence_bytes(at);
    if (length == 0) at[0] = '?';
    at += length > 1 ? length : 1;
  }
}

/* Return how many bytes of the first `room` bytes of a text are whole characters. */
static inline size_t utf8_whole(const char *text, size_t bytes, size_t room) {
  size_t length = room, least = room > 3 ? room - 3 : 0;
  if (bytes <= room) return bytes;
  while (length > least && utf8_continues((unsigned char)text[length])) length--;
  return utf8_continues((unsigned char)text[length]) ? room : length; /* not UTF-8: cut anywhere */
}

/* Copy a name, cut to `room` bytes including a final 0, as valid UTF-8. */
static inline void utf8_show(const char *name, size_t bytes, char *shown, size_t room) {
  size_t length = utf8_whole(name, bytes, room - 1);
  memcpy(shown, name, length);
  shown[length] = 0;
  utf8_repair(shown);
}

#endif
