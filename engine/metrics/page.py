"""Reader of a rank's page of counters (engine_ext/shared/counters.h says what each field counts).

The page is anonymous memory, created by the launcher or by the rank itself. It exists as long as a process holds it.
The page contains the positions of its fields and the names of its numbers, so a reader does not need the extension.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from ..host import linux
from .knobs import GAUGES
from .names import NAMES

NAME = "enginerun-counters"  # name of the memory, in /proc/PID/fd
BYTES = 24576
MAGIC = b"ENGCNTR1"
VERSION = 5
HEADER = struct.Struct("=8sQQQ")  # magic, version, bytes of the page, bytes of the table
TABLE = 64

HOST_WORDS = 8  # 64-bit words of a host's name
HOSTS = 256  # maximum number of hosts of a job
GROUPS = 64  # maximum number of groups that are counted one by one
GROUP_WORDS = 8  # 64-bit words of a group's name
STEP_LOG, STEP_WORDS = 32, 5  # rows of the last steps, and 64-bit words of a row; likewise for the last entries
ENTRY_LOG, ENTRY_WORDS = 64, 5
LOGS = {"step_log": STEP_WORDS, "entry_log": ENTRY_WORDS}  # fields whose rows have a begin and an end
MONOTONIC = ("last_ns",)  # fields that are times of the rank's host, by CLOCK_MONOTONIC
TIMES = (*MONOTONIC, "started_ns", "tuner_changed_ns")  # those, and fields that are unix times
DURATIONS = 40  # buckets: bucket k counts durations below 2**k ns, the last one all longer ones


@dataclass(frozen=True)
class GroupCounts:
    """Counts of one process set, or group of torch.distributed, on one rank."""

    ranks: int
    collectives: int  # those that moved data
    nbytes: int  # bytes of their tensors
    nanoseconds: int  # time from their starts to their ends
    pending: int  # operations that are submitted and not done


@dataclass(frozen=True)
class LoggedStep:
    """One step of a rank; times are nanoseconds of CLOCK_MONOTONIC."""

    number: int
    begun: int
    ended: int
    blocked: int  # blocked_ns at its end
    exposed: int  # exposed_ns at its end


@dataclass(frozen=True)
class LoggedEntry:
    """One schedule entry of a rank that moved data; times are nanoseconds of CLOCK_MONOTONIC."""

    begun: int
    ended: int
    nbytes: int
    operation: str
    algorithm: str


class PageError(Exception):
    """Error of a page that is missing, damaged, or written by another build."""


@dataclass(frozen=True)
class Snapshot:
    """Contents of a page.

    Words are read one by one while the rank writes: each is valid, but they may be from different moments.
    """

    fields: dict[str, list[int]]  # values by the field names of counters.h
    # Names of the numbers, by the lists of names.h. Equal to `NAMES`, except that another build may have more
    names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: NAMES)

    def __getitem__(self, name: str) -> int:
        """Return the value of a one-word field, or the first word of a longer one."""
        return self.fields[name][0]

    @property
    def state(self) -> str:
        """State of the rank.

        It is `new` until the rank's engine has started, then `running`, `ended`, `failed`, or `resetting` (between two
        worlds of an elastic job).
        """
        return self.get_name("states", "state")

    @property
    def host(self) -> str:
        """Name of the rank's host; empty if the page does not contain it."""
        return _decode_words(self.fields["host_name"])

    @cached_property
    def groups(self) -> dict[str, GroupCounts]:
        """Counts of the groups that the rank is in, by name; those with a name that is cut alike get a number.

        The page has places for 64 groups. Later ones are in the counts of the rank alone.
        """
        found: dict[str, GroupCounts] = {}
        words = self.fields["group_names"]
        for place, ranks in enumerate(self.fields["group_ranks"]):
            name = _decode_words(words[place * GROUP_WORDS : (place + 1) * GROUP_WORDS])
            if not name:
                continue
            if name in found:
                name = next(other for n in itertools.count(2) if (other := f"{name} #{n}") not in found)
            collectives, nbytes, nanoseconds, submitted, completed = (
                self.fields[f"group_{each}"][place] for each in ("collectives", "bytes", "ns", "submitted", "completed")
            )
            pending = max(0, submitted - completed)  # they may be from different moments
            found[name] = GroupCounts(ranks, collectives, nbytes, nanoseconds, pending)
        return found

    @property
    def logged_steps(self) -> list[LoggedStep]:
        """The last steps, at most 32, oldest first; those that were being written are left out."""
        rows = self._read_log("step_log", STEP_WORDS)
        return [LoggedStep(number - 1, *rest) for number, *rest in rows]

    @property
    def logged_entries(self) -> list[LoggedEntry]:
        """The last entries that moved data, at most 64, oldest first; those that were being written are left out."""
        operations, algorithms = self.names["operations"], self.names["algorithms"]
        found = []
        for _, begun, ended, nbytes, place in self._read_log("entry_log", ENTRY_WORDS):
            operation, algorithm = divmod(place, len(algorithms))
            if operation < len(operations):
                found.append(LoggedEntry(begun, ended, nbytes, operations[operation], algorithms[algorithm]))
        return found

    def _read_log(self, name: str, width: int) -> list[list[int]]:
        """Return the valid rows of a log, in the order of their numbers."""
        words = self.fields[name]
        rows = [words[at : at + width] for at in range(0, len(words), width)]
        return sorted(row for row in rows if row[0] and row[1] <= row[2])

    @property
    def far(self) -> bool:
        """True if the rank's world spans several hosts."""
        return self["hosts"] > 1

    @property
    def on_gpu(self) -> bool:
        """True if the rank has opened a GPU."""
        return self["gpu"] > 0

    def get_samples(self, stage: str) -> tuple[int, int]:
        """Return the number of samples of a GPU stage, and their total in nanoseconds."""
        number = self.names["stages"].index(stage)
        return self.fields["device_samples"][number], self.fields["device_ns"][number]

    @property
    def late_steps(self) -> dict[str, int]:
        """Number of late steps by cause."""
        return dict(zip(self.names["late_causes"], self.fields["late_steps"], strict=True))

    @property
    def late_seconds(self) -> dict[str, float]:
        """Seconds by which late steps lasted longer than the median, by cause."""
        seconds = (nanoseconds / 1e9 for nanoseconds in self.fields["late_ns"])
        return dict(zip(self.names["late_causes"], seconds, strict=True))

    @property
    def phase(self) -> str:
        """Phase of the tuner; `off` on ranks other than 0."""
        return self.get_name("phases", "tuner_phase")

    def get_name(self, names: str, name: str) -> str:
        """Return the name of the number in a one-word field, from the given list of names."""
        words, number = self.names[names], self[name]
        return words[number] if number < len(words) else f"unknown ({number})"


