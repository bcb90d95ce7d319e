"""Rendezvous of ranks on one host: who comes, who does not, who must not."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.collectives.process_sets import ProcessSet
from engine.config.world import World
from engine.errors import IncompatibleRanksError, RendezvousError
from engine.host.sockets import wait_readable
from engine.net.connection import GRACE
from engine.net.rendezvous import Gathered, RendezvousOptions, gather_ranks, local_server
from engine.net.rendezvous.messages import MOST_PROCESSORS, derive_leaders_key, make_hello, make_socket_name
from engine.net.stream import CLIENT, OPENING, SERVER, AuthenticatedStream
from engine.session import startup

from ..waiting import measured, until

BUILD: dict[str, str | int] = {"protocol": 1, "layout": "abc", "sources": "f00d", "kernels": "avx2"}


@pytest.fixture
def job() -> Callable[..., World]:
    """Make the worlds of a new job."""
    key = uuid.uuid4().hex

    def world(rank: int, size: int, secret: str | None = "s") -> World:
        return World(rank, size, rank, size, key, secret, "test")

    return world


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def create() -> tuple[int, int]:
    control, arena = os.memfd_create("control"), os.memfd_create("arena")
    os.write(control, b"control")
    return control, arena


def meet(*ranks: tuple[World, dict[str, str | int]], timeout: float = 60.0) -> list[Any]:
    """Run ranks as threads; return the result or error of each."""
    results: list[Any] = [None] * len(ranks)

    def run(index: int, world: World, build: dict[str, str | int]) -> None:
        try:
            results[index] = gather_ranks(world, RendezvousOptions(1, build, timeout, create))
        except RendezvousError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index, *rank)) for index, rank in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Gathered):
            result.close()
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_ranks_hold_the_same_segment_and_a_pidfd_of_each(job: Callable[..., World], size: int) -> None:
    seen: list[Any] = []

    def run(rank: int) -> None:
        gathered = gather_ranks(job(rank, size), RendezvousOptions(1, BUILD, 60.0, create))
        fds = [gathered.control, gathered.arena, *gathered.peers]
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]
        seen.append((os.fstat(gathered.control).st_ino, links, gathered.pids, [os.get_inheritable(fd) for fd in fds]))
        gathered.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == size
    assert len({inode for inode, *_ in seen}) == 1
    for _, links, pids, inheritable in seen:
        assert [link.split(":")[1].split()[0] for link in links[:2]] == ["control", "arena"]
        assert all("pidfd" in link for link in links[2:])
        assert pids == [os.getpid()] * size
        assert not any(inheritable)


def test_more_ranks_than_one_message_may_carry_descriptors(
    job: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "GROUP", 2)
    results = meet(*((job(rank, 6), BUILD) for rank in range(6)))
    assert all(isinstance(result, Gathered) and len(result.peers) == 6 for result in results)


def test_a_visitor_who_has_spoken_is_heard_however_late(
    job: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "GRACE", 0.1)
    accept = local_server.LocalServer._accept

    def accept_and_pause(self: local_server.LocalServer, listener: socket.socket) -> None:
        """Pause rank 0 between greeting and answer, until the answer has come and its time limit has passed."""
        accept(self, listener)
        for visitor in self.strangers:
            assert wait_readable([visitor.connection.fileno()], 60.0)
        over = time.monotonic() + 2 * local_server.GRACE
        while time.monotonic() < over:
            pass

    monkeypatch.setattr(local_server.LocalServer, "_accept", accept_and_pause)
    results = meet((job(0, 2), BUILD), (job(1, 2), BUILD))
    assert all(isinstance(result, Gathered) for result in results), results


def test_whoever_did_not_come_is_named_on_every_rank_that_came(job: Callable[..., World]) -> None:
    def measure() -> None:
        results = meet((job(0, 4), BUILD), (job(2, 4), BUILD), timeout=0.5)
        assert all(type(result) is RendezvousError for result in results)
        expected = "ranks 1, 3 did not come within 0.5 s (ENGINE_START_TIMEOUT)"
        assert [str(result) for result in results] == [expected] * 2

    measured(measure, 5)  # a thread may be scheduled too late


def test_without_rank_0_the_others_say_so(job: Callable[..., World]) -> None:
    with pytest.raises(RendezvousError, match=r"rank 1: rank 0 did not come within 0\.2 s"):
        gather_ranks(job(1, 2), RendezvousOptions(1, BUILD, 0.2, create))


def test_ranks_of_different_builds_are_all_refused_with_a_table(job: Callable[..., World]) -> None:
    newer: dict[str, str | int] = {**BUILD, "protocol": 2, "sources": "5eed", "kernels": "plain"}
    results = meet((job(0, 3), BUILD), (job(1, 3), newer), (job(2, 3), BUILD))
    assert all(type(result) is IncompatibleRanksError for result in results)
    assert len({str(result) for result in results}) == 1
    mend = "their engines are built from different sources: install the same build on both"
    assert f"rank 1 has protocol 2, rank 0 has protocol 1: {mend}" in str(results[0])
    assert f"rank 1 has sources 5eed, rank 0 has sources f00d: {mend}" in str(results[0])
    assert "rank 1 has kernels plain, rank 0 has kernels avx2: set the same ENGINE_KERNELS" in str(results[0])
    assert "rank 2" not in str(results[0])


def test_process_sets_of_any_number_are_compared_in_a_greeting_that_is_short(job: Callable[..., World]) -> None:
    many = [ProcessSet([one, other]) for one in range(64) for other in range(one)]
    build = BUILD | {"process_sets": startup._describe_sets(many)}
    another = BUILD | {"process_sets": startup._describe_sets([*many[:-1], ProcessSet([0, 1])])}
    results = meet((job(0, 2), build), (job(1, 2), build))
    assert all(isinstance(result, Gathered) for result in results), results
    results = meet((job(0, 2), build), (job(1, 2), another))
    assert all("(2016 sets, digest " in str(result) for result in results), results
    worst = make_hello(job(1, 2), 1, another, ["plain", "avx2", "avx512"], "\\u1234" * 1000)
    worst.processors = [MOST_PROCESSORS - 1]
    server, client = AuthenticatedStream(b"", SERVER), AuthenticatedStream(b"", CLIENT)
    client.feed(server.open())
    client.receive()
    server.feed(client.encode(worst.to_message()))
    assert server.receive() == worst.to_message(), "a greeting may have few bytes"


def test_two_processes_of_one_rank_are_refused(job: Callable[..., World]) -> None:
    results = meet((job(0, 3), BUILD), (job(1, 3), BUILD), (job(1, 3), BUILD))
    assert all("two processes say they are rank 1" in str(result) for result in results)


def test_worlds_of_different_size_are_refused(job: Callable[..., World]) -> None:
    results = meet((job(0, 3), BUILD), (job(1, 2), BUILD))
    assert all("says it is rank 1 of 2, but rank 0" in str(result) for result in results)
    assert all("belongs to a world of 3" in str(result) for result in results)


def test_a_second_rank_0_is_told(job: Callable[..., World]) -> None:
    def measure() -> None:
        results = meet((job(0, 2), BUILD), (job(0, 2), BUILD), timeout=0.5)
        assert sum("another process holds this job's socket" in str(result) for result in results) == 1

    measured(measure, 5)  # one thread may come after the other has gone


def test_another_secret_is_refused_and_does_not_disturb(job: Callable[..., World]) -> None:
    with ThreadPoolExecutor(2) as pool:
        hosting_rank = pool.submit(gather_ranks, job(0, 2), RendezvousOptions(1, BUILD, 60.0, create))
        # The right process comes later: rank 0 listens only until its ranks have come.
        with pytest.raises(RendezvousError, match="does not know this job's secret"):
            pool.submit(gather_ranks, job(1, 2, "t"), RendezvousOptions(1, BUILD, 60.0, create)).result()
        pool.submit(gather_ranks, job(1, 2), RendezvousOptions(1, BUILD, 60.0, create)).result().close()
        hosting_rank.result().close()


def test_strangers_neither_break_nor_stall_the_others(job: Callable[..., World]) -> None:
    """Strangers send junk, silence or half a message, and open connections by the hundred."""

    def measure() -> None:
        stop = threading.Event()
        held: list[socket.socket] = []
        lock = threading.Lock()

        def annoy(junk: bytes) -> None:
            while not stop.is_set():
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                stranger.settimeout(1.0)
                try:
                    stranger.connect(make_socket_name(job(0, 2)))
                    stranger.sendall(junk)
                except OSError:
                    stranger.close()
                    stop.wait(0.001)
                    continue
                with lock:
                    held.append(stranger)
                    if len(held) > 150:
                        held.pop(0).close()

        threads = [
            threading.Thread(target=annoy, args=(junk,))
            for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x40half", b"\0\0\0\x22" + b"x" * 34)
        ]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        late = threading.Timer(0.3, lambda: results.extend(meet((job(1, 2), BUILD))))
        results: list[Any] = []
        late.start()
        results += meet((job(0, 2), BUILD))
        late.join()
        stop.set()
        for thread in threads:
            thread.join()
        for stranger in held:
            stranger.close()
        assert [type(result) for result in results] == [Gathered, Gathered]
        assert time.monotonic() - began < GRACE

    measured(measure)


@pytest.mark.parametrize("speaks", ["descriptors", "for another host"])
def test_stranger_of_the_same_user_is_turned_away(
    job: Callable[..., World], monkeypatch: pytest.MonkeyPatch, speaks: str
) -> None:
    """One sends many descriptors in one event; another has the key of connections between hosts."""
    monkeypatch.setattr(local_server, "GRACE", 120.0)  # Silence alone does not turn it away.
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
    with ThreadPoolExecutor() as pool, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        hosting_rank = pool.submit(meet, (job(0, 2), BUILD))
        until(lambda: stranger.connect_ex(make_socket_name(job(0, 2))) == 0, "rank 0 listens")
        if speaks == "descriptors":
            socket.send_fds(stranger, [OPENING[:1]], opened)
        else:
            stream = AuthenticatedStream(derive_leaders_key(job(0, 2)), CLIENT)
            while stream.receive() is None:
                stream.feed(stranger.recv(stream.missing_bytes()))
            socket.send_fds(stranger, [stream.encode(make_hello(job(1, 2), 1, BUILD).to_message())], opened[:1])
        stranger.settimeout(60.0)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1 << 16):
                pass
        results = [*meet((job(1, 2), BUILD)), *hosting_rank.result()]
    for descriptor in opened:
        os.close(descriptor)
    assert [type(result) for result in results] == [Gathered, Gathered]


STRANGER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
name, deed = bytes.fromhex(sys.argv[1]), sys.argv[2]
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
if deed == "bind":
    stranger.bind(name)
    stranger.listen()
    print("bound", flush=True)
    while True:
        stranger.accept()
stranger.connect(name)
print(stranger.recv(1), flush=True)
"""


