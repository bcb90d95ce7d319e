"""Ranks that only meet: threads of this process, on "hosts" that share nothing but the leaders' connections."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from engine.config.hub_address import HubAddress
from engine.config.world import World
from engine.errors import RendezvousError
from engine.net.rendezvous import Gathered, RendezvousOptions, gather_ranks

BUILD: dict[str, str | int] = {"protocol": 1, "layout": "abc", "kernels": "avx2"}
LAYOUTS = {
    "2x2": [[0, 1], [2, 3]],
    "1+3": [[0], [1, 2, 3]],
    "3+1": [[0, 1, 2], [3]],
    "4+2+1": [[0, 1, 2, 3], [4, 5], [6]],
    "round-robin": [[0, 3, 6], [1, 4], [2, 5]],
    "4x1": [[0], [1], [2], [3]],
}


def create() -> tuple[int, int]:
    """Stand-in for the shared memory of a host, labelled with its creator."""
    control, arena = os.memfd_create("control"), os.memfd_create("arena")
    os.write(control, str(threading.get_ident()).encode())
    return control, arena


def worlds(crews: Sequence[Sequence[int]], secret: str = "s", host: str = "127.0.0.1") -> dict[int, World]:
    """Worlds of the ranks of a new job; rank 0's comes with a listening socket."""
    size = sum(map(len, crews))
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    hub, key = HubAddress(host, listener.getsockname()[1]), uuid.uuid4().hex
    with_socket = replace(hub, descriptor=listener.detach())
    return {
        rank: World(rank, size, place, len(crew), key, secret, "test", hub if rank else with_socket, str(number))
        for number, crew in enumerate(crews)
        for place, rank in enumerate(crew)
    }


def meet(
    ranks: Sequence[World],
    timeout: float = 20.0,
    builds: Callable[[World], dict[str, str | int]] = lambda world: BUILD,
    levels: Callable[[World], Sequence[str]] = lambda world: (),
    look: Callable[[dict[int, Any]], None] = lambda results: None,
    sockets: Callable[[World], int] = lambda world: 1,
    **options: Any,
) -> dict[int, Any]:
    """Run ranks as threads; return each result or error. `look` sees the results before descriptors are closed."""
    results: dict[int, Any] = {}

    def run(world: World) -> None:
        try:
            own = RendezvousOptions(1, builds(world), timeout, create, levels(world), sockets=sockets(world), **options)
            found: Any = gather_ranks(world, own)
        except RendezvousError as error:
            found = error
        results[world.rank if world.rank not in results else -world.rank] = found

    threads = [threading.Thread(target=run, args=(world,)) for world in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        look(results)
    finally:
        for result in results.values():
            if isinstance(result, Gathered):
                result.close()
    return results


def speak_through_lanes(results: dict[int, Gathered]) -> None:
    """Send each rank's number and the connection's index over every connection of every lane, and check them there."""
    ends = [
        (rank, there, number, socket.socket(fileno=os.dup(fd)))
        for rank, gathered in results.items()
        for there, lane in gathered.lanes.items()
        for number, fd in enumerate(lane)
    ]
    for rank, gathered in results.items():
        for there, fd in gathered.trunks.items():
            ends.append((rank, there, 99, socket.socket(fileno=os.dup(fd))))
    for rank, _, number, connection in ends:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert (
            not connection.getblocking() or connection.gettimeout() == 0.0 or not os.get_blocking(connection.fileno())
        )
        connection.setblocking(True)
        connection.sendall(bytes([rank, number]))
    for _, there, number, connection in ends:
        connection.settimeout(10)
        assert connection.recv(2, socket.MSG_WAITALL) == bytes([there, number])
        connection.close()
