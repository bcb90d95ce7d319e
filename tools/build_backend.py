"""Build backend: meson-python, with a warm Cython, and a lock around the rebuild of an editable install.

An editable install runs ninja at the first import, so that stale code never runs. The ranks of a job import at the same
moment, and two ninjas in one build directory corrupt each other's work. meson-python does not lock, but remembers the
ninja that it was installed with. So the backend passes a script that first locks the build directory.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mesonpy
from cython_client import make_command
from cython_server import serve_cython
from mesonpy import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

# flock locks the build directory itself (ninja's working directory), so no lock file is left behind. With -o, a
# compiler cache's server started by the build does not inherit the lock. NINJA is set for child processes: when meson
# regenerates the build files, it must not run this script and wait for its own lock. PATH is set because build.ninja
# calls cython by its bare name, and the environment need not be activated.
_SCRIPT = """\
#!/bin/sh
export PATH={path}:"$PATH" NINJA=ninja
command -v ninja >/dev/null && command -v cython >/dev/null || {{
    echo "FAILED: rebuild" # meson-python shows what follows such a line
    echo "ninja or cython is gone: with build isolation they were there for the installation alone. Run"
    echo "    pip install meson-python Cython ninja && pip install --no-build-isolation -e ."
    exit 127
}}
exec flock -o . ninja "$@"
"""


def _locked_ninja() -> Path:
    tools = {name: shutil.which(name) for name in ("ninja", "cython", "flock")}
    missing = [name for name, path in tools.items() if path is None]
    if missing:
        raise SystemExit(f"an editable install needs {', '.join(missing)} (flock is part of util-linux)")
    directories = dict.fromkeys(os.path.dirname(os.path.abspath(str(tools[name]))) for name in ("ninja", "cython"))
    script = Path("build", f"ninja-locked-{sys.implementation.cache_tag}").absolute()
    script.parent.mkdir(exist_ok=True)
    script.write_text(_SCRIPT.format(path=shlex.quote(os.pathsep.join(directories))), encoding="utf-8")
    script.chmod(0o755)
    return script


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel (PEP 517 hook)."""
    return _build_warm(mesonpy.build_wheel, wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build an editable wheel (PEP 660 hook)."""
    os.environ["NINJA"] = str(_locked_ninja())
    return _build_warm(mesonpy.build_editable, wheel_directory, config_settings, metadata_directory)


def _build_warm(build: Callable[..., str], *arguments: Any) -> str:
    os.environ.setdefault("CYTHON", shlex.join(make_command()))
    with serve_cython():
        return build(*arguments)
