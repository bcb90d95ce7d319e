"""Explores every interleaving of a few threads over shared words, under two memory models.

A thread is a list of steps, made by `Code`. What a model decides is which value a load returns:

`Stores` (total store order, x86)
    A store waits in its thread's buffer until it reaches memory, at any later time, and those past the caches in any
    order. A thread sees its own stores at once. Full fences and locked instructions wait until the buffer is empty,
    `sfence` likewise; release and acquire fences are no instructions.

`Views` (C11 without load buffering; weaker than any processor on whose account a release or an acquire is written)
    Every store to a word stays readable by a thread until the thread knows of a later one. What a thread knows is its
    *view*: one position in the history of each word. A release store carries the view of its thread, an acquire load
    takes it over; relaxed ones do so only through fences. Sequentially consistent fences are totally ordered: each
    takes over what the one before it knew. Loads of different words, and loads behind a store, therefore return values
    in any order that release, acquire and fences do not forbid. Stores past the caches are like others: no processor
    but x86 is given them.
    After Kang et al., A promising semantics for relaxed-memory concurrency (POPL 2017), without promises.

The kernel compares a futex word in memory with what the caller expects and puts it to sleep in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

FENCE_KINDS = ("full", "release", "acquire", "stream")
Registers = dict[str, int]
Value = int | Callable[[Registers], int]


@dataclass(frozen=True)
class Step:
    """One access to memory, or a branch, which is taken together with the access before it."""

    kind: str
    word: str = ""
    into: str = ""
    value: Value = 0
    expected: Value = 0
    ordered: bool = False
    target: str = ""
    fence: str = ""


@dataclass
class Code:
    """The steps of one thread. Labels are positions; registers are named and start at 0.

    A word in `constant` always has that value: no other thread of the scenario changes it.
    """

    steps: list[Step] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    constant: dict[str, int] = field(default_factory=dict)
    _fresh: int = 0

    def fresh(self) -> str:
        self._fresh += 1
        return f"#{self._fresh}"

    def label(self, name: str) -> str:
        self.labels[name] = len(self.steps)
        return name

    def load(self, into: str, word: str, acquire: bool = False) -> None:
        if word in self.constant:
            self.let(into, self.constant[word])
        else:
            self.steps.append(Step("load", word, into, ordered=acquire))

    def store(self, word: str, value: Value, release: bool = False) -> None:
        if word not in self.constant:
            self.steps.append(Step("store", word, value=value, ordered=release))

    def stream(self, word: str, value: Value) -> None:
        """Store past the caches."""
        self.steps.append(Step("stream", word, value=value))

    def add(self, word: str, value: int) -> None:
        """Atomic addition with acquire and release, as every read-modify-write of the engine."""
        self.steps.append(Step("add", word, value=value))

    def cas(self, into: str, word: str, expected: Value, value: Value) -> None:
        """Compare and swap; `into` gets whether it succeeded."""
        if word in self.constant:
            self.let(into, int(self.constant[word] == expected))
        else:
            self.steps.append(Step("cas", word, into, value, expected))

    def take(self, word: str, expected: int, value: int) -> None:
        """Compare and swap, repeated until it succeeds."""
        self.steps.append(Step("take", word, value=value, expected=expected))

    def fence(self, name: str, kind: str = "full") -> None:
        """One of `FENCE_KINDS`, unless the mutant leaves it out."""
        assert kind in FENCE_KINDS
        if name not in self.without:
            self.steps.append(Step("fence", fence=kind))

    def futex_wait(self, word: str, expected: Value) -> None:
        self.steps.append(Step("wait", word, expected=expected))

    def futex_wake(self, word: str) -> None:
        """Wake all threads that sleep on the word; where the engine wakes one, only one can sleep."""
        self.steps.append(Step("wake", word))

    def let(self, into: str, value: Value) -> None:
        self.steps.append(Step("let", into=into, value=value))

    def jump(self, target: str) -> None:
        self.steps.append(Step("jump", target=target))

    def jump_if(self, condition: Value, target: str) -> None:
        self.steps.append(Step("if", value=condition, target=target))

    def end(self) -> None:
        self.steps.append(Step("end"))


@dataclass(frozen=True)
class Program:
    """Thread that is ready to run: `registers` lists the names of its registers, in the order of a state's tuple."""

    name: str
    code: Code
    registers: tuple[str, ...]

    @classmethod
    def of(cls, name: str, code: Code) -> Program:
        code.end()
        return cls(name, code, tuple(sorted({step.into for step in code.steps if step.into})))


