"""Places of ranks, the connection to the driver, and early refusals, without Spark."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import engine
from engine.host import machine, network
from engine.launch import LaunchError
from engine.launch.hosts.channel import pack_message
from engine.launch.process.cpu_binding import Allotment
from engine.launch.process.leftovers import ERROR
from engine.launch.process.plan import Job, plan
from engine.launch.process.rank_end import RankEnd
from engine.net import connection as net_connection
from engine.net.frames import wrap
from engine.net.stream import SERVER, AuthenticatedStream
from engine.spark import job as jobs
from engine.spark import slots
from engine.spark import task_listener as listening
from engine.spark.rank_assignment import TaskInfo, assign_ranks
from engine.spark.record import HEAD, RankRecord, read_rows
from engine.spark.task_channel import reach_driver
from engine.spark.task_listener import TaskListener

from ..waiting import until

PROGRAM = """
import numpy, engine
engine.init()
total = engine.allreduce(numpy.ones(1000), op=engine.Sum)
print(engine.rank(), engine.local_rank(), engine.cross_rank(), int(total[0]))
"""


def infos(hosts: str) -> list[TaskInfo]:
    return [TaskInfo(host, f"node-{host}", f"10.0.0.{ord(host)}", 1000 + n, 2000 + n) for n, host in enumerate(hosts)]


def test_ranks_of_a_host_follow_each_other_and_the_first_task_has_rank_0():
    places = assign_ranks(infos("abcab"))
    assert [place.rank for place in places] == [0, 2, 4, 1, 3]
    assert [place.crew.ranks for place in places] == [(0, 1), (2, 3), (4,), (0, 1), (2, 3)]
    assert {place.crew.sizes for place in places} == {(2, 2, 1)}
    assert {place.hub for place in places} == {"10.0.0.97:1000"}
    assert {(place.address, place.port) for place in places} == {("10.0.0.97", 2000)}


def test_on_one_host_there_is_no_hub():
    assert {(place.hub, place.address) for place in assign_ranks(infos("aaa"))} == {("", "127.0.0.1")}


def test_a_card_survives_its_way():
    info = TaskInfo.of_this_process("fd00::1", 5)
    assert TaskInfo.read(info.to_json()) == info and info.host == machine.identify_host()
    assert assign_ranks([info, *infos("b")])[1].hub == "[fd00::1]:5"


def test_tasks_on_two_hosts_make_a_world(tmp_path: Path):
    """The hosts are pretended: rank 0's task listens, and passes the socket on."""
    with network.listen("127.0.0.1", 0, backlog=4) as hub:
        port = hub.getsockname()[1]
        given = [TaskInfo(host, host, "127.0.0.1", port, 1) for host in "aba"]
        ranks = []
        for place in assign_ranks(given):
            (tmp_path / f"rank.{place.rank}").mkdir()
            job = Job(
                3, f"test-{port}", "a secret of tests", place.port, tmp_path, {}, address=place.address, hub=place.hub
            )
            plans = plan(job, Allotment(None, None, ""), os.environ, place.crew)
            env = next(each.environment for each in plans if each.rank == place.rank)
            passed = (hub.fileno(),) if place.rank == 0 else ()
            env |= {"ENGINE_HUB_FD": str(hub.fileno())} if passed else {}
            env["PYTHONPATH"] = str(Path(engine.__file__).parents[1])
            command = [sys.executable, "-P", "-c", PROGRAM]
            ranks.append(subprocess.Popen(command, env=env, pass_fds=passed, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=60)[0].strip() for rank in ranks]
    assert said == ["0 0 0 3", "2 0 1 3", "1 1 0 3"]


def test_only_who_knows_the_secret_is_heard():
    err = io.StringIO()
    with TaskListener(1, "secret", "127.0.0.1", (io.StringIO(), err)) as listener:
        address = ("127.0.0.1", listener.port)
        assert reach_driver([address], "another", 0) is None
        with socket.create_connection(address, 5) as stranger:
            stranger.sendall(b"\0" * 64)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):  # the challenge, and then the end
                    pass
        assert listener.came == 0
        channel = reach_driver([("127.0.0.1", 1), address], "secret", 0)
        assert channel is not None and listener.came == 1
        channel.send("hello", rank=0, host="node")
        channel.close()
        until(lambda: listener.lost, "the listener knows that the task has gone")
    assert listener.lost[0].host == "node"


