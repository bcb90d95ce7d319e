"""`enginerun doctor -H a,b`: report what is built, found and reachable on each host, and what to install or open."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...config.forms import MOST_PORTS, make_argument_type, make_duration_form
from ...host import linux, machine, network, processes
from ...host.patience import Patience
from ...host.sockets import retry_short
from ...text import readable
from ..errors import LaunchError
from ..hosts.channel import Channel, ChannelError, Message
from ..hosts.event_loop import AgentLoop
from ..hosts.host_list import LOOPBACK, HostRanks, lay_out, own_names
from ..hosts.reach import Reach, add_reach, hosts_of, network_of, reach_of
from ..hosts.remote import RemoteHost, agent_command
from . import check_build

CONNECT = 5.0  # seconds that a connection to another host may take
MOMENT = 0.5  # seconds beyond that after which a host is given up whose name is still being looked up
NO_ANSWER = "no answer from {}; let TCP between the hosts pass on all ports"
USAGE = "enginerun doctor [-H a,b | --hostfile FILE] [options]"
DESCRIPTION = """Look at hosts before a job does: start an agent on each, as a job would, and show in a table what is
installed there, which address its ranks would use, and which hosts it reaches. Without hosts: the same as
'enginerun --check-build'."""


# ---- on the host


def examine_host(channel: Channel, order: Message) -> None:
    """Report this host's installation to the launcher, and open a socket that other hosts can try to reach.

    Field `interface` of `order` is the network interface that ranks are to use; empty for any.
    """
    kernels, problem = check_build.find_kernels()
    address = network_of(str(order.head["interface"]))[1] if order.head["interface"] else ""
    listening = network.listen(address or None, 0, backlog=256)
    channel.send(
        "examined",
        version=check_build.version_of("enginerun") or "source tree",
        python=platform.python_version(),
        kernels=kernels,
        problem=problem,
        frameworks=sorted(f"{name} {number}" for name, number in check_build.found_frameworks().items()),
        cpus=machine.collect_facts().usable,
        lacks=list(_list_lacks()),
        address=address,
        port=listening.getsockname()[1],
    )
    listening.setblocking(False)
    for message in channel.wait_for_messages():
        _drop_connections(listening)
        if message.kind != "reach":
            raise ChannelError(f"the launcher asks for {message.kind!r} out of turn")
        channel.send("reached", tried=try_connections(message.head["targets"]))
    listening.close()


def _drop_connections(listening: socket.socket) -> None:
    """Close what other hosts have opened: with 130 hosts the first one is called more often than its backlog holds."""
    with contextlib.suppress(OSError):
        while True:
            retry_short(listening.accept)[0].close()


def _list_lacks() -> Iterable[str]:
    """Yield the system features that ranks need and that are missing, with what to do."""
    if not processes.is_proc_usable():
        yield "/proc does not show the processes: mount that of the PID namespace"
    try:
        os.close(linux.memfd_create("doctor"))
    except OSError as error:
        yield linux.explain_refusal("memfd_create", error)
    try:
        os.close(linux.pidfd_open(os.getpid()))
    except OSError as error:
        yield linux.explain_refusal("pidfd_open", error)


def try_connections(targets: Mapping[str, Sequence[Any]], limit: float = CONNECT) -> dict[str, tuple[str, str]]:
    """Try to connect to other hosts, all at once, within `limit` seconds for all of them together.

    `targets` has the address and port of each host, by its name. The result has, for each, the address of this host
    that was used and why the other cannot be reached; one is empty.

    Each host has a thread, as far as the system allows threads, which looks up its name, too. Nobody waits for a thread
    beyond the limit, because a name server may be silent for longer.
    """
    for name, (_, port) in targets.items():
        if type(port) is not int or not 0 < port <= MOST_PORTS:
            raise ChannelError(f"the launcher speaks of a port {port!r} of {name!r}")
    found: dict[str, tuple[str, str]] = {}

    end = time.monotonic() + limit + MOMENT

    def try_one(name: str, address: str, port: int) -> None:
        if (left := end - MOMENT - time.monotonic()) > 0:
            found[name] = _try_connection(address, port, left)

    threads = []
    for name, place in targets.items():
        thread = threading.Thread(target=try_one, args=(name, *place), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no further thread: one host after the other
            try_one(name, *place)
        else:
            threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return {name: found.get(name, ("", NO_ANSWER.format(address))) for name, (address, _) in targets.items()}


def _try_connection(address: str, port: int, limit: float) -> tuple[str, str]:
    """Try to connect to a host; return this host's address and an empty text, or the reason after an empty address."""
    try:
        with socket.create_connection((address, port), limit) as connection:
            return network.address_of(connection.getsockname()).host, ""
    except TimeoutError:
        return "", NO_ANSWER.format(address)
    except socket.gaierror as error:
        return "", f"it does not know that name: {error.strerror}; give the host by its address"
    except OSError as error:
        return "", f"{address}: {error.strerror or error}; let TCP between the hosts pass on all ports"


