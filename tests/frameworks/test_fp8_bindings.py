"""`Compression.fp8` in every binding, with ranks on two hosts: the bits of the formula, on all ranks."""

from __future__ import annotations

import importlib.util
import statistics

import pytest

from ..ranks import run_ranks
from . import fp8_programs

NEEDS = {
    "reduce_numpy": "numpy",
    "reduce_torch": "torch",
    "reduce_grouped_torch": "torch",
    "reduce_tensorflow": "tensorflow",
    "reduce_jax": "jax",
    "reduce_optax": "optax",
    "reduce_keras": "keras",
}


@pytest.mark.timeout(320)
@pytest.mark.sample(4)
@pytest.mark.parametrize("program", NEEDS)
def test_gradients_travel_in_8_bits_between_hosts(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(NEEDS[program]) is None:
        pytest.skip(f"needs {NEEDS[program]}")
    monkeypatch.setenv("PRETENDED_HOSTS", str(fp8_programs.HOSTS))
    env = {"TF_CPP_MIN_LOG_LEVEL": "3"} | ({"KERAS_BACKEND": "torch"} if program == "reduce_keras" else {})
    travelled = run_ranks(3, getattr(fp8_programs, program), env=env, timeout=300).values
    assert all("fp8" in each for each in travelled)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trainings_end_with_the_loss_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over seeds differs by no more than the seeds themselves; models are equal on all ranks."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    monkeypatch.setenv("PRETENDED_HOSTS", "2")
    found = run_ranks(2, fp8_programs.train_digits, 150, 3, timeout=580).values[0]
    for kind in ("sgd", "adamw"):
        plain, coded = found[f"{kind} none"], found[f"{kind} fp8"]
        assert all(loss < 0.3 for loss in plain), found
        spread = max(plain) - min(plain)
        assert abs(statistics.mean(coded) - statistics.mean(plain)) <= max(spread, 0.02 * statistics.mean(plain)), found
