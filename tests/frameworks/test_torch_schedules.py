"""Learning rates for larger batches, and the place to split a compiled model."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from torch.optim import lr_scheduler

import engine.torch as hvd
from engine.errors import NotInitializedError


def optimizer(*rates: float) -> Any:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in rates]
    return torch.optim.SGD(groups, momentum=0.9)


def rates(owner: Any, scheduler: Any, steps: int) -> list[tuple[float, ...]]:
    """Return the learning rates of each group in each step."""
    found = []
    for _ in range(steps):
        found.append(tuple(group["lr"] for group in owner.param_groups))
        owner.step()
        scheduler.step()
    return found


def test_rules_of_scaling() -> None:
    assert hvd.scale_learning_rate(0.1, 8) == 0.8
    assert hvd.scale_learning_rate(0.1, 16, rule="sqrt") == 0.4
    assert hvd.scale_learning_rate(0.1, 0.5) == 0.05


def test_a_warm_up_is_linear_in_every_group() -> None:
    owner = optimizer(0.8, 0.08)
    found = rates(owner, hvd.gradual_warmup(owner, 4, 8), 6)
    expected = [0.1 + 0.7 * min(step, 4) / 4 for step in range(6)]
    assert found == [pytest.approx((lr, lr / 10)) for lr in expected]


@pytest.mark.parametrize("way", ["one after the other", "together"])
def test_a_warm_up_combines_with_the_schedulers_of_torch(way: str) -> None:
    owner = optimizer(0.8)
    warmup = hvd.gradual_warmup(owner, 4, 4)
    if way == "together":
        # The schedule goes on meanwhile, as in the paper, here in steps of three.
        scheduler: Any = lr_scheduler.ChainedScheduler([warmup, lr_scheduler.StepLR(owner, 3, 0.1)])
        expected = [(0.2 + 0.6 * min(step, 4) / 4) * 0.1 ** (step // 3) for step in range(8)]
    else:
        later = lr_scheduler.CosineAnnealingLR(owner, 4)
        scheduler = lr_scheduler.SequentialLR(owner, [warmup, later], milestones=[4])
        alone = optimizer(0.8)
        falling = rates(alone, lr_scheduler.CosineAnnealingLR(alone, 4), 4)
        expected = [0.2 + 0.6 * step / 4 for step in range(4)] + [lr for (lr,) in falling]
    assert [lr for (lr,) in rates(owner, scheduler, 8)] == pytest.approx(expected)


def test_a_warm_up_goes_on_from_its_state() -> None:
    owner, other = optimizer(0.8), optimizer(0.8)
    first, second = hvd.gradual_warmup(owner, 5, 4), hvd.gradual_warmup(other, 5, 4)
    rates(owner, first, 2)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(owner.state_dict())
    assert rates(other, second, 4) == rates(owner, first, 4)


def test_what_makes_no_sense_is_refused() -> None:
    owner = optimizer(0.1)
    for factor in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="positive"):
            hvd.scale_learning_rate(0.1, factor)
    with pytest.raises(ValueError, match="'linear', 'sqrt'"):
        hvd.scale_learning_rate(0.1, 2, rule="cubic")
    with pytest.raises(ValueError, match="steps is 1 or more, not 0"):
        hvd.gradual_warmup(owner, 0, 2)
    with pytest.raises(ValueError, match="1 or more"):
        hvd.gradual_warmup(owner, 3, 0.5)
    with pytest.raises(NotInitializedError):
        hvd.scale_learning_rate(0.1)
    assert owner.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="1 or more, not 0"):
        hvd.compile_backend("eager", 0)
    with pytest.raises(Exception, match="nobody"):
        hvd.compile_backend("nobody")
