"""The callbacks of TensorFlow's kernels, from a program that plays TensorFlow: each runs once, forged ones do not."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_ten_thousand_late_callbacks_and_forged_ones(tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip("no C compiler")
    program = tmp_path / "tensorflow_done"
    source = Path(__file__).with_name("tensorflow_done.c")
    flags = "-std=gnu11 -D_GNU_SOURCE -Wall -Wextra -Werror -pthread".split()
    paths = ["-I", ROOT, "-I", ROOT / "engine_ext"]
    subprocess.run([*compiler, *flags, *paths, "-o", program, source, "-ldl"], check=True)
    told = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stdout) == (0, "all is well\n"), told.stderr
