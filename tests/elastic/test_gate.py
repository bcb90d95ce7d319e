"""The gate of a worker against a scripted driver."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace

import pytest

from engine.elastic.events import Why
from engine.elastic.worker.gate import Assigned, Gate, JobOver
from engine.errors import ConfigError, ForkedError, RendezvousError
from engine.launch.elastic.worker_server import WorkerServer
from engine.launch.process.reader_loop import ReaderLoop
from engine.net.stream import CLIENT, SERVER, AuthenticatedStream, derive_key

from ..waiting import until
from .fake_driver import SECRET, FakeDriver


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with FakeDriver() as made:
        yield made


@contextmanager
def waiting(gate: Gate, *what: object) -> Iterator[Future[Assigned]]:
    """Let a worker wait at the gate on another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(gate.wait, *(what or (0, Why.NEW)))  # type: ignore[arg-type]


def test_a_worker_is_told_its_place(driver):
    with closing(Gate.open(driver.environment(7, slot=3))) as gate, waiting(gate) as place:
        assert (gate.worker, gate.slot) == (7, 3)
        ready = driver.wait_for("ready", 7)
        assert ready["world"] == 0 and ready["why"] == "NEW" and ready["commit"] is None and ready["port"] == 0
        driver.place(1, [4, 7])
        told = place.result(10)
    assert (told.place.world, told.place.rank, told.place.size, told.place.slot.host) == (1, 1, 2, "here")
    assert told.members == (4, 7) and told.hosts == ("here", "here") and told.hub == "" and told.listener is None
    assert told.reason == "the test wants it"


def test_what_a_worker_tells_comes_in_order(driver):
    with closing(Gate.open(driver.environment(1))) as gate, waiting(gate, 3, Why.FAILURE, "rank 2 died", 5, 9) as place:
        ready = driver.wait_for("ready", 1)
        assert [ready[name] for name in ("world", "why", "text", "culprit", "commit")] == [
            3,
            "FAILURE",
            "rank 2 died",
            5,
            9,
        ]
        driver.place(4, [1])
        place.result(10)
        gate.report_joined(4)
        gate.report_commit(4, 10)
        gate.request_leave()
        gate.report_done(4)
        driver.wait_for("done", 1)
    assert [message["kind"] for _, message in driver.heard] == ["ready", "joined", "committed", "leaving", "done"]


def test_a_worker_that_waits_at_the_gate_tells_that_it_wants_to_leave(driver):
    with closing(Gate.open(driver.environment(1))) as gate, waiting(gate) as place:
        driver.wait_for("ready", 1)
        gate.request_leave()
        driver.wait_for("leaving", 1)
        driver.place(1, [1])
        place.result(10)


def test_a_forked_child_reads_nothing_of_what_is_for_the_worker(driver):
    with closing(Gate.open(driver.environment(1))) as gate:
        gate.report_joined(1)
        driver.wait_for("joined", 1)
        driver.tell(1, "update", world=1)
        assert select.select([gate], [], [], 10)[0]
        child = os.fork()
        if child == 0:
            try:
                gate.is_update_requested(1)
            except ForkedError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert gate.is_update_requested(1)


@pytest.mark.parametrize("good", [True, False])
def test_end_is_the_end_of_every_call(driver, good):
    with closing(Gate.open(driver.environment(1))) as gate, waiting(gate) as place:
        driver.wait_for("ready", 1)
        driver.tell(1, "end", why="enough is enough", good=good)
        with pytest.raises(JobOver, match="enough is enough") as caught:
            place.result(10)
        assert caught.value.good is good
        for call in (lambda: gate.is_update_requested(1), lambda: gate.report_joined(1), lambda: gate.wait(0, Why.NEW)):
            with pytest.raises(JobOver, match="enough is enough"):
                call()
        gate.request_leave()  # a signal handler may do so at any time


def test_a_world_is_called_off_while_its_members_gather(driver):
    """A gathering rank polls the gate's descriptor beside the other ranks' sockets."""
    with closing(Gate.open(driver.environment(1))) as gate, waiting(gate) as place:
        driver.wait_for("ready", 1)
        driver.place(5, [1, 2])
        place.result(10)
        assert not gate.is_void(5)
        driver.tell(1, "void", world=5)
        until(lambda: gate.is_void(5), "the world is void")
        assert gate.is_void(4) and not gate.is_void(6)


