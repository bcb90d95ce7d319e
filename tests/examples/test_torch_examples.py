"""The examples for programs of torch.distributed: what they print on the engine is what they print on gloo."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from .test_examples import EXAMPLES, run

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def trained(name: str, backend: str, directory: Path, *options: object) -> str:
    """Return what an example prints on two ranks, without its speeds."""
    text = run([*TORCHRUN, EXAMPLES / f"torch_{name}.py", "--backend", backend, *options], directory)
    return re.sub(r", \d+(\.\d+)? samples/s| on \w+$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "options", "lines"),
    [
        ("ddp", ("--steps", 60), [r"step 60: loss 0\.\d+", r"9\d\.\d% of 297 new digits are read .* by 2 ranks"]),
        (
            "fsdp",
            ("--steps", 5, "--width", 32),
            [r"[\d,]+ of [\d,]+ parameters on each of 2 ranks", r"step 5: loss \d"],
        ),
    ],
)
def test_on_the_engine(name: str, options: tuple[object, ...], lines: list[str], tmp_path: Path) -> None:
    text = trained(name, "engine", tmp_path, *options)
    for line in lines:
        assert re.search(line, text), text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_as_on_gloo(name: str, tmp_path: Path) -> None:
    on_engine = trained(name, "engine", tmp_path)
    assert on_engine.count("loss") == 4
    assert on_engine == trained(name, "gloo", tmp_path)


@pytest.mark.sample(1)
def test_local_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine.launch", "-np", "2", "--", sys.executable]
    text = run([*command, EXAMPLES / "torch_local_steps.py", "--steps", 200], tmp_path)
    found = re.search(r"2 ranks, 10 synchronisations of each parameter, loss (\d+\.\d+)", text)
    assert found and float(found[1]) < 1.0, text
    assert text.count(": loss") == 2, text
