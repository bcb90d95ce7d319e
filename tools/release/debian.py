"""Packages of Debian as files, of any release and machine: downloaded and verified by apt, unpacked, never installed.

apt keeps all of its state below one directory. The mirror is the one that this machine's apt has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PYTHON_RELEASES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky", "3.15": "forky"}
"""Release of Debian that has a Python; no release has 3.12."""
OLD_LISTS = "WHEELS_OLD_LISTS"
_CONFIGURATION = """\
Dir "{home}/";
Dir::State "state";
Dir::State::status "{home}/status";
Dir::Cache "cache";
Dir::Etc "etc";
Dir::Etc::Trusted "/etc/apt/trusted.gpg";
Dir::Etc::TrustedParts "/etc/apt/trusted.gpg.d";
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::Check-Valid-Until "{dated}";
Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";
"""


class NoDebianError(Exception):
    """Packages of Debian cannot be had here; the text says why."""


class PackageSource:
    """Packages of one release of Debian for one machine.

    `home` holds the lists and the packages of all releases, and is kept between runs. `release` is a code name such as
    "trixie", and `machine` a processor as `uname -m` prints it.

    apt refuses lists of an unfinished release that are older than a week, as those of a mirror that is a snapshot are.
    `WHEELS_OLD_LISTS=1` in the environment accepts them. Signatures are verified all the same.
    """

    def __init__(self, home: Path, release: str, machine: str) -> None:
        self._home = home.absolute() / f"{release}-{machine}"
        self._release = release
        self._architecture = ARCHITECTURES[machine]

    def fetch_packages(self, packages: Sequence[str], dependencies: bool = False) -> list[Path]:
        """Download packages, with what they depend on if asked for, and return their files.

        Raises `NoDebianError` if apt is missing, or refuses.
        """
        self._prepare()
        if not dependencies:
            folder = self._home / "packages"
            folder.mkdir(exist_ok=True)
            self._run_apt("download", *packages, folder=folder)
            return [max(folder.glob(f"{each}_*.deb"), key=os.path.getmtime) for each in packages]
        # apt prints what it would download, so it is asked as if nothing had been.
        empty = self._home / "cache/empty"
        (empty / "partial").mkdir(parents=True, exist_ok=True)
        uris = self._run_apt(
            "install", "-o", f"Dir::Cache::archives={empty}", "--print-uris", "-qq", "--yes", *packages
        ).splitlines()
        self._run_apt("install", "--download-only", "-qq", "--yes", *packages)
        return [self._home / "cache/archives" / line.split()[1] for line in uris if line.startswith("'")]

    def _prepare(self) -> None:
        """Write apt's files, and load the lists once."""
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise NoDebianError("apt-get and dpkg-deb are needed")
        if (self._home / "ready").exists():
            return
        for folder in ("state/lists/partial", "cache/archives/partial", "etc/apt.conf.d", "etc/preferences.d"):
            (self._home / folder).mkdir(parents=True, exist_ok=True)
        (self._home / "status").touch()
        dated = "false" if os.environ.get(OLD_LISTS) == "1" else "true"
        settings = _CONFIGURATION.format(home=self._home, architecture=self._architecture, dated=dated)
        (self._home / "apt.conf").write_text(settings)
        mirror = _find_mirror()
        line = f"[signed-by={KEYRING}] {mirror} {self._release} main\n"
        (self._home / "etc/sources.list").write_text(f"deb {line}")
        self._run_apt("update", "-qq")
        (self._home / "ready").touch()

    def _run_apt(self, *arguments: str, folder: Path | None = None) -> str:
        done = subprocess.run(
            ["apt-get", *arguments],
            cwd=folder or self._home,
            env={**os.environ, "APT_CONFIG": str(self._home / "apt.conf"), "DEBIAN_FRONTEND": "noninteractive"},
            text=True,
            capture_output=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            hint = f" ({OLD_LISTS}=1 accepts them)" if "is expired" in done.stderr else ""
            what = f"apt-get {' '.join(arguments)} for {self._release}, {self._architecture}"
            raise NoDebianError(f"{what}: {done.stderr.strip()[-1000:]}{hint}")
        return done.stdout


def unpack_package(package: Path, root: Path) -> None:
    """Unpack the files of a package into a directory that may have symbolic links for directories."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as files:
        command = ["tar", "--extract", "--keep-directory-symlink", "--directory", str(root)]
        subprocess.run(command, stdin=files.stdout, check=True, timeout=300)
    if files.returncode:
        raise NoDebianError(f"{package} cannot be unpacked")


def _find_mirror() -> str:
    """Return the address from which this machine's apt takes the main part of its own release."""
    wanted = ["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages", "Component: main"]
    lines = subprocess.run(wanted, text=True, capture_output=True, timeout=60, check=False).stdout.splitlines()
    for line in lines:
        site, _, release = line.partition(" ")
        if release.isalpha() and "security" not in site:
            return site.rstrip("/")
    raise NoDebianError("this machine's apt names no mirror of Debian (apt-get indextargets)")
