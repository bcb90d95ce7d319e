"""Compilation of the engine for a target: meson, with Zig's C compiler, which carries the stubs of old glibcs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .headers import Headers, write_build_details
from .targets import GLIBC, Target

# Zig's compiler makes debug information unless told not to, and keeps frame pointers. `-s` drops symbols: the linker's
# section of the compiler's paths among them.
_COMPILER = """\
#!/bin/sh
exec {python} -m ziglang cc -target {machine}-linux-gnu.{glibc} -g0 -fomit-frame-pointer \\
    -ffile-prefix-map={source}=. {headers} "$@"
"""
_TRANSPILER = '#!/bin/sh\nexec {command} "$@"\n'
_CROSS_FILE = """\
[binaries]
c = '{compiler}'
cython = '{cython}'
ar = '{archiver}'
pkg-config = 'false'

[host_machine]
system = 'linux'
cpu_family = '{machine}'
cpu = '{machine}'
endian = 'little'

[built-in options]
c_link_args = ['-Wl,-s', '-Wl,--build-id=none']
"""


Progress = Callable[[int, int], None]


def compile_target(
    target: Target, headers: Headers, source: Path, build: Path, cache: Path, jobs: int, progress: Progress | None
) -> Path:
    """Compile, and return the directory that holds what belongs into `site-packages`.

    `source` is a copy of the sources, and `build` is emptied. `cache` keeps Cython's output for other targets of the
    same sources. `jobs` compilers run at the same time. `progress` is called with the number of steps done and their
    total.

    Raises CalledProcessError if meson or ninja failed; the output has been printed.
    """
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    details, cross = build / "build-details.json", build / "cross.ini"
    write_build_details(target, headers, details)
    # What `configure --disable-gil` writes into pyconfig.h; both builds of a version have the same headers otherwise.
    flags = [f"-I{each}" for each in headers.folders] + ["-DPy_GIL_DISABLED=1"] * target.free_threaded
    compiler = _write_script(build / "cc", _COMPILER.format(
        python=shlex.quote(sys.executable), machine=target.machine, glibc="{}.{}".format(*GLIBC),
        source=shlex.quote(str(source)), headers=shlex.join(flags),
    ))  # fmt: skip
    archiver = _write_script(build / "ar", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ziglang ar "$@"\n')
    cython = _write_script(build / "cython", _TRANSPILER.format(command=shlex.join(map(str, [
        sys.executable, Path(__file__).with_name("transpile.py"), cache, Path(sys.executable).with_name("cython"),
    ]))))  # fmt: skip
    cross.write_text(_CROSS_FILE.format(
        compiler=compiler, archiver=archiver, cython=cython, machine=target.machine,
    ))  # fmt: skip
    options = [
        "--cross-file", cross, "--prefix=/usr", "-Dbuildtype=release", "-Db_ndebug=if-release",
        f"-Dpython.build_config={details}", "-Dpython.platlibdir=/site", "-Dpython.purelibdir=/site",
        "-Dpython.bytecompile=-1",
    ]  # fmt: skip
    objects = build / "objects"
    _run_tool(["meson", "setup", *options, objects, source], build)
    _run_tool(["ninja", "-C", objects, "-j", jobs], build, progress)
    _run_tool(["meson", "install", "-C", objects, "--no-rebuild", "--quiet", "--destdir", build / "installed"], build)
    return build / "installed/site"


def _write_script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def _run_tool(command: list[object], build: Path, progress: Progress | None = None) -> None:
    """Run a tool of this environment with its output in a file; show the end of it if the tool fails."""
    program = Path(sys.executable).with_name(str(command[0]))
    path = [str(build), str(program.parent), os.environ["PATH"]]  # the rule of meson calls cython by its bare name
    variables = {**os.environ, "PATH": os.pathsep.join(path), "ZERO_AR_DATE": "1"}
    for name in ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS", "PYTHONPATH", "NINJA", "PKG_CONFIG"):
        variables.pop(name, None)
    arguments = [str(each) for each in command[1:]]
    output = build / "log.txt"
    with open(output, "a") as log:
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen([program, *arguments], env=variables, **pipe) as process:  # type: ignore[call-overload]
            for line in process.stdout:
                log.write(line)
                step = re.match(r"\[(\d+)/(\d+)\]", line)
                if step and progress:
                    progress(int(step[1]), int(step[2]))
    if process.returncode:
        print(output.read_text()[-4000:], file=sys.stderr)
        raise subprocess.CalledProcessError(process.returncode, str(command[0]))
