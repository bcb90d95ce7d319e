"""Agreement of all places that tell the version of a release: meson.build, CHANGELOG.md, the tag, copies of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from .archive import read_metadata
from .commands import ask_git
from .finding import CheckState, Finding

SUBJECT = "version"
# Files that repeat the version because their format leaves no other way, and how it stands there.
COPIES = {"examples/deploy/conda/recipe.yaml": r"^  version: (\S+)"}
_HEADING = re.compile(r"^## \[([^\]]+)\](.*)$", re.MULTILINE)
_NEXT = re.compile(r"^This becomes (\d[\w.]*\w)", re.MULTILINE)


def check_version(root: Path) -> Iterator[Finding]:
    """Yield what is wrong with the version of a checkout, or one finding that tells it.

    `meson.build` has the version. Of a development version the changelog's newest heading is "Unreleased", and its
    text names the version that it becomes. Of any other version the heading has that version and a date, and the
    commit has the tag `v` and the version.
    """
    version = read_metadata(root).version
    assert version is not None  # `read_metadata` takes it from meson.build
    compare = (_compare_changelog, _compare_copies, _compare_tags)
    wrong = [problem for each in compare for problem in each(root, version)] + _list_changed_files(root)
    yield from (Finding(SUBJECT, CheckState.FAILED, problem) for problem in wrong)
    if not wrong:
        yield Finding(SUBJECT, CheckState.PASSED, f"{version}, in meson.build, CHANGELOG.md and {', '.join(COPIES)}")
    if not version.is_devrelease and not _list_tags(root, "--points-at", "HEAD"):
        text = f"this commit has none yet; when all else passes: git tag -s v{version}"
        yield Finding("tag", CheckState.UNTRIED, text)


def _compare_changelog(root: Path, version: Version) -> Iterator[str]:
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = _HEADING.search(text)
    if found is None:
        yield f"meson.build says {version}, and CHANGELOG.md has no heading ## [{version}]"
        return
    name, rest = found[1], found[2]
    if version.is_devrelease:
        next_one = _NEXT.search(text)
        if name != "Unreleased":
            yield (
                f"meson.build says {version}, a development version, and the newest heading of CHANGELOG.md is "
                f"[{name}]: raise the version, or remove .dev from it"
            )
        elif next_one is None or next_one[1] != version.base_version:
            yield (
                f"meson.build says {version}, and CHANGELOG.md says below [Unreleased] that this becomes "
                f"{next_one[1] if next_one else 'nothing'}: write 'This becomes {version.base_version}'"
            )
    elif name != str(version):
        yield f"meson.build says {version}, and the newest heading of CHANGELOG.md is [{name}]: they have to agree"
    elif not re.fullmatch(r" - \d{4}-\d\d-\d\d", rest):
        yield f"the heading ## [{name}] of CHANGELOG.md has no date: ## [{name}] - 2026-01-31"


def _compare_copies(root: Path, version: Version) -> Iterator[str]:
    for name, pattern in COPIES.items():
        found = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if found is None or found[1] != str(version):
            yield f"meson.build says {version}, and {name} says {found[1] if found else 'nothing'}: they have to agree"


def _compare_tags(root: Path, version: Version) -> Iterator[str]:
    wanted = f"v{version}"
    here = _list_tags(root, "--points-at", "HEAD")
    if version.is_devrelease and here:
        yield f"meson.build says {version}, and this commit has the tag {here[0]}: remove .dev, or the tag"
    elif here and here != [wanted]:
        yield f"meson.build says {version}, and this commit has the tag {' '.join(here)}: they have to agree"
    elif not here and _list_tags(root, "--list", wanted):
        yield f"meson.build says {version}, and {wanted} is the tag of another commit: raise the version"


def _list_tags(root: Path, *options: str) -> list[str]:
    """Return the tags of versions that git lists."""
    return [each for each in ask_git(root, "tag", *options).decode().split() if re.fullmatch(r"v\d\S*", each)]


def _list_changed_files(root: Path) -> list[str]:
    changed = ask_git(root, "status", "--porcelain", "--untracked-files=no").decode().splitlines()
    first = ", ".join(each[3:] for each in changed[:3])
    return [f"{len(changed)} changed files are not committed, and a release is of a commit: {first}"] * bool(changed)
