"""The torch binding on 1 to 4 ranks. The cases are in the modules below."""

from __future__ import annotations

from importlib import import_module

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch_cases
from ranks import RanksFailed, run_ranks

MODULES = (
    "torch_training",
    "torch_gradients",
    "torch_state",
    "torch_functions",
    "torch_options",
    "torch_alias",
    "torch_compression",
)
SIZES = (1, 2, 3, 4)
CASES = [(module, name) for module in MODULES if import_module(module) for name in torch_cases.registered[module]]
_jobs: dict[tuple[str, int], list[dict[str, str]] | RanksFailed] = {}


def failures(module: str, size: int) -> list[dict[str, str]]:
    """What failed of a module's cases, by rank; they run in one job, once."""
    if (module, size) not in _jobs:
        try:
            # A rank that is waited for in vain becomes an error in time for the report.
            done = run_ranks(size, torch_cases.run_cases, module, timeout=110, env={"ENGINE_STALL_LIMIT": "20"})
            _jobs[module, size] = done.values
        except RanksFailed as error:
            _jobs[module, size] = error
    found = _jobs[module, size]
    if isinstance(found, RanksFailed):
        raise found
    return found


@pytest.mark.parametrize(("module", "name"), CASES, ids=[name for _, name in CASES])
@pytest.mark.parametrize("size", SIZES)
def test_torch(module: str, name: str, size: int) -> None:
    wrong = [each[name] for each in failures(module, size) if name in each]
    assert not wrong, "\n".join(wrong)
