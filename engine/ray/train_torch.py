"""`EngineTorchConfig`: the engine beside PyTorch's process group, for `TorchTrainer`, which takes no other config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ray.train.backend import Backend
from ray.train.torch import TorchConfig
from ray.train.torch.config import TorchConfigContextManager, _TorchBackend

from .train import EngineBackend, EngineConfig, in_training


@contextmanager
def in_torch_training() -> Iterator[None]:
    """Around the training function: what Ray Train does for PyTorch, and `in_training`."""
    with TorchConfigContextManager(), in_training():
        yield


@dataclass
class EngineTorchConfig(TorchConfig):
    """Have a `TorchTrainer` give its workers places in a world of the engine, beside PyTorch's process group.

    Attributes
    ----------
    backend, init_method, timeout_s
        Of the process group, as of `TorchConfig`.
    engine : EngineConfig
    """

    engine: EngineConfig = field(default_factory=EngineConfig)

    @property
    def backend_cls(self) -> type[Backend]:
        """What starts and ends both in a group of workers."""
        return EngineTorchBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """What surrounds the training function."""
        return in_torch_training

    def to_dict(self) -> dict[str, Any]:
        """The settings, for Ray's record of the run."""
        return {**super().to_dict(), "engine": self.engine.to_dict()}


class EngineTorchBackend(_TorchBackend):
    """Ray Train's backend of PyTorch, after the engine's: its variables, such as LOCAL_RANK, stay as it sets them."""

    def on_start(self, worker_group: Any, backend_config: EngineTorchConfig) -> None:
        """Tell each worker its place, and form the process group."""
        EngineBackend().on_start(worker_group, backend_config.engine)
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: EngineTorchConfig) -> None:
        """Have the workers leave the world, and end the process group."""
        EngineBackend().on_shutdown(worker_group, backend_config.engine)
        super().on_shutdown(worker_group, backend_config)
