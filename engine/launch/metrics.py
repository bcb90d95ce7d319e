"""A job's metrics in the launcher: it makes a page of counters for each rank, and publishes the counters."""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from ..config.config import Config, service_links
from ..config.setting import variable_name
from ..host import linux
from ..host.signals import ENDING_SIGNALS, read_signals
from ..metrics import page
from ..metrics.elastic_job import Board, ElasticJob
from ..metrics.errors import MetricsError
from ..metrics.export.rank_pages import Member
from ..metrics.export.service import Service, Wanted
from .cli.options import Options
from .errors import LaunchError
from .process.plan import PUBLISHING
from .process.reader_loop import ReaderLoop


class Metrics:
    """Pages of counters of a job's ranks, and their publication. Make it before the ranks; use it in a `with`.

    `chosen` has the settings given by options or the environment, by name. `say` shows a line, and is called from the
    main thread. A `LaunchError` is raised if metrics cannot be published as asked for.
    """

    def __init__(
        self,
        options: Options,
        chosen: Mapping[str, Any],
        environment: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.pages: list[int] = []  # descriptors by rank, open until the end of the `with`; empty if nothing is counted
        self._up: dict[int, Callable[[], bool]] = {}
        self._members: list[Member] = []  # in an elastic job, the slots that have had a worker
        self._elastic = options.elastic is not None
        self._board: Board | None = None
        self._job: ElasticJob | None = None
        self._service: Service | None = None
        self._say = say
        self._notes: deque[str] = deque()  # lines of threads, for the main thread, which alone writes to the console
        self._loop: ReaderLoop | None = None
        self._quiet = options.quiet
        if not self._quiet:
            for name, value in service_links(environment).items():
                say(f"metrics: {name}={value} is set by Kubernetes for a Service of that name, and ignored")
        settings = Config(**chosen)
        wanted = Wanted.from_settings(settings, options.command)
        self._seconds = settings.metrics_linger
        if wanted.port is None and wanted.file_sd is None and variable_name("metrics_address") in options.settings:
            raise LaunchError("--metrics-address: nothing is served there; give --metrics-port as well")
        published = any(variable_name(name) in options.settings and chosen.get(name) is not None for name in PUBLISHING)
        counted = published or chosen.get("metrics", True)
        if wanted.anything and not counted:
            say("metrics: nothing is served, because ENGINE_METRICS=0 says that nothing is counted")
        # Environment variables for the ranks
        self.settings = {variable_name("metrics"): str(int(counted)), variable_name("run_name"): wanted.run}
        try:
            if counted:
                self.pages.extend(page.make() for _ in range(options.most))
                self._board = Board() if self._elastic else None
            if counted and wanted.anything:
                if options.elastic is None:
                    self._members.extend(map(self._make_member, range(options.size)))
                self._service = Service(wanted, self._members, self._add_note, lambda: self._job)
        except OSError as error:
            self.close()
            raise LaunchError(
                f"there is no memory for counters: {linux.explain_refusal('memfd_create', error)}"
            ) from error
        except MetricsError as error:
            self.close()
            raise LaunchError(str(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.close()

    @property
    def counters(self) -> list[str]:
        """Path of each rank's page."""
        return [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self.pages]

    def add(self, number: int, up: Callable[[], bool]) -> None:
        """Show a rank, or the worker of a slot, that has just been started as up while `up` returns True.

        A second call for a slot replaces `up`.
        """
        if self._elastic and number not in self._up and number < len(self.pages):
            self._members.append(self._make_member(number))
        self._up[number] = up

    def tell(self, job: ElasticJob) -> None:
        """Publish the state of an elastic job, for scrapers and `enginerun top`."""
        self._job = job
        if self._board is not None:
            self._board.write(job)

    def start(self, loop: ReaderLoop) -> None:
        """Start serving. This starts threads, so all ranks must have been started before.

        Lines of threads are shown in the event loop. A `LaunchError` is raised if a file cannot be written.
        """
        if self._service is None:
            return
        self._loop = loop
        try:
            self._service.start()
        except MetricsError as error:
            raise LaunchError(str(error)) from error
        for line in [*self._service.warnings, *([] if self._quiet else self._service.news)]:
            self._say(line)

    def wait_for_scrape(self, wakeup: socket.socket) -> None:
        """Keep serving for a while after a failure, so that scrapers see it and alerts can report it.

        A signal to end the job, which `wakeup` delivers, ends the wait.
        """
        if self._service is None or not self._service.end() or not self._seconds:
            return
        self._say(f"metrics: the failure can be scraped for {self._seconds:g} s; a signal ends that")
        poll, end = select.poll(), time.monotonic() + self._seconds
        poll.register(wakeup, select.POLLIN)
        while (left := end - time.monotonic()) > 0:
            if poll.poll(1e3 * min(left, 60.0)) and set(read_signals(wakeup)) & set(ENDING_SIGNALS):
                return

    def stop(self) -> None:
        """Stop serving, and remove the files that announce the service."""
        if self._service is not None:
            self._service.stop()
            self._service = None
        self._show_notes()

    def remove_files(self) -> None:
        """Remove the files that announce the service; called in the guardian if the launcher was killed."""
        if self._service is not None:
            self._service.remove_files()

    def close(self) -> None:
        """Close the pages."""
        for descriptor in self.pages:
            os.close(descriptor)
        self.pages.clear()
        if self._board is not None:
            self._board.close()
            self._board = None

    def _make_member(self, number: int) -> Member:
        """Return a rank's entry for the exporter: its number, its page, and whether it is up."""
        descriptor = self.pages[number]

        def is_up(_: object) -> bool:
            return number in self._up and self._up[number]()

        return Member(number, lambda: descriptor, is_up)

    def _add_note(self, line: str) -> None:
        """Keep a line of a thread, and have it shown."""
        self._notes.append(line)
        if self._loop is not None:
            self._loop.wake(self._show_notes)

    def _show_notes(self) -> None:
        while self._notes:
            self._say(self._notes.popleft())
