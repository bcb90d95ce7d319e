"""The MXNet example gives equal results on two ranks and in one process."""

from __future__ import annotations

from pathlib import Path

from ..examples.test_examples import LAUNCH, curve
from .environment import PYTHON


def test_two_ranks_of_gluon_follow_the_curve_of_one_process(tmp_path: Path) -> None:
    options = ["--steps", 60, "--batch", 50]
    alone = curve([], "mxnet_digits", tmp_path, *options, python=PYTHON)
    together = curve([*LAUNCH, 2, "--"], "mxnet_digits", tmp_path, *options, python=PYTHON)
    assert len(alone) == 60 and alone[-1] < 0.5 * alone[0]
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-5
