"""Check a release, the last commit: `make release-check`.

    python -m tools.release.check [--steps version,sdist] [cp311-x86_64 aarch64 ...]

Each check prints its outcome, and a table at the end shows which passed, which failed and which could not be tried
here. The exit status is 1 if one failed. What cannot be tried fails nothing: who releases reads the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import sdist
from .__main__ import ROOT, Builder, Revision, build_wheels, read_revision, write_sums
from .agreement import check_version
from .finding import Finding, Verdict, format_table
from .licences import check_licences
from .targets import Target, select_targets
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
        yield Finding("site", Verdict.UNTRIED, "there is no zensical here: pip install '.[docs]' in the source tree")
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
        outcome = _run_command(subject, command)
        if outcome.state is Verdict.PASSED and "skipped" in outcome.text:
            outcome = Finding(subject, Verdict.UNTRIED, f"{outcome.text}: see {' '.join(command[1:])}")
        yield outcome


def _check_wheels(release: Release) -> Iterator[Finding]:
    builder = Builder(release.revision, release.out, release.jobs)
    yield from build_wheels(builder, release.targets, release.out, twice=True)
    archives = list(release.out.glob("*.tar.gz"))
    for wheel in sorted(release.out.glob("*.whl")) if archives else ():
        try:
            sdist.compare_metadata(archives[0], wheel)
        except sdist.BadSdistError as error:
            yield Finding(f"metadata of {wheel.name}", Verdict.FAILED, str(error))


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
    """Run a command of this environment; its last line tells the outcome unless `passed` does."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, text=True, timeout=1800, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
        return Finding(subject, Verdict.FAILED, f"{' '.join(command[1:])} exited with {done.returncode}: {last}")
    return Finding(subject, Verdict.PASSED, passed or last)


def main() -> int:
    """Carry out the steps; return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory for the files (default: dist)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers that run at the same time")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"some of {','.join(STEPS)} (default: all)")
    parser.add_argument("names", nargs="*", help="wheels: cp311-x86_64, cp314t, aarch64, ... (default: all)")
    options = parser.parse_args()
    steps = [each for each in options.steps.split(",") if each]
    if unknown := [each for each in steps if each not in STEPS]:
        parser.error(f"there is no step {unknown[0]!r}; there are: {', '.join(STEPS)}")
    try:
        release = Release(read_revision(), options.out.absolute(), select_targets(options.names), options.jobs)
    except ValueError as error:
        parser.error(str(error))
    outcomes = []
    for name in steps:
        begun = time.monotonic()
        for outcome in STEPS[name](release):
            print(outcome, flush=True)
            outcomes.append(outcome)
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    left_out = [Finding(name, Verdict.UNTRIED, "left out by --steps") for name in STEPS if name not in steps]
    print(f"\nRelease check of commit {release.revision.commit[:12]}\n\n{format_table([*outcomes, *left_out])}")
    return int(any(each.state is Verdict.FAILED for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
