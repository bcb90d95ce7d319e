/* The values, types and functions of the CUDA driver that the engine uses. Functions have the versioned names under which the
 * library exports them.
 *
 * The bare names (cuMemAlloc, cuStreamDestroy, ...) are an older ABI with other argument types. No CUDA header is needed. If one
 * was included before this file, its types are used, so that `make gpu-abi` can compare the lists below with them.
 */
#ifndef ENGINE_GPU_CUDA_H
#define ENGINE_GPU_CUDA_H

#include <stddef.h>

/* Results: X(name, value). */
#define CUDA_RESULTS(X)                          \
  X(CUDA_SUCCESS, 0)                             \
  X(CUDA_ERROR_INVALID_VALUE, 1)                 \
  X(CUDA_ERROR_OUT_OF_MEMORY, 2)                 \
  X(CUDA_ERROR_NOT_INITIALIZED, 3)               \
  X(CUDA_ERROR_DEINITIALIZED, 4)                 \
  X(CUDA_ERROR_NO_DEVICE, 100)                   \
  X(CUDA_ERROR_INVALID_DEVICE, 101)              \
  X(CUDA_ERROR_INVALID_IMAGE, 200)               \
  X(CUDA_ERROR_INVALID_CONTEXT, 201)             \
  X(CUDA_ERROR_INVALID_PTX, 218)                 \
  X(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, 222)     \
  X(CUDA_ERROR_JIT_COMPILATION_DISABLED, 223)    \
  X(CUDA_ERROR_INVALID_HANDLE, 400)              \
  X(CUDA_ERROR_NOT_FOUND, 500)                   \
  X(CUDA_ERROR_NOT_READY, 600)                   \
  X(CUDA_ERROR_ILLEGAL_ADDRESS, 700)             \
  X(CUDA_ERROR_LAUNCH_TIMEOUT, 702)              \
  X(CUDA_ERROR_LAUNCH_FAILED, 719)               \
  X(CUDA_ERROR_NOT_SUPPORTED, 801)               \
  X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900)  \
  X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901)  \
  X(CUDA_ERROR_STREAM_CAPTURE_MERGE, 902)        \
  X(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, 903)    \
  X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, 904)     \
  X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, 905)    \
  X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906)     \
  X(CUDA_ERROR_CAPTURED_EVENT, 907)              \
  X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908) \
  X(CUDA_ERROR_UNKNOWN, 999)

/* Flags and attributes. */
#define CUDA_FLAGS(X)                                 \
  X(CU_STREAM_DEFAULT, 0)                             \
  X(CU_STREAM_NON_BLOCKING, 1)                        \
  X(CU_EVENT_DEFAULT, 0)                              \
  X(CU_EVENT_DISABLE_TIMING, 2)                       \
  X(CU_STREAM_CAPTURE_STATUS_NONE, 0)                 \
  X(CU_STREAM_CAPTURE_STATUS_ACTIVE, 1)               \
  X(CU_STREAM_CAPTURE_STATUS_INVALIDATED, 2)          \
  X(CU_STREAM_CAPTURE_MODE_GLOBAL, 0)                 \
  X(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, 1)           \
  X(CU_STREAM_CAPTURE_MODE_RELAXED, 2)                \
  X(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16)     \
  X(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 33)               \
  X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75) \
  X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76) \
  X(CU_POINTER_ATTRIBUTE_CONTEXT, 1)                  \
  X(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)              \
  X(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)           \
  X(CU_MEMORYTYPE_HOST, 1)                            \
  X(CU_MEMORYTYPE_DEVICE, 2)                          \
  X(CU_JIT_ERROR_LOG_BUFFER, 5)                       \
  X(CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, 6)

#define CUDA_VALUES(X) CUDA_RESULTS(X) CUDA_FLAGS(X)

#ifndef __cuda_cuda_h__ /* the guard of NVIDIA's header */
enum {
#define X(name, value) name = value,
  CUDA_VALUES(X)
#undef X
};
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUuuid_st {
  char bytes[16];
} CUuuid;
typedef void (*CUhostFn)(void *);
/* NVIDIA's header has enumerations here, which are passed and returned in the same way. */
typedef unsigned CUresult, CUdevice_attribute, CUpointer_attribute, CUjit_option, CUstreamCaptureMode,
    CUstreamCaptureStatus;
