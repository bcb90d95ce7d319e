/* Put before every source of a build (-include) whose ranks are threads of one process: they all get one mapping of their
 * control segment. ThreadSanitizer, and whoever compares addresses, knows a word by its address; each engine would map the
 * segment at another one. */
#ifndef ONE_MAPPING_H
#define ONE_MAPPING_H

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define ONE_MAPPINGS 64
static struct {
  void *base;
  dev_t device;
  ino_t inode;
  off_t offset;
  int users;
} one_mappings[ONE_MAPPINGS];
static pthread_mutex_t one_mapping_lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((unused)) static void *one_mmap(size_t length, int prot, int flags, int fd, off_t offset) {
  struct stat file;
  void *base = MAP_FAILED;
  int k, place = -1;
  if (fstat(fd, &file) != 0)
    return MAP_FAILED;
  pthread_mutex_lock(&one_mapping_lock);
  for (k = 0; k < ONE_MAPPINGS; k++) {
    if (one_mappings[k].users == 0) {
      place = k;
    } else if (one_mappings[k].device == file.st_dev && one_mappings[k].inode == file.st_ino &&
               one_mappings[k].offset == offset) {
      one_mappings[k].users++;
      base = one_mappings[k].base;
      break;
    }
  }
  if (k == ONE_MAPPINGS && place >= 0) {
    base = mmap(NULL, length, prot, flags, fd, offset);
    if (base != MAP_FAILED) {
      one_mappings[place].base = base;
      one_mappings[place].device = file.st_dev;
      one_mappings[place].inode = file.st_ino;
      one_mappings[place].offset = offset;
      one_mappings[place].users = 1;
    }
  }
  pthread_mutex_unlock(&one_mapping_lock);
  return base;
}

__attribute__((unused)) static int one_munmap(void *base, size_t length) {
  int k, last = 1;
  pthread_mutex_lock(&one_mapping_lock);
  for (k = 0; k < ONE_MAPPINGS; k++)
    if (one_mappings[k].users > 0 && one_mappings[k].base == base)
      last = --one_mappings[k].users == 0;
  pthread_mutex_unlock(&one_mapping_lock);
  return last ? munmap(base, length) : 0;
}

/* Only where segment.pyx maps and leaves a segment: the arena needs a mapping for each rank. */
#define mmap(address, length, prot, flags, fd, offset) \
  (strstr(__func__, "segment_map") ? one_mmap(length, prot, flags, fd, offset) : mmap(address, length, prot, flags, fd, offset))
#define munmap(base, length) (strstr(__func__, "segment_") ? one_munmap(base, length) : munmap(base, length))
#endif
