"""The engine's waits and wake-ups as step lists, small enough to explore every interleaving (machine.py).

Each function writes the steps of the function of that name in engine_ext (control/driver.pyx, control/engines.pyx,
control/completion.pyx, shared/segment.pxd, control/execute.pyx, transport/shm.pyx, hosts/relay.pyx, hosts/network.pyx,
coordinator/frozen.pyx), access by access and with the same order of memory; change them together. A scenario puts a
few threads around one window. Nothing here has a timeout: a wait that the engine would end by a tick never ends, so
that a lost wake-up is a state in which nothing happens any more though there is something to do.

A mutant leaves out one fence, one look or one rule. Every mutant must be found; the table says by which scenario.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from .machine import Code, Explorer, Found, Memory, Program, Stores, Value, Views

ENGINE_ASLEEP, ENGINE, WAITER = 0, 1, 2  # state.pxd
DOOR_ENGINE, DOOR_WAITER, DOORS, IN_ENTRY, CYCLE, COUNT_SHIFT = 1, 2, 3, 4, 8, 8  # layout.h
NOTHING = 99  # transport.pxd: a stage that no other rank must reach
READER_NONE, READER_THREAD, READER_CALLER = 0, 1, 2  # connections.pxd

ENGINES = ("world.", "set.")  # of a process with two; one alone has no prefix
OF_AN_ENGINE = {"role", "asleep", "door1", "door2", "tail", "cursor"}  # words that each engine of a process has

MODELS: tuple[Memory, ...] = (Stores(), Views())


class EngineCode(Code):
    """Steps that are for one engine at a time of those of a process."""

    def __init__(self, without: frozenset[str], constant: dict[str, int]) -> None:
        super().__init__(without=without, constant=constant)
        # Prefix of the words, and of the registers kept between turns, of the engine that the next steps are for
        self.engine = ""

    def load(self, into: str, word: str, acquire: bool = False) -> None:
        super().load(into, self.of_engine(word), acquire)

    def store(self, word: str, value: Value, release: bool = False) -> None:
        super().store(self.of_engine(word), value, release)

    def add(self, word: str, value: int) -> None:
        super().add(self.of_engine(word), value)

    def cas(self, into: str, word: str, expected: Value, value: Value) -> None:
        super().cas(into, self.of_engine(word), expected, value)

    def futex_wait(self, word: str, expected: Value) -> None:
        super().futex_wait(self.of_engine(word), expected)

    def futex_wake(self, word: str) -> None:
        super().futex_wake(self.of_engine(word))

    def of_engine(self, word: str) -> str:
        return self.engine + word if word in OF_AN_ENGINE else word


class Thread(EngineCode):
    """The steps of one thread of a rank."""

    def __init__(self, without: frozenset[str], **constant: int) -> None:
        super().__init__(without, {"stop": 0, **constant})
        # Writes the steps of `drive_once`: register `moved` says whether it did anything
        self.drive: Callable[[], None] = self.no_work
        # Writes the steps that put the reasons for sleeping into register `reasons`
        self.reasons: Callable[[], None] | None = None
        self.waits = 0  # 1 while it writes the steps of a driver that itself counts as a waiter

    def no_work(self) -> None:
        self.let("moved", 0)

    # ---- segment.pxd

    def ring(self, door: int) -> None:
        if door == DOOR_WAITER:
            self.add("door2", 1)
            self.futex_wake("door2")
            return
        counts = (("door1", 1), ("thread", 1))
        for word, more in reversed(counts) if "RING_ORDER" in self.without else counts:
            self.add(word, more)
        self.futex_wake("thread")

    def wake_unfenced(self, only: int = 0) -> None:
        out = self.fresh()
        self.load("asleep", "asleep")
        self.jump_if(lambda r: not r["asleep"] & DOORS or (only and not r["asleep"] & only), out)
        for door in (DOOR_ENGINE, DOOR_WAITER):
            other = self.fresh()
            self.jump_if(lambda r, door=door: r["asleep"] & DOORS != door, other)
            self.load("rung", f"door{door}")
            self.jump_if(lambda r: r["rung"] != r["asleep"] >> COUNT_SHIFT, out)
            self.forget("asleep", "rung")
            self.ring(door)
            self.jump(out)
            self.label(other)
        self.label(out)
        self.forget("asleep", "rung")

    def wake(self, only: int = 0) -> None:
        self.fence("WAKE")
        self.wake_unfenced(only)

    # ---- execute.pyx

    def complete_op(self, op: str) -> None:
        self.add(op, 1)  # or32: done

    def wake_waiters(self) -> None:
        out = self.fresh()
        self.fence("DONE")
        self.load("others", "waiters")
        self.jump_if(lambda r, own=self.waits: r["others"] <= own, out)
        self.add("local", 1)
        self.futex_wake("local")
        self.label(out)
        self.forget("others")

    def run_schedule(self, completes: dict[int, str] | None = None) -> None:
        """Execute one entry. `completes` gives the operation that each entry completes, by position."""
        out, nothing = self.fresh(), self.fresh()
        self.load("tail", "tail", acquire=True)
        self.load("cursor", "cursor")
        self.jump_if(lambda r: r["cursor"] >= r["tail"], nothing)
        for position, op in (completes or {}).items():
            other = self.fresh()
            self.jump_if(lambda r, position=position: r["cursor"] != position, other)
            self.complete_op(op)
            self.wake_waiters()
            self.label(other)
        self.store("cursor", lambda r: r["cursor"] + 1, release=True)
        self.let("moved", 1)
        self.jump(out)
        self.label(nothing)
        self.let("moved", 0)
        self.label(out)
        self.forget("tail", "cursor", "others")

    def forget(self, *registers: str) -> None:
        """Reset registers that are never read again, so that they do not make states different."""
        for register in registers:
            self.let(register, 0)

    # ---- driver.pyx

    def announce_sleep(self, door: int, seen: str) -> None:
        if self.reasons is not None:
            self.reasons()
        counted = "COUNT" not in self.without
        shift = COUNT_SHIFT if counted else 64
        self.store("asleep", lambda r: door | r.get("reasons", 0) | (r[seen] << shift) % (1 << 32), release=True)

    def drive_after_fence(self, name: str) -> None:
        if name in self.without:
            self.let("moved", 0)
        else:
            self.drive()

    def drive_unattended(self) -> None:
        again, announce, release, out = (self.fresh() for _ in range(4))
        late, driven, calm = "DOOR_FIRST" in self.without, self.engine + "driven", self.engine + "calm"
        self.let("moved", 0)
        self.load("door", "door1", acquire=True)
        self.jump_if(lambda r: r[calm] and r["door"] == r[driven], out)  # is_due
        if not late:
            self.let(driven, lambda r: r["door"])
        self.let(calm, 1)
        self.fence("TAKE")
        self.cas("mine", "role", ENGINE_ASLEEP, ENGINE)
        self.jump_if(lambda r: not r["mine"], out)
        self.store("asleep", 0)
        self.label(again)
        self.drive()
        self.jump_if(lambda r: not r["moved"], announce)
        self.load("others", "waiters")
        self.jump_if(lambda r: not r["others"], again)
        self.label(announce)
        self.announce_sleep(DOOR_ENGINE, "door")
        self.fence("ENGINE")
        self.drive_after_fence("LOOK_ENGINE")
        self.let(calm, lambda r: int(not r["moved"]))
        self.store("role", ENGINE_ASLEEP, release=True)
        self.fence("ROLE")
        self.load("others", "waiters")
        self.jump_if(lambda r: not r["others"], release)
        if "WAKE_FOR_ROLE" not in self.without:
            self.add("local", 1)
            self.futex_wake("local")
        self.label(release)
        self.label(out)
        if late:
            self.load("door", "door1", acquire=True)
            self.let(driven, lambda r: r["door"])
        self.forget("others", "mine", "door")

    # ---- engines.pyx

    def engine_thread(self, engines: tuple[str, ...] = ("",)) -> None:
        loop, out = self.fresh(), self.fresh()
        late, stop_first = "THREAD_FIRST" in self.without, "THREAD_BEFORE_STOP" in self.without
        self.label(loop)
        if not late and not stop_first:
            self.load("count", "thread", acquire=True)
        self.load("stop", "stop", acquire=True)  # under a lock
        self.jump_if(lambda r: r["stop"], out)
        if stop_first:
            self.load("count", "thread", acquire=True)
        for self.engine in engines:
            self.drive_unattended()
        self.engine = ""
        if "MOVED_AGAIN" not in self.without:
            self.jump_if(lambda r: not all(r[engine + "calm"] for engine in engines), loop)
        if late:
            self.load("count", "thread", acquire=True)
        self.futex_wait("thread", lambda r: r["count"])
        self.forget("count", "moved")
        self.jump(loop)
        self.label(out)

    # ---- driver.pyx

    def give_back(self) -> None:
        alone, out, ring = self.fresh(), self.fresh(), self.fresh()
        self.load("cursor", "cursor")
        self.load("door", "door1", acquire=True)
        self.announce_sleep(DOOR_ENGINE, "door")
        self.store("role", ENGINE_ASLEEP, release=True)
        self.fence("GIVE_BACK")
        self.load("others", "waiters")
        self.jump_if(lambda r: r["others"] <= 1, alone)
        if "PASS_ON" not in self.without:
            self.add("local", 1)
            self.futex_wake("local")
        self.label(alone)
        self.forget("others")
        if "LOOK_GIVE_BACK" not in self.without:
            self.load("tail", "tail", acquire=True)
            self.jump_if(lambda r: r["tail"] != r["cursor"], ring)
        if "LOOK_RUNG" not in self.without:
            self.load("rung", "door1")
            self.jump_if(lambda r: r["rung"] != r["door"], ring)
        self.jump(out)
        self.label(ring)
        self.forget("tail", "cursor", "door", "rung")
        self.ring(DOOR_ENGINE)
        self.label(out)
        self.forget("tail", "cursor", "door", "rung")

    def drive_until(self, op: str) -> None:
        top, awake, out = self.fresh(), self.fresh(), self.fresh()
        self.waits = 1
        self.label(top)
        self.load("done", op, acquire=True)
        self.jump_if(lambda r: r["done"], out)
        self.load("stop", "stop", acquire=True)
        self.jump_if(lambda r: r["stop"], out)
        self.drive()
        self.jump_if(lambda r: r["moved"], top)
        self.load("door", "door2", acquire=True)
        self.announce_sleep(DOOR_WAITER, "door")
        self.fence("CALLER")
        self.drive_after_fence("LOOK_CALLER")
        self.jump_if(lambda r: r["moved"], awake)
        self.load("done", op, acquire=True)
        self.jump_if(lambda r: r["done"], awake)
        if "RECHECK_STOP" not in self.without:
            self.load("stop", "stop", acquire=True)
            self.jump_if(lambda r: r["stop"], awake)
        self.futex_wait("door2", lambda r: r["door"])
        self.label(awake)
        self.forget("door", "moved")
        self.store("asleep", 0)
        self.jump(top)
        self.label(out)
        self.waits = 0

    def driver_wait(self, op: str) -> None:
        late = "LOCAL_DOOR_FIRST" in self.without
        loop, held, out = self.fresh(), self.fresh(), self.fresh()
        self.add("waiters", 1)
        self.label(loop)
        self.load("done", op, acquire=True)
        self.jump_if(lambda r: r["done"], out)
        self.fence("WAITER")
        if not late:
            self.load("local", "local", acquire=True)
        self.load("stop", "stop", acquire=True)
        self.jump_if(lambda r: r["stop"], held)
        self.cas("mine", "role", ENGINE_ASLEEP, WAITER)
        self.jump_if(lambda r: not r["mine"], held)
        self.forget("local", "mine")
        self.store("asleep", 0)
        self.drive_until(op)
        self.give_back()
        self.jump(loop)
        self.label(held)
        if "RECHECK_DONE" not in self.without:
            self.load("done", op, acquire=True)
            self.jump_if(lambda r: r["done"], loop)
        if late:
            self.load("local", "local", acquire=True)
        self.futex_wait("local", lambda r: r["local"])
        self.forget("local")
        self.jump(loop)
        self.label(out)
        self.add("waiters", -1)

    def begin_stop(self) -> None:
        self.store("stop", 1, release=True)  # engines.pyx: engines_leave
        self.add("thread", 1)
        self.futex_wake("thread")
        for door in (DOOR_ENGINE, DOOR_WAITER):
            self.ring(door)

    def end_stop(self, op: str) -> None:
        """The engine thread has ended."""
        self.take("role", ENGINE_ASLEEP, ENGINE)
        self.complete_op(op)
        self.wake_waiters()
        self.store("role", ENGINE_ASLEEP, release=True)

    def notify_leader(self, mine: str, others: list[str]) -> None:
        """Submission that may complete a set: `mine` and `others` are bits of the ranks that are not the leader."""
        out = self.fresh()
        self.fence("SUBMIT")
        self.load("asleep", "asleep")
        self.jump_if(lambda r: not r["asleep"], out)
        for other in others:
            self.load("bit", other)
            self.jump_if(lambda r: not r["bit"], out)
        self.wake_unfenced()
        self.label(out)
        self.forget("asleep", "bit")

    # ---- the end of a pass: relay.pyx, frozen.pyx

    def driver_wait_for_all(self, on: bool) -> None:
        self.store("wait_all", int(on), release=True)
        self.load("waits", "waits")
        self.store("waits", lambda r: r["waits"] + 1, release=True)
        self.forget("waits")

    def send_up(self) -> None:
        """One look of a leader. `sent.` words are the coordinator's copies; registers of that name, their values."""
        again, off, done = self.fresh(), self.fresh(), self.fresh()
        behind = "WAIT_BEHIND" not in self.without
        self.load("waits", "waits", acquire=True)
        self.load("arrivals", "arrivals", acquire=True)
        self.let("named", lambda r: r["waits"] != r["sent.waits"] or r["arrivals"] != r["sent.arrivals"])
        for name in ("a", "b"):
            self.load(name, name, acquire=True)
        self.load("wait_all", "wait_all", acquire=True)
        if "WAIT_AGAIN" not in self.without:
            for word in ("waits", "arrivals"):
                self.load("now", word, acquire=True)
                self.jump_if(lambda r, word=word: r["now"] != r[word], again)
            self.jump(off)
            self.label(again)
            self.let("wait_all", 0)
            self.label(off)
        if "WAIT_OFF" not in self.without:
            self.jump_if(lambda r: r["wait_all"] and r["waits"] == r["sent.waits"], done)
            self.add_changed("wait_all", 0)
            self.label(done)
        if not behind:
            self.add_changed("wait_all", lambda r: r["wait_all"])
        for name in ("a", "b"):
            self.add_changed(name, lambda r, name=name: r[name] if r["named"] else r["sent." + name])
        if behind:
            self.add_changed("wait_all", lambda r: r["wait_all"])
        for word in ("arrivals", "waits"):
            self.add_changed(word, lambda r, word=word: r[word])
        self.forget("waits", "arrivals", "named", "a", "b", "wait_all", "now")

    def add_changed(self, word: str, value: Value) -> None:
        """Send only changed words. Frames arrive in order, and each word is stored with release."""
        out, sent = self.fresh(), "sent." + word
        self.let("value", value)
        self.jump_if(lambda r: r["value"] == r[sent], out)
        self.let(sent, lambda r: r["value"])
        self.store(sent, lambda r: r["value"], release=True)
        self.label(out)
        self.forget("value")

    def cannot_fill(self) -> None:
        """Break the batch, with member `a` of the second pass held, if `b` seems not to come in that pass."""
        out = self.fresh()
        self.load("a", "sent.a", acquire=True)
        self.jump_if(lambda r: r["a"] < 2, out)
        self.load("ended", "sent.wait_all", acquire=True)
        self.jump_if(lambda r: not r["ended"], out)
        self.load("b", "sent.b", acquire=True)
        self.jump_if(lambda r: r["b"] == 2, out)
        self.store("broken", 1)
        self.label(out)

    # ---- network.pyx. The kernel's part, under a lock of its own: epoll reports each event once, to who sleeps on it.

    def deliver(self) -> None:
        """Bytes arrive at a socket: the kernel wakes the network thread, unless it has been hushed."""
        out = self.fresh()
        self.take("kernel", 0, 1)
        self.add("bytes", 1)
        self.load("quiet", "hushed")
        self.jump_if(lambda r: r["quiet"], out)
        self.add("events", 1)
        self.futex_wake("events")
        self.label(out)
        self.store("kernel", 0, release=True)

    def hush(self, quiet: int) -> None:
        out = self.fresh()
        self.take("kernel", 0, 1)
        self.store("hushed", quiet)
        if not quiet and "HUSH_LOOKS" not in self.without:
            self.load("there", "bytes")
            self.load("taken", "taken")
            self.jump_if(lambda r: r["there"] == r["taken"], out)
            self.add("events", 1)
            self.futex_wake("events")
        self.label(out)
        self.store("kernel", 0, release=True)
        self.forget("there", "taken")

    def read_links(self) -> None:
        """Only one thread at a time may be here. `seen` stands for the words that are stored for other ranks."""
        alone = self.fresh()
        self.load("other", "inside")
        self.jump_if(lambda r: not r["other"], alone)
        self.store("both", 1)
        self.label(alone)
        self.store("inside", 1)
        self.take("kernel", 0, 1)
        self.load("there", "bytes")
        self.load("taken", "taken")
        self.store("taken", lambda r: r["there"])
        self.store("kernel", 0, release=True)
        self.let("moved", lambda r: int(r["there"] != r["taken"]))
        self.store("seen", lambda r: r["there"], release=True)
        self.store("inside", 0)
        self.forget("other", "there", "taken")

    def become_reader(self, who: int, otherwise: str) -> None:
        if "READER" not in self.without:
            self.cas("mine", "reader", READER_NONE, who)
            self.jump_if(lambda r: not r["mine"], otherwise)

    def network_thread(self) -> None:
        loop, again = self.fresh(), self.fresh()
        self.label(loop)
        self.futex_wait("events", lambda r: r["count"])
        self.take("kernel", 0, 1)
        self.load("count", "events")
        self.store("kernel", 0, release=True)
        self.become_reader(READER_THREAD, loop)
        self.label(again)
        self.read_links()
        self.jump_if(lambda r: r["moved"], again)
        self.store("reader", READER_NONE, release=True)
        self.jump(loop)

    def network_read(self, otherwise: str) -> None:
        self.become_reader(READER_CALLER, otherwise)
        self.hush(1)
        self.read_links()

    def network_stop_reading(self) -> None:
        if "HUSH_BEHIND" in self.without:
            self.hush(0)
        self.store("reader", READER_NONE, release=True)
        if "HUSH_BEHIND" not in self.without:
            self.hush(0)


