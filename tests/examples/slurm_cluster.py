"""A real Slurm on namespaces as hosts: its controller and a daemon for each node, of Debian's packages.

    with SlurmCluster(hosts, directory) as cluster:
        job = cluster.submit("train.sbatch", "train.py")
        cluster.wait_for(job)

Nothing is installed or configured on this machine: all files are below `directory`, and all daemons run within the
hosts and end with them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

from ..netns import Hosts
from ..waiting import until

PROGRAMS = ("munged", "sbatch", "scontrol", "slurmctld", "slurmd", "srun")
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=node0({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
CredType=cred/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
JobRequeue=1
MinJobAge=300
KillWait=5
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def find_lacking() -> str | None:
    """Return why there is no Slurm on this machine, or None if there is one."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=_search_path())]
    return f"needs {', '.join(missing)} (apt-get install slurm-wlm munge)" if missing else None


def _search_path() -> str:
    return f"{os.environ['PATH']}{os.pathsep}/usr/sbin"


class SlurmCluster:
    """A cluster whose nodes are the hosts, with `cpus` processors each.

    Attributes
    ----------
    version : str
        Version of Slurm, as `srun --version` prints it.
    """

    def __init__(self, hosts: Hosts, directory: Path, cpus: int = 4) -> None:
        self.hosts, self.directory = hosts, directory
        self._processes: list[subprocess.Popen[str]] = []
        self._environment = os.environ | {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": _search_path()}
        nodes = "\n".join(
            f"NodeName=node{host} NodeAddr={hosts.address(host)} CPUs={cpus} State=UNKNOWN"
            for host in range(hosts.count)
        )
        (directory / "slurm.conf").write_text(
            _CONFIGURATION.format(address=hosts.address(0), place=directory, nodes=nodes)
        )
        (directory / "state").mkdir()
        key = directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self._start_daemon(0, "munged", "--foreground", "--force", f"--socket={directory}/munge.socket",
                           f"--key-file={key}", f"--log-file={directory}/munged.log",
                           f"--pid-file={directory}/munged.pid", f"--seed-file={directory}/munged.seed")  # fmt: skip
        until((directory / "munge.socket").exists, "munged listens")
        self._start_daemon(0, "slurmctld", "-D")
        for host in range(hosts.count):
            self._start_daemon(host, "slurmd", "-D")
        self.version = self.run("srun", "--version").strip()
        until(lambda: self.count_nodes("idle") == hosts.count, "all nodes are idle", 60.0)

    def __enter__(self) -> SlurmCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            process.terminate()
        self.hosts.close()
        for process in self._processes:
            process.wait(20)

    def run(self, *command: str, **variables: str) -> str:
        """Run a command of Slurm on the first node, and return its output."""
        inside = [*self.hosts.entering(0), "env", f"--chdir={self.directory}", *command]
        done = subprocess.run(inside, env=self._environment | variables, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stderr}{self.read_logs()}"
        return done.stdout

    def count_nodes(self, state: str) -> int:
        """Return the number of nodes in a state, such as `idle`."""
        done = subprocess.run(
            [*self.hosts.entering(0), "sinfo", "--noheader", "--Node", "--format=%T"],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout.split().count(state)

    def submit(self, *arguments: str, **variables: str) -> str:
        """Submit a batch script, and return the job's number; output goes into `NUMBER.out`."""
        return self.run("sbatch", "--parsable", "--output=%j.out", *arguments, **variables).strip()

    def describe_job(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "--oneliner", "show", "job", job)))

    def read_output(self, job: str) -> str:
        """Return what a job has printed so far."""
        path = self.directory / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, job: str, seconds: float = 90.0) -> dict[str, str]:
        """Wait until a job has ended, and return its fields."""
        under_way = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        try:
            until(lambda: self.describe_job(job)["JobState"] not in under_way, f"job {job} ends", seconds, 0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.read_output(job)}\n{self.read_logs()}") from None
        return self.describe_job(job)

    def read_logs(self) -> str:
        """Return the last lines of the daemons' logs."""
        logs = sorted(self.directory.glob("*.log"))
        return "".join(f"\n{log.name}:\n" + "\n".join(log.read_text().splitlines()[-12:]) for log in logs)

    def _start_daemon(self, host: int, *command: str) -> None:
        path = shutil.which(command[0], path=_search_path())
        assert path
        self._processes.append(
            self.hosts.start(
                host,
                [path, *command[1:]],
                env=self._environment,
                cwd=str(self.directory),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
