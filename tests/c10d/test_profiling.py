"""Events of operations in torch's profiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import run_job

pytest.importorskip("torch")

from engine.c10d import profiling

NAMES = "all_reduce broadcast all_gather reduce_scatter all_to_all reduce gather scatter barrier"


def test_a_profiler_shows_each_operation_until_it_ends(tmp_path: Path) -> None:
    ended = run_job(tmp_path, "tests.c10d.profiled_programs", ["events_of_calls", "events_of_a_late_rank"], 2)
    assert ended.codes == [0] * 2, "\n".join(ended.outputs)
    for message, events in zip(("send", "recv"), ended.returned["events_of_calls"], strict=True):
        assert events == {f"engine:{name}": 1 for name in (*NAMES.split(), message)}
    first, late = ended.returned["events_of_a_late_rank"]
    assert first["engine:all_reduce"][0] >= 0.3
    assert len(first["engine:all_reduce"]) == len(late["engine:all_reduce"]) == 1
    assert len(first["engine:all_gather"]) == len(late["engine:all_gather"]) == 1


def test_versions_of_torch_have_the_flag_or_show_no_events() -> None:
    assert profiling.flags._is_profiler_enabled is False
