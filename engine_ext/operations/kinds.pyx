"""The table of operations. Beside the enum and the border to Python, nowhere else is a kind asked for.

An operation is a file here that exports its row, a number with a name in shared/names.h, and a line below (CONTRIBUTING.md has
the recipe).
"""
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc

from engine_ext.kernels.kernels cimport ENGINE_FLOAT32, ENGINE_FLOAT64, dtype_bytes
from engine_ext.operations.adasum cimport adasum_row
from engine_ext.operations.allreduce cimport allreduce_row
from engine_ext.operations.barrier cimport barrier_row
from engine_ext.operations.broadcast cimport broadcast_row
from engine_ext.operations.exchange cimport exchange_row
from engine_ext.operations.gather cimport gather_row
from engine_ext.operations.scatter cimport scatter_row
from engine_ext.shared.layout cimport (
    KIND_ALLGATHER, KIND_ALLREDUCE, KIND_ALLTOALL, KIND_BARRIER, KIND_BROADCAST, KIND_NAMES, KIND_REDUCESCATTER, KINDS,
    wire_dtype,
)

OPERATIONS = <const Operation**>calloc(KINDS * REDUCTIONS, sizeof(Operation*))


cdef int fill_in(int kind, Operation row, int reduction=-1) except -1:
    """Put a row into the table, for good; of one `reduction` alone, if it is said."""
    cdef Operation* kept = <Operation*>calloc(1, sizeof(Operation))
    cdef int k
    if kept == NULL or OPERATIONS == NULL:
        raise MemoryError("no memory for the table of operations")
    kept[0] = row
    for k in range(REDUCTIONS):
        if reduction < 0 or k == reduction:
            OPERATIONS[kind * REDUCTIONS + k] = kept
    return 0


fill_in(KIND_ALLREDUCE, allreduce_row())
fill_in(KIND_ALLREDUCE, adasum_row(), ENGINE_ADASUM)
fill_in(KIND_BROADCAST, broadcast_row())
fill_in(KIND_ALLGATHER, gather_row())
fill_in(KIND_BARRIER, barrier_row())
fill_in(KIND_ALLTOALL, exchange_row())
fill_in(KIND_REDUCESCATTER, scatter_row())


cdef int expect_rows_of_all() except -1:
    """Every kind has a row for every reduction, and every row what is called without asking."""
    cdef const Operation* row
    cdef int k
    for k in range(KINDS * REDUCTIONS):
        row = OPERATIONS[k]
        if row == NULL or row.bytes == NULL or row.choose == NULL or row.stand_in == NULL or row.plan == NULL:
            name = kind_name(k // REDUCTIONS).decode()
            raise ImportError(f"operation {name} has no whole row in engine_ext/operations/kinds.pyx")
    return 0


expect_rows_of_all()


cdef const char* kind_name(int kind) noexcept nogil:
    return KIND_NAMES[kind]


cdef int64_t wire_bytes(const engine_meta* meta, int wire) noexcept nogil:
    """Bytes of an operation as they travel, `wire` being an entry's."""
    cdef const Operation* operation = operation_of(meta)
    cdef int64_t n = operation.bytes(meta)
    cdef int d
    if wire == 0 or not operation.reduces:
        return n
    if meta.group == 0:
        return n // dtype_bytes(meta.dtype) * dtype_bytes(wire_dtype(wire, meta.dtype))
    for d in range(ENGINE_FLOAT32, ENGINE_FLOAT64 + 1):
        n -= meta.dims[d] * (dtype_bytes(d) - dtype_bytes(wire_dtype(wire, d)))
    return n
