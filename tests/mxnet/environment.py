"""An environment with MXNet 1.9.1, the last there will be, and the NumPy that it needs; the rest is the tests' own.

It sees the packages of the environment that runs the tests, the engine's editable build among them, but its own come
first. enginerun asks for a newer NumPy, so pip would not put the three together.

    python -m tests.mxnet.environment
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("mxnet==1.9.1", "numpy==1.23.5")
HOME = ROOT / "build" / "mxnet"
PYTHON = HOME / "bin" / "python"
MADE = HOME / ".made"


class NotToBeHadError(Exception):
    """The environment cannot be made here; says why."""


def make() -> Path:
    """Make the environment, unless it is there; its interpreter.

    Raises
    ------
    NotToBeHadError
        This Python is too new for MXNet, or pip cannot get it.
    """
    if sys.version_info >= (3, 12):
        raise NotToBeHadError("MXNet 1.9.1 and NumPy 1.23.5 have no builds for Python 3.12 and newer")
    made = "\n".join([sysconfig.get_path("purelib"), *PACKAGES])
    HOME.parent.mkdir(exist_ok=True)
    with open(HOME.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs of the tests
        if not MADE.exists() or MADE.read_text() != made:
            venv.create(HOME, clear=True, with_pip=False, symlinks=True)
            _install()
            MADE.write_text(made)
    return PYTHON


def _install() -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(PYTHON)]
    for options in (["--no-deps", *PACKAGES], ["requests"]):  # MXNet imports it, and pins a version that is too old
        command = [*pip, "install", "--quiet", "--no-compile", "--retries", "1", *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
        if done.returncode != 0:
            raise NotToBeHadError(f"pip cannot install {' '.join(options)}: {done.stdout.strip()[-300:]}")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([PYTHON, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    outer = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    Path(packages, "outer.pth").write_text(outer)


if __name__ == "__main__":
    print(make())
