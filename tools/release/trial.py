"""Try wheels in a bare Debian without compiler and headers, from `pip install` to two ranks that train.

    python -m tools.release.trial                 # each wheel of a release that lies in dist
    python -m tools.release.trial cp311-x86_64    # one of them; cp314t and aarch64 choose several

Two ranks reduce arrays of NumPy, and threads of them at once. For Python 3.11 on x86-64 the script of the README
trains, too, with the torch of constraints.txt. Wheels for aarch64 run under QEMU, that for Python 3.11 with the tests
of the kernels and of the protocol, which take most of the time. QEMU shows neither speed nor the order in which such a
processor accesses memory. Needed are user namespaces, and Debian's apt or the Python itself: docs/how-to/wheels.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .bare_root import BareRoot, LeftOutError
from .debian import NoDebianError
from .finding import CheckState, Finding, format_table
from .targets import Target, add_names, select_targets

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "wheels"
_TORCH_PYTHON = "3.11"
_TESTED_PYTHON = "3.11"
"""Python whose emulated wheel runs the tests, which take long; the others are compiled from the same C code."""
_BARE = """\
import os, shutil, sys, sysconfig
found = [name for name in ("cc", "gcc", "clang", "tcc", "make", "cython", "ninja") if shutil.which(name)]
header = os.path.join(sysconfig.get_path("include"), "Python.h")
assert not found and not os.path.exists(header), (found, header)
print(f"bare, with Python {sys.version.split()[0]} for {os.uname().machine}")
"""
_REDUCE = """\
import sys
import numpy as np
import engine

engine.init()
rank, size = engine.rank(), engine.size()
assert size == int(sys.argv[1]), size
total = engine.allreduce(np.full(70_000, rank + 1, np.float32), engine.Sum)
assert (total == size * (size + 1) / 2).all()
assert engine.allgather(np.full(rank + 1, rank)).tolist() == [each for each in range(size) for _ in range(each + 1)]
assert engine.broadcast(np.full(3, rank), size - 1).tolist() == [size - 1] * 3
engine.barrier()
print(f"rank {rank} of {size} is done", flush=True)
"""
# Several threads of each rank reduce under names of their own, while others come and go.
_THREADS = """\
import sys, threading
import numpy as np
import engine

engine.init()
rank, size = engine.rank(), engine.size()
wrong = []

def work(number):
    for turn in range(200):
        tensor = np.full(1 + 997 * (turn % 3), rank + turn, np.float32)
        total = engine.allreduce(tensor, engine.Sum, name=f"thread.{number}")
        if not (total == sum(range(size)) + size * turn).all():
            wrong.append((number, turn))

threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
for each in threads:
    each.start()
for each in threads:
    each.join()
assert not wrong, wrong
locked = getattr(sys, "_is_gil_enabled", lambda: True)()
print(f"rank {rank} of {size} is done, with the lock {'on' if locked else 'off'}", flush=True)
"""
# `build` asks the machine which levels there are.
_BUILD_KERNELS = """\
import platform, sys
from pathlib import Path

platform.machine = lambda: sys.argv[1]
from tests.unit.kernel_library import build

