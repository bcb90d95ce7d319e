"""Checks of `make release-check`, each shown what it has to refuse: versions, sdists, licences, and the table."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("pyproject_metadata", reason="needs the dev extra")

from tools.release import check, licences
from tools.release.agreement import COPIES, check_version
from tools.release.finding import Finding, Verdict, format_table
from tools.release.sdist import BadSdistError, compare_files

from .environments import ROOT, commit, run

FILES = ("pyproject.toml", "meson.build", "README.md", "LICENSE", "CHANGELOG.md", *COPIES)


needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")


def edit(tree: Path, name: str, pattern: str, text: str) -> None:
    path = tree / name
    before = path.read_text()
    after = re.sub(pattern, text, before, count=1, flags=re.MULTILINE)
    assert after != before
    path.write_text(after)


def set_version(tree: Path, version: str) -> None:
    edit(tree, "meson.build", r"^  version: '.*'", f"  version: '{version}'")
    for name in COPIES:
        edit(tree, name, r"^  version: \S+", f"  version: {version}")


def find_problems(tree: Path) -> list[str]:
    run(["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-qam", "change", "--allow-empty"], tree)
    return [outcome.text for outcome in check_version(tree) if outcome.state is Verdict.FAILED]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Checkout with the files that tell the version: that of a development version."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    set_version(tmp_path, "7.1.0.dev3")
    edit(tmp_path, "CHANGELOG.md", r"^## \[.*", "## [Unreleased]\n\nThis becomes 7.1.0, as they say.\n")
    commit(tmp_path)
    return tmp_path


@needs_git
def test_places_of_this_checkout_agree_on_the_version() -> None:
    """Changes that are not committed here are somebody's work, and no part of this test."""
    wrong = [each for each in check_version(ROOT) if each.state is Verdict.FAILED and "not committed" not in each.text]
    assert wrong == []


def test_a_development_version_agrees_with_what_the_changelog_says_of_the_next(checkout: Path) -> None:
    assert find_problems(checkout) == []
    edit(checkout, "CHANGELOG.md", r"This becomes 7\.1\.0", "This becomes 7.2.0")
    [problem] = find_problems(checkout)
    assert "meson.build says 7.1.0.dev3" in problem and "this becomes 7.2.0" in problem
    edit(checkout, "CHANGELOG.md", r"^## \[Unreleased\]", "## [7.1.0] - 2031-01-01")
    [problem] = find_problems(checkout)
    assert "meson.build says 7.1.0.dev3" in problem and "CHANGELOG.md is [7.1.0]" in problem


def test_a_release_has_its_version_in_the_changelog_with_a_date(checkout: Path) -> None:
    set_version(checkout, "7.1.0")
    [problem] = find_problems(checkout)
    assert "meson.build says 7.1.0" in problem and "CHANGELOG.md is [Unreleased]" in problem
    edit(checkout, "CHANGELOG.md", r"^## \[Unreleased\]", "## [7.1.0]")
    [problem] = find_problems(checkout)
    assert "## [7.1.0] of CHANGELOG.md has no date" in problem
    edit(checkout, "CHANGELOG.md", r"^## \[7.1.0\]", "## [7.1.0] - 2031-01-01")
    assert find_problems(checkout) == []
    [tag] = [outcome for outcome in check_version(checkout) if outcome.subject == "tag"]
    assert tag.state is Verdict.UNTRIED and "git tag -s v7.1.0" in tag.text


def test_the_tag_of_a_release_is_its_version_and_belongs_to_its_commit(checkout: Path) -> None:
    set_version(checkout, "7.1.0")
    edit(checkout, "CHANGELOG.md", r"^## \[Unreleased\]", "## [7.1.0] - 2031-01-01")
    assert find_problems(checkout) == []
    run(["git", "tag", "v7.1.1"], checkout)
    [problem] = [outcome.text for outcome in check_version(checkout) if outcome.state is Verdict.FAILED]
    assert "meson.build says 7.1.0" in problem and "the tag v7.1.1" in problem
    run(["git", "tag", "-d", "v7.1.1"], checkout)
    run(["git", "tag", "v7.1.0"], checkout)
    assert [outcome.state for outcome in check_version(checkout)] == [Verdict.PASSED]
    [problem] = find_problems(checkout)  # of a later commit
    assert "v7.1.0 is the tag of another commit" in problem


def test_copies_of_the_version_and_changed_files_are_told(checkout: Path) -> None:
    [name] = COPIES
    edit(checkout, name, r"^  version: \S+", "  version: 7.0.9")
    [problem] = find_problems(checkout)
    assert "meson.build says 7.1.0.dev3" in problem and f"{name} says 7.0.9" in problem
    set_version(checkout, "7.1.0.dev4")
    [problem] = [outcome.text for outcome in check_version(checkout) if outcome.state is Verdict.FAILED]
    assert "2 changed files are not committed" in problem


def write_sdist(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "enginerun-7.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"enginerun-7.1.0/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"PKG-INFO": b"", "a.py": b"1"}, r"lacks \['b.py'\]"),
        ({"PKG-INFO": b"", "a.py": b"1", "b.py": b"2", "c.py": b""}, r"has \['c.py'\], which git has not"),
        ({"PKG-INFO": b"", "a.py": b"1", "b.py": b"3"}, r"b\.py differs"),
        ({"a.py": b"1", "b.py": b"2"}, "no PKG-INFO"),
    ],
)
def test_an_archive_of_sources_has_what_git_has_and_nothing_else(
    tmp_path: Path, files: dict[str, bytes], complaint: str
) -> None:
    committed = {"a.py": b"1", "b.py": b"2"}
    assert compare_files(write_sdist(tmp_path, {"PKG-INFO": b"", **committed}), committed) == 2
    with pytest.raises(BadSdistError, match=complaint):
        compare_files(write_sdist(tmp_path, files), committed)


