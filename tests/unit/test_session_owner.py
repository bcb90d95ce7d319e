"""The owner of a process's session keeps its state right when the end of a session raises."""

from __future__ import annotations

import multiprocessing
import os
from types import SimpleNamespace
from typing import Any

import pytest

from engine.collectives.process_sets import ProcessSet
from engine.config import config
from engine.config.world import World, find_place
from engine.errors import EngineError, NotInitializedError
from engine.metrics.names import STATES
from engine.session import arguments, child_processes
from engine.session.owner import SessionOwner
from engine.session.registry import ProcessSetRegistry
from engine.session.session import RankState

RANK_1 = {"ENGINE_RANK": "1", "ENGINE_SIZE": "2", "ENGINE_LOCAL_RANK": "1", "ENGINE_LOCAL_SIZE": "2", "ENGINE_JOB": "a"}
ALONE = World(0, 1, 0, 1, "job", None, "a test")


class BrokenSession:
    """Session whose end raises."""

    def __init__(self) -> None:
        self.pid, self.generation, self.searching, self.given = os.getpid(), 7, False, {}
        self.tuning = self.metrics_service = None
        self.settings, self.world, self.state, self.lost = config.Config(), ALONE, RankState(), []
        self.sets = SimpleNamespace(added=[], engines={})
        self.fields: dict[str, Any] = {}
        self.engine = SimpleNamespace(failure=OSError("lost"), tell=self.fields.update, knobs=lambda: {"version": 0})

    def close(self, seconds: float) -> None:
        raise OSError("an end is broken")


@pytest.fixture
def owner() -> SessionOwner:
    made: Any = SessionOwner()
    made.session = BrokenSession()
    return made


def test_shutdown_whose_end_raises_still_reports_the_failed_world(owner, monkeypatch) -> None:
    monkeypatch.setenv(child_processes.HOLDER, "1 0 1 job")
    fields = owner.session.fields
    with pytest.raises(OSError, match="an end is broken"):
        owner.shutdown()
    assert fields == {"state": STATES.index("failed")}
    assert child_processes.HOLDER not in os.environ
    with pytest.raises(NotInitializedError):
        owner.current_session()
    owner.shutdown()


def test_leaving_a_world_whose_end_raises_waits_for_the_next_one(owner) -> None:
    """Regression: the process forgot its state, as if `init` had not been called."""
    with pytest.raises(OSError, match="an end is broken"):
        owner.leave_world()
    assert owner.session is None and owner.pending.state.last == 7
    owner.shutdown()
    assert owner.pending is None


def test_forked_child_has_a_lock_of_its_own(owner) -> None:
    owner.session.engine.forked = lambda: owner.session.fields.update(copied=True)
    with owner.hold_alone("init"):
        owner.reset_in_child()
        assert owner.session.fields == {"copied": True}
        with owner.hold_alone("another"):
            pass


def test_registry_ends_all_sets_although_one_raises() -> None:
    """Regression: sets after one that raised were not closed."""
    closed: list[int] = []

    class Engine:
        """Engine of a set."""

        numbers, size, rank, idle = (0,), 1, 0, True

        def __init__(self, number: int) -> None:
            self.number = number

        def pending(self) -> list[Any]:
            return []

        def close(self, seconds: float) -> None:
            closed.append(self.number)
            if self.number == 1:
                raise OSError("an end is broken")

    fake: Any = Engine
    registry = ProcessSetRegistry(fake(0), 1.0, fake(0))
    sets = [ProcessSet([0]) for _ in range(3)]
    for number, process_set in enumerate(sets, 1):
        process_set._enter(number, fake(0), (0,), fake(number))
        registry._sets[number] = process_set
    with pytest.raises(OSError, match="an end is broken"):
        registry.close(0.0)
    assert closed == [1, 2, 3] and registry.engines == {}
    assert all(each.process_set_id is None for each in sets)


@pytest.fixture
def as_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK_1.items():
        monkeypatch.setenv(name, value)


def test_init_does_nothing_in_a_worker_that_imports_the_program(as_rank_1, monkeypatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    monkeypatch.setattr(SessionOwner, "_start", None)
    importing = SessionOwner()
    importing.init({}, None)
    assert importing.session is None and (importing.imported.rank, importing.imported.size) == (1, 2)


def test_init_is_refused_in_a_process_that_its_rank_has_started(as_rank_1, monkeypatch) -> None:
    job = find_place(config.read_environment()).job
    monkeypatch.setenv(child_processes.HOLDER, f"{os.getppid()} 0 2 {job}")
    child_processes.expect_own_rank()  # another rank has started this one
    monkeypatch.setenv(child_processes.HOLDER, f"{os.getppid()} 1 2 {job}")
    with pytest.raises(EngineError, match="which is rank 1 of 2 itself"):
        child_processes.expect_own_rank()


def test_a_process_set_that_no_world_has_is_refused_before_the_ranks_meet(as_rank_1, monkeypatch) -> None:
    told: list[Exception] = []
    monkeypatch.setattr(arguments, "tell_failure", lambda world, generation, error: told.append(error))
    with pytest.raises(ValueError, match="has at least one of the ranks 0 to 1") as raised:
        arguments.create_session({}, [ProcessSet([0, 2])], 1)
    assert told == [raised.value]
