"""The space of knobs and the positions of settings in it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune import Choice, Integer, Real, Space

SPACE = Space(
    size=Integer(1 << 16, 1 << 30, log=True),
    time=Real(0.05, 50.0, log=True, off=0.0),
    share=Real(-1.0, 1.0),
    few=Integer(1, 5),
    way=Choice(["one", "two", 3]),
)


@given(st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5))
def test_every_point_is_a_setting_which_is_encoded_as_that_point(shares: list[float]) -> None:
    at = SPACE.encode_shares(np.array([shares]))
    knobs = SPACE.decode(at[0])
    assert SPACE.check(knobs) == knobs
    assert np.allclose(SPACE.encode(knobs), at[0], atol=1e-4)  # real numbers are given to four digits
    assert np.allclose(SPACE.snap_coordinates(at), at, atol=1e-12)


@given(st.lists(st.floats(-3.0, 3.0), min_size=8, max_size=8))
def test_points_anywhere_snap_to_settings(at: list[float]) -> None:
    snapped = SPACE.snap_coordinates(np.array([at]))
    assert SPACE.check(SPACE.decode(snapped[0]))
    assert np.allclose(SPACE.snap_coordinates(snapped), snapped, atol=1e-12)


def test_ends_choices_and_off_are_reached() -> None:
    low = SPACE.decode(SPACE.encode_shares(np.array([[0.0, 0.2, 0.0, 0.0, 0.0]]))[0])
    high = SPACE.decode(SPACE.encode_shares(np.array([[1.0, 1.0, 1.0, 1.0, 1.0]]))[0])
    assert low == {"size": 1 << 16, "time": pytest.approx(0.075, rel=0.01), "share": -1.0, "few": 1, "way": "one"}
    assert high == {"size": 1 << 30, "time": 50.0, "share": 1.0, "few": 5, "way": 3}
    assert SPACE.decode(SPACE.encode_shares(np.array([[0.5, 0.1, 0.5, 0.5, 0.5]]))[0])["time"] == 0.0


def test_any_two_values_of_a_choice_are_equally_far_apart() -> None:
    a, b, c = (
        SPACE.encode({"size": 1 << 20, "time": 1.0, "share": 0.0, "few": 2, "way": way}) for way in ("one", "two", 3)
    )
    assert math.dist(a, b) == pytest.approx(math.dist(a, c)) == pytest.approx(math.dist(b, c)) == pytest.approx(1.0)


def test_a_description_gives_the_space_back() -> None:
    assert Space.from_description(SPACE.describe()) == SPACE


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Real(2.0, 1.0), "low must be below high"),
        (lambda: Real(0.0, 1.0, log=True), "above 0, not at 0.0; is it a value that means off"),
        (lambda: Real(1.0, 2.0, off=1.5), "lies between"),
        (lambda: Choice(["a"]), "two or more"),
        (lambda: Choice(["a", "a"]), "different"),
        (lambda: Space(), "at least one"),
        (lambda: Space.from_description({"k": {"kind": "Complex"}}), "knob 'k' is not described"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"size": 7}, "'size': it is 65536 to 1073741824, not 7"),
        ({"size": 70000.5}, "a whole number"),
        ({"time": -1.0}, "0.05 to 50.0, or 0.0, not -1.0"),
        ({"few": True}, "a number, not True"),
        ({"way": "four"}, "one of 'one', 'two', 3, not 'four'"),
        ({"other": 1}, "has 'other', which the space has not"),
    ],
)
def test_a_setting_outside_is_refused(changed: dict[str, Any], said: str) -> None:
    knobs = {"size": 1 << 20, "time": 1.0, "share": 0.0, "few": 2, "way": "one"}
    with pytest.raises(ValueError, match=said):
        SPACE.check(knobs | changed)
    with pytest.raises(ValueError, match="lacks 'way'"):
        SPACE.check({name: value for name, value in knobs.items() if name != "way"})
