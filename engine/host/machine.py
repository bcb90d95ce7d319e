"""Facts about this host: affinity, topology, the cgroup's CPU quota, a free port."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NO_DIRECTORY = "the working directory of this process has been removed: change to one that exists (cd)"


@dataclass(frozen=True)
class Facts:
    """CPUs of this host that this process may use."""

    cpus: tuple[int, ...]  # affinity set of the launcher, with hardware threads of a core adjacent
    quota: float | None = None  # number of CPUs that the cgroup's quota allows; None without a quota

    @property
    def usable(self) -> int:
        """Number of CPUs that can be kept busy at once; at least 1."""
        count = len(self.cpus)
        return max(1, count if self.quota is None else min(count, int(self.quota)))


def collect_facts(root: Path = Path("/")) -> Facts:
    """Collect the facts about this host's CPUs; `root` is the directory of `proc` and `sys`, another one in tests."""
    return Facts(cpus=by_core(os.sched_getaffinity(0), root), quota=cpu_quota(root))


def by_core(cpus: set[int], root: Path = Path("/")) -> tuple[int, ...]:
    """Order logical CPUs by package and core, so that hardware threads of a core are adjacent.

    The order is numerical if the host reveals no topology. `root` is the directory of `sys`.
    """

    def make_sort_key(cpu: int) -> tuple[int, int, int]:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package, core = (_read(topology / name) for name in ("physical_package_id", "core_id"))
        try:
            return int(package or 0), int(core or cpu), cpu
        except ValueError:
            return 0, cpu, cpu

    return tuple(sorted(cpus, key=make_sort_key))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Read the tightest CPU quota of this process's cgroups, version 1 and 2, in seconds of CPU time per second.

    It is None without a quota. `root` is the directory of `proc` and of the cgroup file systems.
    """
    found = [
        quota
        for directory, version in _find_cgroups(root)
        if (quota := _quota_v2(directory) if version == 2 else _quota_v1(directory)) is not None
    ]
    return min(found, default=None)


def _quota_v2(directory: Path) -> float | None:
    fields = (_read(directory / "cpu.max") or "max").split()
    if len(fields) != 2 or not fields[0].isdecimal() or not fields[1].isdecimal() or int(fields[1]) == 0:
        return None
    return int(fields[0]) / int(fields[1])


def _quota_v1(directory: Path) -> float | None:
    quota, period = (_read(directory / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:  # -1: no quota
        return None
    return int(quota) / int(period)


def _find_cgroups(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the directories of this process's cgroups and their ancestors, each with its cgroup version."""
    own: dict[int, str] = {}
    for line in _read_lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            own[2] = path
        elif "cpu" in controllers.split(","):
            own[1] = path
    for line in _read_lines(root / "proc/self/mountinfo"):
        # The kernel escapes only blanks and line feeds in names. The source may be empty, which gives two blanks.
        mount, _, system = line.partition(" - ")
        places, [kind, *about] = mount.split(" "), system.split(" ")
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "cpu" in about[-1].split(",") else 0
        if version not in own or len(places) < 5:
            continue
        top = root / _decode_escapes(places[4]).lstrip("/")
        path = own[version]
        mounted = _decode_escapes(places[3]).rstrip("/")
        # In a container the mount shows a subtree, and the path is relative to the subtree's root.
        inner = path[len(mounted) :] if (path + "/").startswith(mounted + "/") else "/"
        here = top / inner.strip("/")
        while True:
            yield here, version
            if here == top or top not in here.parents:
                break
            here = here.parent


def _decode_escapes(field: str) -> str:
    """Decode mountinfo's octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _read(path: Path) -> str | None:
    """Read a small file; return None if it cannot be read.

    Its content is decoded like file names, which may have any bytes, so that paths built from it can be opened.
    """
    try:
        return os.fsdecode(path.read_bytes()).rstrip("\n")
    except OSError:
        return None


def _read_lines(path: Path) -> list[str]:
    """Read the lines of a file, split at line feeds only, because names in it may have other separators."""
    return (_read(path) or "").split("\n")


def free_port(address: str = "127.0.0.1") -> int:
    """Find a TCP port on which nothing listens now, on an address of this host; empty: on all addresses.

    The port is not reserved: rank 0 binds it if its program uses it at all. If this host lacks the address, because its
    loopback is down, the port is free on all other addresses. The text of an OSError says whether this host has no
    address or this process no descriptor left.
    """
    for family, host in ((socket.AF_INET, address), (socket.AF_INET, ""), (socket.AF_INET6, "")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((host, 0))
                return int(probe.getsockname()[1])
        except OSError as error:
            refused = error
    raise OSError(refused.errno, f"no TCP port can be had on this host ({refused.strerror}): set its loopback up")


def working_directory() -> Path:
    """Return the working directory of this process; if it was removed, the FileNotFoundError gives the remedy."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, NO_DIRECTORY) from None


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path, with `~` expanded; for a relative path, same errors as `working_directory`."""
    expanded = os.path.expanduser(path)
    return Path(os.path.normpath(expanded if os.path.isabs(expanded) else working_directory() / expanded))


def identify_host() -> str:
    """Return a text that is equal for processes that can share memory: boot id, network namespace and user.

    Names and addresses would not do: several processes of a machine have the same, but containers of one machine
    differ.
    """
    return f"{read_boot_id()} {os.stat('/proc/self/ns/net').st_ino} {os.geteuid()}"


def read_boot_id() -> str:
    """Return the boot id, equal for all processes and containers of a machine while it is up; empty if unreadable."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
