"""The Python object of the CUDA thread: it begins jobs, waits for them and reads their results. No wait holds the GIL."""
cimport cython
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, strerror

from engine_ext.errors import EngineError
from engine_ext.gpu.device cimport device_part, device_row
from engine_ext.kernels.kernels cimport ENGINE_DTYPE_NAMES, ENGINE_DTYPES
from engine_ext.platform.atomics cimport load_acquire, load_pointer
from engine_ext.platform.clock cimport seconds_ns

STAGES = {"begun": COMMUNICATOR_BEGUN, "connected": COMMUNICATOR_CONNECTED, "destroyed": COMMUNICATOR_DESTROYED}
JOBS = {
    "identify": CUDA_THREAD_IDENTIFY,
    "prepare": CUDA_THREAD_PREPARE,
    "name": CUDA_THREAD_NAME,
    "connect": CUDA_THREAD_CONNECT,
    "close": CUDA_THREAD_CLOSE,
}


def functions():
    """List the functions that the CUDA thread calls, in the order in which it takes their addresses: name, and first version of
    NCCL that has it (0: the CUDA driver's).
    """
    return [
        (cuda_thread_function_list[k].name.decode(), cuda_thread_function_list[k].since) for k in range(CUDA_THREAD_FUNCTIONS)
    ]


cdef int number_of(list kernels, str name) except -2:
    """Return a kernel's number; -1: there is no such kernel."""
    return kernels.index(name.encode()) if name.encode() in kernels else -1


cdef int find_kernels(cuda_thread_kernels* known, list kernels) except -1:
    """Fill in the numbers of the kernels, by their names (kernels.cu)."""
    cdef int tensor, wire
    cdef list names = [ENGINE_DTYPE_NAMES[k].decode() for k in range(ENGINE_DTYPES)]
    known.pack_bytes, known.unpack_bytes = number_of(kernels, "pack_bytes"), number_of(kernels, "unpack_bytes")
    for tensor in range(ENGINE_DTYPES):
        known.reduce[tensor] = number_of(kernels, f"reduce_{names[tensor]}")
        for wire in range(ENGINE_DTYPES):
            known.pack[tensor][wire] = number_of(kernels, f"pack_{names[tensor]}_{names[wire]}")
            known.unpack[tensor][wire] = number_of(kernels, f"unpack_{names[tensor]}_{names[wire]}")
    return 0


cdef frozen_pass* new_pass(cuda_thread* t, int op, double prescale, double postscale, list parts, list rows) except NULL:
    """Make a frozen pass of tuples: parts (dtype, wire, first row, last row + 1, bytes), rows (address, offset, bytes)."""
    cdef device_part* all_parts = <device_part*>calloc(len(parts) + 1, sizeof(device_part))
    cdef device_row* all_rows = <device_row*>calloc(len(rows) + 1, sizeof(device_row))
    cdef frozen_pass* made = NULL
    try:
        if all_parts == NULL or all_rows == NULL:
            raise MemoryError()
        for k, (dtype, wire, begin, end, size) in enumerate(parts):
            all_parts[k].dtype, all_parts[k].wire, all_parts[k].begin, all_parts[k].end = dtype, wire, begin, end
            all_parts[k].bytes = size
        for k, (tensor, offset, size) in enumerate(rows):
            all_rows[k].tensor, all_rows[k].offset, all_rows[k].bytes = tensor, offset, size
        made = cuda_thread_new_pass(t, op, prescale, postscale, all_parts, <int>len(parts), all_rows, <int>len(rows))
        if made == NULL:
            raise MemoryError()
        return made
    finally:
        free(all_parts)
        free(all_rows)