def _decode_words(words: Sequence[int]) -> str:
    """Return the text in 64-bit words, which ends with a zero."""
    return struct.pack(f"={len(words)}Q", *words).partition(b"\0")[0].decode(errors="replace")


def make() -> int:
    """Create an empty page; return its descriptor.

    Children do not inherit it: they open `/proc/PID/fd/N`. Raises OSError if the system cannot create anonymous memory;
    `linux.explain_refusal` gives the remedy.
    """
    descriptor = linux.memfd_create(NAME)
    os.ftruncate(descriptor, BYTES)
    return descriptor


def read(source: int | str | os.PathLike[str]) -> Snapshot | None:
    """Read a page by its descriptor or path; None as long as the rank has not written to it.

    Raises PageError if the page cannot be read, is damaged, or was written by another version.
    """
    try:
        descriptor = source if isinstance(source, int) else os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if os.fstat(descriptor).st_size < BYTES:
                raise PageError(f"is {os.fstat(descriptor).st_size} bytes long, and a page of counters {BYTES}")
            with mmap.mmap(descriptor, BYTES, prot=mmap.PROT_READ) as memory, memoryview(memory) as view:
                return _parse(view)
        finally:
            if not isinstance(source, int):
                os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError is raised by mmap if the file was truncated
        raise PageError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error


def write_copy(descriptor: int, content: bytes, ahead: int, ahead_unix: int) -> None:
    """Store `content`, the page of another host, in a copy; store nothing as long as the page is empty.

    This host's monotonic clock is `ahead` nanoseconds ahead of that host's, and its unix time `ahead_unix`.
    """
    memory = bytearray(content)
    with memoryview(memory) as view, contextlib.suppress(PageError):  # a damaged page is copied as it is
        if (places := _locate_fields(view)) is None:
            return
        with view.cast("Q") as words:
            for name, first, end in places[0]:
                if name in TIMES and words[first]:  # 0: there is no such time yet
                    words[first] = _shift_time(words[first], ahead if name in MONOTONIC else ahead_unix)
                for row in range(first, end, LOGS[name]) if name in LOGS else ():
                    for at in (row + 1, row + 2):
                        words[at] = _shift_time(words[at], ahead) if words[row] else 0
    os.pwrite(descriptor, memory, 0)


def _shift_time(time: int, ahead: int) -> int:
    """Return a time by another clock, at least 1; a host that lies about its times gets the latest there is."""
    return min(max(1, time + ahead), (1 << 64) - 1)


def date_copy(descriptor: int, now: int, state: str) -> None:
    """Record the time at which a copy equalled its page, and the state of the rank's process.

    `now` is CLOCK_MONOTONIC of this host, in nanoseconds. `state` is a letter as in `Process.state`; empty if unknown.
    """
    with mmap.mmap(descriptor, BYTES) as memory, memoryview(memory) as view, contextlib.suppress(PageError):
        if (places := _locate_fields(view)) is not None:
            at = {name: first for name, first, _ in places[0]}
            with view.cast("Q") as words:
                words[at["copied_ns"]], words[at["copied_state"]] = now, ord(state or "\0")


