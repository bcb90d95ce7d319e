"""Archive of the sources: built twice from clones of the commit, and compared with what git has."""

from __future__ import annotations

import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

from .archive import read_metadata
from .commands import CommandError, ask_git, run_tool
from .finding import CheckState, Finding
from .targets import Target

SUBJECT = "sdist"
_METADATA = "metadata"
_MADE = "PKG-INFO"  # the metadata, the one file that is not in git


class BadSdistError(Exception):
    """The archive of the sources is not what it should be; the text says why."""


def check_sdist(root: Path, work: Path, out: Path, commit: str, epoch: int) -> Iterator[Finding]:
    """Build the archive of a commit into `out`, and yield whether it has exactly the commit's files.

    `epoch` is the time of the commit: seconds since 1970.
    """
    try:
        archive = _build_archive(root, work / "one", commit, epoch)
        again = _build_archive(root, work / "in another directory", commit, epoch)
        if archive.read_bytes() != again.read_bytes():
            raise BadSdistError(f"two builds of {archive.name} differ; compare {archive} with {again}")
        count = compare_files(archive, read_commit(root, commit))
    except (BadSdistError, CommandError) as error:
        yield Finding(SUBJECT, CheckState.FAILED, str(error))
        return
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("enginerun-*.tar.gz"):
        old.unlink()
    shutil.copy2(archive, out / archive.name)
    size = archive.stat().st_size / 1e6
    text = f"{archive.name}, {size:.1f} MB: {count} files, each as git has it; two builds have equal bytes"
    yield Finding(SUBJECT, CheckState.PASSED, text)


def compare_files(archive: Path, committed: dict[str, bytes]) -> int:
    """Return the number of files in an archive of sources; raise `BadSdistError` if they are not the committed ones."""
    with tarfile.open(archive) as files:
        members = [each for each in files.getmembers() if not each.isdir()]
        tops = {each.name.partition("/")[0] for each in members}
        if tops != {archive.name.removesuffix(".tar.gz")}:
            raise BadSdistError(f"{archive.name} has the directories {sorted(tops)}")
        found = {}
        for each in members:
            data = files.extractfile(each)
            if data is None:
                raise BadSdistError(f"{archive.name}: {each.name} is no file")
            found[each.name.partition("/")[2]] = data.read()
    metadata = found.pop(_MADE, None)
    if metadata is None:
        raise BadSdistError(f"{archive.name} has no {_MADE}")
    missing, odd = sorted(committed.keys() - found.keys()), sorted(found.keys() - committed.keys())
    if missing or odd:
        raise BadSdistError(f"{archive.name} lacks {missing[:5]} of the commit, and has {odd[:5]}, which git has not")
    for name, data_ in found.items():
        if data_ != committed[name]:
            raise BadSdistError(f"{archive.name}: {name} differs from the committed one")
    return len(found)


def compare_wheels(root: Path, commit: str, out: Path, targets: Sequence[Target]) -> Iterator[Finding]:
    """Yield whether the wheels in `out` describe themselves as the archive of the same commit there does.

    An archive of another revision, or none, is no failure: nothing was compared.
    """
    version = read_metadata(root).version
    archive = out / f"enginerun-{version}.tar.gz"
    try:
        compare_files(archive, read_commit(root, commit))
    except (BadSdistError, OSError) as error:
        text = f"no archive of this commit is in {out}, so no wheel was compared with it; add the step sdist: {error}"
        yield Finding(_METADATA, CheckState.UNTRIED, text)
        return
    wheels = [path for target in targets for path in out.glob(f"enginerun-{version}-{target.tag}.whl")]
    for wheel in wheels:
        try:
            compare_metadata(archive, wheel)
        except BadSdistError as error:
            yield Finding(f"{_METADATA} of {wheel.name}", CheckState.FAILED, str(error))
            return
    yield Finding(_METADATA, CheckState.PASSED, f"{len(wheels)} wheels describe themselves as {archive.name} does")


def compare_metadata(archive: Path, wheel: Path) -> None:
    """Raise `BadSdistError` if an archive of sources and a wheel describe themselves differently."""
    with tarfile.open(archive) as files:
        data = files.extractfile(f"{archive.name.removesuffix('.tar.gz')}/{_MADE}")
        text = data.read() if data else b""
    with zipfile.ZipFile(wheel) as packed:
        [name] = [each for each in packed.namelist() if each.endswith(".dist-info/METADATA")]
        if packed.read(name) != text:
            raise BadSdistError(f"{_MADE} of {archive.name} and METADATA of {wheel.name} differ")


def _build_archive(root: Path, work: Path, commit: str, epoch: int) -> Path:
    """Build the archive from a clone of its own; raise `CommandError` if a tool fails."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    clone = work / "clone"
    run_tool(["git", "clone", "--quiet", "--shared", "--no-checkout", root, clone], work)
    run_tool(["git", "-c", "advice.detachedHead=false", "checkout", "--quiet", commit], clone)
    command: list[str | Path] = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir"]
    command += [work / "dist", clone]
    run_tool(command, work, SOURCE_DATE_EPOCH=str(epoch))
    [archive] = (work / "dist").iterdir()
    version = read_metadata(clone).version
    if archive.name != f"enginerun-{version}.tar.gz":
        raise BadSdistError(f"the archive of version {version} is called {archive.name}")
    return archive


def read_commit(root: Path, commit: str) -> dict[str, bytes]:
    """Return the files of a commit by their paths; raise `CommandError` if git fails."""
    with tarfile.open(fileobj=BytesIO(ask_git(root, "archive", "--format=tar", commit))) as files:
        members = [(each.name, files.extractfile(each)) for each in files.getmembers() if not each.isdir()]
        return {name: data.read() for name, data in members if data is not None}
