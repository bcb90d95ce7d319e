"""A receiver of OTLP over HTTP for tests: it decodes by the official protocol classes, and may be slow or broken."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Receiver:
    """Receiver of metrics and spans; `status` is the answer to every one of them, and `mute` answers none.

    `GET /asked` is answered with the number of requests so far, for programs that wait for one.
    """

    def __init__(self, status: int = 200, mute: bool = False) -> None:
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.traces: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.asked = 0
        self.status = status
        self.release = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.asked += 1
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if mute:
                    receiver.release.wait(100)
                    return
                receiver.headers.append(dict(self.headers))
                answer = receiver.take(self.path, body, self.headers.get("Content-Encoding", ""))
                self.answer(receiver.status, "application/x-protobuf", answer)

            def do_GET(self) -> None:
                assert self.path == "/asked", self.path
                self.answer(200, "text/plain", str(receiver.asked).encode())

            def answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, body: bytes, encoding: str) -> bytes:
        """Decode a request, and return the answer."""
        body = gzip.decompress(body) if encoding == "gzip" else body
        if path == "/v1/metrics":
            self.metrics.append(ExportMetricsServiceRequest.FromString(body))
            return ExportMetricsServiceResponse().SerializeToString()
        assert path == "/v1/traces", path
        self.traces.append(ExportTraceServiceRequest.FromString(body))
        return ExportTraceServiceResponse().SerializeToString()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    @property
    def spans(self) -> list[Any]:
        """All spans that have come."""
        return [
            span
            for request in self.traces
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]


def attributes_of(pairs: Any) -> dict[str, Any]:
    """Attributes as a dictionary."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def series_of(request: ExportMetricsServiceRequest) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Values as the series of Prometheus would have them, by name and labels; a histogram has several."""
    found = {}
    for of_resource in request.resource_metrics:
        for of_scope in of_resource.scope_metrics:
            for metric in of_scope.metrics:
                kind = metric.WhichOneof("data")
                for point in getattr(metric, kind).data_points:
                    labels = tuple(sorted(attributes_of(point.attributes).items()))
                    if kind != "histogram":
                        found[metric.name, labels] = point.as_double if point.HasField("as_double") else point.as_int
                        continue
                    total = 0
                    for bound, count in zip([*point.explicit_bounds, float("inf")], point.bucket_counts, strict=True):
                        total += count
                        found[f"{metric.name}_bucket", (*labels, ("le", repr(bound)))] = total
                    found[f"{metric.name}_count", labels] = point.count
                    found[f"{metric.name}_sum", labels] = point.sum
    return found
