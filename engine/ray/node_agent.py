"""Agent of a node: the actor that starts it, and the caller's end, which relays its channel over calls of Ray.

Agents therefore need no port of their own, and whoever may call actors may talk to them. The actor holds the agent's
standard input. So the agent ends with the actor, and with the caller, and then ends its workers.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..errors.formatting import format_exception
from ..host.sockets import write_all
from ..launch.hosts.channel import READ_BYTES, Channel
from ..launch.hosts.host_list import HostRanks
from ..launch.hosts.remote import PATIENCE, RemoteHost
from ..launch.process.rank_end import describe_code

THREADS = "OMP_NUM_THREADS"
LOOK = 10.0  # longest time that a call waits for output of the agent, in seconds


class NodeAgentActor:
    """Actor that runs an agent, without CPUs of its own. It runs one `write` and one `read` at a time."""

    def __init__(self) -> None:
        self._agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.launch.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=_build_environment(),
        )
        assert self._agent.stdin and self._agent.stdout and self._agent.stderr
        self._in = self._agent.stdin.fileno()
        self._outs = [self._agent.stdout.fileno(), self._agent.stderr.fileno()]

    @ray.method(concurrency_group="in")
    def write(self, data: bytes) -> None:
        """Write to the agent's standard input. Empty data closes it, at which the agent ends."""
        if not data:
            assert self._agent.stdin is not None
            self._agent.stdin.close()
        write_all(self._in, data)

    @ray.method(concurrency_group="out")
    def read(self) -> tuple[bytes, bytes, int | None]:
        """Return new output on the agent's stdout and stderr, empty after `LOOK`, and at its end its exit code."""
        poll = select.poll()
        for descriptor in self._outs:
            poll.register(descriptor, select.POLLIN)
        found = dict.fromkeys(self._outs, b"")
        for descriptor, _ in poll.poll(1e3 * LOOK):
            found[descriptor] = os.read(descriptor, READ_BYTES)
            if not found[descriptor]:
                self._outs.remove(descriptor)
        assert self._agent.stdout and self._agent.stderr
        code = None if self._outs else self._agent.wait(PATIENCE)
        return found.get(self._agent.stdout.fileno(), b""), found.get(self._agent.stderr.fileno(), b""), code


def _build_environment() -> dict[str, str]:
    """Return the environment of the agent and its workers, which is that of Ray's own workers."""
    path = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))  # includes the `runtime_env`, the caller's directory
    environment = os.environ | {"PYTHONPATH": path}
    if not _has_threads_of_the_user():
        environment.pop(THREADS, None)  # Ray sets it to 1, since this actor has no CPUs; but its workers have some
    return environment


def _has_threads_of_the_user() -> bool:
    """Return whether the user has set a number of threads, for the node or in the `runtime_env`."""
    if THREADS in ray.get_runtime_context().runtime_env.get("env_vars", {}):
        return True
    try:
        node = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:  # a process of another user: keep the value
        return True
    return any(each.startswith(f"{THREADS}=".encode()) for each in node.split(b"\0"))


def _read_answer(answer: object) -> tuple[bytes, bytes, int | None]:
    """Validate the actor's answer: output on stdout and stderr, and exit code. Raises ValueError if it is malformed."""
    match answer:
        case (bytes(out), bytes(err), None | int() as code) if len(out) <= READ_BYTES and len(err) <= READ_BYTES:
            return out, err, code
    raise ValueError("its actor answers what none does; run the same version on all nodes")


class RayAgent(RemoteHost):
    """Caller's end of the agent of a node. Two threads relay data between pipes and the actor, one for each direction.

    `number` is that of the host in the job, `host` is `NODE@ADDRESS`, and `node` is Ray's id of the node.
    """

    def __init__(self, number: int, host: str, node: str) -> None:
        super().__init__(number, HostRanks(host, (), local=False), ["an actor on", host], tied=False)
        self._node = node
        self._actor: Any = None
        self._ended_how = ""
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the actor, which starts the agent."""
        if not ray.is_initialized():
            self.trouble = "ray.shutdown() has been called, so that no actor can be started"
            return
        to_agent, writing = os.pipe2(os.O_CLOEXEC)
        reading, from_agent = os.pipe2(os.O_CLOEXEC)
        self.errors, errors_of_agent = os.pipe2(os.O_CLOEXEC)
        self.carrier, end = os.pipe2(os.O_CLOEXEC)
        self.channel = Channel(reading, writing, greeted=False)
        os.set_blocking(self.errors, False)
        where = NodeAffinitySchedulingStrategy(self._node, soft=False)
        kind = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"in": 1, "out": 1})(NodeAgentActor)
        self._actor = kind.options(scheduling_strategy=where).remote()
        self._threads = [
            threading.Thread(target=self._relay_to_agent, args=(to_agent,), name="engine-ray-in", daemon=True),
            threading.Thread(
                target=self._relay_from_agent, args=(from_agent, errors_of_agent, end), name="engine-ray", daemon=True
            ),
        ]
        for thread in self._threads:
            thread.start()

    def how_it_ended(self) -> str:
        """Return a description of how the agent, or its actor, ended."""
        return self._ended_how or "closed its channel"

    def close(self, patience: float = PATIENCE) -> None:
        """Close the channel, wait for the end of the agent, and kill the actor."""
        self.hang_up()
        fetching = self._threads[-1] if self._threads else None
        if fetching is not None and not self.cut_off:
            fetching.join(min(patience, PATIENCE))
        if self._actor is not None and ray.is_initialized():  # otherwise it has ended with Ray
            ray.kill(self._actor)
        self._actor = None
        super().close(patience)

    def _relay_to_agent(self, to_agent: int) -> None:
        """Relay data to the agent, until the caller closes the pipe or the actor is gone."""
        node_agent = self._actor
        try:
            while (data := os.read(to_agent, READ_BYTES)) and ray.is_initialized():
                ray.get(node_agent.write.remote(data))
            if ray.is_initialized():  # otherwise the call would connect to Ray again
                ray.get(node_agent.write.remote(b""))
        except (RayError, OSError):
            pass  # the other thread records how it ended
        finally:
            os.close(to_agent)

    def _relay_from_agent(self, from_agent: int, errors: int, end: int) -> None:
        """Relay data from the agent, until it has ended, the actor is gone, or the reading end of a pipe is closed."""
        node_agent = self._actor
        try:
            code = None
            self._ended_how = "is gone with ray.shutdown()"
            while code is None and ray.is_initialized():
                out, err, code = _read_answer(ray.get(node_agent.read.remote()))
                for descriptor, data in ((errors, err), (from_agent, out)):
                    write_all(descriptor, data)
            if code is not None:
                self._ended_how = f"ended ({describe_code(code)})"
        except RayError as error:
            self._ended_how = f"is gone: {format_exception(error)}"
        except ValueError as error:
            self._ended_how = f"was given up: {error}"
        except OSError:
            self._ended_how = "was given up"
        finally:
            for descriptor in (errors, from_agent, end):
                os.close(descriptor)
