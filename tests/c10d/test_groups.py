"""Groups that are split, composed of several backends, or met with a deadline."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import run_job

pytest.importorskip("torch")

from torch._C import _distributed_c10d as c10d

SINCE_2_14 = pytest.mark.skipif(
    not hasattr(c10d._DistributedBackendOptions, "process_group"), reason="torch before 2.14 has no composed groups"
)


def test_groups_of_the_backend_alone(tmp_path: Path) -> None:
    ended = run_job(tmp_path, "tests.c10d.group_programs", ["monitored_barriers", "split_groups", "refused_groups"], 3)
    assert ended.codes == [0] * 3, "\n".join(ended.outputs)
    first, late, last = ended.returned["monitored_barriers"]
    assert late == ""
    assert "waited 0.3 s" in first and "for rank 1:" in first
    assert "for rank 1:" in last
    assert ended.returned["split_groups"] == ended.returned["refused_groups"] == [None] * 3


@SINCE_2_14
@pytest.mark.parametrize("size", [2, 3])
def test_groups_composed_of_two_backends(tmp_path: Path, size: int) -> None:
    ended = run_job(tmp_path, "tests.c10d.group_programs", ["composed_calls"], size, "cpu:engine,cuda:gloo")
    assert ended.codes == [0] * size, "\n".join(ended.outputs)
    assert ended.returned["composed_calls"] == [None] * size


@SINCE_2_14
def test_the_backend_has_all_that_torch_asks_its_python_half_for() -> None:
    from engine.c10d.backend import DeviceBackend

    theirs = c10d.Backend
    asked = [name for name in dir(theirs) if name.startswith(("supports_", "_supports_"))]
    assert asked
    own = {name for each in DeviceBackend.__mro__[: DeviceBackend.__mro__.index(theirs)] for name in vars(each)}
    assert set(asked) - own == set()
