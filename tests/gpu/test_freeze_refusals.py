"""Refusals of `freeze()` on the stand-ins: each text says what prevents it, and what to do instead."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ..standins import build
from .jobs import Job

pytest.importorskip("torch", reason="needs torch")

Told = dict[str, str]
STALE = re.escape("; zero_grad() of a frozen optimizer keeps gradients where they are")

REFUSED = {
    "process set": r"EngineError: .* has a process set, which cannot be frozen: use one of all ranks",
    "minimum": r"EngineError: .* the operation is Min, which cannot be frozen: use Average or Sum",
    "maximum": r"EngineError: .* the operation is Max, which cannot be frozen: use Average or Sum",
    "product": r"EngineError: .* the operation is Product, which cannot be frozen: use Average or Sum",
    "adasum": r"EngineError: .* op=Adasum cannot be frozen: use Average or Sum",
    **dict.fromkeys(
        ("powersgd", "own compressor", "tuned"),
        r"EngineError: .* compression is a scheme, the program's own, or tuned, which cannot be frozen: "
        r"use Compression\.none, fp16 or bf16",
    ),
    "several passes": r"EngineError: .* backward_passes_per_step is not 1, .*: run all passes but the last in "
    r"optimizer\.no_sync\(\)",
    "ordered sums": r"EngineError: .* device_sums is ordered, which cannot be frozen: use device_sums=nccl",
    "sparse": r"UnsupportedTensorError: .* gradient of '\S+\.weight' is sparse, so its size changes: make it dense, as "
    r"Embedding\(sparse=False\)",
    "no gradients": r"EngineError: .* no parameter has a gradient yet: run a step first, and keep its gradients by "
    r"zero_grad\(set_to_none=False\) before freeze\(\)" + STALE,
    "other order": r"UnsupportedTensorError: .* gradient of '\S+\.weight' has gaps, or is not in the order of the "
    r"parameter: make it contiguous",
    "host": r"UnsupportedTensorError: .* gradient of '\S+\.weight' is in the host's memory, and only those on a GPU "
    r"can be frozen: move the model there",
    "before the first step": r"EngineError: .* run a step first, and then zero_grad\(set_to_none=False\)",
    "within no_sync": r"EngineError: .* inside no_sync\(\); call it after the block, between two steps",
    "within backward": r"EngineError: .* in the middle of a backward pass; call it between two steps",
    "in a child": r"ForkedError: the engine was initialised in process \d+, and this is its forked child \d+\. .*",
    "after shutdown": r"NotInitializedError: call engine\.init\(\) first; .* engine\.shutdown\(\) has",
}


def run(program: str, libraries: Path, registered: Path, where: Path) -> list[Told]:
    """Run a program of refusal_programs.py on two ranks, and return what each printed, by case."""
    job = Job(libraries, where, 2, program, str(registered), module="refusal_programs", one_thread=1)
    lines = [[line for line in text.splitlines() if line.startswith("{")] for text in job.succeeds()]
    return [{case: text for line in each for case, text in json.loads(line).items()} for each in lines]


@pytest.fixture(scope="module")
def told(libraries: Path, registered: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """Texts that two ranks got in one job."""
    return run("everything", libraries, registered, tmp_path_factory.mktemp("refusals"))


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", REFUSED)
def test_refusal(case: str, told: list[Told]) -> None:
    """All ranks are told, and go on: the other cases follow in the same world."""
    for rank in told:
        assert re.fullmatch(REFUSED[case], rank[case])
        assert "freeze()" in rank[case] or case in ("in a child", "after shutdown")


def test_every_case_is_looked_at(told: list[Told]) -> None:
    assert all(list(rank) == list(REFUSED) for rank in told)


@pytest.mark.slow
def test_nccl_that_is_too_old(libraries: Path, registered: Path, tmp_path: Path) -> None:
    """Frozen passes need a communicator of their own. The world goes on without one."""
    for rank in run("old", build(tmp_path / "old", 22203), registered, tmp_path):
        assert re.fullmatch(
            r"DeviceError: NCCL 2\.22\.3 cannot end several communicators at once, .*: install 2\.24\.0 or newer, "
            r"or do not freeze\(\)",
            rank["old NCCL"],
        )


@pytest.mark.slow
def test_rank_that_has_joined(libraries: Path, registered: Path, tmp_path: Path) -> None:
    """The joined rank takes part in no freeze, and the others name it."""
    first, last = run("joined", libraries, registered, tmp_path)
    assert re.fullmatch(
        r"EngineError: rank 1 has joined, and freezes nothing: call freeze\(\) before join\(\)", first["joined"]
    )
    assert not last


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_dtypes_that_are_no_floats(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd makes no integer gradients, but a program may set them."""
    import torch

    from engine.errors import UnsupportedTensorError
    from engine.torch import freezing

    monkeypatch.setattr(freezing, "is_on_gpu", lambda _tensor: True)
    parameter: Any = SimpleNamespace(grad=torch.ones(3, dtype=getattr(torch, dtype)))
    wanted = (
        rf"gradient of 'x' is of torch\.{dtype}, and only float16, .* can be frozen: do not freeze\(\) this optimizer"
    )
    with pytest.raises(UnsupportedTensorError, match=wanted):
        freezing._expect_freezable("x", parameter, parameter.grad.device)
