"""Agents started by a real ssh, through a real sshd on the loopback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.host import processes
from engine.host.machine import free_port

from ..waiting import marked, until
from .launch_jobs import Launcher

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
CONFIG = """\
ListenAddress 127.0.0.1:{port}
HostKey {home}/host_key
AuthorizedKeysFile {home}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
"""
CLIENT = """\
Host far
    HostName 127.0.0.1
    UserKnownHostsFile {home}/known_hosts
    IdentitiesOnly yes
"""
PLACE = """
    print(os.environ["ENGINE_CROSS_RANK"], os.getcwd() == str(here), os.environ["MINE"], "SSH_CONNECTION" in os.environ)
"""
WAITS = """
    (here / f"parent.{rank}").write_text(str(os.getppid())); touch(f"up.{rank}")
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    while True: linger()
"""


@dataclass
class Far:
    """SSH server on the loopback, with the key and the client configuration."""

    home: Path
    port: int
    server: subprocess.Popen[bytes]

    def options(self) -> list[object]:
        """Options with which the launcher reaches the host `far`."""
        reach = ["-p", self.port, "-i", self.home / "key", f"--ssh-options=-F {self.home}/client"]
        return ["-H", "localhost:1,far:2", "--network-interface", "lo", *reach]


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    """Host `far`: this machine, by ssh."""
    if SSHD is None or shutil.which("ssh") is None:
        reason = "needs sshd and ssh (Debian: openssh-server, openssh-client)"
        print(reason)
        pytest.skip(reason)
    home = tmp_path_factory.mktemp("ssh")
    for name in ("host_key", "key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    port = free_port()
    (home / "sshd").write_text(CONFIG.format(home=home, port=port))
    (home / "client").write_text(CLIENT.format(home=home))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where Debian's sshd looks before it serves
    with (home / "log").open("wb") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(home / "sshd")], stdin=subprocess.DEVNULL, stderr=log)
    try:
        until(lambda: server.poll() is not None or b"Server listening" in (home / "log").read_bytes(), "sshd listens")
        if server.poll() is not None:
            reason = f"sshd does not start: {(home / 'log').read_text().strip()}"
            print(reason)
            pytest.skip(reason)
        made = Far(home, port, server)
        come = ["ssh", "-F", f"{home}/client", "-p", str(port), "-i", f"{home}/key", "-o", "BatchMode=yes"]
        answer = subprocess.run(
            [*come, "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "far", "true"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        if answer.returncode != 0:
            reason = f"this account cannot come in by ssh: {answer.stderr.strip()} {(home / 'log').read_text().strip()}"
            print(reason)
            pytest.skip(reason)
        yield made
    finally:
        server.kill()
        server.wait()


def test_a_job_runs_over_ssh_with_options_from_a_file(launcher: Launcher, far: Far) -> None:
    launcher.environment.pop("SSH_CONNECTION", None)
    launcher.environment["MINE"] = "quite 'mine'"
    (launcher.home / "config.json").write_text(
        f'{{"hosts": "localhost:1,far:2", "network-interface": "lo", "ssh-port": {far.port}, '
        f'"ssh-identity-file": "{far.home}/key", "ssh-options": "-F {far.home}/client"}}'
    )
    job = launcher.run("--config-file", "config.json", python=PLACE)
    assert job.code == 0, job.err + (far.home / "log").read_text()
    assert [job.lines(rank) for rank in range(3)] == [[f"{host} True quite 'mine' {host == 1}"] for host in (0, 1, 1)]
    assert "127.0.0.1" in (far.home / "known_hosts").read_text()  # taken over without a question


@pytest.mark.parametrize("whom", ["ssh", "launcher", "agent", "interrupt"])
def test_whatever_is_lost_nothing_is_left_behind_ssh(launcher: Launcher, far: Far, whom: str) -> None:
    """ssh, the launcher or the agent is killed, or the job is interrupted."""
    process = launcher.start(*far.options(), "--grace-period", 0.2, python=WAITS)
    launcher.wait_for("up.0", "up.1", "up.2")
    agent = int((launcher.home / "parent.2").read_text())
    (ssh,) = [each.pid for each in processes.list_descendants(process.pid) if each.name == "ssh"]
    number = signal.SIGINT if whom == "interrupt" else signal.SIGKILL
    os.kill({"ssh": ssh, "agent": agent}.get(whom, process.pid), number)
    job = launcher.finish(process)
    until(lambda: not marked(launcher.mark) and processes.read_process(agent) is None, "no process left", 30.0)
    until(lambda: not processes.list_descendants(far.server.pid), "no session left", 30.0)
    if whom == "interrupt":
        assert job.code == 130 and job.err.rstrip().endswith("ended by SIGINT"), job.err
    elif whom != "launcher":
        assert job.code == 137, job.err
        assert "enginerun: far was lost: its agent ended (" in job.err and "ranks 1, 2 with it" in job.err
        assert "first failure: rank 1 on far: lost with its host" in job.failure[0]


def test_a_host_whose_key_has_changed_is_refused(launcher: Launcher, far: Far) -> None:
    known = far.home / "known_hosts"
    known.write_text(f"[127.0.0.1]:{far.port} {' '.join((far.home / 'key.pub').read_text().split()[:2])}\n")
    try:
        job = launcher.run(*far.options(), python="touch('ran')")
    finally:
        known.unlink()
    assert job.code == 2 and not (launcher.home / "ran").exists()
    assert "far: ended (exit code 255); it said: " in job.err and "Host key verification failed" in job.err
