/* Modules and launches. A kernel is a C function under its name: `stand_register_kernel`; its PTX tells the sizes of
 * its parameters. */
#include "internal.h"

#include <ctype.h>

enum { PARAMETERS = 32 };

typedef struct function {
  struct function *next;
  char name[128];
  int n_parameters, launched;
  size_t sizes[PARAMETERS];
  struct module *module;
} function;

typedef struct module {
  context *context;
  function *functions;
} module;

static struct registered {
  struct registered *next;
  char name[128];
  stand_kernel *kernel;
  stand_accesses *accesses;
} *registered;

static struct registered *kernel_named(const char *name, int make) {
  struct registered *r = registered;
  while (r && strcmp(r->name, name)) r = r->next;
  if (!r && make) {
    r = calloc(1, sizeof *r);
    snprintf(r->name, sizeof r->name, "%s", name);
    r->next = registered;
    registered = r;
  }
  return r;
}

void stand_register_kernel(const char *name, stand_kernel *kernel) {
  stand_lock();
  kernel_named(name, 1)->kernel = kernel;
  stand_unlock();
}

void stand_register_accesses(const char *name, stand_accesses *accesses) {
  stand_lock();
  kernel_named(name, 1)->accesses = accesses;
  stand_unlock();
}

/* ---- reading PTX ---- */

static size_t size_of_type(const char *type) { /* "u64" and the like */
  static const struct {
    const char *end;
    size_t size;
  } sizes[] = {{"64", 8}, {"32", 4}, {"16", 2}, {"8", 1}};
  for (size_t i = 0; i < 4; i++)
    if (!strncmp(type + 1, sizes[i].end, strlen(sizes[i].end))) return sizes[i].size;
  return 0;
}

static size_t size_of_parameter(const char *text) { /* ".param .align 8 .b8 name[24]" or ".param .u64 name" */
  size_t size = 0, count = 1;
  const char *dot = text, *end = strpbrk(text, ",)"), *bracket = strchr(text, '[');
  while ((dot = strchr(dot + 1, '.')) && dot < end)
    if (strchr("bsuf", dot[1]) && isdigit((unsigned char)dot[2])) size = size_of_type(dot + 1);
  if (bracket && bracket < end) count = strtoull(bracket + 1, NULL, 10);
  return size * count;
}

static function *read_entries(const char *text) {
  function *all = NULL;
  while ((text = strstr(text, ".entry"))) {
    function *f = calloc(1, sizeof *f);
    const char *at = text + 6, *end;
    while (isspace((unsigned char)*at)) at++;
    f->next = all;
    all = f;
    snprintf(f->name, sizeof f->name, "%.*s", (int)strcspn(at, " \t\n("), at);
    at += strcspn(at, "({");
    end = *at == '(' ? strchr(at, ')') : at;
    while (end && (at = strstr(at, ".param")) && at < end && f->n_parameters < PARAMETERS) {
      f->sizes[f->n_parameters++] = size_of_parameter(at);
      at++;
    }
    text = end ? end : text + 6;
  }
  return all;
}

static void write_log(const char *text, unsigned n, CUjit_option *options, void **values) {
  char *log = NULL;
  size_t size = 0;
  for (unsigned i = 0; i < n; i++) {
    if (options[i] == CU_JIT_ERROR_LOG_BUFFER) log = values[i];
    if (options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) size = (size_t)(uintptr_t)values[i];
  }
  if (log && size) snprintf(log, size, "%s", text);
}

