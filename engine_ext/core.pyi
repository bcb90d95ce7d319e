"""Types of the native engine. `engine` wraps it; users do not import it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engine_ext.bindings.handles import Handle
from engine_ext.gpu.cuda_thread import CudaThread

class Engine:
    """One rank's engine. Takes over the descriptors."""

    def __init__(
        self,
        rank: int,
        size: int,
        control: int,
        arena: int,
        peers: Sequence[int],
        *,
        knobs: dict[str, Any],
        stall_warning: float,
        stall_limit: float,
        spin_us: float,
        counters: int = -1,
        yield_us: float = 0.0,
        calls: int = 0,
        hosts: Sequence[int] | None = None,
        lanes: Mapping[int, Sequence[int]] | None = None,
        trunks: Mapping[int, int] | None = None,
        host_silence: float = 4.0,
        carrier: object = None,
        device_sums: str = "nccl",
        another_follows: bool = False,
    ) -> None:
        """`peers`: a pidfd per rank, own included. `knobs`: all of them, by name (snapshots.pyx). Seconds for stall
        times, 0 is never. `counters`: the descriptor of a page to count into (counters.h), which stays the caller's;
        -1: nothing is counted. `spin_us`: how long a caller spins before it sleeps; `yield_us`: how long it yields the
        processor instead, in small operations, where `spin_us` is 0. `calls`: the number by which native calls find
        this engine (calls.h), where a process has several worlds' engines.

        `hosts`: the number of each rank's host, that of rank 0 being 0; None: there is one. Then `lanes` are connected
        sockets by rank, to whom this rank carries for and who carries for it, equally many to each, in the same order
        at both ends, and `trunks` by host, between rank 0 and the first rank of each other host. They do not block,
        nothing was received that is not yet read, and they are the engine's from now on, even if this fails. `control`
        and `arena` are those of this rank's host, `peers` of ranks elsewhere -1. `host_silence`: seconds, from 2 to 60,
        after which a host that does not answer is lost. `carrier`: what large parts of tensors go over instead, a
        capsule with a provider of carriers (transport/carrier.h). `device_sums`: the setting of that name, of which
        rank 0's decides whether gradients on GPUs travel in frozen batches. `another_follows`: the process may enter
        another world when this one has failed, and then its page says `resetting`.
        """
    rank: int
    size: int
    number: int
    numbers: tuple[int, ...]
    world: Engine | None
    group_name: str
    """What reports call a process set that has a name, such as a group of torch; empty: it has none. At most 64 bytes
    are kept. A name does not change often: former ones are kept, too.
    """

    def starting(self) -> list[int]:
        """Say that this rank's start has come to its end; the ranks of this host that have not said so."""
    def count(self, on: bool) -> None:
        """For benchmarks: count, or do not for a while. Nothing is in flight, and there are no process sets."""
    def count_as(self, name: str) -> None:
        """Count the operations of a process set under a name, too, of which at most 63 bytes are kept; under another
        than before, if it has one. Nothing happens in a world, without a page of counters, and if all its places are
        taken.
        """
    def tell(self, **fields: int | str) -> None:
        """Set fields of the page of counters, by the names in counters.h: of one word to a number, of several to a
        text. Without a page nothing happens.

        Raises ValueError for what is no such field.
        """
    def clock(self) -> tuple[int, int] | None:
        """Nanoseconds by which the monotonic clock of rank 0's host is ahead of this host's, and by how many that may
        be wrong; None as long as they have not been compared.
        """
    def form(
        self,
        numbers: tuple[int, ...],
        calls: int,
        lanes: Mapping[int, Sequence[int]] | None = None,
        trunks: Mapping[int, int] | None = None,
    ) -> Engine | None:
        """Collective over the world: an engine for these ranks among themselves, None on the others. It fails with the
        world. Its ranks count from 0 and are called `numbers` in messages and as roots. `calls` as of the class; this
        rank's own. `lanes` and `trunks` likewise, by ranks and hosts of the set, where its ranks are on several hosts.
        """

    def claim(self, size: int) -> int:
        """Make the control segment of a process set of `size` ranks, and return where it begins in this host's file."""
    def enter_set(
        self,
        numbers: tuple[int, ...],
        calls: int,
        offset: int,
        lanes: Mapping[int, Sequence[int]] | None = None,
        trunks: Mapping[int, int] | None = None,
        channel: int = ...,
        settings: Mapping[str, Any] | None = None,
    ) -> Engine:
        """As `form`, by the members alone, in any order. One of them on each host has claimed the segment at `offset`,
        which each enters once.
        `channel`: number of the carrier's channel, equal on all of them; by default the set goes without a carrier.
        `settings`: those that differ from the world's, such as `stall_limit`. `ends_alone`: a rank that leaves while
        others need it ends the set, and not the world: what they have in flight raises CollectiveError.
        """

    # `blocking` submits and waits in one native call, so that nobody is woken: `wait` then returns at once.
    # `wire`: float32 and float64 travel as `float16` or `bfloat16`, floats between hosts as `float8`, or, with `tuned`
    # or `tuned8`, as the knob `compression` says; other dtypes as they are.
    def allreduce(
        self,
        tensor: Any,
        output: Any,
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        blocking: bool = False,
        wire: str | None = None,
    ) -> Handle: ...
    def allreduce_directly(self, tensor: Any, name: str | None, op: int, prescale: float, postscale: float) -> bool:
        """Reduce in place and wait, if the tensor lends its memory as it lies there and no argument is wrong; return
        whether it did. Else nothing was submitted.
        """
    def count_prepared(self) -> int:
        """Take the number of a prepared allreduce without a name, from 1."""
    def allreduce_group(
        self,
        tensors: list[Any],
        outputs: list[Any],
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        blocking: bool = False,
        wire: str | None = None,
    ) -> Handle: ...
    def broadcast(self, tensor: Any, output: Any, name: str | None, root: int, blocking: bool = False) -> Handle: ...
    def allgather(
        self,
        tensor: Any,
        name: str | None,
        blocking: bool = False,
        room: Callable[[list[int]], list[Any]] | None = None,
        output: Any = None,
    ) -> Handle:
        """`output`, on the host: gets the result if it has as many bytes; else the handle has it, as without.

        `room`, of a tensor on a GPU: makes tensors for results of so many bytes each, on the stream that was current
        when it was made, and keeps that stream alive. The thread of `serve_allocations` calls it.
        """
    def send_bytes(self, tensor: Any, name: str, copy: bool) -> Handle:
        """In a set of two ranks: send what a tensor of the host holds to the one that receives under this name.

        The n-th that is sent under a name is the n-th that is received, and any number may be in flight. Never waits.
        `copy`: the tensor may change once this returns; else once it is done, which takes the receiver.
        """
    def receive_bytes(self, output: Any, name: str) -> Handle:
        """Receive what is sent under this name: into `output`, if it has as many bytes; else, or for None, the handle
        has it as `gathered`. Never waits.
        """
    def allgather_group(
        self,
        tensors: list[Any],
        name: str | None,
        blocking: bool = False,
        sparse: tuple[Sequence[int], int, float, float, tuple[int, int, int] | None] | None = None,
        room: Callable[[list[int]], list[Any]] | None = None,
    ) -> Handle:
        """`sparse`: the tensors are indices (int64, a row for each value) and values of a sparse tensor; its shape, the
        operation, prescale and postscale are compared, and left to the caller. Last comes what is wrong with it (kind,
        dimension, number), for which all ranks refuse it.
        """
    def alltoall(
        self,
        tensor: Any,
        splits: Iterable[int],
        name: str | None,
        blocking: bool = False,
        room: Callable[[list[int]], list[Any]] | None = None,
        output: Any = None,
    ) -> Handle: ...
    def reducescatter(
        self,
        tensor: Any,
        output: Any,
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        blocking: bool = False,
        wire: str | None = None,
    ) -> Handle: ...
    def reducescatter_group(
        self,
        tensors: list[Any],
        outputs: list[Any],
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        blocking: bool = False,
        wire: str | None = None,
    ) -> Handle: ...
    def barrier(self, name: str | None, blocking: bool = False) -> Handle: ...
    def meet(self, name: str | None = None) -> None:
        """Wait in a barrier, without a handle."""
    def join(self) -> int:
        """Collective: submit nothing, and contribute zeros or no rows, until all have joined; the last to join."""
    @property
    def joined(self) -> bool:
        """Whether this rank has joined, and not all have yet."""
    @property
    def joins(self) -> int:
        """How often all ranks have joined."""
    def share(self, nbytes: int) -> memoryview:
        """Collective: `nbytes` of zeroed memory at the same offset in every rank's part of the arena."""
    def set_knobs(self, **changes: Any) -> int:
        """On the coordinator only: change knobs, by name. Returns the knob version that the next entry carries.

        Raises ValueError or TypeError for what cannot be.
        """
    def fail(self, kind: str, name: str | None, reason: str) -> None:
        """This rank's call of an operation of that kind and name has failed before it submitted anything: tell every
        rank, when it comes to that operation. It takes its place, and its number where it has no name. Raises nothing.
        """
    def knobs(self) -> dict[str, Any]:
        """As on the last entry this rank executed, by name; with version, and the entry that brought it into force."""
    @property
    def compressible(self) -> bool:
        """On the coordinator: whether tensors have been defined that travel as the knob `compression` says."""
    @property
    def codable(self) -> bool:
        """On the coordinator: whether tensors have been defined that travel as `fp8` where that knob says so."""
    @property
    def sockets_per_lane(self) -> int:
        """How many connections were opened between two ranks on different hosts; 0 with one host."""
    @property
    def messages(self) -> int:
        """How many messages with bytes of tensors this rank has given to a carrier."""
    @property
    def carrier(self) -> tuple[int, bool] | None:
        """How many channels the carrier has, and whether it can sum; None without one."""
    @property
    def chainable(self) -> bool:
        """Whether ranks are on several hosts, and sums that pass from host to host have the bits of all other ways."""
    def mark_step(self, number: int = 0, judged: bool = True) -> None:
        """End of a step of this rank's optimizer of that number, 0 or more.

        `judged`: the calling thread is the program's, and not one that a framework has lent, so the time since its last
        step is judged.
        """
    def begin_input(self) -> None:
        """Note that the calling thread begins to get a batch. Calls may be nested."""
    def end_input(self) -> None:
        """Note that the calling thread has got a batch."""
    def note_collection(self, phase: str, about: dict[str, Any]) -> None:
        """Note a collection of the cyclic garbage collector; a callback for `gc.callbacks`."""
    def late_steps(self) -> list[dict[str, Any]]:
        """Return the last late steps of the process, at most 256, oldest first.

        Each has the number of its `step` among those clocked, its `cause`, and the `rank` waited for, or None. Times
        are in nanoseconds: `begun` and `ended` by the monotonic clock, `late` beyond the median, the parts `input`,
        `compute`, `gc`, `cpu` and `wait`, and `others_late`, how late other ranks were.
        """
    def record_steps(self) -> None:
        """From now on remember the last 4096 marks, for `steps`. Once is enough."""
    def steps(self, since: int) -> tuple[int, list[tuple[int, int, int, int, int, int]]]:
        """Of each mark from number `since` on its time in nanoseconds, the knob version of the last entry, the number
        of its optimizer (-1: of the traffic), and as sums from the start: nanoseconds that callers were blocked in the
        engine; nanoseconds in which a tensor that all ranks had submitted was not done (0 unless `mark_traffic` has a
        window); bytes. Before them the number of the first, which is larger than `since` if some are no longer
        remembered.
        """
    def mark_traffic(self, name: str | None = None, every: int = 1, window: int = 0) -> None:
        """On rank 0, once steps are recorded: mark the end of each `every`th operation of that name, or the entry in
        which `window` tensors more have passed; without either, no more of that.
        """
    def definitions(self) -> list[dict[str, Any]]:
        """The names that the coordinator has given an id: name, kind, op (None if nothing is reduced), dtype, tensors,
        sparse, wire (engine_meta's), dims (of a group: elements by dtype, and a digest), bytes (0 if sparse), times
        (operations of this rank that have ended, since there is the name).
        """
    def counters(self) -> dict[str, int]:
        """Entries, tensors, bytes, wait_ns (callers blocked in the engine), busy_ns (executing), wakes, sleeps and
        yields (of callers that drive), late_wakes (0 unless one was lost).
        """
    def history(self) -> list[dict[str, Any]]:
        """The last schedule entries this rank executed, oldest first."""
    def pending(self) -> list[dict[str, Any]]:
        """Operations of this rank in flight: name, kind, dtype, dims (none of a group), bytes, described (all of it in
        words), seconds, begun (whether an entry with it has begun), missing (ranks that have not submitted it,
        None if unknown), brought (those that have). Of ranks on other hosts only the coordinator's host knows.
        """
    def unfinished(self) -> list[dict[str, Any]]:
        """The last operations of this rank that ended without a result, in the order of their ends: name, and what it
        submitted as in `pending`, begun, entry (the schedule entry by which it failed alone, None: it failed with the
        world), failed_call (whether it only announced that this rank's call had failed), submitted, ended.
        """
    @property
    def idle(self) -> bool:
        """Whether this rank has nothing in flight, but for operations that are set aside (`Handle.set_aside`)."""
    def ranks(self) -> list[dict[str, Any]]:
        """Where every rank is, as its words in shared memory say: rank, entry (that it executes or has yet to, None: it
        has executed all), packed, reduced, copied (chunks passed, over the whole schedule), left.
        """
    def overdue(self) -> list[str]:
        """Lines for a stall report since the last call: an entry that stands still, a join that others do not come to.
        On the coordinator also new names that have become overdue, with the ranks that have not submitted them, and an
        account of ranks that keep each other waiting.
        """
    def monitor(self) -> str:
        """Block without the GIL until something wants attention: `abort`, `stall`, `signal`, `closed`."""
    def notify_signal(self) -> None:
        """Make `monitor` return `signal`; safe from any thread."""
    def forked(self) -> None:
        """In a forked child, at once: what it writes to shared tensors is its own from now on, and the files of the
        world are closed. Elsewhere it does nothing.
        """
    def abort(self, reason: str) -> None:
        """This rank fails: tell every rank why. The first abort of a world wins; later ones are ignored."""
    def accuse(self, rank: int, reason: str) -> None:
        """A rank stands still, and the world fails for it: as `abort`, with that rank to blame."""
    @property
    def failure(self) -> BaseException | None:
        """The world's first cause, as the exception every call raises; None while the world is well."""
    opener: Callable[[int], None] | None
    """Opens the GPU with that number, together with all ranks; called when the first of its tensors comes."""

    def use(self, cuda_thread: CudaThread) -> None:
        """Work on the GPU of this CUDA thread, which the opener has opened: in a process set, among its ranks."""
    def hold(self, on: bool) -> None:
        """Call the opener for every tensor on a GPU, so that it can let whoever submits one wait; or not any more."""
    def take_turns(self, queue: int) -> None:
        """Of a process set: the device_queue at this address has its turns on the GPU from now on; 0: it has none any
        more.
        """
    def want_turn(self) -> None:
        """Of a process set: the CUDA thread was given something that moves nothing, and needs a turn."""
    def serve_allocations(self) -> None:
        """Allocate results on the GPU whose size only their entry tells, until `stop_allocations` is called; for a
        thread of its own."""
    def stop_allocations(self) -> None:
        """Make `serve_allocations` return."""
    def free_deferred(self) -> None:
        """Free operations that nobody holds, and whose tensors nobody uses any more."""
    def close(self, timeout: float) -> None:
        """Finish what is in flight (up to `timeout` seconds), publish that this rank left, stop the engine thread.

        The last member of a process set on a host gives its memory back.
        """
