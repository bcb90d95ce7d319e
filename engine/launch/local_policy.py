"""Policy of a fixed job whose ranks are all on the launcher's host.

It has no agent: the launcher itself starts the ranks, and its driver's event loop is that of their supervisor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..host import processes
from .driver import Driver, Handler, JobPolicy
from .hosts.remote import RemoteHost
from .process import spawn
from .process.cpu_binding import Allotment
from .process.guardian import Guardian
from .process.output import Stream
from .process.plan import plan
from .process.spawn import RankProcess
from .process.supervisor import Outcome, Supervisor


class LocalPolicy(JobPolicy):
    """Policy of a job whose ranks are this process's children.

    The guardian is this process's, made before any rank is started. `program` is the path of the program that ranks
    run, and `descriptors` their soft and hard limit of open files.
    """

    local = True

    def __init__(
        self, driver: Driver, guardian: Guardian, program: str, allotment: Allotment, descriptors: tuple[int, int]
    ) -> None:
        super().__init__(driver)
        setup = self._setup
        self._program, self._allotment, self._descriptors = program, allotment, descriptors
        self._supervisor = Supervisor(driver.loop, guardian, setup.wakeup, setup.options.grace, setup.say)
        self._ranks: dict[int, RankProcess] = {}
        self._outcome: Outcome | None = None
        self.handlers: Mapping[str, Handler] = {}

    @property
    def agents(self) -> Collection[RemoteHost]:
        """None: this process starts the ranks."""
        return ()

    def start(self) -> None:
        """Start all ranks."""
        setup, driver = self._setup, self._driver
        if not setup.options.quiet:
            setup.say(self._allotment.summary)
        processes.call_prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
        for rank_plan in plan(setup.job, self._allotment, setup.environment):
            rank = spawn.start(rank_plan, setup.options.command, self._program, self._descriptors)
            self._supervisor.add(rank)
            self._ranks[rank.number] = rank
            displays = driver.output.open(rank.number)
            for display, pipe in ((displays["stdout"], rank.stdout), (displays["stderr"], rank.stderr)):
                self._supervisor.listen(Stream(rank.number, pipe, display.write_output, display.flush))
            setup.note_start(rank.number)
            driver.say_started(f"rank {rank.number}", rank.number, rank.pid, rank_plan.cpus)
        driver.start_output()  # all ranks are started, so threads may begin

    def advance_job(self) -> float | None:
        """Go through the stages of the ending, if it has begun; return None once all ranks have ended."""
        return self._supervisor.advance_stages()

    def prepare_finish(self) -> None:
        """End what the ranks have left, and read their last output."""
        self._outcome = self._supervisor.finish()

    def is_running(self, number: int) -> bool:
        """Return whether a rank has been started and has not ended."""
        return number in self._ranks and self._ranks[number].is_running()

    def make_outcome(self) -> Outcome:
        """Return the ends of all ranks."""
        assert self._outcome is not None
        return self._outcome

    def close(self) -> None:
        """Kill the ranks, unless they have ended."""
        if self._outcome is None:
            self._supervisor.kill()
            self._outcome = self._supervisor.run()
        processes.call_prctl(processes.PR_SET_CHILD_SUBREAPER, 0)
