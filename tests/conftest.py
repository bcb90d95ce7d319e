"""Hooks and fixtures that apply to every test."""

import contextlib
import gc
import os
import re
import signal
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings

from engine.metrics import page
from tools.environments import NotToBeHadError, environment_of

from .mpi import MPIS
from .ranks import ownerless
from .shared_jobs import Jobs, parts, rank, ranks, size
from .time_table import long_tests, time_table
from .waiting import SLOWNESS
from .workers import PartScheduling

__all__ = ["parts", "rank", "ranks", "size"]

QUICK = ("checks", "unit")
QUICK_SETS = 1  # of a test's parameters, in `make quick`
SLOW_FIXTURES = {"wheel"}  # a test with this fixture waits for a whole build
PLACE = re.compile(
    r"(ENGINE|OMPI|PMIX?|SLURM|MASTER|LOCAL|CROSS|TORCHELASTIC)_|(HOROVOD_)?((LOCAL_|CROSS_)?RANK|(WORLD_)?SIZE)$"
)

# Tests neither read the tuning results of earlier jobs nor leave theirs to later ones.
os.environ["ENGINE_AUTOTUNE_CACHE"] = "off"

# No deadline for an example: the machine may be slow, and no property test measures speed.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Processes that tests start would inherit signals that this one ignores, because of `nohup` or a background shell. A
# handler is not inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="of the tests, those that `make slow` runs, and no others")
    parser.addoption("--only-ranks", type=int, action="append", help="of the tests on ranks, those on so many")


def is_slow(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("slow") or SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ())))


def group_by_test(items: Iterable[pytest.Item]) -> Iterator[list[pytest.Item]]:
    """Yield the sets of parameters of each test."""
    groups: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        groups.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    yield from groups.values()


def choose_sample(group: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Return as many sets of parameters of a test, spread evenly, up to the last one."""
    if len(group) <= count:
        return group
    return [group[len(group) * (number + 1) // count - 1] for number in range(count)]


def mark_outside_samples(items: list[pytest.Item]) -> None:
    """Mark as slow what is outside the sample of a test's parameters."""
    for group in group_by_test(item for item in items if item.get_closest_marker("sample") and not is_slow(item)):
        (count,) = group[0].get_closest_marker("sample").args  # type: ignore[union-attr]
        chosen = set(map(id, choose_sample(group, count)))
        for item in group:
            if id(item) not in chosen:
                item.add_marker("slow")


def mark_quick(items: list[pytest.Item]) -> None:
    """Mark the tests of `make quick`: a sample of those in one process, and of those on shared ranks; every check."""
    for group in group_by_test(item for item in items if not is_slow(item)):
        directory = group[0].path.parent.name
        if directory in QUICK or group[0].get_closest_marker("on_ranks"):
            for item in group if directory == "checks" else choose_sample(group, QUICK_SETS):
                item.add_marker("quick")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow tests, or with --slow all others, unless tests are named on the command line."""
    mark_outside_samples(items)
    mark_quick(items)
    if not any("::" in argument for argument in config.args):
        wanted = config.getoption("--slow")
        config.hook.pytest_deselected(items=[item for item in items if is_slow(item) != wanted])
        items[:] = [item for item in items if is_slow(item) == wanted]


def pytest_collection_finish() -> None:
    """Leave what was imported out of the garbage collector's rounds, each of which would take seconds of some test."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin that runs tests on shared ranks."""
    config.pluginmanager.register(Jobs(), "shared jobs")


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> object:
    """Scale the time that a test may take, as all deadlines in it are scaled."""
    if SLOWNESS == 1:
        return None
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=settings.timeout * SLOWNESS))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> PartScheduling:
    """Give each worker whole parts of the suite."""
    return PartScheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print where the time of a whole run went."""
    reports = list(chain.from_iterable(terminalreporter.stats.values()))
    if table := time_table(reports):
        for title, lines in {"time by directory": table, "tests that took long": long_tests(reports)}.items():
            terminalreporter.section(title)
            for line in lines:
                terminalreporter.write_line(line)


def places() -> dict[str, str]:
    """Return the environment variables that tell a process its rank."""
    return {name: value for name, value in os.environ.items() if PLACE.match(name)}


@pytest.fixture(autouse=True)
def no_test_leaves_a_place() -> Iterator[None]:
    """Fail a test that leaves a rank's variables behind: later tests' processes would take themselves for ranks."""
    before = places()
    yield
    assert places() == before


def pages() -> int:
    """Return the number of counters pages that this process maps."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += f"memfd:{page.NAME}" in os.readlink(f"/proc/self/fd/{name}")
    return count


@pytest.fixture(autouse=True)
def no_test_leaves_a_page() -> Iterator[None]:
    """Fail a test that leaves a second counters page behind: a process has at most one, and keeps it."""
    before = pages()
    yield
    assert pages() <= max(before, 1)


@pytest.fixture(scope="module", params=MPIS)
def mpi(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return the directory of programs of an environment with an MPI and mpi4py.

    An MPI whose ranks are killed leaves shared memory behind, which is removed at the end.
    """
    memory = Path("/dev/shm")
    before = set(os.listdir(memory))
    try:
        programs = environment_of(request.param).make_ready().parent
    except NotToBeHadError as error:
        print(error)
        pytest.skip(str(error))
    yield programs
    left = [name for name in set(os.listdir(memory)) - before if name.startswith(("mpich_shm_", "sm_segment."))]
    for name in ownerless(set(left)):
        (memory / name).unlink(missing_ok=True)
