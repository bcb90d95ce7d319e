"""Sets that their members alone form, on several hosts: they connect, or all of them are told why not."""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import EngineError
from engine.net.rendezvous import set_connections
from engine.net.rendezvous.set_connections import Connections, Exchange
from engine.net.unix_sockets import close_all
from engine.session import runtime
from engine.session.registry import ProcessSetRegistry

from ..ranks import run_ranks


def exchange_among(sets: ProcessSetRegistry, ranks: tuple[int, ...]) -> Exchange:
    """Exchange that all ranks of the world take part in, with the texts of some of them."""

    def exchange(text: bytes) -> list[bytes]:
        texts = sets._gather_texts("test", text)
        return [texts[rank] for rank in ranks]

    return exchange


def add_up(sets: ProcessSetRegistry, ranks: tuple[int, ...], name: str) -> float:
    """Form a group of all ranks, add up ones in it, and leave it."""
    group = sets.form_among(ranks, name, exchange_among(sets, ranks))
    tensor = np.ones(300_000)
    group.allreduce(tensor, tensor, None, engine.Sum, 1.0, 1.0, True).wait()
    sets.leave_set(group)
    return float(tensor[-1])


def form_groups() -> dict[str, Any]:
    engine.init()
    sets, ranks = runtime.current_session().sets, tuple(range(engine.size()))
    found: dict[str, Any] = {"first": add_up(sets, ranks, "first")}
    before = len(os.listdir("/proc/self/fd"))
    original = set_connections.network.listen

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(24, "Too many open files")

    def refuse_to_enter(ranks: object, offset: object, connections: Connections, **settings: object) -> None:
        lanes, trunks = connections
        close_all([*chain(*lanes.values()), *trunks.values()])
        refuse()

    for owner, name, refusal in ((set_connections.network, "listen", refuse), (sets, "enter", refuse_to_enter)):
        if engine.rank() == 0:
            setattr(owner, name, refusal)
        try:
            add_up(sets, ranks, f"without {name}")
        except EngineError as error:
            found[name] = str(error)
        finally:
            set_connections.network.listen = original  # type: ignore[assignment]
            vars(sets).pop("enter", None)
    found["left open"] = len(os.listdir("/proc/self/fd")) - before
    found["last"] = add_up(sets, ranks, "last")
    engine.shutdown()
    return found


@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (3, 2), (4, 3)])
def test_groups_connect_or_fail_on_all_hosts(size: int, hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETENDED_HOSTS", str(hosts))
    for found in run_ranks(size, form_groups).values:
        assert found["first"] == found["last"] == size
        assert "rank 0 has failed: RendezvousError: rank 0 of the set can open no port" in found["listen"]
        assert "Too many open files" in found["listen"]
        assert "rank 0 has failed: OSError: [Errno 24] Too many open files" in found["enter"]
        assert found["left open"] == 0
