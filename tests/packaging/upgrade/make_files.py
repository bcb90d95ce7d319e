"""Make the files that an earlier revision writes, by running it, and pack them into an archive beside this file.

    python -m tests.packaging.upgrade.make_files 4d0d1964

The revision is exported from git and installed into an environment of its own, which sees the packages of this one.
`writer.py` runs there, with names that the revision has. Spark needs Java. An archive is made once, and kept: what a
revision has written does not change.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from ..environments import BUILD, ROOT, Environment, make_environment, run

HERE = Path(__file__).parent
PARTS = ("tuner", "states", "spark")
SEARCH = ["--autotune", "--autotune-steps-per-sample", "4", "--autotune-bayes-opt-max-samples", "12"]


def install_revision(revision: str, folder: Path) -> Environment:
    """Install a revision of this project, from its sources, into an environment that is made for it."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    sources = folder / "sources"
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(sources)
    environment = make_environment(folder / "environment", folder)
    environment.install(*BUILD, sources)
    return environment


def write_files(environment: Environment, folder: Path) -> None:
    """Run each part of the writer in an environment; the files go to `folder`."""
    folder.mkdir()
    launched = {
        "tuner": [*SEARCH, "--output-dir", str(folder / "search")],
        "states": ["--timeline", str(folder / "timeline.json")],
    }
    variables = {
        "PATH": f"{environment.path / 'bin'}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(folder / "cache"),
        "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1", "PYSPARK_PYTHON": str(environment.python),
    }  # fmt: skip
    for part in PARTS:
        program: list[str | Path] = [environment.python, HERE / "writer.py", part, folder]
        launcher: list[str | Path] = []
        if part in launched:
            launcher = [environment.path / "bin" / "enginerun", "-np", "2", *launched[part]]
        print(f"{part} ...", flush=True)
        run([*launcher, *program], environment.cwd, **variables)


def pack_files(folder: Path, archive: Path) -> None:
    """Pack what a version is to load: results of searches, states, timelines, and stages of Spark."""
    wanted = ("cache/enginerun/autotune/*.json", "search/*.jsonl", "*.json", "*.pt", "stages/**/*",
              "store/runs/*/*Model_*.pkl")  # fmt: skip
    names = {path for pattern in wanted for path in folder.glob(pattern) if path.is_file()}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for path in sorted(names):
            files.writestr(zipfile.ZipInfo(str(path.relative_to(folder)), (2026, 1, 1, 0, 0, 0)), path.read_bytes())
    print(f"{archive}: {len(names)} files, {archive.stat().st_size} bytes")


def main(revision: str) -> None:
    """Make the archive of a revision."""
    with tempfile.TemporaryDirectory(prefix="enginerun-upgrade-") as name:
        folder = Path(name)
        environment = install_revision(revision, folder / "made")
        write_files(environment, folder / "files")
        pack_files(folder / "files", HERE / f"{revision}.zip")


if __name__ == "__main__":
    main(sys.argv[1])