def of_another_user(name: str, deed: str) -> subprocess.Popen[str]:
    """Start a process of another user that connects to the name, or takes it."""
    command = [sys.executable, "-c", STRANGER, name.encode().hex(), deed]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_process_of_another_user_is_hung_up_on(job: Callable[..., World]) -> None:
    with ThreadPoolExecutor(1) as pool:
        rank_0 = pool.submit(gather_ranks, job(0, 2), RendezvousOptions(1, BUILD, 60.0, create))
        name = make_socket_name(job(0, 2))
        until(lambda: name.strip("\0") in Path("/proc/net/unix").read_text(), "rank 0 listens")
        with of_another_user(name, "connect") as stranger:
            assert stranger.communicate()[0] == "b''\n"
        (rank_1,) = meet((job(1, 2), BUILD))
        assert isinstance(rank_1, Gathered)
        rank_0.result().close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_name_that_another_user_has_taken_is_told_and_gives_nothing_away(job: Callable[..., World]) -> None:
    with of_another_user(make_socket_name(job(0, 2)), "bind") as squatter:
        assert squatter.stdout is not None and squatter.stdout.readline() == "bound\n"
        first, second = meet((job(0, 2), BUILD), (job(1, 2), BUILD), timeout=1.0)
        squatter.kill()
    assert "another process holds this job's socket" in str(first)
    assert "the job's socket belongs to user 65534" in str(second)


