"""Measurement of a job's progress on one rank, from its page of counters."""

from __future__ import annotations

import os
import time

from ..metrics import page
from ..metrics.export.rank_pages import page_of
from ..metrics.page import PageError
from ..metrics.report.rates import JobReading, Page, Rates, compute_rates, find_straggler
from ..session import runtime
from ..session.session import EngineSession
from ..text.logs import logger


class ProgressMeter:
    """Meter of throughput and exposed communication since its last reading.

    Call `count_step` after each optimizer step, and `read_figures` when the figures are wanted. Both are cheap:
    `count_step` adds two numbers, and `read_figures` reads a page of memory for each rank of this host.

    Examples
    --------
    >>> meter = engine.trackers.ProgressMeter()
    >>> for batch in loader:
    ...     train(batch)
    ...     meter.count_step(len(batch))
    >>> meter.read_figures()["engine/examples_per_second"]
    """

    def __init__(self) -> None:
        self._steps = 0
        self._examples = 0
        self._counted = True
        self._paths: dict[int, str | None] = {}
        self._session: EngineSession | None = None
        self._began = time.monotonic()
        self._before = self._read_pages()

    def count_step(self, examples: int | None = None) -> None:
        """Count a step of this rank.

        Parameters
        ----------
        examples : int, optional
            Number of examples that this rank has used in it. Without it there is no `examples_per_second`.
        """
        self._steps += 1
        self._examples += examples or 0

    def read_figures(self) -> dict[str, float]:
        """Return the figures since the last call, or since the meter was made.

        Returns
        -------
        dict of str to float
            - `engine/steps_per_second`: steps of this rank.
            - `engine/examples_per_second`: of all ranks, as if each had used as many examples as this one.
            - `engine/step_ms`: mean time of a step.
            - `engine/exposed_ms`: mean time of a step in which the program waited while a collective was executed.
            - `engine/exposed_share`: the same as a share of the time, from 0 to 1.
            - `engine/blocked_share`: share of the time in which the program waited in the engine.
            - `engine/late_rank`: rank of this host for which the others wait, if one stands out.
            - `engine/late_ms`: mean time by which it submits its tensors after the first rank.

            The last five are missing where nothing is counted, and the last two where no rank stands out or ranks are
            on several hosts.

        Raises
        ------
        NotInitializedError
            Before `engine.init`, and after `engine.shutdown`.
        """
        after = self._read_pages()
        seconds = max(after.time - self._began, 1e-9)
        figures = {"engine/steps_per_second": self._steps / seconds}
        if self._steps:
            figures["engine/step_ms"] = 1e3 * seconds / self._steps
        if self._examples:
            figures["engine/examples_per_second"] = self._examples * runtime.current_session().world.size / seconds
        rates = compute_rates(self._before, after)
        own = rates.get(runtime.current_session().world.rank)
        if own is not None:
            figures |= self._describe_communication(own, seconds)
            figures |= self._find_late_rank(rates)
        self._before, self._began, self._steps, self._examples = after, after.time, 0, 0
        return figures

    def _describe_communication(self, own: Rates, seconds: float) -> dict[str, float]:
        figures = {"engine/exposed_share": own.exposed, "engine/blocked_share": own.blocked}
        if self._steps:
            figures["engine/exposed_ms"] = 1e3 * own.exposed * seconds / self._steps
        return figures

    def _find_late_rank(self, rates: dict[int, Rates]) -> dict[str, float]:
        if len(rates) < runtime.current_session().world.size:
            return {}  # whoever is late may be on another host
        lags = {rank: each.lag for rank, each in rates.items() if each.lag is not None}
        late = find_straggler(lags, rates[min(rates)].step)
        return {} if late is None else {"engine/late_rank": float(late), "engine/late_ms": 1e3 * lags[late]}

    def _read_pages(self) -> JobReading:
        """Read the pages of this host's ranks; of a new world, find them first."""
        session = runtime.current_session()
        if session is not self._session:
            self._session = session
            self._paths = {rank: page_of(pid) for rank, pid in session.pids.items()}
            if self._paths.get(session.world.rank) is None:
                self._paths[session.world.rank] = page_of(os.getpid())
        pages: dict[int, Page] = {}
        for rank, path in self._paths.items():
            if path is not None:
                try:
                    pages[rank] = page.read(path)
                except PageError as error:  # it has ended
                    pages[rank] = error
        if session.world.rank not in pages and self._counted:
            self._counted = False
            logger.warning(
                "trackers: communication is not known, because nothing is counted: start the job by enginerun, or call "
                "engine.init(metrics=True)"
            )
        return JobReading(time.monotonic(), pages)
