"""Errors that leave the engine working, and objects. Runs on every rank."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import numpy as np

import engine
from engine.errors import (
    ConfigError,
    DuplicateNameError,
    EngineError,
    ForkedError,
    MismatchError,
    NotInitializedError,
    UnsupportedTensorError,
)

from .on_ranks import Cases, refused


def works(size: int) -> None:
    """The engine goes on: a named, an unnamed and a large operation. Collective."""
    assert engine.allreduce(np.ones(3, np.float32), engine.Sum).tolist() == [size] * 3
    assert engine.allreduce(np.ones(3, np.int64), engine.Sum, "still works").tolist() == [size] * 3
    assert engine.allreduce(np.ones(300_000, np.float32), engine.Sum, "large still works")[-1] == size


def f32(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


# What the last rank sends, what the others send, and what the error shows of each.
MISMATCHES: dict[str, tuple[Any, Any, str, str]] = {
    "shape": (
        lambda name: engine.allreduce_async(f32(4, 3), engine.Sum, name),
        lambda name: engine.allreduce_async(f32(3, 4), engine.Sum, name),
        "float32[4, 3]",
        "float32[3, 4]",
    ),
    "dimensions": (
        lambda name: engine.allreduce_async(f32(), engine.Sum, name),
        lambda name: engine.allreduce_async(f32(1), engine.Sum, name),
        "float32[]",
        "float32[1]",
    ),
    "dtype": (
        lambda name: engine.allreduce_async(np.zeros(5, np.float16), engine.Sum, name),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name),
        "float16[5]",
        "float32[5]",
    ),
    "op": (
        lambda name: engine.allreduce_async(f32(5), engine.Average, name),
        lambda name: engine.allreduce_async(f32(5), engine.Product, name),
        "average",
        "product",
    ),
    "prescale": (
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name, 0.5),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name, 0.25),
        "prescale 0.5",
        "prescale 0.25",
    ),
    "postscale": (
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name, 1.0, 0.5),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name),
        "postscale 0.5",
        "sum float32[5]",
    ),
    "a scale that prints alike": (
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name, 0.1),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name, 0.1 + 1e-12),
        "prescale 0.1",
        "prescale 0.100000000001",
    ),
    "compression": (
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name, compression=engine.Compression.fp16),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name),
        "float32[5] compressed to float16",
        "sum float32[5]",
    ),
    "compression of a group": (
        lambda name: engine.grouped_allreduce_async([f32(5)], engine.Sum, name, compression=engine.Compression.fp16),
        lambda name: engine.grouped_allreduce_async([f32(5)], engine.Sum, name, compression=engine.Compression.bf16),
        "compressed to float16",
        "compressed to bfloat16",
    ),
    "root": (
        lambda name: engine.broadcast_async(f32(5), 1, name),
        lambda name: engine.broadcast_async(f32(5), 0, name),
        "root 1",
        "root 0",
    ),
    "kind": (
        lambda name: engine.broadcast_async(f32(5), 0, name),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name),
        "broadcast",
        "allreduce",
    ),
    "allgather's rest": (
        lambda name: engine.allgather_async(f32(2, 3), name),
        lambda name: engine.allgather_async(f32(2, 4), name),
        "float32[*, 3]",
        "float32[*, 4]",
    ),
    "allgather's dtype": (
        lambda name: engine.allgather_async(np.zeros((2, 3)), name),
        lambda name: engine.allgather_async(f32(0, 3), name),
        "float64[*, 3]",
        "float32[*, 3]",
    ),
    "barrier": (
        lambda name: engine.collectives.Handle(engine.runtime.engine().barrier(name), None, None),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name),
        "barrier",
        "allreduce",
    ),
    "many dimensions": (
        lambda name: engine.allreduce_async(f32(*(1, 2) * 8), engine.Sum, name),
        lambda name: engine.allreduce_async(f32(*(2, 1) * 8), engine.Sum, name),
        "1, 2, 1, 2",
        "2, 1, 2, 1",
    ),
}


def mismatches() -> int:
    """On every rank, with what each sent; for a new name and for a known one; and the name can be used after it."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    last = rank == size - 1
    others = "rank 0" if size == 2 else "ranks " + ", ".join(str(other) for other in range(size - 1))
    for title, (odd, common, odd_text, common_text) in MISMATCHES.items():
        for known in (False, True):
            name = f"mismatch of {title}"
            if known:
                engine.synchronize(common(name))
            before = engine.allreduce_async(np.full(3, 1.0), engine.Sum, "in flight beside it")
            handle = (odd if last else common)(name)
            text = ""
            try:
                engine.synchronize(handle)
            except MismatchError as error:
                text = str(error)
            texts = engine.allgather_object(text)
            with cases.case(f"{title}, {'known' if known else 'new'}"):
                assert f"ranks disagree on '{name}'" in text, text
                assert f"rank {size - 1} sent " in text and odd_text in text, text
                assert f"{others} sent " in text and common_text in text, text
                assert text.index(others) < text.index(f"rank {size - 1} sent")
                assert set(texts) == {text}
                assert engine.poll(handle)
                refused(lambda handle=handle: engine.synchronize(handle), "disagree", MismatchError)  # type: ignore[misc]
            assert engine.synchronize(before)[0] == size
            engine.synchronize(common(name))
            works(size)
    with cases.case("all ranks differ"):
        error = refused(lambda: engine.allreduce(f32(rank + 1), engine.Sum, "each"), "disagree", MismatchError)
        assert all(f"rank {other} sent allreduce sum float32[{other + 1}]" in error for other in range(size))
    with cases.case("unnamed, blocking"):
        for _ in range(3):
            error = refused(lambda: engine.allreduce(f32(1 + last)), "allreduce.noname.", MismatchError)
            assert "float32[2]" in error
            works(size)
    with cases.case("many at once, among good ones"):
        handles = [
            engine.allreduce_async(f32(5 + (k % 3 == 0 and last)), engine.Sum, f"many {k} {'x' * 500}")
            for k in range(600)
        ]
        for k, handle in enumerate(handles):
            if k % 3 == 0:
                refused(lambda handle=handle: engine.synchronize(handle), "disagree", MismatchError)  # type: ignore[misc]
            else:
                engine.synchronize(handle)
    with cases.case("in place, the tensor is as it was"):
        mine = np.full(5 + last, 7.0)
        refused(lambda: engine.allreduce_(mine, engine.Sum, "untouched"), "disagree", MismatchError)
        assert (mine == 7).all()
    with cases.case("nobody fetches the error"):
        for k in range(50):
            engine.allreduce_async(f32(1 + last), engine.Sum, f"nobody {k}")
    works(size)
    return cases.done(2 * len(MISMATCHES) + 5)


