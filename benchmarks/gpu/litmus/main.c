/* Runs one program by its name: 0 if all was as expected, 1 if not, 77 if this machine lacks what it needs. `--list`
 * names them. */
#include "litmus.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

driver cu;
void *library;
CUcontext first_context;

void *optional(const char *name) { return dlsym(library, name); }

void expect(int condition, const char *text, const char *file, int line) {
  if (condition) return;
  fprintf(stderr, "%s:%d: not so: %s\n", file, line, text);
  _exit(1);
}

void returns(CUresult got, CUresult wanted, const char *text, const char *file, int line) {
  const char *name = "?", *other = "?";
  if (got == wanted) return;
  cu.cuGetErrorName(got, &name);
  cu.cuGetErrorName(wanted, &other);
  fprintf(stderr, "%s:%d: %s returned %s (%u), expected %s\n", file, line, text, name, (unsigned)got, other);
  _exit(1);
}

void skip(const char *why) {
  fprintf(stderr, "skipped: %s\n", why);
  _exit(77);
}

static void milliseconds(long n) {
  struct timespec t = {n / 1000, n % 1000 * 1000000};
  nanosleep(&t, NULL);
}

/* How long it is waited for what should come. */
static int patience(void) {
  const char *setting = getenv("LITMUS_PATIENCE");
  return setting ? atoi(setting) : 5000;
}

void rest(void) { milliseconds(12); }

/* ---- what programs are made of ---- */

CUstream blocking(void) {
  CUstream s;
  OK(cu.cuStreamCreateWithPriority(&s, CU_STREAM_DEFAULT, 0));
  return s;
}

CUstream non_blocking(void) {
  CUstream s;
  OK(cu.cuStreamCreateWithPriority(&s, CU_STREAM_NON_BLOCKING, 0));
  return s;
}