# ---- in the launcher


def main(arguments: Sequence[str]) -> int:
    """Run `enginerun doctor`; return 1 if a host cannot take part in a job, or does not reach another.

    `arguments` are those after `doctor`. A `LaunchError` is raised if they are invalid.
    """
    parser = argparse.ArgumentParser("enginerun doctor", USAGE, DESCRIPTION, allow_abbrev=False)
    parser.add_argument("-H", "--hosts", metavar="NAME,..", help="hosts; slots behind the names are passed over")
    parser.add_argument("-hostfile", "--hostfile", type=Path, metavar="FILE", help="file of hosts")
    parser.add_argument(
        "--start-timeout",
        type=make_argument_type(make_duration_form(0.001)),
        default=60.0,
        metavar="S",
        help="default 60",
    )
    add_reach(parser)
    parser.set_defaults(ignored=[])
    given = parser.parse_args(arguments)
    hosts = hosts_of(given)
    if hosts is None:
        if given.launch_agent is not None:
            raise LaunchError("--launch-agent: no hosts are given: add -H a,b")
        readable.print_plain(check_build.format_table())
        return 0
    places = lay_out(hosts, sum(slots for _, slots in hosts), None if given.launch_agent else own_names())
    shown = {place.name for place in places}
    here = next((place.name for place in places if place.local), "")
    for name in dict.fromkeys(name for name, _ in hosts if name not in shown):
        readable.print_plain(
            f"enginerun doctor: {name} is this machine, as {here} is: they are one host", file=sys.stderr
        )
    return Examination(places, reach_of(given), given.start_timeout).run()