class Hostile:
    """Claims to lend memory and does not."""

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("not today")

    def __dlpack_device__(self) -> Any:
        return 1, 0


def wrong_calls() -> int:
    """What is refused on the rank that does it, and named clearly; each leaves the engine working."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()

    def wrong(name: str, call: Any, text: str, kind: type[Exception] = UnsupportedTensorError) -> None:
        with cases.case(name):
            refused(call, text, kind)
        works(size)

    good = np.ones(3, np.float32)
    for value, name in (
        (1.5, "float"),
        (3, "int"),
        (True, "bool"),
        ([1.0, 2.0], "list"),
        ((1.0,), "tuple"),
        (1j, "complex"),
    ):
        for call in (engine.allreduce, engine.allreduce_, engine.allgather, engine.allreduce_async):
            wrong(f"{call.__name__} of a {name}", lambda call=call, value=value: call(value), f"a {name} is no tensor")
        wrong(f"broadcast of a {name}", lambda value=value: engine.broadcast(value, 0), f"a {name} is no tensor")
    for value in (None, "text", object(), {"a": 1}, {1.0}):
        wrong(f"{value!r}"[:20], lambda value=value: engine.allreduce(value), "neither DLPack nor the buffer protocol")
    for dtype in (
        "longdouble",
        "clongdouble",
        ">c8",
        ">f4",
        ">i8",
        "M8[s]",
    ):
        for call in (engine.allreduce, engine.allreduce_, engine.allgather):
            array = np.zeros(3, dtype)
            wrong(f"{call.__name__} of {dtype}", lambda call=call, array=array: call(array), "")
        wrong(f"broadcast of {dtype}", lambda array=array: engine.broadcast_(array, 0), "")
    wrong("a record", lambda: engine.allreduce(np.zeros(3, [("a", "f4"), ("b", "i4")])), "")
    wrong("objects", lambda: engine.allreduce(np.array([None, 1], object)), "")
    wrong("text", lambda: engine.allreduce(np.array(["a", "b"])), "")
    for dtype in ("complex64", "complex128", "uint32", "uint64"):
        array = np.zeros(size, dtype)
        for call in (
            engine.allreduce,
            engine.allreduce_,
            engine.reducescatter,
            lambda x: engine.grouped_allreduce([good, x]),
        ):
            wrong(
                f"a reduction of {dtype}", lambda call=call, array=array: call(array), f"dtype {dtype}, which broadcast"
            )
    wrong("characters", lambda: engine.allreduce(memoryview(b"ab").cast("c")), "dtype")
    wrong("read-only bytes in place", lambda: engine.allreduce_(b"abc"), "")
    wrong("hostile", lambda: engine.allreduce(Hostile()), "not today")
    for root in (-1, size, 1 << 20):
        wrong(f"root {root}", lambda root=root: engine.broadcast(good, root), f"root rank {root}", ValueError)
        wrong(f"root {root}_", lambda root=root: engine.broadcast_(good, root), f"(0 to {size - 1})", ValueError)
    for root in (1 << 40, "0", None, 0.5):
        wrong(
            f"root {root!r}", lambda root=root: engine.broadcast(good, root), "", (TypeError, OverflowError, ValueError)
        )
    for op in (len(engine.Op), -1, 99):
        wrong(f"op {op}", lambda op=op: engine.allreduce(good, op), str(op), ValueError)
    wrong("op as text", lambda: engine.allreduce(good, "Sum"), "Sum", ValueError)
    for factor in (float("nan"), float("inf"), -float("inf")):
        wrong(
            f"prescale {factor}", lambda factor=factor: engine.allreduce(good, engine.Sum, None, factor), "", ValueError
        )
        wrong(f"postscale {factor}", lambda f=factor: engine.allreduce(good, engine.Sum, None, 1.0, f), "", ValueError)
    wrong("a factor as text", lambda: engine.allreduce(good, engine.Sum, None, "2"), "", TypeError)
    wrong("settings while running", lambda: engine.init(cycle_time_ms=3), "running", ConfigError)
    wrong("an unknown setting", lambda: engine.init(no_such_thing=3), "running", ConfigError)
    with cases.case("the same name twice"):
        if size > 1:
            if rank == 0:
                first = engine.allreduce_async(good, engine.Sum, "twice")
                refused(lambda: engine.allreduce(good, engine.Sum, "twice"), "'twice' again", DuplicateNameError)
            engine.barrier("go")
            if rank != 0:
                first = engine.allreduce_async(good, engine.Sum, "twice")
            engine.synchronize(first)
    works(size)
    assert rank < size
    return cases.done()


def check_equal(found: object, expected: object) -> None:
    assert found == expected, (found, expected)


def lifetime() -> int:
    """Before init, after shutdown, again, in forked children, and from threads that outlive a world."""
    cases = Cases()
    good = np.ones(3, np.float32)
    calls = {
        "allreduce": lambda: engine.allreduce(good),
        "allreduce_async_": lambda: engine.allreduce_async_(good),
        "broadcast": lambda: engine.broadcast(good, 0),
        "allgather": lambda: engine.allgather(good),
        "barrier": engine.barrier,
        "rank": engine.rank,
        "size": engine.size,
        "local_rank": engine.local_rank,
        "set_knobs": lambda: engine.set_knobs(cycle_time_ms=1),
        "knobs": engine.knobs,
        "broadcast_object": lambda: engine.broadcast_object(1),
        "allgather_object": lambda: engine.allgather_object(1),
        "check_consistency": lambda: engine.check_consistency({"a": good}),
    }

    def refused_everywhere(kind: type[Exception], text: str, title: str) -> None:
        assert not engine.is_initialized()
        for name, call in calls.items():
            with cases.case(f"{name} {title}"):
                refused(call, text, kind)

    refused_everywhere(NotInitializedError, "engine.init()", "before init")
    engine.shutdown()  # Nothing to end.
    for turn in range(3):
        engine.init(cycle_time_ms=turn)
        engine.init()
        assert engine.is_initialized()
        size = engine.size()
        with cases.case(f"world {turn}"):
            assert engine.knobs()["cycle_time_ms"] == turn
            works(size)
        left = engine.allreduce_async(good, engine.Sum, "in flight at shutdown")
        done = engine.allreduce_async(good, engine.Sum, "done at shutdown")
        engine.synchronize(done)
        engine.shutdown()
        with cases.case(f"handles after world {turn}"):
            assert engine.synchronize(done).tolist() == [size] * 3
            assert engine.poll(left)
            try:
                assert engine.synchronize(left).tolist() == [size] * 3
            except EngineError:
                assert size > 1  # A rank that closes first waits for operations in flight only so long.
        refused_everywhere(NotInitializedError, "engine.shutdown()", f"after shutdown {turn}")
    engine.init()
    with cases.case("in a forked child"):
        me = engine.rank(), engine.size()
        told = {name: calls.pop(name) for name in ("rank", "size", "local_rank")}
        assert in_child(lambda: refused_everywhere(ForkedError, "forked child", "after fork")) == "done"
        assert in_child(lambda: check_equal((told["rank"](), told["size"]()), me)) == "done"
        assert in_child(lambda: refused(engine.init, "forked child", ForkedError)) == "done"
        assert in_child(engine.shutdown) == "done"
        if engine.rank() != 0:
            engine.barrier("rank 0 has forked")
        waiting = engine.allreduce_async(np.ones(3), engine.Sum, "over a fork")
        if engine.rank() == 0:
            if engine.size() > 1:  # It is in flight: the others have not brought it.
                wait = lambda: engine.synchronize(waiting)  # noqa: E731
                assert in_child(lambda: refused(wait, "forked child", ForkedError)) == "done"
                assert in_child(waiting.__repr__) == "done"
            engine.barrier("rank 0 has forked")
        assert engine.synchronize(waiting).tolist() == [engine.size()] * 3
    works(engine.size())
    with cases.case("a fork in another thread while the engine works"):
        worker = threading.Thread(target=lambda: [in_child(lambda: None) for _ in range(3)])
        worker.start()
        for _ in range(50):
            works(engine.size())
        worker.join()
    engine.barrier()
    return cases.done()


def in_child(action: Any) -> str:
    """Do something in a forked child; `done`, or what it raised."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            action()
            text = "done"
        except BaseException as error:
            text = repr(error)
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        said = file.read().decode()
    os.waitpid(pid, 0)
    return said


