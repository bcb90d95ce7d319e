"""What holds for every test."""

import os
import signal
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from .environments import MPIS, NotToBeHadError, environment_of
from .shared_jobs import Jobs, parts, rank, ranks, size
from .time_table import time_table

__all__ = ["parts", "rank", "ranks", "size"]

QUICK = ("checks", "unit")

# What a test finds is not for later jobs, and what earlier ones have found not for tests.
os.environ["ENGINE_AUTOTUNE_CACHE"] = "off"

# An example takes as long as the machine lets it: how fast something is, no drawn test asks.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# What `nohup` or a shell's background has told this process to ignore, all that the tests start would ignore too. A
# handler is not inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--only-ranks", type=int, action="append", help="of the tests on ranks, those on so many")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make quick` runs: the parts in one process, and all that ranks share."""
    for item in items:
        if item.path.parent.name in QUICK or item.get_closest_marker("on_ranks"):
            item.add_marker("quick")


def pytest_configure(config: pytest.Config) -> None:
    """Let tests run on ranks that they share."""
    config.pluginmanager.register(Jobs(), "shared jobs")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say where the time of a whole run went."""
    if table := time_table(chain.from_iterable(terminalreporter.stats.values())):
        terminalreporter.section("time by directory")
        for line in table:
            terminalreporter.write_line(line)


@pytest.fixture(scope="module", params=MPIS)
def mpi(request: pytest.FixtureRequest) -> Path:
    """The directory of programs of an environment with an MPI and mpi4py."""
    try:
        return environment_of(request.param).make().parent
    except NotToBeHadError as error:
        print(error)
        pytest.skip(str(error))
