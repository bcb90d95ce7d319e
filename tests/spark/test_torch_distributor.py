"""Spark's TorchDistributor starts programs whose backend of torch.distributed is the engine."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")


def sum_of_ones() -> tuple[str, str, list[float]]:
    """Reduce a tensor; the function names no module of the tests, which executors do not have."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("engine")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    told = (dist.get_backend(), type(dist.group.WORLD).__name__, tensor.tolist())
    dist.destroy_process_group()
    return told


@pytest.mark.slow
@pytest.mark.parametrize("local", [True, False], ids=["on the driver", "in tasks"])
def test_two_processes(spark: Any, local: bool) -> None:
    from pyspark.ml.torch.distributor import TorchDistributor

    told = TorchDistributor(num_processes=2, local_mode=local, use_gpu=False).run(sum_of_ones)
    assert told == ("engine", "EngineProcessGroup", [2.0, 2.0, 2.0])
