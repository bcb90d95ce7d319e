"""The site of the documentation: its navigation, its check of links, and, where zensical is installed, its build."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tools import docs_site

from ..documents import DOCS, ROOT


def list_pages(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the paths of a navigation."""
    for entry in entries:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from list_pages(value)


def test_navigation_has_every_page_once() -> None:
    pages = [page for page in list_pages(docs_site.read_navigation()) if page.startswith("docs/")]
    assert sorted(pages) == sorted(page.relative_to(ROOT).as_posix() for page in DOCS.glob("**/*.md"))


def test_navigation_has_the_three_kinds() -> None:
    assert [*(next(iter(entry)) for entry in docs_site.read_navigation())][2:5] == [
        "How-to",
        "Reference",
        "Explanation",
    ]


def test_lists_are_indented_by_four_spaces() -> None:
    page = "- a\n  more\n  - b\n    more\n\n  ```sh\n  x\n    y\n  ```\n\n1. c\n   - d\n\n  text\n"
    site = "- a\n    more\n    - b\n        more\n\n    ```sh\n    x\n      y\n    ```\n\n1. c\n    - d\n\n    text\n"
    code = "```\n  code\n```\n"
    assert docs_site.indent_lists(page + code) == site + code


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="top">A</h1><a href="b.html#there">b</a><a href="https://x.org/y">x</a>')
    (tmp_path / "b.html").write_text('<p id="here"><a href="a.html#top">a</a><a href="c.html">c</a><img src="d.png">')
    assert [*docs_site.find_broken_links(tmp_path)] == [
        "a.html: b.html#there leads nowhere",
        "b.html: c.html leads nowhere",
        "b.html: d.png leads nowhere",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("zensical") is None, reason="needs zensical: make docs")
def test_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    assert docs_site.main(tmp_path / "site") == 0
    assert "engine.torch" in (tmp_path / "site" / "site" / "search.json").read_text()
