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
    """Context of the training function: that of Ray Train for PyTorch, and `in_training`."""
    with TorchConfigContextManager(), in_training():
        yield


@dataclass
class EngineTorchConfig(TorchConfig):
    """Config of a `TorchTrainer` whose workers form a world of the engine, beside PyTorch's process group.

    Attributes
    ----------
    backend, init_method, timeout_s
        Options of the process group, as in `TorchConfig`.
    engine : EngineConfig
    """

    engine: EngineConfig = field(default_factory=EngineConfig)

    @property
    def backend_cls(self) -> type[Backend]:
        """Backend that starts and ends both the engine and the process group in a group of workers."""
        return EngineTorchBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """Context manager that surrounds the training function."""
        return in_torch_training

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for Ray's record of the run."""
        return {**super().to_dict(), "engine": self.engine.to_dict()}


class EngineTorchBackend(_TorchBackend):
    """Ray Train's PyTorch backend, started after the engine's, so that its variables stay, such as LOCAL_RANK."""

    def on_start(self, worker_group: Any, backend_config: EngineTorchConfig) -> None:
        """Assign each worker its place, and form the process group."""
        EngineBackend().on_start(worker_group, backend_config.engine)
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: EngineTorchConfig) -> None:
        """Make the workers leave the world, and end the process group."""
        EngineBackend().on_shutdown(worker_group, backend_config.engine)
        super().on_shutdown(worker_group, backend_config)