def install_package(site: Path, name: str, fields: str, requires: tuple[str, ...] = ()) -> metadata.Distribution:
    folder = site / f"{name}-1.dist-info"
    folder.mkdir(parents=True)
    needed = "".join(f"Requires-Dist: {each}\n" for each in requires)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1\n{needed}{fields}")
    return metadata.Distribution.at(folder)


@pytest.mark.parametrize(
    ("fields", "licence", "allowed"),
    [
        ("License-Expression: MIT AND (Apache-2.0 OR GPL-3.0-only)\n", "MIT AND (Apache-2.0 OR GPL-3.0-only)", True),
        ("License-Expression: MIT AND GPL-3.0-only\n", "MIT AND GPL-3.0-only", False),
        ("License-Expression: MIT OR (Apache-2.0\n", "MIT OR (Apache-2.0", False),
        ("Classifier: License :: OSI Approved :: BSD License\nLicense: whatever\n", "BSD-3-Clause", True),
        ("Classifier: License :: OSI Approved :: GNU Lesser General Public License v3 (LGPLv3)\n", "LGPL-3.0", False),
        ("Classifier: License :: OSI Approved :: MIT License\nClassifier: License :: OSI Approved :: GNU General "
         "Public License v3 (GPLv3)\n", "GPL-3.0 AND MIT", False),
        ("License: Apache License, Version 2.0\n", "Apache-2.0", True),
        ("License: AGPLv3\n", "AGPL-3.0", False),
        ("License: as we please\n", "", False),
        ("", "", False),
    ],
)  # fmt: skip
def test_a_licence_is_told_by_metadata_and_allowed_if_it_is_permissive(
    tmp_path: Path, fields: str, licence: str, allowed: bool
) -> None:
    found = licences.read_licence(install_package(tmp_path, "thing", fields))
    assert (found, licences.is_allowed(found)) == (licence, allowed)


def test_an_exemption_ends_when_the_licence_changes() -> None:
    assert licences.is_accepted("certifi", "MPL-2.0") and not licences.is_accepted("certifi", "GPL-3.0")
    assert not licences.is_accepted("requests", "MPL-2.0")


def test_a_package_deep_below_with_a_licence_that_is_not_allowed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_package(tmp_path, "enginerun", "Provides-Extra: ray\n", ("sound", "actors[more]; extra == 'ray'"))
    install_package(tmp_path, "sound", "License: MIT\n")
    extra = "Provides-Extra: more\nLicense: MIT\n"
    install_package(tmp_path, "actors", extra, ("deep; extra == 'more'", "other; extra == 'less'", "absent"))
    install_package(tmp_path, "deep", "License-Expression: GPL-2.0-only\n", ("sound",))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    closure = licences.find_dependencies("enginerun", ["ray"])
    assert sorted(closure.packages) == ["actors", "deep", "sound"] and closure.missing == {"absent": "actors"}
    found = {outcome.subject: outcome for outcome in licences.check_licences(ROOT)}
    assert found["licence of deep"].state is Verdict.FAILED
    assert "deep has the licence GPL-2.0-only" in found["licence of deep"].text
    assert found["licence of absent"].state is Verdict.UNTRIED and "licences" not in found


def test_the_table_names_each_check_and_counts_them() -> None:
    table = format_table([
        Finding("version", Verdict.PASSED, "1.0"),
        Finding("trial of cp314t", Verdict.UNTRIED, "no such Python\nhere"),
        Finding("sdist", Verdict.FAILED, "x" * 200),
    ])  # fmt: skip
    lines = table.splitlines()
    assert lines[0].split() == ["version", "passed", "1.0"]
    assert lines[1].split("  ")[-1] == "no such Python"
    assert len(lines[2]) < 160 and lines[-1] == "1 passed, 1 FAILED, 1 not tried"


@needs_git
def test_steps_are_chosen_by_name_and_a_failure_is_the_exit_status(monkeypatch, capsys) -> None:
    steps = {name: (lambda release, s=state: iter([Finding(s.value, s, "so")])) for name, state in
             {"good": Verdict.PASSED, "bad": Verdict.FAILED, "later": Verdict.UNTRIED}.items()}  # fmt: skip
    monkeypatch.setattr(check, "STEPS", steps)
    for chosen, status in (("good,later", 0), ("good,bad", 1)):
        monkeypatch.setattr(sys, "argv", ["check", "--steps", chosen])
        assert check.main() == status
    assert re.search(r"^later +not tried +left out by --steps$", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setattr(sys, "argv", ["check", "--steps", "god"])
    with pytest.raises(SystemExit):
        check.main()
    assert "there is no step 'god'; there are: good, bad, later" in capsys.readouterr().err


def test_make_runs_the_check_as_one_command() -> None:
    planned = subprocess.run(
        ["make", "-n", "release-check", "WHEELS=cp311-x86_64", "STEPS=version,sdist"], cwd=ROOT, text=True,
        capture_output=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert "-m tools.release.check --steps version,sdist cp311-x86_64" in planned
