"""Pythons that Debian's packages do not have: those of pyenv, and a free-threaded one built from Debian's sources."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from .debian import PYTHON_RELEASES, PackageSource
from .targets import Target


def find_interpreter(version: str) -> Path | None:
    """Find a working interpreter on PATH or in pyenv's directories; a pyenv shim may be one that does not run."""
    found = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
    for each in map(str, filter(None, found)):
        tried = subprocess.run([each, "-c", "import venv"], capture_output=True, check=False, cwd="/")
        if tried.returncode == 0:
            return Path(each)
    return None


def find_private_python(target: Target, work: Path) -> Path | None:
    """Return the path of a Python with a directory of its own, which a bare root can mount; None if there is none."""
    if target.free_threaded:
        built = find_free_threaded(target, work)
        return built if _get_mark(built).exists() else None
    found = find_interpreter(target.version)
    if found is None:
        return None
    asked = "import sys; print(sys.base_prefix)"
    prefix = subprocess.run([found, "-c", asked], text=True, capture_output=True, check=True).stdout.strip()
    return None if prefix == "/usr" else Path(prefix, "bin", f"python{target.version}")


def find_free_threaded(target: Target, work: Path) -> Path:
    """Return the path that `build_free_threaded` gives the interpreter."""
    return (work / f"python{target.python}" / "bin" / f"python{target.python}").absolute()


def _get_mark(program: Path) -> Path:
    """Return the path of a file that exists once a Python is installed to the end."""
    return program.parents[1] / "whole"


def build_free_threaded(target: Target, work: Path) -> Path:
    """Build a free-threaded Python from Debian's sources, without optimization: a minute of two cores or more.

    Raises
    ------
    NoDebianError
        The sources cannot be had.
    subprocess.CalledProcessError
        It cannot be built here. It needs a C compiler, and the headers of libffi and zlib for its modules.
    """
    program = find_free_threaded(target, work)
    if _get_mark(program).exists():
        return program
    folder = work / "python-source" / target.version
    package = f"python{target.version}"
    roots = [each for each in folder.glob("*") if each.is_dir()]
    if not roots:
        packages = PackageSource(work / "debian", PYTHON_RELEASES[target.version], platform.machine())
        roots = [packages.fetch_source(package, folder)]
    options = [f"--prefix={program.parents[1]}", "--disable-gil", "--with-ensurepip=no", "--disable-test-modules"]
    make = ["make", "-s", f"-j{os.cpu_count()}"]
    # Without `libinstall`, which compiles bytecode: the processes for that have waited for each other without an end.
    parts = ["altbininstall", "sharedinstall", "inclinstall"]
    for command in (["./configure", "--quiet", *options], make, ["make", "-s", *parts]):
        subprocess.run(
            command, cwd=roots[0], check=True, timeout=3600, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    library = program.parents[1] / "lib" / program.name
    shutil.copytree(roots[0] / "Lib", library, dirs_exist_ok=True, ignore=shutil.ignore_patterns("test", "__pycache__"))
    for path in roots[0].glob("build/lib.*/_sysconfigdata_*.py"):
        shutil.copy2(path, library)
    _get_mark(program).touch()
    return program
