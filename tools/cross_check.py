"""Compile the portable C sources, and the C that Cython made of the modules, for aarch64. Links and installs nothing.

Usage: cross_check.py BUILD_DIRECTORY; the compiler is $CROSS_CC, or aarch64-linux-gnu-gcc.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOW_TO_GET = """\
There is no {compiler} here. On Debian and Ubuntu:
    apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross
Another compiler: make cross-check CROSS_CC='clang --target=aarch64-linux-gnu'"""

FLAGS = ["-std=c11", "-O2", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-D_GNU_SOURCE", "-Iengine_ext", "-I."]
OURS = ["-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Werror"]


def sources(build: Path) -> dict[Path, list[str]]:
    """What to compile, with its own flags. What needs an x86-64 processor is left out, as in the build."""
    own = [path for path in (ROOT / "engine_ext").rglob("*.c") if not path.stem.endswith(("_avx2", "_avx512"))]
    generated = sorted(build.glob("engine_ext/*.p/*.pyx.c"))
    if not generated:
        sys.exit(f"{build} holds no generated sources: build the engine first")
    # pyconfig.h is this machine's; both are 64-bit and little-endian, so its sizes hold.
    headers = [f"-I{sysconfig.get_path('include')}", f"-I{build}/engine_ext", "-w"]
    return dict.fromkeys(sorted(own), OURS) | dict.fromkeys(generated, headers)


def main() -> None:
    build = Path(sys.argv[1])
    compiler = shlex.split(os.environ.get("CROSS_CC", "aarch64-linux-gnu-gcc"))
    if shutil.which(compiler[0]) is None:
        sys.exit(HOW_TO_GET.format(compiler=compiler[0]))

    def compile_one(source: Path, flags: list[str]) -> bool:
        command = [*compiler, *FLAGS, *flags, "-c", str(source), "-o", f"{scratch}/{source.name}.o"]
        done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        print(f"{'ok    ' if done.returncode == 0 else 'FAILED'} {source.name}\n{done.stdout}", end="", flush=True)
        return done.returncode == 0

    todo = sources(build)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(compile_one, todo, todo.values()))
    if not all(results):
        sys.exit(f"{results.count(False)} of {len(results)} sources do not compile for aarch64")


if __name__ == "__main__":
    main()