def test_a_stranger_who_says_nothing_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(net_connection, "GRACE", 0.2)
    with (
        TaskListener(1, "secret", "127.0.0.1", (io.StringIO(), io.StringIO())) as listener,
        socket.create_connection(("127.0.0.1", listener.port), 30) as stranger,
    ):
        while stranger.recv(4096):  # the challenge, and then the end
            pass
        until(lambda: not listener._acceptor._greeting, "the connection is forgotten")


def test_a_peer_that_has_proven_nothing_takes_no_second_descriptor():
    with (
        TaskListener(1, "secret", "127.0.0.1", (io.StringIO(), io.StringIO())) as listener,
        contextlib.ExitStack() as strangers,
    ):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            strangers.enter_context(socket.create_connection(("127.0.0.1", listener.port), 30))
        until(lambda: len(listener._acceptor._greeting) == 5, "all are waited for")
        assert len(os.listdir("/proc/self/fd")) == before + 2 * 5  # both ends of each connection are here


def test_neither_a_strangers_message_nor_a_streams_exception_ends_the_listening():
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise RuntimeError("the notebook has gone")

    head = b"[" * 200_000  # nested more deeply than a parser goes
    with TaskListener(1, "secret", "127.0.0.1", (Broken(), Broken())) as listener:
        address = ("127.0.0.1", listener.port)
        with socket.create_connection(address, 30) as stranger:
            stranger.sendall(wrap(struct.pack(">I", len(head)) + head))
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
        channel = reach_driver([address], "secret", 0)
        assert channel is not None
        channel.send("hello", rank=0, host="node")
        channel.send("output", b"a line\n", stream="stdout")
        channel.send("end", rank=0, host="node", code=0, age=0, by_launcher=False, files={})
        until(lambda: listener.records, "the listener knows the end")
        assert not listener.lost
        channel.close()


def test_an_unproven_message_of_sixty_megabytes_is_refused_by_its_length():
    """It is neither stored nor parsed, and does not make a task wait."""
    with TaskListener(1, "secret", "127.0.0.1", (io.StringIO(), io.StringIO())) as listener:
        address = ("127.0.0.1", listener.port)
        with socket.create_connection(address, 30) as stranger:
            sent = struct.pack(">II", 60 << 20, (60 << 20) - 4) + b"[" * (60 << 20)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                stranger.sendall(sent)
                raise AssertionError("all of it was read")
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 << 10  # KiB
        channel = reach_driver([address], "secret", 0)
        assert channel is not None
        channel.close()


@pytest.mark.parametrize(
    ("master", "chosen", "bound", "first"),
    [
        ("local[2]", "10.1.2.3", "127.0.0.1", "127.0.0.1"),
        ("spark://node:7077", "", None, "node-0"),
        ("spark://node:7077", "0.0.0.0", None, "node-0"),
        ("spark://node:7077", "127.0.0.2", "127.0.0.2", "node-0"),
    ],
)
def test_the_driver_listens_where_sparks_own_ports_are(master: str, chosen: str, bound: str | None, first: str):
    known = {"spark.driver.host": "node-0"} | ({"spark.driver.bindAddress": chosen} if chosen else {})
    context = SimpleNamespace(master=master, getConf=lambda: SimpleNamespace(get=known.get))
    session = SimpleNamespace(sparkContext=context)
    assert jobs.listening_address(session) == bound
    addresses = jobs.own_addresses(session, bound)
    assert addresses[0] == first
    if bound is not None:
        assert addresses[-1] == bound and len(addresses) <= 2
        with TaskListener(1, "secret", bound, (io.StringIO(), io.StringIO())) as listener:
            assert listener._acceptor.address.host == bound


def test_idle_connections_keep_no_task_out():
    size = 2
    with (
        contextlib.ExitStack() as idle,
        TaskListener(size, "secret", "127.0.0.1", (io.StringIO(), io.StringIO())) as driver,
    ):
        address = ("127.0.0.1", driver.port)
        for _ in range(listening.UNPROVEN + size + 10):
            idle.enter_context(socket.create_connection(address, 30))
        for task in range(size):
            channel = reach_driver([address], "secret", task)
            assert channel is not None
            idle.enter_context(contextlib.closing(channel))
        until(lambda: driver.came == size, "both tasks are known")