Readers = tuple[tuple[bool, ...], ...]
# A thread's part of a state: its step, its registers, and the word it sleeps on or None.
Thread = tuple[int, tuple[int, ...], int | None]
State = tuple[tuple[Thread, ...], int]  # memories are numbered as they come
# A possible move: its description, the thread and memory afterwards, and the word whose sleepers it wakes or None.
Move = tuple[str, Thread, int, int | None]


class Memory(Protocol):
    """A memory model. `memory` is immutable and belongs to the explorer's state; words are numbered."""

    name: str

    def start(self, values: list[int], readers: Readers) -> Any:
        """First state of memory; `readers` tells for each thread which words it may ever read."""

    def latest(self, memory: Any) -> list[int]: ...
    def background(self, memory: Any) -> Iterator[Any]:
        """Yield the states that memory may reach by itself."""

    def load(self, memory: Any, thread: int, word: int, ordered: bool) -> Iterator[tuple[Any, int]]: ...
    def store(self, memory: Any, thread: int, word: int, value: int, ordered: bool) -> Any: ...
    def modify(
        self, memory: Any, thread: int, word: int, change: Callable[[int], int | None]
    ) -> Iterator[tuple[Any, bool]]:
        """Read and write in one step; `change` returns None where it does not write."""

    def stream(self, memory: Any, thread: int, word: int, value: int) -> Any: ...
    def fence(self, memory: Any, thread: int, kind: str) -> Iterator[Any]: ...
    def seen_by_kernel(self, memory: Any, thread: int, word: int) -> tuple[Any, int]: ...
    def ended(self, memory: Any, thread: int) -> Any: ...


class Stores:
    """Total store order."""

    name = "TSO"

    def start(self, values: list[int], readers: Readers) -> Any:
        return tuple(values), ((),) * len(readers)

    def latest(self, memory: Any) -> list[int]:
        return list(memory[0])

    def background(self, memory: Any) -> Iterator[Any]:
        words, buffers = memory
        for thread, buffer in enumerate(buffers):
            waiting = set()  # words of earlier stores
            ordinary = False  # whether one of them goes through the caches
            for at, (word, value, streamed) in enumerate(buffer):
                if word not in waiting and not (ordinary and not streamed):
                    yield _with(words, word, value), _with(buffers, thread, (*buffer[:at], *buffer[at + 1 :]))
                waiting.add(word)
                ordinary = ordinary or not streamed

    def load(self, memory: Any, thread: int, word: int, ordered: bool) -> Iterator[tuple[Any, int]]:
        words, buffers = memory
        for stored, value, _ in reversed(buffers[thread]):
            if stored == word:
                yield memory, value
                return
        yield memory, words[word]

    def store(self, memory: Any, thread: int, word: int, value: int, ordered: bool) -> Any:
        words, buffers = memory
        return words, _with(buffers, thread, (*buffers[thread], (word, value, False)))

    def stream(self, memory: Any, thread: int, word: int, value: int) -> Any:
        words, buffers = memory
        return words, _with(buffers, thread, (*buffers[thread], (word, value, True)))

    def modify(
        self, memory: Any, thread: int, word: int, change: Callable[[int], int | None]
    ) -> Iterator[tuple[Any, bool]]:
        words, buffers = memory
        if not buffers[thread]:
            value = change(words[word])
            yield (memory, False) if value is None else ((_with(words, word, value), buffers), True)

    def fence(self, memory: Any, thread: int, kind: str) -> Iterator[Any]:
        if kind in ("release", "acquire") or not memory[1][thread]:
            yield memory

    def seen_by_kernel(self, memory: Any, thread: int, word: int) -> tuple[Any, int]:
        return memory, memory[0][word]

    def ended(self, memory: Any, thread: int) -> Any:
        return memory


