"""ARCHITECTURE.md names files that exist, and can be read in ten minutes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "ARCHITECTURE.md").read_text()
WORDS = 200 * 10  # words that one reads in ten minutes
LIVES = (ROOT / "docs/architecture/lives.md").read_text()
STEPS = MAP.partition("## The life of one gradient")[2] + LIVES
FUNCTIONS = re.findall(r"`(?:\w+\.)?(\w+)`(?: \(| puts | calls )?[^`]*?\(`([\w/]+\.pyx?)`\)", STEPS)


def source(name: str) -> Path:
    """Return a file by the name that the map gives it; names of native files lack their package."""
    return ROOT / name if (ROOT / name).exists() else ROOT / "engine_ext" / name


def test_the_map_is_read_in_ten_minutes() -> None:
    """The map stays short: longer texts have pages of their own."""
    assert len(MAP.split()) < WORDS


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+\.(?:pyx|pxd|py|h))`", MAP + LIVES))))
def test_files_of_the_map_exist(name: str) -> None:
    assert source(name).exists()


SECURITY = (ROOT / "SECURITY.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", SECURITY))))
def test_what_shows_that_a_promise_holds_exists(name: str) -> None:
    """Every test that SECURITY.md names exists."""
    path, _, function = name.partition("::")
    assert re.search(rf"^(async )?def {function}\(", (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize("room", re.findall(r"^\| `([\w/]+/)` \|", MAP, re.MULTILINE))
def test_rooms_of_the_map_exist(room: str) -> None:
    assert (ROOT / room).is_dir()


def test_packages_are_on_the_map() -> None:
    """Every package of engine/ has a row, except those explained by a file of their own name."""
    packages = {path.parent.name for path in (ROOT / "engine").glob("*/__init__.py")}
    assert packages - set(re.findall(r"^\| `engine/(\w+)/` \|", MAP, re.MULTILINE)) == set()


def test_lives_name_functions_that_exist() -> None:
    """Each function exists in the file beside it."""
    assert len(FUNCTIONS) >= 9, FUNCTIONS
    for function, name in FUNCTIONS:
        defined = rf"\b(def|class|cdef|cpdef)\b.*\b{function}\b"
        assert re.search(defined, source(name).read_text()), f"there is no {function} in {name}"
