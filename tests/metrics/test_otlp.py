"""Metrics and spans of steps reach a receiver of OpenTelemetry's protocol, and its absence costs a job nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

pytest.importorskip("opentelemetry.proto")
pytest.importorskip("opentelemetry.sdk")

from engine.host.machine import free_port
from engine.metrics import page
from engine.metrics.errors import MetricsError
from engine.metrics.export import service, step_records
from engine.metrics.export.collector import Exporter
from engine.metrics.export.rank_pages import Member
from engine.metrics.export.service import Service, Wanted
from engine.metrics.export.step_records import StepReader
from engine.otlp import sender
from engine.otlp.records import CollectiveRecord, StepRecord

from ..ranks import run_ranks
from ..waiting import until
from .fake_pages import FakePage, Fields, training
from .otlp_receiver import Receiver, attributes_of, series_of
from .written_pages import words_of

STEPS = """
import numpy as np, engine
from engine.session.runtime import current_engine
engine.init()
for step in range({steps}):
    engine.allreduce(np.ones(100_000, np.float32), name="a")
    engine.allgather(np.ones(10, np.float32), name="b")
    current_engine().mark_step(0)
    {pause}
engine.barrier()
"""


@pytest.fixture
def make_page() -> Iterator[Callable[..., FakePage]]:
    """Make pages that are closed with the test."""
    made: list[FakePage] = []

    def make(fields: Fields) -> FakePage:
        made.append(FakePage(fields))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let services read steps and send every 50 ms."""
    monkeypatch.setattr(sender, "PERIOD", 0.05)
    monkeypatch.setattr(step_records, "PAUSE", 0.05)


def make_service(url: str, members: list[Member], said: list[str]) -> Service:
    return Service(Wanted("run-1", otlp=url), members, said.append)


def test_series_are_those_of_the_prometheus_page(make_page: Callable[..., FakePage]) -> None:
    pages = [make_page(training(rank)) for rank in range(2)]
    members = [Member(rank, lambda at=each.descriptor: at, lambda _: True) for rank, each in enumerate(pages)]
    with Receiver() as receiver:
        publishing = make_service(receiver.url, members, [])
        publishing.start()
        until(lambda: receiver.metrics, "metrics")
        publishing.stop()
        got = series_of(receiver.metrics[0])
    expected = {}
    for family in Exporter("run-1", members, print).collect():
        for sample in family.samples:
            labels = {**sample.labels}
            if "le" in labels:
                labels["le"] = repr(float(labels["le"]))
            rest = sorted((name, value) for name, value in labels.items() if name != "le")
            key = (*rest, *([("le", labels["le"])] if "le" in labels else []))
            expected[sample.name, key] = float(sample.value)
    moving = {name for name, _ in expected if "timestamp" in name}
    assert len(expected) > 100 and got.keys() == expected.keys()
    assert {key for key in got if got[key] != pytest.approx(expected[key]) and key[0] not in moving} == set()
    [resource] = [each.resource for each in receiver.metrics[0].resource_metrics]
    told = attributes_of(resource.attributes)
    assert (told["service.name"], told["service.instance.id"]) == ("enginerun", "run-1")


def test_a_job_sends_spans_of_steps_with_their_collectives() -> None:
    with Receiver() as receiver:
        options = ["--metrics-otlp", receiver.url, "--run-name", "it"]
        finished = run_ranks(2, STEPS.format(steps=12, pause="engine.barrier()"), options=options)
        assert f"metrics: to the OpenTelemetry collector at {receiver.url}" in finished.err
    spans = {span.span_id: span for span in receiver.spans}
    roots = [span for span in spans.values() if not span.parent_span_id]
    assert sorted(attributes_of(root.attributes)["step"] for root in roots) == list(
        range(11)
    )  # from one end to the next
    for root in roots:
        assert root.name == "step" and attributes_of(root.attributes)["run"] == "it"
        ranks = [span for span in spans.values() if span.parent_span_id == root.span_id]
        assert sorted(span.name for span in ranks) == ["rank 0", "rank 1"]
        for span in ranks:
            assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano and span.trace_id == root.trace_id
            inside = [each for each in spans.values() if each.parent_span_id == span.span_id]
            assert {"allreduce", "allgather"} <= {each.name for each in inside}, inside
            assert all(each.start_time_unix_nano >= span.start_time_unix_nano for each in inside)
            [reduce] = [attributes_of(each.attributes) for each in inside if each.name == "allreduce"]
            assert reduce["bytes"] == 400_000 and reduce["algorithm"]
    aged = abs(time.time_ns() - max(root.end_time_unix_nano for root in roots)) / 1e9
    assert aged < 100, "spans have the time of day"
    last = series_of(receiver.metrics[-1])
    for rank in ("0", "1"):
        counted = [
            value
            for (name, labels), value in last.items()
            if name == "engine_collectives_total" and {"allreduce", rank} <= set(dict(labels).values())
        ]
        assert sum(counted) == 12
    assert last["engine_job_active", (("run", "it"),)] == 0