build(Path(sys.argv[2]))
"""
# The tests of the kernels, and those that drive the protocol hardest of those that need no torch.
_TESTS = ("tests/unit/test_kernels.py", *(
    f"tests/parallel/test_{name}.py" for name in (
        "allgather", "alltoall", "broadcast", "drawn", "groups", "handles", "join", "messages", "mismatches", "names",
        "process_sets", "threads",
    )
))  # fmt: skip
# Tests that are left out of these, by pytest's expressions for names (-k), and why.
_LEFT_OUT = {
    "native_call": "the root has no compiler for the library of these tests",
    "test_reducescatter_of_all_dtypes": "its inputs need torch",
    "test_drawn_programs and (0000 or 0011 or 01121)": "four and five threads as ranks take minutes each",
}
# Ends after the first step of training, for the time from `pip install` to there.
_FIRST_STEP = ("        optimizer.step()\n", "        optimizer.step()\n        raise SystemExit\n")


_EMULATOR_SLOWNESS = 5
"""Factor for the time that a command may take in the emulator, and for all deadlines of tests there."""


class FailedTrialError(Exception):
    """A wheel did not do in the bare root what it should; the text shows the command and its output."""


class WheelTrial:
    """Trial of one wheel; raises `LeftOutError` if it cannot run on this machine."""

    def __init__(self, target: Target, wheel: Path) -> None:
        self._target = target
        self._wheel = wheel
        self._root = BareRoot(target, WORK)
        self._folder = WORK / "trials" / target.name
        self._emulated = target.machine != platform.machine()
        self._with_torch = target.python == _TORCH_PYTHON and not self._emulated

    def carry_out(self) -> Iterator[str]:
        """Yield a line for each thing that worked; raise `FailedTrialError` if one did not."""
        subprocess.run(["rm", "-rf", self._folder], check=True)
        (self._folder / "env").mkdir(parents=True)
        (self._folder / "bare.py").write_text(_BARE)
        (self._folder / "reduce.py").write_text(_REDUCE)
        (self._folder / "threads.py").write_text(_THREADS)
        script = read_readme_script()
        (self._folder / "train.py").write_text(script)
        (self._folder / "first.py").write_text(script.replace(*_FIRST_STEP))
        self._download_packages("numpy", *(["torch"] if self._with_torch else []))
        yield self._run(self._root.python, "/trial/bare.py").strip()
        self._run(self._root.python, "-m", "venv", "/env", timeout=600)
        pip = ["/env/bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index",
               "--find-links", "/wheelhouse"]  # fmt: skip
        self._run(*pip, "numpy", *(["torch"] if self._with_torch else []), timeout=1200)
        begun = time.monotonic()
        self._run(*pip, f"/dist/{self._wheel.name}", timeout=600)
        yield f"pip install took {time.monotonic() - begun:.1f} s"
        if self._with_torch:
            self._run("/env/bin/enginerun", "-np", "2", "/env/bin/python", "/trial/first.py")
            yield f"the first step of training ended {time.monotonic() - begun:.1f} s after pip install began"
            losses = re.findall(r"epoch \d+: loss ([0-9.]+)", self._run(
                "/env/bin/enginerun", "-np", "2", "/env/bin/python", "/trial/train.py"))  # fmt: skip
            if len(losses) != 20 or not float(losses[-1]) < 0.5 * float(losses[0]):
                raise FailedTrialError(f"the script of the README printed the losses {losses}")
            yield f"the script of the README trained on 2 ranks, to a loss of {losses[-1]}"
        how = ", under QEMU," if self._emulated else ""
        self._run_ranks("reduce.py", 1)
        self._run_ranks("reduce.py", 2)
        yield f"collectives on 1 and 2 ranks of enginerun{how} gave the right values"
        output = self._run_ranks("threads.py", 2)
        yield f"6 threads of each of 2 ranks reduced at once{how} and got the right values"
        if self._target.free_threaded:
            if "with the lock on" not in output or "with the lock off" in output:
                raise FailedTrialError(f"the import of the engine did not turn the interpreter's lock on:\n{output}")
            yield "the import turned the interpreter's lock on"
            yield self._check_refusal()
        if self._emulated and self._target.python == _TESTED_PYTHON:
            self._prepare_tests(pip)
            yield f"tests of the kernels, and of the protocol on 2 ranks: {self._run_tests()}"
            yield from (f"left out of these tests: {pattern}: {reason}" for pattern, reason in _LEFT_OUT.items())
        elif self._emulated:
            yield f"no tests of the kernels and of the protocol: cp{_TESTED_PYTHON.replace('.', '')} alone runs them"

    def _run_ranks(self, script: str, ranks: int) -> str:
        """Run a script of the trial on ranks that enginerun starts, and return the output; each has to be done."""
        output = self._run("/env/bin/enginerun", "-np", str(ranks), "/env/bin/python", f"/trial/{script}", str(ranks))
        if any(f"rank {rank} of {ranks} is done" not in output for rank in range(ranks)):
            raise FailedTrialError(f"not all of {ranks} ranks said that they are done:\n{output}")
        return output

    def _check_refusal(self) -> str:
        """Check that the engine is refused where a user keeps the GIL off: its state is guarded by it."""
        for options in (["-X", "gil=0"], []):
            command = ["env", *(["PYTHON_GIL=0"] if not options else []), "/env/bin/python", *options]
            done = self._try_command(*command, "-c", "import engine; engine.init()")
            if done.returncode == 0 or "ImportError" not in done.stdout or "PYTHON_GIL" not in done.stdout:
                raise FailedTrialError(f"with the lock off the engine started, or did not say why not:\n{done.stdout}")
        return "with -X gil=0 and with PYTHON_GIL=0 the import was refused, and said why"

    def _prepare_tests(self, pip: list[str]) -> None:
        """Install pytest, and compile the library of the kernels' tests by the compiler that made the wheel."""
        packages = ["hypothesis", "pytest", "pytest-timeout", "pytest-xdist"]
        self._download_packages(*packages)
        self._run(*pip, *packages, timeout=600)
        compiler = WORK / self._target.name / "cc"
        command = [sys.executable, "-c", _BUILD_KERNELS, self._target.machine, str(self._folder)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "CC": str(compiler)},
            text=True,
            capture_output=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            raise FailedTrialError(f"the kernels do not compile:\n{done.stderr[-4000:]}")

    def _run_tests(self) -> str:
        """Run tests of this repository with the wheel, and return pytest's last line.

        Two workers share them: one runs those on ranks. pytest writes no cache into the repository, and dumps no stacks
        before the tests' own deadlines, which are longer in the emulator.
        """
        log = self._folder / "tests.log"
        command = ["/env/bin/python", "-m", "pytest", "-v", "-n", "2", "--dist", "loadscope", "-p", "no:cacheprovider"]
        command += ["-o", "faulthandler_timeout=0", "--rootdir", "/repository", "-c", "/repository/pyproject.toml"]
        command += ["--durations=10", "--only-ranks", "2"]
        command += ["-k", " and ".join(f"not ({pattern})" for pattern in _LEFT_OUT)]
        command += [f"/repository/{file}" for file in _TESTS]
        print(f"{self._target.name}: follow the tests in {log}", flush=True)
        done = self._try_command("sh", "-c", f"{shlex.join(command)} > /trial/{log.name} 2>&1", timeout=2400)
        lines = log.read_text(errors="replace").strip().splitlines()
        if done.returncode:
            shown = "\n".join(lines[-60:])
            raise FailedTrialError(f"tests failed; {log} has all that they printed, and ends so:\n{shown}")
        return lines[-1].strip("= ")

    def _download_packages(self, *packages: str) -> None:
        """Fetch what the wheel needs for its Python into the wheelhouse, with this machine's pip."""
        wheelhouse = WORK / "wheelhouse" / self._target.name
        wheelhouse.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
        command += ["--dest", str(wheelhouse)]
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", self._target.version]
        command += ["--abi", self._target.abi, "--abi", "none"]
        command += ["--abi", "abi3"] * (not self._target.free_threaded)
        for platform_tag in ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "linux"):
            command += ["--platform", f"{platform_tag}_{self._target.machine}"]
        for package in packages:
            pinned = re.search(rf"^{package}==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
            wanted = f"{package}=={pinned[1]}" if pinned and package == "torch" else package
            done = subprocess.run([*command, wanted], text=True, capture_output=True, timeout=1200, check=False)
            if done.returncode:
                raise LeftOutError(f"{wanted} cannot be had for {self._target.name}: {done.stderr.strip()[-500:]}")

    def _try_command(self, *command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        binds = {
            self._folder: "/trial",
            self._folder / "env": "/env",
            self._wheel.parent.absolute(): "/dist",
            WORK / "wheelhouse" / self._target.name: "/wheelhouse",
            ROOT: "/repository",
        }
        slowness = _EMULATOR_SLOWNESS if self._emulated else 1
        variables = {
            "OMP_NUM_THREADS": "1", "KERNELS_LIBRARY": "/trial/kernels.so", "PYTHONDONTWRITEBYTECODE": "1",
            "TESTS_SLOWNESS": str(slowness), "ENGINE_START_TIMEOUT": str(60 * slowness),
        }  # fmt: skip
        try:
            return self._root.run(command, binds, timeout * slowness, **variables)
        except subprocess.TimeoutExpired as error:
            shown = (error.stdout or b"").decode(errors="replace")[-4000:]
            what = f"{' '.join(command)} was not done within {error.timeout:g} s"
            raise FailedTrialError(f"{what}:\n{shown}") from error

    def _run(self, *command: str, timeout: float = 300) -> str:
        done = self._try_command(*command, timeout=timeout)
        if done.returncode:
            raise FailedTrialError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout[-4000:]}")
        return done.stdout


def read_readme_script() -> str:
    """Return the script of the README: its diff without the removed line and without the marks."""
    [diff] = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return "".join(line[1:] + "\n" for line in diff.splitlines() if not line.startswith("-"))


def try_wheels(targets: Sequence[Target], dist: Path) -> Iterator[Finding]:
    """Try the wheels of a directory, and yield a finding for each; the lines of each trial are printed."""
    for target in targets:
        subject = f"trial of {target.name}"
        wheels = list(dist.glob(f"*-{target.tag}.whl"))
        if not wheels:
            yield Finding(subject, CheckState.UNTRIED, f"there is no such wheel in {dist}")
            continue
        worked = []
        try:
            for line in WheelTrial(target, max(wheels, key=lambda path: path.stat().st_mtime)).carry_out():
                print(f"{target.name}: {line}", flush=True)
                worked.append(line)
        except (LeftOutError, NoDebianError) as error:
            yield Finding(subject, CheckState.UNTRIED, str(error))
        except (FailedTrialError, subprocess.SubprocessError) as error:
            yield Finding(subject, CheckState.FAILED, str(error))
        else:
            yield Finding(subject, CheckState.PASSED, "; ".join(worked))


def main() -> int:
    """Try the wheels that are there; return 1 if one fails or none is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="directory with the wheels (default: dist)")
    add_names(parser)
    options = parser.parse_args()
    try:
        targets = select_targets(options.names)
    except ValueError as error:
        parser.error(str(error))
    findings = []
    for finding in try_wheels(targets, options.dist):
        findings.append(finding)
        if finding.state is not CheckState.PASSED:
            print(finding, flush=True)
    print(f"\n{format_table(findings)}")
    states = {finding.state for finding in findings}
    return int(CheckState.FAILED in states or CheckState.PASSED not in states)


if __name__ == "__main__":
    sys.exit(main())
