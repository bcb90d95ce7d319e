"""Callbacks of TensorFlow's kernels, in a program that stands in for TensorFlow: each runs once, forged ones never."""

from __future__ import annotations

from pathlib import Path

from .c_programs import expect_all_is_well


def test_ten_thousand_late_callbacks_and_forged_ones(tmp_path: Path) -> None:
    expect_all_is_well("tensorflow_done", tmp_path)
