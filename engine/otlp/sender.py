"""Thread that sends metrics and spans of steps to a collector, and never makes a job wait."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from prometheus_client import Metric as Family

    from .records import StepRecord

PERIOD = 5.0  # seconds between two exports
LOOK = 1.0  # seconds between two collections of steps, which ranks keep for their last 32
EXPORT_LIMIT = 5.0  # seconds in which the collector has to answer
STOP_LIMIT = 2.0  # seconds that the end of a job waits for the last export
SPANS = 100  # spans a second, which take less than 1 % of a processor


class Sender:
    """Sender of a run's metrics and spans to the collector at `url`, such as `http://127.0.0.1:4318`.

    `collect` returns the Prometheus families now, and `read_steps` the steps since its last call, and the number of
    ranks that are up. `say` shows a line, and is called from the thread: for the first of consecutive failures.
    """

    def __init__(
        self,
        url: str,
        run: str,
        version: str,
        collect: Callable[[], Iterable[Family]],
        read_steps: Callable[[], tuple[Sequence[StepRecord], int]],
        say: Callable[[str], None],
    ) -> None:
        self._url = url.rstrip("/")
        self._run = run
        self._version = version
        self._collect = collect
        self._read_steps = read_steps
        self._say = say
        self._troubled = False
        self._began = time.time_ns()
        self._over = threading.Event()
        self._steps: list[list[StepRecord]] = []
        # Started by `start`, woken and joined by `stop`, which waits for it for 2 s.
        self._thread = threading.Thread(target=self._send_on, name="engine-otlp", daemon=True)

    def start(self) -> None:
        """Start the sending thread."""
        self._thread.start()

    def stop(self) -> None:
        """Send the last state; wait at most 2 s for a slow collector."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(STOP_LIMIT)

    def _send_on(self) -> None:
        # The import takes a while, and only this thread needs it.
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from .steps import StepSpans

        _silence_thread(threading.get_ident())
        self._scope = InstrumentationScope("enginerun", self._version)
        self._resource = Resource.create(
            {"service.name": "enginerun", "service.instance.id": self._run, "service.version": self._version}
        )
        self._spans = StepSpans(self._resource, self._run, self._version)
        metrics = OTLPMetricExporter(endpoint=f"{self._url}/v1/metrics", timeout=EXPORT_LIMIT)
        traces = OTLPSpanExporter(endpoint=f"{self._url}/v1/traces", timeout=EXPORT_LIMIT)
        due = time.monotonic()
        while not self._over.is_set():
            self._add_steps()
            if time.monotonic() >= due:
                self._export(metrics, traces)
                due = time.monotonic() + PERIOD
            self._over.wait(LOOK)
        self._add_steps()
        self._export(metrics, traces)

    def _add_steps(self) -> None:
        records, ranks = self._read_steps()
        self._steps += self._spans.add(records, ranks)

    def _export(self, metrics: OTLPMetricExporter, traces: OTLPSpanExporter) -> None:
        """Send the metrics of this moment, and the spans of steps since the last export."""
        from opentelemetry.sdk.metrics.export import MetricExportResult
        from opentelemetry.sdk.trace.export import SpanExportResult

        from .series import convert_families

        steps, self._steps = self._steps, []
        spans = self._spans.make_spans(steps, int(SPANS * PERIOD))
        data = convert_families(self._collect(), self._resource, self._scope, self._began, time.time_ns())
        sent = metrics.export(data) is MetricExportResult.SUCCESS
        if sent and spans:
            sent = traces.export(spans) is SpanExportResult.SUCCESS
        if not sent and not self._troubled and not self._over.is_set():
            self._say(
                f"metrics: the OpenTelemetry collector at {self._url} takes nothing; is it there, and does it receive "
                "OTLP over HTTP? The job goes on, and so do the tries"
            )
        self._troubled = not sent


def _silence_thread(ident: int) -> None:
    """Drop what the SDK logs in this thread: its failures are told once, by a line of our own."""

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != ident

    for name in (
        "opentelemetry.exporter.otlp.proto.http.metric_exporter",
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "opentelemetry.exporter.otlp.common.http",
        "urllib3.connectionpool",
    ):
        logging.getLogger(name).addFilter(is_of_others)
