"""Compilation of the benchmarks' C programs, once per source and compiler."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import paths

FLAGS = ("-O3", "-march=native", "-std=gnu11", "-pthread")


class NoCompilerError(RuntimeError):
    """Error if there is no C compiler, or it rejects a source."""


def compile_source(source: str, *, shared: bool = False, include: Sequence[Path] = ()) -> Path:
    """Compile `common/<source>`, and return the program or, with `shared`, the library.

    With folders to `include`, whose contents may change, it is compiled each time.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NoCompilerError("no C compiler found: install gcc or clang, or set CC")
    path = paths.SOURCES / source
    flags = (*FLAGS, *(f"-I{folder}" for folder in include), *(("-shared", "-fPIC") if shared else ()))
    key = hashlib.sha256("\0".join((compiler, platform.processor(), *flags)).encode() + path.read_bytes()).hexdigest()
    target = paths.get_output_path(f"build/{path.stem}-{key[:16]}{'.so' if shared else ''}")
    if include or not target.exists():
        # Do not use the process id: ranks on several hosts may have the same.
        partial = target.with_name(f"{target.name}.{secrets.token_hex(8)}")
        done = subprocess.run(
            [*shlex.split(compiler), *flags, "-o", partial, path], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise NoCompilerError(f"{compiler} could not compile {path.name}:\n{done.stderr}")
        partial.replace(target)
    return target