class Views:
    """Release, acquire, relaxed and fences, by views.

    A memory is (histories, per thread (now, acquired, released), what the last fence knew). A history is a tuple of
    (value, view); positions in it are times. `now` is what the thread knows, `acquired` what a fence would add to that
    (the views of relaxed loads), `released` what its relaxed stores carry (its view at its last fence).
    """

    name = "weak"

    def start(self, values: list[int], readers: Readers) -> Any:
        self.readers = readers
        zero = (0,) * len(values)
        threads = len(readers)
        return tuple(((value, zero),) for value in values), ((zero, zero, zero),) * threads, zero

    def latest(self, memory: Any) -> list[int]:
        return [history[-1][0] for history in memory[0]]

    def background(self, memory: Any) -> Iterator[Any]:
        return iter(())

    def load(self, memory: Any, thread: int, word: int, ordered: bool) -> Iterator[tuple[Any, int]]:
        for time in range(memory[1][thread][0][word], len(memory[0][word])):
            yield self._read(memory, thread, word, time, ordered)

    def store(self, memory: Any, thread: int, word: int, value: int, ordered: bool) -> Any:
        histories, threads, fence = memory
        now, acquired, released = threads[thread]
        time = len(histories[word])
        now, acquired = _with(now, word, time), _with(acquired, word, time)
        carried = now if ordered else _with(released, word, time)
        histories = _with(histories, word, (*histories[word], (value, carried)))
        return self._compact(histories, _with(threads, thread, (now, acquired, released)), fence)

    def modify(
        self, memory: Any, thread: int, word: int, change: Callable[[int], int | None]
    ) -> Iterator[tuple[Any, bool]]:
        histories, threads, _ = memory
        last = len(histories[word]) - 1
        for time in range(threads[thread][0][word], last + 1):
            value = change(histories[word][time][0])
            if value is None:  # a failed comparison is a load, and may read an old value
                yield self._read(memory, thread, word, time, True)[0], False
            elif time == last:
                yield self.store(self._read(memory, thread, word, time, True)[0], thread, word, value, True), True

    def stream(self, memory: Any, thread: int, word: int, value: int) -> Any:
        return self.store(memory, thread, word, value, False)

    def fence(self, memory: Any, thread: int, kind: str) -> Iterator[Any]:
        histories, threads, fence = memory
        now, acquired, released = threads[thread]
        if kind == "full":
            fence = now = acquired = released = _join(acquired, fence)
        elif kind == "release":
            released = now
        elif kind == "acquire":
            now = acquired
        yield self._compact(histories, _with(threads, thread, (now, acquired, released)), fence)

    def seen_by_kernel(self, memory: Any, thread: int, word: int) -> tuple[Any, int]:
        histories, threads, fence = memory
        now, acquired, released = threads[thread]
        last = len(histories[word]) - 1
        now, acquired = _with(now, word, last), _with(acquired, word, last)
        return self._compact(histories, _with(threads, thread, (now, acquired, released)), fence), histories[word][
            last
        ][0]

    def ended(self, memory: Any, thread: int) -> Any:
        histories, threads, fence = memory
        return self._compact(histories, _with(threads, thread, None), fence)

    def _read(self, memory: Any, thread: int, word: int, time: int, ordered: bool) -> tuple[Any, int]:
        histories, threads, fence = memory
        now, acquired, released = threads[thread]
        value, carried = histories[word][time]
        now, acquired = _with(now, word, time), _join(_with(acquired, word, time), carried)
        if ordered:
            now = _join(now, carried)
        return self._compact(histories, _with(threads, thread, (now, acquired, released)), fence), value

    def _compact(self, histories: Any, threads: Any, fence: Any) -> Any:
        """Drop what no thread will read any more, so that states with equal futures are equal."""
        gone = []
        for word, history in enumerate(histories):
            first = len(history) - 1
            if first:
                for reads, thread in zip(self.readers, threads, strict=True):
                    if reads[word] and thread is not None and thread[0][word] < first:
                        first = thread[0][word]
            gone.append(first)
        if not any(gone):
            return histories, threads, fence

        start = tuple(gone)
        return (
            tuple(
                [
                    tuple([(value, _moved(view, start)) for value, view in history[first:]])
                    for history, first in zip(histories, gone, strict=True)
                ]
            ),
            tuple(
                [
                    thread and (_moved(thread[0], start), _moved(thread[1], start), _moved(thread[2], start))
                    for thread in threads
                ]
            ),
            _moved(fence, start),
        )


