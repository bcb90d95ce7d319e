"""Failures in compiled programs of JAX: JAX's kind of error with the engine's text, on every rank, at once."""

from __future__ import annotations

import signal
import time

import pytest

from ..ranks import run_ranks, start_ranks
from . import jax_programs
from .faults import soon

pytest.importorskip("jax", reason="needs JAX")

ENV = {"JAX_PLATFORMS": "cpu"}
KINDS = (
    "JaxRuntimeError",
    "ValueError",
)  # depends on the progress of the program when its result was read


def test_a_rank_dies_while_a_program_waits_for_it() -> None:
    finished = run_ranks(3, jax_programs.wait_for_the_dead, env=ENV, check=False)
    for rank in (0, 2):
        kind, text, ours, seconds = finished.values[rank]
        assert kind in KINDS and ours == "RankDiedError", finished
        assert "ABORTED: RankDiedError: rank 1 died" in text
        soon(seconds, 5, finished)


@pytest.mark.slow
def test_a_rank_that_left_is_noticed_at_once() -> None:
    """The process of the rank that left lives on, and no thread waits in the engine: well below the stall limit."""
    finished = run_ranks(2, jax_programs.wait_for_who_left, env=ENV, check=False)
    kind, text, ours, seconds = finished.values[0]
    assert kind in KINDS and ours == "RankLeftError", finished
    assert "rank 1 left" in text
    soon(seconds, 5, finished)


@pytest.mark.slow
def test_an_exception_elsewhere_is_told() -> None:
    finished = run_ranks(2, jax_programs.raise_elsewhere, env=ENV, check=False)
    kind, text, ours, seconds = finished.values[0]
    assert kind in KINDS and ours == "RankRaisedError", finished
    assert "a mistake of the script" in text
    soon(seconds, 5, finished)


@pytest.mark.slow
def test_a_rank_ends_while_its_program_still_runs() -> None:
    finished = run_ranks(2, jax_programs.leave_early, env=ENV)
    assert finished.code == 0, finished


@pytest.mark.slow
def test_a_rank_ends_while_programs_run_whose_results_it_dropped() -> None:
    """No result of the programs is referenced, and the other rank needs all their collectives."""
    finished = run_ranks(2, jax_programs.drop_results, env=ENV)
    assert finished.values == [None, [2.0**8] * 3] and "left while others" not in finished.err, finished


@pytest.mark.slow
def test_a_program_that_does_not_end_is_named_with_the_rank_it_waits_for() -> None:
    finished = run_ranks(2, jax_programs.give_up_on_a_program, env=ENV)
    assert (
        "rank 0 stops the engine while a program of JAX that was dispatched has not ended, after 0.5 s "
        "(shutdown_timeout): 'step 0' waits for rank 1" in finished.ranks[0].stderr
    ), finished


@pytest.mark.slow
def test_several_local_devices_are_refused() -> None:
    """XLA would call the handler once for each device, all with the same name."""
    (told,) = run_ranks(
        1, jax_programs.refuse_devices, env=ENV | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    ).values
    assert "2 local devices, and a rank has one" in told[0] and "spread over 2 devices" in told[1]


@pytest.mark.slow
def test_a_program_before_and_after_the_end_of_a_world() -> None:
    for told, again, gathered in run_ranks(2, jax_programs.run_again, env=ENV).values:
        assert told[0] in KINDS and told[2] == "NotInitializedError", told
        assert again == [4] * 4 and gathered == [1] * 4


@pytest.mark.slow
def test_a_stopped_launcher_ends_ranks_that_sit_in_a_program() -> None:
    with start_ranks(2, jax_programs.stop_in_a_program, env=ENV) as job:
        job.wait_for("ready.0", "ready.1", timeout=60)
        begun = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        finished = job.finish(check=False)
    assert finished.code != 0
    soon(time.monotonic() - begun, 15, finished)
