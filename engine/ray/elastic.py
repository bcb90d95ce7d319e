"""`ElasticRayExecutor`: a job on a Ray cluster whose ranks may come and go, with Horovod's signatures.

The driver (`engine.launch.driver`) runs in the caller's process. On each node, an actor runs one agent
(`node_agent`). Workers are processes of agents. They are started one after the other in slots for which Ray has
reserved resources (`slots`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import cloudpickle

from ..compat.modules import is_installed
from ..config.config import Config
from ..config.forms import make_duration_form
from ..config.setting import read_variable
from ..elastic.places import Slot
from ..host import private_files
from ..launch.cli.elastic_options import Elastic
from ..launch.cli.options import Options
from ..launch.driver import Driver, JobSetup
from ..launch.elastic.job_watch import Watch
from ..launch.elastic.policy import ElasticPolicy
from ..launch.errors import JobError, LaunchError
from ..launch.hosts import remote_files
from ..launch.hosts.reach import Reach
from ..launch.hosts.remote import RemoteHost
from ..launch.process import leftovers
from ..launch.process.console import Console
from ..launch.process.plan import MOST_RANKS, Job
from ..launch.process.spawn import find_port
from ..launch.report.elastic_report import Result
from ..runner.function import rank_command
from ..text.readable import format_ranks, plain_line
from . import placement, rank_assignment, ray_logger
from .node_agent import RayAgent
from .settings import ElasticSettings, Hosts, parse_interfaces, set_aside, tell_of_ssh
from .slots import ClusterSlots

T = TypeVar("T")
Callback = Callable[[Any], Any]

SETTLE = 5.0  # longest wait for slots before the first world is planned, in seconds
GRACE = 5.0  # seconds that workers have to end when the job is stopped


class ElasticRayExecutor:
    """Ranks on a Ray cluster that come and go with its nodes.

    Parameters
    ----------
    settings : ElasticSettings
        Result of `create_settings`.
    use_gpu : bool
    cpus_per_slot : int
    gpus_per_slot : int, optional
        1 if `use_gpu` is set.
    env_vars : mapping of str to str, optional
        Environment variables of all workers, such as settings of the engine.
    override_discovery : bool
        Whether Ray's resources decide where workers may run, instead of the settings' `discovery`.

    Raises
    ------
    ValueError
        GPUs were requested without `use_gpu`; a discovery is missing that shall not be overridden; or numbers are below
        1, or parts of a CPU or GPU.

    Examples
    --------
    >>> executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_np=2, max_np=4))
    >>> executor.start()
    >>> losses = executor.run(train)  # train() calls what engine.elastic.run has made; losses are by rank
    >>> executor.shutdown()
    """

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        if not override_discovery and settings.discovery is None:
            raise ValueError("override_discovery is False and the settings have no discovery: give create_settings one")
        self.settings = settings
        self._per_slot = set_aside(cpus_per_slot, use_gpu, gpus_per_slot, "slot")
        self._variables = {name: str(value) for name, value in (env_vars or {}).items()}
        self._hosts = None if override_discovery else settings.discovery
        self._more: dict[str, str] = {}
        self._slots: ClusterSlots | None = None
        self._running: socket.socket | None = None
        self._idle = threading.Event()
        self._idle.set()

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 60,
        ssh_identity_file: str | None = None,
        nics: Collection[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        *,
        min_workers: int | None = None,
        max_workers: int | None = None,
        cooldown_range: tuple[float, float] | None = None,
        discovery: Hosts | None = None,
        verbose: int = 1,
        ssh_str: str | None = None,
    ) -> ElasticSettings:
        """Create the settings of an executor.

        Parameters
        ----------
        min_num_proc, min_np, min_workers : int
            Minimum number of ranks; with fewer, the job waits. Give one of the three.
        max_num_proc, max_np, max_workers : int, optional
            Maximum number of ranks; by default as many as there is room for.
        ssh_identity_file, ssh_str
            Ignored with a warning: Ray starts the ranks without ssh.
        reset_limit, elastic_timeout, timeout_s, nics, cooldown_range, discovery, verbose
            Same as in `ElasticSettings`.
        """
        tell_of_ssh(ssh_identity_file, ssh_str)
        least = next((each for each in (min_np, min_workers) if each is not None), min_num_proc)
        most = next((each for each in (max_np, max_workers) if each is not None), max_num_proc)
        names = parse_interfaces(nics)
        return ElasticSettings(
            least, most, reset_limit, elastic_timeout, timeout_s, cooldown_range, names, discovery, int(verbose)
        )

    @property
    def num_workers(self) -> int:
        """Number of workers that there are slots for."""
        return 0 if self._slots is None else sum(self._slots.found.values())

    def start(self, extra_env_vars: Mapping[str, str] | None = None) -> None:
        """Request slots from Ray, and wait briefly for those that there is room for; others may come later.

        Parameters
        ----------
        extra_env_vars : mapping of str to str, optional
            Environment variables of all workers, in addition to `env_vars`.

        Raises
        ------
        LaunchError
            The executor has started already.
        """
        if self._slots is not None:
            raise LaunchError("this ElasticRayExecutor has started already; call shutdown() first")
        self._more = {name: str(value) for name, value in (extra_env_vars or {}).items()}
        settings = self.settings
        most = settings.max_num_proc or MOST_RANKS
        bounded = settings.max_num_proc is not None
        placement.connect()
        self._slots = ClusterSlots(self._per_slot, settings.min_num_proc, most, bounded, self._hosts)
        try:
            self._slots.open()
            self._slots.wait_until_settled(SETTLE)
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        worker_fn: Callable[..., T],
        callbacks: Sequence[Callback] | None = None,
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[T]:
        """Call `worker_fn(*args, **kwargs)` on workers until it has returned on all ranks of a world.

        Parameters
        ----------
        worker_fn : callable
            Function that creates its model and state, and calls a function that `engine.elastic.run` or its like has
            wrapped. A worker that comes later calls it from the beginning.
        callbacks : sequence of callable, optional
            Called in this thread with each value that rank 0 gives to `engine.ray.ray_logger.log`. An exception of a
            callback ends the job, and is raised here.
        args, kwargs : sequence, mapping, optional
            The same on every worker.

        Returns
        -------
        list
            Return values of `worker_fn`, by rank of the last world.

        Raises
        ------
        JobError
            The training is not complete. The text ends with the first cause; for a worker, with the end of its stderr.
        LaunchError
            The executor has not been started or runs already, or no agent can start workers.
        """
        if self._slots is None:
            raise LaunchError("this ElasticRayExecutor has no slots: call start() first")
        if self._running is not None:
            raise LaunchError("this ElasticRayExecutor runs a function already")
        call = cloudpickle.dumps((worker_fn, tuple(args or ()), dict(kwargs or {})))
        self._running, wakeup = socket.socketpair()
        self._idle.clear()
        try:
            wakeup.setblocking(False)
            variables = self._variables | self._more
            return _Run(self.settings, self._slots, call, variables, list(callbacks or ()), wakeup).run()
        finally:
            running, self._running = self._running, None
            running.close()
            wakeup.close()
            self._idle.set()

    def shutdown(self) -> None:
        """Stop a function that still runs, and give all slots back; a second call does nothing."""
        if (running := self._running) is not None:
            with contextlib.suppress(OSError):  # it may just have ended
                running.send(bytes([signal.SIGTERM]))
            self._idle.wait(2 * GRACE + SETTLE)
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()


class _CallbackError(Exception):
    """Failure of a callback of the user."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _Run:
    """One call of a function, and the `ClusterBackend` of its driver."""

    def __init__(
        self,
        settings: ElasticSettings,
        slots: ClusterSlots,
        call: bytes,
        variables: Mapping[str, str],
        callbacks: Sequence[Callback],
        wakeup: socket.socket,
    ) -> None:
        self.discovery = _News(slots)
        self._settings, self._slots = settings, slots
        self._call = pickle.dumps(([], "", call))  # in the form that `engine.runner.rank` takes
        self._variables = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, **variables}
        self._callbacks = callbacks
        self._wakeup = wakeup
        self._out = Console(1)
        self._err = Console(2, beside=self._out)
        self._directory = Path()

    def make_agent(self, number: int, host: str) -> RemoteHost:
        """Implement `ClusterBackend.make_agent`."""
        return RayAgent(number, host, self._slots.get_node(host))

    def list_variables(self, slot: Slot) -> dict[str, str]:
        """Implement `ClusterBackend.list_variables`: GPUs of the node's slots, a worker's own at its slot's number."""
        gpus = rank_assignment.join_visible_gpus(self._slots.list_gpus(slot.host))
        return {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}

    def take_logged_value(self, value: str) -> None:
        """Implement `ClusterBackend.take_logged_value`."""
        try:
            for callback in self._callbacks:
                callback(ray_logger.decode_logged(value))
        except Exception as error:  # otherwise it would look like an error in a message of the agent
            raise _CallbackError(error) from error

    def run(self) -> list[Any]:
        """Run the call to its end, and clean up."""
        with self._in_directory() as keep:
            options = self._build_options()
            assert options.elastic is not None
            job = Job(
                size=options.size,
                name=f"ray-{secrets.token_hex(8)}",
                secret=secrets.token_hex(32),
                port=find_port(),
                directory=self._directory,
                settings={"ENGINE_START_TIMEOUT": str(self._settings.timeout_s)},
                horovod=options.horovod,
                torchrun=False,
            )
            chosen = read_variable(self._variables, "ENGINE_STALL_LIMIT", make_duration_form())
            stall = Config.stall_limit if chosen is None else chosen
            limits = options.elastic.make_limits(self._settings.timeout_s, stall, GRACE)
            consoles = (self._out, self._err)
            setup = JobSetup(
                options, job, consoles, (), self._variables, self._wakeup, limits.start_timeout, self._write_line
            )
            watch = Watch(options.elastic, (), lambda job: None)
            driver = Driver(setup, lambda driver: ElasticPolicy(driver, limits, watch, self))
            try:
                with driver:
                    driver.start()
                    result = driver.run()
                    assert isinstance(result, Result)
                    return self._collect_results(result, driver.policy.members, keep)
            except _CallbackError as failed:
                raise failed.error from None
            finally:
                self._out.close()
                self._err.close()

    def _build_options(self) -> Options:
        settings = self._settings
        least, most = settings.min_num_proc, settings.max_num_proc or MOST_RANKS
        size = max(least, min(most, sum(self._slots.found.values())))
        elastic = Elastic(
            *(size, least, most, 1, (), (), 1, settings.elastic_timeout, settings.reset_limit),
            *(settings.cooldown_range, None),
        )
        return Options(
            size=size,
            command=tuple(rank_command(self._call)),
            directory=None,
            settings={},
            binding=False,
            cpus_per_rank=int(self._slots.per_slot["CPU"]),
            grace=GRACE,
            timestamps=False,
            verbose=settings.verbose > 1,
            quiet=not settings.verbose,
            summary=False,
            horovod=is_installed(),
            torchrun=False,
            ignored=(),
            enclosed=self._call,
            reach=Reach(python=("python",), directory=".", interface=",".join(settings.nics) or None),
            elastic=elastic,
        )

    def _collect_results(self, result: Result, members: Sequence[int], keep: list[bool]) -> list[Any]:
        """Return the results of the function, or raise why there are none."""
        if not result.good:
            keep.append(True)
            raise JobError("\n".join(["the elastic job has failed", *self._describe_lack(members), *result.lines]))
        paths = [self._directory / f"rank.{number}" / leftovers.RESULT for number in members]
        lacking = [rank for rank, path in enumerate(paths) if not path.exists()]
        if lacking:
            keep.append(True)
            raise JobError(
                f"the training is complete, but {format_ranks(lacking)} ended before the function returned, or its "
                f"result was lost with its node; what they wrote is in {self._directory}",
                lacking[0],
            )
        return [pickle.loads(path.read_bytes()) for path in paths]

    def _describe_lack(self, members: Sequence[int]) -> list[str]:
        """Describe the requested room, if it was never found."""
        if members or sum(self._slots.found.values()) >= self._settings.min_num_proc:
            return []
        request = placement.Request(self._settings.min_num_proc, self._slots.per_slot)
        return [
            placement.describe_lack(
                request, self._settings.elastic_timeout, ray.nodes(), ray.available_resources(), "elastic_timeout"
            )
        ]

    @contextlib.contextmanager
    def _in_directory(self) -> Iterator[list[bool]]:
        """Provide a directory for the job's files; it is kept only if the caller appends to the yielded list."""
        leftovers.clear_old(Path(tempfile.gettempdir()))
        self._directory = Path(tempfile.mkdtemp(prefix=leftovers.PREFIX))
        lock = leftovers.lock(self._directory)
        keep: list[bool] = []
        try:
            private_files.write(self._directory / remote_files.ENCLOSED, self._call)
            yield keep
        finally:
            (self._directory / remote_files.ENCLOSED).unlink(missing_ok=True)
            os.close(lock)
            if not keep:
                shutil.rmtree(self._directory, ignore_errors=True)

    def _write_line(self, line: str) -> None:
        self._err.write(f"engine.ray: {plain_line(line)}\n".encode())


class _News:
    """Slots as a discovery of the driver: reports them only when they have changed since its last query."""

    def __init__(self, slots: ClusterSlots) -> None:
        self._slots = slots
        self._told: dict[str, int] | None = None

    def poll_hosts(self, now: float) -> Mapping[str, int] | None:
        """Implement `Discovery.poll_hosts`."""
        found = self._slots.found
        if found == self._told:
            return None
        self._told = found
        return found

    def close(self) -> None:
        """Do nothing: the slots belong to the executor."""
