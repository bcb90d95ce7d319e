"""Pages of counters that no engine has written."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping, Sequence

from engine.metrics import names, page
from engine.metrics.elastic_job import ElasticJob, Reset
from engine.metrics.export.collector import Exporter
from engine.metrics.export.rank_pages import Member

from .written_pages import groups_of, names_text, words_of

FIRST = 3072  # offset of the first field
Fields = Mapping[str, int | Sequence[int]]


class FakePage:
    """Page whose fields a test sets; those that are not given are 0.

    A newer build has `more`: extra fields and their number of words; and `operations`, which follow the known ones.
    """

    def __init__(
        self, fields: Fields | None = None, more: Mapping[str, int] | None = None, operations: tuple[str, ...] = ()
    ) -> None:
        self.names = {**names.NAMES, "operations": names.OPERATIONS + operations}
        self.descriptor = page.make()
        self._memory = mmap.mmap(self.descriptor, page.BYTES)
        self._words = memoryview(self._memory).cast("Q")
        self._at: dict[str, int] = {}
        table, at = "", FIRST
        for name, words in {**page.count_needed_words(self.names), **(more or {})}.items():
            table += f"{name} {at} {words}\n"
            self._at[name] = at // 8
            at += 8 * words
        text = (table + names_text(self.names)).encode()
        self._memory[page.TABLE : page.TABLE + len(text)] = text
        self._memory[: page.HEADER.size] = page.HEADER.pack(page.MAGIC, page.VERSION, page.BYTES, len(text))
        for name, value in (fields or {}).items():
            self.set(name, value)

    def set(self, name: str, value: int | Sequence[int]) -> None:
        """Write a field."""
        for index, word in enumerate([value] if isinstance(value, int) else value):
            self._words[self._at[name] + index] = word

    def write(self, offset: int, data: bytes) -> None:
        """Overwrite bytes of the page."""
        self._memory[offset : offset + len(data)] = data

    def replace(self, old: bytes, new: bytes) -> None:
        """Replace a word of the table."""
        self.write(self._memory.find(old), new)

    def word(self, offset: int, value: int) -> None:
        """Overwrite a word of the header."""
        self.write(offset, struct.pack("=Q", value))

    def close(self) -> None:
        """Close the page."""
        self._words.release()
        self._memory.close()
        os.close(self.descriptor)


def training(rank: int = 0, size: int = 4, hosts: int = 1) -> dict[str, int | list[int]]:
    """Fields of a rank of a training job with the tuner on: it runs allreduces, and has run one broadcast.

    With several hosts, each has the same number of ranks, the first waits most for the last, and ranks have GPUs.
    """
    far = {
        "host": rank * hosts // size,
        "hosts": hosts,
        "host_name": words_of(f"node{rank * hosts // size}"),
        "network_sent": 3_000_000_000,
        "network_received": 2_000_000_000,
        "group_names": groups_of("tp (3)"),
        "group_ranks": [2],
        "group_collectives": [5],
        "group_bytes": [500],
        "group_ns": [10**8],
        "group_submitted": [7],
        "group_completed": [6],
        "crossing_ns": [10**8 * (1 + host) * (host != rank * hosts // size) for host in range(hosts)],
    }

    def by_algorithm(**values: int) -> list[int]:
        table = [0] * page.EXPECTED["collectives"]
        for name, value in values.items():
            operation, algorithm = name.split("_")
            algorithms = [each.replace("-", "") for each in names.ALGORITHMS]
            table[names.OPERATIONS.index(operation) * len(names.ALGORITHMS) + algorithms.index(algorithm)] = value
        return table

    on_gpu = {
        "gpu": 1,
        "device_entries": 60,
        "device_bytes": 60 << 20,
        "device_enqueued": 58,
        "device_passed": 55,
        "device_ns": [4_000_000, 8_000_000, 40_000_000, 6_000_000, 3_000_000],
        "device_samples": [4, 4, 4, 2, 30],
        "device_sampled_bytes": 4 << 20,
    }

    durations = [0] * page.EXPECTED["collective_durations"]
    durations[18:24] = [5, 50, 800, 120, 20, 5]
    durations[page.DURATIONS + 20] = 1
    return {
        "state": names.STATES.index("running"),
        "pid": os.getpid(),
        "rank": rank,
        "local_rank": rank,
        "size": size,
        **({**far, **on_gpu} if hosts > 1 else {}),
        "worlds": 1,
        "started_ns": time.time_ns() - 60 * 10**9,
        "collectives": by_algorithm(allreduce_oneshot=400, allreduce_twoshot=600, broadcast_shared=1),
        "collective_bytes": by_algorithm(allreduce_oneshot=400 << 12, allreduce_twoshot=600 << 20, broadcast_shared=9),
        "collective_tensors": [20_000, 30, 0, 0, 0, 0],
        "collective_ns": by_algorithm(
            allreduce_oneshot=100_000_000, allreduce_twoshot=800_000_000, broadcast_shared=1_000_000
        ),
        "collective_durations": durations,
        "exposed_ns": 300_000_000,
        "blocked_ns": 400_000_000,
        "fused_bytes": 500 << 20,
        "fusion_capacity": 900 << 20,
        "queue_ns": 30_000_000,
        "queued": 1000,
        "negotiation_ns": 50_000_000,
        "negotiated": 1000,
        "lag_ns": 10_000_000 * (rank + 1),
        "lags": 1000,
        "submitted": 20_040,
        "completed": 20_030,
        "requests": 230,
        "last_ns": time.monotonic_ns() - 10**9,
        "fusion_threshold": 64 << 20,
        "cycle_time_ns": 5_000_000,
        "stores": 2,
        "chunk": 512 << 10,
        "knob_version": 3,
        "steps": 100,
        "step_ns": 100 * 50_000_000,
        "step_durations": [0] * 25 + [90, 10] + [0] * (page.DURATIONS - 27),
        "cycles": [100, 200, 300, 401, 502],
        **(
            {
                "tuner_phase": names.PHASES.index("searching"),
                "tuner_searches": 1,
                "tuner_trials": 7,
                "tuner_changes": 5,
                "tuner_changed_ns": time.time_ns() - 10**9,
                "tuner_score_ps": 51 * 10**9,
                "tuner_default_ps": 50 * 10**9,
                "tuner_best_ps": 45 * 10**9,
            }
            if rank == 0
            else {}
        ),
    }


def member(rank: int, source: FakePage | int | str | None, up: bool = True) -> Member:
    """Rank with a page."""
    where = source.descriptor if isinstance(source, FakePage) else source
    return Member(rank, lambda: where, lambda _: up)


ELASTIC = ElasticJob(
    world=4,
    worlds=4,
    size=3,
    min_size=2,
    max_size=6,
    resetting=False,
    resets={"failure": 2, "host_lost": 0, "hosts": 0, "left": 0, "slow": 1, "newcomers": 0},
    reset_seconds=1.5,
    cooling=1,
    slow_workers=1,
    ranks={0: 0, 2: 1, 3: 2},
    recent=(Reset(3, 1_700_000_000.0, "failure", "worker 1 in slot 1 of a: was killed by SIGKILL", 0.25),),
)


def full_exposition(ranks: int = 4, run: str = "fake-1") -> str:
    """Exposition of an elastic training job with the tuner on, with every defined metric."""
    pages = [FakePage(training(rank, ranks, 2)) for rank in range(ranks)]
    try:
        members = [member(rank, each) for rank, each in enumerate(pages)]
        return Exporter(run, members, lambda line: None, elastic=lambda: ELASTIC).encode_metrics()[0].decode()
    finally:
        for each in pages:
            each.close()
