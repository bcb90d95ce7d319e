"""The examples of docs/reference/compression.md run as printed."""

from __future__ import annotations

import re

import pytest

from ..documents import DOCS, read_programs
from ..ranks import run_ranks

pytest.importorskip("torch", reason="needs torch")

USE = """
import torch
hvd.init()
got = hvd.allreduce(torch.tensor([1e6, 1.0]), op=hvd.Average, compression=Clipped)
assert got.tolist() == [60000.0, 1.0], got
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not part of this copy")
def test_the_examples_run() -> None:
    coded, compressor, scheme = read_programs("how-to/compression.md")
    run_ranks(2, coded + "hvd.check_consistency(model.state_dict())\n")
    run_ranks(2, compressor + USE)
    done = run_ranks(2, scheme + "hvd.check_consistency(dict(model.named_parameters()))\n")
    (loss,) = re.findall(r"loss ([0-9.]+)", done.ranks[0].stdout)
    assert float(loss) < 0.5, loss