# Helpers, the kernel's steps, and the two halves of driver_stop. Every other function of `Thread` is one of the engine.
WITHOUT_COUNTERPART = {
    *("no_work", "forget", "drive_after_fence", "begin_stop", "end_stop"),
    *("deliver", "hush", "become_reader"),
}


@dataclass(frozen=True)
class Scenario:
    """A window of the protocol."""

    words: dict[str, int]
    threads: list[Program]
    judge: Callable[[dict[str, int], dict[str, str | None]], str]


ALONE = {"role": ENGINE_ASLEEP, "waiters": 0}  # an engine thread without callers in its process
PROCESS = {"role": ENGINE_ASLEEP, "asleep": DOOR_ENGINE, "door1": 0, "door2": 0, "thread": 0, "waiters": 0, "local": 0}
SLEEPER = {word: PROCESS[word] for word in ("asleep", "door1", "door2", "thread")}


def _publisher(without: frozenset[str], first: int, last: int, late: bool = False) -> Program:
    """Coordinator on another rank: appends entries and rings after each; if `late`, one earlier ring is outstanding."""
    code = Thread(without)
    if late:
        code.wake()
    for position in range(first, last):
        code.store("tail", position + 1, release=True)
        code.wake()
    return Program.of("publisher", code)


def _engine(code: Thread) -> Program:
    code.engine_thread()
    return Program.of("engine", code)


