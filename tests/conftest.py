"""What holds for every test."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from engine.metrics import page

from .environments import MPIS, NotToBeHadError, environment_of
from .ranks import ownerless
from .shared_jobs import Jobs, parts, rank, ranks, size
from .time_table import long_tests, time_table

__all__ = ["parts", "rank", "ranks", "size"]

QUICK = ("checks", "unit")
SLOW_FIXTURES = {"wheel"}  # who asks for it waits for a whole build
PLACE = re.compile(
    r"(ENGINE|OMPI|PMIX?|SLURM|MASTER|LOCAL|CROSS|TORCHELASTIC)_|(HOROVOD_)?((LOCAL_|CROSS_)?RANK|(WORLD_)?SIZE)$"
)

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
    parser.addoption("--slow", action="store_true", help="of the tests, those that `make slow` runs, and no others")
    parser.addoption("--only-ranks", type=int, action="append", help="of the tests on ranks, those on so many")


def is_slow(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("slow") or SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ())))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make quick` runs: the parts in one process, and all that ranks share.

    Leave out the slow tests, or with --slow all others; but not where tests are named.
    """
    for item in items:
        if item.path.parent.name in QUICK or item.get_closest_marker("on_ranks"):
            item.add_marker("quick")
    if not any("::" in argument for argument in config.args):
        wanted = config.getoption("--slow")
        config.hook.pytest_deselected(items=[item for item in items if is_slow(item) != wanted])
        items[:] = [item for item in items if is_slow(item) == wanted]


def pytest_configure(config: pytest.Config) -> None:
    """Let tests run on ranks that they share."""
    config.pluginmanager.register(Jobs(), "shared jobs")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say where the time of a whole run went."""
    reports = list(chain.from_iterable(terminalreporter.stats.values()))
    if table := time_table(reports):
        for title, lines in {"time by directory": table, "tests that took long": long_tests(reports)}.items():
            terminalreporter.section(title)
            for line in lines:
                terminalreporter.write_line(line)


def places() -> dict[str, str]:
    """The variables that tell a process which rank it is."""
    return {name: value for name, value in os.environ.items() if PLACE.match(name)}


@pytest.fixture(autouse=True)
def no_test_leaves_a_place() -> Iterator[None]:
    """Else the processes that later tests start take themselves for ranks."""
    before = places()
    yield
    assert places() == before


def pages() -> int:
    """How many pages of counters this process holds."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += f"memfd:{page.NAME}" in os.readlink(f"/proc/self/fd/{name}")
    return count


@pytest.fixture(autouse=True)
def no_test_leaves_a_page() -> Iterator[None]:
    """Else later tests find several, and which is their engine's? A process has one at most, and keeps it."""
    before = pages()
    yield
    assert pages() <= max(before, 1)


@pytest.fixture(scope="module", params=MPIS)
def mpi(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The directory of programs of an environment with an MPI and mpi4py.

    An MPI whose ranks are killed leaves its memory, which is removed at the end.
    """
    memory = Path("/dev/shm")
    before = set(os.listdir(memory))
    try:
        programs = environment_of(request.param).make().parent
    except NotToBeHadError as error:
        print(error)
        pytest.skip(str(error))
    yield programs
    left = [name for name in set(os.listdir(memory)) - before if name.startswith(("mpich_shm_", "sm_segment."))]
    for name in ownerless(set(left)):
        (memory / name).unlink(missing_ok=True)