def _parse(view: memoryview) -> Snapshot | None:
    places = _locate_fields(view)
    if places is None:
        return None
    with view.cast("Q") as words:
        return Snapshot({name: words[first:end].tolist() for name, first, end in places[0]}, places[1])


def _locate_fields(view: memoryview) -> tuple[list[tuple[str, int, int]], dict[str, tuple[str, ...]]] | None:
    """Return the word ranges of a page's fields and the names of its numbers; None if the page is empty."""
    magic, version, nbytes, table = HEADER.unpack_from(view)
    if magic == bytes(8):
        return None
    if magic != MAGIC:
        raise PageError(
            f"begins with {magic!r}, and a page of counters with {MAGIC!r}: it is damaged, or something else"
        )
    if version != VERSION:
        raise PageError(f"is of version {version}, and this reads version {VERSION}: the rank runs another build")
    if nbytes != BYTES or not 0 < table < BYTES - TABLE:
        raise PageError("has a damaged header")
    return _parse_table(bytes(view[TABLE : TABLE + table]))


@lru_cache(maxsize=16)
def _parse_table(table: bytes) -> tuple[list[tuple[str, int, int]], dict[str, tuple[str, ...]]]:
    """Parse a table of fields: word ranges and names of numbers. Cached, as all ranks of a job have the same table."""
    places, names = {}, {}
    try:
        for line in table.decode("ascii").splitlines():
            name, first, *rest = line.split(" ")
            if first == "=":
                names[name] = tuple(rest)
                continue
            at, count = int(first), int(*rest)
            if at % 8 or count < 1 or not TABLE + len(table) <= at <= BYTES - 8 * count:
                raise ValueError
            places[name] = (at // 8, at // 8 + count)
    except (ValueError, TypeError):
        raise PageError("has a damaged table of fields") from None
    wrong = [name for name, known in NAMES.items() if not set(known) <= set(names.get(name, ()))]
    if wrong:
        raise PageError(f"lacks names of {', '.join(sorted(wrong))}")
    wrong = [
        name
        for name, count in count_needed_words(names).items()
        if name not in places or places[name][1] - places[name][0] != count
    ]
    if wrong:
        raise PageError(f"lacks, or has in another form, the fields {', '.join(sorted(wrong))}")
    return [(name, *place) for name, place in places.items()], names


# Fields of several words that readers need, with the lists of names that index them, outermost first.
_NUMBERED = {
    "collectives": ("operations", "algorithms"),
    "collective_bytes": ("operations", "algorithms"),
    "collective_tensors": ("operations",),
    "collective_ns": ("operations", "algorithms"),
    "cycles": ("reasons",),
    "device_ns": ("stages",),
    "device_samples": ("stages",),
    "late_steps": ("late_causes",),
    "late_ns": ("late_causes",),
}


def count_needed_words(names: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Return the number of words of each field that readers need. A newer build may add fields."""
    return {
        **dict.fromkeys("state pid rank size local_rank host hosts worlds started_ns cause culprit".split(), 1),
        "host_name": HOST_WORDS,
        **{name: math.prod(len(names[each]) for each in lists) for name, lists in _NUMBERED.items()},
        "collective_durations": len(names["operations"]) * DURATIONS,
        **dict.fromkeys("exposed_ns fused_bytes fusion_capacity queue_ns queued negotiation_ns negotiated".split(), 1),
        **dict.fromkeys("lag_ns lags completed mismatches last_ns".split(), 1),
        **dict.fromkeys("compression_saved_bytes compression_not_finite".split(), 1),
        **dict.fromkeys(("knob_version", *(gauge.field for gauge in GAUGES)), 1),
        **dict.fromkeys("submitted requests blocked_ns steps step_ns".split(), 1),
        "step_durations": DURATIONS,
        **dict.fromkeys("steps_logged entries_logged".split(), 1),
        "step_log": STEP_LOG * STEP_WORDS,
        "entry_log": ENTRY_LOG * ENTRY_WORDS,
        "late_blind": 1,
        **dict.fromkeys("stall_warnings stalled network_sent network_received copied_ns copied_state".split(), 1),
        "crossing_ns": HOSTS,
        "group_names": GROUPS * GROUP_WORDS,
        **{f"group_{name}": GROUPS for name in "ranks collectives bytes ns completed submitted".split()},
        **dict.fromkeys(
            "gpu device_entries device_bytes device_enqueued device_passed device_sampled_bytes".split(), 1
        ),
        **dict.fromkeys("tuner_phase tuner_searches tuner_trials tuner_changes tuner_changed_ns".split(), 1),
        **dict.fromkeys("tuner_score_ps tuner_default_ps tuner_best_ps".split(), 1),
    }


EXPECTED = count_needed_words(NAMES)
