/* Memory and contexts as a host sees them. */
#include "programs.h"

#include <setjmp.h>
#include <signal.h>

static sigjmp_buf back;

static void fault(int number) {
  (void)number;
  siglongjmp(back, 1);
}

void host_may_not_touch_device_memory(void) {
  volatile unsigned *x = (unsigned *)(size_t)word(1);
  struct sigaction action = {.sa_handler = fault};
  int faults = 0;
  sigaction(SIGSEGV, &action, NULL);
  sigaction(SIGBUS, &action, NULL);
  if (sigsetjmp(back, 1)) faults++;
  else (void)*x;
  EXPECT(faults == 1);
  if (sigsetjmp(back, 1)) faults++;
  else *x = 2;
  EXPECT(faults == 2);
}

static void has_no_context(void *unused) {
  CUcontext c = first_context;
  CUdeviceptr x;
  (void)unused;
  OK(cu.cuCtxGetCurrent(&c));
  EXPECT(c == NULL);
  RETURNS(cu.cuMemAlloc_v2(&x, 4), CUDA_ERROR_INVALID_CONTEXT);
  OK(cu.cuCtxSetCurrent(first_context));
  OK(cu.cuMemAlloc_v2(&x, 4));
}

void context_is_of_the_thread(void) {
  CUcontext c;
  on_thread(has_no_context, NULL);
  OK(cu.cuCtxPushCurrent_v2(first_context));
  OK(cu.cuCtxPopCurrent_v2(&c));
  EXPECT(c == first_context);
  OK(cu.cuCtxGetCurrent(&c));
  EXPECT(c == first_context);
}

void pointers_know_what_they_are(void) {
  CUdeviceptr x = word(0);
  CUcontext c;
  unsigned type;
  int ordinal = -1, here;
  void *pinned;
  OK(cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, x));
  EXPECT(type == CU_MEMORYTYPE_DEVICE);
  OK(cu.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, x));
  EXPECT(ordinal == 0);
  OK(cu.cuPointerGetAttribute(&c, CU_POINTER_ATTRIBUTE_CONTEXT, x));
  EXPECT(c == first_context);
  OK(cu.cuMemHostAlloc(&pinned, 4, 0));
  OK(cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(size_t)pinned));
  EXPECT(type == CU_MEMORYTYPE_HOST);
  RETURNS(cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(size_t)&here),
          CUDA_ERROR_INVALID_VALUE);
}
