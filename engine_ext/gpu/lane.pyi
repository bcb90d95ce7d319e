"""The thread that calls CUDA and NCCL. It loads nothing itself: it is given the functions' addresses."""

def functions() -> list[tuple[str, int]]:
    """What the lane calls, in the order in which it takes their addresses: the name, and the first version of NCCL that
    has it, 0 for one of the driver.
    """

class Lane:
    """The thread, from its making to the end of the job `close`. It does one job at a time."""

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
        """Begin `identify`, `prepare`, `name` (ask for an id), `connect` (to the ranks that have this id) or `close`.
        The job before has ended.
        """
    def wait(self, seconds: float) -> bool:
        """Wait for the end of a job, at most so long and without the GIL; whether it has ended."""
    def cancel(self) -> None:
        """Give up what is under way, and all that comes but for `close`."""
    def join(self) -> None:
        """After `close`: the thread's end."""
    def add(self, number: int, rank: int, size: int) -> int:
        """The communicator of a process set, not connected yet: its address, which is that of its `device_queue`
        (device.h), too. `number` of the set; rank and size within it.
        """
    def connect(self, communicator_at: int, id: bytes) -> None:
        """Connect the ranks of a set that have this id, when it has its turn."""
    def part(self, communicator_at: int) -> None:
        """End a set's communicator, when it has its turn. The devices of its ranks have passed all of its items."""
    def reached(self, communicator_at: int, stage: str, seconds: float) -> str | None:
        """Wait until a communicator has `begun` to be connected, in its turn, is `connected`, or `parted`, at most so
        long and without the GIL: that, or `failed`; None: it is not so far.
        """
    def forget(self, communicator_at: int) -> None:
        """Free a communicator that is parted, and which has no turns any more."""
    def freeze(
        self,
        op: int,
        prescale: float,
        postscale: float,
        parts: list[tuple[int, int, int, int, int]],
        rows: list[tuple[int, int, int]],
    ) -> int:
        """Have what a frozen pass needs allocated: its address. `parts`: dtype, the one that travels, first row and the
        one behind the last, bytes that travel. `rows`: address, offset and bytes in what travels.
        """
    def unite(self, pass_at: int, id: bytes | None) -> None:
        """Have what its ranks need together made, when each has allocated its own. The first pass connects them, by
        this id; None: they are connected.
        """
    def repeat(self, pass_at: int, stream: int) -> None:
        """Have a frozen pass enqueued on a stream of the program's. What was done with it before has ended."""
    def pass_ended(self, pass_at: int, seconds: float) -> str | None:
        """Wait until that has ended, at most so long and without the GIL: "", or why it failed; None: it has not."""
    @property
    def sets(self) -> int:
        """How many communicators of process sets it has."""
    @property
    def device(self) -> int:
        """The address of its `device` (device.h)."""
    @property
    def pending(self) -> bool:
        """Whether there are items that it has not ended."""
    @property
    def call(self) -> str | None:
        """The call that the thread is in at the moment."""
    @property
    def failure(self) -> tuple[str, int, str, str] | None:
        """The first call that failed: its name, its code (-1: given up), the code's name, what the library says."""
    @property
    def identity(self) -> dict[str, int | str]:
        """After `identify`: `driver`, `devices`, `name`, `pci`, `uuid`."""
    @property
    def id(self) -> bytes:
        """After `name`: what the ranks of a communicator share."""
    @property
    def left(self) -> bool:
        """After `close`: work on the device did not end, and what it may use was not freed."""
