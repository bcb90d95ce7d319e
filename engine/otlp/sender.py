"""Thread that sends metrics and spans of steps to a collector, and never makes a job wait."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ..host.background import BackgroundThread

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from prometheus_client import Metric as Family

    from ..metrics.export.step_records import StepReader
    from .records import StepRecord

PERIOD = 5.0  # seconds between two exports
EXPORT_LIMIT = 5.0  # seconds in which the collector has to answer
STOP_LIMIT = 2.0  # seconds that the end of a job waits for the last export
SPANS = 100  # spans a second, which take less than 1 % of a processor
LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
    "urllib3.connectionpool",
)
"""Loggers to which the SDK tells the failures of its exports."""


class Sender:
    """Sender of a run's metrics and spans to the collector at `url`, such as `http://127.0.0.1:4318`.

    `collect` returns the Prometheus families now, and `reader` reads the ranks' steps. `say` shows a line, and is
    called from the thread: for the first of consecutive failures.
    """

    def __init__(
        self,
        url: str,
        run: str,
        version: str,
        collect: Callable[[], Iterable[Family]],
        reader: StepReader,
        say: Callable[[str], None],
    ) -> None:
        self._url = url.rstrip("/")
        self._run = run
        self._version = version
        self._collect = collect
        self._reader = reader
        self._say = say
        self._troubled = False
        self._began = time.time_ns()
        self._steps: list[list[StepRecord]] = []
        self._thread = BackgroundThread("engine-otlp", self._send_on)

    def start(self) -> None:
        """Start the sending thread."""
        self._thread.start()

    def stop(self) -> None:
        """Send the last state; wait at most 2 s for a slow collector."""
        self._thread.stop(STOP_LIMIT)

    def _send_on(self, over: threading.Event) -> None:
        # The import takes a while, and only this thread needs it.
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from .steps import StepSpans

        self._scope = InstrumentationScope("enginerun", self._version)
        self._resource = Resource.create(
            {"service.name": "enginerun", "service.instance.id": self._run, "service.version": self._version}
        )
        self._spans = StepSpans(self._resource, self._run, self._version)
        metrics = OTLPMetricExporter(endpoint=f"{self._url}/v1/metrics", timeout=EXPORT_LIMIT)
        traces = OTLPSpanExporter(endpoint=f"{self._url}/v1/traces", timeout=EXPORT_LIMIT)
        with _hold_back_logs():
            due = time.monotonic()
            while not over.is_set():
                self._add_steps()
                if time.monotonic() >= due:
                    sent = self._export(metrics, traces)
                    if not sent and not self._troubled and not over.is_set():
                        self._say_trouble()
                    self._troubled = not sent
                    due = time.monotonic() + PERIOD
                over.wait(self._reader.choose_pause())
            self._add_steps()
            self._export(metrics, traces)

    def _add_steps(self) -> None:
        records, ranks = self._reader.read()
        self._steps += self._spans.add(records, ranks)

    def _export(self, metrics: OTLPMetricExporter, traces: OTLPSpanExporter) -> bool:
        """Send the metrics of this moment, and the spans of steps since the last export; return whether all went."""
        from opentelemetry.sdk.metrics.export import MetricExportResult
        from opentelemetry.sdk.trace.export import SpanExportResult

        from .series import convert_families

        steps, self._steps = self._steps, []
        spans = self._spans.make_spans(steps, int(SPANS * PERIOD))
        data = convert_families(self._collect(), self._resource, self._scope, self._began, time.time_ns())
        if metrics.export(data) is not MetricExportResult.SUCCESS:
            return False
        return not spans or traces.export(spans) is SpanExportResult.SUCCESS

    def _say_trouble(self) -> None:
        self._say(
            f"metrics: the OpenTelemetry collector at {self._url} takes nothing; is it there, and does it receive "
            "OTLP over HTTP? The job goes on, and so do the tries"
        )


@contextlib.contextmanager
def _hold_back_logs() -> Iterator[None]:
    """Drop what the SDK logs in this thread: its failures are told once, by a line of our own."""
    ident = threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != ident

    loggers = [logging.getLogger(name) for name in LOGGERS]
    for each in loggers:
        each.addFilter(is_of_others)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(is_of_others)