def entries(without: frozenset[str]) -> Scenario:
    """The engine thread executes the entries that another rank appends."""
    engine = Thread(without, **ALONE)
    engine.drive = engine.run_schedule

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        return "" if words["cursor"] == words["tail"] else "the engine thread sleeps before the end of the schedule"

    return Scenario(SLEEPER | {"tail": 0, "cursor": 0}, [_publisher(without, 0, 2), _engine(engine)], judge)


def sets(without: frozenset[str]) -> Scenario:
    """One thread drives two engines; another rank appends an entry in each."""
    engine = Thread(without, waiters=0, **{each + "role": ENGINE_ASLEEP for each in ENGINES})
    engine.drive = lambda: engine.run_schedule()
    engine.engine_thread(ENGINES)
    publishers = []
    for each in ENGINES:
        code = Thread(without)
        code.engine = each
        code.store("tail", 1, release=True)
        code.wake()
        publishers.append(Program.of(each, code))

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        late = [each for each in ENGINES if words[each + "cursor"] != words[each + "tail"]]
        return f"the engine thread sleeps though there is an entry of {late}" if late else ""

    words = {each + word: value for each in ENGINES for word, value in {**SLEEPER, "tail": 0, "cursor": 0}.items()}
    words = {word: value for word, value in words.items() if not word.endswith("thread")}
    return Scenario(words | {"thread": 0}, [*publishers, Program.of("engine", engine)], judge)


