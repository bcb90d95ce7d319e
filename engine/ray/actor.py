"""Code in the process of a rank on Ray: reports its location, takes its place in the job, and calls user functions."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from .. import compat
from ..config.hub_address import HubAddress
from ..host import machine, network
from ..launch.hosts.reach import network_of
from ..launch.process.cpu_binding import Allotment
from ..launch.process.plan import Crew, Job, plan
from ..session import runtime
from ..session.monitor import summarize_exception

T = TypeVar("T")

_BACKLOG = 128  # leaders of other hosts that may connect while rank 0 still imports

_door: socket.socket | None = None  # socket on which rank 0 listens for the leaders of other hosts


@dataclass(frozen=True)
class Standing:
    """Location of a process, as it has determined itself.

    `machine` is equal exactly for processes that can share memory. A name or an address would not do: all nodes of a
    local cluster have the same, and pods of one machine do not share memory.
    """

    machine: tuple[str, int, int]  # boot id, network namespace and user
    node: str  # Ray's id of the node
    address: str  # IP address of the node
    pid: int
    gpus: tuple[str, ...] = ()  # GPUs that Ray has assigned to this process

    def __str__(self) -> str:
        return f"node {self.address} ({self.node[:8]}), pid {self.pid}"


def locate_process() -> Standing:
    """Determine where this process runs."""
    context = ray.get_runtime_context()
    return Standing(
        (machine.read_boot_id(), os.stat("/proc/self/ns/net").st_ino, os.getuid()),
        context.get_node_id(),
        ray.util.get_node_ip_address(),
        os.getpid(),
        tuple(context.get_accelerator_ids().get("GPU", ())),
    )


def open_door(several_hosts: bool, interfaces: str) -> tuple[str, int, str]:
    """Listen on rank 0 for the other hosts, if there are any.

    `interfaces` are comma-separated names; empty: no choice. Returns the address of this host; a port of it that is
    free now, for PyTorch; and the hub in the form of `ENGINE_HUB`, or an empty text.
    """
    global _door
    address = network_of(interfaces)[1] if interfaces else ray.util.get_node_ip_address()
    port = machine.free_port("")
    if not several_hosts:
        return address, port, ""
    bound = address if interfaces or network.is_own_name(address) else None  # None: the address is a translated one
    _door = network.listen(bound, 0, _BACKLOG)
    return address, port, str(HubAddress(address, network.address_of(_door.getsockname()).port))


def take_place(job: Job, crew: Crew | None, rank: int, variables: Mapping[str, str]) -> None:
    """Write the place of this process into its environment, where `engine.init()` finds it.

    The job's secret comes as an argument of an actor's method, since the dashboard shows a `runtime_env`. `crew` has
    the ranks of this host; None: all. The user's `variables` take precedence over all others.
    """
    global _door
    if job.interface and crew is not None:
        variables = {"ENGINE_INTERFACE": network_of(job.interface)[0], **variables}
    if job.horovod:
        compat.install()
    unbound = Allotment(threads=None, slices=None, summary="")  # Ray counts CPUs, but binds no process to them.
    (environment,) = [each.environment for each in plan(job, unbound, os.environ, crew) if each.rank == rank]
    del environment["ENGINE_OUTPUT_DIR"]  # No launcher collects files here; users who want them set the directory.
    if rank == 0 and _door is not None:
        environment["ENGINE_HUB_FD"] = str(_door.detach())  # The engine closes it.
        _door = None
    environment |= variables
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def leave_world() -> None:
    """Leave the world, if this process is in one, within `shutdown_timeout`."""
    runtime.shutdown()


@contextmanager
def telling_others() -> Iterator[None]:
    """End the world with the text of an exception, since the other ranks would wait for this one.

    Elsewhere the exception hook does this. On Ray, exceptions are caught before it, and the process lives on.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if runtime.is_initialized():
            runtime.current_engine().abort(summarize_exception(type(error), error, error.__traceback__))
        raise


class RankActor:
    """Actor of `RayExecutor`. Its methods run in the main thread of its process, one after the other."""

    def __init__(self) -> None:
        self._executable: Any = None

    def call_function(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of this module."""
        return function(*args)

    def start(self, made: tuple[Callable[..., Any] | None, Sequence[Any], Mapping[str, Any]]) -> None:
        """Create the object for `execute`."""
        kind, args, kwargs = made
        with telling_others():
            self._executable = None if kind is None else kind(*args, **kwargs)

    def run(self, call: tuple[Callable[..., T], Sequence[Any], Mapping[str, Any]]) -> T:
        """Call the user's function with its arguments."""
        function, args, kwargs = call
        with telling_others():
            _refuse_a_failed_world()
            return function(*args, **kwargs)

    def execute_function(self, function: Callable[[Any], T]) -> T:
        """Call the user's function with the object of this rank."""
        return self.run((function, (self._executable,), {}))


def _refuse_a_failed_world() -> None:
    """Raise why the world has ended, before a call that could only fail because of it."""
    if runtime.is_initialized() and (failure := runtime.current_engine().failure) is not None:
        failure.add_note("The world ended in an earlier call: shutdown() and start() of the executor make a new one.")
        raise failure
