"""Placement of ranks on hosts, which are namespaces of this machine connected by virtual cables."""

from __future__ import annotations

import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import native, paths
from benchmarks.common.processes import Commands, Launcher, RankError, find_mpirun
from tests.netns import Hosts, lacking

PORT = 29500
"""Port of a contender's rendezvous. It is free, because each world has new hosts."""

BURST = 0.015
"""Seconds for which a cable limited after its start may exceed its rate, to make up for late timers."""


@dataclass(frozen=True)
class Cable:
    """Connection of hosts: `rate` in the form of tc(8) and delay of one way in milliseconds; default: not limited."""

    name: str
    title: str
    rate: str = ""
    delay: float = 0.0
    burst: str = ""
    """Burst that a limited cable carries at once after a pause."""
    most: int = 100 << 20
    """Bytes of the largest compressed allreduce that is measured over it."""


CABLES = {
    cable.name: cable
    for cable in (
        Cable("plain", "a plain veth pair"),
        # With a smaller burst the kernel's timers miss a gigabit.
        Cable("gigabit", "1 Gbit/s and 1 ms each way", "1gbit", 1.0, "128kb"),
        Cable("distant", "100 Mbit/s and 20 ms each way", "100mbit", 20.0, "32kb", 16 << 20),
    )
}


class HostPlaces:
    """Placement of equally many ranks on each of some hosts, with consecutive ranks per host.

    The program `agent` runs a command on another host, like ssh.
    """

    def __init__(self, hosts: Hosts, per_host: int, agent: Path) -> None:
        self._hosts, self.per_host, self._agent = hosts, per_host, agent
        self.ranks = hosts.count * per_host
        self.hosts = hosts.count
        self._started = 0

    def get_process_id(self, host: int) -> int:
        """Return the process id that a host's first process has on this machine."""
        return self._hosts.pids[host]

    def read_sent_bytes(self) -> list[int]:
        """Return the bytes that each host has sent, including headers."""
        lines = [self._hosts.run(host, "grep", "eth0:", "/proc/net/dev") for host in range(self.hosts)]
        return [int(line.partition(":")[2].split()[8]) for line in lines]

    def limit_bandwidth(self, bits: float) -> None:
        """Give all cables another bandwidth, in bits per second, with queues that are large enough to drop nothing."""
        for host in range(self.hosts):
            tc = f"tc qdisc replace dev eth0 root tbf rate {bits:.0f}bit burst {BURST * bits / 8:.0f} limit 32mb"
            self._hosts.run(host, *tc.split())

    def get_launch_prefix(self) -> list[str]:
        """Return the first words of a launcher's command on the first host, with this machine's files and processes."""
        return self._hosts.entering(0, ("--net", "--uts", "--ipc"))

    def launch_options(self) -> list[str]:
        """Return the options by which `enginerun` starts all ranks."""
        return ["-H", self._format_slots(), "--launch-agent", f"{self._agent} {{host}}"]

    def build_commands(self, program: Sequence[str], launcher: Launcher, ranks: int) -> Commands:
        """Yield the commands that start the ranks: mpirun on the first host, or each rank with torchrun's variables."""
        assert ranks == self.ranks
        return self._build_mpirun_command(program) if launcher == "mpi" else self._build_rank_commands(program)

    def _build_rank_commands(self, program: Sequence[str]) -> Commands:
        self._started += 1
        common = {
            "MASTER_ADDR": self._hosts.address(0),
            "MASTER_PORT": str(PORT),
            "TORCHELASTIC_RUN_ID": f"benchmark-{self._started}",
            "ENGINE_SECRET": f"the secret of benchmark {self._started}",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        for rank in range(self.ranks):
            host, place = divmod(rank, self.per_host)
            own = {
                "RANK": rank,
                "WORLD_SIZE": self.ranks,
                "LOCAL_RANK": place,
                "LOCAL_WORLD_SIZE": self.per_host,
                "GROUP_RANK": host,
                "GROUP_WORLD_SIZE": self._hosts.count,
            }
            command = [*self._hosts.entering(host), "env", f"--chdir={paths.ROOT}", *program]
            yield command, common | {name: str(value) for name, value in own.items()}

    def _build_mpirun_command(self, program: Sequence[str]) -> Commands:
        options = ["-np", str(self.ranks), "--host", self._format_slots(), "--allow-run-as-root", "--bind-to", "none"]
        options += ["--prtemca", "plm_ssh_agent", str(self._agent), "--prtemca", "prte_if_include", "eth0"]
        # Ranks that share a processor, with each other or with the kernel's work, must yield it while they wait.
        for name, value in (
            ("pml", "ob1"),
            ("btl", "tcp,self,sm"),
            ("btl_tcp_if_include", "eth0"),
            ("mpi_yield_when_idle", "1"),
        ):
            options += ["--mca", name, value]
        yield [*self.get_launch_prefix(), find_mpirun(), *options, *program], {}

    def _format_slots(self) -> str:
        return ",".join(f"{self._hosts.address(host)}:{self.per_host}" for host in range(self.hosts))


@contextmanager
def create_hosts(count: int, per_host: int, cable: Cable) -> Iterator[HostPlaces]:
    """Create hosts, and always end them with all their processes; raise RankError if hosts are not possible."""
    if reason := lacking():
        raise RankError(f"no hosts to measure: {reason}")
    with Hosts(count) as hosts, TemporaryDirectory(prefix="benchmark-") as folder:
        agent = Path(folder) / "agent"
        cases = "\n".join(
            f'{hosts.address(host)}) exec {" ".join(hosts.entering(host))} sh -c "$*" ;;' for host in range(count)
        )
        agent.write_text(f"#!/bin/sh\nhost=$1\nshift\ncase $host in\n{cases}\nesac\n")
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        with _shape_cables(hosts, cable):
            yield HostPlaces(hosts, per_host, agent)


@contextmanager
def _shape_cables(hosts: Hosts, cable: Cable) -> Iterator[None]:
    """Configure the cables of new hosts. A delay is possible for two hosts, which then have one cable and no bridge.

    netem is not used, because some kernels lack it.
    """
    if cable.rate:
        for host in range(hosts.count):
            hosts.slow(host, cable.rate, cable.burst)
    if not cable.delay:
        yield
        return
    for host in range(hosts.count):
        hosts.cut(host)
    command = [str(native.compile_source("delay.c")), "port0", "port1", str(round(1e3 * cable.delay))]
    line = subprocess.Popen(
        [*hosts.entering_switch(), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert line.stdout is not None
        if line.stdout.readline() != "ready\n":
            raise RankError("no delay between hosts: see above")
        yield
    finally:
        line.communicate()  # It ends with its standard input.
