"""A copy of the source tree, and environments in which builds of it are installed.

Nothing here needs the network: the environments see the packages of the one that runs the tests, except the engine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# One build serves wheel and editable installation. Packaging does not depend on how well the compiler optimizes.
BUILD = ("-Cbuild-dir=build/shared", "-Csetup-args=-Doptimization=0")


def run(command: list[str | Path], cwd: Path, **variables: str) -> str:
    """Run a command that must succeed; return its output."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **variables}
    for name in ("PYTHONPATH", "NINJA", "CFLAGS"):
        env.pop(name, None)
    done = subprocess.run(command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout


@dataclass
class Environment:
    """A virtual environment, and the directory in which its programs run."""

    path: Path
    cwd: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def popen(self, code: str, **options: object) -> subprocess.Popen[str]:
        """Start Python without activating the environment, so that its tools are not on PATH."""
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.path)}
        return subprocess.Popen(
            [self.python, "-c", code], cwd=self.cwd, env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def python_says(self, code: str, status: int = 0) -> str:
        """Run `code` in Python; return its output without the last newline."""
        with self.popen(code) as process:
            output, _ = process.communicate(timeout=300)
        assert process.returncode == status, output
        return output.rstrip("\n")

    def install(self, *arguments: str | Path) -> None:
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python]
        # The engine of the environment that runs the tests is seen from here, and must be left alone.
        offline = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
        run([*pip, "install", *offline, *arguments], self.cwd)


def make_environment(path: Path, cwd: Path) -> Environment:
    venv.create(path, with_pip=False, symlinks=True)
    environment = Environment(path, cwd)
    # A directory named in a .pth file is searched, but .pth files in it, an editable install's among them, are not run.
    packages = Path(environment.python_says("import sysconfig; print(sysconfig.get_path('purelib'))"))
    packages.joinpath("outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


def copy_tree(target: Path) -> Path:
    """Copy the files that git tracks or would add."""
    names = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def commit(tree: Path) -> None:
    """Make a directory a git repository of its own, since an sdist holds committed files."""
    run(["git", "init", "-q"], tree)
    run(["git", "add", "-A"], tree)
    run(["git", "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-q", "-m", "copy"], tree)
