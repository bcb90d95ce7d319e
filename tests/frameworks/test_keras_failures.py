"""What goes wrong on one rank in the middle of `fit` is told on the others, at once and in the engine's words."""

from __future__ import annotations

import pytest

pytest.importorskip("keras", reason="needs Keras")

from ..ranks import run_ranks
from . import keras_programs_called
from .backends import BACKENDS, environment

TEXTS = {
    "mismatch": "MismatchError: ",
    "left": "RankLeftError: rank 1 ",
    "aborted": "enough of it",
    "died": "RankDiedError: rank 1 ",
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_failure_is_told_at_once(backend: str) -> None:
    finished = run_ranks(2, keras_programs_called.failures, check=False, env=environment(backend))
    found = finished.values[0]
    assert found is not None and finished.code != 0, finished
    assert len(found["goes on"]) == 1
    for kind, expected in TEXTS.items():
        text, seconds = found[kind]
        assert expected in text, (kind, text)
        assert seconds < 5.0, (kind, seconds, text)
