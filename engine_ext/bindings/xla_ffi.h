/* The parts of XLA's typed foreign function interface (FFI, version 0.1 and later) that are used here: a compiled program calls a
 * handler, and the handler answers at once or by a future. Layouts are those of the interface. Each structure begins with its
 * size, as the side that filled it knows it, and grows only at its end. Fields beyond that size do not exist. */
#ifndef ENGINE_BINDINGS_XLA_FFI_H
#define ENGINE_BINDINGS_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

typedef struct xla_ffi_error xla_ffi_error;       /* defined by the runtime */
typedef struct xla_ffi_future xla_ffi_future;

/* Codes of errors, as in Abseil's Status. */
enum {
  XLA_FFI_INVALID_ARGUMENT = 3,
  XLA_FFI_ALREADY_EXISTS = 6,
  XLA_FFI_RESOURCE_EXHAUSTED = 8,
  XLA_FFI_FAILED_PRECONDITION = 9,
  XLA_FFI_ABORTED = 10,
  XLA_FFI_UNIMPLEMENTED = 12,
  XLA_FFI_INTERNAL = 13
};

/* dtypes that the engine has too. */
enum {
  XLA_FFI_PRED = 1,
  XLA_FFI_S8 = 2,
  XLA_FFI_S16 = 3,
  XLA_FFI_S32 = 4,
  XLA_FFI_S64 = 5,
  XLA_FFI_U8 = 6,
  XLA_FFI_U16 = 7,
  XLA_FFI_U32 = 8,
  XLA_FFI_U64 = 9,
  XLA_FFI_F16 = 10,
  XLA_FFI_F32 = 11,
  XLA_FFI_F64 = 12,
  XLA_FFI_C64 = 15,
  XLA_FFI_BF16 = 16,
  XLA_FFI_C128 = 18,
  XLA_FFI_F8E5M2 = 19,
  XLA_FFI_F8E4M3FN = 20,
  XLA_FFI_F8E5M2FNUZ = 24,
  XLA_FFI_F8E4M3FNUZ = 25,
  XLA_FFI_F8E8M0FNU = 33,
  XLA_FFI_DTYPES = 34
};

enum { XLA_FFI_METADATA = 1 };                    /* xla_ffi_extension.type */
enum { XLA_FFI_EXECUTE = 3 };                     /* xla_ffi_frame.stage */
enum { XLA_FFI_BUFFER = 1 };                      /* type of an argument or a result */
enum { XLA_FFI_ARRAY = 1, XLA_FFI_SCALAR = 3, XLA_FFI_STRING = 4 };   /* type of an attribute */

typedef struct xla_ffi_extension {
  size_t struct_size;
  int type;
  struct xla_ffi_extension *next;
} xla_ffi_extension;

typedef struct xla_ffi_version {
  size_t struct_size;
  xla_ffi_extension *extensions;
  int major, minor;
} xla_ffi_version;

/* Filled in by a handler that is asked for its version; such a call does not execute it. */
typedef struct xla_ffi_metadata {
  size_t struct_size;
  xla_ffi_version version;
  uint32_t traits;
} xla_ffi_metadata;

typedef struct xla_ffi_metadata_extension {
  xla_ffi_extension base;
  xla_ffi_metadata *metadata;
} xla_ffi_metadata_extension;

typedef struct xla_ffi_span {
  const char *data;
  size_t size;
} xla_ffi_span;

typedef struct xla_ffi_scalar {
  int dtype;
  void *value;
} xla_ffi_scalar;

typedef struct xla_ffi_array {
  int dtype;
  size_t size;
  void *data;
} xla_ffi_array;

typedef struct xla_ffi_buffer {
  size_t struct_size;
  xla_ffi_extension *extensions;
  int dtype;
  void *data;
  int64_t rank;
  int64_t *dims;
} xla_ffi_buffer;

typedef struct xla_ffi_buffers {
  size_t struct_size;
  xla_ffi_extension *extensions;
  int64_t size;
  int *types;
  void **values;
} xla_ffi_buffers;

typedef struct xla_ffi_attributes {
  size_t struct_size;
  xla_ffi_extension *extensions;
  int64_t size;
  int *types;
  xla_ffi_span **names;
  void **values;
} xla_ffi_attributes;

typedef struct xla_ffi_error_create {
  size_t struct_size;
  xla_ffi_extension *extensions;
  const char *message;
  int code;
} xla_ffi_error_create;

typedef struct xla_ffi_error_destroy {
  size_t struct_size;
  xla_ffi_extension *extensions;
  xla_ffi_error *error;
} xla_ffi_error_destroy;

typedef struct xla_ffi_future_create {
  size_t struct_size;
  xla_ffi_extension *extensions;
  xla_ffi_future *future; /* the future that was made */
} xla_ffi_future_create;

typedef struct xla_ffi_future_set {
  size_t struct_size;
  xla_ffi_extension *extensions;
  xla_ffi_future *future;
} xla_ffi_future_set;

typedef struct xla_ffi_future_fail {
  size_t struct_size;
  xla_ffi_extension *extensions;
  xla_ffi_future *future;
  xla_ffi_error *error; /* owned by the runtime from now on */
} xla_ffi_future_fail;

typedef struct xla_ffi_api {
  size_t struct_size;
  xla_ffi_extension *extensions;
  xla_ffi_version version; /* version of the runtime */
  const void *internal;
  xla_ffi_error *(*error_create)(xla_ffi_error_create *);
  void *error_get_message;
  void (*error_destroy)(xla_ffi_error_destroy *);
  void *others[10];
  xla_ffi_error *(*future_create)(xla_ffi_future_create *);
  xla_ffi_error *(*future_set_available)(xla_ffi_future_set *);
  xla_ffi_error *(*future_set_error)(xla_ffi_future_fail *);
} xla_ffi_api;

/* One call of a handler. */
typedef struct xla_ffi_frame {
  size_t struct_size;
  xla_ffi_extension *extensions;
  const xla_ffi_api *api;
  void *context;
  int stage;
  xla_ffi_buffers arguments, results;
  xla_ffi_attributes attributes;
  xla_ffi_future *future; /* set by the handler; the results are complete when it is available */
} xla_ffi_frame;

#endif
