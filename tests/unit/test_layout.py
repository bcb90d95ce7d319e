"""All shared declarations are hashed, so that ranks of other builds are refused; each number has one name."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.collectives.reduce_ops import Op
from engine.config import config
from engine.config.forms import Words
from engine.metrics import names
from engine_ext import errors, setup
from tools import native_fingerprint

NATIVE = Path(__file__).parents[2] / "engine_ext"
HEADERS = ("kernels/kernels.h", "platform/hash.h", "shared/names.h", "shared/layout.h")
PROGRAM = """
#include <stdio.h>
#include "engine_ext/shared/layout.h"
int main(void) { return printf("%016llx", (unsigned long long)engine_layout()) < 0; }
"""

# Changes of a header: the text, and its replacement.
CHANGES = {
    "two fields of a line": ("shared/layout.h", "wait_all, wait_requests", "wait_requests, wait_all"),
    "two fields of a size": (
        "shared/layout.h",
        "absent[ID_WORDS], awaited[ID_WORDS]",
        "awaited[ID_WORDS], absent[ID_WORDS]",
    ),
    "a field more where there is room": ("shared/layout.h", "uint64_t steps;", "uint64_t steps, more;"),
    "a field less where there is room": ("shared/layout.h", "uint64_t waits_unnamed;", ""),
    "a type of equal size": ("shared/layout.h", "double cycle_time_ms;", "uint64_t cycle_time_ms;"),
    "a sign": ("shared/layout.h", "int32_t id, name_bytes;", "uint32_t id, name_bytes;"),
    "a constant": ("shared/layout.h", "DIM_FAULT = 11,", "DIM_FAULT = 10,"),
    "a part of a word": ("shared/layout.h", "ARRIVAL_LAST_BITS = 12,", "ARRIVAL_LAST_BITS = 11,"),
    "the bytes of an item": ("kernels/kernels.h", 'ROW(ENGINE_UINT64, "uint64", 8)', 'ROW(ENGINE_UINT64, "uint64", 4)'),
    "what a joined rank is told": (
        "shared/layout.h",
        "int64_t rows, row_bytes, dtype;",
        "int64_t row_bytes, rows, dtype;",
    ),
    "a flag": ("shared/layout.h", "SLEEP_FULL = 16,", "SLEEP_FULL = 32,"),
    "a number more": ("shared/names.h", 'ROW(CAUSE_LEFT, "left")', 'ROW(CAUSE_MORE, "more") ROW(CAUSE_LEFT, "left")'),
    "the numbers of entries": (
        "shared/names.h",
        'ROW(ENTRY_DEFINE, "define")                   \\\n  ROW(ENTRY_EVICT, "evict")',
        'ROW(ENTRY_EVICT, "evict") ROW(ENTRY_DEFINE, "define")',
    ),
    "what is reduced": ("kernels/kernels.h", "ENGINE_DTYPES = ENGINE_BOOL + 1", "ENGINE_DTYPES = ENGINE_BOOL"),
    "the numbers of reductions": (
        "kernels/kernels.h",
        'ROW(ENGINE_MIN, "min")',
        'ROW(ENGINE_MEAN, "mean") ROW(ENGINE_MIN, "min")',
    ),
    "the numbers of dtypes": (
        "kernels/kernels.h",
        'ROW(ENGINE_UINT32, "uint32", 4)',
        'ROW(ENGINE_INT4, "int4", 1) ROW(ENGINE_UINT32, "uint32", 4)',
    ),
}


def layout(tree: Path, header: str = "", old: str = "", new: str = "") -> str:
    """Layout hash that a program prints, compiled with copies of the headers, one of them changed."""
    for name in HEADERS:
        copy = tree / "engine_ext" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = (NATIVE / name).read_text()
        if name == header:
            assert text.count(old) == 1, f"{name} has {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        copy.write_text(text)
    (tree / "layout.c").write_text(PROGRAM)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, "-std=c11", "-I", tree, tree / "layout.c", "-o", tree / "layout"], check=True)
    return subprocess.run([tree / "layout"], check=True, capture_output=True, text=True).stdout


def test_the_engine_tells_the_hash_of_its_headers(tmp_path: Path) -> None:
    assert layout(tmp_path) == setup.segment_info()["layout"]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_another_process_would_read_changes_the_hash(tmp_path: Path, change: str) -> None:
    assert layout(tmp_path, *CHANGES[change]) != setup.segment_info()["layout"]


def test_a_comment_changes_nothing(tmp_path: Path) -> None:
    changed = layout(tmp_path, "shared/layout.h", "/* longest text beside an abort */", "/* at\n most */")
    assert changed == layout(tmp_path)


def declared_outside(text: str) -> list[str]:
    """Structs and enums of a header that are declared outside of `SHARED(...)`."""
    code = re.sub(r"/\*.*?\*/", "", text.replace(") /* SHARED */", "END"), flags=re.DOTALL)
    before, inside, after = re.fullmatch(r"(.*?)^SHARED\((.*)^END(.*)", code, re.DOTALL | re.MULTILINE).groups()  # type: ignore[union-attr]
    assert "rank_page;" in inside
    return re.findall(r"\b(?:struct|union|enum)\b[^;(){}]*\{[^}]*\}", before + after)


def test_nothing_is_declared_outside_of_the_hash() -> None:
    header = (NATIVE / "shared/layout.h").read_text()
    assert declared_outside(header) == []
    assert len(declared_outside(header + "typedef struct more { int x; } more;\nenum { MORE };")) == 2


def test_names_are_the_same_wherever_they_are_told() -> None:
    codes = setup.codes()
    assert {name: codes[name] for name in names.NAMES} == names.NAMES
    assert codes["reductions"] == tuple(op.name.lower() for op in sorted(Op))
    assert tuple(errors.BY_CAUSE) == codes["causes"][1:]
    verdict = (NATIVE / "control/failure.pyx").read_text()
    for kind in errors.BY_CAUSE.values():
        assert f'b"{kind.__name__}", b"{kind.did}"' in verdict
    for knob, known in (("stores", codes["stores"]), ("compression", codes["compressions"])):
        form = config.list_knobs()[knob].parse
        assert isinstance(form, Words) and set(form.words) == set(known)


def test_the_engine_tells_the_fingerprint_of_its_sources() -> None:
    assert setup.segment_info()["sources"] == native_fingerprint.compute_fingerprint(NATIVE)


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "transport/frames.h").write_text("enum { FRAME_LEFT = 2 };"),
        lambda tree: (tree / "transport/frames.h").rename(tree / "transport/frame.h"),
        lambda tree: (tree / "shared/more.pxd").write_text(""),
        lambda tree: (tree / "chain.pyx").write_text(""),
    ],
)
def test_whatever_is_compiled_changes_the_fingerprint(tmp_path: Path, change: Callable[[Path], object]) -> None:
    for name in ("transport/frames.h", "shared/segment.pyx", "chain.pyx", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("enum { FRAME_LEFT = 1 };")
    before = native_fingerprint.compute_fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("more")
    (tmp_path / "chain.c").write_text("/* Generated by Cython */")
    assert native_fingerprint.compute_fingerprint(tmp_path) == before
    change(tmp_path)
    assert native_fingerprint.compute_fingerprint(tmp_path) != before
