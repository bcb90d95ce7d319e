/* The values, types and functions of NCCL that the engine uses, with the first version that has each function. cuda.h says how
 * the lists are checked. */
#ifndef ENGINE_GPU_NCCL_H
#define ENGINE_GPU_NCCL_H

#include "cuda.h"

#include <limits.h>

/* X(name, value) */
#define NCCL_VALUES(X)         \
  X(ncclSuccess, 0)            \
  X(ncclUnhandledCudaError, 1) \
  X(ncclSystemError, 2)        \
  X(ncclInternalError, 3)      \
  X(ncclInvalidArgument, 4)    \
  X(ncclInvalidUsage, 5)       \
  X(ncclRemoteError, 6)        \
  X(ncclInProgress, 7)         \
  X(ncclSum, 0)                \
  X(ncclProd, 1)               \
  X(ncclMax, 2)                \
  X(ncclMin, 3)                \
  X(ncclAvg, 4)                \
  X(ncclInt8, 0)               \
  X(ncclUint8, 1)              \
  X(ncclInt32, 2)              \
  X(ncclUint32, 3)             \
  X(ncclInt64, 4)              \
  X(ncclUint64, 5)             \
  X(ncclFloat16, 6)            \
  X(ncclFloat32, 7)            \
  X(ncclFloat64, 8)            \
  X(ncclBfloat16, 9)

#ifndef NCCL_H_ /* the guard of NVIDIA's header */
enum {
#define X(name, value) name = value,
  NCCL_VALUES(X)
#undef X
};
typedef struct ncclComm *ncclComm_t;
typedef struct {
  char internal[128];
} ncclUniqueId;
typedef CUstream cudaStream_t;
typedef struct nccl_config ncclConfig_t;
/* NVIDIA's header has enumerations here. */
typedef unsigned ncclResult_t, ncclDataType_t, ncclRedOp_t;
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_API_MAGIC 0xcafebeef
#endif

/* The layout of NCCL 2.17, as `size` and `version` say. Newer libraries use defaults for fields that were added later. */
enum { NCCL_CONFIG_VERSION = 21700 };
struct nccl_config {
  size_t size;
  unsigned magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char *netName;
  int splitShare;
};

/* X(name, parameters, first version). All return an ncclResult_t. */
#define NCCL_FUNCTIONS(X)                                                                                            \
  X(ncclGetVersion, (int *), 20000)                                                                                  \
  X(ncclGetUniqueId, (ncclUniqueId *), 20000)                                                                        \
  X(ncclCommInitRankConfig, (ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *), 21402)                           \
  X(ncclCommFinalize, (ncclComm_t), 21402)                                                                           \
  X(ncclCommDestroy, (ncclComm_t), 20000)                                                                            \
  X(ncclCommAbort, (ncclComm_t), 20400)                                                                              \
  X(ncclCommRevoke, (ncclComm_t, int), 22807)                                                                        \
  X(ncclCommGetAsyncError, (ncclComm_t, ncclResult_t *), 20400)                                                      \
  X(ncclCommCount, (const ncclComm_t, int *), 20000)                                                                 \
  X(ncclCommCuDevice, (const ncclComm_t, int *), 20000)                                                              \
  X(ncclCommUserRank, (const ncclComm_t, int *), 20000)                                                              \
  X(ncclGroupStart, (void), 20000)                                                                                   \
  X(ncclGroupEnd, (void), 20000)                                                                                     \
  X(ncclAllReduce, (const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t), 20000)     \
  X(ncclBroadcast, (const void *, void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t), 20200)             \
  X(ncclReduce, (const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t, cudaStream_t), 20000)   \
  X(ncclAllGather, (const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t), 20000)                  \
  X(ncclReduceScatter, (const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t), 20000) \
  X(ncclSend, (const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t), 20700)                          \
  X(ncclRecv, (void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t), 20700)                                \
  X(ncclMemAlloc, (void **, size_t), 21900)                                                                          \
  X(ncclMemFree, (void *), 21900)

/* X(name, parameters, first version). Both return a text. */
#define NCCL_TEXTS(X)                          \
  X(ncclGetErrorString, (ncclResult_t), 20000) \
  X(ncclGetLastError, (ncclComm_t), 21300)

#endif
