"""Checks of `make release-check`, each shown what it has to refuse: versions, sdists, licences, and the table."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("pyproject_metadata", reason="needs the dev extra")

from tools.release import check, licences, sdist
from tools.release.agreement import COPIES, check_version
from tools.release.commands import CommandError, ask_git, run_tool
from tools.release.finding import CheckState, Finding, format_table
from tools.release.sdist import BadSdistError, compare_files
from tools.release.targets import TARGETS

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
    return [finding.text for finding in check_version(tree) if finding.state is CheckState.FAILED]


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
    failed = [finding.text for finding in check_version(ROOT) if finding.state is CheckState.FAILED]
    assert [text for text in failed if "not committed" not in text] == []


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
    [tag] = [finding for finding in check_version(checkout) if finding.subject == "tag"]
    assert tag.state is CheckState.UNTRIED and "git tag -s v7.1.0" in tag.text


def test_the_tag_of_a_release_is_its_version_and_belongs_to_its_commit(checkout: Path) -> None:
    set_version(checkout, "7.1.0")
    edit(checkout, "CHANGELOG.md", r"^## \[Unreleased\]", "## [7.1.0] - 2031-01-01")
    assert find_problems(checkout) == []
    run(["git", "tag", "v7.1.1"], checkout)
    [problem] = [finding.text for finding in check_version(checkout) if finding.state is CheckState.FAILED]
    assert "meson.build says 7.1.0" in problem and "the tag v7.1.1" in problem
    run(["git", "tag", "-d", "v7.1.1"], checkout)
    run(["git", "tag", "v7.1.0"], checkout)
    assert [finding.state for finding in check_version(checkout)] == [CheckState.PASSED]
    [problem] = find_problems(checkout)  # of a later commit
    assert "v7.1.0 is the tag of another commit" in problem


def test_copies_of_the_version_and_changed_files_are_told(checkout: Path) -> None:
    [name] = COPIES
    edit(checkout, name, r"^  version: \S+", "  version: 7.0.9")
    [problem] = find_problems(checkout)
    assert "meson.build says 7.1.0.dev3" in problem and f"{name} says 7.0.9" in problem
    set_version(checkout, "7.1.0.dev4")
    [problem] = [finding.text for finding in check_version(checkout) if finding.state is CheckState.FAILED]
    assert "2 changed files are not committed" in problem


def write_sdist(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
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


def test_a_new_archive_replaces_older_ones_of_this_project_alone(tmp_path: Path, monkeypatch) -> None:
    names = ("enginerun-7.0.9.tar.gz", "data.tar.gz", "enginerun_data.tar.gz")
    for name in names:
        (tmp_path / name).touch()
    built = write_sdist(tmp_path / "built", {"PKG-INFO": b"", "a.py": b"1"})
    monkeypatch.setattr(sdist, "_build_archive", lambda *arguments: built)
    monkeypatch.setattr(sdist, "read_commit", lambda root, commit: {"a.py": b"1"})
    [finding] = sdist.check_sdist(tmp_path, tmp_path / "work", tmp_path, "0" * 40, 1)
    assert finding.state is CheckState.PASSED
    assert {path.name for path in tmp_path.glob("*.tar.gz")} == {*names[1:], built.name}


@needs_git
def test_wheels_are_compared_with_an_archive_of_their_own_commit_alone(checkout: Path, tmp_path: Path) -> None:
    set_version(checkout, "7.1.0")
    find_problems(checkout)  # commits
    out, wheel = tmp_path / "dist", TARGETS["cp311-x86_64"]
    made = write_sdist(out, {"PKG-INFO": b"Name: one", **sdist.read_commit(checkout, "HEAD")})
    packed = out / f"enginerun-7.1.0-{wheel.tag}.whl"

    def compare() -> Finding:
        [finding] = sdist.compare_wheels(checkout, "HEAD", out, [wheel])
        return finding

    for text, state in (("Name: one", CheckState.PASSED), ("Name: other", CheckState.FAILED)):
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("enginerun-7.1.0.dist-info/METADATA", text)
        assert compare().state is state
    (checkout / "README.md").write_text("of a later commit\n")
    find_problems(checkout)
    assert compare().state is CheckState.UNTRIED and "README.md differs" in compare().text
    made.unlink()
    assert compare().state is CheckState.UNTRIED and "add the step sdist" in compare().text


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


@pytest.mark.parametrize("name", ["LICENSE", "licenses/LICENCE.txt", "licenses/inner/COPYING", "licenses/terms.md"])
def test_a_licence_is_told_by_a_text_in_the_package_where_no_field_tells_it(tmp_path: Path, name: str) -> None:
    named = "License-File: terms.md\n" if name.endswith("terms.md") else ""  # a name that does not say what it is
    package = install_package(tmp_path, "thing", named)
    text = tmp_path / "thing-1.dist-info" / name
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text("The MIT License\n\nCopyright of its authors\n")
    if not named:
        (tmp_path / "thing-1.dist-info" / "RECORD").write_text(f"thing-1.dist-info/{name},,\n")
    assert licences.read_licence(package) == "MIT"


def test_no_licence_has_passed_where_the_project_is_not_installed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    [finding] = licences.check_licences(ROOT)
    assert finding.state is CheckState.UNTRIED and "enginerun is not installed here" in finding.text


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
    found = {finding.subject: finding for finding in licences.check_licences(ROOT)}
    assert found["licence of deep"].state is CheckState.FAILED
    assert "deep has the licence GPL-2.0-only" in found["licence of deep"].text
    assert found["licence of absent"].state is CheckState.UNTRIED and "licences" not in found


def test_the_table_names_each_check_and_counts_them() -> None:
    table = format_table([
        Finding("version", CheckState.PASSED, "1.0"),
        Finding("trial of cp314t", CheckState.UNTRIED, "no such Python\nhere"),
        Finding("sdist", CheckState.FAILED, "x" * 200),
    ])  # fmt: skip
    lines = table.splitlines()
    assert lines[0].split() == ["version", "passed", "1.0"]
    assert lines[1].split("  ")[-1] == "no such Python"
    assert len(lines[2]) < 160 and lines[-1] == "1 passed, 1 FAILED, 1 not tried"


@needs_git
def test_steps_are_chosen_by_name_and_a_failure_is_the_exit_status(monkeypatch, capsys) -> None:
    steps = {name: (lambda release, s=state: iter([Finding(s.value, s, "so")])) for name, state in
             {"good": CheckState.PASSED, "bad": CheckState.FAILED, "later": CheckState.UNTRIED}.items()}  # fmt: skip
    monkeypatch.setattr(check, "STEPS", steps)
    for chosen, status in (("good,later", 0), ("good,bad", 1)):
        monkeypatch.setattr(sys, "argv", ["check", "--steps", chosen])
        assert check.main() == status
    assert re.search(r"^later +not tried +left out by --steps$", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setattr(sys, "argv", ["check", "--steps", "god"])
    with pytest.raises(SystemExit):
        check.main()
    assert "there is no step 'god'; there are: good, bad, later" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("print('why'); raise SystemExit(3)", "exited with 3:\nwhy"),
        ("import signal; print('begun', flush=True); signal.pause()", "was not done within 2 s:\nbegun"),
    ],
)
def test_a_command_that_fails_or_hangs_is_named_with_its_output(tmp_path: Path, program: str, complaint: str) -> None:
    with pytest.raises(CommandError) as failed:
        run_tool([sys.executable, "-c", program], tmp_path, timeout=2)
    assert complaint in str(failed.value) and f"run in {tmp_path}" in str(failed.value)
    with pytest.raises(CommandError, match=r"no-such-program, run in .* cannot be started"):
        run_tool(["no-such-program"], tmp_path)
    with pytest.raises(CommandError, match=r"git log, run in .* exited with 128:\nfatal: not a git"):
        ask_git(tmp_path, "log")


@needs_git
@pytest.mark.parametrize(
    "error", [CommandError("git log exited with 1"), subprocess.TimeoutExpired("meson", 9), OSError("the disk is full")]
)
def test_a_step_that_ends_early_is_a_failure_and_others_follow(monkeypatch, capsys, error: Exception) -> None:
    def end_early(release: check.Release):
        yield Finding("one", CheckState.PASSED, "so")
        raise error

    steps = {"early": end_early, "good": lambda release: iter([Finding("two", CheckState.PASSED, "so")])}
    monkeypatch.setattr(check, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["check", "--steps", "early,good", "cp311-x86_64", "aarch64"])
    assert check.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"early: FAILED: the step ended early: {error}" in lines and "two: so" in lines
    assert lines[-1] == "repeat what failed by: make release-check STEPS=early WHEELS='cp311-x86_64 aarch64'"


def test_make_runs_the_check_as_one_command() -> None:
    planned = subprocess.run(
        ["make", "-n", "release-check", "WHEELS=cp311-x86_64", "STEPS=version,sdist"], cwd=ROOT, text=True,
        capture_output=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert "-m tools.release.check --steps version,sdist cp311-x86_64" in planned
