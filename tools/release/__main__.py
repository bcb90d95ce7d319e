"""Build the wheels of a release from the last commit, check them, and list their hashes.

    python -m tools.release [--out dist] [--twice] [cp311-x86_64 aarch64 cp314t ...]

Needs git, and Debian's apt or the Pythons themselves for headers. No compiler: Zig's comes from PyPI.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

from .archive import pack_wheel, read_metadata
from .commands import CommandError, ask_git
from .compilation import compile_target
from .finding import CheckState, Finding
from .headers import NoHeadersError, find_headers
from .inspection import BadWheelError, inspect_wheel
from .materials import describe_materials
from .targets import Target, add_names, select_targets

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "wheels"


@dataclass(frozen=True)
class Revision:
    """Sources of a commit."""

    commit: str  # full name
    epoch: int  # time of the commit: seconds since 1970

    def unpack_files(self, folder: Path) -> Path:
        """Write the files of the commit into a directory that is made anew."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tarfile.open(fileobj=BytesIO(ask_git(ROOT, "archive", "--format=tar", self.commit))) as files:
            files.extractall(folder)  # our own, from git
        return folder


def read_revision() -> Revision:
    """Return the commit that is checked out."""
    commit, epoch = ask_git(ROOT, "log", "-1", "--format=%H %ct").decode().split()
    changed = ask_git(ROOT, "status", "--porcelain", "--untracked-files=no").decode().splitlines()
    if changed:
        print(f"{len(changed)} changed files are not committed; the wheels are of commit {commit[:12]}", flush=True)
    return Revision(commit, int(os.environ.get("SOURCE_DATE_EPOCH", epoch)))


class Builder:
    """Builder of wheels; wheels and lists go to `out`, and `jobs` compilers run at the same time."""

    def __init__(self, revision: Revision, out: Path, jobs: int) -> None:
        self._revision = revision
        self._out = out
        self._jobs = jobs

    def build_wheel(self, target: Target) -> Path:
        """Build, check and describe one wheel.

        Raises `NoHeadersError` if the headers of the target's Python cannot be had, and `BadWheelError` if the wheel is
        not what it should be.
        """
        wheel = self._make_wheel(target, WORK, self._out)
        metadata = read_metadata(WORK / "source")
        materials = describe_materials(
            wheel, metadata, find_headers(target, WORK), self._revision.commit, self._revision.epoch
        )
        wheel.with_name(wheel.name + ".cdx.json").write_text(materials)
        print(f"{target.name}: {wheel.name}, {inspect_wheel(wheel, target, [str(ROOT), str(Path.home())])}", flush=True)
        return wheel

    def compare_builds(self, target: Target, wheel: Path) -> None:
        """Build a wheel again in another directory; raise `BadWheelError` if the bytes differ."""
        again = self._make_wheel(target, WORK / "again" / "in another directory", WORK / "again" / "dist")
        if again.read_bytes() != wheel.read_bytes():
            raise BadWheelError(f"{wheel.name}: two builds differ; compare it with {again}")
        print(f"{target.name}: a second build has equal bytes", flush=True)

    def _make_wheel(self, target: Target, work: Path, out: Path) -> Path:
        headers = find_headers(target, WORK)
        print(f"{target.name}: compiles with headers of Python {headers.version} ({headers.origin})", flush=True)
        source = self._revision.unpack_files(work / "source")
        native = ask_git(ROOT, "rev-parse", f"{self._revision.commit}:engine_ext").decode().strip()
        cache = work / f"cython-{version('Cython')}" / native
        begun = time.monotonic()
        site = compile_target(
            target, headers, source, work / target.name, cache, self._jobs, BuildProgress(target.name)
        )
        wheel = pack_wheel(site, source, target, out, self._revision.epoch)
        print(f"{target.name}: compiled in {time.monotonic() - begun:.0f} s", flush=True)
        return wheel


class BuildProgress:
    """Progress of a build on the terminal, or a line for each quarter in a file."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._quarter = 0

    def __call__(self, done: int, total: int) -> None:
        if sys.stdout.isatty():
            print(f"\r{self._name}: step {done} of {total}", end="" if done < total else "\n", flush=True)
        elif 4 * done // total > self._quarter:
            self._quarter = 4 * done // total
            print(f"{self._name}: step {done} of {total}", flush=True)


def write_sums(folder: Path) -> None:
    """Write the digests of all wheels, lists and archives of a directory, as `sha256sum --check` reads them."""
    files = sorted(path for kind in ("*.whl", "*.cdx.json", "*.tar.gz") for path in folder.glob(kind))
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "SHA256SUMS").write_text("".join(lines))


def remove_wheel(target: Target, folder: Path) -> None:
    """Move the wheel of a target, if there is one, out of the directory of those that are fit."""
    rejected = WORK / "rejected"
    rejected.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob(f"*-{target.tag}.whl"), *folder.glob(f"*-{target.tag}.whl.cdx.json")]:
        shutil.move(path, rejected / path.name)


def build_wheels(builder: Builder, targets: Sequence[Target], out: Path, twice: bool) -> Iterator[Finding]:
    """Build wheels into `out`, which a wheel that is wrong leaves again, and yield a finding for each.

    With `twice` each wheel is built twice, and the two are compared.
    """
    for target in targets:
        subject = f"wheel {target.name}"
        try:
            wheel = builder.build_wheel(target)
            write_sums(out)
            if twice:
                builder.compare_builds(target, wheel)
        except (NoHeadersError, BadWheelError, CommandError, subprocess.SubprocessError) as error:
            remove_wheel(target, out)  # an earlier one of this target, or one that is not fit
            yield Finding(subject, CheckState.FAILED, str(error))
        else:
            again = ", built twice with equal bytes" if twice else ""
            yield Finding(subject, CheckState.PASSED, f"{wheel.name}{again}")
        write_sums(out)


def main() -> int:
    """Build the wheels; return 1 if one is missing or wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory for the wheels (default: dist)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers that run at the same time")
    parser.add_argument("--twice", action="store_true", help="build each wheel twice, and compare")
    add_names(parser)
    options = parser.parse_args()
    try:
        targets = select_targets(options.names)
    except ValueError as error:
        parser.error(str(error))
    try:
        builder = Builder(read_revision(), options.out, options.jobs)
    except CommandError as error:
        raise SystemExit(f"wheels are built from a commit, and git cannot tell which: {error}") from error
    failed = []
    for finding in build_wheels(builder, targets, options.out, options.twice):
        print(finding, flush=True)
        if finding.state is CheckState.FAILED:
            failed.append(finding.subject.removeprefix("wheel "))
    missing = f"; missing: {', '.join(failed)}" if failed else ""
    print(f"{len(targets) - len(failed)} of {len(targets)} wheels in {options.out}{missing}")
    if failed:
        print(f"when the cause is mended: make wheels WHEELS='{' '.join(failed)}'")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
