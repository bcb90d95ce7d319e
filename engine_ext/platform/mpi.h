/* Calls into an MPI library that was found at run time, without a header of any MPI. Handles are pointers in some libraries (Open
 * MPI) and ints in others (MPICH), so there are two ways to call each function. */
#ifndef ENGINE_PLATFORM_MPI_H
#define ENGINE_PLATFORM_MPI_H

#include <stdint.h>

typedef struct engine_mpi {
  void *isend, *irecv, *test, *cancel, *iallreduce; /* addresses of MPI_Isend, MPI_Irecv, MPI_Test, MPI_Cancel, MPI_Iallreduce */
  uint64_t comm, byte;  /* handles: a communicator whose errors are returned, and MPI_BYTE */
  uint64_t everybody;   /* a second communicator, of the world's ranks and for this world alone */
  uint64_t float32, float64, sum; /* MPI_FLOAT, MPI_DOUBLE and MPI_SUM */
  uint64_t in_place;    /* MPI_IN_PLACE, an address */
  int ints;             /* 1: handles are ints; 0: they are pointers */
} engine_mpi;

typedef union engine_mpi_request {
  void *pointer;
  int number;
} engine_mpi_request;

/* Begin to send to a rank of the communicator, or to receive from it; return 0, or MPI's error. */
static inline int engine_mpi_send(const engine_mpi *m, const void *data, int nbytes, int rank, int tag, engine_mpi_request *request) {
  typedef int by_pointer(const void *, int, void *, int, int, void *, void **);
  typedef int by_number(const void *, int, int, int, int, int, int *);
  if (m->ints) return ((by_number *)m->isend)(data, nbytes, (int)m->byte, rank, tag, (int)m->comm, &request->number);
  return ((by_pointer *)m->isend)(data, nbytes, (void *)m->byte, rank, tag, (void *)m->comm, &request->pointer);
}

/* See engine_mpi_send. */
static inline int engine_mpi_receive(const engine_mpi *m, void *data, int nbytes, int rank, int tag, engine_mpi_request *request) {
  typedef int by_pointer(void *, int, void *, int, int, void *, void **);
  typedef int by_number(void *, int, int, int, int, int, int *);
  if (m->ints) return ((by_number *)m->irecv)(data, nbytes, (int)m->byte, rank, tag, (int)m->comm, &request->number);
  return ((by_pointer *)m->irecv)(data, nbytes, (void *)m->byte, rank, tag, (void *)m->comm, &request->pointer);
}

/* Begin to sum `count` floats of four or eight bytes over all ranks, in place; return 0, or MPI's error. */
static inline int engine_mpi_sum(const engine_mpi *m, void *data, int count, int item_bytes, engine_mpi_request *request) {
  typedef int by_pointer(const void *, void *, int, void *, void *, void *, void **);
  typedef int by_number(const void *, void *, int, int, int, int, int *);
  uint64_t type = item_bytes == 4 ? m->float32 : m->float64;
  const void *in_place = (const void *)m->in_place;
  if (m->ints) return ((by_number *)m->iallreduce)(in_place, data, count, (int)type, (int)m->sum, (int)m->everybody, &request->number);
  return ((by_pointer *)m->iallreduce)(in_place, data, count, (void *)type, (void *)m->sum, (void *)m->everybody, &request->pointer);
}

/* Return 1 if a request is done, which releases it; 0 if not; -1 for an error. */
static inline int engine_mpi_test(const engine_mpi *m, engine_mpi_request *request) {
  typedef int by_pointer(void **, int *, void *);
  typedef int by_number(int *, int *, void *);
  uint64_t status[16]; /* larger than any library's MPI_Status */
  int done = 0, error;
  error = m->ints ? ((by_number *)m->test)(&request->number, &done, status) : ((by_pointer *)m->test)(&request->pointer, &done, status);
  return error ? -1 : done != 0;
}

/* Ask to cancel a request. It is done when it has been cancelled or has completed. */
static inline void engine_mpi_cancel(const engine_mpi *m, engine_mpi_request *request) {
  typedef int by_pointer(void **);
  typedef int by_number(int *);
  if (m->ints) ((by_number *)m->cancel)(&request->number);
  else ((by_pointer *)m->cancel)(&request->pointer);
}
#endif
