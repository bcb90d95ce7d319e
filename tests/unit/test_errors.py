"""The engine's exceptions, recovered from those of a framework."""

from __future__ import annotations

import pytest

from engine import errors
from engine.elastic import copies
from engine.runner import function


class FrameworkError(Exception):
    """Exception that a framework raises with a message."""


def raised(text: str, cause: BaseException | None = None) -> FrameworkError:
    error = FrameworkError(text)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("prefix", ["", "ABORTED: ", "FAILED_PRECONDITION: {{node a/b}} "])
def test_the_class_and_the_message_are_found_in_a_text(prefix: str) -> None:
    found = errors.of(raised(f"{prefix}MismatchError: rank 1 sent float32[3]\nand more"))
    assert type(found) is errors.MismatchError
    assert str(found) == "rank 1 sent float32[3]\nand more"


def test_the_end_of_the_world_names_who_is_to_blame() -> None:
    found = errors.of(raised("ABORTED: RankDiedError: rank 12 died: killed by signal 9"))
    assert isinstance(found, errors.RankDiedError)
    assert (found.rank, found.cause) == (12, "died")


class Unspeakable(Exception):
    """Exception whose text cannot be made."""

    def __str__(self) -> str:
        raise KeyError("no text")

    __repr__ = __str__


def test_an_exception_without_a_text_is_looked_through() -> None:
    error = Unspeakable()
    assert errors.of(error) is None
    error.__cause__ = errors.ConfigError("no")
    assert errors.of(error) is error.__cause__


def test_what_cannot_be_pickled_is_named_whatever_it_raises() -> None:
    class Closed:
        def __reduce__(self) -> str:
            raise Unspeakable

        __repr__ = __reduce__

    told = r"Unspeakable: \(its text cannot be made: KeyError\)"
    with pytest.raises(TypeError, match=rf"engine.run cannot pickle .*{told}"):
        function._pickle_call(print, (Closed(),), {})
    with pytest.raises(TypeError, match=r"'it', of type .*Closed, cannot be kept: \(its text cannot be made"):
        copies.copy_values({"it": Closed()}, copies.NUMPY, copies.NUMPY.allocate_memory)


def test_an_exception_of_the_engine_is_itself() -> None:
    error = errors.ConfigError("no")
    assert errors.of(error) is error
    assert errors.of(raised("something of a framework", error)) is error


def test_a_cause_is_found_below_an_exception_that_says_nothing() -> None:
    found = errors.of(raised("the step failed", raised("DuplicateNameError: 'x' is in flight")))
    assert type(found) is errors.DuplicateNameError


def test_other_exceptions_stand_for_nothing() -> None:
    assert errors.of(None) is None
    assert errors.of(raised("MyMismatchError: 3")) is None
    circle = raised("around")
    circle.__context__ = circle
    assert errors.of(circle) is None
