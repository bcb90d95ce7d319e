"""Pythons that Debian's packages do not have, such as free-threaded ones: those on PATH and of pyenv."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from .targets import Target


def find_interpreter(version: str) -> Path | None:
    """Find a working interpreter on PATH or in pyenv's directories; a pyenv shim may be one that does not run."""
    found = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
    for each in map(str, filter(None, found)):
        tried = subprocess.run([each, "-c", "import venv"], capture_output=True, check=False, cwd="/")
        if tried.returncode == 0:
            return Path(each)
    return None


def find_private_python(target: Target) -> Path | None:
    """Return the path of a Python with a directory of its own, which a bare root can mount; None if there is none."""
    found = find_interpreter(target.python)
    if found is None:
        return None
    asked = "import sys; print(sys.base_prefix)"
    prefix = subprocess.run([found, "-c", asked], text=True, capture_output=True, check=True).stdout.strip()
    return None if prefix == "/usr" else Path(prefix, "bin", f"python{target.python}")
