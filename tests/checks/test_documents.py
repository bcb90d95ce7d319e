"""The documentation's form: length of pages and lines, the kind of each page, and generated parts that are current."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools import docs_reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
MOST_WORDS = 1500
WIDEST_LINE = 100
KINDS = {  # folder, and how the second paragraph of its pages begins
    "how-to": "How-to",
    "reference": "Reference",
    "explanation": "Explanation",
    "architecture": "Explanation for developers",
    "docs": "Explanation",
}


def find_wide_lines(text: str) -> list[str]:
    """Return the lines that are too long, except in blocks that show what a program prints."""
    prose = re.sub(r"^( *)```text\n.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in prose.splitlines() if len(line) > WIDEST_LINE]


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_is_short_and_narrow(page: Path) -> None:
    text = page.read_text()
    assert len(text.split()) <= MOST_WORDS
    assert find_wide_lines(text) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_page_says_its_kind_below_its_title(page: Path) -> None:
    folder = page.relative_to(ROOT).parts[1] if page.parent != DOCS else "docs"
    title, kind, *_ = page.read_text().split("\n\n")
    assert re.fullmatch(r"# .+", title)
    assert re.fullmatch(rf"\*{KINDS[folder]}: .+\.\*", kind, re.DOTALL), kind


def test_generated_parts_are_what_the_sources_give(capsys: pytest.CaptureFixture[str]) -> None:
    stale = docs_reference.main(check=True)
    assert not stale, capsys.readouterr().out


def test_pages_that_sources_name_exist() -> None:
    """Errors, comments and other pages name pages by their path."""
    folders = ("engine", "engine_ext", "autotune", "benchmarks", "grafana", "tools", "examples", "tests")
    suffixes = {".py", ".pyi", ".pyx", ".pxd", ".h", ".c", ".cu", ".md"}
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in [*files, *ROOT.glob("*.md"), ROOT / "Makefile"]
        for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())
    }
    assert len(named) > 20
    assert {place for place in named if not (ROOT / place[1]).exists()} == set()


# A command that installs packages, up to the end of its line, of its quotation or of its part of a sentence.
INSTALL = re.compile(
    r"\b(?:(?:pip3?|pipx|conda|mamba|poetry|pdm|uv(?: pip)?)\b[^\n`]*?\b(?:install|download|add|wheel)|uvx)\b"
    r"((?:\\\n|(?![.,:]\s)[^\n`;&|#])*)"
)
# The name of this project's distribution, or of a package in it, where an index would be asked for it.
NAME_ON_INDEX = re.compile(r"(?i:enginerun|engine)(?:\[[\w,.-]*\])?(?:[=<>~!]=?\S*)?(?:@latest)?")


def find_named_installs(text: str) -> list[str]:
    """Return the commands in a text that install this project by a name, and not from a file or a directory."""
    found = []
    for command in INSTALL.finditer(text):
        named = any(NAME_ON_INDEX.fullmatch(word.strip("'\"(),.:\\")) for word in command[1].split())
        if named and "--no-index" not in command[0]:
            found.append(" ".join(command[0].split()))
    return found


def test_nothing_tells_to_install_a_name_that_is_on_no_index() -> None:
    """A stranger could register the name, and users would install and run that package."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name and ROOT / name != Path(__file__).resolve()]
    assert len(paths) > 1000
    wrong = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # an archive, or a file that is removed and not committed
            continue
        wrong += [f"{path.relative_to(ROOT)}: {command}" for command in find_named_installs(text)]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pip install enginerun", True),
        ("`pip install 'enginerun[torch]'`", True),
        ("python -m pip install --upgrade \"enginerun==0.1\" torch", True),
        ("uv add enginerun", True),
        ("RUN pip install --no-cache-dir \\\n    torch \\\n    enginerun[ray,torch]", True),
        ("conda install -c conda-forge enginerun", True),
        ("pip install engine", True),
        ("pip install ./dist/enginerun-*-cp311-*.whl", False),
        ("pip install '.[torch]'    # enginerun needs a compiler", False),
        ("pip install 'DIR[torch]', then start enginerun by `enginerun -np 2`", False),
        ("pip install -e . --no-build-isolation", False),
        ("pip install mpi4py", False),
        ("pip download --no-index --find-links /wheels enginerun", False),
    ],
)  # fmt: skip
def test_an_installation_by_name_is_told_from_one_of_a_file(text: str, wrong: bool) -> None:
    assert bool(find_named_installs(text)) is wrong
