"""The static checks, as tests: one command runs them all, and one summary says what failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

Started = dict[str, tuple["subprocess.Popen[bytes]", Path]]
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

CYTHON = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("engine_ext/**/*.p[xy][xd]"))
STUBBED = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("engine_ext/**/*.pyi"))

# What pycodestyle says of Python only, by the list in cython-lint, which would start a pycodestyle for each file.
FOR_PYTHON_ALONE = "E121,E123,E126,E133,E203,E211,E225,E226,E227,E241,E242,E251,E271,E272,E275,E4,E704,E9,W5"

COMMANDS = {
    "ruff-check": ["ruff", "check"],
    "ruff-format": ["ruff", "format", "--check"],
    "mypy": ["mypy"],
    "stubtest": [
        "stubtest",
        *STUBBED,
        "--mypy-config-file=pyproject.toml",
        "--ignore-missing-stub",  # stubs declare only what `engine` uses
        "--ignore-disjoint-bases",
    ],
    "stubs-of-functions": ["python", "tools/write_stubs.py", "--check"],
    "cython-lint": ["cython-lint", "--no-pycodestyle", *CYTHON],
    "pycodestyle": ["pycodestyle", f"--ignore={FOR_PYTHON_ALONE}", "--max-line-length=130", *CYTHON],
    "import-linter": ["lint-imports", "--no-logo"],
}


# import-linter looks for directories on the path, where an editable install has none. Without that install's loader
# it searches the working directory, the root of the sources.
EDITABLE_BUILD = ROOT / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}"
VARIABLES = {"import-linter": {"MESONPY_EDITABLE_SKIP": str(EDITABLE_BUILD)}}
ONE_BY_ONE = {"mypy", "stubtest"}  # either fails while the other writes the cache that they share


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Start the chosen commands, all at once, each with a file for its output."""
    directory = tmp_path_factory.mktemp("checks")
    running: Started = {}
    for item in request.session.items:
        name = item.callspec.params["name"] if getattr(item, "originalname", "") == "test_check" else None
        if name in COMMANDS:
            program, *arguments = COMMANDS[name]
            turn = ["flock", "--no-fork", directory / "turn"] if name in ONE_BY_ONE else []
            env = {**os.environ, "NO_COLOR": "1", **VARIABLES.get(name, {})}
            with open(directory / name, "w") as output:
                process = subprocess.Popen(
                    [*turn, BIN / program, *arguments], cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT
                )
            running[name] = process, directory / name
    yield running
    for process, _ in running.values():
        process.kill()
        process.wait()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COMMANDS)
def test_check(name: str, started: Started) -> None:
    process, output = started[name]
    if process.wait() != 0:
        print(output.read_text())
        pytest.fail(f"`{' '.join(COMMANDS[name])}` found something", pytrace=False)


def test_the_package_imports_itself_by_relative_names() -> None:
    """The package has two names, `engine` and `enginerun`: absolute imports may load parts twice, or foreign code."""
    own = re.compile(r"^\s*(?:from|import) engine(?:\.|\s)|import_module\(f?[\"']engine\b", re.MULTILINE)
    files = {path: path.read_text() for path in (ROOT / "engine").rglob("*.py")}
    assert len(files) > 80
    assert [str(path.relative_to(ROOT)) for path, text in files.items() if own.search(text)] == []
