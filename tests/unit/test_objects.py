"""Reports of parameters that differ, and the exceptions and files that speak for a rank."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine_ext.errors
from engine.collectives.objects import describe, find_differences, name_tensors
from engine.errors import UnsupportedTensorError
from engine.session.monitor import describe_waits, summarize_exception
from engine.trace.flight import Recorder

SAME = {"w": ("float32[2]", 1), "b": ("float32[1]", 2)}


def test_equal_ranks_differ_in_nothing() -> None:
    assert find_differences([SAME, dict(SAME), dict(reversed(SAME.items()))]) == []


def test_the_minority_is_named_against_the_majority() -> None:
    odd = {**SAME, "w": ("float32[2]", 9)}
    assert find_differences([odd, SAME, SAME]) == ["'w': rank 0 has other values than rank 1 (float32[2])"]
    assert find_differences([SAME, odd, SAME, SAME]) == ["'w': rank 1 has other values than rank 0 (float32[2])"]


def test_in_doubt_rank_0_is_right() -> None:
    odd = {**SAME, "w": ("float32[2]", 9)}
    assert find_differences([odd, SAME]) == ["'w': rank 1 has other values than rank 0 (float32[2])"]
    assert find_differences([SAME, odd, odd, SAME]) == ["'w': ranks 1, 2 have other values than rank 0 (float32[2])"]


def test_shape_dtype_and_presence_are_told_apart_from_values() -> None:
    shape, more = {**SAME, "w": ("float16[2, 1]", 1)}, {**SAME, "x": ("int64[]", 0)}
    assert find_differences([SAME, shape]) == ["'w': rank 1 has float16[2, 1], rank 0 has float32[2]"]
    assert find_differences([SAME, more]) == ["'x': rank 1 has int64[], rank 0 has no such entry"]
    assert find_differences([more, SAME]) == ["'x': rank 1 has no such entry, rank 0 has int64[]"]


def test_each_way_of_being_different_gets_a_line() -> None:
    ranks = [SAME, SAME, {**SAME, "w": ("float32[2]", 8)}, {**SAME, "w": ("float32[2]", 9)}]
    assert [line.split(" has ")[0] for line in find_differences(ranks)] == ["'w': rank 2", "'w': rank 3"]


def test_parameters_come_as_mapping_pairs_or_list() -> None:
    assert name_tensors({"a": 1}) == [("a", 1)]
    assert name_tensors(iter([("a", 1), ("b", 2)])) == [("a", 1), ("b", 2)]
    assert name_tensors(["x", "y"]) == [("0", "x"), ("1", "y")]
    with pytest.raises(TypeError, match="expected a mapping or an iterable"):
        name_tensors(3)


def test_only_tensors_numbers_and_texts_are_described() -> None:
    assert describe("w", np.zeros((2, 3), np.float16)) == "float16[2, 3]"
    assert describe("n", 3) == "int 3"
    with pytest.raises(UnsupportedTensorError, match="'o' is a object"):
        describe("o", object())


def batch(text: str) -> None:
    raise ValueError(text)


def test_an_exception_is_summed_up_with_its_place() -> None:
    with pytest.raises(ValueError, match="bad") as caught:
        batch("bad batch\nand more")
    text = summarize_exception(ValueError, caught.value, caught.tb)
    assert text == f"ValueError: bad batch at {Path(__file__).name}:{batch.__code__.co_firstlineno + 1}"
    assert summarize_exception(KeyboardInterrupt, None, None) == "KeyboardInterrupt"


def test_an_exception_in_a_library_is_placed_where_the_user_called_it() -> None:
    with pytest.raises(TypeError) as caught:
        name_tensors(3)
    assert f" at {Path(__file__).name}:" in summarize_exception(TypeError, caught.value, caught.tb)


def test_an_interrupt_within_the_native_engines_python_is_placed_where_the_user_called_it() -> None:
    raising = compile("raise KeyboardInterrupt", engine_ext.errors.__file__, "exec")
    with pytest.raises(KeyboardInterrupt) as caught:
        exec(raising)
    assert f" at {Path(__file__).name}:" in summarize_exception(KeyboardInterrupt, None, caught.tb)


def test_what_waits_for_the_same_ranks_is_one_line() -> None:
    def entry(name: str, missing: list[int] | None, brought: list[int], seconds: float) -> dict[str, Any]:
        return {"name": name, "kind": "allreduce", "seconds": seconds, "missing": missing, "brought": brought}

    pending = [entry(f"layer.{k}", [1], [0, 2], 60.4 - k) for k in range(5)]
    pending += [entry("done", [], [0, 1, 2], 1.0), entry("x", [0, 1], [2], 2.0), entry("new", None, [], 3.0)]
    assert describe_waits(pending, 0) == [
        "'layer.0', 'layer.1', 'layer.2' and 2 more (allreduce) have waited 60 s for rank 1; submitted by ranks 0, 2",
        "'x' (allreduce) has waited 2 s for ranks 0, 1; submitted by rank 2",
        "'new' (allreduce) has waited 3 s for ranks unknown here (rank 0 knows)",
    ]
    assert describe_waits([entry("done", [], [0], 1.0)], 0) == []


def test_records_are_whole_and_for_the_owner_only(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "job", 3)
    for number in (1, 2):
        path = recorder.write("flight.json", {"number": number, "where": Path("x")})
    assert path == tmp_path / "job" / "rank.3" / "flight.json"
    assert json.loads(path.read_text()) == {"number": 2, "where": "x"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["flight.json"]


def test_without_a_directory_a_private_one_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home = Recorder(None, 0).write("failure.json", {}).parent.parent
    assert home.parent == tmp_path
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
