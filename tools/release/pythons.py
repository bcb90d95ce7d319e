"""Pythons that Debian's packages do not have: those of pyenv, and a free-threaded one built from Debian's sources."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .debian import PackageSource
from .headers import RELEASES, find_interpreter
from .targets import Target


def find_private_python(target: Target, work: Path) -> Path | None:
    """Return the path of a Python that has a directory of its own, which a bare root can mount; None if there is none."""
    if target.free_threaded:
        built = find_free_threaded(target, work)
        return built if built.exists() else None
    found = find_interpreter(target.version)
    if found is None:
        return None
    asked = "import sys; print(sys.base_prefix)"
    prefix = subprocess.run([found, "-c", asked], text=True, capture_output=True, check=True).stdout.strip()
    return None if prefix == "/usr" else Path(prefix, "bin", f"python{target.version}")


def find_free_threaded(target: Target, work: Path) -> Path:
    """Return the path that `build_free_threaded` gives the interpreter."""
    return (work / f"python{target.python}" / "bin" / f"python{target.python}").absolute()


def build_free_threaded(target: Target, work: Path) -> Path:
    """Build a free-threaded Python from Debian's sources, without optimization: a minute of two cores or more.

    Raises
    ------
    NoDebianError
        The sources cannot be had.
    subprocess.CalledProcessError
        It cannot be built here; it needs a C compiler, and the headers of libffi and zlib for the modules of those names.
    """
    program = find_free_threaded(target, work)
    if program.exists():
        return program
    folder = work / "python-source"
    package = f"python{target.version}"
    roots = [each for each in folder.glob("*") if each.is_dir()]
    source = roots[0] if roots else PackageSource(work / "debian", RELEASES[target.version], "x86_64").fetch_source(package, folder)
    options = [f"--prefix={program.parents[1]}", "--disable-gil", "--with-ensurepip=install", "--disable-test-modules"]
    for command in (["./configure", "--quiet", *options], ["make", "-s", f"-j{os.cpu_count()}"], ["make", "-s", "install"]):
        subprocess.run(command, cwd=source, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return program
