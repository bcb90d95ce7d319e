"""One rank that only meets the others and prints the outcome: the program of tests with namespaces as hosts.

It prints its process ID and begins when it reads a line, so that a test knows that all ranks are up. Its place comes
from the variables of a launcher. TRIAL holds the test's other options as JSON: `number` of an elastic world, `build`,
`timeout`, `worlds` (how often it meets the others), and `stay` (whether it ends only when its standard input does).
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace
from typing import Any

from engine.config import config
from engine.config.world import detect_world
from engine.errors import EngineError
from engine.net.rendezvous import Gathered, RendezvousOptions, gather_ranks

from .meeting import BUILD, create


def main() -> None:
    """Meet, and print a line for each world: the rank's connections, or the error."""
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    environ = config.read_environment()
    trial = json.loads(environ.get("TRIAL", "{}"))
    settings = config.load(environ)
    world = replace(detect_world(environ), number=trial.get("number"))
    for generation in range(1, 1 + trial.get("worlds", 1)):
        try:
            build = {**BUILD, **trial.get("build", {})}
            seconds, interface = trial.get("timeout", 60.0), settings.interface
            gathered = gather_ranks(world, RendezvousOptions(generation, build, seconds, create, interface=interface))
        except EngineError as error:
            print(json.dumps({"kind": type(error).__name__, "error": str(error)}), flush=True)
            return
        print(json.dumps(told(world.rank, gathered)), flush=True)
        if trial.get("stay"):
            sys.stdin.read()
        gathered.close()


def told(rank: int, gathered: Gathered) -> dict[str, Any]:
    """Connections of a rank: it sends its number over each, and returns who answers, and from which address."""
    ends = {there: socket.socket(fileno=os.dup(fd)) for there, (fd,) in gathered.lanes.items()}
    for connection in ends.values():
        connection.setblocking(True)
        connection.settimeout(60)
        connection.sendall(bytes([rank]))
    lanes = {there: [connection.recv(1)[0], connection.getpeername()[0]] for there, connection in ends.items()}
    for connection in ends.values():
        connection.close()
    return {"hosts": gathered.hosts, "lanes": lanes, "trunks": sorted(gathered.trunks), "pids": gathered.pids}


if __name__ == "__main__":
    main()
