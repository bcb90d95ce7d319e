"""Pages become exactly the defined families; unreadable pages are left out and counted."""

from __future__ import annotations

import math
import os
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import exposition
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from engine.metrics import definitions, names, page
from engine.metrics.elastic_job import ElasticJob
from engine.metrics.export.collector import ELASTIC as ELASTIC_READERS
from engine.metrics.export.collector import READERS, Exporter, merge_buckets

from .fake_pages import ELASTIC, FIRST, FakePage, full_exposition, member, training
from .written_pages import groups_of

HOST = {name for name, metric in definitions.METRICS.items() if metric.scope in ("host", "elastic")}
ELASTIC_ONLY = {name for name, metric in definitions.METRICS.items() if metric.scope == "elastic"}


@pytest.fixture
def pages() -> Iterator[list[FakePage]]:
    """Four ranks of a training job on two hosts."""
    made = [FakePage(training(rank, hosts=2)) for rank in range(4)]
    yield made
    for each in made:
        each.close()


def exporter(pages: list[FakePage], said: list[str] | None = None, elastic: ElasticJob | None = None) -> Exporter:
    lines: list[str] = [] if said is None else said
    members = [member(rank, each) for rank, each in enumerate(pages)]
    return Exporter("digits-7", members, lines.append, elastic=lambda: elastic)


def samples(text: str | bytes | Exporter) -> list[Sample]:
    """Samples that a scraper parses from a text; it raises for invalid text."""
    if isinstance(text, Exporter):
        text = text.encode_metrics()[0]
    if isinstance(text, bytes):
        text = text.decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(found: list[Sample], name: str, /, **labels: str) -> float:
    """Value of the one series with these labels."""
    [only] = [each for each in found if each.name == name and labels.items() <= each.labels.items()]
    return only.value


def of_rank(found: list[Sample], rank: int) -> list[Sample]:
    return [sample for sample in found if sample.labels.get("rank") == str(rank)]


def test_every_definition_is_exported_with_its_labels_and_type_and_nothing_else():
    text = full_exposition()
    exported: dict[str, set[str]] = {}
    for sample in samples(text):
        exported.setdefault(sample.name, set()).update(sample.labels)
    assert exported.keys() == definitions.SERIES.keys()
    for series, labels in exported.items():
        assert labels - {"le"} == set(definitions.SERIES[series].all_labels), series
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    assert types == {
        name: "gauge" if metric.kind == "info" else metric.kind for name, metric in definitions.METRICS.items()
    }
    helps = dict(line.split(" ", 3)[2:] for line in text.splitlines() if line.startswith("# HELP"))
    assert helps == {name: metric.about for name, metric in definitions.METRICS.items()}