def refuse() -> str:
    """Address at which nobody listens."""
    return f"http://127.0.0.1:{free_port()}"


def wait_for_requests(url: str, number: int) -> str:
    """Return a program that waits until the receiver at an address has been asked so many times."""
    return f"""
import urllib.request
from tests.waiting import until
until(lambda: int(urllib.request.urlopen("{url}/asked").read()) >= {number}, "requests")
"""


@pytest.mark.parametrize("kind", ["absent", "mute", "refusing"])
def test_a_dead_collector_neither_hangs_nor_fails_a_job(kind: str) -> None:
    program = STEPS.format(steps=3, pause="")
    with Receiver(status=404, mute=kind == "mute") as receiver:
        url = refuse() if kind == "absent" else receiver.url
        asked = {"absent": 0, "mute": 1, "refusing": 2}[kind]
        plain = run_ranks(2, program)
        finished = run_ranks(2, program + wait_for_requests(receiver.url, asked), options=["--metrics-otlp", url])
    assert finished.code == 0
    longest = plain.seconds + sender.PERIOD * (kind == "refusing") + sender.STOP_LIMIT + 15
    assert finished.seconds < longest, (finished.seconds, plain.seconds)
    said = finished.err.count("takes nothing; is it there")
    assert said == 1 if kind == "refusing" else said <= 1, finished.err  # others may not be known before the end
    assert "opentelemetry" not in finished.err.replace("OpenTelemetry", "") and "Traceback" not in finished.err


def test_the_end_waits_a_limited_time_for_a_mute_collector() -> None:
    with Receiver(mute=True) as receiver:
        publishing = make_service(receiver.url, [], [])
        publishing.start()
        until(lambda: receiver.asked, "a request")
        begun = time.monotonic()
        publishing.stop()
        assert time.monotonic() - begun < sender.STOP_LIMIT + 5


@pytest.mark.parametrize("kind", ["absent", "refusing"])
def test_a_dead_collector_is_told_in_one_line(kind: str, often: None) -> None:
    said: list[str] = []
    with Receiver(status=400) as receiver:
        url = refuse() if kind == "absent" else receiver.url
        publishing = make_service(url, [], said)
        publishing.start()
        until(lambda: said, "a line")
        if kind == "refusing":
            until(lambda: receiver.asked >= 5, "several tries")
        publishing.stop()
    [line] = said
    assert url in line and "\n" not in line


def test_a_failure_after_a_success_is_told_again(often: None) -> None:
    said: list[str] = []
    with Receiver(status=400) as receiver:
        publishing = make_service(receiver.url, [], said)
        publishing.start()
        for failures in (1, 2):
            until(lambda failures=failures: len(said) == failures, "a line")
            receiver.status = 200
            done = receiver.asked + 2  # one that was under way, and one after it
            until(lambda done=done: receiver.asked > done, "a success")
            receiver.status = 400
        until(lambda: len(said) == 3, "a line")
        publishing.stop()
    assert said == 3 * said[:1]


def test_missing_packages_are_named_with_their_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "find_package", lambda name: name != "opentelemetry.sdk")
    with pytest.raises(MetricsError, match=r"opentelemetry-sdk .*pip install '\.\[otlp\]'"):
        make_service("http://127.0.0.1:4318", [], [])


