"""The lane, as Python holds it: jobs are begun and waited for, and what they found is read, without the GIL in any call."""
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, strerror

from engine_ext.errors import EngineError
from engine_ext.platform.atomics cimport load_pointer, store32_release
from engine_ext.platform.clock cimport seconds_ns

JOBS = {
    "identify": LANE_IDENTIFY,
    "prepare": LANE_PREPARE,
    "name": LANE_NAME,
    "connect": LANE_CONNECT,
    "close": LANE_CLOSE,
}


def functions():
    """What the lane calls, in the order in which it takes their addresses: the name, and the first version of NCCL that has it,
    0 for one of the driver.
    """
    return [(lane_function_list[k].name.decode(), lane_function_list[k].since) for k in range(LANE_FUNCTIONS)]


cdef class Lane:
    def __init__(self, list addresses, int ordinal, int rank, int size, bytes image, list kernels):
        cdef uintptr_t[LANE_FUNCTIONS] table
        cdef bytes kernel
        cdef int status
        if len(addresses) != LANE_FUNCTIONS or len(kernels) > LANE_KERNELS:
            raise ValueError(f"{len(addresses)} functions, {len(kernels)} kernels")
        self.image, self.names = image, kernels
        self.state = <lane*>calloc(1, sizeof(lane))
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
        self.state.ordinal, self.state.rank, self.state.size = ordinal, rank, size
        status = lane_start(self.state)
        if status != 0:
            self.ended = True
            raise EngineError(f"rank {rank} cannot start the thread that calls CUDA: {strerror(status).decode()}")

    def __dealloc__(self):
        # A thread that has not ended still reads all this, so it stays; a process has few of them.
        if self.state != NULL and self.ended:
            free(self.state.names)
            free(self.state)

    def begin(self, str job, bytes id=None):
        if id is not None:
            memcpy(&self.state.id, <const char*>id, min(<size_t>len(id), sizeof(self.state.id)))
        lane_begin(self.state, JOBS[job])

    def wait(self, double seconds):
        cdef uint64_t limit = seconds_ns(seconds)
        cdef bint ended
        with nogil:
            ended = lane_wait(self.state, limit if limit else 1)
        return ended

    def cancel(self):
        store32_release(&self.state.cancelled, 1)       # pairs with the lane's looks between calls

    def join(self):
        if not self.ended:
            with nogil:
                lane_join(self.state)
            self.ended = True

    @property
    def call(self):
        cdef const char* name = <const char*>load_pointer(&self.state.call)
        return None if name == NULL else name.decode()

    @property
    def failure(self):
        cdef lane_failure* f = &self.state.failure
        if f.call == NULL:
            return None
        return f.call.decode(), f.code, f.name.decode(), f.text.decode("utf-8", "replace")

    @property
    def identity(self):
        cdef lane_identity* i = &self.state.identity
        return {
            "driver": i.driver,
            "devices": i.devices,
            "name": i.name.decode("utf-8", "replace"),
            "pci": i.pci.decode("utf-8", "replace"),
            "uuid": (<char*>i.uuid)[:sizeof(i.uuid)].hex(),
        }

    @property
    def id(self):
        return (<char*>&self.state.id)[:sizeof(self.state.id)]

    @property
    def left(self):
        return bool(self.state.left)
