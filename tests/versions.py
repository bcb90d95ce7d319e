"""Run the tests of TensorFlow, Keras and JAX with the oldest versions that are supported, one between, and the newest.

The tests of the backend of torch.distributed run with several versions of torch. Where torch is a CUDA build, libraries
whose functions all fail stand in for CUDA's.

Each has an environment of its own, of up to 1.8 GB below build/versions, which is made once. A part says what it did,
and the command fails if a part does. What is not to be had here is named and left out.

    python -m tests.versions [--only-ranks 2] [tensorflow-2.16 jax-0.6 torch-2.10 ...]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from functools import partial
from typing import NamedTuple

from tools.environments import ROOT, Environment, NotToBeHadError

from .parts import run_parts
from .strange.old_torch import stand_ins

HOME = ROOT / "build" / "versions"
PIP_TIMEOUT, TESTS_TIMEOUT = 900.0, 3600.0  # seconds
_JAX_TESTS = (
    *(f"tests/frameworks/test_jax_{name}.py" for name in ("functions", "memory", "programs", "saved", "training")),
    "tests/fault/test_jax_failures.py",
)
_TENSORFLOW_TESTS = (
    *(
        f"tests/frameworks/test_tensorflow_{name}.py"
        for name in ("batch_norm", "gradients", "ops", "optimizer", "session", "tape", "variables")
    ),
    "tests/fault/test_tensorflow_failures.py",
)
_KERAS_TESTS = ("tests/frameworks/test_keras_optimizers.py", "tests/frameworks/test_keras_training.py")


class Part(NamedTuple):
    """Package versions, and the tests that run with them."""

    environment: Environment
    package: str  # package whose version is printed
    tests: tuple[tuple[str, ...], ...]  # arguments of pytest for each run, in order


def _torch(name: str, version: str) -> Part:
    return Part(Environment(HOME / name, (("--no-deps", f"torch=={version}"),)), "torch", (("tests/c10d",),))


def _jax(name: str, *versions: str) -> Part:
    return Part(Environment(HOME / name, (versions,)), "jax", (_JAX_TESTS,))


PARTS = {
    # It looks for JAX, and breaks on one that wants a newer ml_dtypes.
    "tensorflow-2.16": Part(
        Environment(HOME / "tensorflow-2.16", (("tensorflow-cpu==2.16.2",),), hidden=("jax", "torch")),
        "tensorflow-cpu",
        (_TENSORFLOW_TESTS, (*_KERAS_TESTS, "-k", "tensorflow")),
    ),
    "jax-0.6": _jax("jax-0.6", "--no-deps", "jax==0.6.0", "jaxlib==0.6.0"),
    "jax-0.8": _jax("jax-0.8", "--no-deps", "jax==0.8.0", "jaxlib==0.8.0"),
    "jax-newest": _jax("jax-newest", "--upgrade", "jax", "jaxlib", "optax"),
    "torch-2.7": _torch("torch-2.7", "2.7.1"),
    "torch-2.10": _torch("torch-2.10", "2.10.0"),
    "torch-2.14": _torch("torch-2.14", "2.14.1"),
    "torch-2.15": _torch("torch-2.15", "2.15.0"),
}


def run(part: Part, options: list[str]) -> str:
    """Run the tests of a part, and return what passed. Raise an AssertionError that names failures."""
    python = part.environment.make_ready(PIP_TIMEOUT)
    environment = dict(os.environ)
    for libraries in part.environment.home.glob("lib/python*/site-packages/torch/lib"):
        directory = stand_ins(part.environment.home / "cuda", libraries)
        environment["LD_LIBRARY_PATH"] = f"{directory}:{environment.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    version = subprocess.run(
        [python, "-c", f"from importlib.metadata import version; print(version({part.package!r}))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    told = []
    for tests in part.tests:
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *options]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TESTS_TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, f"{part.package} {version}:\n{done.stdout[-6000:]}"
        told += re.findall(r"^(\d+ passed.*) in ", done.stdout, re.MULTILINE)
    return f"{part.package} {version}: {'; '.join(told)}"


def main() -> int:
    """Run all parts, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-ranks", help="as of pytest: of the tests on ranks, those on so many")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    given = parser.parse_args()
    options = [] if given.only_ranks is None else ["--only-ranks", given.only_ranks]
    known = {name: partial(run, part, options) for name, part in PARTS.items()}
    return run_parts(known, given.parts, parser, NotToBeHadError)


if __name__ == "__main__":
    sys.exit(main())
