/* Device memory at addresses of its own, which the host may not touch; and the check that accesses to it are ordered.
 *
 * What the executor uses lies at a fixed distance (stand_pointer). Each allocation ends at a page without access, but
 * for what its alignment leaves, which is looked at when it is freed. Freed memory is poisoned at once, and its
 * addresses are not used again.
 */
#include "internal.h"

#include <sys/mman.h>
#include <unistd.h>

#define BASE ((uintptr_t)0x200000000000)
#define DISTANCE ((uintptr_t)0x100000000000) /* from what users see to what the executor uses */
enum { PAGE = 4096, ALIGNMENT = 256, POISON = 0xdb, EDGE = 0xe1 };

static allocation *allocations;
static uintptr_t next = BASE;
static size_t in_use;
static const size_t TOTAL = (size_t)1 << 36;

void *stand_pointer(CUdeviceptr at) {
  return (void *)(uintptr_t)(at >= BASE && at < BASE + DISTANCE ? at + DISTANCE : at);
}

allocation *memory_find(uintptr_t at) {
  allocation *a = allocations;
  while (a && !(at >= a->at && at < a->at + a->size)) a = a->next;
  return a;
}

int memory_holds(uintptr_t at, size_t size, const char *what) {
  allocation *a = memory_find(at);
  if (!size) return 1;
  if (a && at + size <= a->at + a->size) return 1;
  if (!a && !(at >= BASE && at < BASE + DISTANCE)) return 1; /* of the host */
  stand_found("%s: %zu bytes at %#lx are not in an allocation", what, size, (unsigned long)at);
  return 0;
}

/* ---- happens-before ---- */

static int knows(const moment *when, int who, uint64_t epoch) {
  return MUTANT(clock_knows_all) || when->at[who] >= epoch;
}

static void footprint_drop(footprint **f) {
  footprint *gone = *f;
  *f = gone->next;
  moment_drop(gone->when);
  free(gone);
}

/* Two accesses to common bytes, one of them a write, of which neither knew of the other: reported, whatever came first.
 */
void memory_check(const stand_access *access, int who, uint64_t epoch, moment *when, const char *what) {
  allocation *a = memory_find(access->at);
  uintptr_t lo = access->at, hi = lo + access->size;
  if (!a || !access->size) return;
  if (a->freed && strcmp(what, "cuMemFree"))
    stand_found("%s uses memory at %#lx that was freed", what, (unsigned long)lo);
  for (footprint **f = &a->footprints; *f;) {
    footprint *old = *f;
    int ordered = knows(when, old->agent, old->epoch) || knows(old->when, who, epoch);
    if (old->hi > lo && old->lo < hi && (old->write || access->write) && !ordered) {
      stand_found("not ordered: %s %s and %s %s bytes %zu to %zu of %#lx", old->what, old->write ? "writes" : "reads",
                  what, access->write ? "writes" : "reads", (size_t)((old->lo > lo ? old->lo : lo) - a->at),
                  (size_t)((old->hi < hi ? old->hi : hi) - a->at), (unsigned long)a->at);
      footprint_drop(f); /* once */
    } else if (old->lo >= lo && old->hi <= hi && knows(when, old->agent, old->epoch) &&
               (access->write || !old->write)) {
      footprint_drop(f); /* who comes later is ordered with it if with this */
    } else {
      f = &old->next;
    }
  }
  footprint *mark = calloc(1, sizeof *mark);
  *mark = (footprint){a->footprints, lo, hi, access->write, who, epoch, moment_keep(when), ""};
  snprintf(mark->what, sizeof mark->what, "%s", what);
  a->footprints = mark;
}

/* ---- allocating ---- */

static CUresult allocate(uintptr_t *at, size_t size, int pinned) {
  size_t tail = (size + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1), mapped = (size + PAGE - 1) & ~(size_t)(PAGE - 1);
  allocation *a;
  int fd, protection = MUTANT(host_access_allowed) || pinned ? PROT_READ | PROT_WRITE : PROT_NONE;
  if (!size) return CUDA_ERROR_INVALID_VALUE;
  if (mapped > TOTAL - in_use) return CUDA_ERROR_OUT_OF_MEMORY;
  a = calloc(1, sizeof *a);
  a->size = size;
  a->mapped = mapped;
  a->pinned = pinned;
  a->context = context_current();
  a->first = next + (pinned ? 2 * DISTANCE : 0);
  a->at = a->first + mapped - tail;
  next += mapped + (MUTANT(no_guard) ? 0 : PAGE);
  fd = memfd_create("stand-in device memory", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)mapped) ||
      mmap((void *)a->first, mapped, protection, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0) == MAP_FAILED ||
      (!pinned && mmap((void *)(a->first + DISTANCE), mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE,
                       fd, 0) == MAP_FAILED)) {
    if (fd >= 0) close(fd);
    free(a);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  close(fd);
  memset((char *)stand_pointer(a->first), EDGE, mapped);
  memset(stand_pointer(a->at), 0xa5, size); /* nothing is zero because it is new */
  in_use += mapped;
  a->next = allocations;
  allocations = a;
  *at = a->at;
  return CUDA_SUCCESS;
}

