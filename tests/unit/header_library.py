"""Libraries made of C headers of the engine by themselves, for tests that call their functions."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build_library(folder: Path, source: str) -> ctypes.CDLL:
    """Compile C source, which includes headers by their path from the repository's root, in `folder`, and load it."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    assert compiler, "no C compiler"
    (folder / "library.c").write_text(source)
    command = [*compiler.split(), "-std=gnu11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{ROOT}"]
    subprocess.run([*command, str(folder / "library.c"), "-o", str(folder / "library.so")], check=True)
    return ctypes.CDLL(str(folder / "library.so"))
