"""A carrier from outside, which one file adds: what large tensors go over between hosts, beside the connections."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
import engine_ext
from engine.errors import CollectiveError, ConfigError, EngineError
from engine.session.carriers import compare_carriers

from .test_hosts import layouts, results
from .thread_world import ThreadWorld, connections

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LARGE = 300_000  # elements
PROGRAM = """
import tests.pretended_hosts
import numpy as np
import engine
from engine.session import runtime

engine.init()
assert (engine.allreduce(np.full(300_000, engine.rank() + 1.0), engine.Sum) == 6).all()
assert runtime.current_engine().messages > 0
engine.shutdown()
engine.init()
assert (engine.allreduce(np.full(300_000, engine.rank() + 1.0), engine.Sum) == 6).all()
print("carried")
"""
FAILING_START = """
import tests.pretended_hosts
import engine

try:
    engine.init()
except Exception as error:
    print(f"<{type(error).__name__}: {error}>", flush=True)
"""
FAILING_SET = """
import tests.pretended_hosts
import numpy as np
import engine
from engine.errors import EngineError

engine.init()
try:
    engine.add_process_set([0, 1])
except EngineError as error:
    print(f"<{error}>", flush=True)
both = engine.add_process_set([0, 1])
if both.included():
    assert (engine.allreduce(np.ones(300_000), engine.Sum, process_set=both) == 2).all()
