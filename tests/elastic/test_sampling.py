"""Samples of an epoch: each exactly once for any number of ranks, over worlds that fail and change."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.elastic import samplers, state
from engine.elastic.samplers import ElasticBatchSampler, ElasticSampler
from engine.elastic.sampling import TAILS, Cut, GlobalBatches, permute_samples
from engine.errors import NotInitializedError

from .training import Training

RUNS = 400


def test_the_order_is_the_same_everywhere() -> None:
    """The order is written out: hosts with other versions of NumPy, and earlier runs, must draw the same."""
    assert permute_samples(8, 0, 0, True).tolist() == permute_samples(8, 0, 0, True).tolist() == ORDER
    assert permute_samples(8, 0, 1, True).tolist() != ORDER != permute_samples(8, 1, 0, True).tolist()
    assert permute_samples(4, 0, 3, False).tolist() == [0, 1, 2, 3]


ORDER = [3, 7, 4, 0, 2, 6, 5, 1]


@pytest.mark.parametrize(("seed", "epoch", "named"), [(-1, 0, "seed"), (0, 2**32, "epoch")])
def test_a_seed_that_cannot_be_is_refused(seed: int, epoch: int, named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} is"):
        permute_samples(3, seed, epoch, True)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9), st.sampled_from(TAILS))
def test_a_cut_gives_each_sample_to_one_rank(length: int, done: int, ranks: int, tail: str) -> None:
    cut = Cut(length, min(done, length), ranks, tail)
    parts = [cut.list_positions(rank).tolist() for rank in range(ranks)]
    rest = list(range(cut.done, length))
    assert [len(part) for part in parts] == [cut.count_samples(rank) for rank in range(ranks)]
    given = sorted(position for part in parts for position in part)
    if tail == "uneven":
        assert given == rest
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    elif tail == "drop":
        assert set(given) <= set(rest) and len(rest) - len(given) < ranks
    else:
        assert set(given) == set(rest) and len(given) - len(rest) == cut.padded < ranks
    assert tail == "uneven" or len({len(part) for part in parts}) == 1


@given(st.integers(0, 50), st.integers(1, 9), st.sampled_from(TAILS), st.integers(0, 60))
def test_what_is_done_is_a_prefix(length: int, ranks: int, tail: str, taken: int) -> None:
    cut = Cut(length, length // 3, ranks, tail)
    trained = {position for rank in range(ranks) for position in cut.list_positions(rank)[:taken].tolist()}
    if taken < cut.rest // ranks:
        assert trained == set(range(cut.done, cut.count_done(taken)))
    else:
        assert trained >= set(range(cut.done, cut.count_done(taken)))


@given(st.integers(1, 50), st.integers(1, 9), st.sampled_from(TAILS), st.integers(1, 6), st.integers(1, 6))
def test_global_batches_are_the_same_for_any_ranks(length: int, batch: int, tail: str, some: int, others: int) -> None:
    batches = GlobalBatches(length, batch, tail)
    for step in range(batches.count_left(0)):
        both = [
            sorted(position for rank in range(ranks) for position in batches.list_positions(0, step, rank, ranks))
            for ranks in (some, others)
        ]
        assert both[0] == both[1] and (tail == "uneven" or len(both[0]) == batch)


def drawn(content: bytes) -> Callable[[int], int]:
    left = iter(content)
    return lambda bound: next(left, 1) % bound


def train(numbers: Iterable[int]) -> None:
    for number in numbers:
        draw = random.Random(number)
        try:
            Training(lambda bound, draw=draw: int(draw.random() * bound)).run()
        except AssertionError as error:
            raise AssertionError(f"training {number}: {error}") from error


def test_every_sample_counts_once_over_failures_and_changes() -> None:
    train(range(RUNS))


@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_every_sample_counts_once_in_drawn_trainings(content: bytes) -> None:
    """Same as over random trainings, but trainings that fail are shrunk."""
    Training(drawn(content)).run()


def _at_once(self: state.State, commit: bool) -> None:
    told, _ = self._peers.reduce_maximum((int(self._updated == self.world), 0))
    if commit:
        self.save()
    if told:
        raise state.HostsUpdatedInterrupt


def _always_anew(self: Any, epoch: int) -> None:
    self._begin_epoch(epoch, 0)


def _last(commits: Sequence[int | None]) -> int:
    return 0


MUTANTS: dict[str, tuple[Any, str, Any, str]] = {
    "rank 0 is the root": (state, "elect_root", _last, "committed steps are lost"),
    "interrupts and commits within accumulated passes": (state.State, "_check", _at_once, "lost"),
    "an epoch that is set again begins anew": (samplers._Sampler, "set_epoch", _always_anew, "twice"),
    "what this rank has taken is all that is done": (
        Cut,
        "count_done",
        lambda self, taken: min(self.done + taken, self.length),
        "twice",
    ),
    "a batch that was fetched counts": (
        ElasticSampler,
        "record_batch",
        lambda self, number, size: self._record((number + 2) * size),
        "lost",
    ),
    "a sampler keeps the rank that it had": (
        samplers._Sampler,
        "reset",
        lambda self: self._divide_rest(),
        "lost|twice",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_model_notices_a_rule_that_is_left_out(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement, noticed = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(AssertionError, match=noticed):
        train(range(RUNS))


# The samplers alone, in a world that does not change.


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_fixed_world_has_every_sample(size: int) -> None:
    ranks = [ElasticSampler("abcdefghij", shuffle=False, rank=rank, size=size) for rank in range(size)]
    parts = [list(sampler) for sampler in ranks]
    assert [len(sampler) for sampler in ranks] == [len(part) for part in parts]
    assert {index for part in parts for index in part} == set(range(10))
    assert sum(map(len, parts)) == 10 + ranks[0].padded


def test_a_new_epoch_has_another_order_and_every_sample() -> None:
    sampler = ElasticSampler(range(20), rank=0, size=1)
    first = list(sampler)
    for batch in range(5):
        sampler.record_batch(batch, 4)
    assert sampler.done == 20
    sampler.set_epoch(1)
    assert first != list(sampler) and sorted(first) == sorted(sampler)


def whole_epoch(samplers: Sequence[Any], batch: int) -> list[list[int]]:
    """Return the samples of each rank's loader in one epoch, recorded as in Horovod's scripts."""
    parts = []
    for sampler in samplers:
        steps = list(sampler)
        if isinstance(sampler, ElasticSampler):
            steps = [steps[start : start + batch] for start in range(0, len(steps), batch)]
        for number in range(len(steps)):
            sampler.record_batch(number, batch)
        parts.append([index for step in steps for index in step])
    return parts


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 5), st.sampled_from(TAILS), st.booleans(), st.booleans())
def test_an_epoch_that_is_over_begins_again(
    length: int, size: int, batch: int, tail: str, together: bool, sets: bool
) -> None:
    """The epoch restarts without `set_epoch`, and with the same number."""
    kind: Any = (lambda **more: ElasticBatchSampler(range(length), 4, **more)) if together else ElasticSampler
    more = {} if together else {"dataset": range(length)}
    ranks = [kind(tail=tail, rank=rank, size=size, **more) for rank in range(size)]
    first = whole_epoch(ranks, batch)
    assert sum(map(len, first)) >= length - (4 if together else size) + 1
    for _ in range(2):
        for sampler in ranks:
            if sets:
                sampler.set_epoch(0)
        assert whole_epoch(ranks, batch) == first


@pytest.mark.parametrize("kind", ["samples", "batches"])
def test_an_epoch_that_was_over_before_a_failure_is_not_trained_twice(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make: Any = ElasticSampler if kind == "samples" else (lambda data, **more: ElasticBatchSampler(data, 4, **more))
    sampler = make(range(8), rank=0, size=1)
    [*steps] = sampler
    for number in range(len(steps)):
        sampler.record_batch(number, 1)
    assert sampler.done == 8 and not caplog.records
    saved = sampler.state_dict()
    for each in (sampler, make(range(8), rank=0, size=1)):  # a survivor and a newcomer
        each.load_state_dict(saved)
        each.set_epoch(0)  # like a program that is called again, in the state's epoch
        assert list(each) == []
        assert "nothing is left of epoch 0: 8 of 8 samples count as trained" in caplog.text
        assert sorted(each) == sorted(steps), "the program went on, and wants another epoch"
        caplog.clear()


@pytest.mark.parametrize("kind", ["samples", "batches"])
def test_a_rank_without_a_share_of_what_is_left_does_not_warn(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Two samples are left, and other ranks have them."""
    make: Any = ElasticSampler if kind == "samples" else (lambda data, **more: ElasticBatchSampler(data, 4, **more))
    ranks = [make(range(10), tail="uneven", rank=rank, size=4) for rank in range(4)]
    for sampler in ranks:
        sampler.load_state_dict({"epoch": 0, "done": 8, "length": 10})
    assert [len(list(sampler)) for sampler in ranks] == [1, 1, 0, 0]
    assert not caplog.records