def test_what_came_before_a_place_is_of_earlier_worlds(driver):
    with closing(Gate.open(driver.environment(1))) as gate, waiting(gate, 2, Why.HOSTS) as place:
        driver.wait_for("ready", 1)
        driver.tell(1, "update", world=2, count=1, kinds=["x"])
        driver.tell(1, "void", world=2)
        driver.place(3, [1])
        place.result(10)
        assert not gate.is_update_requested(3) and not gate.is_void(3)
        driver.tell(1, "update", world=3, count=2, kinds=["x"])
        until(lambda: gate.is_update_requested(3), "the members shall come")


def test_the_gates_descriptor_tells_that_something_has_come(driver):
    with closing(Gate.open(driver.environment(1))) as gate, waiting(gate) as place:
        driver.wait_for("ready", 1)
        driver.place(1, [1])
        place.result(10)
        poll = select.poll()
        poll.register(gate, select.POLLIN)
        assert poll.poll(0) == []
        driver.tell(1, "void", world=1)
        assert poll.poll(10_000)
        assert gate.is_void(1)
        assert poll.poll(0) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda gate: gate.wait(0, Why.NEW),
        lambda gate: gate.is_update_requested(1),
        lambda gate: gate.is_void(1),
        lambda gate: gate.report_commit(1, 1),
    ],
)
def test_an_agent_that_is_gone_is_the_end(driver, call: Callable[[Gate], object]):
    with closing(Gate.open(driver.environment(1))) as gate:
        driver.vanish()
        with pytest.raises(JobOver, match="the agent of this host is gone") as caught:
            call(gate)
        assert not caught.value.good


def test_an_agent_that_goes_ends_the_wait(driver):
    with closing(Gate.open(driver.environment(1))) as gate, waiting(gate) as place:
        driver.wait_for("ready", 1)
        driver.vanish()
        with pytest.raises(JobOver, match="is gone"):
            place.result(10)


def test_another_secret_is_turned_away(driver):
    with pytest.raises(RendezvousError, match="turned it away"):
        Gate.open(driver.environment(1) | {"ENGINE_SECRET": "another"})
    until(lambda: driver.said, "a line")
    assert "does not know the secret" in driver.said[0]
    assert driver.heard == []


def test_a_second_process_of_one_number_is_turned_away(driver):
    with closing(Gate.open(driver.environment(1))) as gate, waiting(gate) as place:
        driver.wait_for("ready", 1)
        with pytest.raises(RendezvousError, match="no other process that speaks for the same worker"):
            Gate.open(driver.environment(1))
        driver.place(1, [1])
        assert place.result(10).place.rank == 0
    until(lambda: 1 not in driver.server._workers, "the worker has left")
    Gate.open(driver.environment(1)).close()


