"""Check a release, the last commit: `make release-check`.

    python -m tools.release.check [--steps version,sdist] [cp311-x86_64 aarch64 ...]

Each check prints its finding, and a table at the end shows which passed, which failed and which could not be tried
here. The last line repeats the steps that failed, and the exit status is 1 if there is one. What cannot be tried fails
nothing: who releases reads the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import sdist
from .__main__ import ROOT, Builder, Revision, build_wheels, read_revision, write_sums
from .agreement import check_version
from .commands import CommandError, run_tool
from .finding import CheckState, Finding, format_table
from .licences import check_licences
from .targets import Target, add_names, select_targets
from .trial import try_wheels

WORK = ROOT / "build" / "release"


@dataclass(frozen=True)
class Release:
    """Release that is checked: where its files go, and which wheels it has."""

    revision: Revision
    out: Path
    targets: Sequence[Target]
    jobs: int


def _check_version(_release: Release) -> Iterator[Finding]:
    yield from check_version(ROOT)


def _check_sdist(release: Release) -> Iterator[Finding]:
    revision = release.revision
    yield from sdist.check_sdist(ROOT, WORK / "sdist", release.out, revision.commit, revision.epoch)
    write_sums(release.out)


def _check_site(_release: Release) -> Iterator[Finding]:
    """Build the site of all pages and follow its links. Pages that sources write have to be written already."""
    if importlib.util.find_spec("zensical") is None:
        yield Finding("site", CheckState.UNTRIED, "there is no zensical here: pip install '.[docs]' in the source tree")
        return
    yield _run_command("pages that sources write", [sys.executable, "-m", "tools.docs_reference", "--check"], "current")
    site = ROOT / "build" / "site"
    yield _run_command("site", [sys.executable, "-m", "tools.docs_site", str(site)], "all pages, and no broken link")


def _check_licences(_release: Release) -> Iterator[Finding]:
    yield from check_licences(ROOT)


def _check_upgrade(_release: Release) -> Iterator[Finding]:
    """Load what earlier revisions have written; a second run has the tests that start Spark."""
    for subject, options in (("upgrade", []), ("upgrade of Spark's stages", ["--slow"])):
        command = [sys.executable, "-m", "pytest", "-q", "-rs", *options, "tests/packaging/test_upgrade.py"]
        finding = _run_command(subject, command)
        if finding.state is CheckState.PASSED and "skipped" in finding.text:
            finding = Finding(subject, CheckState.UNTRIED, f"{finding.text}: see {' '.join(command[1:])}")
        yield finding


def _check_wheels(release: Release) -> Iterator[Finding]:
    builder = Builder(release.revision, release.out, release.jobs)
    yield from build_wheels(builder, release.targets, release.out, twice=True)
    yield from sdist.compare_wheels(ROOT, release.revision.commit, release.out, release.targets)


def _check_trials(release: Release) -> Iterator[Finding]:
    yield from try_wheels(release.targets, release.out)


STEPS: dict[str, Callable[[Release], Iterator[Finding]]] = {
    "version": _check_version,
    "licences": _check_licences,
    "sdist": _check_sdist,
    "site": _check_site,
    "upgrade": _check_upgrade,
    "wheels": _check_wheels,
    "trials": _check_trials,
}


def _run_command(subject: str, command: list[str], passed: str = "") -> Finding:
    """Run a command of this environment; its last line is what was found unless `passed` is."""
    try:
        printed = run_tool(command, ROOT, timeout=1800)
    except CommandError as error:
        return Finding(subject, CheckState.FAILED, str(error))
    return Finding(subject, CheckState.PASSED, passed or (printed.strip().splitlines() or [""])[-1])


def carry_out_step(name: str, release: Release) -> Iterator[Finding]:
    """Yield the findings of a step; if a program that it needs fails or takes too long, this is a finding too."""
    try:
        yield from STEPS[name](release)
    except (CommandError, subprocess.SubprocessError, OSError) as error:
        yield Finding(name, CheckState.FAILED, f"the step ended early: {error}")


def describe_repetition(failed: Sequence[str], names: Sequence[str]) -> str:
    """Return the command that repeats the steps that failed, with the wheels that were named."""
    wheels = f" WHEELS={shlex.quote(' '.join(names))}" if names else ""
    return f"repeat what failed by: make release-check STEPS={','.join(failed)}{wheels}"


def main() -> int:
    """Carry out the steps; return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory for the files (default: dist)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers that run at the same time")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"some of {','.join(STEPS)} (default: all)")
    add_names(parser)
    options = parser.parse_args()
    steps = [each for each in options.steps.split(",") if each]
    if unknown := [each for each in steps if each not in STEPS]:
        parser.error(f"there is no step {unknown[0]!r}; there are: {', '.join(STEPS)}")
    try:
        release = Release(read_revision(), options.out.absolute(), select_targets(options.names), options.jobs)
    except ValueError as error:
        parser.error(str(error))
    except CommandError as error:
        raise SystemExit(f"a release is of a commit, and git cannot tell which: {error}") from error
    findings: list[Finding] = []
    failed = []
    for name in steps:
        begun = time.monotonic()
        of_step = []
        for finding in carry_out_step(name, release):
            print(finding, flush=True)
            of_step.append(finding)
        findings += of_step
        if any(finding.state is CheckState.FAILED for finding in of_step):
            failed.append(name)
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    left_out = [Finding(name, CheckState.UNTRIED, "left out by --steps") for name in STEPS if name not in steps]
    print(f"\nRelease check of commit {release.revision.commit[:12]}\n\n{format_table([*findings, *left_out])}")
    if failed:
        print(describe_repetition(failed, options.names))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
