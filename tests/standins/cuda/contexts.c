/* Devices, and the context that is current in each thread. */
#include "internal.h"

enum { DEVICES = 16, DEPTH = 16 };
static context contexts[DEVICES];
static int n_devices;
static __thread context *stack[DEPTH];
static __thread int depth;
static context *shared; /* a mutant's */

context *context_current(void) {
  if (MUTANT(contexts_are_shared)) return shared;
  return depth ? stack[depth - 1] : NULL;
}

context *context_of(CUcontext handle) {
  for (int i = 0; i < n_devices; i++)
    if ((context *)handle == &contexts[i] && contexts[i].retained) return &contexts[i];
  return NULL;
}

static int setting(const char *name, int otherwise) {
  const char *value = getenv(name);
  return value && *value ? atoi(value) : otherwise;
}

STAND_API CUresult cuInit(unsigned flags) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  ENTER(BEFORE_INIT);
  if (flags) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (!stand_initialised) {
    int present = setting("STAND_DEVICES", 1);
    n_devices = 0;
    if (!visible) {
      for (; n_devices < present; n_devices++) contexts[n_devices].physical = n_devices;
    } else {
      char text[128], *rest = text, *one; /* the first that is not there hides those behind it */
      snprintf(text, sizeof text, "%s", visible);
      while ((one = strsep(&rest, ",")) && *one && atoi(one) >= 0 && atoi(one) < present)
        contexts[n_devices++].physical = atoi(one);
    }
    for (int i = 0; i < n_devices; i++) contexts[i].device = i;
    if (!n_devices) LEAVE(CUDA_ERROR_NO_DEVICE);
    stand_initialised = 1;
    executor_start();
  }
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuDriverGetVersion(int *version) {
  ENTER(BEFORE_INIT);
  *version = setting("STAND_DRIVER", 12090);
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuDeviceGetCount(int *count) {
  ENTER(0);
  *count = n_devices;
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  ENTER(0);
  if (ordinal < 0 || ordinal >= n_devices) LEAVE(CUDA_ERROR_INVALID_DEVICE);
  *device = ordinal;
  LEAVE(CUDA_SUCCESS);
}

#define DEVICE(d) \
  if ((d) < 0 || (d) >= n_devices) LEAVE(CUDA_ERROR_INVALID_DEVICE)

STAND_API CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
  ENTER(0);
  DEVICE(device);
  snprintf(name, (size_t)size, "stand-in %d", contexts[device].physical);
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  ENTER(0);
  DEVICE(device);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = contexts[device].physical + 1; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    default: LEAVE(CUDA_ERROR_INVALID_VALUE);
  }
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  ENTER(0);
  DEVICE(device);
  memset(uuid, 0, sizeof *uuid);
  snprintf(uuid->bytes, sizeof uuid->bytes, "stand-in %d", contexts[device].physical);
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice device) {
  ENTER(0);
  DEVICE(device);
  snprintf(text, (size_t)size, "0000:%02x:00.0", contexts[device].physical / setting("STAND_SLICES", 1) + 1);
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) {
  context *c;
  ENTER(0);
  DEVICE(device);
  c = &contexts[device];
  c->retained++;
  if (!c->legacy) {
    c->legacy = stream_make(c, 0, 0);
    snprintf(c->legacy->name, sizeof c->legacy->name, device ? "stream 0 of %d" : "stream 0", device);
  }
  *made = (CUcontext)c;
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  ENTER(0);
  DEVICE(device);
  if (!contexts[device].retained) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
  contexts[device].retained--;
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuCtxGetCurrent(CUcontext *current) {
  ENTER(0);
  *current = (CUcontext)context_current();
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuCtxSetCurrent(CUcontext handle) {
  ENTER(0);
  if (handle && !context_of(handle)) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
  if (!handle) depth -= depth > 0;
  else if (depth) stack[depth - 1] = (context *)handle;
  else stack[depth++] = (context *)handle;
  shared = context_of(handle);
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  ENTER(0);
  if (!context_of(handle) || depth == DEPTH) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
  shared = stack[depth++] = (context *)handle;
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuCtxPopCurrent_v2(CUcontext *popped) {
  ENTER(0);
  if (!depth) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
  depth--;
  if (popped) *popped = (CUcontext)stack[depth];
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuCtxGetDevice(CUdevice *device) {
  ENTER(NEEDS_CONTEXT);
  *device = context_current()->device;
  LEAVE(CUDA_SUCCESS);
}
