"""Jobs on several hosts, for tests: a host is this machine, or a network namespace of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import uuid
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.host.processes import read_process

from ..netns import expect_reach
from ..waiting import marked, until
from .launch_jobs import Finished, Launcher

# A stand-in for ssh: it notes how it was called, and runs the command as a login shell would. `deaf` never answers,
# `strange` refuses.
SSH = """#!/bin/sh
for last; do :; done
printf '%s\\n' "$*" >> "$HERE/ssh.log"
while [ $# -gt 2 ]; do shift; done
case "$1" in
    deaf) echo "still trying $1" >&2; exec sleep 600;;
    strange) echo "ssh: Could not resolve hostname strange" >&2; exit 255;;
    chatty) echo "Welcome to chatty, it is a nice day";;
esac
cd / && exec env -i PATH="$PATH" HERE="$HERE" RANKS_TEST="$RANKS_TEST" PYTHONPATH="$PYTHONPATH" sh -c "$2"
"""


def stand_in_ssh(launcher: Launcher) -> None:
    """Put a stand-in for ssh first on the PATH of a launcher."""
    directory = launcher.home / "bin"
    directory.mkdir()
    (directory / "ssh").write_text(SSH)
    (directory / "ssh").chmod(0o755)
    launcher.environment["PATH"] = f"{directory}{os.pathsep}{os.environ['PATH']}"


def on_hosts(launcher: Launcher, *arguments: object, python: str, hosts: str = "a:2,b:2") -> Finished:
    """Run a job on hosts whose agents are started by `env`."""
    return launcher.run("-H", hosts, "--launch-agent", "env STAND_IN={host}", *arguments, python=python)


def other_python(home: Path) -> str:
    """Make a Python that has the packages of this one under another path."""
    venv.create(home, symlinks=True, with_pip=False)
    python = home / "bin" / "python"
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "as_here.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return str(python)


def agent_of(launcher: Launcher, name: str) -> int:
    """Process ID of a host's agent, whose child is the guardian."""
    return until(lambda: _agent(launcher, name), f"the agent of {name}")


def _agent(launcher: Launcher, name: str) -> int:
    matching = []
    for pid in marked(launcher.mark):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"engine.launch.agent" in words and f"STAND_IN={name}".encode() in Path(
                f"/proc/{pid}/environ"
            ).read_bytes().split(b"\0"):
                matching.append(pid)
        except OSError:
            continue
    found = [process for pid in matching if (process := read_process(pid))]
    return next((each.pid for each in found if each.parent not in matching), 0)


def why_no_namespaces() -> str:
    """Reason why network namespaces cannot be made here, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip(8)"
    try:
        with namespaces(["10.79.9.1", "10.79.9.2"]) as option:
            there = option.removeprefix("--launch-agent=")
            one, other = (there.format(host=f"10.79.9.{number}").split() for number in (1, 2))
            expect_reach(one, other, "10.79.9.1", "10.79.9.1")
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        text = said.decode() if isinstance(said, bytes) else str(said or "")
        return f"no network namespaces can be made and joined: {error}: {text.strip()}"
    return ""


@contextmanager
def namespaces(addresses: list[str]) -> Iterator[str]:
    """Make network namespaces joined by a bridge, one for each address; the addresses are the hosts.

    Yields the option that starts agents in them: `--launch-agent=..`.
    """
    tag = uuid.uuid4().hex[:6]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    hub = f"{tag}-hub"
    made = []
    try:
        ip("netns", "add", hub)
        made.append(hub)
        ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge0", "up")
        for number, address in enumerate(addresses):
            name = f"{tag}-{address}"
            ip("netns", "add", name)
            made.append(name)
            ip("-n", hub, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", hub, "link", "set", f"port{number}", "master", "bridge0", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield f"--launch-agent=ip netns exec {tag}-{{host}}"
    finally:
        for name in made:
            ip("netns", "delete", name)


@contextmanager
def need_namespaces(addresses: list[str]) -> Iterator[str]:
    """Yield what `namespaces` does; skip the tests, with the reason, where none can be made."""
    if reason := why_no_namespaces():
        print(reason)
        pytest.skip(reason)
    with namespaces(addresses) as option:
        yield option