STAND_API CUresult cuModuleLoadDataEx(CUmodule *made, const void *image, unsigned n, CUjit_option *options,
                                      void **values) {
  const char *version, *setting = getenv("STAND_PTX"); /* the newest that is taken: 88 is 8.8, of CUDA 12.9 */
  int major = 0, minor = 0, newest = setting ? atoi(setting) : 88;
  module *m;
  ENTER(NEEDS_CONTEXT | UNSAFE | LOADS);
  version = strstr(image, ".version");
  if (!version || sscanf(version, ".version %d.%d", &major, &minor) != 2 || !strstr(image, ".target")) {
    write_log("ptxas fatal: the image has no .version or no .target", n, options, values);
    LEAVE(CUDA_ERROR_INVALID_PTX);
  }
  if (major * 10 + minor > newest) {
    char text[128];
    snprintf(text, sizeof text, "ptxas fatal: Unsupported .version %d.%d; current version is '%d.%d'", major, minor,
             newest / 10, newest % 10);
    write_log(text, n, options, values);
    LEAVE(CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
  }
  m = calloc(1, sizeof *m);
  m->context = context_current();
  m->functions = read_entries(image);
  for (function *f = m->functions; f; f = f->next) f->module = m;
  *made = (CUmodule)m;
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuModuleGetFunction(CUfunction *made, CUmodule handle, const char *name) {
  function *f;
  struct registered *r;
  ENTER(NEEDS_CONTEXT | UNSAFE | LOADS);
  f = ((module *)handle)->functions;
  while (f && strcmp(f->name, name)) f = f->next;
  if (!f) LEAVE(CUDA_ERROR_NOT_FOUND);
  r = kernel_named(name, 0);
  if (!r || !r->kernel) {
    stand_found("no C function for the kernel %s: stand_register_kernel", name);
    LEAVE(CUDA_ERROR_NOT_FOUND);
  }
  *made = (CUfunction)f;
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuModuleUnload(CUmodule handle) {
  module *m = (module *)handle;
  ENTER(NEEDS_CONTEXT | UNSAFE | LOADS);
  while (m->functions) {
    function *f = m->functions;
    m->functions = f->next;
    free(f);
  }
  free(m);
  LEAVE(CUDA_SUCCESS);
}

/* ---- launches ---- */

typedef struct launch {
  uint64_t until; /* when a slow kernel ends */
  stand_launch shape;
  const struct registered *kernel;
  int n;
  void *parameters[PARAMETERS];
  char values[];
} launch;

static double kernel_delay;

void stand_kernels_take(double milliseconds) { kernel_delay = milliseconds; }

static int launch_step(void *data) {
  launch *l = data;
  stand_access accesses[4096];
  int n;
  if (!l->until) l->until = now() + (uint64_t)(kernel_delay * 1e6);
  if (now() < l->until) return 0;
  n = l->kernel->accesses ? l->kernel->accesses(&l->shape, l->parameters, accesses, 4096) : 0;
  for (int i = 0; i < n; i++) {
    memory_check(&accesses[i], running->agent, running->epoch, running->when, running->what);
    if (!memory_holds(accesses[i].at, accesses[i].size, running->what))
      return stand_sticky(CUDA_ERROR_ILLEGAL_ADDRESS), 1;
  }
  l->kernel->kernel(&l->shape, l->parameters);
  return 1;
}

STAND_API CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                  unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared, CUstream where,
                                  void **parameters, void **extra) {
  function *f = (function *)handle;
  stand_operation what = {.what = f->name, .step = launch_step, .drop = free};
  size_t size = 0, at = 0;
  CUresult wrong;
  stream *s;
  launch *l;
  ENTER(NEEDS_CONTEXT);
  if (!f->launched) { /* loaded lazily, with the rules of loading */
    stand_unlock();
    CUresult refused = stand_enter("loading a kernel at its first launch", NEEDS_CONTEXT | LOADS);
    if (refused) return refused;
    f->launched = 1;
  }
  s = stream_of(where, &wrong);
  if (!s) LEAVE(wrong);
  if (s->context != f->module->context) LEAVE(CUDA_ERROR_INVALID_HANDLE);
  if (extra) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
  if (!grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z || block_x * block_y * block_z > 1024 ||
      grid_y > 65535 || grid_z > 65535 || (f->n_parameters && !parameters))
    LEAVE(CUDA_ERROR_INVALID_VALUE);
  for (int i = 0; i < f->n_parameters; i++) size += (f->sizes[i] + 15) & ~(size_t)15;
  l = calloc(1, sizeof *l + size);
  l->shape = (stand_launch){{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared};
  l->kernel = kernel_named(f->name, 0);
  for (int i = 0; i < f->n_parameters; i++) {
    l->parameters[i] = MUTANT(arguments_read_late) ? parameters[i] : memcpy(l->values + at, parameters[i], f->sizes[i]);
    at += (f->sizes[i] + 15) & ~(size_t)15;
  }
  what.data = l;
  LEAVE(stream_put(s, &what, NULL, NULL));
}

/* ---- texts of results ---- */

static const char *name_of(CUresult result) {
  switch (result) {
#define X(name, value) \
  case value: return #name;
    CUDA_RESULTS(X)
#undef X
  }
  return NULL;
}

STAND_API CUresult cuGetErrorName(CUresult result, const char **text) {
  *text = name_of(result);
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

STAND_API CUresult cuGetErrorString(CUresult result, const char **text) { return cuGetErrorName(result, text); }
