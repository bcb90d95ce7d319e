"""Groups whose ranks are given in another order than ascending have gloo's results, on one host and on two."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

from .jobs import Ended, run_job

dist = pytest.importorskip("torch.distributed")
SORTS = "sort_ranks" in inspect.signature(dist.new_group).parameters
TAKES_ORDER = pytest.mark.skipif(not SORTS, reason="this torch sorts the ranks of every group")
PROGRAMS = [
    *("gathered_in_order", "reduced_in_order", "exchanged_in_order", "rooted_in_order", "messages_in_order"),
    *("mesh_in_order", "trained_in_order"),
]
MODULE = "tests.c10d.order_programs"


@pytest.fixture(scope="module", params=[3, 4])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def gloo(size: int, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run_job(tmp_path_factory.mktemp("gloo"), MODULE, PROGRAMS, size, "gloo")


@pytest.fixture(scope="module", params=[1, 2])
def own(size: int, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Job of the engine, on one host, and on two that are pretended and have the ranks in turn."""
    return run_job(tmp_path_factory.mktemp("engine"), MODULE, PROGRAMS, size, pretended=request.param)


@TAKES_ORDER
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_gloo(gloo: Ended, own: Ended, name: str) -> None:
    for rank, (expected, found) in enumerate(zip(gloo.returned[name], own.returned[name], strict=True)):
        assert isinstance(expected, list) and expected, f"gloo, rank {rank}: {expected!r}"
        assert isinstance(found, list), f"rank {rank}: {found!r}"
        assert len(found) == len(expected)
        for first, second in zip(expected, found, strict=True):
            np.testing.assert_array_equal(second, first, err_msg=f"rank {rank}")


@TAKES_ORDER
def test_ranks_end_cleanly(own: Ended) -> None:
    assert own.codes == [0] * len(own.codes), "\n".join(own.outputs)
    assert not [line for text in own.outputs for line in text.splitlines() if "ERROR" in line or "Traceback" in line]


@pytest.mark.parametrize("pretended", [1, 2])
def test_groups_are_split_in_the_given_order(tmp_path: Path, size: int, pretended: int) -> None:
    ended = run_job(tmp_path, MODULE, ["split_in_order"], size, pretended=pretended)
    assert ended.codes == [0] * size, "\n".join(ended.outputs)
    turned = [value for rank in reversed(range(size)) for value in (100.0 * rank, 100.0 * rank + 1)]
    for rank, (first, *second) in enumerate(ended.returned["split_in_order"]):
        assert first.tolist() == turned
        expected = [[0.0, 1.0, 100.0 * (size - 1), 100.0 * (size - 1) + 1]] if rank in (0, size - 1) else []
        assert [each.tolist() for each in second] == expected
