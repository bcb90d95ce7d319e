"""Scripted agents of an elastic job, and the driver that reads their messages."""

from __future__ import annotations

import signal
import socket
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.launch.cli.options import Options, parse
from engine.launch.driver import Driver, JobSetup
from engine.launch.elastic.job_watch import Watch
from engine.launch.elastic.policy import ElasticPolicy
from engine.launch.hosts.channel import GREETING, pack_message
from engine.launch.process.console import Console
from engine.launch.process.plan import Job
from engine.launch.report.elastic_report import Result

READY = {"where": "there", "address": "", "summary": "it can start workers", "hub": 0, "port": 1, "processors": 1}


def ready(**fields: Any) -> bytes:
    """Return the message that an agent can start workers."""
    return pack_message("ready", **READY | fields)


def job_of(home: Path, hosts: Collection[str], agent: str, *words: str) -> tuple[Options, Job]:
    """Return an elastic job with one slot on each of these hosts, whose agents a command starts."""
    reach = ("-H", ",".join(f"{host}:1" for host in hosts), "--launch-agent", agent)
    times = ("--grace-period", "0.1", "--lease", "2")
    chosen = parse(["-np", "1", "--min-np", "1", "--max-np", str(len(hosts)), *reach, *times, *words, "true"])
    return chosen, Job(size=1, name="a job of a test", secret="5e", port=1, directory=home, settings={})


# The agent of a host sends a file's content, and then nothing until its channel ends.
AGENT = 'cat "$(dirname "$0")/$HOST"; while read -r line; do :; done'


def drive(home: Path, says: Mapping[str, Iterable[bytes]], *words: str, until: str) -> tuple[Result, list[str]]:
    """Run an elastic job until the driver prints a text; return the result and the driver's lines.

    `says` holds the messages of each host's agent, `words` are further options, and the user ends the job at a line
    with the text `until`.
    """
    (home / "agent").write_text(AGENT)
    for host, messages in says.items():
        (home / host).write_bytes(GREETING + b"".join(messages))
    chosen, job = job_of(home, says, f"env HOST={{host}} sh {home}/agent", *words)
    assert chosen.elastic is not None
    limits = chosen.elastic.make_limits(10.0, 60.0, chosen.grace)
    user, wakeup = socket.socketpair()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if until in line:
            user.send(bytes([signal.SIGTERM]))

    with user, wakeup, (home / "shown").open("wb") as shown:
        wakeup.setblocking(False)
        console, watch = Console(shown.fileno()), Watch(chosen.elastic, (), lambda job: None)
        setup = JobSetup(chosen, job, (console, console), (), {}, wakeup, 10.0, say)
        with Driver(setup, lambda driver: ElasticPolicy(driver, limits, watch)) as driver:
            driver.start()
            result = driver.run()
            assert isinstance(result, Result)
            return result, said
