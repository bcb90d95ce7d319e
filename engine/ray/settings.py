"""Settings that `create_settings` of the executors returns: timeouts, sizes and network interfaces."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..config.forms import LARGEST, Form, Whole, make_duration_form
from ..config.setting import read
from ..launch.process.plan import MOST_RANKS
from ..text.logs import logger


@dataclass(frozen=True)
class Settings:
    """Settings of a `RayExecutor`.

    Attributes
    ----------
    timeout_s : float
        Seconds in which the ranks must meet in `engine.init()`: `ENGINE_START_TIMEOUT`.
    placement_group_timeout_s : float
        Seconds in which Ray must find room for the ranks, and again those in which their processes must start.
    nics : collection of str
        Network interfaces by which ranks of different hosts reach each other; each host uses the first one that it has.
        Empty: the one with the route to the other host.
    """

    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    nics: Collection[str] = ()

    def __post_init__(self) -> None:
        for name in ("timeout_s", "placement_group_timeout_s"):
            _convert_field(self, name, make_duration_form())


class Hosts(Protocol):
    """Discovery of the user, with the interface of Horovod's `HostDiscovery`."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Return the number of slots of each node, by its address or host name."""
        ...


@dataclass(frozen=True)
class ElasticSettings:
    """Settings of an `ElasticRayExecutor`.

    Attributes
    ----------
    min_num_proc : int
        Minimum number of ranks; with fewer, the job waits.
    max_num_proc : int or None
        Maximum number of ranks; None: as many as there is room for.
    reset_limit : int or None
        Number of resets that are allowed; the next one ends the job.
    elastic_timeout : float
        Seconds that the job waits for `min_num_proc` ranks.
    timeout_s : float
        Seconds from a worker's start to its call of the function that `engine.elastic.run` has wrapped. Also the
        seconds in which the members of a world must meet.
    cooldown_range : (float, float) or None
        Seconds for which a failed node is not used: initial value and maximum; None: forever.
    nics : collection of str
        Same as in `Settings`.
    discovery : Hosts or None
        Discovery of how many slots to use on which nodes; None: Ray's resources decide.
    verbose : int
        0: report only failures; 1: also worlds and changes of hosts; 2: also each worker.
    """

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600
    timeout_s: float = 60
    cooldown_range: tuple[float, float] | None = None
    nics: Collection[str] = ()
    discovery: Hosts | None = None
    verbose: int = 1

    def __post_init__(self) -> None:
        for name in ("elastic_timeout", "timeout_s"):
            _convert_field(self, name, make_duration_form())
        for name in ("min_num_proc", "max_num_proc"):
            _convert_field(self, name, Whole(0))
        _convert_field(self, "reset_limit", Whole(0, LARGEST))
        if self.cooldown_range is not None:
            _convert_field(self, "cooldown_range", _two_durations)
        most = self.max_num_proc
        if self.min_num_proc < 1 or (most is not None and most < self.min_num_proc):
            raise ValueError(
                f"min_num_proc is {self.min_num_proc} and max_num_proc {most}: the job needs at least 1 rank, and may "
                "not have fewer at most than at least"
            )
        if most is not None and most > MOST_RANKS:
            raise ValueError(f"max_num_proc is {most}: a job has {MOST_RANKS} ranks at most")


def _convert_field(settings: object, name: str, form: Form) -> None:
    """Validate and convert a setting that is not None. Raises ValueError with its value and what is allowed."""
    if (value := getattr(settings, name)) is not None:
        object.__setattr__(settings, name, read(form, value, name))


def _two_durations(given: object) -> tuple[float, float]:
    """Parse `cooldown_range`."""
    if isinstance(given, tuple | list) and len(given) == 2:
        return make_duration_form()(given[0]), make_duration_form()(given[1])
    raise ValueError("two numbers of seconds")


def set_aside(cpus: int, use_gpu: bool, gpus: int | None, whose: str) -> dict[str, float]:
    """Return the resources that Ray reserves for each rank or slot.

    `whose`, `worker` or `slot`, is the suffix of the arguments' names. `gpus` None means 1 if `use_gpu` is set. Raises
    ValueError for GPUs without `use_gpu`, and for numbers that are not whole or below 1, since no two ranks can share a
    GPU in NCCL.
    """
    cpus = read(Whole(1), cpus, f"cpus_per_{whose}")
    gpus = None if gpus is None else read(Whole(1), gpus, f"gpus_per_{whose}")
    if gpus and not use_gpu:
        raise ValueError(f"gpus_per_{whose} is {gpus} and use_gpu is False: set use_gpu=True")
    return {"CPU": cpus, "GPU": gpus or 1} if use_gpu else {"CPU": cpus}


def parse_interfaces(nics: Collection[str] | None) -> tuple[str, ...]:
    """Return names of network interfaces from a collection, or from a text with commas."""
    return tuple(nics.split(",") if isinstance(nics, str) else sorted(nics or ()))


def tell_of_ssh(*given: object) -> None:
    """Warn that options of ssh have no effect, if any was given."""
    if any(each is not None for each in given):
        logger.warning("ssh_identity_file and ssh_str have no effect: Ray starts the ranks, and no ssh")
