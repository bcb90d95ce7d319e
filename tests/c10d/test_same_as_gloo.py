"""Training on the backend 'engine', whose parameters are those of gloo: to the bit where sums have two terms."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from ..netns import Hosts, need_hosts
from .jobs import Ended, run_job

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(500)  # two jobs, one after the other
ROUNDING = 1e-5  # largest difference of an element where ranks' terms are added in another order
HALF_ROUNDING = {"halved", "half", "wrapped_hook"}  # parts of the names of programs that sum 16-bit floats


def _find_programs(module: str) -> list[str]:
    """Return the names of a module's programs, without the import of torch."""
    source = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    functions = [each for each in source.body if isinstance(each, ast.FunctionDef)]
    return [f"{module}.{each.name}" for each in functions if [arg.arg for arg in each.args.args] == ["rank", "size"]]


TRAINING = _find_programs("data_parallel_programs") + _find_programs("sharded_programs")
COMPILED = _find_programs("compiled_programs")
ON_HOSTS = [
    f"data_parallel_programs.{name}"
    for name in ("small_buckets", "waiting_hook", "low_rank_hook", "uneven_samples_and_parts", "optimizer_in_parts")
] + [
    f"sharded_programs.{name}"
    for name in (
        *("sharded", "sharded_on_a_grid", "sharded_and_tensor_parallel", "old_full_shard", "tensor_parallel"),
        *("resumed", "pipeline_one_way", "pipeline_both_ways", "pipeline_with_loops"),
    )
]
Pair = tuple[Ended, Ended]


def _run_both(directory: Path, names: list[str], size: int) -> Pair:
    """Run a job on gloo, and one on the engine."""
    ended = []
    for backend in ("gloo", "engine"):
        place = directory / backend
        place.mkdir()
        ended.append(run_job(place, "tests.c10d", names, size, backend, {"PYTHONWARNINGS": "ignore"}))
    return ended[0], ended[1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _run_both(tmp_path_factory.mktemp("pair"), TRAINING, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _run_both(tmp_path_factory.mktemp("four"), TRAINING, 4)


@pytest.fixture(scope="module")
def hosted(four: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Gloo's job on one host, and one of the engine with two ranks on each of two hosts."""
    need_hosts()
    with Hosts(2) as hosts:
        directory = tmp_path_factory.mktemp("hosts")
        return four[0], run_job(directory, "tests.c10d", ON_HOSTS, 4, env={"PYTHONWARNINGS": "ignore"}, hosts=hosts)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _run_both(tmp_path_factory.mktemp("compiled"), COMPILED, 2)


def _compare(jobs: Pair, name: str, rounding: float = 0.0) -> None:
    """Compare what each rank has returned on both backends."""
    gloo, own = (job.returned[name] for job in jobs)
    for rank, (expected, found) in enumerate(zip(gloo, own, strict=True)):
        assert isinstance(expected, list) and expected, f"gloo, rank {rank}: {expected!r}"
        assert isinstance(found, list), f"rank {rank}: {found!r}"
        assert [each.shape for each in found] == [each.shape for each in expected]
        for first, second in zip(expected, found, strict=True):
            assert np.isfinite(first).all()
            np.testing.assert_allclose(second, first, rtol=rounding, atol=rounding, err_msg=f"rank {rank}")


@pytest.mark.parametrize("name", TRAINING)
def test_parameters_of_two_ranks_are_equal(pair: Pair, name: str) -> None:
    _compare(pair, name)


def test_ranks_end_without_errors(pair: Pair) -> None:
    for job in pair:
        assert job.codes == [0, 0], "\n".join(job.outputs)
    lines = [line for text in pair[1].outputs for line in text.splitlines()]
    assert not [line for line in lines if "ERROR" in line or "Traceback" in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_parameters_of_four_ranks_differ_by_rounding(four: Pair, name: str) -> None:
    half = any(part in name for part in HALF_ROUNDING)
    _compare(four, name, 2e-3 if half else ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_HOSTS)
def test_parameters_of_two_ranks_on_each_of_two_hosts(hosted: Pair, name: str) -> None:
    _compare(hosted, name, ROUNDING)
    assert hosted[1].codes == [0] * 4, "\n".join(hosted[1].outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_programs_of_two_ranks_are_equal(compiled: Pair, name: str) -> None:
    _compare(compiled, name)