static CUresult release(uintptr_t at, int pinned) {
  allocation *a = memory_find(at);
  stand_access all;
  agent *self = agent_of_thread();
  moment *when;
  const unsigned char *edge;
  if (!a || a->at != at || a->pinned != pinned) return CUDA_ERROR_INVALID_VALUE;
  if (a->freed) {
    stand_found("memory at %#lx is freed twice", (unsigned long)at);
    return CUDA_ERROR_INVALID_VALUE;
  }
  self->now->at[self->number] = ++self->epoch;
  when = moment_new();
  moment_join(when, self->now);
  all = (stand_access){a->at, a->size, 1};
  memory_check(&all, self->number, self->epoch, when, "cuMemFree");
  moment_drop(when);
  edge = stand_pointer(a->first);
  for (size_t i = 0; i < a->mapped; i++)
    if ((i < a->at - a->first || i >= a->at - a->first + a->size) && edge[i] != EDGE) {
      stand_found("byte %ld beside the %zu at %#lx was written", (long)i - (long)(a->at - a->first), a->size,
                  (unsigned long)at);
      break;
    }
  if (!MUTANT(no_poison)) memset((char *)stand_pointer(a->at), POISON, a->size);
  if (pinned) mprotect((void *)a->first, a->mapped, PROT_NONE);
  in_use -= a->mapped;
  a->freed = 1;
  /* The last ones stay, so that late accesses are seen for what they are. */
  int kept = 0;
  for (allocation **each = &allocations; *each;) {
    allocation *old = *each;
    if (old->freed && ++kept > 64) {
      munmap((void *)old->first, old->mapped);
      if (!old->pinned) munmap((void *)(old->first + DISTANCE), old->mapped);
      while (old->footprints) footprint_drop(&old->footprints);
      *each = old->next;
      free(old);
    } else {
      each = &old->next;
    }
  }
  return CUDA_SUCCESS;
}

STAND_API CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t size) {
  uintptr_t where = 0;
  CUresult result;
  ENTER(NEEDS_CONTEXT | UNSAFE | LOADS);
  result = allocate(&where, size, 0);
  if (!result) *at = where;
  LEAVE(result);
}

STAND_API CUresult cuMemFree_v2(CUdeviceptr at) {
  ENTER(NEEDS_CONTEXT | UNSAFE | LOADS);
  LEAVE(at ? release((uintptr_t)at, 0) : CUDA_SUCCESS);
}

STAND_API CUresult cuMemHostAlloc(void **at, size_t size, unsigned flags) {
  uintptr_t where = 0;
  CUresult result;
  ENTER(NEEDS_CONTEXT | UNSAFE | LOADS);
  result = flags & ~7u ? CUDA_ERROR_INVALID_VALUE : allocate(&where, size, 1);
  if (!result) *at = (void *)where;
  LEAVE(result);
}

STAND_API CUresult cuMemFreeHost(void *at) {
  ENTER(NEEDS_CONTEXT | UNSAFE | LOADS);
  LEAVE(release((uintptr_t)at, 1));
}

STAND_API CUresult cuMemGetInfo_v2(size_t *available, size_t *total) {
  ENTER(NEEDS_CONTEXT);
  *available = TOTAL - in_use;
  *total = TOTAL;
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr at) {
  allocation *a;
  CUresult result = CUDA_SUCCESS;
  ENTER(0);
  a = memory_find((uintptr_t)at);
  if (!a || a->freed) result = CUDA_ERROR_INVALID_VALUE;
  else if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT) *(CUcontext *)value = (CUcontext)a->context;
  else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *(unsigned *)value = a->pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)value = a->context->device;
  else result = CUDA_ERROR_INVALID_VALUE;
  LEAVE(result);
}
