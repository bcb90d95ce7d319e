"""Jobs that tests share: a failure, or the end of a job, fails one test, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest

from ..on_ranks import FAILED, PASSED, Case, Ranks, on_ranks, spare
from ..ranks import RanksFailed
from ..shared_jobs import STARTS, Jobs, SharedJob
from . import shared_job_cases
from .shared_job_cases import ends_the_world, fails_in_parts, fails_on_rank_1, kills_rank_1, never_ends, passes


@pytest.fixture
def share() -> Iterator[Callable[..., SharedJob]]:
    """Make a job of some functions, whose IDs are their positions and names."""
    made: list[SharedJob] = []

    def share(*functions: Any) -> SharedJob:
        cases = {
            f"{at} {each.__name__}": Case(shared_job_cases.__name__, each.__name__, {}, {})
            for at, each in enumerate(functions)
        }
        made.append(SharedJob(Ranks(2), cases))
        return made[-1]

    yield share
    for job in made:
        job.close("the test is over")


@pytest.mark.slow
def test_a_failure_is_told_with_rank_and_traceback_and_the_others_go_on(share: Callable[..., SharedJob]) -> None:
    job = share(passes, fails_on_rank_1, fails_in_parts, passes)
    assert [outcome for outcome, _ in job.outcomes("0 passes", 60)] == [PASSED] * 2
    fine, (outcome, text) = job.outcomes("1 fails_on_rank_1", 60)
    assert fine == (PASSED, "") and outcome == FAILED
    assert "in fails_on_rank_1" in text and text.endswith("AssertionError: this is rank 1\n")
    for outcome, text in job.outcomes("2 fails_in_parts", 60):
        assert outcome == FAILED and "2 of 3 parts failed" in text and "it is 0" in text and "it is 2" in text
    assert [outcome for outcome, _ in job.outcomes("3 passes", 60)] == [PASSED] * 2


@pytest.mark.slow
def test_a_job_that_dies_fails_one_test_and_new_ranks_go_on(share: Callable[..., SharedJob]) -> None:
    job = share(passes, kills_rank_1, passes, passes)
    assert [outcome for outcome, _ in job.outcomes("0 passes", 60)] == [PASSED] * 2
    with pytest.raises(RanksFailed, match=r"(?s)has begun is 1 kills_rank_1.*exit code 137"):
        job.outcomes("1 kills_rank_1", 60)
    for nodeid in ("2 passes", "3 passes"):
        assert [outcome for outcome, _ in job.outcomes(nodeid, 60)] == [PASSED] * 2


@pytest.mark.slow
def test_a_world_that_ends_fails_one_test_and_new_ranks_go_on(share: Callable[..., SharedJob]) -> None:
    job = share(ends_the_world, passes)
    assert FAILED in [outcome for outcome, _ in job.outcomes("0 ends_the_world", 60)]
    assert [outcome for outcome, _ in job.outcomes("1 passes", 60)] == [PASSED] * 2


@pytest.mark.slow
def test_a_test_that_never_ends_is_ended(share: Callable[..., SharedJob]) -> None:
    job = share(passes, never_ends, passes)
    job.outcomes("0 passes", 60)
    with pytest.raises(RanksFailed, match=r"(?s)not within 5.0 s: 1 never_ends is done.*in never_ends"):
        job.outcomes("1 never_ends", 5.0)
    assert [outcome for outcome, _ in job.outcomes("2 passes", 60)] == [PASSED] * 2


@pytest.mark.slow
def test_ranks_that_always_die_are_not_started_for_ever(share: Callable[..., SharedJob]) -> None:
    job = share(*[kills_rank_1] * (STARTS + 2))
    for at in range(STARTS):
        with pytest.raises(RanksFailed, match="exit code 137"):
            job.outcomes(f"{at} kills_rank_1", 60)
    for at in range(STARTS, STARTS + 2):
        with pytest.raises(
            RanksFailed,
            match=f"^the job that this test shares has ended in {STARTS - 1} kills_rank_1, the last of {STARTS}",
        ):
            job.outcomes(f"{at} kills_rank_1", 60)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([], {"1": [], "2": ["slow"], "3": []}),
        ([2], {"2": []}),
        ([1, 2], {"1": [], "2": []}),
    ],
)
def test_a_spare_number_of_ranks_is_slow_unless_it_is_asked_for(
    asked: list[int], expected: dict[str, list[str]]
) -> None:
    metafunc = create_autospec(pytest.Metafunc, instance=True)
    metafunc.definition = Mock(
        **{
            "get_closest_marker.return_value": on_ranks(1, spare(2), 3).mark,
            "iter_markers.return_value": [],
        }
    )
    metafunc.config = Mock(**{"getoption.return_value": asked})
    Jobs().pytest_generate_tests(metafunc)
    (_, sets), _ = metafunc.parametrize.call_args
    assert {each.id: [mark.name for mark in each.marks] for each in sets} == expected
    assert spare(2) == Ranks(2)  # the tests share a job