def test_what_is_not_sealed_ends_the_connection_of_a_task():
    out = io.StringIO()
    with TaskListener(1, "secret", "127.0.0.1", (out, io.StringIO())) as listener:
        channel = reach_driver([("127.0.0.1", listener.port)], "secret", 0)
        assert channel is not None
        channel.send("hello", rank=0, host="node")
        channel.out.write(pack_message("output", b"forged\n", stream="stdout"))
        until(lambda: listener.lost, "the listener takes the task for lost")
        channel.close()
    assert out.getvalue() == ""


@pytest.mark.parametrize("name", ["/tmp/x", "../x", "rank.1/x", "", ".", "stdout\0", "unknown"])
def test_a_task_names_no_file_but_those_that_a_rank_leaves(name: str, tmp_path: Path):
    head = {"rank": 0, "host": "node", "code": 1, "age": 0.0, "by_launcher": False, "files": {name: 1}}
    with pytest.raises(ValueError, match="leaves no file"):
        RankRecord.read_explanation(head, b"x")
    with pytest.raises(ValueError, match="leaves no file"):
        read_rows([(HEAD, json.dumps(head).encode()), (name, b"x")])
    with pytest.raises(ValueError, match="leaves no file"):
        RankRecord(0, "node", RankEnd(0, 1, 0.0), {name: b"x"}).write(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] in ([], ["rank.0"])


def test_a_record_comes_as_it_was_told(tmp_path: Path):
    files = {"stderr": b"\xff\0last words", "failure.json": b"{}", ERROR: b""}
    told = RankRecord(1, "node", RankEnd(1, -9, time.time()), files)
    found = RankRecord.read_explanation(json.loads(json.dumps(told.to_head())), told.join_explanations())
    assert (found.rank, found.end.code, dict(found.files)) == (1, -9, files)
    found.write(tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "rank.1").iterdir()} == files


@pytest.mark.parametrize(
    "change", [{"rank": -1}, {"code": "0"}, {"age": None}, {"files": {"stderr": 1 << 70}}], ids=str
)
def test_a_record_with_numbers_that_cannot_be_is_refused(change: dict[str, Any]):
    head = {"rank": 0, "host": "node", "code": 1, "age": 0.0, "by_launcher": False, "files": {}}
    with pytest.raises(ValueError, match=r"a file|'(rank|code|age)' is"):
        RankRecord.read_explanation(head | change, b"x")


OPENING, REFUSAL = AuthenticatedStream.open, AuthenticatedStream.make_refusal


@pytest.mark.parametrize("says", [(), (OPENING,), (OPENING, lambda stream: REFUSAL())])
def test_a_pretended_driver_is_told_nothing(says: tuple[Callable[[AuthenticatedStream], bytes], ...]):
    """The impostor stays silent, or sends a driver's messages, without the secret."""
    with network.listen("127.0.0.1", 0, backlog=4) as pretended:
        pretended.setblocking(True)

        def pretend() -> None:
            connection, _ = pretended.accept()
            with connection:
                stream = AuthenticatedStream(b"guessed", SERVER)
                for message in says:
                    connection.sendall(message(stream))
                    connection.recv(4096)

        thread = threading.Thread(target=pretend)
        thread.start()
        assert reach_driver([("127.0.0.1", pretended.getsockname()[1])], "secret", 0) is None
        thread.join()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("spark.dynamicAllocation.enabled", "Spark starts no barrier stage"),
        ("spark.speculation", "ranks are never started twice"),
        ("spark.ssl.enabled", "is not encrypted"),
    ],
)
def test_what_spark_would_not_do_is_told_beforehand(name: str, said: str, monkeypatch: pytest.MonkeyPatch):
    conf = {name: "true"}
    context = SimpleNamespace(getConf=lambda: conf, master="yarn")
    session: Any = SimpleNamespace(sparkContext=context, conf={})
    monkeypatch.setattr(slots, "_count_slots", lambda context: 2)
    monkeypatch.setattr(slots, "_count_busy", lambda context: 0)
    lines: list[str] = []
    if name == "spark.dynamicAllocation.enabled":
        with pytest.raises(LaunchError, match=said):
            slots.check(session, 2, 1.0, lines.append)
    else:
        slots.check(session, 2, 1.0, lines.append)
        assert len(lines) == 1 and said in lines[0]