def test_an_agent_without_the_secret_is_not_believed():
    """A listener at the name that cannot sign gets the worker's greeting, and nothing more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"engine-gate-test-{os.getpid()}"
        listener.bind(f"\0{name}")
        listener.listen()

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                stream = AuthenticatedStream(derive_key("guessed", "gate"), SERVER)
                connection.sendall(stream.open())
                connection.recv(1 << 16)
                connection.sendall(stream.make_refusal())
                connection.recv(1 << 16)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(RendezvousError, match="turned it away"):
            Gate.open({"ENGINE_GATE": name, "ENGINE_SECRET": SECRET, "ENGINE_WORKER": "0", "ENGINE_SLOT": "0"})
        thread.join(10)


def test_half_messages_and_strangers_leave_the_others_alone(driver):
    """Bytes of strangers, half a greeting, more connections than allowed: a worker still comes through."""
    strangers = []
    try:
        for number in range(80):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stranger.connect(f"\0{driver.server.name}")
            strangers.append(stranger)
            client = AuthenticatedStream(derive_key(SECRET, "gate"), CLIENT)
            while client.receive() is None:
                client.feed(stranger.recv(client.missing_bytes()))
            greeting = client.encode({"worker": number})
            with_what = (greeting[: len(greeting) // 2], b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0", b"")
            stranger.sendall(with_what[number % 4])
        with closing(Gate.open(driver.environment(1))) as gate, waiting(gate) as place:
            driver.wait_for("ready", 1)
            driver.place(1, [1])
            assert place.result(10).place.size == 1
        assert len(driver.server._strangers) <= 32
    finally:
        for stranger in strangers:
            stranger.close()


def test_all_workers_of_a_large_host_may_come_at_once():
    """Workers greet, and are silent until their programs come to the gate: none of them exceeds the limit."""
    with FakeDriver(most=150) as driver, ExitStack() as opened:
        gates = [opened.enter_context(closing(Gate.open(driver.environment(worker)))) for worker in range(150)]
        for gate in gates:
            gate.request_leave()
            assert not gate.is_void(1)
        for worker in range(150):
            driver.wait_for("leaving", worker)


def test_what_an_ended_worker_has_said_is_told_before_its_end_and_others_wait(driver):
    """Another worker may send messages as fast as they are read."""
    with closing(Gate.open(driver.environment(1))) as ended, closing(Gate.open(driver.environment(2))) as other:
        told: list[list[int]] = []

        def end() -> None:
            other.report_joined(1)
            ended.report_joined(1)
            driver.server.forget_worker(1)
            told.append([worker for worker, _ in driver.heard])

        driver.do(end)
        assert told == [[1]]
        driver.wait_for("joined", 2)


def test_workers_may_wait_until_their_agent_has_time():
    """The agent is starting other workers: as many connections as there are workers may wait to be accepted."""
    with ExitStack() as opened:
        loop = opened.enter_context(closing(ReaderLoop()))
        worker_server = opened.enter_context(
            closing(WorkerServer(SECRET, False, 150, loop, SimpleNamespace(show_line=print)))
        )
        for _ in range(150):
            visitor = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            visitor.settimeout(10)
            visitor.connect(f"\0{worker_server.name}")


def test_a_handler_of_signals_may_say_that_the_worker_leaves(driver):
    """Preemption may come at any time, even within another message; neither message is damaged."""
    with closing(Gate.open(driver.environment(1))) as gate:
        before = signal.signal(signal.SIGUSR1, lambda *_: gate.request_leave())
        try:
            encode = gate._stream.encode

            def interrupted(message):
                data = encode(message)
                if message["kind"] == "done":
                    signal.raise_signal(signal.SIGUSR1)
                return data

            gate._stream.encode = interrupted
            gate.report_done(1)
            driver.wait_for("leaving", 1)
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert [message["kind"] for _, message in driver.heard] == ["done", "leaving"]


def test_workers_of_several_hosts_say_where_they_listen():
    with FakeDriver(several=True) as driver, closing(Gate.open(driver.environment(1))) as first:
        with closing(Gate.open(driver.environment(2))) as second, waiting(first) as one, waiting(second) as two:
            port = driver.wait_for("ready", 1)["port"]
            driver.wait_for("ready", 2)
            driver.place(1, [1, 2], {1: "a", 2: "b"}, hub=f"127.0.0.1:{port}")
            told, other = one.result(10), two.result(10)
        assert told.hub == other.hub == f"127.0.0.1:{port}" and other.listener is None
        assert told.listener is not None
        with socket.create_connection(("127.0.0.1", port), 10), socket.socket(fileno=told.listener) as listener:
            listener.accept()[0].close()


@pytest.mark.parametrize("name", ["ENGINE_GATE", "ENGINE_SECRET", "ENGINE_WORKER", "ENGINE_SLOT"])
def test_what_is_missing_is_named(driver, name):
    with pytest.raises(ConfigError, match=f"{name} is not set"):
        Gate.open(driver.environment(1) | {name: ""})


def test_nobody_at_the_gate_is_told_at_once(driver):
    with pytest.raises(RendezvousError, match="does not answer at ENGINE_GATE=engine-nobody"):
        Gate.open(driver.environment(1) | {"ENGINE_GATE": "engine-nobody"})


def test_a_worker_waits_for_descriptors_of_the_agent(driver):
    """No descriptors are left for a connection: that is reported once, and it is accepted when another has ended."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(Gate.open(driver.environment(1))) as first, ThreadPoolExecutor(1) as pool:
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, before[1]))  # the last one is the client's own end
        try:
            second = pool.submit(Gate.open, driver.environment(2))
            until(lambda: driver.said, "a line")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert not second.done()
        first.close()
        second.result(10).close()
    (line,) = driver.said
    assert line.startswith("no worker can come to the gate: ") and "ulimit -n" in line
