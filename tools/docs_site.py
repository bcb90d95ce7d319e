"""Make a site of the documentation, with a search, and check its links: python -m tools.docs_site [DIRECTORY].

Needs the extra `docs` (zensical, mkdocstrings) and no network. The pages of docs/index.md are the site's navigation.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
# Copied with their folders, so that links between them hold.
SOURCES = ("*.md", "docs/**/*", "benchmarks/*.md", "benchmarks/history/**/*", "examples/**/*")
SCHEMES = (("light", "default", "sun", "dark"), ("dark", "slate", "moon", "light"))
ITEM_MARK = re.compile(r"([-*+]|\d+\.) ")
ITEM = re.compile(r"\[([^\]]+)\]\(([^)#]+\.md)\)", re.DOTALL)


def main(directory: Path) -> int:
    """Build the site; return 0 if no link is broken."""
    shutil.rmtree(directory, ignore_errors=True)
    for source in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern)}):
        if source.is_file() and "__pycache__" not in source.parts:
            target = directory / "pages" / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.suffix == ".md":
                target.write_text(indent_lists(source.read_text()))
            else:
                shutil.copy(source, target)
    (directory / "mkdocs.yml").write_text(json.dumps(describe_site(), indent=2))  # JSON is YAML, too
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    if subprocess.run(command, cwd=directory, check=False).returncode:
        return 1
    broken = list(find_broken_links(directory / "site"))
    print("\n".join(broken) if broken else f"The site: {directory / 'site' / 'index.html'}")
    return int(bool(broken))


def indent_lists(text: str) -> str:
    """Return a page whose nested lists, and blocks within lists, are indented by four spaces, as the site needs."""
    lines: list[str] = []
    within = False  # a list
    fence: tuple[int, int] | None = None  # a block of code's indentation, before and after
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if fence is not None:
            lines.append(" " * fence[1] + line[fence[0] :] if line.strip() else line)
            fence = None if line.strip() == "```" else fence
            continue
        if indent == 0 and line:
            within = ITEM_MARK.match(line) is not None or (within and lines[-1] != "")
        more = (indent // 2) * 4 if within else indent
        if line.lstrip().startswith("```"):
            fence = (indent, more)
        lines.append(" " * more + line.lstrip() if line.strip() else line)
    return "\n".join(lines) + "\n"


def read_navigation() -> list[dict[str, Any]]:
    """Return the navigation: kinds, groups and pages as docs/index.md has them."""
    kinds: list[dict[str, Any]] = []
    for kind in (ROOT / "docs" / "index.md").read_text().split("\n## ")[1:]:
        title, _, text = kind.partition("\n")
        first, *groups = text.split("\n### ")
        pages: list[dict[str, Any]] = list(read_pages(first))
        for group in groups:
            name, _, items = group.partition("\n")
            pages.append({name: list(read_pages(items))})
        kinds.append({title.partition(":")[0]: pages})
    return [{"Home": "README.md"}, {"All pages": "docs/index.md"}, *kinds]


def read_pages(text: str) -> Iterator[dict[str, Any]]:
    """Yield the title and the path of each page that a text links."""
    for title, target in ITEM.findall(text):
        path = (ROOT / "docs" / target).resolve().relative_to(ROOT).as_posix()
        name = " ".join(title.split())
        if path == "docs/reference/python/index.md":
            modules = sorted(page for page in (ROOT / path).parent.glob("*.md") if page.name != "index.md")
            names = [{page.stem.replace("-", "."): page.relative_to(ROOT).as_posix()} for page in modules]
            yield {name: [{"All modules": path}, *names]}
        else:
            yield {name: path}


def describe_scheme(preference: str, name: str, icon: str, other: str) -> dict[str, Any]:
    """Return a scheme of colours: for whom it is the default, and the button that leads to the other one."""
    toggle = {"icon": f"lucide/{icon}", "name": f"Switch to {other} mode"}
    return {"media": f"(prefers-color-scheme: {preference})", "scheme": name, "toggle": toggle}


def describe_site() -> dict[str, Any]:
    """Return the configuration, in the form of MkDocs."""
    options = {
        "docstring_style": "numpy",
        "heading_level": 3,
        "members_order": "source",
        "show_root_full_path": False,
        "show_root_heading": True,
        "show_source": False,
    }
    return {
        "site_name": "enginerun",
        "docs_dir": "pages",
        "site_dir": "site",
        "use_directory_urls": False,  # pages open from the disk, too
        "nav": read_navigation(),
        "theme": {
            "name": "material",
            "font": False,  # none is fetched
            "features": ["content.code.copy", "navigation.tabs", "navigation.top", "search.highlight", "toc.follow"],
            "palette": [describe_scheme(*each) for each in SCHEMES],
        },
        "plugins": [
            "search",
            {"mkdocstrings": {"handlers": {"python": {"paths": [str(ROOT)], "options": options}}}},
        ],
        "markdown_extensions": ["attr_list", "pymdownx.superfences", "tables", {"toc": {"permalink": True}}],
    }


class _Links(HTMLParser):
    """Anchors of a page, and the targets of its links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("id", "name"):
                self.anchors.add(value)
            elif value and (tag, name) in (("a", "href"), ("img", "src"), ("link", "href"), ("script", "src")):
                self.targets.add(value)


def find_broken_links(site: Path) -> Iterator[str]:
    """Yield the links of a site that lead to no file, or to no anchor of a page."""
    pages = {path: _Links(path.read_text()) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    for page, links in pages.items():
        for target in sorted(links.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or target.startswith("data:"):
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            path = path / "index.html" if path.is_dir() else path
            anchors = pages[path].anchors if path in pages else None
            if not path.exists() or (parts.fragment and anchors is not None and unquote(parts.fragment) not in anchors):
                yield f"{page.relative_to(site)}: {target} leads nowhere"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").resolve()))
