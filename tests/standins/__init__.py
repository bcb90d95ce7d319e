"""Stand-ins for libcuda and libnccl, built when a test needs them, and programs started with them."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
COMPILER = [*shlex.split(os.environ.get("CC", "cc")), "-D_GNU_SOURCE", "-std=gnu11", "-Wall", "-Wextra", "-Wshadow"]
LIBRARY = ["-fPIC", "-shared", "-fvisibility=hidden"]
POLICIES = ("eager", "lazy", "drawn")


def compiled(target: Path, sources: Sequence[Path], *options: str) -> Path:
    """Compile sources into one file."""
    command = [
        *COMPILER,
        "-g",
        "-O1",
        "-pthread",
        f"-I{ROOT}",
        *map(str, sources),
        *options,
        "-o",
        str(target),
    ]
    run = subprocess.run(command, text=True, capture_output=True)
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{run.stderr}")
    return target


def build(where: Path, nccl_version: int | None = None) -> Path:
    """Build both libraries into a directory, and return it, for `environment`.

    libnccl reports `nccl_version`, such as 21805, and lacks later functions.
    """
    where.mkdir(parents=True, exist_ok=True)
    compiled(where / "libcuda.so.1", sorted((HERE / "cuda").glob("*.c")), *LIBRARY, "-Wl,-soname,libcuda.so.1")
    claims = [f"-DSTAND_NCCL_VERSION={nccl_version}"] if nccl_version else []
    linked = [f"-L{where}", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN", "-Wl,-soname,libnccl.so.2", "-lm"]
    compiled(where / "libnccl.so.2", sorted((HERE / "nccl").glob("*.c")), *LIBRARY, *claims, *linked)
    return where


def build_program(target: Path, *sources: Path) -> Path:
    """Build a C program that loads libcuda when it starts; the same binary runs with a real driver."""
    return compiled(target, sources, "-ldl")


def environment(libraries: Path, **settings: object) -> dict[str, str]:
    """Environment of a process that uses the stand-ins; settings are the names in README.md without STAND_."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("STAND_", "CUDA_", "NCCL_"))}
    chosen = {f"STAND_{name.upper()}": str(value) for name, value in settings.items()}
    return {**own, "LD_LIBRARY_PATH": str(libraries), **chosen}


def start(
    command: Sequence[str | Path],
    libraries: Path,
    more: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    **settings: object,
) -> subprocess.Popen[str]:
    """Start a program with the stand-ins."""
    env = {**environment(libraries, **settings), **(more or {})}
    return subprocess.Popen(
        list(map(str, command)), env=env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