def call(without: frozenset[str]) -> Scenario:
    """A caller takes the driver's role from the sleeping engine thread, and waits for an entry's operation."""
    caller = Thread(without)
    caller.drive = lambda: caller.run_schedule({0: "op"})
    caller.driver_wait("op")

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        return "" if asleep["caller"] is None else f"the caller sleeps on {asleep['caller']} for good"

    return Scenario(
        PROCESS | {"tail": 0, "cursor": 0, "op": 0}, [_publisher(without, 0, 1), Program.of("caller", caller)], judge
    )


def give_back(without: frozenset[str]) -> Scenario:
    """A caller has executed the first entry and gives the role back; the second is for the engine thread.

    The publisher of the first has yet to ring for it, so that the ring may hit the sleep that is announced only now.
    """
    caller, engine = Thread(without, waiters=1), Thread(without, waiters=0)
    engine.drive = engine.run_schedule
    caller.give_back()

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        return "" if words["cursor"] == words["tail"] else "the engine thread sleeps before the end of the schedule"

    return Scenario(
        PROCESS | {"role": WAITER, "asleep": 0, "tail": 1, "cursor": 1},
        [_publisher(without, 1, 2, late=True), Program.of("caller", caller), _engine(engine)],
        judge,
    )


def two_waiters(without: frozenset[str]) -> Scenario:
    """Two threads of a rank wait; an entry completes the first one's operation, but the second one's never comes."""
    waiters = []
    for op in ("op1", "op2"):
        code = Thread(without)
        code.drive = lambda code=code: code.run_schedule({0: "op1"})  # type: ignore[misc]
        code.driver_wait(op)
        waiters.append(Program.of(op, code))

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        if asleep["op1"] is not None:
            return f"the waiter of an operation that is done sleeps on {asleep['op1']}"
        return "" if asleep["op2"] == "door2" else "nobody drives though a thread waits"

    return Scenario(PROCESS | {"tail": 1, "cursor": 0, "op1": 0, "op2": 0}, waiters, judge)


