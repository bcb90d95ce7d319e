"""The handler of compiled programs, called by a made-up runtime, and by an older one without futures."""

from __future__ import annotations

from pathlib import Path

from engine.native import find_library

from .c_programs import expect_all_is_well


def test_frames_of_a_newer_and_of_an_older_runtime(tmp_path: Path) -> None:
    expect_all_is_well("xla_frames", tmp_path, find_library("xla_call"))
