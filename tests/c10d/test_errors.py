"""Exceptions of torch that stand for errors of the engine."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

from engine.c10d.work import translate_error
from engine.errors import RankDiedError, RankStalledError


def test_a_stalled_rank_is_told_as_a_timeout_that_has_passed() -> None:
    """Programs tell time-outs from failures by this word, which errors of gloo and NCCL have, too."""
    cause = RankStalledError("rank 1 stalled: rank 0 waits for 'x', which rank 1 has not submitted", 1)
    error = translate_error(cause)
    assert re.search(" (Timed out|closed|timeout) ", str(error))
    assert str(error).endswith("has passed: RankStalledError: " + str(cause))
    assert error.__cause__ is cause


def test_a_dead_rank_is_not_told_as_a_timeout() -> None:
    assert str(translate_error(RankDiedError("rank 1 died", 1))) == "engine: RankDiedError: rank 1 died"
