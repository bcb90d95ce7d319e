"""Service that publishes a run's metrics: an endpoint, a file for file_sd, a textfile, a collector of OpenTelemetry."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ... import __version__
from ...config.config import Config
from ...host import linux
from ..elastic_job import ElasticJob
from ..errors import MetricsError
from ..run_names import clean_name, default_name
from . import files
from .rank_pages import Member

if TYPE_CHECKING:
    from ...otlp.sender import Sender
    from .collector import Exporter


def find_package(name: str) -> bool:
    """Return whether a package is installed, whose parents may be missing."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@dataclass(frozen=True)
class Wanted:
    """Settings of a run's metrics service."""

    run: str  # valid as a label
    port: int | None = None  # port of the endpoint; 0: any free port; None: not set
    address: str = Config.metrics_address
    file_sd: Path | None = None
    textfile: Path | None = None
    otlp: str | None = None  # address of the collector

    @classmethod
    def from_settings(cls, settings: Config, command: Sequence[str]) -> Self:
        """Return the settings of the service for a run of `command`."""
        name = settings.run_name
        return cls(
            run=default_name(command, os.getpid()) if name is None else clean_name(name),
            port=settings.metrics_port,
            address=settings.metrics_address,
            file_sd=settings.metrics_file_sd,
            textfile=settings.metrics_textfile,
            otlp=settings.metrics_otlp,
        )

    @property
    def anything(self) -> bool:
        """True if anything is to be served or written."""
        return not (self.port is None and self.file_sd is None and self.textfile is None and self.otlp is None)


class Service:
    """Metrics service of a run. It listens from construction, and answers from `start` on.

    `file_sd` without a `port` takes any free port. `say` shows a line, and is called from any thread. `elastic` returns
    the state of an elastic job, or None. Raises MetricsError if a requested output is not possible, or
    prometheus_client is not installed.
    """

    def __init__(
        self,
        wanted: Wanted,
        members: Sequence[Member],
        say: Callable[[str], None],
        elastic: Callable[[], ElasticJob | None] = lambda: None,
    ) -> None:
        if find_spec("prometheus_client") is None:
            extra = "metrics" if wanted.otlp is None else "otlp"  # which includes the other
            raise MetricsError(f"metrics need prometheus_client: pip install '.[{extra}]' in the source tree")
        self.news: list[str] = []  # messages that say where metrics are served
        self.warnings: list[str] = []  # deviations from what was requested
        self._wanted = wanted
        self._members = members
        self._say = say
        self._elastic = elastic
        self._over = False
        self._made: Exporter | None = None
        self._making = threading.Lock()
        self._announced: Path | None = None
        self._textfile: files.Textfile | None = None
        if wanted.file_sd is not None:
            self._announced = files.choose_file(wanted.file_sd, wanted.run)
        if wanted.textfile is not None:
            self._textfile = files.Textfile(wanted.textfile, self._encode_metrics, say)
            self.news.append(f"metrics: {wanted.textfile}")
        self._sender: Sender | None = None
        if wanted.otlp is not None:
            self._sender = self._make_sender(wanted.otlp)
            self.news.append(f"metrics: to the OpenTelemetry collector at {wanted.otlp}")
        self._endpoint = None
        if wanted.port is not None or wanted.file_sd is not None:
            from .endpoint import Endpoint

            port = wanted.port or 0
            self._endpoint = Endpoint(
                wanted.address, port, wanted.run, lambda accept: self._get_exporter().encode_metrics(accept)
            )
            if port and self._endpoint.port != port:
                self.warnings.append(f"metrics: port {port} is in use, port {self._endpoint.port} is used instead")
            self.news.append(f"metrics: http://{self._endpoint.target}/metrics")
            self._document = files.describe_endpoint(self._endpoint.target, wanted.run, os.getpid())

    def start(self) -> None:
        """Start to answer, and write the file for file_sd.

        Raises MetricsError if the file cannot be written, or the system allows no further thread.
        """
        if self._announced is not None and self._endpoint is not None:
            try:
                files.replace(self._announced, self._document)
            except OSError as error:
                raise MetricsError(
                    f"cannot write {str(self._announced)!r} for Prometheus's file_sd: {linux.explain_briefly(error)}"
                ) from error
        try:
            if self._endpoint is not None:
                self._endpoint.start()
            if self._textfile is not None:
                self._textfile.start()
            if self._sender is not None:
                self._sender.start()
        except RuntimeError as error:
            raise MetricsError(
                "cannot start a thread that exports metrics; there are too many processes and threads: see "
                "'ulimit -u', and the container's limit (pids.max)"
            ) from error

    def end(self) -> bool:
        """Report from now on that the job has ended; return whether a client has scraped and may come again."""
        self._over = True
        return self._endpoint is not None and self._endpoint.scraped

    def stop(self) -> None:
        """Remove the file for file_sd, stop listening, and write the textfile a last time. Waits for no client."""
        self._over = True
        if self._announced is not None:
            files.remove(self._announced, self._document)
        if self._endpoint is not None:
            self._endpoint.stop()
        if self._textfile is not None:
            self._textfile.stop()
        if self._sender is not None:
            self._sender.stop()

    def remove_files(self) -> None:
        """Remove the file_sd document and the textfile; the guardian process calls it after the launcher was killed."""
        if self._announced is not None:
            files.remove(self._announced, self._document)
        if self._wanted.textfile is not None:
            files.remove(self._wanted.textfile, f'run="{self._wanted.run}"'.encode())

    def _make_sender(self, url: str) -> Sender:
        """Make the sender to a collector. Raises MetricsError if a package is missing."""
        if not find_package("opentelemetry.sdk") or not find_package("opentelemetry.exporter.otlp.proto.http"):
            raise MetricsError(
                "metrics for OpenTelemetry need opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http: "
                "pip install '.[otlp]' in the source tree"
            )
        from ...otlp.sender import Sender
        from .step_records import StepReader

        return Sender(
            url,
            self._wanted.run,
            __version__,
            lambda: self._get_exporter().collect_all(),
            StepReader(self._members),
            self._say,
        )

    def _get_exporter(self) -> Exporter:
        """Return the exporter, created at first use in the calling thread, because its import is slow."""
        with self._making:
            if self._made is None:
                from .collector import Exporter

                self._made = Exporter(self._wanted.run, self._members, self._say, lambda: not self._over, self._elastic)
            return self._made

    def _encode_metrics(self) -> bytes:
        return self._get_exporter().encode_metrics()[0]
