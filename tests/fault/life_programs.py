"""Programs of ranks for the tests of forking, of many short worlds, and of calls without a world."""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import engine

from ..waiting import let_pass, until
from .programs import observe, ones


def in_child(work: Callable[[], Any]) -> str:
    """Run `work` in a forked child that ends like a process, with its exit hooks; return its result's text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 7
        try:
            os.write(writing, repr(work()).encode())
            code = 0
        finally:
            # Do what sys.exit does, without returning through the frames of the parent's program.
            atexit._run_exitfuncs()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"
    return said


def no_world() -> Any:
    """Call the engine before `init` and after `shutdown`."""
    calls = {
        "allreduce": lambda: engine.allreduce(ones()),
        "barrier": engine.barrier,
        "rank": engine.rank,
        "knobs": engine.knobs,
        "counters": engine.counters,
        "abort": lambda: engine.abort("x"),
    }
    seen = {f"before {name}": observe(call)["type"] for name, call in calls.items()}
    assert not engine.is_initialized()
    engine.shutdown()
    engine.init()
    handle = engine.allreduce_async(ones(), name="kept")
    native = engine.session.runtime.current_engine()
    engine.shutdown()
    engine.shutdown()
    assert not engine.is_initialized()
    seen.update({f"after {name}": observe(call)["type"] for name, call in calls.items()})
    seen["after native"] = observe(lambda: native.barrier(None, True))["type"]
    assert handle.wait()[0] == 1  # finished by shutdown
    engine.init()
    engine.barrier()
    return seen


def shutdown_beside_a_waiting_thread() -> Any:
    """Shut down on the main thread while another waits for what never comes."""
    engine.init(shutdown_timeout=0.3)
    if engine.rank() == 0:
        until(lambda: os.path.exists("over"), "the other rank is through")
        return None
    seen: list[dict[str, Any]] = []

    def wait(name: str) -> None:
        seen.append(observe(lambda: engine.barrier(name)))

    waiting = [threading.Thread(target=wait, args=(f"never.{k}",)) for k in range(3)]
    for thread in waiting:
        thread.start()
    until(lambda: len(engine.session.runtime.current_engine().pending()) == 3, "all threads wait")
    begun = time.monotonic()
    engine.shutdown()
    took = time.monotonic() - begun
    for thread in waiting:
        thread.join(10)
    Path("over").touch()
    return took, sorted(each["type"] for each in seen)


def one_handle_for_many_threads(rounds: int) -> Any:
    """Wait for one operation on several threads; each gets its result."""
    engine.init()
    rank, size = engine.rank(), engine.size()
    wrong: list[object] = []
    for step in range(rounds):
        gathered = step % 2 == 1
        values = np.full(50, rank + step, np.float32)
        handle = engine.allgather_async(values, "g") if gathered else engine.allreduce_async(values, engine.Sum, "r")
        total = sum(other + step for other in range(size)) * (50 if gathered else 1)

        def fetch(handle: Any = handle, total: int = total, gathered: bool = gathered) -> None:
            result = handle.wait()
            if (result.sum() if gathered else result[0]) != total:
                wrong.append(result)

        threads = [threading.Thread(target=fetch) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return wrong


def forked() -> Any:
    """Fork: the engine refuses to work in the child, which can do everything else, and ends without a trace."""
    engine.init()
    rank, size = engine.rank(), engine.size()
    native = engine.session.runtime.current_engine()
    shared = np.frombuffer(native.share(1 << 16), np.float32)
    handle = engine.allreduce_async(ones(), name="before")
    handle.wait()
    seen = []
    for step in range(5):
        shared[:] = rank + step

        def child() -> Any:
            errors = [
                observe(call)["type"]
                for call in (
                    engine.barrier,
                    engine.init,
                    lambda: engine.allreduce(ones()),
                    lambda: native.allreduce(ones(), ones(), "x", 0, 1.0, 1.0, True),
                    lambda: native.share(4096),
                    native.mark_step,
                )
            ]
            assert (engine.rank(), engine.size()) == (rank, size)
            assert not engine.is_initialized() and native.failure is None and native.pending() == []
            engine.shutdown()
            native.abort("of the child")
            native.close(0.1)
            before = float(shared[0])
            shared[:] = -1000  # the child's own memory after the fork
            sys.excepthook(ValueError, ValueError("in the child"), None)
            return errors, before, float(handle.wait()[0])

        said = in_child(child)
        assert shared[0] == shared[-1] == rank + step, f"a child wrote to its parent's gradients: {shared[0]}"
        total = engine.allreduce(shared, engine.Sum, name="shared")
        assert total[-1] == sum(other + step for other in range(size))
        seen.append(said)
    return seen


def forked_in_an_operation() -> Any:
    """Fork while operations are in flight: the child releases their handles, and the parent completes them."""
    engine.init()
    rank = engine.rank()
    for _ in range(10):
        handles = [engine.allreduce_async(np.full(1 << 18, rank + k, np.float32), engine.Sum, f"{k}") for k in range(4)]
        unnamed = engine.allreduce_async(ones())

        def child(handles: list[Any] = handles) -> str:
            types = {observe(handle.wait)["type"] for handle in handles if not handle.done}
            handles.clear()
            gc.collect()
            return "refused" if types <= {"ForkedError"} else repr(types)

        said = in_child(child)
        assert said == "'refused'", said
        for k, handle in enumerate(handles):
            assert handle.wait()[-1] == sum(other + k for other in range(engine.size()))
        unnamed.wait()
    return True


def _in_pool(values: np.ndarray) -> float:
    values[:] = 5
    return float(values.sum())


def multiprocessing_fork() -> Any:
    """Start and end a pool of forked workers while the engine works."""
    engine.init()
    shared = np.frombuffer(engine.session.runtime.current_engine().share(4096), np.float32)
    for step in range(3):
        shared[:] = step
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pending = pool.map_async(_in_pool, [shared, ones()])
            total = engine.allreduce(shared, engine.Sum, name="shared")
            assert pending.get(30) == [5 * shared.size, 5000]
        assert total[0] == step * engine.size() and shared[0] == step
    return True


def data_loader() -> Any:
    """Train with worker processes that fork and write to the model and its shared gradients, and without."""
    import torch

    import engine.torch as binding

    torch.set_num_threads(1)
    binding.init()

    def train(workers: int) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        named = [(f"{workers}.{name}", parameter) for name, parameter in model.named_parameters()]
        optimizer = binding.DistributedOptimizer(optimizer, named, gradient_as_bucket_view=True)

        rank = binding.rank()  # a worker process is no rank

        class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
            def __len__(self) -> int:
                return 16

            def __getitem__(self, index: int) -> Any:
                if torch.utils.data.get_worker_info() is not None:
                    for parameter in model.parameters():  # a dataset that refers to the model, as some do
                        if parameter.grad is not None:
                            parameter.grad.fill_(1e9)
                        parameter.data.fill_(1e9)
                return torch.full((8,), float(index + rank))

        losses = []
        for _ in range(3):
            loader = torch.utils.data.DataLoader(
                Samples(), batch_size=4, num_workers=workers, multiprocessing_context="fork" if workers else None
            )
            for batch in loader:
                loss = model(batch).square().mean()
                optimizer.zero_grad(set_to_none=False)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    return train(2), train(0)


def many_worlds(worlds: int) -> Any:
    """Run short worlds, and return what the process holds after a third of them and at the end."""
    libc = ctypes.CDLL(None)

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def held() -> dict[str, int]:
        gc.collect()
        # The kernel shows a thread for a moment after it was joined, and no state tells when it is gone.
        lasting = min(threads() for _ in range(20) if not let_pass(0.005))
        libc.malloc_trim(0)
        # Without the pages of libraries, which the kernel may drop and reload at any time.
        status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": lasting,
            "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
            "KiB": int(status["RssAnon"].split()[0]),
        }

    first: dict[str, int] = {}
    for world in range(worlds):
        engine.init()
        shared = np.frombuffer(engine.session.runtime.current_engine().share(1 << 20), np.float32)
        shared[:] = 1
        handles = [engine.allreduce_async(ones(20_000), engine.Sum, f"{world}.{k}") for k in range(20)]
        for handle in handles[:10]:
            assert handle.wait()[0] == engine.size()
        engine.allreduce_(shared, engine.Sum, name="shared")
        engine.allgather(ones(10))
        del handles, shared
        engine.shutdown()
        if world == worlds // 3:
            first = held()
    return first, held()
