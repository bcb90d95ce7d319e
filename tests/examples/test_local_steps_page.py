"""The program of docs/how-to/local-steps.md runs as printed."""

from __future__ import annotations

import pytest

from ..documents import DOCS, read_programs
from ..ranks import run_ranks

pytest.importorskip("torch", reason="needs torch")


@pytest.mark.slow
@pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not part of this copy")
def test_the_program_runs() -> None:
    program = read_programs("how-to/local-steps.md")[0]
    done = run_ranks(2, program + "hvd.check_consistency(dict(model.named_parameters()))\nprint(optimizer.steps)\n")
    (first, own, steps), other = (rank.stdout.split() for rank in done.ranks)
    assert (first, steps) == ("0", "200") and other == ["1", own, "200"]
    assert float(own) == pytest.approx(10, abs=1.5)  # Each weight shall become 1.
