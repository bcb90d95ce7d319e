"""The documentation's form: length of pages and lines, the kind of each page, and generated parts that are current."""

from __future__ import annotations

import re
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
