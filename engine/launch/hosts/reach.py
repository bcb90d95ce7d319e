"""Options of `enginerun` and `enginerun doctor` on hosts and the access to them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...config.forms import Whole, make_argument_type
from ...host import network
from ...text.bounded_reader import MIB, ReadError, read_text
from ..errors import LaunchError
from .host_list import HostRanks, lay_out, own_names, parse_hosts, read_hostfile, without_ranks


@dataclass(frozen=True)
class Reach:
    """Access to other hosts: the command that starts their agents, and the network between their ranks."""

    launch_agent: tuple[str, ...] = ()  # words of the command that starts an agent, instead of ssh; empty: ssh
    ssh: tuple[str, ...] = ()  # options of ssh, which precede those of the launcher
    # Python of other hosts, which runs their agents and is first on the PATH of their ranks; empty: the launcher's
    python: tuple[str, ...] = ()
    directory: str | None = None  # working directory on other hosts; None: the launcher's
    interface: str | None = None  # network interface between ranks of different hosts; None: whichever leads there


NO_OPTIONS = Reach()


class Ignored(argparse.Action):
    """An option that is accepted without effect; its name is added to the namespace's `ignored`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.ignored = [*namespace.ignored, option_string]


class Kept(Ignored):
    """An option for other hosts or elastic jobs: its value is kept, and it is reported if it has no effect."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        super().__call__(parser, namespace, values, option_string)
        setattr(namespace, self.dest, values)


def reach_of(given: argparse.Namespace) -> Reach:
    """Return the access to hosts, from the options that `add_reach` has added."""
    ssh = split_words("--ssh-options", given.ssh_options)
    if given.ssh_port is not None:
        ssh += ("-p", str(given.ssh_port))
    if given.ssh_identity_file is not None:
        ssh += ("-i", given.ssh_identity_file)
    return Reach(
        launch_agent=split_words("--launch-agent", given.launch_agent),
        ssh=ssh,
        python=split_words("--remote-python", given.remote_python),
        directory=given.remote_directory,
        interface=given.network_interface,
    )


def add_reach(parser: argparse.ArgumentParser) -> None:
    """Add the options for access to other hosts; `ignored` of the parser collects the names of those that are given."""
    group = parser.add_argument_group("other hosts")

    def add(*names: str, **more: Any) -> None:
        group.add_argument(*names, action=Kept, **more)

    add(
        "-p",
        "--ssh-port",
        type=make_argument_type(Whole(1, 65535)),
        metavar="PORT",
        help="port of ssh on the other hosts",
    )
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    add("--ssh-options", metavar="OPTIONS", help="more options for ssh, as one argument: '-o ProxyJump=gate'")
    add(
        "--launch-agent",
        metavar="COMMAND",
        help="starts the agent of each host instead of ssh: {host} in it becomes the name, the agent's command follows",
    )
    add("--remote-python", metavar="COMMAND", help="Python of the other hosts (default: the path of this one)")
    add("--remote-directory", metavar="DIR", help="working directory on the other hosts (default: this one)")
    add(
        "--network-interface",
        "--network-interfaces",
        metavar="NAME",
        help="network interface by which ranks of different hosts reach each other",
    )


def hosts_of(given: argparse.Namespace) -> list[tuple[str, int]] | None:
    """Return the given hosts and their slots; None if no hosts are given."""
    if given.hostfile is None:
        return None if given.hosts is None else parse_hosts(given.hosts)
    if given.hosts is not None:
        raise LaunchError(f"-H {given.hosts} and --hostfile {given.hostfile} both name the hosts: give one of the two")
    try:
        hosts = read_hostfile(read_text(given.hostfile, 16 * MIB))
    except (OSError, ReadError) as error:
        raise LaunchError(f"--hostfile: cannot read {str(given.hostfile)!r}: {error}") from error
    if not hosts:
        raise LaunchError(f"--hostfile: {str(given.hostfile)!r} names no host")
    return hosts


def places_of(given: argparse.Namespace, hosts: Sequence[tuple[str, int]] | None, size: int) -> tuple[HostRanks, ...]:
    """Return all hosts with ranks, each of which gets an agent; empty if all ranks are on this machine."""
    if hosts is None:
        if given.launch_agent is not None:
            raise LaunchError(
                "--launch-agent starts agents on the hosts of --hosts, and none are given: add -H a:4,b:4"
            )
        return ()
    places = lay_out(hosts, size, _names_here(given))
    return () if all(place.local for place in places) else tuple(places)


def idle_of(given: argparse.Namespace, hosts: Sequence[tuple[str, int]] | None, size: int) -> tuple[str, ...]:
    """Return the hosts that get no rank."""
    return () if hosts is None else without_ranks(hosts, size, _names_here(given))


def _names_here(given: argparse.Namespace) -> set[str] | None:
    """Return the names of this machine; None with `--launch-agent`, by which no host counts as this machine."""
    return None if given.launch_agent is not None else own_names()


def split_words(option: str, text: str | None) -> tuple[str, ...]:
    """Split an option's value into the words of a command or of options."""
    try:
        words = tuple(shlex.split(text or ""))
    except ValueError as error:
        raise LaunchError(f"{option}: {text!r} cannot be divided into words: {error}") from None
    if text is not None and not words:
        raise LaunchError(f"{option} is empty")
    return words


def network_of(interfaces: str) -> tuple[str, str]:
    """Return name and address of the interface by which ranks of different hosts reach each other.

    `interfaces` are names or addresses, separated by commas; the first that this host has is used. A `LaunchError` is
    raised if it has none of them.
    """
    refusals = []
    for name in (part.strip() for part in interfaces.split(",")):
        try:
            return name, network.interface_address(name)
        except ValueError as error:
            refusals.append(str(error))
    raise LaunchError(f"--network-interface {interfaces}: {refusals[-1]}")