@cython.no_gc_clear     # __dealloc__ reads the lists of addresses
cdef class CudaThread:
    """The thread that calls CUDA and NCCL, from its start to the end of the job `close`. It does one job at a time."""

    def __init__(self, list addresses, int ordinal, int rank, int size, bytes image, list kernels, *, uint64_t slab,
                 uint64_t tables, bint ordered=False):
        cdef uintptr_t[CUDA_THREAD_FUNCTIONS] table
        cdef bytes kernel
        cdef int status
        if len(addresses) != CUDA_THREAD_FUNCTIONS or len(kernels) > CUDA_THREAD_KERNELS:
            raise ValueError(f"{len(addresses)} functions, {len(kernels)} kernels")
        self.image, self.names, self.passes, self.communicators = image, kernels, [], set()
        self.state = <cuda_thread*>calloc(1, sizeof(cuda_thread))
        if self.state == NULL:
            raise MemoryError()
        for k, address in enumerate(addresses):
            table[k] = address
        memcpy(&self.state.f, table, sizeof(table))
        self.state.names = <const char**>calloc(len(kernels) + 1, sizeof(char*))
        if self.state.names == NULL:
            self.ended = True
            raise MemoryError()
        for k, kernel in enumerate(kernels):
            self.state.names[k] = kernel
        self.state.n_kernels = <int>len(kernels)
        self.state.image = self.image
        find_kernels(&self.state.known, kernels)
        self.state.d.ordinal, self.state.world.rank, self.state.world.size = ordinal, rank, size
        self.state.slab_bytes, self.state.table_bytes, self.state.ordered = slab, tables, ordered
        status = cuda_thread_start(self.state)
        if status != 0:
            self.ended = True
            raise EngineError(f"rank {rank} cannot start the thread that calls CUDA: {strerror(status).decode()}")

    def __dealloc__(self):
        # A thread that has not ended still reads this memory, so it is leaked; a process has few such threads.
        if self.state != NULL and self.ended and not self.state.left:
            for address in self.communicators:
                free(<communicator*><uintptr_t>address)
            for address in self.passes:
                cuda_thread_free_pass(<frozen_pass*><uintptr_t>address)
            free(self.state.names)
            free(self.state)

    def begin(self, str job, bytes id=None):
        """Begin a job once the one before has ended: `identify`, `prepare`, `name` (ask NCCL for an id), `connect` (to the ranks
        that have this id) or `close`.
        """
        if id is not None:
            memcpy(&self.state.id, <const char*>id, min(<size_t>len(id), sizeof(self.state.id)))
        cuda_thread_begin(self.state, JOBS[job])

    def wait(self, double seconds):
        """Wait for the job's end, at most so many seconds and without the GIL; return whether it has ended."""
        cdef uint64_t limit = seconds_ns(seconds)
        cdef bint ended
        with nogil:
            ended = cuda_thread_wait(self.state, limit if limit else 1)
        return ended

    def cancel(self):
        """Give up the current job and all later ones except `close`."""
        cuda_thread_cancel(self.state)

    def join_thread(self):
        """Wait until the thread that calls CUDA has exited, after its `close` job."""
        if not self.ended:
            with nogil:
                cuda_thread_join(self.state)
            self.ended = True

    def add_communicator(self, int number, int rank, int size):
        """Allocate the communicator of process set `number`, not connected yet. Return its address, which is also that of its
        `device_queue` (device.h). `rank` and `size` are those within the set.
        """
        cdef communicator* c = <communicator*>calloc(1, sizeof(communicator))
        if c == NULL:
            raise MemoryError()
        c.queue.d, c.queue.number, c.rank, c.size = &self.state.d, number, rank, size
        self.communicators.add(<uintptr_t>c)
        return <uintptr_t>c

    def connect_communicator(self, uintptr_t communicator_at, bytes id):
        """Have the ranks of a process set that have this id connected, when the set has its turn."""
        cdef communicator* c = <communicator*>communicator_at
        memcpy(&c.id, <const char*>id, min(<size_t>len(id), sizeof(c.id)))
        cuda_thread_connect_communicator(self.state, <communicator*>communicator_at)

    def destroy_communicator(self, uintptr_t communicator_at):
        """Have a process set's communicator destroyed, when the set has its turn. The devices of its ranks have passed all of its
        items.
        """
        cuda_thread_destroy_communicator(self.state, <communicator*>communicator_at)

    def free_communicator(self, uintptr_t communicator_at):
        """Free the memory of a communicator that is destroyed and has no turns left."""
        self.communicators.remove(communicator_at)
        free(<communicator*>communicator_at)

    def await_stage(self, uintptr_t communicator_at, str stage, double seconds):
        """Wait until a communicator has reached `stage` (`begun`: its connecting has begun, in its turn; `connected`;
        `destroyed`), at most so many seconds and without the GIL. Return the stage, `failed`, or None if it has not reached it.
        """
        cdef uint32_t found, wanted = STAGES[stage]
        cdef uint64_t limit = seconds_ns(seconds)
        with nogil:
            found = cuda_thread_await_stage(self.state, <communicator*>communicator_at, wanted, limit if limit else 1)
        return "failed" if found == COMMUNICATOR_FAILED else stage if found >= wanted else None

    def allocate_pass(self, int op, double prescale, double postscale, list parts, list rows):
        """Have the memory of a frozen pass allocated, and return the pass's address. A part is a tuple: dtype of the tensors,
        dtype that travels, first row, last row + 1, bytes that travel. A row is a tuple: address of the tensor, offset and bytes
        in what travels.
        """
        cdef frozen_pass* made = new_pass(self.state, op, prescale, postscale, parts, rows)
        self.passes.append(<uintptr_t>made)
        cuda_thread_allocate_pass(self.state, made)
        return <uintptr_t>made

    def connect_pass(self, uintptr_t pass_at, bytes id):
        """Have what the ranks of a frozen pass share made, once each has allocated its memory. The first pass connects the ranks
        by this id; None: they are connected.
        """
        cdef ncclUniqueId its
        if id is not None:
            memcpy(&its, <const char*>id, min(<size_t>len(id), sizeof(its)))
        cuda_thread_connect_pass(self.state, <frozen_pass*>pass_at, NULL if id is None else &its)

    def replay_pass(self, uintptr_t pass_at, uintptr_t stream):
        """Have a frozen pass enqueued on a stream of the program. The last request for the pass has ended."""
        cuda_thread_replay_pass(self.state, <frozen_pass*>pass_at, <void*>stream)

    def pass_ended(self, uintptr_t pass_at, double seconds):
        """Wait for the end of the last request for a frozen pass, at most so many seconds and without the GIL. Return "" if it
        succeeded, the reason if it failed, or None if it has not ended.
        """
        cdef uint64_t limit = seconds_ns(seconds)
        cdef bint ended
        with nogil:
            ended = cuda_thread_await_pass(self.state, <frozen_pass*>pass_at, limit if limit else 1)
        return (<frozen_pass*>pass_at).why.decode("utf-8", "replace") if ended else None

    @property
    def sets(self):
        """Number of communicators of process sets that are allocated."""
        return len(self.communicators)

    @property
    def device(self):
        """Address of its `device` (device.h)."""
        return <uintptr_t>&self.state.d

    @property
    def pending(self):
        """Return whether items were pushed that it has not ended."""
        return load_acquire(&self.state.d.ended) < load_acquire(&self.state.d.pushed)

    @property
    def call(self):
        """Name of the CUDA or NCCL call that the thread is in; None: it is in none."""
        cdef const char* name = <const char*>load_pointer(&self.state.d.call)
        return None if name == NULL else name.decode()

    @property
    def failure(self):
        """First call that failed, as a tuple: its name, its code (-1: given up), the code's name, the library's explanation."""
        cdef cuda_thread_failure* f = &self.state.failure
        if f.call == NULL:
            return None
        return f.call.decode(), f.code, f.name.decode(), f.text.decode("utf-8", "replace")

    @property
    def identity(self):
        """Driver version, number of devices, and the name, PCI address and UUID of this rank's GPU."""
        cdef cuda_thread_identity* i = &self.state.identity
        return {
            "driver": i.driver,
            "devices": i.devices,
            "name": i.name.decode("utf-8", "replace"),
            "pci": i.pci.decode("utf-8", "replace"),
            "uuid": (<char*>i.uuid)[:sizeof(i.uuid)].hex(),
        }

    @property
    def id(self):
        """Id that the ranks of a communicator share, after the job `name`."""
        return (<char*>&self.state.id)[:sizeof(self.state.id)]

    @property
    def left(self):
        """Return whether, after the job `close`, work on the device did not end, so nothing that it may use was freed."""
        return bool(self.state.left)