def role(without: frozenset[str]) -> Scenario:
    """The engine thread has a spurious wake-up while a thread begins to wait, which must get the driver's role."""
    engine, waiter, bell = Thread(without), Thread(without), Thread(without)
    waiter.driver_wait("op")
    bell.ring(DOOR_ENGINE)

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        return "" if asleep["waiter"] == "door2" else "nobody drives though a thread waits"

    return Scenario(
        PROCESS | {"op": 0}, [Program.of("bell", bell), Program.of("waiter", waiter), _engine(engine)], judge
    )


def stages(without: frozenset[str]) -> Scenario:
    """The engine thread, in the middle of an entry, needs another rank's first stage, then its second."""
    engine, other = Thread(without, **ALONE), Thread(without)
    stages = ("packed", "reduced")

    def drive() -> None:
        out = engine.fresh()
        engine.let("moved", 0)
        for at, stage in enumerate(stages):
            after = engine.fresh()
            engine.jump_if(lambda r, at=at: r["passed"] != at, after)
            engine.load("theirs", stage, acquire=True)
            engine.jump_if(lambda r: not r["theirs"], out)
            engine.let("passed", at + 1)
            engine.let("moved", 1)
            engine.jump(out)
            engine.label(after)
        engine.label(out)
        engine.forget("theirs")

    def needs() -> None:
        for at, stage in enumerate(stages):
            if not ("NEED" in without and at):
                engine.store("need." + stage, lambda r, at=at: 1 if r["passed"] == at else NOTHING)
        engine.let("reasons", lambda r: IN_ENTRY if r["passed"] < len(stages) else 0)

    engine.drive, engine.reasons = drive, needs
    for at in range(len(stages)):
        out, rings = other.fresh(), other.fresh()
        other.store(stages[at], 1, release=True)
        other.fence("STAGE")
        other.load("asleep", "asleep")
        other.jump_if(lambda r: not r["asleep"] & IN_ENTRY, out)
        for earlier, stage in enumerate(stages):
            other.load("need", "need." + stage)
            other.jump_if(lambda r, earlier=earlier, at=at: int(earlier <= at) >= r["need"], rings)
        other.jump(out)
        other.label(rings)
        other.wake_unfenced(IN_ENTRY)
        other.label(out)
        other.forget("need", "asleep")

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        return "" if words["asleep"] & IN_ENTRY == 0 else "the engine thread sleeps in an entry that could go on"

    return Scenario(
        SLEEPER | {"packed": 0, "reduced": 0, "need.packed": 1, "need.reduced": NOTHING},
        [Program.of("other", other), _engine(engine)],
        judge,
    )


