"""Promises of the README and the docs: the diff runs, tables agree with the code, and links have targets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import config

from ..left_out import EXTRAS, NAMES, leaving_out
from ..ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def block(language: str, imports: str = "") -> str:
    """Return the README's only block of a language, or the one that begins with an import of this module."""
    found = re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    (text,) = [each for each in found if each.startswith(f"import {imports}" if imports else "")]
    return str(text)


def side(dropped: str) -> str:
    """Return the script before or after the README's diff: all lines except those with `+`, or with `-`."""
    lines = block("diff").splitlines()
    assert all(line[:1] in ("+", "-", " ", "") for line in lines)
    return "".join(line[1:] + "\n" for line in lines if not line.startswith(dropped))


def run(program: str, directory: Path) -> str:
    """Run a program in one process with one thread, outside the source tree, and return its output."""
    (directory / "train.py").write_text(program)
    command, environment = [sys.executable, "train.py"], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 0
    return done.stdout


def test_the_keras_script_trains_on_two_ranks() -> None:
    pytest.importorskip("tensorflow", reason="needs TensorFlow")
    ending = "hvd.check_consistency({each.path: each.numpy() for each in model.weights})\n"
    environment = {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "", **leaving_out(*NAMES)}
    done = run_ranks(2, block("python", "keras") + ending, env=environment)
    epochs = [float(found) for found in re.findall(r"loss: ([0-9.]+)", done.ranks[0].stdout)]
    assert len(epochs) == 5 and epochs[-1] < 0.5 * epochs[0], done
    assert "loss" not in done.ranks[1].stdout


@pytest.mark.parametrize(("framework", "package"), [("tensorflow", "tensorflow"), ("jax", "optax")])
def test_scripts_of_the_frameworks_page_train_on_two_ranks(framework: str, package: str) -> None:
    """Ranks start with different parameters and data, and end with equal parameters and a small loss."""
    pytest.importorskip(package, reason=f"needs {package}")
    page = (ROOT / "docs" / "frameworks.md").read_text()
    block = rf"<!-- {framework}: a test runs it -->\n```python\n(.*?)^```"
    (program,) = re.findall(block, page, re.DOTALL | re.MULTILINE)
    environment = {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    environment |= leaving_out(*(EXTRAS if framework == "jax" else NAMES))
    done = run_ranks(2, program, env=environment)
    ends = [re.findall(r"rank \d: loss ([0-9.]+), weights ([0-9.-]+)", rank.stdout) for rank in done.ranks]
    assert ends[0] == ends[1] and float(ends[0][0][0]) < 0.5, done


def losses(text: str) -> list[float]:
    """Return the losses that the script printed, one per epoch."""
    found = re.findall(r"epoch (\d+): loss ([0-9.]+)", text)
    assert [int(epoch) for epoch, _ in found] == list(range(20)), text
    return [float(loss) for _, loss in found]


def test_the_diff_turns_a_script_that_runs_into_one_that_runs_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch")
    alone = losses(run(side("+"), tmp_path))
    assert losses(run(side("-"), tmp_path)) == alone  # Without a launcher the result is unchanged.
    done = run_ranks(2, side("-") + "engine.torch.check_consistency(model.state_dict())\n")
    together = losses(done.ranks[0].stdout)
    assert done.ranks[1].stdout == ""
    for curve in (alone, together):
        assert curve[-1] < 0.5 * curve[0], curve
    assert abs(alone[-1] - together[-1]) < 0.1, (alone, together)


def test_the_diff_is_as_small_as_it_claims() -> None:
    added = [line for line in block("diff").splitlines() if line.startswith("+")]
    removed = [line for line in block("diff").splitlines() if line.startswith("-")]
    assert len(removed) == 1  # The line that prints, which gets indented,
    assert len(added) - len(removed) == 5 + 1  # five lines, and an import.


def test_the_example_beyond_gradients_runs() -> None:
    pytest.importorskip("torch", reason="needs torch")
    done = run_ranks(2, block("python", "numpy") + "print(mean.tolist(), rows.shape, plan)\n")
    for rank in done.ranks:
        assert rank.stdout == "[0.0, 0.5, 1.0] (3, 2) {'lr': 0.1}\n"


def test_settings_are_those_of_the_code() -> None:
    (table,) = re.findall(r"<!-- settings.*?-->\n(.*?)\n<!--", (ROOT / "docs/settings.md").read_text(), re.DOTALL)
    assert table == config.describe()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


def test_make_has_the_targets_that_are_named() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z-]+)", page.read_text())}
    assert named and named <= known, named - known