print("works", flush=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the carrier."""
    library = tmp_path_factory.mktemp("carrier") / "pipe_carrier.so"
    headers = [Path(engine_ext.__file__).parent / "transport", Path(sysconfig.get_path("include"))]
    words = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *(f"-I{each}" for each in headers)]
    subprocess.run([*words, HERE / "pipe_carrier.c", "-o", library], check=True, timeout=120)
    return library


@pytest.fixture(scope="module")
def module(library: Path) -> Any:
    """Import the carrier."""
    loader = ExtensionFileLoader("pipe_carrier", str(library))
    spec = spec_from_loader("pipe_carrier", loader)
    assert spec is not None
    found = module_from_spec(spec)
    loader.exec_module(found)
    return found


@pytest.fixture
def carriers(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[object]]]:
    """Return a function that makes the providers of all ranks, each with a fault."""
    monkeypatch.setenv("PIPES", str(tmp_path))

    def make(size: int, faults: dict[int, str] | None = None) -> list[object]:
        made = []
        for rank in range(size):
            monkeypatch.setenv("FAULT", (faults or {}).get(rank, ""))
            made.append(
                module.open_provider(
                    rank=rank, size=size, generation=len(list(tmp_path.iterdir())), seconds=1.0, other_failed=bool
                )
            )
        return made

    return make


@pytest.mark.sample(5)
@layouts
@pytest.mark.parametrize("fault", ["", "busy", "slow"])
def test_results_have_the_bits_of_connections(hosts: tuple[int, ...], fault: str, carriers: Any) -> None:
    """Holds also if the carrier does not take every message, and if one is sent before `send` returns."""
    size = len(hosts)
    with ThreadWorld(size, hosts) as world:
        expected = world.run(lambda rank: results(rank, size))
        assert all(each.messages == 0 for each in world.engines)
    for settings in (
        {},
        {"fusion_threshold": 0, "chunk_bytes": 1 << 20},
        {"chunk_bytes": 400_001, "sockets_per_lane": 3},
    ):
        providers = carriers(size, dict.fromkeys(range(size), fault))
        with ThreadWorld(size, hosts, carriers=providers, **settings) as world:
            assert world.run(lambda rank: results(rank, size)) == expected
            assert all(each.messages > 10 for each in world.engines)


def test_a_process_set_has_a_channel_of_its_own_or_uses_connections(carriers: Any) -> None:
    """The provider has two channels, of which the second set has none."""
    links = [connections((0, 1), socket.socketpair) for _ in range(2)]

    def work(rank: int) -> list[int]:
        native, messages = engine.session.runtime.current_engine(), []
        for number in range(2):
            mine = links[number][rank] if rank < 2 else {}
            part = native.form((0, 1), 5000 + 10 * number + rank, mine.get("lanes"), mine.get("trunks"))
            for turn in range(5 if part is not None else 0):
                tensor = np.full(LARGE, rank + 1.0)
                part.allreduce(tensor, tensor, f"turn {turn}", engine.Sum, 1.0, 1.0, True).wait()
                assert (tensor == 3).all()
            messages.append(0 if part is None else part.messages)
            assert (engine.allreduce(np.full(LARGE, rank + 1.0), engine.Sum, f"world {number}") == 6).all()
            if part is not None:
                part.close(5.0)
        native.barrier("the end", True).wait()
        return messages

    with ThreadWorld(3, (0, 1, 1), carriers=carriers(3)) as world:
        first, second, outside = world.run(work)
    assert first[0] > 0 and second[0] > 0 and [first[1], second[1], *outside] == [0] * 4


@pytest.mark.parametrize("fault", ["fail", "lie", "refuse"])
def test_a_carrier_that_fails_ends_the_world_and_names_a_rank(fault: str, carriers: Any) -> None:
    """No rank gets a wrong result before."""
    hosts = (0, 1, 2)
    world = ThreadWorld(3, hosts, carriers=carriers(3, {1: fault}))

    def work(rank: int) -> None:
        for turn in range(100):
            assert (engine.allreduce(np.full(LARGE, turn + 1.0), engine.Sum, f"turn {turn}") == 3 * turn + 3).all()

    with pytest.raises(CollectiveError, match=r"the carrier of large tensors .* has failed between it and"):
        world.run(work)
    assert world.end(5.0, patience=20.0)


@pytest.mark.parametrize("fault", ["late", "stand"])
def test_a_rank_that_leaves_before_its_carrier_has_sent_is_a_failure_for_those_who_wait(
    fault: str, carriers: Any
) -> None:
    """A root is done when its part is on the way. It leaves when the carrier has sent that, or the world fails."""
    world = ThreadWorld(3, (0, 1, 2), carriers=carriers(3, {1: fault}))

    def work(rank: int) -> str:
        native = engine.session.runtime.current_engine()
        try:
            engine.broadcast(np.ones(40_000), 1, "the last")
        except CollectiveError as error:
            return str(error)
        native.close(1.0)
        return "left"

    results = world.run(work)
    assert results[1] == "left"
    for rank in (0, 2):
        assert re.search(r"the carrier of large tensors .* has failed between it and", results[rank]), results
    assert world.end(5.0, patience=20.0)


def test_memory_that_a_carrier_still_uses_stays_mapped(carriers: Any) -> None:
    with ThreadWorld(2, (0, 1), carriers=carriers(2, {0: "stuck", 1: "stuck"})) as world:
        world.run(lambda rank: engine.allreduce(np.ones(LARGE), engine.Sum, "once"))


def test_an_engine_that_is_closed_has_no_provider_that_a_forked_child_would_end(carriers: Any) -> None:
    providers = carriers(2)
    alone = [sys.getrefcount(each) for each in providers]
    with ThreadWorld(2, (0, 1), carriers=providers) as world:
        assert [sys.getrefcount(each) for each in providers] > alone
    assert len(world.engines) == 2 and [sys.getrefcount(each) for each in providers] == alone


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (
            "version",
            EngineError,
            "built for version 2 of engine_ext/transport/carrier.h, and this engine has version 1",
        ),
        ("memory", MemoryError, "has no memory for its channel 0"),
        ("raise", OSError, "the pipes are gone"),
        ("half", EngineError, "the carrier lacks a function"),
    ],
)
def test_an_unfit_carrier_is_refused(fault: str, error: type[Exception], text: str, carriers: Any) -> None:
    with pytest.raises(error, match=text):
        ThreadWorld(2, (0, 1), carriers=carriers(2, {0: fault}))


def test_what_is_no_carrier_is_refused() -> None:
    with pytest.raises(TypeError, match="in a capsule that is called 'engine_carrier_provider'"):
        ThreadWorld(2, (0, 1), carriers=[object(), object()])


def test_sums_of_a_carrier_that_has_none_are_refused(carriers: Any) -> None:
    with pytest.raises(EngineError, match="between_hosts=mpi"):
        ThreadWorld(2, (0, 1), carriers=carriers(2), between_hosts="mpi")


def job(lanes: str, *path: Path, program: str = PROGRAM, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the program on three ranks, each as if on a host of its own."""
    places = [os.environ.get("PYTHONPATH"), *map(str, path), str(ROOT)]  # the first has a build with sanitizers
    searched = os.pathsep.join(filter(None, places))
    environment = os.environ | {"PYTHONPATH": searched, "PRETENDED_HOSTS": "3", **variables}
    words = [sys.executable, "-m", "engine.launch", "-np", "3", "--lanes", lanes, sys.executable, "-c", program]
    return subprocess.run(words, cwd="/", env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_a_setting_names_the_carrier(library: Path, tmp_path: Path) -> None:
    """A second world in the same processes uses it, too."""
    done = job("pipe_carrier:open_provider", library.parent, PIPES=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("carried") == 3


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("version", "EngineError: the carrier was built for version 2"),
        ("raise", "OSError: the pipes are gone"),
        ("half", "EngineError: the carrier lacks a function"),
    ],
)
def test_all_ranks_hear_why_one_has_no_carrier(fault: str, cause: str, library: Path, tmp_path: Path) -> None:
    variables = {"PIPES": str(tmp_path), "FAULT": fault, "FAULTY_RANK": "1"}
    done = job("pipe_carrier:open_provider", library.parent, program=FAILING_START, **variables)
    assert done.stdout.count(":<") == 3 and done.stdout.count(f"<{cause}") == 1, done.stdout + done.stderr
    reason = f"rank 1 failed: its carrier (the setting lanes) cannot be opened: {cause}"
    assert done.stdout.count(reason) == 2, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("raise set", "RuntimeError: no queue is left"), ("half set", "EngineError: the carrier lacks a function")],
)
def test_a_process_set_without_a_carrier_is_refused_on_all_ranks_and_another_works(
    fault: str, cause: str, library: Path, tmp_path: Path
) -> None:
    """The provider has no channel for the second set, which uses connections."""
    variables = {"PIPES": str(tmp_path), "FAULT": fault, "FAULTY_RANK": "1"}
    done = job("pipe_carrier:open_provider", library.parent, program=FAILING_SET, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(":<") == 3 and done.stdout.count("works") == 3, done.stdout + done.stderr
    assert done.stdout.count(f"[0, 1] cannot be formed: on rank 1: {cause}") == 3


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("lanes", "text"),
    [
        ("no_such_carrier:open_provider", "names no carrier that can be imported here: No module named"),
        ("math:open_provider", "names no carrier that can be imported here: module 'math' has no attribute"),
        ("math:pi", "pi of math is no function, but 3.14"),
        ("builtins:dict", "in a capsule that is called 'engine_carrier_provider'"),
        ("tcp:", "expected one of tcp, mpi, or module:function"),
    ],
)
def test_a_setting_that_names_no_carrier_is_refused_with_what_to_do(lanes: str, text: str) -> None:
    done = job(lanes)
    assert done.returncode != 0 and text in done.stderr, done.stderr


def test_carriers_that_differ_are_refused() -> None:
    compare_carriers([(2, False)] * 3)
    with pytest.raises(ConfigError, match="ranks 0, 2: none; rank 1: 2 channels, with sums"):
        compare_carriers([None, (2, True), None])
    with pytest.raises(ConfigError, match="rank 1: 3 channels, no sums"):
        compare_carriers([(2, False), (3, False), (2, False)])