#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)
#endif

/* Every function that the engine calls: X(name, parameters). All return a CUresult. */
#define CUDA_FUNCTIONS(X)                                                                                           \
  X(cuInit, (unsigned))                                                                                             \
  X(cuDriverGetVersion, (int *))                                                                                    \
  X(cuDeviceGetCount, (int *))                                                                                      \
  X(cuDeviceGet, (CUdevice *, int))                                                                                 \
  X(cuDeviceGetName, (char *, int, CUdevice))                                                                       \
  X(cuDeviceGetAttribute, (int *, CUdevice_attribute, CUdevice))                                                    \
  X(cuDeviceGetUuid_v2, (CUuuid *, CUdevice))                                                                       \
  X(cuDeviceGetPCIBusId, (char *, int, CUdevice))                                                                   \
  X(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                                              \
  X(cuDevicePrimaryCtxRelease_v2, (CUdevice))                                                                       \
  X(cuCtxGetCurrent, (CUcontext *))                                                                                 \
  X(cuCtxSetCurrent, (CUcontext))                                                                                   \
  X(cuCtxPushCurrent_v2, (CUcontext))                                                                               \
  X(cuCtxPopCurrent_v2, (CUcontext *))                                                                              \
  X(cuCtxGetDevice, (CUdevice *))                                                                                   \
  X(cuCtxSynchronize, (void))                                                                                       \
  X(cuCtxGetStreamPriorityRange, (int *, int *))                                                                    \
  X(cuStreamCreateWithPriority, (CUstream *, unsigned, int))                                                        \
  X(cuStreamGetPriority, (CUstream, int *))                                                                         \
  X(cuStreamDestroy_v2, (CUstream))                                                                                 \
  X(cuStreamWaitEvent, (CUstream, CUevent, unsigned))                                                               \
  X(cuStreamQuery, (CUstream))                                                                                      \
  X(cuStreamSynchronize, (CUstream))                                                                                \
  X(cuStreamIsCapturing, (CUstream, CUstreamCaptureStatus *))                                                       \
  X(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *))                                                     \
  X(cuStreamBeginCapture_v2, (CUstream, CUstreamCaptureMode))                                                       \
  X(cuStreamEndCapture, (CUstream, CUgraph *))                                                                      \
  X(cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, unsigned long long))                                      \
  X(cuGraphLaunch, (CUgraphExec, CUstream))                                                                         \
  X(cuGraphExecDestroy, (CUgraphExec))                                                                              \
  X(cuGraphDestroy, (CUgraph))                                                                                      \
  X(cuEventCreate, (CUevent *, unsigned))                                                                           \
  X(cuEventDestroy_v2, (CUevent))                                                                                   \
  X(cuEventRecord, (CUevent, CUstream))                                                                             \
  X(cuEventQuery, (CUevent))                                                                                        \
  X(cuEventSynchronize, (CUevent))                                                                                  \
  X(cuEventElapsedTime, (float *, CUevent, CUevent))                                                                \
  X(cuMemAlloc_v2, (CUdeviceptr *, size_t))                                                                         \
  X(cuMemFree_v2, (CUdeviceptr))                                                                                    \
  X(cuMemGetInfo_v2, (size_t *, size_t *))                                                                          \
  X(cuMemHostAlloc, (void **, size_t, unsigned))                                                                    \
  X(cuMemFreeHost, (void *))                                                                                        \
  X(cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                                    \
  X(cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream))                                            \
  X(cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream))                                                  \
  X(cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                             \
  X(cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))                                                \
  X(cuMemsetD32Async, (CUdeviceptr, unsigned, size_t, CUstream))                                                    \
  X(cuPointerGetAttribute, (void *, CUpointer_attribute, CUdeviceptr))                                              \
  X(cuModuleLoadDataEx, (CUmodule *, const void *, unsigned, CUjit_option *, void **))                              \
  X(cuModuleGetFunction, (CUfunction *, CUmodule, const char *))                                                    \
  X(cuModuleUnload, (CUmodule))                                                                                     \
  X(cuLaunchKernel,                                                                                                 \
    (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **)) \
  X(cuLaunchHostFunc, (CUstream, CUhostFn, void *))                                                                 \
  X(cuGetErrorName, (CUresult, const char **))                                                                      \
  X(cuGetErrorString, (CUresult, const char **))

#endif
