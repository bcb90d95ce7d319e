"""The handler of compiled programs, called by a runtime that is made up: also by an older one, which has no futures."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.native import library

ROOT = Path(__file__).parents[2]


def test_frames_of_a_newer_and_of_an_older_runtime(tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip("no C compiler")
    program = tmp_path / "xla_frames"
    source = Path(__file__).with_name("xla_frames.c")
    flags = "-std=gnu11 -Wall -Wextra -Werror -pthread".split()
    subprocess.run([*compiler, *flags, "-I", ROOT, "-o", program, source, "-ldl"], check=True)
    told = subprocess.run([program, library("xla_call")], capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stdout) == (0, "all is well\n"), told.stderr
