"""`RayExecutor`: ranks as actors of a Ray cluster, with the signatures and semantics of Horovod's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..config.forms import Whole
from ..config.setting import read
from ..launch.errors import LaunchError
from ..launch.process.plan import MOST_RANKS
from . import failures, placement
from .actor import RankActor, Standing, leave_world, locate_process
from .elastic import Callback, ElasticRayExecutor
from .rank_assignment import assign_ranks, collect_answers, in_order
from .settings import ElasticSettings, Settings, parse_interfaces, set_aside, tell_of_ssh

T = TypeVar("T")

LEAVING = 2.0  # seconds that idle ranks have to leave their world before their processes end


class RayExecutor:
    """Ranks as actors of a Ray cluster, for a job of fixed size or, with `min_workers`, an elastic one.

    Parameters
    ----------
    settings : Settings
        Result of `create_settings`; None: the defaults.
    num_workers : int, optional
        Number of ranks, wherever the cluster has room for them, close together. Either this or `num_hosts`.
    num_hosts : int, optional
        Number of nodes, each with `num_workers_per_host` ranks.
    num_workers_per_host : int
    cpus_per_worker : int
    use_gpu : bool
    gpus_per_worker : int, optional
        1 if `use_gpu` is set.
    use_current_placement_group : bool
        Whether to put ranks into the placement group that the caller runs in, if any. Ignored with `num_hosts`.
    min_workers, max_workers, reset_limit, cooldown_range, elastic_timeout, override_discovery
        Arguments of an elastic job, instead of `num_workers` and `num_hosts`; `ElasticRayExecutor` runs it and explains
        them. `min_workers` makes the job elastic.

    Raises
    ------
    ValueError
        None or several of `num_workers`, `num_hosts` and `min_workers` were given; numbers are below 1, or parts of a
        CPU or GPU; GPUs were requested without `use_gpu`; or other arguments of elastic jobs were given without
        `min_workers`. The default of an argument counts as not given.

    Examples
    --------
    >>> executor = RayExecutor(RayExecutor.create_settings(timeout_s=30), num_workers=4)
    >>> executor.start()
    >>> losses = executor.run(train, args=(0.1,))  # train() calls engine.init(); losses are by rank
    >>> executor.shutdown()
    """

    def __init__(
        self,
        settings: Settings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int | None = None,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
    ) -> None:
        self.settings = settings or Settings()
        self._elastic: ElasticRayExecutor | None = None
        self._actors: list[Any] = []
        self._standings: list[Standing] = []
        self._room: placement.Room | None = None
        elastic: dict[str, Any] = {
            "max_workers": max_workers,
            "reset_limit": reset_limit,
            "cooldown_range": cooldown_range,
            "elastic_timeout": None if elastic_timeout == ElasticSettings.elastic_timeout else elastic_timeout,
            "override_discovery": None if override_discovery else False,
        }
        if min_workers is not None:
            if num_workers is not None or num_hosts is not None:
                raise ValueError("min_workers makes the job elastic: leave num_workers and num_hosts out")
            if not override_discovery:
                raise ValueError("override_discovery=False: give ElasticRayExecutor settings with a discovery")
            made = ElasticRayExecutor.create_settings(
                min_workers,
                max_workers,
                reset_limit,
                elastic_timeout,
                max(self.settings.timeout_s, ElasticSettings.timeout_s),  # it includes the start of a worker
                nics=self.settings.nics,
                cooldown_range=cast("tuple[float, float] | None", cooldown_range),  # which the settings check
            )
            self._elastic = ElasticRayExecutor(made, use_gpu, cpus_per_worker, gpus_per_worker)
            return
        if given := [name for name, value in elastic.items() if value is not None]:
            raise ValueError(
                f"RayExecutor was given {', '.join(given)} without min_workers: only elastic jobs have these; give "
                "min_workers instead of num_workers and num_hosts, or leave them out"
            )
        if (num_workers is None) == (num_hosts is None):
            raise ValueError(
                "give RayExecutor either num_workers, or num_hosts with num_workers_per_host, or min_workers"
            )
        asked = {"num_workers": num_workers, "num_hosts": num_hosts, "num_workers_per_host": num_workers_per_host}
        numbers = [1 if number is None else read(Whole(1, MOST_RANKS), number, name) for name, number in asked.items()]
        per_rank = set_aside(cpus_per_worker, use_gpu, gpus_per_worker, "worker")
        ranks = num_workers if num_workers is not None else (num_hosts or 1) * numbers[2]
        self._request = placement.Request(ranks, per_rank, num_hosts)
        self._use_current = use_current_placement_group

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Collection[str] | None = None,
    ) -> Settings:
        """Create the settings of an executor.

        Parameters
        ----------
        timeout_s : float
            Seconds in which the ranks must meet in `engine.init()`.
        ssh_identity_file, ssh_str
            Ignored with a warning: Ray starts the ranks without ssh.
        placement_group_timeout_s : float
            Seconds in which Ray must find room for the ranks.
        nics : collection of str, optional
            Network interfaces by which ranks of different hosts reach each other.
        """
        tell_of_ssh(ssh_identity_file, ssh_str)
        return Settings(timeout_s, placement_group_timeout_s, parse_interfaces(nics))

    @property
    def num_workers(self) -> int:
        """Number of ranks that exist or will; in an elastic job, the number that there is room for."""
        return self._request.ranks if self._elastic is None else self._elastic.num_workers

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Find room, start the ranks, and assign each its place.

        Parameters
        ----------
        executable_cls : type, optional
            Class of an object that each rank creates, for `execute` and `execute_single`.
        executable_args, executable_kwargs : sequence, mapping, optional
            Arguments of its constructor.
        extra_env_vars : mapping of str to str, optional
            Environment variables of all ranks, such as settings of the engine.

        Raises
        ------
        LaunchError
            There is no room (also a `TimeoutError`), or a rank does not come; in both cases nothing is left behind. Or
            the executor has started already.
        NotImplementedError
            An `executable_cls` was given in an elastic job.
        """
        if self._elastic is not None:
            if executable_cls is not None:
                raise NotImplementedError("executable_cls: an elastic job has no objects, since workers come and go")
            self._elastic.start(extra_env_vars)
            return
        if self._actors:
            raise LaunchError("this RayExecutor has started already; call shutdown() first")
        seconds = self.settings.placement_group_timeout_s
        placement.connect()
        try:
            self._room = placement.find_room(self._request, seconds, self._use_current)
            actors = [self._start_actor(self._room, bundle) for bundle in self._room.bundles]
            self._actors = actors
            standings = collect_answers(
                [actor.call_function.remote(locate_process) for actor in actors], seconds, "start"
            )
            order = in_order(standings)
            self._actors = [actors[each] for each in order]
            self._standings = [standings[each] for each in order]
            assign_ranks(
                lambda rank, function, *args: self._actors[rank].call_function.remote(function, *args),
                self._standings,
                seconds,
                {"ENGINE_START_TIMEOUT": str(self.settings.timeout_s)},
                {name: str(value) for name, value in (extra_env_vars or {}).items()},
                ",".join(self.settings.nics),
            )
            made = ray.put((executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {})))
            self._collect_results([actor.start.remote(made) for actor in self._actors])
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[T]:
        """Call `fn(*args, **kwargs)` on every rank, and wait for all.

        Parameters
        ----------
        fn : callable
            Function that calls `engine.init()` itself. The engine keeps running between calls, unless `fn` shuts it
            down.
        args, kwargs : sequence, mapping, optional
            The same on every rank.
        callbacks : sequence of callable, optional
            Callbacks of an elastic job, and of no other; see `ElasticRayExecutor.run`.

        Returns
        -------
        list
            Return values of `fn`, by rank.

        Raises
        ------
        Exception
            Exception of the rank that failed first; see `engine.ray.failures.collect_results`. The other ranks do not
            wait for it. No later call finds a world: `shutdown` and `start` make a new one.
        JobError
            The process of a rank ended; the text names the rank, its node, and what Ray knows.
        """
        if self._elastic is not None:
            return self._elastic.run(fn, callbacks, args=args, kwargs=kwargs)
        if callbacks is not None:
            raise NotImplementedError("callbacks: only elastic jobs have them; let fn return its results")
        return self._collect_results(self.run_remote(fn, args, kwargs))

    def run_remote(
        self, fn: Callable[..., T], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[ray.ObjectRef[T]]:
        """Call `fn(*args, **kwargs)` on every rank, and wait for none.

        Returns
        -------
        list of ObjectRef
            References by rank. `ray.get` of them raises the error of the lowest rank that failed, which names the rank
            that failed first.
        """
        actors, call = self._get_actors(), ray.put((fn, tuple(args or ()), dict(kwargs or {})))
        return [actor.run.remote(call) for actor in actors]

    def execute(self, fn: Callable[[Any], T]) -> list[T]:
        """Call `fn` on every rank with its object of `executable_cls`, or None; results and errors as in `run`."""
        actors, function = self._get_actors(), ray.put(fn)
        return self._collect_results([actor.execute_function.remote(function) for actor in actors])

    def execute_single(self, fn: Callable[[Any], T]) -> T:
        """Call `fn` like `execute`, on rank 0 only."""
        return self._collect_results([self._get_actors()[0].execute_function.remote(fn)])[0]

    def shutdown(self) -> None:
        """End all ranks, and give their room back. Idle ranks leave their world before.

        A second call does nothing, nor does one after `ray.shutdown()`, which has ended the ranks already.
        """
        if self._elastic is not None:
            self._elastic.shutdown()
            return
        actors, self._actors, self._standings = self._actors, [], []
        room, self._room = self._room, None
        if not ray.is_initialized():
            return
        try:
            if actors:
                ray.wait(
                    [actor.call_function.remote(leave_world) for actor in actors],
                    num_returns=len(actors),
                    timeout=LEAVING,
                )
        finally:
            for actor in actors:
                ray.kill(actor)
            if room is not None:
                room.give_back()

    def _start_actor(self, room: placement.Room, bundle: int) -> Any:
        need = self._request.per_rank
        strategy = PlacementGroupSchedulingStrategy(room.group, bundle)
        options = {"num_cpus": need["CPU"], "num_gpus": need.get("GPU", 0), "scheduling_strategy": strategy}
        return ray.remote(RankActor).options(**options).remote()

    def _get_actors(self) -> list[Any]:
        if self._elastic is not None:
            raise NotImplementedError("an elastic job has run() alone, since its workers come and go")
        if not self._actors:
            raise LaunchError("this RayExecutor has no ranks: call start() first")
        if not ray.is_initialized():
            raise LaunchError("ray.shutdown() has ended the ranks of this RayExecutor: shutdown() and start() it")
        return self._actors

    def _collect_results(self, refs: Sequence[Any]) -> list[Any]:
        return failures.collect_results(refs, self._standings)