def submissions(without: frozenset[str]) -> Scenario:
    """Two ranks submit the last two bits of a set: only one that sees the other's must wake the leader."""
    leader = Thread(without, **ALONE)

    def drive() -> None:
        out = leader.fresh()
        leader.let("moved", 0)
        leader.jump_if(lambda r: r["appended"], out)
        for rank in ("a", "b"):
            leader.load("bit", "ready." + rank, acquire=True)
            leader.jump_if(lambda r: not r["bit"], out)
        leader.let("appended", 1)
        leader.store("tail", 1, release=True)
        leader.let("moved", 1)
        leader.label(out)
        leader.forget("bit")

    leader.drive = drive
    programs = []
    for mine, other in (("a", "b"), ("b", "a")):
        code = Thread(without)
        code.store("ready." + mine, 1, release=True)
        code.notify_leader("ready." + mine, ["ready." + other])
        programs.append(Program.of("rank " + mine, code))

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        return "" if words["tail"] else "every rank has brought the tensor, and the leader sleeps"

    return Scenario(SLEEPER | {"ready.a": 0, "ready.b": 0, "tail": 0}, [*programs, _engine(leader)], judge)


def cycle(without: frozenset[str]) -> Scenario:
    """A batch is open and its cycle is long: a waiter for a member closes it, whichever rank submits last."""
    leader, waiter, last = Thread(without, **ALONE), Thread(without), Thread(without)

    def drive() -> None:
        out, closes, queued = leader.fresh(), leader.fresh(), leader.fresh()
        leader.let("moved", 0)
        leader.jump_if(lambda r: r["queued"] == 2, out)
        leader.jump_if(lambda r: r["queued"] == 1, queued)
        leader.load("bit", "ready", acquire=True)
        leader.jump_if(lambda r: not r["bit"], out)
        leader.let("queued", 1)
        leader.let("moved", 1)
        leader.label(queued)
        leader.load("bit", "awaited", acquire=True)
        leader.jump_if(lambda r: r["bit"], closes)
        leader.jump(out)
        leader.label(closes)
        leader.let("queued", 2)
        leader.let("moved", 1)
        leader.store("tail", 1, release=True)
        leader.label(out)
        leader.forget("bit")

    def reasons() -> None:
        # An earlier tensor keeps the batch open from the start.
        leader.let("reasons", lambda r: CYCLE if r["queued"] < 2 else 0)

    leader.drive, leader.reasons = drive, reasons
    waiter.store("awaited", 1, release=True)
    waiter.wake(CYCLE)
    out = last.fresh()
    last.store("ready", 1, release=True)
    last.fence("SUBMIT")
    last.load("asleep", "asleep")
    last.jump_if(lambda r: not r["asleep"], out)
    last.load("bit", "awaited")
    last.jump_if(lambda r: r["asleep"] & CYCLE and not r["bit"], out)
    last.wake_unfenced()
    last.label(out)

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        return "" if words["tail"] else "somebody waits for a tensor that is ready, and the leader sleeps out the cycle"

    words = SLEEPER | {"asleep": DOOR_ENGINE | CYCLE, "ready": 0, "awaited": 0, "tail": 0}
    return Scenario(words, [Program.of("waiter", waiter), Program.of("last", last), _engine(leader)], judge)


