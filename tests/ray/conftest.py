"""A Ray cluster on this machine for all tests here: three nodes with, in all, four CPUs and two pretended GPUs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..waiting import MARK, marked, until

MEMORY = 80 * 2**20  # bytes of each node's object store: Ray's minimum
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",  # workers are started as they are needed
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # by default 15: tests that run beside these would take nearly all time
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    """Cluster to which this process is connected; afterwards none of its processes is left."""
    ray = pytest.importorskip("ray", reason="needs ray: pip install 'ray[train]'")
    from ray.cluster_utils import Cluster

    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in {**SETTINGS, MARK: mark}.items():
            patch.setenv(name, value)
        nodes = Cluster()
        try:
            for resources in ({"num_cpus": 2, "num_gpus": 2}, {"num_cpus": 1}, {"num_cpus": 1}):
                nodes.add_node(wait=False, object_store_memory=MEMORY, include_dashboard=False, **resources)
            nodes.wait_for_nodes(90)
            ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
            assert marked(mark)
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()
    until(lambda: not marked(mark), "no process of the cluster is left", 30, pause=0.1)


@pytest.fixture
def add_node(cluster: Any) -> Iterator[Callable[[], Any]]:
    """Add a node with two CPUs, which is removed at the end of the test if it still exists."""
    added: list[Any] = []

    def add() -> Any:
        added.append(cluster.add_node(num_cpus=2, object_store_memory=MEMORY, include_dashboard=False))
        return added[-1]

    yield add
    for each in added:
        if each in cluster.list_all_nodes():
            cluster.remove_node(each, allow_graceful=False)
