"""Runs the C programs in this directory that stand in for a framework's runtime."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def expect_all_is_well(name: str, directory: Path, *arguments: str | Path) -> None:
    """Compile `name`.c of this directory into another, run it, and expect it to print only that all is well."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip("no C compiler")
    program, source = directory / name, Path(__file__).with_name(f"{name}.c")
    flags = "-std=gnu11 -D_GNU_SOURCE -Wall -Wextra -Werror -pthread".split()
    paths = ["-I", ROOT, "-I", ROOT / "engine_ext"]
    subprocess.run([*compiler, *flags, *paths, "-o", program, source, "-ldl"], check=True)
    told = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stdout) == (0, "all is well\n"), told.stderr
