"""`EngineConfig`: the engine as a backend of Ray Train's trainers, and what surrounds the training function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train.backend import Backend, BackendConfig

from .. import runtime
from ..launch.errors import LaunchError
from .actor import leave, stand, telling_others
from .seating import answers, seat


@contextmanager
def in_training() -> Iterator[None]:
    """Around the training function: its exception ends the world with its text, and its end leaves the world."""
    try:
        with telling_others():
            yield
    finally:
        runtime.shutdown()


@dataclass
class EngineConfig(BackendConfig):
    """Have a `DataParallelTrainer` of Ray Train give its workers places in a world of the engine.

    Attributes
    ----------
    start_timeout : float
        Seconds in which the workers have to meet in `engine.init()`, and in which they have to answer before.
    shutdown_timeout : float
        Seconds for which the end of a group of workers waits for them to leave the world.
    interfaces : str
        Network interfaces by which workers on different hosts reach each other, with commas between them; empty:
        whichever leads there.
    environment : mapping of str to str
        Environment variables of all workers, such as settings of the engine.
    """

    start_timeout: float = 60
    shutdown_timeout: float = 10
    interfaces: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[Backend]:
        """What starts and ends the engine in a group of workers."""
        return EngineBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """What surrounds the training function."""
        return in_training

    def to_dict(self) -> dict[str, Any]:
        """The settings, for Ray's record of the run, without the variables: these may be secret."""
        return {name: value for name, value in asdict(self).items() if name != "environment"}


class EngineBackend(Backend):
    """Tells the workers of a group their places, and has them leave the world at its end."""

    share_cuda_visible_devices = True  # Scripts choose their GPU by the local rank.

    def on_start(self, worker_group: Any, backend_config: EngineConfig) -> None:
        """Tell each worker its place: Ray's rank is the engine's. A group that replaces another meets anew."""
        seconds = backend_config.start_timeout
        try:
            seat(
                worker_group.execute_single_async,
                answers(worker_group.execute_async(stand), seconds, "tell where it runs"),
                seconds,
                {"ENGINE_START_TIMEOUT": str(seconds)},
                backend_config.environment,
                backend_config.interfaces,
                share_gpus=False,  # Ray Train does that itself, before.
            )
        except LaunchError as error:
            if isinstance(error.__cause__, RayActorError):  # A dead worker: for this alone Ray Train tries again.
                raise error.__cause__ from None
            raise

    def on_shutdown(self, worker_group: Any, backend_config: EngineConfig) -> None:
        """Have the workers leave the world. One that is dead or busy is not waited for any longer than is set."""
        left = worker_group.execute_async(leave)
        ray.wait(left, num_returns=len(left), timeout=backend_config.shutdown_timeout)
