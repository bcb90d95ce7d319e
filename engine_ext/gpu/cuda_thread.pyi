"""The thread that calls CUDA and NCCL. It loads nothing itself: it is given the functions' addresses."""

def functions() -> list[tuple[str, int]]:
    """List the functions that the CUDA thread calls, in the order in which it takes their addresses: name, and first
    version of NCCL that has it (0: the CUDA driver's).
    """

class CudaThread:
    """The thread that calls CUDA and NCCL, from its start to the end of the job `close`. It does one job at a time."""

    def __init__(
        self,
        addresses: list[int],
        ordinal: int,
        rank: int,
        size: int,
        image: bytes,
        kernels: list[bytes],
        *,
        slab: int,
        tables: int,
        ordered: bool = False,
    ) -> None:
        """`addresses` of the functions, 0 for one that its library does not have; `ordinal`: the device's number among
        those that this process sees; PTX, and the names of its kernels; bytes of the slab, a multiple of 32, and of the
        ring of tables; whether all sums are made in the order of the ranks.
        """
    def begin(self, job: str, id: bytes | None = None) -> None:
        """Begin a job once the one before has ended: `identify`, `prepare`, `name` (ask NCCL for an id), `connect` (to
        the ranks that have this id) or `close`.
        """
    def wait(self, seconds: float) -> bool:
        """Wait for the job's end, at most so many seconds and without the GIL; return whether it has ended."""
    def cancel(self) -> None:
        """Give up the current job and all later ones except `close`."""
    def join_thread(self) -> None:
        """Wait until the thread that calls CUDA has exited, after its `close` job."""
    def add_communicator(self, number: int, rank: int, size: int) -> int:
        """Allocate the communicator of process set `number`, not connected yet. Return its address, which is also that
        of its `device_queue` (device.h). `rank` and `size` are those within the set.
        """
    def connect_communicator(self, communicator_at: int, id: bytes) -> None:
        """Have the ranks of a process set that have this id connected, when the set has its turn."""
    def destroy_communicator(self, communicator_at: int) -> None:
        """Have a process set's communicator destroyed, when the set has its turn. The devices of its ranks have passed
        all of its items.
        """
    def await_stage(self, communicator_at: int, stage: str, seconds: float) -> str | None:
        """Wait until a communicator has reached `stage` (`begun`: its connecting has begun, in its turn; `connected`;
        `destroyed`), at most so many seconds and without the GIL. Return the stage, `failed`, or None if it has not
        reached it.
        """
    def free_communicator(self, communicator_at: int) -> None:
        """Free the memory of a communicator that is destroyed and has no turns left."""
    def allocate_pass(
        self,
        op: int,
        prescale: float,
        postscale: float,
        parts: list[tuple[int, int, int, int, int]],
        rows: list[tuple[int, int, int]],
    ) -> int:
        """Have the memory of a frozen pass allocated, and return the pass's address. A part is a tuple: dtype of the
        tensors, dtype that travels, first row, last row + 1, bytes that travel. A row is a tuple: address of the
        tensor, offset and bytes in what travels.
        """
    def connect_pass(self, pass_at: int, id: bytes | None) -> None:
        """Have what the ranks of a frozen pass share made, once each has allocated its memory. The first pass connects
        the ranks by this id; None: they are connected.
        """
    def replay_pass(self, pass_at: int, stream: int) -> None:
        """Have a frozen pass enqueued on a stream of the program. The last request for the pass has ended."""
    def pass_ended(self, pass_at: int, seconds: float) -> str | None:
        """Wait for the end of the last request for a frozen pass, at most so many seconds and without the GIL. Return
        "" if it succeeded, the reason if it failed, or None if it has not ended.
        """
    @property
    def sets(self) -> int:
        """Number of communicators of process sets that are allocated."""
    @property
    def device(self) -> int:
        """Address of its `device` (device.h)."""
    @property
    def pending(self) -> bool:
        """Return whether items were pushed that it has not ended."""
    @property
    def call(self) -> str | None:
        """Name of the CUDA or NCCL call that the thread is in; None: it is in none."""
    @property
    def failure(self) -> tuple[str, int, str, str] | None:
        """First call that failed, as a tuple: its name, its code (-1: given up), the code's name, the library's
        explanation.
        """
    @property
    def identity(self) -> dict[str, int | str]:
        """Driver version, number of devices, and the name, PCI address and UUID of this rank's GPU."""
    @property
    def id(self) -> bytes:
        """Id that the ranks of a communicator share, after the job `name`."""
    @property
    def left(self) -> bool:
        """Return whether, after the job `close`, work on the device did not end, so nothing that it uses was freed."""