@pytest.mark.parametrize(
    "url",
    [
        "localhost:4318",
        "ftp://a",
        "http://",
        "http://a:b@c",
        "http://a b",
        "http://a:99999",
        "http://a/?b",
        "http://a?",
        "http://a#b",
    ],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine.launch", "-np", "1", "--metrics-otlp", url, "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "http://127.0.0.1:4318" in done.stderr, done


def step(rank: int, number: int, begun: int = 0) -> StepRecord:
    inside = [CollectiveRecord(begun + 1, begun + 2, 8, "allreduce", "shared")]
    return StepRecord(rank, number, begun, begun + 10, 0.5, 0.25, inside)


def test_spans_stay_within_their_number() -> None:
    from opentelemetry.sdk.resources import Resource

    from engine.otlp.steps import StepSpans

    making = StepSpans(Resource({}), "run", "1")
    assert making.add([step(0, 1), step(0, 2)], 2) == []
    assert [len(each) for each in making.add([step(1, 1)], 2)] == [2]
    assert [[each.rank for each in of_it] for of_it in making.add([], 2)] == [[0]]  # rank 1 is late
    spans = making.make_spans([[step(0, number, 100 * number)] for number in range(1000)], 30)
    assert len(spans) == 30
    assert {span.attributes["step"] for span in spans if span.name == "step"} == set(range(990, 1000))


def test_a_step_of_too_many_collectives_goes_without_them() -> None:
    from opentelemetry.sdk.resources import Resource

    from engine.otlp.steps import StepSpans

    making = StepSpans(Resource({}), "run", "1")
    inside = 250 * step(0, 0).collectives
    large = [[replace(step(rank, number), collectives=inside) for rank in range(2)] for number in range(2)]
    assert len(making.make_spans(large, 503)) == 503  # the newest fits exactly
    spans = making.make_spans(large, 502)
    assert sorted(span.name for span in spans) == ["rank 0", "rank 1", "step"]
    assert spans[0].attributes["step"] == 1


def test_a_new_process_in_a_slot_begins_anew(make_page: Callable[..., FakePage]) -> None:
    rows = [[number + 1, 100 * number, 100 * number + 90, 10 * number, 5 * number] for number in range(3)]
    one = make_page({"state": 1, "pid": 7, "step_log": [word for row in rows for word in row], "steps_logged": 3})
    reader = StepReader([Member(0, lambda: one.descriptor, lambda _: True)])
    found, ranks = reader.read()
    assert [each.number for each in found] == [0, 1, 2] and ranks == 1
    assert [each.exposed for each in found] == [None, 5e-9, 5e-9]
    assert reader.read() == ([], 1)
    one.set("pid", 8)
    assert [each.number for each in reader.read()[0]] == [0, 1, 2]


def test_a_process_that_gets_another_rank_goes_on(make_page: Callable[..., FakePage]) -> None:
    one = make_page({"state": 1, "pid": 7, "step_log": [1, 0, 90, 0, 0], "steps_logged": 1})
    members = [Member(0, lambda: one.descriptor, lambda _: True)]
    reader = StepReader(members)
    assert [each.rank for each in reader.read()[0]] == [0]
    members[0] = replace(members[0], rank=1)
    assert reader.read() == ([], 1)
    one.set("host_name", words_of("another"))
    assert [each.rank for each in reader.read()[0]] == [1]


def test_pages_of_many_ranks_are_read_more_rarely() -> None:
    member = Member(0, lambda: None, lambda _: True)
    assert [StepReader(number * [member]).choose_pause() for number in (0, 1, 64, 256)] == [1, 1, 1, 4]


def test_a_row_that_is_being_written_is_left_out(make_page: Callable[..., FakePage]) -> None:
    rows = [[0, 1, 2, 0, 0], [2, 50, 40, 0, 0], [3, 50, 60, 0, 0]]
    found = page.read(make_page({"state": 1, "step_log": [word for row in rows for word in row]}).descriptor)
    assert found is not None and [each.number for each in found.logged_steps] == [2]


def test_the_sending_thread_is_a_daemon_that_ends() -> None:
    loggers = [logging.getLogger(name) for name in sender.LOGGERS]
    filters = [len(each.filters) for each in loggers]
    before = set(threading.enumerate())  # those of other tests may still wait for a mute receiver
    with Receiver() as receiver:
        publishing = make_service(receiver.url, [], [])
        publishing.start()
        [thread] = [each for each in set(threading.enumerate()) - before if each.name == "engine-otlp"]
        assert thread.daemon
        until(lambda: receiver.metrics, "metrics")
        assert all(len(each.filters) == had + 1 for each, had in zip(loggers, filters, strict=True))
        publishing.stop()
        assert not thread.is_alive()
    assert [len(each.filters) for each in loggers] == filters
