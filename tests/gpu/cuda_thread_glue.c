/* engine_ext/gpu/cuda_thread.pyx for a CUDA thread whose source was changed: what tests/gpu/mutants.py calls. */
#include "engine_ext/gpu/cuda_thread.h"

#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

/* `known`: the fields of a cuda_thread_kernels. `sizes`: bytes of the slab and of the tables, and whether sums are ordered. */
API cuda_thread *glue_new(const uintptr_t *addresses, int ordinal, int rank, int size, const char *image,
                   const char **names, int n_kernels, const int *known, const uint64_t *sizes) {
  cuda_thread *t = calloc(1, sizeof *t);
  memcpy(&t->f, addresses, sizeof t->f);
  memcpy(&t->known, known, sizeof t->known);
  t->slab_bytes = sizes[0];
  t->table_bytes = sizes[1];
  t->ordered = (int)sizes[2];
  t->d.ordinal = ordinal;
  t->world.rank = rank;
  t->world.size = size;
  t->image = image;
  t->names = names;
  t->n_kernels = n_kernels;
  return cuda_thread_start(t) ? NULL : t;
}

API void glue_begin(cuda_thread *t, unsigned job, const void *id) {
  if (id) memcpy(&t->id, id, sizeof t->id);
  cuda_thread_begin(t, job);
}

API int glue_wait(cuda_thread *t, unsigned long long ns) { return cuda_thread_wait(t, ns); }
API void glue_cancel(cuda_thread *t) { cuda_thread_cancel(t); }
API void *glue_device(cuda_thread *t) { return &t->d; }
API int glue_pending(cuda_thread *t) { return load_acquire(&t->d.ended) < load_relaxed(&t->d.pushed); }
API void *glue_add_communicator(cuda_thread *t, int number, int rank, int size) {
  communicator *c = calloc(1, sizeof *c);
  c->queue.d = &t->d;
  c->queue.number = number;
  c->rank = rank;
  c->size = size;
  return c;
}

API void glue_connect_communicator(cuda_thread *t, communicator *c, const void *id) {
  memcpy(&c->id, id, sizeof c->id);
  cuda_thread_connect_communicator(t, c);
}

API void glue_free_communicator(communicator *c) { free(c); }
API int glue_mark(cuda_thread *t, void *stream, char *why) {
  device_mark *mark;
  return t->d.mark(&t->d, stream, &mark, why);
}

API void glue_destroy_communicator(cuda_thread *t, communicator *c) { cuda_thread_destroy_communicator(t, c); }
API unsigned glue_await_stage(cuda_thread *t, communicator *c, unsigned stage, unsigned long long ns) {
  return cuda_thread_await_stage(t, c, stage, ns);
}

API void *glue_allocate_pass(cuda_thread *t, int op, const double *factors, const device_part *parts, int n_parts,
                      const device_row *rows, int n_rows) {
  frozen_pass *p = cuda_thread_new_pass(t, op, factors[0], factors[1], parts, n_parts, rows, n_rows);
  cuda_thread_allocate_pass(t, p);
  return p;
}

API void glue_connect_pass(cuda_thread *t, frozen_pass *p, const void *id) {
  cuda_thread_connect_pass(t, p, id);
}

API void glue_replay_pass(cuda_thread *t, frozen_pass *p, void *stream) { cuda_thread_replay_pass(t, p, stream); }
API const char *glue_pass_ended(cuda_thread *t, frozen_pass *p, unsigned long long ns) {
  return cuda_thread_await_pass(t, p, ns) ? p->why : NULL;
}

API void glue_join_thread(cuda_thread *t) { cuda_thread_join(t); }
API const char *glue_call(cuda_thread *t) { return load_pointer(&t->d.call); }
API cuda_thread_failure *glue_failure(cuda_thread *t) { return &t->failure; }
API cuda_thread_identity *glue_identity(cuda_thread *t) { return &t->identity; }
API void *glue_id(cuda_thread *t) { return &t->id; }
API int glue_left(cuda_thread *t) { return t->left; }
API CUstream glue_stream(cuda_thread *t) { return t->stream; }
API CUfunction glue_kernel(cuda_thread *t, int k) { return t->kernels[k]; }
