/* engine_ext/gpu/lane.pyx for a lane whose source was changed: what tests/gpu/mutants.py calls. */
#include LANE_SOURCE

#include <stdlib.h>

#define API __attribute__((visibility("default")))

API lane *glue_new(const uintptr_t *addresses, int ordinal, int rank, int size, const char *image,
                   const char **names, int n_kernels) {
  lane *l = calloc(1, sizeof *l);
  memcpy(&l->f, addresses, sizeof l->f);
  l->ordinal = ordinal;
  l->rank = rank;
  l->size = size;
  l->image = image;
  l->names = names;
  l->n_kernels = n_kernels;
  return lane_start(l) ? NULL : l;
}

API void glue_begin(lane *l, unsigned job, const void *id) {
  if (id) memcpy(&l->id, id, sizeof l->id);
  lane_begin(l, job);
}

API int glue_wait(lane *l, unsigned long long ns) { return lane_wait(l, ns); }
API void glue_cancel(lane *l) { store32_release(&l->cancelled, 1); }
API void glue_join(lane *l) { lane_join(l); }
API const char *glue_call(lane *l) { return load_pointer(&l->call); }
API lane_failure *glue_failure(lane *l) { return &l->failure; }
API lane_identity *glue_identity(lane *l) { return &l->identity; }
API void *glue_id(lane *l) { return &l->id; }
API int glue_left(lane *l) { return l->left; }
API CUstream glue_stream(lane *l) { return l->stream; }
API CUfunction glue_kernel(lane *l, int k) { return l->kernels[k]; }
