"""Programs of JAX that another process compiled: from the cache on disk, and saved explicitly."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from ..ranks import run_ranks
from .quick_jax import JAX

pytest.importorskip("jax", reason="needs JAX")


def caching(directory: str) -> tuple[Any, list[str]]:
    """Return JAX with a disk cache for every program, and a list that gets an event for each program from the cache."""
    import jax

    events: list[str] = []
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    return jax, events


def run_and_save(jax: Any, directory: str) -> list[Any]:
    """Return a program's results, and save the program unless it has been saved."""
    import engine.jax as hvd

    def collectives(x: Any) -> Any:
        grouped = hvd.grouped_allreduce([x, x * 2], hvd.Sum, "c")
        return hvd.allreduce(x, hvd.Sum, "a"), hvd.allgather(x[:1], "b"), *grouped

    hvd.init()
    program = jax.jit(collectives)
    x = jax.numpy.full(4, hvd.rank() + 1.0)
    found = [each.tolist() for each in program(x)]
    path = Path(directory, f"saved.{hvd.rank()}")
    if not path.exists():
        from jax.experimental import serialize_executable

        path.write_bytes(pickle.dumps(serialize_executable.serialize(program.lower(x).compile())))
    return found


def compile_and_save(directory: str) -> list[Any]:
    jax, _ = caching(directory)
    return run_and_save(jax, directory)


def load(directory: str) -> tuple[str, list[Any], list[Any], bool]:
    """Return what a saved program does without the binding and with it, and the results of compiling it again.

    The last element tells whether that program came from the cache.
    """
    jax, events = caching(directory)
    import engine

    engine.init()
    from jax.experimental import serialize_executable

    saved = pickle.loads(Path(directory, f"saved.{engine.rank()}").read_bytes())
    try:
        serialize_executable.deserialize_and_load(*saved)
        refused = "nothing"
    except jax.errors.JaxRuntimeError as error:
        refused = str(error)
    import engine.jax

    loaded = serialize_executable.deserialize_and_load(*saved)
    found = [each.tolist() for each in loaded(jax.numpy.full(4, engine.rank() + 1.0))]
    events.clear()
    again = run_and_save(jax, directory)
    return refused, found, again, any(event.endswith("/cache_hits") for event in events)


@pytest.mark.slow
def test_programs_of_another_process(tmp_path: Path) -> None:
    expected = [[3.0] * 4, [1.0, 2.0], [3.0] * 4, [6.0] * 4]
    assert run_ranks(2, compile_and_save, str(tmp_path), env=JAX).values == [expected] * 2
    for refused, loaded, again, cached in run_ranks(2, load, str(tmp_path), env=JAX).values:
        assert "NOT_FOUND" in refused and "engine_collective_" in refused
        assert loaded == again == expected and cached