class Unwilling:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("no")


def objects() -> int:
    """Objects from every root and of every rank; parameters that differ are named."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    things: list[Any] = [None, 0, "größe", {"a": [1, (2, 3)]}, b"", b"x" * 3_000_000, np.arange(7), {1, 2}, 1e300]
    for root in range(size):
        for number, thing in enumerate(things):
            mine = thing if rank == root else Unwilling()
            got = engine.broadcast_object(mine, root, name=None if number % 2 else f"object {number}")
            with cases.case(f"broadcast {number} from {root}"):
                assert pickle.dumps(got) == pickle.dumps(thing)
                assert (got is mine) == (rank == root)
        with cases.case(f"rank {root} cannot pickle"):
            text = f"rank {root} cannot pickle"
            refused(lambda root=root: engine.broadcast_object(Unwilling(), root), text, EngineError)  # type: ignore[misc]
            mine = Unwilling() if rank == root else rank
            refused(lambda mine=mine: engine.allgather_object(mine), text, EngineError)  # type: ignore[misc]
    with cases.case("a root that is no rank"):
        refused(lambda: engine.broadcast_object(1, size), f"root rank {size}", ValueError)
    with cases.case("gathered"):
        for name in (None, "gathered"):
            got = engine.allgather_object({"rank": rank, "data": "x" * rank * 100_000}, name)
            assert [each["rank"] for each in got] == list(range(size))
            assert [len(each["data"]) for each in got] == [other * 100_000 for other in range(size)]
    model = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.zeros(3), "steps": 4, "kind": "adam"}
    with cases.case("equal parameters"):
        engine.check_consistency(model)
        engine.check_consistency(list(model.items()), "named")
        engine.check_consistency([model["w"], model["b"]])
        engine.check_consistency({})
        engine.check_consistency({"transposed": np.asfortranarray(model["w"])} if rank else {"transposed": model["w"]})
    if size > 1:
        odd = size - 1
        base = 0
        changes: dict[str, tuple[Any, str]] = {
            "value": ({"w": model["w"] + np.eye(3, 4, dtype=np.float32) * 1e-6}, "'w': {odd} other values than {base}"),
            "zero's sign": ({"b": -model["b"]}, "'b': {odd} other values than {base}"),
            "shape": ({"w": model["w"].T}, "'w': {odd} float32[4, 3], {base} has float32[3, 4]"),
            "dtype": ({"b": np.zeros(3, np.float32)}, "'b': {odd} float32[3], {base} has float64[3]"),
            "number": ({"steps": 5}, "'steps': {odd} int 5, {base} has int 4"),
            "text": ({"kind": "sgd"}, "'kind': {odd} str 'sgd', {base} has str 'adam'"),
            "more": ({"extra": np.zeros(1)}, "'extra': {odd} float64[1], {base} has no such entry"),
        }
        for title, (change, expected) in changes.items():
            mine = {**model, **change} if rank == odd else model
            with cases.case(f"differs in {title}"):
                text = refused(lambda mine=mine: engine.check_consistency(mine), "differ", MismatchError)  # type: ignore[misc]
                assert expected.format(odd=f"rank {odd} has", base=f"rank {base}") in text, text
                untouched = [key for key in model if key not in change]
                assert not any(f"'{key}'" in text for key in untouched), text
        with cases.case("missing"):
            mine = {key: value for key, value in model.items() if key != "b" or rank != odd}
            text = refused(lambda: engine.check_consistency(mine), f"'b': rank {odd} has no such entry", MismatchError)
        with cases.case("many differ"):
            mine = {f"p{k}": np.full(2, rank if k % 2 else 0) for k in range(100)}
            text = refused(lambda: engine.check_consistency(mine), "'p1'", MismatchError)
            assert "and 30 more" in text or "more" in text
            assert "'p0'" not in text and len(text.splitlines()) < 30
        with cases.case("the majority is right"):
            if size >= 3:
                mine = {"w": np.full(2, 1 if rank == 0 else 2)}
                refused(
                    lambda: engine.check_consistency(mine), "'w': rank 0 has other values than rank 1", MismatchError
                )
    with cases.case("what is no parameter"):
        refused(lambda: engine.check_consistency({"a": object()}), "'a'")
        refused(lambda: engine.check_consistency(3), "", TypeError)
    works(size)
    return cases.done()
