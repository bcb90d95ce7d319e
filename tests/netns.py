"""Hosts for tests: namespaces of this machine with their own network, processes, host name, IPC and mounts.

    with Hosts(3) as hosts:
        process = hosts.start(1, [sys.executable, "-m", "tests.hosts.program"], env={...}, stdout=PIPE)
        hosts.cut(2)                # the cable of host 2 is pulled: no packet, no RST, no FIN
        hosts.restore(2)

Host k is called `node<k>`, has the address 10.77.0.<k+1> (and fd77::<k+1>) on `eth0`, and a cable from there to a
bridge in a namespace of its own, so that nothing of it is seen on this machine. As on machines that are set up by
hand, each host's own name is 127.0.1.1 in its /etc/hosts, and all have a `docker0` of the same address. What runs in a
host ends with it, at the latest when this process does, however it ends.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from .waiting import until

TOOLS = ("ip", "nsenter", "tc", "unshare")
_KINDS = ("--net", "--uts", "--ipc", "--mount", "--pid")


_SERVE = """
import socket
listener = socket.create_server(({address!r}, 7777))
listener.settimeout(30)
print("listens", flush=True)
listener.accept()
"""
_CALL = "import socket; socket.create_connection(({name!r}, 7777), 20)"


def expect_reach(one: Sequence[str], other: Sequence[str], address: str, name: str) -> None:
    """Connect a process in one namespace to one in another; raise SubprocessError if that fails.

    `one` and `other` are the first words of a command that runs another one in a namespace. `one` listens on `address`,
    and `other` reaches it by `name`.
    """
    serve = [*one, sys.executable, "-c", _SERVE.format(address=address)]
    call = [*other, sys.executable, "-c", _CALL.format(name=name)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        server.stdout.readline()
        subprocess.run(call, capture_output=True, check=True, timeout=60)


@functools.cache
def lacking() -> str | None:
    """Return why hosts cannot be made on this machine, or None if they can."""
    if os.geteuid() != 0:
        return "namespaces as hosts need root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"namespaces as hosts need {', '.join(missing)} (iproute2, util-linux)"
    try:
        with Hosts(2) as hosts:
            expect_reach(hosts.entering(0), hosts.entering(1), hosts.address(0), "node0")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"this machine makes no hosts that reach each other: {error}"
    return None


def need_hosts() -> None:
    """Skip a test or a module, with the reason, where hosts cannot be made."""
    if reason := lacking():
        print(reason)
        pytest.skip(reason, allow_module_level=True)


class Hosts:
    """Hosts that exist until `close`, at most 200.

    Their monotonic clocks are `ahead` of this machine's by that many seconds, as if each had booted earlier; none: they
    have the same clock.
    """

    def __init__(self, count: int, ahead: Sequence[int] = ()) -> None:
        self.count = count
        self._ahead = ahead
        self._kinds = (*_KINDS, "--time") if ahead else _KINDS
        self._stack = ExitStack()
        try:
            self._switch = self._hold(["--net"])
            self._in_switch("ip link add name br0 type bridge && ip link set br0 up && ip link set lo up")
            # Pid of each host's first process, as this machine sees it
            self.pids = [self._make(host) for host in range(count)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts and everything that runs in them; further calls do nothing."""
        self._stack.close()

    @staticmethod
    def address(host: int) -> str:
        """The IPv4 address of a host."""
        return f"10.77.0.{host + 1}"

    @staticmethod
    def address6(host: int) -> str:
        """The IPv6 address of a host."""
        return f"fd77::{host + 1:x}"

    def entering(self, host: int, kinds: Sequence[str] | None = None) -> list[str]:
        """Return the first words of a command that runs in a host, or only in some namespaces, such as `--net`."""
        return ["nsenter", "-t", str(self.pids[host]), *(self._kinds if kinds is None else kinds), "--"]

    def entering_switch(self) -> list[str]:
        """Return the first words of a command in the network namespace of the bridge, where cable k is `port<k>`."""
        return ["nsenter", "-t", str(self._switch), "--net", "--"]

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command in a host; `options` are those of `Popen`.

        The returned process is a wrapper: signals to it do not reach the command. Use `kill` for that.
        """
        options.setdefault("text", True)
        # A process that enters a mount namespace finds itself in its root.
        cwd = options.pop("cwd", os.getcwd())
        return subprocess.Popen([*self.entering(host), "env", f"--chdir={cwd}", *command], **options)

    def run(self, host: int, *command: str) -> str:
        """Run a command in a host to its end, require that it succeeds, and return its output."""
        return _run([*self.entering(host), *command])

    def kill(self, host: int, pid: int, signal: str = "KILL") -> None:
        """Send a signal to a process, by its pid within the host."""
        self.run(host, "sh", "-c", f"kill -s {signal} {pid}")

    def cut(self, host: int) -> None:
        """Pull the cable of a host: whatever is sent over it is lost, without notice."""
        self._in_switch(f"ip link set port{host} nomaster")

    def restore(self, host: int) -> None:
        """Put the cable of a host back."""
        self._in_switch(f"ip link set port{host} master br0")

    def plug(self, host: int) -> None:
        """Switch the interface of a host on again."""
        self.run(host, "ip", "link", "set", "eth0", "up")

    def part(self, one: int, other: int) -> None:
        """Cut two hosts off from each other only: what they send each other is lost, without notice."""
        for here, there in ((one, other), (other, one)):
            nowhere = ("lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "eth0")
            self.run(here, "ip", "neigh", "replace", self.address(there), *nowhere)

    def rejoin(self, one: int, other: int) -> None:
        """Undo `part`."""
        for here, there in ((one, other), (other, one)):
            self.run(here, "ip", "neigh", "del", self.address(there), "dev", "eth0")

    def pythons(self, host: int) -> list[int]:
        """Return the processes of a host that run Python."""
        script = "grep -al '[p]ython' /proc/[0-9]*/cmdline 2>/dev/null || true"
        return [int(Path(name).parent.name) for name in self.run(host, "sh", "-c", script).split()]

    def unplug(self, host: int) -> None:
        """Switch off the interface of a host; the host itself notices."""
        self.run(host, "ip", "link", "set", "eth0", "down")

    def slow(self, host: int, rate: str, burst: str = "64kb") -> None:
        """Limit the sending rate of a host; `rate` and `burst` have the syntax of tc(8), such as `10mbit`."""
        self.run(host, *f"tc qdisc replace dev eth0 root tbf rate {rate} burst {burst} latency 200ms".split())

    def delay(self, host: int, milliseconds: float) -> None:
        """Delay everything that a host sends. Skip the test where the kernel has no netem."""
        command = f"tc qdisc replace dev eth0 root netem delay {milliseconds}ms".split()
        tried = subprocess.run([*self.entering(host), *command], capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"this kernel delays no packets: {tried.stderr.strip()}")

    def _in_switch(self, script: str) -> None:
        _run([*self.entering_switch(), "sh", "-c", script])

    def _make(self, host: int) -> int:
        clocks = [f"--{clock}={self._ahead[host]}" for clock in ("monotonic", "boottime")] if self._ahead else []
        pid = self._hold([*self._kinds, *clocks, "--mount-proc"])
        self._in_switch(
            f"ip link add name port{host} type veth peer name eth0 netns {pid} && "
            f"ip link set port{host} master br0 && ip link set port{host} up"
        )
        known = {"localhost": "127.0.0.1", **{f"node{k}": self.address(k) for k in range(self.count)}}
        known[f"node{host}"] = "127.0.1.1"
        lines = "".join(f"{address} {name}\\n" for name, address in known.items())
        script = (
            f"echo node{host} > /proc/sys/kernel/hostname && mount -t tmpfs tmpfs /mnt && "
            f"printf '{lines}' > /mnt/hosts && mount --bind /mnt/hosts /etc/hosts && umount -l /mnt && "
            "ip link set lo up && ip link set eth0 up && ip link add name docker0 type bridge && "
            "ip link set docker0 up && ip address add 172.17.0.1/16 dev docker0 && "
            f"ip address add {self.address(host)}/24 dev eth0 && ip address add {self.address6(host)}/64 dev eth0 nodad"
        )
        _run(["nsenter", "-t", str(pid), *self._kinds, "--", "sh", "-c", script])
        return pid

    def _hold(self, kinds: Sequence[str]) -> int:
        """Make namespaces and a process that holds them until its standard input ends; return its pid on this machine.

        In a process namespace it is the first process: all others end with it.
        """
        fork = ["--fork", "--kill-child"] if "--pid" in kinds else []
        command = ["unshare", *kinds, *fork]
        holder = subprocess.Popen(
            [*command, "sh", "-c", "echo up; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert holder.stdin is not None and holder.stdout is not None
        self._stack.callback(_end, holder)
        if holder.stdout.readline() != "up\n":
            raise RuntimeError(f"no namespaces: unshare ended with {holder.wait()}")
        if not fork:
            return holder.pid
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        return int(until(lambda: children.read_text().split(), "a host has a first process")[0])


def rest(process: subprocess.Popen[str], seconds: float) -> str:
    """Return the output of a process from here to its end, after lines that were already read.

    Raise TimeoutExpired if it does not end in time. `communicate` would lose output buffered with those lines.
    """
    read: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: read.append(process.stdout.read()), daemon=True)
    reader.start()
    reader.join(seconds)
    if not read:
        raise subprocess.TimeoutExpired(process.args, seconds)
    process.wait(seconds)
    return read[0]


def _end(holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdin.close()
    try:
        holder.wait(10)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()
    holder.stdout.close()


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout
