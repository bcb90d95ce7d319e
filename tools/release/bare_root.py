"""A bare Debian in a directory: a Python without compiler and headers, of any machine that this one can emulate.

Packages are unpacked, and no script of theirs runs. Programs run in namespaces of their own: as their root, with their
own /proc and process numbers. For another machine, QEMU is registered for its programs in these namespaces alone.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .debian import PYTHON_RELEASES, PackageSource, unpack_package
from .pythons import find_private_python
from .targets import Target

# What Debian calls "essential" and a Python may need; no package of these has a compiler or a header.
_PACKAGES = ["bash", "coreutils", "dash", "libc-bin", "libstdc++6"]
_FOR_PRIVATE_PYTHON = [
    "libbz2-1.0", "libffi8", "liblzma5", "libncursesw6", "libreadline8", "libsqlite3-0", "libssl3", "libuuid1",
    "zlib1g",
]  # fmt: skip
# QEMU of Debian's qemu-user, which is one static program. Debian 12's lacks prctl(PR_SET_CHILD_SUBREAPER).
_EMULATORS = {"aarch64": "qemu-aarch64"}
_EMULATOR_RELEASE = "trixie"
# Names of the kernel: the first bytes of an ELF file of the machine, and which of them count.
_MAGIC = {
    "aarch64": (
        r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00",
        r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff",
    )
}
_SCRIPT = """\
set -e
mount --rbind /dev {root}/dev
mount -t proc proc {root}/proc
mount -t tmpfs tmpfs {root}/tmp
{emulator}
{binds}
exec chroot {root} /usr/bin/env -i PATH=/env/bin:/usr/bin HOME=/tmp LC_ALL=C.UTF-8 {variables} "$@"
"""


class LeftOutError(Exception):
    """A trial cannot run on this machine; the text says why."""


def fetch_emulator(machine: str, work: Path) -> Path:
    """Return the path of the emulator of a machine, which is unpacked in `work` and not installed.

    Raises `LeftOutError` if there is none for the machine, and `NoDebianError` if the package cannot be had.
    """
    if machine not in _EMULATORS:
        raise LeftOutError(f"there is no emulator of {machine}")
    home = work.absolute() / "emulators" / _EMULATOR_RELEASE
    program = home / "usr/bin" / _EMULATORS[machine]
    if not program.exists():
        home.mkdir(parents=True, exist_ok=True)
        source = PackageSource(work / "debian", _EMULATOR_RELEASE, platform.machine())
        for package in source.fetch_packages(["qemu-user"]):
            unpack_package(package, home)
    return program


class BareRoot:
    """A bare Debian with the Python and the machine of a wheel; what is fetched and unpacked is in `work`.

    Raises `LeftOutError` if there is no such Python, or no emulator, and `NoDebianError` if packages cannot be had.
    """

    def __init__(self, target: Target, work: Path) -> None:
        self._target = target
        self._root = (work / "roots" / target.name).absolute()
        self._emulator = None if target.machine == platform.machine() else fetch_emulator(target.machine, work)
        self._private: Path | None = None
        release, packages = PYTHON_RELEASES.get(target.version, "bookworm"), [f"python{target.version}-venv"]
        if target.free_threaded or target.version not in PYTHON_RELEASES:
            self._private = None if target.machine != platform.machine() else find_private_python(target)
            if self._private is None:
                raise LeftOutError(f"Python {target.python} for {target.machine} is neither in Debian nor here")
            release, packages = "bookworm", _FOR_PRIVATE_PYTHON
        self._unpack_packages(
            PackageSource(work / "debian", release, target.machine).fetch_packages([*_PACKAGES, *packages], True)
        )

    @property
    def python(self) -> str:
        """Path of the interpreter in the root."""
        return str(self._private) if self._private else f"/usr/bin/python{self._target.version}"

    def _unpack_packages(self, packages: Sequence[Path]) -> None:
        if (self._root / "ready").exists():
            return
        shutil.rmtree(self._root, ignore_errors=True)
        for name in ("bin", "lib", "lib64", "sbin"):
            (self._root / "usr" / name).mkdir(parents=True)
            (self._root / name).symlink_to(f"usr/{name}")
        for package in packages:
            unpack_package(package, self._root)
        for name in ("dev", "env", "proc", "tmp"):
            (self._root / name).mkdir(exist_ok=True)
        (self._root / "etc/passwd").write_text("root:x:0:0:root:/tmp:/bin/sh\n")
        (self._root / "etc/hosts").write_text("127.0.0.1 localhost\n")
        # The script of ca-certificates would make this file, and Debian's pip does not start without it.
        certificates = sorted((self._root / "usr/share/ca-certificates").rglob("*.crt"))
        (self._root / "etc/ssl/certs").mkdir(parents=True, exist_ok=True)
        text = "".join(path.read_text() for path in certificates)
        (self._root / "etc/ssl/certs/ca-certificates.crt").write_text(text)
        (self._root / "ready").touch()

    def run(
        self, command: Sequence[str], binds: Mapping[Path, str], timeout: float, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the root, for at most `timeout` seconds, with `variables` as its environment.

        `binds` maps directories of this machine to their places in the root.
        """
        mounts = [f"mount --bind {shlex.quote(str(each))} {self._make_place(place)}" for each, place in binds.items()]
        if self._private is not None:
            prefix = self._private.parents[1]
            mounts.append(f"mount --bind {shlex.quote(str(prefix))} {self._make_place(str(prefix))}")
            mounts.append(f"mount -t tmpfs tmpfs {self._root}{prefix}/include")  # its headers
        emulator = ""
        if self._emulator is not None:
            magic, mask = _MAGIC[self._target.machine]
            entry = f":wheels:M::{magic}:{mask}:{self._emulator}:F"
            emulator = (
                "mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc\n"
                f"printf '%s' {shlex.quote(entry)} > /proc/sys/fs/binfmt_misc/register"
            )
        script = _SCRIPT.format(
            root=shlex.quote(str(self._root)), emulator=emulator, binds="\n".join(mounts),
            variables=" ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
        )  # fmt: skip
        unshare = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
        return subprocess.run(
            [*unshare, "bash", "-c", script, "bash", *command],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, check=False, cwd="/",
            env={"PATH": os.environ["PATH"]},
        )  # fmt: skip

    def _make_place(self, place: str) -> str:
        path = Path(f"{self._root}{place}")
        path.mkdir(parents=True, exist_ok=True)
        return shlex.quote(str(path))
