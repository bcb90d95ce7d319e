/* The parts of the DLPack 1.x ABI that are used here: a borrowed view of a tensor, and the table through which a type lends one
 * without a capsule (`__dlpack_c_exchange_api__`). Layouts follow the DLPack specification. */
#ifndef ENGINE_BINDINGS_DLPACK_H
#define ENGINE_BINDINGS_DLPACK_H

#include <stdint.h>

enum { DL_CPU = 1, DL_CUDA = 2 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5, DL_BOOL = 6 };
enum { DL_E4M3FN = 10, DL_E4M3FNUZ = 11, DL_E5M2 = 12, DL_E5M2FNUZ = 13, DL_E8M0FNU = 14 }; /* float8 */

typedef struct dl_tensor {
  void *data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape, *strides; /* strides in elements; null: row-major */
  uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
  dl_tensor tensor;
  void *context;
  void (*deleter)(struct dl_managed *);
} dl_managed;

typedef struct dl_managed_versioned {
  struct {
    uint32_t major, minor;
  } version;
  void *context;
  void (*deleter)(struct dl_managed_versioned *);
  uint64_t flags; /* bit 0: read-only */
  dl_tensor tensor;
} dl_managed_versioned;

typedef struct dl_exchange_api {
  struct {
    uint32_t major, minor;
  } version;
  struct dl_exchange_api *previous;
  void *allocate, *managed_from, *managed_to;
  int (*borrow)(void *object, dl_tensor *out); /* returns 0, or -1 with a Python exception set */
  /* Write the stream on which the framework works in this thread; return 0, or -1 with a Python exception set. */
  int (*current_stream)(int device_type, int32_t device, void **stream);
} dl_exchange_api;

#endif
