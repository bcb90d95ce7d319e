"""Groups of torch that shrink, after a rank was killed too, by torch's `shrink_group` where it takes such backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.trace.flight import worlds_in
from engine.trace.reading import read

from .shrinking_jobs import expect_calls, run_ranks

torch = pytest.importorskip("torch")

from torch._C import _distributed_c10d as c10d  # noqa: E402

SINCE_2_14 = pytest.mark.skipif(
    not hasattr(c10d._DistributedBackendOptions, "process_group"), reason="torch before 2.14 takes no such backend"
)
DEAD = "RankDiedError: rank 1 died"


def _losses(size: int, steps: int) -> list[list[float]]:
    """Return the losses of each of `size` ranks, computed by one process."""
    from torch import nn

    torch.manual_seed(0)
    module = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    found: list[list[float]] = [[] for _ in range(size)]
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            loss = module(torch.full((2, 4), rank + step + 1.0)).square().mean()
            (loss / size).backward()
            found[rank].append(loss.item())
        optimizer.step()
    return found


@SINCE_2_14
@pytest.mark.parametrize(("size", "hosts"), [(3, 1), (4, 1), (4, 2)])
def test_default_group_shrinks_to_a_world_of_its_own(tmp_path: Path, size: int, hosts: int) -> None:
    codes, results, outputs = run_ranks(
        tmp_path, size, "exclude_from_default", {"ENGINE_SHUTDOWN_TIMEOUT": "60"}, hosts=hosts
    )
    assert codes == [0] * size, "\n".join(outputs)
    excluded = [1, 2] if size == 4 else [1]
    for rank in excluded:
        assert "RankLeftError" in results[rank]
    left = [each for rank, each in enumerate(results) if rank not in excluded]
    for rank, (first, again, own, told, losses) in enumerate(left):
        assert first == again == expect_calls(rank, len(left))
        # engine.rank() and engine.size(), and averages of ranks in the first world and in the second
        assert own == (rank, len(left), [(size - 1) / 2, (len(left) - 1) / 2])
        assert told.endswith("the group '1' was destroyed when the default group shrank: make it anew")
        assert losses == pytest.approx(_losses(len(left), 2)[rank])


@SINCE_2_14
@pytest.mark.parametrize("size", [3, 4])
def test_other_groups_shrink_and_the_world_stays(tmp_path: Path, size: int) -> None:
    codes, results, outputs = run_ranks(tmp_path, size, "exclude_from_groups")
    assert codes == [0] * size, "\n".join(outputs)
    first, second = list(range(size - 1)), [rank for rank in range(size - 1) if rank != 1]
    for rank, (found, whole, world, turned, told) in enumerate(results):
        expected = []
        for ranks in (first, second):
            expected += [expect_calls(ranks.index(rank), len(ranks)), ranks] if rank in ranks else []
        assert found == expected
        assert whole == world == expect_calls(rank, size)
        assert turned == [size - 1 - rank, size]
        assert ("torch takes them for ranks of the world" in told) == (rank != 0)


@SINCE_2_14
@pytest.mark.parametrize(("size", "hosts"), [(3, 1), (4, 1), (4, 2)])
def test_ranks_go_on_after_another_was_killed(tmp_path: Path, size: int, hosts: int) -> None:
    timelines = tmp_path / "timelines"
    codes, results, outputs = run_ranks(
        tmp_path, size, "die_and_shrink", {"ENGINE_TIMELINE": str(timelines)}, hosts=hosts
    )
    dead = {1} | ({3} if size == 4 else set())
    assert codes == [-9 if rank in dead else 0 for rank in range(size)], "\n".join(outputs)
    left = [rank for rank in range(size) if rank not in dead]
    for place, rank in enumerate(left):
        texts, (first, part, *later), losses = results[rank]
        assert DEAD in texts[0]
        assert "the group '1' cannot shrink, because its world has failed (rank 1 died" in texts[1]
        assert "shrink the default group, by shrink_group(ranks_to_exclude) without a group" in texts[1]
        assert first == expect_calls(place, size - 1)
        assert part == expect_calls(place, 2)
        assert losses == pytest.approx(_losses(size - 1, 2)[place])
        if size == 4:
            assert "RankDiedError: rank 2 died" in texts[2]  # the last one of the second world
            assert later == [expect_calls(place, 2)]
    worlds = worlds_in(timelines)
    assert [each.name for each in worlds] == ["world.2", "world.3"][: size - 2]
    notes: list[str] = []
    recordings = [each for each in read([worlds[-1]], notes) if not each.number]
    assert [each.rank for each in recordings] == list(range(len(left)))
    assert (timelines / "rank.0.trace.json").exists()  # of the first world


@SINCE_2_14
def test_a_rank_that_died_and_was_not_excluded_is_named(tmp_path: Path) -> None:
    codes, results, outputs = run_ranks(tmp_path, 4, "die_two_and_exclude_one")
    assert codes == [0, -9, -9, 0], "\n".join(outputs)
    for place, rank in enumerate((0, 3)):
        (_, text), found = results[rank]
        assert f"rank {rank} of the group has waited 15 s, the time-out of its group, for rank 2 to shrink" in text
        assert found == expect_calls(place, 2)


@SINCE_2_14
def test_the_end_of_torchs_store_is_told(tmp_path: Path) -> None:
    codes, results, outputs = run_ranks(tmp_path, 3, "lose_the_store", served_by_rank_0=True)
    assert codes == [-9, 0, 0], "\n".join(outputs)
    for text in results[1:]:
        assert "the group cannot shrink, because torch's store does not answer" in text


def test_ranks_that_are_left_make_another_default_group(tmp_path: Path) -> None:
    codes, results, outputs = run_ranks(tmp_path, 3, "die_and_start_again")
    assert codes == [0, -9, 0], "\n".join(outputs)
    no_call = "has no attribute 'shrink_group'"
    text = "accepts no backend that is written in Python" if hasattr(torch.distributed, "shrink_group") else no_call
    for place, rank in enumerate((0, 2)):
        (failure, *texts), found, losses = results[rank]
        assert DEAD in failure
        assert [text in each for each in texts] == [True] * bool(SINCE_2_14.args[0])
        assert found == expect_calls(place, 2)
        assert losses == pytest.approx(_losses(2, 1)[place])


@SINCE_2_14
def test_reconfiguring_is_refused(tmp_path: Path) -> None:
    codes, results, outputs = run_ranks(tmp_path, 2, "refuse_to_reconfigure")
    assert codes == [0, 0], "\n".join(outputs)
    for texts in results:
        assert len(texts) == 2
        assert all("the backend 'engine' does not reconfigure a group" in text for text in texts)