def stop(without: frozenset[str]) -> Scenario:
    """`driver_stop` while the engine thread is awake."""
    engine, stopper = Thread(without, **ALONE), Thread(without)
    del engine.constant["stop"], stopper.constant["stop"]
    stopper.begin_stop()

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        return "" if asleep["engine"] is None else "the engine thread sleeps and is never joined"

    return Scenario(SLEEPER | {"stop": 0}, [Program.of("stopper", stopper), _engine(engine)], judge)


def stop_waiter(without: frozenset[str]) -> Scenario:
    """`driver_stop` runs after the engine thread's end, while a thread begins to wait for an operation that fails."""
    waiter, stopper = Thread(without), Thread(without)
    del waiter.constant["stop"], stopper.constant["stop"]
    waiter.driver_wait("op")
    stopper.begin_stop()
    stopper.end_stop("op")

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        return "" if asleep["waiter"] is None else f"the waiter sleeps on {asleep['waiter']} after the end"

    return Scenario(
        PROCESS | {"stop": 0, "op": 0, "tail": 0, "cursor": 0},
        [Program.of("stopper", stopper), Program.of("waiter", waiter)],
        judge,
    )


def clock(without: frozenset[str]) -> Scenario:
    """A thread reads the process's clock twice, while another asks for the last reading (platform/clock.h)."""
    looking, asking = Thread(without), Thread(without)
    for turn in (1, 2):  # patience_look
        looking.fence("TURN", "release")
        looking.store(f"at{turn % 2}", turn)
        looking.store(f"seen{turn % 2}", turn)
        looking.store("turn", turn, release=True)
    again = asking.fresh()  # patience_last
    asking.label(again)
    asking.load("turn", "turn", acquire=True)
    odd, read = asking.fresh(), asking.fresh()
    asking.jump_if(lambda r: r["turn"] % 2, odd)
    asking.load("at", "at0")
    asking.load("seen", "seen0")
    asking.jump(read)
    asking.label(odd)
    asking.load("at", "at1")
    asking.load("seen", "seen1")
    asking.label(read)
    asking.fence("LOOK", "acquire")
    asking.load("after", "turn")
    asking.jump_if(lambda r: r["after"] != r["turn"], again)
    asking.store("got", lambda r: 10 * r["at"] + r["seen"])

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        return "" if words["got"] % 11 == 0 else "the two words are not of one look"

    words = {"turn": 0, "at0": 0, "seen0": 0, "at1": 0, "seen1": 0, "got": 0}
    return Scenario(words, [Program.of("looking", looking), Program.of("asking", asking)], judge)


def streamed(without: frozenset[str]) -> Scenario:
    """A rank packs one slot after the other past the caches and publishes each; another reads the published slots."""
    packing, reading = Thread(without), Thread(without)
    words = {"packed": 0, "missing": 0}
    for chunk in (1, 2, 3):
        for part in ("a", "b"):  # kernels_impl.h: pack
            words[f"slot{chunk}{part}"] = 0
            packing.stream(f"slot{chunk}{part}", 1)
        packing.fence("STREAM", "stream")
        packing.store("packed", chunk, release=True)  # shm.pyx: publish
    out = reading.fresh()
    reading.load("passed", "packed", acquire=True)
    for chunk in (1, 2, 3):
        reading.jump_if(lambda r, chunk=chunk: r["passed"] < chunk, out)
        for part in ("a", "b"):
            reading.load("there", f"slot{chunk}{part}")
            reading.let("missing", lambda r: r["missing"] + 1 - r["there"])
    reading.label(out)
    reading.store("missing", lambda r: r["missing"])

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        return "a rank reads a slot before what was packed is there" if words["missing"] else ""

    return Scenario(words, [Program.of("packing", packing), Program.of("reading", reading)], judge)


def passes(without: frozenset[str]) -> Scenario:
    """A rank of another host has waited for a backward pass, submits `a` and `b` of the next one, and waits again.

    Its leader looks twice. The announced waits tell rank 0 which gradients do not come in this pass.
    """
    rank, leader, coordinator = Thread(without), Thread(without), Thread(without)
    rank.driver_wait_for_all(False)
    for arrivals, name in ((3, "a"), (4, "b")):
        rank.store(name, 2, release=True)
        rank.store("arrivals", arrivals, release=True)
    rank.driver_wait_for_all(True)
    before = {"a": 1, "b": 1, "arrivals": 2, "wait_all": 1, "waits": 1}
    for word, value in before.items():
        leader.let("sent." + word, value)
    for _ in range(2):
        leader.send_up()
    coordinator.cannot_fill()

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        return "a batch is broken that would have been filled" if words["broken"] else ""

    words = before | {"sent." + word: value for word, value in before.items()} | {"broken": 0}
    threads = {"rank": rank, "leader": leader, "coordinator": coordinator}
    return Scenario(words, [Program.of(name, code) for name, code in threads.items()], judge)