def test_the_documentation_names_all_values_of_labels():
    text = " ".join((Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text().split())
    values = (
        *names.OPERATIONS,
        *names.ALGORITHMS,
        *names.REASONS,
        *names.STAGES,
        *definitions.KNOBS,
        *definitions.ERRORS,
    )
    assert not [value for value in values if not re.search(rf"\b{value}\b", text)]
    for name in ("stores", "compressions"):
        assert ", ".join(f"{number} {word}" for number, word in enumerate(names.NAMES[name])) in text


def test_a_reader_for_each_metric_of_a_rank():
    assert READERS.keys() == definitions.METRICS.keys() - HOST
    assert ELASTIC_READERS.keys() == ELASTIC_ONLY


def test_openmetrics_says_the_same(pages):
    text, kind = exporter(pages, elastic=ELASTIC).encode_metrics(
        "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    )
    assert kind.startswith("application/openmetrics-text")
    found = [sample for family in openmetrics_families(text.decode()) for sample in family.samples]
    assert {sample.name for sample in found} == definitions.SERIES.keys()
    assert exporter(pages).encode_metrics("text/plain")[1].startswith("text/plain; version=0.0.4")


def test_the_encoder_says_what_the_library_says(pages):
    made = Exporter('odd "name"\\ \n', [member(rank, each) for rank, each in enumerate(pages)], lambda line: None)
    families = list(made.collect())
    registry = SimpleNamespace(collect=lambda: families)
    assert made.encode_metrics()[0] == exposition.generate_latest(registry)
    assert made.encode_metrics("application/openmetrics-text")[0] == openmetrics.generate_latest(registry)


def test_what_is_said_of_a_rank_is_what_its_page_says(pages):
    found = samples(exporter(pages))
    assert value(found, "engine_collectives_total", rank="1", op="allreduce", algorithm="two-shot") == 600
    assert value(found, "engine_collective_bytes_total", rank="1", op="broadcast", algorithm="shared") == 9
    assert value(found, "engine_collective_seconds_total", rank="1", op="allreduce", algorithm="one-shot") == 0.1
    assert value(found, "engine_collective_duration_seconds_sum", rank="2", op="allreduce") == 0.9
    assert value(found, "engine_collective_duration_seconds_count", rank="2", op="allreduce") == 1000
    assert value(found, "engine_arrival_lag_seconds_sum", rank="3") == 0.04
    assert value(found, "engine_network_sent_bytes_total", rank="3") == 3e9
    assert value(found, "engine_crossing_seconds_total", rank="3", peer="node0") == 0.1
    assert value(found, "engine_crossing_seconds_total", rank="0", peer="node1") == 0.2
    assert value(found, "engine_rank_info", rank="2", host="node1", transport="shared-memory, tcp") == 1
    assert value(found, "engine_pending_tensors", rank="0") == 10
    assert value(found, "engine_knob", name="cycle_time_seconds") == 0.005
    assert value(found, "engine_autotune_best_score_seconds") == 0.045
    assert value(found, "engine_cycles_total", reason="cycle_time") == 401
    assert value(found, "engine_cycles_total", reason="frozen") == 502
    assert value(found, "engine_job_active", run="digits-7") == 1
    assert value(found, "engine_rank_info", rank="1", local_rank="1", pid=str(os.getpid())) == 1
    started, last = (
        value(found, f"engine_{each}_timestamp_seconds", rank="0") for each in ("start", "last_collective")
    )
    assert last - started == pytest.approx(59.0, abs=0.5)


def test_what_is_not_in_use_has_no_series(pages):
    pages[0].set("tuner_phase", 0)
    pages[1].set("step_durations", [0] * page.DURATIONS)
    found = samples(exporter(pages))
    assert {sample.labels["op"] for sample in found if "op" in sample.labels} == {"allreduce", "broadcast"}
    assert not [sample for sample in found if sample.name.startswith("engine_autotune")]
    assert "engine_step_duration_seconds_count" not in {sample.name for sample in of_rank(found, 1)}
    assert value(found, "engine_step_duration_seconds_count", rank="2") == 100


def test_what_process_sets_do_is_told_of_their_members(pages):
    """Places of the page in between are free; a name that is cut like another gets a number."""
    pages[1].set("group_names", groups_of("tp (3)", "", "long", "long"))
    for field, numbers in (("ranks", [2, 0, 3, 4]), ("collectives", [7, 9, 8, 6]), ("bytes", [700, 1, 2, 3])):
        pages[1].set(f"group_{field}", numbers)
    pages[1].set("group_ns", [15 * 10**8])
    pages[1].set("group_submitted", [9, 0, 5])
    pages[1].set("group_completed", [7, 0, 6])
    pages[2].set("group_names", 0)
    found = [sample for sample in samples(exporter(pages)) if "group" in sample.labels]
    assert {sample.labels["rank"] for sample in found} == {"0", "1", "3"}
    found = of_rank(found, 1)
    assert {sample.labels["group"] for sample in found} == {"tp (3)", "long", "long #2"}
    assert value(found, "engine_group_collectives_total", group="tp (3)") == 7
    assert value(found, "engine_group_bytes_total", group="tp (3)") == 700
    assert value(found, "engine_group_seconds_total", group="tp (3)") == 1.5
    assert value(found, "engine_group_pending_tensors", group="tp (3)") == 2
    assert value(found, "engine_group_pending_tensors", group="long") == 0
    assert value(found, "engine_group_collectives_total", group="long #2") == 6


def test_what_gpus_do_is_told_of_ranks_with_one(pages):
    pages[1].set("gpu", 0)
    algorithms = len(names.ALGORITHMS)
    moved = [0] * len(names.OPERATIONS) * algorithms
    moved[names.ALGORITHMS.index("device")] = 60
    pages[2].set("collectives", moved)
    found = samples(exporter(pages))
    assert not [sample for sample in of_rank(found, 1) if sample.name.startswith("engine_device")]
    for reached, count in (("handed_over", 60), ("enqueued", 58), ("done", 55)):
        assert value(found, "engine_device_entries_total", rank="0", reached=reached) == count
    assert value(found, "engine_device_duration_seconds_sum", rank="0", stage="nccl") == 0.04
    assert value(found, "engine_device_duration_seconds_count", rank="0", stage="exposed") == 30
    assert value(found, "engine_device_sampled_bytes_total", rank="0") == 4 << 20
    device = [sample.name for sample in of_rank(found, 2) if sample.labels.get("algorithm") == "device"]
    assert sorted(device) == ["engine_collective_bytes_total", "engine_collectives_total"], "no time, which is sampled"


def test_a_tuner_that_has_measured_nothing_has_no_score(pages):
    for name in ("score", "default", "best"):
        pages[0].set(f"tuner_{name}_ps", 0)
    pages[0].set("tuner_changed_ns", 0)
    found = samples(exporter(pages))
    assert value(found, "engine_autotune_phase") == 2
    assert not [sample for sample in found if "score" in sample.name or "last_change" in sample.name]


def test_leaders_metrics_come_from_rank_0_alone(pages):
    for sample in samples(exporter(pages)):
        if definitions.SERIES[sample.name].scope in ("leader", "tuner"):
            assert sample.labels["rank"] == "0"


def test_errors_begin_at_0_and_tell_the_cause(pages):
    found = samples(exporter(pages))
    assert [value(found, "engine_errors_total", rank="1", kind=kind) for kind in definitions.ERRORS] == [0] * 6
    pages[1].set("mismatches", 3)
    pages[1].set("cause", names.CAUSES.index("stalled"))
    found = samples(exporter(pages))
    told = [value(found, "engine_errors_total", rank="1", kind=kind) for kind in definitions.ERRORS]
    assert told == [3, 0, 0, 0, 1, 0]


def test_resets_are_the_worlds_after_the_first(pages):
    pages[0].set("worlds", 3)
    assert value(samples(exporter(pages)), "engine_resets_total", rank="0") == 2


def test_a_word_read_late_makes_no_negative_queue(pages):
    pages[0].set("completed", 30_000)
    assert value(samples(exporter(pages)), "engine_pending_tensors", rank="0") == 0


def test_ranks_that_have_not_started_are_only_up():
    empty, new = FakePage(), FakePage(training() | {"state": 0})
    untouched = page.make()
    try:
        members = [member(0, untouched), member(1, None, up=False), member(2, new), member(3, empty)]
        found = samples(Exporter("r", members, lambda line: None))
    finally:
        empty.close()
        new.close()
        os.close(untouched)
    assert [(each.name, each.labels["rank"], each.value) for each in found if "rank" in each.labels] == [
        ("engine_rank_up", "0", 1),
        ("engine_rank_up", "1", 0),
        ("engine_rank_up", "2", 1),
        ("engine_rank_up", "3", 1),
    ]
    assert value(found, "engine_unreadable_pages") == 0


def test_a_dead_rank_keeps_its_counters(pages):
    found = samples(Exporter("r", [member(0, pages[0]), member(1, pages[1], up=False)], lambda line: None))
    assert value(found, "engine_rank_up", rank="1") == 0
    assert value(found, "engine_submissions_total", rank="1") == 20_040


def test_a_page_with_more_operations_is_read_with_their_names():
    newer = FakePage({"state": names.STATES.index("running")}, operations=("rotate", "scan"))
    table = [0] * (len(newer.names["operations"]) * len(names.ALGORITHMS))
    table[-len(names.ALGORITHMS)] = 7
    newer.set("collectives", table)
    try:
        found = samples(exporter([newer]))
        assert value(found, "engine_collectives_total", op="scan", algorithm="one-shot") == 7
    finally:
        newer.close()


def test_a_newer_page_with_more_fields_is_read():
    newer = FakePage(training(), more={"gpu_ns": 3})
    try:
        assert value(samples(exporter([newer])), "engine_submissions_total") == 20_040
    finally:
        newer.close()


DAMAGES = {
    "magic": (lambda it: it.write(0, b"GARBAGE!"), "it is damaged"),
    "older": (
        lambda it: it.word(8, 0),
        f"is of version 0, and this reads version {page.VERSION}: the rank runs another build",
    ),
    "newer": (lambda it: it.word(8, page.VERSION + 1), f"is of version {page.VERSION + 1}"),
    "bytes": (lambda it: it.word(16, 1 << 40), "has a damaged header"),
    "table length": (lambda it: it.word(24, (1 << 64) - 1), "has a damaged header"),
    "table": (lambda it: it.write(page.TABLE, b"\xff\xfe"), "has a damaged table"),
    "offset": (lambda it: it.write(page.TABLE, b"state 9999 1\n"), "has a damaged table"),
    "field gone": (lambda it: it.write(page.TABLE, b"stave"), "lacks, or has in another form, the fields state"),
    "name gone": (lambda it: it.replace(b"broadcast ", b"broadcost "), "lacks names of operations"),
    "names gone": (lambda it: it.replace(b"causes =", b"clause ="), "lacks names of causes"),
    "truncated": (lambda it: os.ftruncate(it.descriptor, 100), "is 100 bytes long"),
    "empty": (lambda it: os.ftruncate(it.descriptor, 0), "is 0 bytes long"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", DAMAGES)
def test_a_page_that_cannot_be_read_is_left_out_counted_and_said_once(pages, name):
    damage, words = DAMAGES[name]
    damage(pages[1])
    said: list[str] = []
    made = exporter(pages, said)
    for _ in range(3):
        found = samples(made)
    assert not of_rank(found, 1)
    assert of_rank(found, 0) and of_rank(found, 2)
    assert value(found, "engine_unreadable_pages") == 1
    assert len(said) == 1
    assert said[0].startswith("metrics: rank 1 is left out, its page of counters ")
    assert words in said[0]


def test_a_page_that_is_gone_or_no_page_is_left_out(tmp_path):
    (tmp_path / "text").write_text("x" * 10_000)
    said: list[str] = []
    members = [member(0, "/proc/1/no/page"), member(1, str(tmp_path / "text")), member(2, str(tmp_path))]
    found = samples(Exporter("r", members, said.append))
    assert value(found, "engine_unreadable_pages") == 3
    assert len(said) == 3


@pytest.mark.slow
@given(st.integers(0, 1 << 32))
def test_any_content_of_fields_is_exported(seed):
    it = FakePage()
    try:
        it.write(FIRST, random.Random(seed).randbytes(page.BYTES - FIRST))
        for sample in samples(exporter([it])):
            assert math.isfinite(sample.value)
    finally:
        it.close()


@given(st.lists(st.one_of(st.integers(0, 1 << 45), st.integers(0, 45).map(lambda power: 1 << power)), max_size=200))
def test_buckets_are_coarsened_as_if_counted_directly(durations):
    counts = [0] * page.DURATIONS
    for duration in durations:
        counts[min(duration.bit_length(), page.DURATIONS - 1)] += 1
    found = merge_buckets(counts)
    assert [float(bound) for bound, _ in found] == [*definitions.BUCKETS, math.inf]
    for bound, count in found:
        assert count == sum(duration < float(bound) * 1e9 - 1e-3 for duration in durations)


def test_64_ranks_are_scraped_within_a_second_with_about_100_series_each():
    pages = [FakePage(training(rank, 64)) for rank in range(64)]
    try:
        made = exporter(pages)
        spent = []
        for accept in ["", "application/openmetrics-text"] * 4:
            began = time.perf_counter()
            text, _ = made.encode_metrics(accept)
            spent.append(time.perf_counter() - began)
        found = samples(made)
    finally:
        for each in pages:
            each.close()
    print(f"{min(spent) * 1e3:.1f} ms, {len(text)} bytes, {len(found)} series")
    assert min(spent) < 1.0, "it is some 30 ms"
    assert len(of_rank(found, 1)) <= 90
    assert len(of_rank(found, 0)) <= 120


@pytest.mark.slow
def test_parallel_scrapes_of_pages_that_change_are_whole_and_never_go_back(pages):
    made, over, seen = exporter(pages), threading.Event(), []

    def change() -> None:
        fields = {name: words for name, words in training().items() if name not in ("state", "worlds")}
        turn = 0
        while not over.is_set():
            turn += 1
            for name, words in fields.items():
                pages[turn % 4].set(name, words + turn if isinstance(words, int) else [word + turn for word in words])

    def scrape() -> None:
        last: Mapping[tuple[str, str], float] = {}
        for _ in range(10):
            now = {
                (sample.labels["rank"], sample.labels["le"]): sample.value
                for sample in samples(made)
                if sample.name == "engine_step_duration_seconds_bucket"
            }
            assert all(now[key] >= before for key, before in last.items())
            last = now
        seen.append(last)

    changer = threading.Thread(target=change)
    scrapers = [threading.Thread(target=scrape) for _ in range(4)]
    changer.start()
    for each in scrapers:
        each.start()
    for each in scrapers:
        each.join(60)
    over.set()
    changer.join(60)
    assert len(seen) == 4