def test_what_is_left_of_an_epoch_is_not_begun_again() -> None:
    sampler = ElasticSampler(range(8), shuffle=False, rank=0, size=2)
    assert list(sampler) == [0, 2, 4, 6]
    sampler.record_batch(0, 2)
    sampler.set_epoch(0)
    assert list(sampler) == [4, 6] and len(sampler) == 2
    assert sampler.processed_num == 4 and sampler.processed_indices == {0, 1, 2, 3}
    sampler.record_batch(0, 2)
    assert sampler.processed_num == 8 and sampler.processed_indices == set(range(8))
    sampler.set_epoch(1)
    assert sampler.processed_num == 0 and sampler.processed_indices == set()


def test_an_iteration_without_samples_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert list(ElasticSampler([], rank=0, size=1)) == []
    assert list(ElasticBatchSampler(range(3), 4, tail="drop", rank=0, size=1)) == []
    assert [record.message.partition(":")[0] for record in caplog.records] == ["ElasticSampler", "ElasticBatchSampler"]


def test_training_goes_on_with_another_size() -> None:
    one, two = (ElasticSampler(range(12), rank=rank, size=2) for rank in range(2))
    trained = list(one)[:4] + list(two)[:4]
    for sampler in (one, two):
        sampler.record_batch(1, 2)
    saved = two.state_dict()
    assert saved == one.state_dict() == {"epoch": 0, "done": 8, "length": 12, "seed": 0, "shuffle": True}
    rest = []
    for rank in range(4):
        sampler = ElasticSampler(range(12), rank=rank, size=4)
        sampler.load_state_dict(saved)
        rest += list(sampler)
    assert sorted(trained + rest) == list(range(12))


