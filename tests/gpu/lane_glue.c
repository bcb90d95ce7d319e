/* engine_ext/gpu/lane.pyx for a lane whose source was changed: what tests/gpu/mutants.py calls. */
#include "engine_ext/gpu/lane.h"

#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

/* `known`: the fields of a lane_kernels. `sizes`: bytes of the slab and of the tables, and whether sums are ordered. */
API lane *glue_new(const uintptr_t *addresses, int ordinal, int rank, int size, const char *image,
                   const char **names, int n_kernels, const int *known, const uint64_t *sizes) {
  lane *l = calloc(1, sizeof *l);
  memcpy(&l->f, addresses, sizeof l->f);
  memcpy(&l->known, known, sizeof l->known);
  l->slab_bytes = sizes[0];
  l->table_bytes = sizes[1];
  l->ordered = (int)sizes[2];
  l->d.ordinal = ordinal;
  l->world.rank = rank;
  l->world.size = size;
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
API void glue_cancel(lane *l) { lane_cancel(l); }
API void *glue_device(lane *l) { return &l->d; }
API int glue_pending(lane *l) { return load_acquire(&l->d.ended) < load_relaxed(&l->d.pushed); }
API void *glue_add(lane *l, int number, int rank, int size) {
  communicator *c = calloc(1, sizeof *c);
  c->queue.d = &l->d;
  c->queue.number = number;
  c->rank = rank;
  c->size = size;
  return c;
}

API void glue_connect(lane *l, communicator *c, const void *id) {
  memcpy(&c->id, id, sizeof c->id);
  lane_connect(l, c);
}

API void glue_forget(communicator *c) { free(c); }
API int glue_mark(lane *l, void *stream, char *why) {
  device_mark *mark;
  return l->d.mark(&l->d, stream, &mark, why);
}

API void glue_part(lane *l, communicator *c) { lane_part(l, c); }
API unsigned glue_reached(lane *l, communicator *c, unsigned stage, unsigned long long ns) {
  return lane_await_stage(l, c, stage, ns);
}

API void *glue_freeze(lane *l, int op, const double *factors, const device_part *parts, int n_parts, const device_row *rows,
                      int n_rows) {
  frozen_pass *p = lane_new_pass(l, op, factors[0], factors[1], parts, n_parts, rows, n_rows);
  lane_freeze(l, p);
  return p;
}

API void glue_unite(lane *l, frozen_pass *p, const void *id) {
  lane_unite(l, p, id);
}

API void glue_repeat(lane *l, frozen_pass *p, void *stream) { lane_repeat(l, p, stream); }
API const char *glue_pass_ended(lane *l, frozen_pass *p, unsigned long long ns) {
  return lane_await_pass(l, p, ns) ? p->why : NULL;
}

API void glue_join(lane *l) { lane_join(l); }
API const char *glue_call(lane *l) { return load_pointer(&l->d.call); }
API lane_failure *glue_failure(lane *l) { return &l->failure; }
API lane_identity *glue_identity(lane *l) { return &l->identity; }
API void *glue_id(lane *l) { return &l->id; }
API int glue_left(lane *l) { return l->left; }
API CUstream glue_stream(lane *l) { return l->stream; }
API CUfunction glue_kernel(lane *l, int k) { return l->kernels[k]; }
