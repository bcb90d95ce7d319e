"""Documentation pages as tests read them: sections, lists and programs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def read_section(pages: str, title: str) -> str:
    """Return the text of the one section with this title in the pages of docs/ that match a pattern."""
    texts = [page.read_text() for page in sorted(DOCS.glob(pages))]
    (section,) = [part for text in texts for part in text.split("\n## ")[1:] if part.startswith(f"{title}\n")]
    return section.partition("\n")[2]


def read_list(text: str) -> list[tuple[str, str]]:
    """Return the items of a text's lists: what stands before the first colon outside of code, and the rest."""
    items = re.findall(r"^- (.*?)(?=^- |^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    found = []
    for item in items:
        match = re.match(r"((?:`[^`]*`|[^`:]|:(?! ))*): (.*)", " ".join(item.split()), re.DOTALL)
        found.append((match[1], match[2]) if match else (" ".join(item.split()), ""))
    return found


def read_programs(page: str) -> list[str]:
    """Return all blocks of Python of a page in docs/, in their order."""
    return [code for _, language, code in FENCE.findall((DOCS / page).read_text()) if language == "python"]


def read_program(page: str, name: str) -> str:
    """Return the program of a page in docs/ below the mark of this name."""
    block = rf"<!-- {name}: a test runs it -->\n```python\n(.*?)^```"
    (program,) = re.findall(block, (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return str(program)
