"""What `create_settings` of the executors makes: for how long a start may take, and over which network ranks speak."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from .. import readable
from ..forms import LARGEST, Form, Whole, seconds
from ..launch.plan import MOST_RANKS
from ..logs import logger


@dataclass(frozen=True)
class Settings:
    """Settings of a `RayExecutor`.

    Attributes
    ----------
    timeout_s : float
        Seconds in which the ranks have to meet in `engine.init()`: `ENGINE_START_TIMEOUT`.
    placement_group_timeout_s : float
        Seconds in which Ray has to find room for the ranks, and again those in which their processes have to come.
    nics : collection of str
        Network interfaces by which ranks of different hosts reach each other: each host uses the first one that it has.
        None: whichever leads there.
    """

    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    nics: Collection[str] = ()

    def __post_init__(self) -> None:
        for name in ("timeout_s", "placement_group_timeout_s"):
            _check(self, name, seconds())


class Hosts(Protocol):
    """A user's own discovery, as Horovod's `HostDiscovery`."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """The slots of each node, by its address or its host's name."""
        ...


@dataclass(frozen=True)
class ElasticSettings:
    """Settings of an `ElasticRayExecutor`.

    Attributes
    ----------
    min_num_proc : int
        Ranks without which the job waits for more.
    max_num_proc : int or None
        Ranks beyond which none are started; None: as many as there is room for.
    reset_limit : int or None
        Resets after which the next ends the job.
    elastic_timeout : float
        Seconds that the job waits for `min_num_proc` ranks.
    timeout_s : float
        Seconds that a worker has from its start to the function that `engine.elastic.run` has made, and that the
        members of a world have to meet.
    cooldown_range : (float, float) or None
        Seconds for which a node that fails is left alone, at first and at most; None: for good.
    nics : collection of str
        As of `Settings`.
    discovery : Hosts or None
        Says how many slots to use on which nodes; None: Ray's resources do.
    verbose : int
        0: tell nothing but failures; 1: worlds and changes of hosts; 2: each worker.
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
            _check(self, name, seconds())
        for name in ("min_num_proc", "max_num_proc"):
            _check(self, name, Whole(0))
        _check(self, "reset_limit", Whole(0, LARGEST))
        if self.cooldown_range is not None:
            _check(self, "cooldown_range", _two_durations)
        most = self.max_num_proc
        if self.min_num_proc < 1 or (most is not None and most < self.min_num_proc):
            raise ValueError(
                f"min_num_proc is {self.min_num_proc} and max_num_proc {most}: the job needs at least 1 rank, and may "
                "not have fewer at most than at least"
            )
        if most is not None and most > MOST_RANKS:
            raise ValueError(f"max_num_proc is {most}: a job has {MOST_RANKS} ranks at most")


def _check(settings: object, name: str, form: Form) -> None:
    """Hold a setting that is not None against its form. A ValueError says what it is and may be."""
    value = getattr(settings, name)
    try:
        if value is not None:
            object.__setattr__(settings, name, form(value))
    except ValueError as error:
        raise ValueError(f"{name} is {readable.quoted(value)}; expected {error}") from None


def _two_durations(given: object) -> tuple[float, float]:
    """The form of `cooldown_range`."""
    if isinstance(given, tuple | list) and len(given) == 2:
        return seconds()(given[0]), seconds()(given[1])
    raise ValueError("two numbers of seconds")


def read_ranks(name: str, number: object) -> int:
    """Check a number of ranks or hosts that a caller has given. A ValueError says what it is and may be."""
    try:
        return Whole(1, MOST_RANKS)(number)
    except ValueError as error:
        raise ValueError(f"{name} is {readable.quoted(number)}; expected {error}") from None


def _read_count(name: str, number: object) -> int:
    try:
        return Whole(1)(number)
    except ValueError as error:
        raise ValueError(f"{name} is {readable.quoted(number)}: give {error}") from None


def set_aside(cpus: int, use_gpu: bool, gpus: int | None, whose: str) -> dict[str, float]:
    """What Ray sets aside for each rank or slot.

    Parameters
    ----------
    cpus : int
    use_gpu : bool
    gpus : int or None
        None: 1 if `use_gpu` is set.
    whose : str
        `worker` or `slot`: the end of the arguments' names.

    Raises
    ------
    ValueError
        Not whole numbers of at least 1, since no two ranks can share a GPU in NCCL; or GPUs without `use_gpu`.
    """
    cpus = _read_count(f"cpus_per_{whose}", cpus)
    gpus = None if gpus is None else _read_count(f"gpus_per_{whose}", gpus)
    if gpus and not use_gpu:
        raise ValueError(f"gpus_per_{whose} is {gpus} and use_gpu is False: set use_gpu=True")
    return {"CPU": cpus, "GPU": gpus or 1} if use_gpu else {"CPU": cpus}


def interfaces(nics: Collection[str] | None) -> tuple[str, ...]:
    """Names of network interfaces, however they were given."""
    return tuple(nics.split(",") if isinstance(nics, str) else sorted(nics or ()))


def tell_of_ssh(*given: object) -> None:
    """Say that options of ssh have no effect, if any was given."""
    if any(each is not None for each in given):
        logger.warning("ssh_identity_file and ssh_str have no effect: Ray starts the ranks, and no ssh")
