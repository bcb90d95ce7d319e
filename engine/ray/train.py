"""`EngineConfig`: the engine as a backend of Ray Train's trainers, and the context of the training function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train.backend import Backend, BackendConfig

from ..launch.errors import LaunchError
from ..session import runtime
from .actor import leave_world, locate_process, telling_others
from .rank_assignment import assign_ranks, collect_answers


@contextmanager
def in_training() -> Iterator[None]:
    """Context of the training function: an exception ends the world with its text, and its end leaves the world."""
    try:
        with telling_others():
            yield
    finally:
        runtime.shutdown()


@dataclass
class EngineConfig(BackendConfig):
    """Config of a `DataParallelTrainer` of Ray Train whose workers form a world of the engine.

    Attributes
    ----------
    start_timeout : float
        Seconds in which the workers must meet in `engine.init()`. Also the seconds that they have for each answer
        before.
    shutdown_timeout : float
        Longest time that the end of a group of workers waits for them to leave the world, in seconds.
    interfaces : str
        Comma-separated network interfaces by which workers on different hosts reach each other. Empty: the one with the
        route to the other host.
    environment : mapping of str to str
        Environment variables of all workers, such as settings of the engine.
    """

    start_timeout: float = 60
    shutdown_timeout: float = 10
    interfaces: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[Backend]:
        """Backend that starts and ends the engine in a group of workers."""
        return EngineBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """Context manager that surrounds the training function."""
        return in_training

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for Ray's record of the run, without the environment variables, which may be secret."""
        return {name: value for name, value in asdict(self).items() if name != "environment"}


class EngineBackend(Backend):
    """Backend that assigns the workers of a group their places, and makes them leave the world at its end."""

    share_cuda_visible_devices = True  # Scripts choose their GPU by the local rank.

    def on_start(self, worker_group: Any, backend_config: EngineConfig) -> None:
        """Assign each worker its place, with Ray's rank as the engine's. A replacement of a group meets anew."""
        seconds = backend_config.start_timeout
        try:
            assign_ranks(
                worker_group.execute_single_async,
                collect_answers(worker_group.execute_async(locate_process), seconds, "tell where it runs"),
                seconds,
                {"ENGINE_START_TIMEOUT": str(seconds)},
                backend_config.environment,
                backend_config.interfaces,
                share_gpus=False,  # Ray Train has done that itself.
            )
        except LaunchError as error:
            if isinstance(error.__cause__, RayActorError):  # A dead worker: only then does Ray Train retry.
                raise error.__cause__ from None
            raise

    def on_shutdown(self, worker_group: Any, backend_config: EngineConfig) -> None:
        """Make the workers leave the world. A dead or busy one is waited for at most `shutdown_timeout`."""
        left = worker_group.execute_async(leave_world)
        ray.wait(left, num_returns=len(left), timeout=backend_config.shutdown_timeout)
