"""Promises of the README and the docs: programs run, tables agree with the code, and links have targets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..documents import read_program
from ..left_out import EXTRAS, NAMES, leaving_out
from ..ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
(DIFF,) = re.findall(r"^```diff\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def without_code(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def find_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def side(dropped: str) -> str:
    """Return the script before or after the README's diff: all lines except those with `+`, or with `-`."""
    lines = DIFF.splitlines()
    assert all(line[:1] in ("+", "-", " ", "") for line in lines)
    return "".join(line[1:] + "\n" for line in lines if not line.startswith(dropped))


def run(program: str, directory: Path) -> str:
    """Run a program in one process with one thread, outside the source tree, and return its output."""
    (directory / "train.py").write_text(program)
    command, environment = [sys.executable, "train.py"], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 0
    return done.stdout


@pytest.mark.slow
def test_the_keras_script_trains_on_two_ranks() -> None:
    pytest.importorskip("tensorflow", reason="needs TensorFlow")
    ending = "hvd.check_consistency({each.path: each.numpy() for each in model.weights})\n"
    environment = {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "", **leaving_out(*NAMES)}
    done = run_ranks(2, read_program("how-to/frameworks.md", "keras") + ending, env=environment)
    epochs = [float(found) for found in re.findall(r"loss: ([0-9.]+)", done.ranks[0].stdout)]
    assert len(epochs) == 5 and epochs[-1] < 0.5 * epochs[0], done
    assert "loss" not in done.ranks[1].stdout


@pytest.mark.sample(1)
@pytest.mark.parametrize(("framework", "package"), [("tensorflow", "tensorflow"), ("jax", "optax")])
def test_scripts_of_the_frameworks_page_train_on_two_ranks(framework: str, package: str) -> None:
    """Ranks start with different parameters and data, and end with equal parameters and a small loss."""
    pytest.importorskip(package, reason=f"needs {package}")
    program = read_program("how-to/frameworks.md", framework)
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


@pytest.mark.slow
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
    added = [line for line in DIFF.splitlines() if line.startswith("+")]
    removed = [line for line in DIFF.splitlines() if line.startswith("-")]
    assert len(removed) == 1  # The line that prints, which gets indented,
    assert len(added) - len(removed) == 5 + 1  # five lines, and an import.


def test_program_of_the_operations_page_runs() -> None:
    pytest.importorskip("torch", reason="needs torch")
    done = run_ranks(2, read_program("how-to/collectives.md", "beyond") + "print(mean.tolist(), rows.shape, plan)\n")
    for rank in done.ranks:
        assert rank.stdout == "[0.0, 0.5, 1.0] (3, 2) {'lr': 0.1}\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(without_code(page)):
        if not target.startswith(("http:", "https:")):
            linked = page.parent / target if target else page
            assert linked.exists(), target
            assert not anchor or anchor in find_anchors(linked), f"{target}#{anchor}"


def test_readme_is_short_and_begins_with_the_example() -> None:
    assert len(README.split()) <= 900
    assert README.partition("```")[2].startswith("diff\n")


def test_readme_leads_to_every_page() -> None:
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop().resolve()
        if page not in reached:
            reached.add(page)
            links = [target for target, _ in LINK.findall(page.read_text()) if target.endswith(".md")]
            left += [page.parent / target for target in links if not target.startswith("http")]
    assert set(PAGES) - reached == set()


RESULTS, HISTORY = ROOT / "benchmarks" / "RESULTS.md", ROOT / "benchmarks" / "history"
COMMANDS = ROOT / "benchmarks" / "__main__.py"
FIGURE = re.compile(r"-?[0-9.]+ \[[^\]]+\]|[0-9a-f]{12}\b|\| (-?[0-9.]+ (?:%|[mu]?s))(?= \|)")


def test_results_are_short() -> None:
    assert len(RESULTS.read_text().split()) <= 1500


def test_every_figure_of_the_results_is_recorded() -> None:
    """Each ratio with its interval, time and revision stands in the history as it does in a claim."""
    record = "\n".join(page.read_text() for page in HISTORY.glob("*.md")).replace(" | [", " [")
    found = {match[1] or match[0] for match in FIGURE.finditer(RESULTS.read_text())}
    assert len(found) > 80
    assert [each for each in sorted(found) if each not in record] == []


def test_reports_can_be_written_into_the_history() -> None:
    text = "\n".join(page.read_text() for page in HISTORY.glob("*.md"))
    begun, ended = (re.findall(rf"^<!-- ([a-z-]+): {word} -->$", text, re.MULTILINE) for word in ("begin", "end"))
    assert begun == ended and len(begun) == len(set(begun))
    assert set(begun) <= set(re.findall(r'^    "([a-z-]+)": \w+,$', COMMANDS.read_text(), re.MULTILINE))


def test_make_has_the_targets_that_are_named() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z-]+)", page.read_text())}
    assert named and named <= known, named - known
