"""Programs of ranks for failures in the middle of a compiled program of JAX."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import engine

from ..waiting import until


def started() -> tuple[Any, Any]:
    """Return JAX and a compiled program that has run on this rank and on rank 0, which the test observes."""
    import jax

    import engine.jax as hvd

    hvd.init()
    program = jax.jit(lambda x: hvd.allreduce(hvd.allreduce(x, hvd.Sum, "first"), hvd.Sum, "second"))
    jax.block_until_ready(program(jax.numpy.ones(4)))
    if engine.rank() == 0:
        open("started", "w").close()
    until(lambda: os.path.exists("started"), "rank 0 has run the program")
    return jax, program


def failing(run: Callable[[], object]) -> tuple[str, str, str, float]:
    """Return the class and text of a call's error, the engine's class that it stands for, and the seconds it took."""
    begun = time.monotonic()
    try:
        run()
    except Exception as error:
        return type(error).__name__, str(error), type(engine.errors.of(error)).__name__, time.monotonic() - begun
    raise AssertionError("it did not fail")


def wait_for_the_dead() -> Any:
    jax, program = started()
    if engine.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return failing(lambda: jax.block_until_ready(program(jax.numpy.ones(4))))


def wait_for_who_left() -> Any:
    jax, program = started()
    if engine.rank() == 1:
        engine.shutdown()
        until(lambda: os.path.exists("over"), "the other rank has seen it")
        return None
    told = failing(lambda: jax.block_until_ready(program(jax.numpy.ones(4))))
    open("over", "w").close()
    return told


def raise_elsewhere() -> Any:
    jax, program = started()
    if engine.rank() == 1:
        raise KeyError("a mistake of the script")
    return failing(lambda: jax.block_until_ready(program(jax.numpy.ones(4))))


def eight_steps(**settings: Any) -> tuple[Any, Any]:
    """Return JAX and a program that, for a large matrix, runs on after its dispatch; it turns ones into 2**8."""
    import jax

    import engine.jax as hvd

    hvd.init(**settings)

    @jax.jit
    def program(x: Any) -> Any:
        for k in range(8):
            x = hvd.allreduce(x @ x / x[0].sum(), name=f"step {k}") * 2
        return x

    jax.block_until_ready(program(jax.numpy.ones((8, 8))))
    jax.block_until_ready(program(jax.numpy.ones((600, 600))))
    return jax, program


def leave_early() -> None:
    """Dispatch a program, and end without reading its result, which is still referenced."""
    jax, program = eight_steps(shutdown_timeout=60.0)
    globals()["held"] = program(jax.numpy.ones((600, 600)))


def drop_results() -> list[float] | None:
    """Dispatch programs on rank 0 and end; the other rank does not call them before."""
    jax, program = eight_steps(shutdown_timeout=60.0)
    x = jax.numpy.ones((600, 600))
    if engine.rank() == 0:
        for _ in range(3):
            program(x)
        open("dispatched", "w").close()
        return None
    until(lambda: os.path.exists("dispatched"), "rank 0 has dispatched all")
    return [float(program(x)[0, 0]) for _ in range(3)]


def give_up_on_a_program() -> None:
    """Dispatch a program on rank 0 that the other rank never calls, and end."""
    jax, program = eight_steps(shutdown_timeout=0.5)
    if engine.rank() == 0:
        program(jax.numpy.ones((600, 600)))
        engine.shutdown()
        open("over", "w").close()
    until(lambda: os.path.exists("over"), "rank 0 has given up")


def refuse_devices() -> list[str]:
    import jax

    import engine.jax as hvd

    hvd.init()
    x = jax.numpy.ones(4)
    told = [failing(lambda: jax.jit(lambda v: hvd.allreduce(v, name="x"))(x))[1]]
    mesh = jax.sharding.Mesh(jax.devices(), ("d",))
    spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    told.append(failing(lambda: hvd.allreduce(spread, name="y"))[1])
    assert hvd.allreduce(x, hvd.Sum).tolist() == [1] * 4
    return told


def run_again() -> list[Any]:
    """Run a compiled program after `shutdown`, and in a new world."""
    jax, program = started()

    import engine.jax as hvd

    gather = jax.jit(lambda x: hvd.allgather(x, "rows"))
    x = jax.numpy.ones(2)
    assert gather(x).shape == (2 * hvd.size(),)
    engine.shutdown()
    told = failing(lambda: jax.block_until_ready(program(jax.numpy.ones(4))))[:3]
    engine.init()
    return [told, program(jax.numpy.ones(4)).tolist(), gather(x).tolist()]


def stop_in_a_program() -> None:
    jax, program = started()
    open(f"ready.{engine.rank()}", "w").close()
    if engine.rank() == 0:
        jax.block_until_ready(program(jax.numpy.ones(4)))
    until(lambda: False, "the end of the job", 60)