@pytest.mark.parametrize("other", [{"seed": 9}, {"seed": 3, "shuffle": False}])
def test_what_is_left_of_an_epoch_goes_by_the_order_in_which_it_began(other: dict[str, Any]) -> None:
    """A checkpoint brings a run with another seed into the middle of an epoch."""
    first = ElasticSampler(range(12), seed=3, rank=0, size=1)
    trained = list(first)[:8]
    first.record_batch(1, 4)
    later = ElasticSampler(range(12), rank=0, size=1, **other)
    later.load_state_dict(first.state_dict())
    assert sorted(trained + list(later)) == list(range(12))
    older = {name: first.state_dict()[name] for name in ("epoch", "done", "length")}  # a state of an older version
    later.load_state_dict(older)
    assert sorted(trained + list(later)) == list(range(12))


def test_a_smaller_last_batch_is_recorded_right() -> None:
    sampler = ElasticSampler(range(10), rank=0, size=1)
    list(sampler)
    for batch, samples in enumerate((4, 4, 2)):
        sampler.record_batch(batch, samples)
        assert sampler.done == min(10, 4 * (batch + 1))


@pytest.mark.parametrize("kind", ["samples", "batches"])
def test_a_number_that_goes_on_counting_after_a_resume_is_refused(kind: str) -> None:
    make: Any = ElasticSampler if kind == "samples" else (lambda data, **more: ElasticBatchSampler(data, 4, **more))
    sampler = make(range(16), rank=0, size=1)
    for batch in range(2):
        sampler.record_batch(batch, 4)
    sampler.load_state_dict(sampler.state_dict())
    list(sampler)
    sampler.record_batch(0, 4)
    assert sampler.done == 12
    with pytest.raises(ValueError, match=r"batch 2 is behind the last one of this iteration, .* counts from 0"):
        sampler.record_batch(2, 4)
    assert sampler.done == 12
    sampler.record_batch(1, 4)
    assert sampler.done == 16


def test_indices_are_recorded_in_their_order() -> None:
    sampler = ElasticSampler(range(10), seed=1, rank=1, size=2)
    mine = list(sampler)
    sampler.record_indices(mine[:2])
    assert sampler.done == 4
    with pytest.raises(ValueError, match=r"not the next ones of this rank, such as \["):
        sampler.record_indices(mine[3:5])
    sampler.record_indices(mine[2:4][::-1])
    assert sampler.done == 8


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ElasticSampler(range(3), rank=3, size=3), "rank is 3 of 3"),
        (lambda: ElasticSampler(range(3), rank=3), "give both, or neither"),
        (lambda: ElasticSampler(range(3), tail="cut", rank=0, size=1), "tail is 'cut'"),
        (lambda: ElasticSampler(range(3), rank=0, size=1).record_batch(-1, 2), "batch -1"),
        (
            lambda: ElasticSampler(range(3), rank=0, size=1).load_state_dict({"epoch": 0, "done": 1, "length": 4}),
            "has 3",
        ),
        (lambda: ElasticBatchSampler(range(3), 2, rank=0, size=3), "too small for 3 ranks"),
        (lambda: ElasticBatchSampler(range(3), 0, rank=0, size=1), "has 0 samples"),
        (lambda: ElasticBatchSampler(range(3), 2**70, rank=0, size=1), "must have 1 to 2147483647"),
        (lambda: ElasticBatchSampler(range(3), 2, tail="x", rank=0, size=1), "tail is 'x'"),
        (lambda: ElasticBatchSampler(range(3), 2, rank=0, size=1).record_batch(-1), "count from 0"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_without_a_place_the_engine_is_asked() -> None:
    with pytest.raises(NotInitializedError):
        ElasticSampler(range(3))


@pytest.mark.parametrize(("tail", "sizes"), [("pad", [4, 4, 4]), ("drop", [4, 4]), ("uneven", [4, 4, 2])])
def test_global_batches_of_a_fixed_world(tail: str, sizes: list[int]) -> None:
    ranks = [ElasticBatchSampler(range(10), 4, tail=tail, rank=rank, size=3) for rank in range(3)]
    steps = [list(sampler) for sampler in ranks]
    assert [len(sampler) for sampler in ranks] == [len(step) for step in steps]
    whole = [sum(len(step[number]) for step in steps if number < len(step)) for number in range(len(sizes))]
    assert whole == sizes
    assert ranks[0].padded == (2 if tail == "pad" else 0)
    ranks[0].record_batch(0, 2)
    assert ranks[0].done == 4 and len(ranks[0]) == len(sizes)
    assert len(list(ranks[0])) == len(sizes) - 1
