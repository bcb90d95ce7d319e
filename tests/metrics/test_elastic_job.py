"""Job-wide information of a launcher about an elastic job: metrics, and the input of `enginerun top`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.metrics import names
from engine.metrics.elastic_job import Board, ElasticJob, Reset, read
from engine.metrics.export.collector import Exporter

from .fake_pages import ELASTIC, FakePage, member, training


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board()
    yield made
    made.close()


@pytest.fixture
def pages() -> Iterator[list[FakePage]]:
    """Pages of three slots; rank 0 of the newest world runs in the last."""
    made = [FakePage(training(rank)) for rank in (0, 1, 0)]
    yield made
    for each in made:
        each.close()


def exported(pages: list[FakePage], job: ElasticJob | None) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and value of each series, by name."""
    members = [member(slot, each) for slot, each in enumerate(pages)]
    text = Exporter("run", members, lambda line: None, elastic=lambda: job).encode_metrics()[0].decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_what_is_written_is_read(board: Board) -> None:
    assert read(board.descriptor) is None
    board.write(ELASTIC)
    assert read(board.descriptor) == ELASTIC
    board.write(replace(ELASTIC, recent=(), world=5))  # shorter than the former content
    assert read(board.descriptor) == replace(ELASTIC, recent=(), world=5)


def test_what_is_half_written_or_of_another_version_is_nothing(board: Board) -> None:
    board.write(ELASTIC)
    os.pwrite(board.descriptor, b"x", 60)
    assert read(board.descriptor) is None
    board.write(replace(ELASTIC, world=6))
    text = os.pread(board.descriptor, 4096, 0)
    os.pwrite(board.descriptor, text[:18].replace(text[:2], b"zz", 1), 0)
    assert read(board.descriptor) is None


def test_readers_see_one_job_or_the_other_while_it_is_written(board: Board) -> None:
    jobs = [ELASTIC, replace(ELASTIC, world=77, recent=tuple(Reset(n, 1.0, "slow", "x" * 90, 2.0) for n in range(5)))]
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            for job in jobs:
                board.write(job)

    board.write(jobs[0])
    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = [read(board.descriptor) for _ in range(2000)]
    finally:
        over.set()
        thread.join()
    assert all(job in (*jobs, None) for job in seen)
    assert sum(job is not None for job in seen) > 1000  # most reads do not coincide with a write


def test_a_job_as_a_whole_is_told_between_worlds_too(pages: list[FakePage]) -> None:
    for each in pages:
        each.set("state", names.STATES.index("resetting"))
        each.set("cause", 1)
    job = replace(ELASTIC, resetting=True, size=3)
    found = exported(pages, job)
    assert found["engine_elastic_resetting"] == [({"run": "run"}, 1.0)]
    assert found["engine_elastic_size"][0][1] == 3
    assert {labels["cause"]: value for labels, value in found["engine_elastic_resets_total"]} == job.resets
    assert found["engine_elastic_reset_seconds_total"][0][1] == 1.5
    assert all(value == 0 for _, value in found["engine_errors_total"])  # so no alert on failures fires


def test_another_job_has_no_such_series(pages: list[FakePage]) -> None:
    assert not [name for name in exported(pages, None) if name.startswith("engine_elastic")]


def test_what_rank_0_counts_is_a_series_of_its_slot(pages: list[FakePage]) -> None:
    """Counters never jump, since each series is of one page. A dead worker's page still says rank 0, and is ignored."""
    found = exported(pages, replace(ELASTIC, ranks={1: 1, 2: 0}))
    assert {labels["rank"] for labels, _ in found["engine_cycles_total"]} == {"2"}
    nobody = exported(pages, replace(ELASTIC, ranks={1: -1, 2: -1}))
    assert "engine_cycles_total" not in nobody and len(nobody["engine_rank_up"]) == 3
