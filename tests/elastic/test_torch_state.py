"""The state of torch: tensors stay in place, values are restored, and an incomplete sync leaves complete commits."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.elastic.copies import count_bytes
from engine.elastic.state import HostsUpdatedInterrupt
from engine.torch.elastic import TorchState

from .lockstep import PeerGoneError, Rank, together

RANKS = 3


class Training:
    """A model with tied weights, two optimizers, a scheduler, and a tensor of the program."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
        self.model[2].weight = self.model[0].weight
        self.model.register_buffer("empty", torch.zeros(0, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.peers = Rank()
        self.state: Any = TorchState(
            self.model, self.optimizer, scheduler=self.scheduler, average=torch.zeros(2, dtype=torch.bfloat16), epoch=0
        )
        self.state._peers = self.peers

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 3)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.state.average += 1
        self.state.epoch += 1

    def shown(self) -> Any:
        tensors = [*self.model.state_dict().values(), self.state.average]
        optimizer = self.optimizer.state_dict()
        for entries in optimizer["state"].values():
            tensors += entries.values()
        return (
            [each.tolist() for each in tensors],
            optimizer["param_groups"],
            self.scheduler.last_epoch,
            self.state.epoch,
        )


def addresses(training: Training) -> list[int]:
    state = [each for entries in training.optimizer.state.values() for each in entries.values()]
    return [each.data_ptr() for each in (*training.model.state_dict().values(), *state)]


def sync(trainings: list[Training], gone: Any = lambda rank, number: False) -> list[Any]:
    return together([each.peers for each in trainings], [each.state.sync for each in trainings], gone)


def test_everything_comes_back_to_where_it_was() -> None:
    training = Training(0)
    training.step()
    training.state.save()
    kept, places = copy.deepcopy(training.shown()), addresses(training)
    view = training.model[0].weight.data.view(-1)
    for _ in range(3):
        training.step()
        assert training.shown() != kept
        training.state.restore()
        assert training.shown() == kept and addresses(training) == places
    assert view.tolist() == training.model[2].weight.flatten().tolist()


def test_what_is_kept_shares_nothing_with_what_was_given_back() -> None:
    training = Training(0)
    training.step()
    training.state.save()
    training.optimizer.state.clear()  # so that new tensors are made from the commit
    training.state.restore()
    kept = copy.deepcopy(training.shown())
    training.step()
    training.step()
    training.state.restore()
    assert training.shown() == kept


def test_tied_weights_are_kept_once() -> None:
    weight = torch.nn.Linear(100, 100, bias=False)
    other = torch.nn.Linear(100, 100, bias=False)
    other.weight = weight.weight
    assert count_bytes(TorchState(torch.nn.Sequential(weight, other))._held.values.places) == 40_000


def test_a_third_commit_allocates_nothing() -> None:
    training = Training(0)
    training.step()
    memories = []
    for _ in range(6):
        training.state.save()
        memories.append(training.state._held.values.memory)
    assert memories[0] is memories[2] is memories[4] and memories[1] is memories[3] is memories[5]
    assert memories[0] is not memories[1]


def test_a_fresh_optimizer_gets_the_state_that_it_lacks() -> None:
    trainings = [Training(rank) for rank in range(RANKS)]
    trainings[1].step()
    trainings[1].state.save()
    assert sync(trainings) == [None] * RANKS
    assert [each.shown() for each in trainings] == [trainings[1].shown()] * RANKS
    assert trainings[0].optimizer.state_dict()["state"][0]["step"] == 1


def test_a_sync_of_what_all_hold_sends_numbers_alone() -> None:
    trainings = [Training(rank) for rank in range(RANKS)]
    assert sync(trainings) == [None] * RANKS
    assert len(trainings[0].peers.answers) == 3  # the numbers, the other values, the tensors
    assert sync(trainings) == [None] * RANKS
    assert len(trainings[0].peers.answers) == 1


@pytest.mark.parametrize("holder", range(RANKS))
def test_a_sync_that_ends_at_any_message_leaves_whole_commits(holder: int) -> None:
    """Each rank dies at each message; the others notice at once or at the next one, and sync again."""
    for victim in range(RANKS):
        for at in range(3):
            for late in range(RANKS):
                _end_a_sync(holder, victim, at, late)


def _end_a_sync(holder: int, victim: int, at: int, late: int) -> None:
    trainings = [Training(rank) for rank in range(RANKS)]
    assert sync(trainings) == [None] * RANKS
    old = trainings[0].shown()
    trainings[holder].step()
    trainings[holder].state.save()
    new = trainings[holder].shown()
    case = f"holder {holder}, victim {victim} at {at}, {late} hears late"
    errors = sync(trainings, lambda rank, number: number >= at + (rank == late != victim))
    assert isinstance(errors[victim], PeerGoneError), case
    left = [each for rank, each in enumerate(trainings) if rank != victim]
    for each in left:
        number = each.state.committed
        each.state.restore()
        assert each.shown() == (old if number == 0 else new), case
    kept = any(each.state.committed == 1 for each in left)
    assert sync(left) == [None] * len(left), case
    assert [each.shown() for each in left] == [new if kept else old] * len(left), case


def test_gradients_of_a_step_that_was_not_made_are_forgotten_at_a_reset() -> None:
    training = Training(0)
    training.model(torch.randn(5, 3)).sum().backward()
    training.state.on_reset()
    assert all(each.grad is None for each in training.model.parameters())


class Alone(Rank):
    """Peers of the only rank."""

    def reduce_maximum(self, values: Any) -> Any:
        return list(values)


def test_commits_and_interrupts_wait_for_passes_in_hand() -> None:
    """A check follows each batch, and a step has four passes."""
    training = Training(0)
    group = SimpleNamespace(touched=False)
    training.optimizer._engine = SimpleNamespace(reducer=SimpleNamespace(group=group))  # type: ignore[attr-defined]
    training.state._peers = Alone()
    training.state.on_hosts_updated(0)
    for batch in range(3):
        group.touched = True
        training.state.epoch = batch
        training.state.commit()
        assert training.state.committed is None and training.state.owed
    group.touched = False
    with pytest.raises(HostsUpdatedInterrupt):
        training.state.check_host_updates()
    assert training.state.committed == 0


def test_an_extra_state_is_a_copy() -> None:
    class Extra(torch.nn.Module):
        held = torch.zeros(2)

        def get_extra_state(self) -> Any:
            return {"held": self.held}

        def set_extra_state(self, state: Any) -> None:
            self.held = state["held"]

    module = Extra()
    state: Any = TorchState(module)
    for _ in range(3):
        module.held += 1
        state.restore()
        assert module.held.tolist() == [0, 0]


def test_a_module_that_makes_what_it_is_given_its_own_does_not_change_the_commit() -> None:
    class Queue(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(3))

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            self.queue = state_dict[f"{prefix}queue"]

    module = torch.nn.Sequential(Queue(), torch.nn.Linear(2, 2))
    state: Any = TorchState(module)
    for _ in range(3):
        state.restore()
        module[0].queue += 1
        assert module[0].queue.tolist() == [1, 1, 1]


def test_a_step_that_ends_between_unscaling_and_update_is_forgotten() -> None:
    """Otherwise the scaler takes the next step's gradients for unscaled, and the optimizer applies them unchanged."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    state: Any = TorchState(model, optimizer, scaler=scaler)
    weights = []
    for ended in (False, True):
        if ended:
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.unscale_(optimizer)
        state.restore()
        state.on_reset()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        weights.append(model.weight.tolist())
    assert weights[0] == weights[1]


def test_lbfgs_goes_on_as_it_would_have() -> None:
    torch.manual_seed(3)
    model, rows = torch.nn.Linear(3, 1), torch.randn(10, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, history_size=2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        return loss

    state: Any = TorchState(model, optimizer)
    optimizer.step(closure)
    state.save()
    ends = []
    for _ in range(3):
        state.restore()
        for _ in range(3):
            optimizer.step(closure)
        ends.append(model.weight.tolist())
    assert ends[0] == ends[1] == ends[2]


def test_what_cannot_be_taken_over_is_named() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: Any = TorchState(model, optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="parameter groups") as raised:
        state.restore()
    assert "'optimizer'" in "".join(raised.value.__notes__)
