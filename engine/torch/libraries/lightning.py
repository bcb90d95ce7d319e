"""Strategy for Lightning, with which the engine reduces gradients instead of DistributedDataParallel."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from ...config.forms import MOST_PORTS, Whole
from ...config.setting import read
from ...errors import EngineError
from ...frameworks.optimizer import Distributed
from ...session import topology
from .world import broadcast_model, export_place, reduce_gradients_of

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def lightning_strategy(package: str | None = None, **distributed_options: Any) -> Any:
    """Make the strategy for `Trainer(strategy=...)`, with `devices=1`. Collective; call `init()` before.

    Parameters
    ----------
    package : str, optional
        Name by which the program imports Lightning: `"lightning.pytorch"` or `"pytorch_lightning"`. Needed only
        if it has imported both.
    **distributed_options
        Options of `DistributedOptimizer`, such as `compression`. Accumulation is the Trainer's
        `accumulate_grad_batches`.

    Returns
    -------
    Strategy

    Raises
    ------
    EngineError
        Both packages are imported and `package` is not given; or the job is elastic.
    """
    export_place()
    imported = [name for name in PACKAGES if name in sys.modules]
    if package is None and len(imported) > 1:
        raise EngineError(
            "both lightning.pytorch and pytorch_lightning are imported, and take no strategy of each other: give "
            f"lightning_strategy() the one whose Trainer you use, such as package={PACKAGES[0]!r}"
        )
    return _strategy_of(import_module(package or (imported or [PACKAGES[0]])[0]))(distributed_options)


@cache
def _strategy_of(package: ModuleType) -> Any:
    """Make the class of the strategy for one of the packages."""
    name = package.__name__
    environments = import_module(f"{name}.plugins.environments")
    environment = _environment_of(environments.LightningEnvironment)

    class EngineStrategy(_Gradients, import_module(f"{name}.strategies").DDPStrategy):  # type: ignore[misc]
        """Lightning's strategy with one process for each device, with gradients reduced by the engine."""

        def __init__(self, distributed_options: dict[str, Any]) -> None:
            super().__init__(cluster_environment=environment())
            self._distributed_options = distributed_options

    return EngineStrategy


def _environment_of(base: Any) -> Any:
    """Make the class that tells one of the packages this process's rank."""

    class EngineEnvironment(base):
        """Cluster environment of Lightning with the ranks of the engine's world."""

        creates_processes_externally = True
        main_address = property(lambda _: os.environ["MASTER_ADDR"])
        main_port = property(lambda _: read(Whole(1, MOST_PORTS), os.environ["MASTER_PORT"], "MASTER_PORT"))

        def world_size(self) -> int:
            return topology.size()

        def set_world_size(self, size: int) -> None:
            """Do nothing; the engine determines the size."""

        def global_rank(self) -> int:
            return topology.rank()

        def set_global_rank(self, rank: int) -> None:
            """Do nothing; the engine determines the rank."""

        def local_rank(self) -> int:
            return topology.local_rank()

        def node_rank(self) -> int:
            return topology.cross_rank()

        def teardown(self) -> None:
            """Do nothing; the launcher's variables stay."""

    return EngineEnvironment


class _Gradients:
    """Methods of a strategy that let the engine reduce gradients."""

    model: Any
    optimizers: list[Any]
    parallel_devices: list[torch.device]
    _distributed_options: dict[str, Any]

    @property
    def root_device(self) -> torch.device:
        """Device of this rank: the CPU, or the GPU with its local rank, modulo the number of GPUs."""
        device = self.parallel_devices[0]
        if device.type != "cuda":
            return device
        return torch.device("cuda", topology.local_rank() % torch.cuda.device_count())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of Lightning's sampler for this rank's share of the data."""
        return {"num_replicas": topology.size(), "rank": topology.rank()}

    def configure_ddp(self) -> None:
        """Broadcast the parameters and buffers of rank 0; the model stays unwrapped."""
        broadcast_model(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        """Set up optimizers like Lightning's method, and wrap them in `DistributedOptimizer`."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        known = {parameter: name for name, parameter in self.model.named_parameters()}
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Distributed):
                reduce_gradients_of(optimizer, known, self._distributed_options)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank inside the block."""
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    def teardown(self) -> None:
        """Tear down like Lightning's method, and unwrap the optimizers; a later `fit` wraps them again."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, Distributed):
                optimizer.unwrap()
        super().teardown()  # type: ignore[misc]
