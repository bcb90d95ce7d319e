"""The example programs, each way of starting them, and the demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..left_out import leaving_out

for needed in ("torch", "sklearn", "rich"):
    pytest.importorskip(needed, reason="needs the examples extra")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAUNCH = (sys.executable, "-m", "engine.launch", "-np")
(WITHOUT_JAX,) = leaving_out("jax").items()


def run(command: list[Any], directory: Path, timeout: float = 100) -> str:
    """Run a program to its end in a directory, and return its output."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def curve(prefix: list[Any], name: str, directory: Path, *options: Any, python: object = sys.executable) -> list[float]:
    """Return the losses of a training."""
    log = directory / "log.jsonl"
    run([*prefix, python, EXAMPLES / f"{name}.py", "--log", log, *options], directory)
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps", "size"), [("digits", 40, 3), ("gpt", 3, 4)])
def test_ranks_follow_the_curve_of_one_process(name: str, steps: int, size: int, tmp_path: Path) -> None:
    """Gradients are in shared memory here; the demo covers the other case."""
    options = ["--steps", steps, "--batch", 12]
    alone = curve([], name, tmp_path, *options)
    together = curve([*LAUNCH, size, "--"], name, tmp_path, *options, "--bucket-view")
    assert len(alone) == steps and alone[-1] < alone[0]
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "needs"), [("tensorflow_digits", "tensorflow"), ("jax_digits", "jax")])
def test_two_ranks_of_other_frameworks_follow_the_curve_of_one_process(
    name: str, needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(needs, reason=f"needs {needs}")
    if needs != "jax":
        monkeypatch.setenv(*WITHOUT_JAX)
    options = ["--steps", 60, "--batch", 50]
    alone = curve([], name, tmp_path, *options)
    together = curve([*LAUNCH, 2, "--"], name, tmp_path, *options)
    assert len(alone) == 60 and alone[-1] < 0.5 * alone[0]
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_two_ranks_of_keras_follow_the_curve_of_one_process(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("keras", reason="needs keras")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    if backend != "jax":
        monkeypatch.setenv(*WITHOUT_JAX)
    options = ["--epochs", 3, "--pictures", 600]
    alone = curve([], "keras_digits", tmp_path, *options)
    (tmp_path / "log.jsonl").unlink()
    together = curve([*LAUNCH, 2, "--"], "keras_digits", tmp_path, *options)
    assert len(alone) == 3 and alone[-1] < 0.8 * alone[0]
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-5


@pytest.mark.slow
def test_torchrun_starts_them(tmp_path: Path) -> None:
    prefix = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    text = run([*prefix, EXAMPLES / "digits.py", "--steps", 20], tmp_path)
    assert text.count("digits: step 20/20") == 1
    assert "read correctly by 2 ranks" in text


@pytest.mark.slow
def test_the_gpt_writes(tmp_path: Path) -> None:
    text = run([sys.executable, EXAMPLES / "gpt.py", "--steps", 1, "--batch", 2, "--write", 20], tmp_path)
    assert "\ndef " in text


@pytest.mark.slow
def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    command = [*LAUNCH, "2", "--", sys.executable, str(EXAMPLES / "gpt.py"), "--batch", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "gpt.py: a batch of 3 cannot be shared equally by 2 ranks" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_demo_proves_its_point(tmp_path: Path) -> None:
    output = tmp_path / "output"
    program = f"import demo, pathlib; demo.OUTPUT = pathlib.Path({str(output)!r}); demo.main()"
    source = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); sys.argv = ['demo.py', '--quick']; {program}"
    text = run([sys.executable, "-c", source], tmp_path, timeout=220)
    assert text.count("  yes ") == 6 and "NO " not in text
    assert "2 ranks, not averaged" in text and "Try next" in text
    assert len((output / "gpt-1.jsonl").read_text().splitlines()) == 24


@pytest.mark.parametrize("wrong", ["apart", "flat", "vacuous"])
def test_the_demo_fails_when_its_proof_does(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import demo

    model = demo.Model("gpt", 20, 16)
    falling = [3 - step / 8 for step in range(20)]
    model.one.losses = [3.0] * 20 if wrong == "flat" else falling
    model.two.losses = [loss + 0.01 if wrong == "apart" else loss for loss in model.one.losses]
    model.apart.losses = [loss + (0 if wrong == "vacuous" else 0.1) for loss in model.one.losses]
    (text,) = demo.judge(model)
    assert {"apart": "tolerance", "flat": "falls", "vacuous": "without averaging"}[wrong] in text