RANK = """
import os, sys
from engine.net.rendezvous import RendezvousOptions, gather_ranks
from engine.config.world import World
rank, size, key = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
try:
    world = World(rank, size, rank, size, key, "s", "test")
    gather_ranks(world, RendezvousOptions(1, {"protocol": 1}, 100.0, lambda: (0, 0)))
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


def start(rank: int, size: int, key: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RANK, str(rank), str(size), key]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for_members(process: subprocess.Popen[str], count: int) -> None:
    """Wait until rank 0 holds the pidfds of so many ranks, its own included."""
    folder = f"/proc/{process.pid}/fd"

    def members() -> int:
        with contextlib.suppress(FileNotFoundError):
            links = [os.readlink(f"{folder}/{number}") for number in os.listdir(folder)]
            return sum("pidfd" in link for link in links)
        return 0

    until(lambda: members() == count, f"rank 0 has heard of {count} ranks")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_they_gather_is_named(victim: int) -> None:
    key = uuid.uuid4().hex
    processes = [start(rank, 4, key) for rank in (0, 1, 2)]
    wait_for_members(processes[0], 3)
    processes[victim].send_signal(signal.SIGKILL)
    texts = [process.communicate(timeout=60)[0].strip() for process in processes]
    del texts[victim]
    ended = "died before all ranks had come" if victim == 0 else "ended while the ranks were gathering"
    for text in texts:
        assert text.startswith(f"RendezvousError: rank {victim} (pid {processes[victim].pid}) {ended}")
    if victim != 0:
        assert all("rank 3 had not come yet" in text for text in texts)


def test_the_number_of_an_elastic_world_keeps_worlds_apart(job: Callable[..., World]) -> None:
    assert make_socket_name(job(0, 2)) != make_socket_name(replace(job(0, 2), number=2))
    assert make_socket_name(job(0, 2)) != make_socket_name(replace(job(0, 2), job="other"))


def test_an_error_of_the_start_shows_where_the_program_called_and_what_is_wrong() -> None:
    """The traceback does not show the place within the engine."""
    alone = {
        "RANK": "1",
        "SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "START_TIMEOUT": "0.2",
        "JOB": uuid.uuid4().hex,
    }
    program = [sys.executable, "-P", "-c", "import engine\ndef main():\n    engine.init()\nmain()"]
    environ = {**os.environ, **{f"ENGINE_{name}": value for name, value in alone.items()}}
    said = subprocess.run(program, env=environ, capture_output=True, text=True, check=False, timeout=60).stderr
    assert "RendezvousError: rank 1: rank 0 did not come" in said and "in main" in said, said
    assert said.count('File "') == 3, "the program, twice, and the function that it called"