@lru_cache(maxsize=100_000)
def _moved(view: tuple[int, ...], start: tuple[int, ...]) -> tuple[int, ...]:
    """Times counted from `start`; earlier ones count as the start itself."""
    return tuple([time - first if time > first else 0 for time, first in zip(view, start, strict=True)])


def _with(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return items if items[at] is item else (*items[:at], item, *items[at + 1 :])


def _join(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return a if a == b else tuple(map(max, a, b))


@dataclass(frozen=True)
class Found:
    """Result of exploring: `flaw` is empty, or names the fault in the state that `trace` leads to."""

    states: int
    flaw: str = ""
    trace: tuple[str, ...] = ()


class TooManyStates(RuntimeError):
    """The scenario is too large to be explored."""


class Explorer:
    """Explorer of every interleaving of some programs under one memory model.

    `words` holds the shared words and their first values. `judge` is called where nothing can happen any more, and
    returns the fault or an empty string. Its arguments are the values of all words and, by name of thread, the word it
    sleeps on (None: it has ended).
    """

    def __init__(
        self,
        memory: Memory,
        words: dict[str, int],
        programs: list[Program],
        judge: Callable[[dict[str, int], dict[str, str | None]], str],
    ) -> None:
        self.memory = memory
        self.words = list(words)
        self.number = {word: number for number, word in enumerate(words)}
        self.values = list(words.values())
        self.programs = programs
        self.judge = judge
        self.memories: list[Any] = []
        self.numbers: dict[Any, int] = {}
        self.moves: dict[tuple[int, Thread, int], list[Move]] = {}

    def run(self, limit: int = 2_000_000) -> Found:
        readers = tuple(self._reads(program.code) for program in self.programs)
        threads = tuple(self._settle(k, 0, (0,) * len(p.registers)) for k, p in enumerate(self.programs))
        first: State = (threads, self._numbered(self.memory.start(self.values, readers)))
        came: dict[State, tuple[State, str] | None] = {first: None}
        todo = [first]
        while todo:
            state = todo.pop()
            stuck = True
            for said, after in self._successors(state):
                stuck = False
                if after not in came:
                    came[after] = (state, said)
                    todo.append(after)
            if stuck and (flaw := self._judge(state)):
                return Found(len(came), flaw, self._trace(came, state))
            if len(came) > limit:
                raise TooManyStates(f"more than {limit} states")
        return Found(len(came))

    def _reads(self, code: Code) -> tuple[bool, ...]:
        """Flag for each word: whether the thread may ever read it."""
        steps = [step for step in code.steps if step.kind in ("load", "add", "cas", "take", "wait")]
        named = {step.word for step in steps}
        return tuple(word in named for word in self.words)

    def _judge(self, state: State) -> str:
        values = dict(zip(self.words, self.memory.latest(self.memories[state[1]]), strict=True))
        asleep = {
            program.name: None if thread[2] is None else self.words[thread[2]]
            for program, thread in zip(self.programs, state[0], strict=True)
        }
        for program, thread in zip(self.programs, state[0], strict=True):
            if thread[2] is None and program.code.steps[thread[0]].kind != "end":
                return f"{program.name} can neither go on nor sleep"
        return self.judge(values, asleep)

    @staticmethod
    def _trace(came: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
        said = []
        while (link := came[state]) is not None:
            state = link[0]
            said.append(link[1])
        return tuple(reversed(said))

    def _settle(self, index: int, at: int, values: tuple[int, ...]) -> Thread:
        """Take branches until the next access to memory."""
        program = self.programs[index]
        code = program.code
        while True:
            step = code.steps[at]
            if step.kind == "jump":
                at = code.labels[step.target]
            elif step.kind == "if":
                registers = dict(zip(program.registers, values, strict=True))
                at = code.labels[step.target] if _value(step.value, registers) else at + 1
            elif step.kind == "let":
                registers = dict(zip(program.registers, values, strict=True))
                values = _with(values, program.registers.index(step.into), _value(step.value, registers))
                at += 1
            else:
                return at, values, None

    def _numbered(self, memory: Any) -> int:
        number = self.numbers.setdefault(memory, len(self.memories))
        if number == len(self.memories):
            self.memories.append(memory)
        return number

    def _successors(self, state: State) -> Iterator[tuple[str, State]]:
        threads, number = state
        for after in self.memory.background(self.memories[number]):
            yield "a store reaches memory", (threads, self._numbered(after))
        for index, thread in enumerate(threads):
            if thread[2] is not None:
                continue
            moves = self.moves.get((index, thread, number))
            if moves is None:
                moves = self.moves[index, thread, number] = list(self._moves(index, thread, self.memories[number]))
            for said, after, memory, woken in moves:
                others = threads
                if woken is not None:
                    others = tuple(
                        self._settle(k, other[0] + 1, other[1]) if other[2] == woken else other
                        for k, other in enumerate(threads)
                    )
                yield said, (_with(others, index, after), memory)

    def _moves(self, index: int, thread: Thread, memory: Any) -> Iterator[Move]:
        at, values, _ = thread
        program = self.programs[index]
        step = program.code.steps[at]
        if step.kind == "end":
            return
        word = self.number[step.word] if step.word else -1
        if step.kind == "wake":
            yield f"{program.name}: wakes {step.word}", *self._went_on(index, at + 1, values, memory), word
            return
        registers = dict(zip(program.registers, values, strict=True))
        for said, after, into, sleeps in self._access(index, step, registers, memory, word):
            if sleeps:
                yield f"{program.name}: sleeps on {step.word}", (at, values, word), self._numbered(after), None
                continue
            written = values if into is None else _with(values, program.registers.index(step.into), into)
            yield f"{program.name}: {said} {step.word}", *self._went_on(index, at + 1, written, after), None

    def _went_on(self, index: int, at: int, values: tuple[int, ...], memory: Any) -> tuple[Thread, int]:
        thread = self._settle(index, at, values)
        if self.programs[index].code.steps[thread[0]].kind == "end":
            thread, memory = (thread[0], (), None), self.memory.ended(memory, index)
        return thread, self._numbered(memory)

    def _access(
        self, thread: int, step: Step, registers: Registers, memory: Any, word: int
    ) -> Iterator[tuple[str, Any, int | None, bool]]:
        model = self.memory
        value, expected = _value(step.value, registers), _value(step.expected, registers)
        if step.kind == "load":
            for after, read in model.load(memory, thread, word, step.ordered):
                yield f"reads {read} from", after, read, False
        elif step.kind == "store":
            yield f"stores {value} to", model.store(memory, thread, word, value, step.ordered), None, False
        elif step.kind == "add":
            for after, _ in model.modify(memory, thread, word, lambda old: old + value):
                yield f"adds {value} to", after, None, False
        elif step.kind == "cas":
            for after, done in model.modify(memory, thread, word, lambda old: value if old == expected else None):
                yield f"{'swaps' if done else 'cannot swap'} {expected} for {value} in", after, int(done), False
        elif step.kind == "take":
            for after, done in model.modify(memory, thread, word, lambda old: value if old == expected else None):
                if done:
                    yield f"swaps {expected} for {value} in", after, None, False
        elif step.kind == "stream":
            yield f"streams {value} to", model.stream(memory, thread, word, value), None, False
        elif step.kind == "fence":
            for after in model.fence(memory, thread, step.fence):
                yield f"{step.fence} fence", after, None, False
        elif step.kind == "wait":
            after, now = model.seen_by_kernel(memory, thread, word)
            yield "need not sleep on", after, None, now == expected
        else:
            raise AssertionError(step.kind)


def _value(value: Value, registers: Registers) -> int:
    return value if isinstance(value, int) else int(value(registers))
