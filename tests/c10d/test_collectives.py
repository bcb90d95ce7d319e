"""Collectives, groups and messages of torch.distributed on the engine, started as torchrun starts ranks."""

from __future__ import annotations

import pytest

from .collective_programs import every_name
from .jobs import Ended, run_job

pytest.importorskip("torch")
PROGRAMS = [*every_name(), "refused_calls", "bucket_that_fails", "deadline_of_one_wait"]


@pytest.fixture(scope="module", params=[2, 3])
def ended_job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    directory = tmp_path_factory.mktemp(f"ranks{request.param}")
    return run_job(directory, "tests.c10d.collective_programs", PROGRAMS, request.param)


@pytest.mark.parametrize("name", every_name())
def test_program(ended_job: Ended, name: str) -> None:
    assert ended_job.returned[name] == [None] * len(ended_job.codes), "\n".join(ended_job.outputs)[-3000:]


def test_ranks_end_cleanly(ended_job: Ended) -> None:
    assert ended_job.codes == [0] * len(ended_job.codes), "\n".join(ended_job.outputs)
    assert not [
        line for text in ended_job.outputs for line in text.splitlines() if "ERROR" in line or "Traceback" in line
    ]


def test_what_one_rank_gets_wrong_is_an_error_of_all(ended_job: Ended) -> None:
    for shape, output, dtype in ended_job.returned["refused_calls"]:
        assert "rank 1 sent allreduce sum float32[4]" in shape
        assert "elements" in output
        assert "float64" in dtype


def test_a_bucket_that_one_rank_gets_wrong_is_an_error_of_every_backward(ended_job: Ended) -> None:
    for text in ended_job.returned["bucket_that_fails"]:
        assert "MismatchError" in text
        assert "rank 1 sent allreduce sum float32[7]" in text


def test_a_wait_has_a_deadline_of_its_own(ended_job: Ended) -> None:
    text, *others = ended_job.returned["deadline_of_one_wait"]
    assert "has not ended within 0.3 s" in text
    assert others == [""] * len(others)
