"""Ranks that diverge in training with torch: which rank is named, and for which operation."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch", reason="needs torch")

from ..ranks import run_ranks
from ..waiting import measured

pytestmark = pytest.mark.timeout(360)  # jobs that may run three times

ONE_IN_EVALUATION = """
import torch, engine, engine.torch as hvd
from tests.waiting import be_late, until_files
engine.init()
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
net = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.ModuleDict({"body": net}))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
net.train(engine.rank() != 1)
open(f"here.{engine.rank()}", "w").close()
until_files("here.0", "here.1", "here.2")
be_late(engine.rank() == 1)  # Both wait for each other: who waits longer names the other.
net["body"](torch.ones(3, 4)).sum().backward()
"""


@pytest.mark.slow
def test_a_rank_that_normalises_alone_is_named_with_the_layer() -> None:
    def named() -> None:
        done = run_ranks(3, ONE_IN_EVALUATION, check=False, env={"ENGINE_STALL_LIMIT": "3"})
        assert done.code != 0
        for rank in (0, 2):
            text = done.ranks[rank].stderr
            told = "rank 1 stalled: ranks 0, 2 wait for 'sync_batch_norm.0.body.1', which rank 1 has not submitted"
            assert told in text, done

    measured(named)  # a rank without a processor for that long counts as late


UNEVEN_STEPS = """
import sys, torch, engine, engine.torch as hvd
engine.init()
steps, meeting = {steps}[engine.rank()], "{meeting}"
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
for _ in range(steps):
    optimizer.zero_grad()
    net(torch.ones(3, 8)).sum().backward()
    optimizer.step()
engine.barrier() if meeting == "barrier" else hvd.allreduce(torch.ones(1), name=meeting)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("steps", "meeting", "ended", "ends"),
    [
        ([10, 12], "metric", "rank 0 waits for 'metric', which rank 1 has", "rank 1 waits for {}, which rank 0 has"),
        (
            [12, 11, 12],
            "barrier",
            "rank 1 waits for 'barrier.noname.0', which ranks 0, 2 have",
            "ranks 0, 2 wait for {}, which rank 1 has",
        ),
    ],
)
def test_ranks_with_different_numbers_of_steps_are_told_both_halves(
    steps: list[int], meeting: str, ended: str, ends: str
) -> None:
    program = UNEVEN_STEPS.format(steps=steps, meeting=meeting)
    one_of_them = r"'gradient\.[01]\.(bias|weight)' and 3 more"
    halves = [re.escape(f"{ended} not submitted"), f"{ends.format(one_of_them)} not submitted"]
    hint = re.escape(
        ". Did ranks make different numbers of steps? Give each as many batches, or let each call engine.join()"
    )
    story = "(" + "|".join(half + "; " + other + hint for half, other in (halves, halves[::-1])) + ")"

    def told() -> None:
        env = {"ENGINE_STALL_WARNING": "1", "ENGINE_STALL_LIMIT": "3"}
        done = run_ranks(len(steps), program, check=False, env=env)
        assert done.code != 0
        assert re.search(r"\n  " + story, done.ranks[0].stderr.partition("Traceback")[0]), done
        for rank in done.ranks:
            assert re.search("stalled: " + story, rank.stderr), done

    measured(told)  # the report may omit ranks that have waited for less than the limit