class Examination:
    """Examination of hosts by agents, which must answer within `limit` seconds."""

    def __init__(self, places: Sequence[HostRanks], reach: Reach, limit: float) -> None:
        self._hosts = [RemoteHost(n, place, agent_command(place, reach, limit)) for n, place in enumerate(places)]
        self._interface = reach.interface or ""
        self._limit = limit
        self._facts: dict[str, dict[str, Any]] = {}
        self._addresses: dict[str, str] = {}
        self._reached: dict[str, dict[str, tuple[str, str]]] = {}
        self._answers: dict[str, Message] = {}
        self._loop = AgentLoop((), self)

    def run(self) -> int:
        """Examine the hosts, print the table and the problems, and return the exit code."""
        try:
            for host in self._hosts:
                self._loop.start(host)
            self._loop.tell("examine", interface=self._interface)
            self._facts = {name: dict(message.head) for name, message in self._gather_answers(self._limit).items()}
            self._find_addresses()
            self._reached = self._try_connections({name: self._find_target(name) for name in self._facts})
        finally:
            self._loop.close()
        problems = list(self._list_problems())
        for line in [*_format_table(self._make_rows()), "", *(problems or ["Nothing is amiss."])]:
            readable.print_plain(line)
        return int(bool(problems))

    def _gather_answers(self, limit: float) -> dict[str, Message]:
        """Wait up to `limit` seconds for one answer of each host, and return the answers by host name."""
        self._answers = {}
        patience = Patience(limit)
        while waited := [host for host in self._hosts if not host.trouble and host.name not in self._answers]:
            self._loop.step(patience.wait())
            if not patience.seconds_left():
                for host in waited:
                    if host.name not in self._answers and not host.trouble:
                        self._loop.unregister_host(host)
                        host.trouble = f"did not answer within {limit:g} s"
        return self._answers

    def handle_message(self, host: RemoteHost, message: Message) -> None:
        """Implement `AgentListener`."""
        if message.kind == "failed":
            host.trouble = str(message.head["text"])
        else:
            if message.kind == "examined":
                message.get_number("port", 0, MOST_PORTS)
            self._answers[host.name] = message

    def agent_lost(self, host: RemoteHost, how: str) -> None:
        """Implement `AgentListener`."""
        host.trouble = host.trouble or f"its agent {how}"

    def agent_printed(self, host: RemoteHost, lines: list[str]) -> None:
        """Do nothing: the host keeps its last lines for the report."""

    def _find_addresses(self) -> None:
        """Find the address that the ranks of each host would use: the one from which it reaches the first host."""
        here = [host for host in self._hosts if host.name in self._facts]
        if not here:
            return
        first, *others = here
        named = str(self._facts[first.name]["address"])
        address = named or first.place.address
        if not named and address in LOOPBACK:
            address = next(filter(None, (network.own_address(host.place.address) for host in others)), address)
        self._addresses[first.name] = address
        if others:
            used = self._try_connections({first.name: self._find_target(first.name)})
            for host in others:
                own = str(self._facts[host.name]["address"]) if host.name in self._facts else ""
                self._addresses[host.name] = own or used.get(host.name, {}).get(first.name, ("", ""))[0]

    def _find_target(self, name: str) -> tuple[str, int]:
        return self._addresses.get(name, ""), self._facts[name]["port"]

    def _try_connections(self, targets: Mapping[str, tuple[str, int]]) -> dict[str, dict[str, tuple[str, str]]]:
        """Make every host try to connect to the other hosts whose address is known; return their results."""
        known = {name: place for name, place in targets.items() if place[0]}
        for host in self._hosts:
            self._loop.send(host, "reach", targets={name: place for name, place in known.items() if name != host.name})
        answers = self._gather_answers(CONNECT + self._limit)
        return {
            name: {to: (str(found[0]), str(found[1])) for to, found in message.head["tried"].items()}
            for name, message in answers.items()
        }

    def _make_rows(self) -> Iterable[tuple[str, ...]]:
        yield "host", "enginerun", "Python", "native engine", "CPUs", "address", "reaches", "frameworks"
        for host in self._hosts:
            facts = self._facts.get(host.name)
            if facts is None:
                yield host.name, "-", "-", "-", "-", "-", "-", "-"
                continue
            tried = self._reached.get(host.name, {})
            reached = sum(not trouble for _, trouble in tried.values())
            others = len(self._facts) - 1  # those that answer; the others have a line of their own below
            yield (
                host.name,
                str(facts["version"]),
                str(facts["python"]),
                str(facts["kernels"][-1]) if facts["kernels"] else "no",
                str(facts["cpus"]),
                self._addresses.get(host.name) or "?",
                f"{reached} of {others}" if others else "-",
                ", ".join(facts["frameworks"]) or "none",
            )

    def _list_problems(self) -> Iterable[str]:
        """Yield a line on each problem that keeps a job from running, with what to do."""
        facts = self._facts
        for host in self._hosts:
            if host.name not in facts:
                yield host.describe_trouble()
                continue
            if not facts[host.name]["kernels"]:
                yield f"{host.name}: {facts[host.name]['problem']}: install enginerun there, in {host.command[0]!r}"
            yield from (f"{host.name}: {lack}" for lack in facts[host.name]["lacks"])
            for other, (_, trouble) in self._reached.get(host.name, {}).items():
                if trouble:
                    yield f"{host.name} does not reach {other}: {trouble}, or name a network with --network-interface"
        yield from list_differences(facts.values())


def list_differences(facts: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Yield a line on each program or framework that hosts have in different versions, or that some hosts lack."""
    found = [
        {"enginerun": str(each["version"]), "Python": str(each["python"])}
        | dict(str(framework).rsplit(" ", 1) for framework in each["frameworks"])
        for each in facts
    ]
    for what in dict.fromkeys(name for host in found for name in host):
        versions = sorted({host.get(what, "none") for host in found})
        if len(versions) > 1:
            yield f"versions of {what} differ ({', '.join(versions)}): install the same on all hosts"


def _format_table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = list(rows)
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
