"""Rules about files that others wrote: one reader, with limits, reads them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_engine_and_tuner_have_the_same_reader() -> None:
    """Neither may import the other."""
    assert (ROOT / "engine/bounded_reader.py").read_bytes() == (ROOT / "autotune/bounded_reader.py").read_bytes()