def reader(without: frozenset[str]) -> Scenario:
    """A caller reads the links twice, each time for a while, and leaves; bytes arrive at any time."""
    peer, caller, network = Thread(without), Thread(without), Thread(without)
    for _ in range(2):
        peer.deliver()
        out = caller.fresh()
        caller.network_read(out)
        caller.network_stop_reading()
        caller.label(out)
    network.network_thread()

    def judge(words: dict[str, int], asleep: dict[str, str | None]) -> str:
        if words["both"]:
            return "two threads read the links at once"
        return "" if words["seen"] == words["bytes"] else "the network thread sleeps though bytes have come"

    words = dict.fromkeys(("kernel", "bytes", "hushed", "events", "taken", "seen", "inside", "both", "reader"), 0)
    threads = {"peer": peer, "caller": caller, "network": network}
    return Scenario(words, [Program.of(name, code) for name, code in threads.items()], judge)


SCENARIOS: dict[str, Callable[[frozenset[str]], Scenario]] = {
    scenario.__name__: scenario
    for scenario in (
        *(entries, sets, call, give_back, two_waiters, role, stages, submissions, cycle, stop, stop_waiter),
        *(clock, streamed, passes, reader),
    )
}
# Omissions of a mutant, and the scenarios that must find it, under at least one of the memory models.
FENCES = {
    "WAKE": ("entries", "call", "cycle"),
    "STAGE": ("stages",),
    "SUBMIT": ("submissions",),
    "ENGINE": ("entries", "stages", "submissions"),
    "CALLER": ("call",),
    "ROLE": ("role",),
    "GIVE_BACK": ("give_back", "two_waiters"),
    "WAITER": ("two_waiters", "role"),
    "DONE": ("stop_waiter",),
    "TAKE": ("give_back",),
    "TURN": ("clock",),
    "LOOK": ("clock",),
    "STREAM": ("streamed",),
}
RULES = {
    "LOOK_ENGINE": ("entries", "stages", "submissions"),  # the pass after the announcement of sleep
    "LOOK_CALLER": ("call",),
    "LOOK_GIVE_BACK": ("give_back",),
    "LOOK_RUNG": ("give_back",),
    "RECHECK_DONE": ("two_waiters",),  # the second look at the operation, after the role was found taken
    "DOOR_FIRST": ("entries",),  # the door's count is read before the look, not after
    "THREAD_FIRST": ("entries", "sets"),  # likewise that of the thread's own door
    "RING_ORDER": ("entries", "sets"),  # an engine's door moves before the thread's is rung
    "MOVED_AGAIN": ("entries", "sets"),  # where the second look moved something, the thread looks again
    "LOCAL_DOOR_FIRST": ("two_waiters",),
    "COUNT": ("entries",),  # `asleep` carries the count of this sleep, so that a ring for another is told apart
    "WAKE_FOR_ROLE": ("role",),  # giving up the role wakes a thread that waits for it
    "PASS_ON": ("two_waiters",),
    "THREAD_BEFORE_STOP": ("stop",),
    "RECHECK_STOP": ("stop_waiter",),
    "NEED": ("stages",),  # each announcement carries its own need
    "WAIT_BEHIND": ("passes",),  # a rank's wait for all is sent after its submissions
    "WAIT_AGAIN": ("passes",),  # a leader checks for changes made while it read
    "WAIT_OFF": ("passes",),  # an earlier wait for all is revoked first
    "READER": ("reader",),  # whoever reads the links has become the reader by a compare-and-swap
    "HUSH_BEHIND": ("reader",),  # the network thread hears of events again behind the end of the caller's reading
    "HUSH_LOOKS": ("reader",),  # the kernel then reports what is there already
}


def explore(scenario: str, memory: Memory, without: frozenset[str] = frozenset()) -> Found:
    """Explore one scenario, or a mutant of it."""
    made = SCENARIOS[scenario](without)
    return Explorer(memory, made.words, made.threads, made.judge).run()


def finders(mutant: str) -> Iterator[tuple[str, str]]:
    """Memory models that find `mutant`, each with the first scenario that shows it."""
    for memory in MODELS:
        for scenario in {**FENCES, **RULES}[mutant]:
            if explore(scenario, memory, frozenset({mutant})).flaw:
                yield memory.name, scenario
                break


def main() -> int:
    bad = 0
    for scenario in SCENARIOS:
        for memory in MODELS:
            result = explore(scenario, memory)
            bad += bool(result.flaw)
            print(f"{scenario:12} {memory.name:5} {result.states:8} states  {result.flaw or 'sound'}", flush=True)
            for number, line in zip(count(1), result.trace, strict=False):
                print(f"    {number:3} {line}")
    for mutant in (*FENCES, *RULES):
        found = dict(finders(mutant))
        bad += not found
        print(f"{mutant:16} {', '.join(f'{model}: {by}' for model, by in found.items()) or 'NOT FOUND'}", flush=True)
    return bad != 0


if __name__ == "__main__":
    sys.exit(main())