CUevent new_event(void) {
  CUevent e;
  OK(cu.cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
  return e;
}

CUdeviceptr word(unsigned value) {
  CUdeviceptr at;
  CUstream s = non_blocking();
  OK(cu.cuMemAlloc_v2(&at, 4));
  OK(cu.cuMemsetD32Async(at, value, 1, s));
  OK(cu.cuStreamSynchronize(s));
  OK(cu.cuStreamDestroy_v2(s));
  return at;
}

/* Memory of the host is allocated before any gate: an allocation may wait for the device. */
static unsigned *window;
static CUstream looking;

unsigned value_of(CUdeviceptr at) {
  OK(cu.cuMemcpyDtoHAsync_v2(window, at, 4, looking));
  OK(cu.cuStreamSynchronize(looking));
  return *window;
}

void store(CUdeviceptr at, unsigned value, CUstream s) { OK(cu.cuMemsetD32Async(at, value, 1, s)); }

void copy_word(CUdeviceptr to, CUdeviceptr from, CUstream s) { OK(cu.cuMemcpyDtoDAsync_v2(to, from, 4, s)); }

static const char *const STORE =
    ".version 6.0\n.target sm_60\n.address_size 64\n"
    ".visible .entry litmus_store(.param .u64 address, .param .u32 value) {\n"
    "  .reg .u64 %a<3>;\n  .reg .u32 %v;\n"
    "  ld.param.u64 %a1, [address];\n  ld.param.u32 %v, [value];\n"
    "  cvta.to.global.u64 %a2, %a1;\n  st.global.u32 [%a2], %v;\n  ret;\n}\n";

typedef void *translate(CUdeviceptr);
static translate *pointer;

static void store_in_c(const void *launch, void **parameters) {
  (void)launch;
  memcpy(pointer(*(CUdeviceptr *)parameters[0]), parameters[1], 4);
}

CUfunction store_kernel(void) {
  typedef void kernel(const void *, void **);
  void (*registers)(const char *, kernel *) =
      (void (*)(const char *, kernel *))(uintptr_t)optional("stand_register_kernel");
  CUmodule m;
  CUfunction f;
  pointer = (translate *)(uintptr_t)optional("stand_pointer");
  if (registers) registers("litmus_store", store_in_c);
  OK(cu.cuModuleLoadDataEx(&m, STORE, 0, NULL, NULL));
  OK(cu.cuModuleGetFunction(&f, m, "litmus_store"));
  return f;
}

/* ---- gates ---- */

static void stand_at(void *argument) {
  gate *g = argument;
  pthread_mutex_lock(&g->lock);
  g->entered = 1;
  pthread_cond_broadcast(&g->moved);
  while (!g->open) pthread_cond_wait(&g->moved, &g->lock);
  pthread_mutex_unlock(&g->lock);
}

gate *shut_behind(CUstream s) {
  gate *g = calloc(1, sizeof *g);
  pthread_mutex_init(&g->lock, NULL);
  pthread_cond_init(&g->moved, NULL);
  OK(cu.cuLaunchHostFunc(s, stand_at, g));
  return g;
}

gate *shut(CUstream s) {
  gate *g = shut_behind(s);
  pthread_mutex_lock(&g->lock);
  while (!g->entered) pthread_cond_wait(&g->moved, &g->lock);
  pthread_mutex_unlock(&g->lock);
  return g;
}

void open_gate(gate *g) {
  pthread_mutex_lock(&g->lock);
  g->open = 1;
  pthread_cond_broadcast(&g->moved);
  pthread_mutex_unlock(&g->lock);
}

int passed_now(CUstream s) {
  CUresult result = cu.cuStreamQuery(s);
  if (result != CUDA_ERROR_NOT_READY) OK(result);
  return result == CUDA_SUCCESS;
}

int passed(CUstream s) {
  for (int i = 0; i < patience(); i++) {
    if (passed_now(s)) return 1;
    milliseconds(1);
  }
  return 0;
}

int happened(CUevent e) {
  CUresult result = CUDA_ERROR_NOT_READY;
  for (int i = 0; i < patience() && result == CUDA_ERROR_NOT_READY; i++) {
    if (i) milliseconds(1);
    result = cu.cuEventQuery(e);
  }
  if (result != CUDA_ERROR_NOT_READY) OK(result);
  return result == CUDA_SUCCESS;
}

void on_thread(void (*function)(void *), void *argument) {
  typedef void *body(void *);
  pthread_t thread;
  EXPECT(pthread_create(&thread, NULL, (body *)(void (*)(void))function, argument) == 0);
  pthread_join(thread, NULL);
}

CUcontext second_context(void) {
  CUcontext c;
  int n;
  OK(cu.cuDeviceGetCount(&n));
  if (n < 2) skip("this needs two devices");
  OK(cu.cuDevicePrimaryCtxRetain(&c, 1));
  return c;
}

/* ---- start ---- */

static void load(void) {
  const char *chosen = getenv("ENGINE_CUDA_LIBRARY"); /* as for the engine */
  if (chosen == NULL || *chosen == 0 || !strcmp(chosen, "auto")) chosen = "libcuda.so.1";
  library = dlopen(chosen, RTLD_NOW | RTLD_GLOBAL);
  if (!library) skip(dlerror());
#define X(name, parameters)                                                    \
  if (!(cu.name = (CUresult(*) parameters)(uintptr_t)dlsym(library, #name))) { \
    fprintf(stderr, "libcuda.so.1 has no %s\n", #name);                        \
    exit(1);                                                                   \
  }
  CUDA_FUNCTIONS(X)
#undef X
}

int main(int argc, char **argv) {
  const program *p = programs;
  if (argc == 2 && !strcmp(argv[1], "--list")) {
    for (; p->name; p++) puts(p->name);
    return 0;
  }
  while (argc == 2 && p->name && strcmp(p->name, argv[1])) p++;
  if (argc != 2 || !p->name) {
    fprintf(stderr, "usage: %s NAME | --list\n", argv[0]);
    return 2;
  }
  alarm(20);
  load();
  OK(cu.cuInit(0));
  OK(cu.cuDevicePrimaryCtxRetain(&first_context, 0));
  OK(cu.cuCtxSetCurrent(first_context));
  OK(cu.cuMemHostAlloc((void **)&window, 4096, 0));
  looking = non_blocking();
  p->run();
  fflush(NULL);
  _exit(0); /* whatever is still behind a gate */
}
