"""Ranks of jobs in which the groups of torch shrink, with and without the death of a rank.

    python -m tests.c10d.shrinking_jobs DIRECTORY RANK SIZE PROGRAM PORT SERVES

Ranks meet in a store that a process of its own serves, as under torchrun, so that any rank may die.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from .jobs import HOSTS

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def run_ranks(
    directory: Path,
    size: int,
    program: str,
    env: Mapping[str, str] | None = None,
    served_by_rank_0: bool = False,
    hosts: int = 1,
) -> tuple[list[int], list[Any], list[str]]:
    """Run a function of this module on ranks; return the ranks' exit codes, results and outputs.

    Several `hosts` are pretended, and have the ranks in turn.
    """
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        if served_by_rank_0:
            server.communicate()
        chosen = {"OMP_NUM_THREADS": "1", HOSTS: str(hosts)} | dict(env or {})
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ENGINE_", "OMPI_", "PMI"))}
        for rank in range(size):
            arguments = directory, rank, size, program, port, served_by_rank_0
            with open(directory / f"output.{rank}", "w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.c10d.shrinking_jobs", *map(str, arguments)],
                        env=kept | chosen,
                        cwd=ROOT,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in [*processes, server]:
            process.kill()
            process.wait()
    paths = [directory / f"result.{rank}" for rank in range(size)]
    results = [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]
    return codes, results, [(directory / f"output.{rank}").read_text() for rank in range(size)]


def check_calls(dist: Any, group: Any = None) -> list[Any]:
    """Return this rank's number in a group, its size, and results of collectives and messages in it."""
    import torch

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total = torch.full((5,), rank + 1.0)
    dist.all_reduce(total, group=group)
    told: list[Any] = [None] * size
    dist.all_gather_object(told, rank, group=group)
    large, other = torch.full((40_000,), float(rank)), torch.empty(40_000)
    works = (
        dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, large, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, other, group=group, group_peer=(rank - 1) % size),
            ]
        )
        if size > 1
        else []
    )
    for work in works:
        work.wait()
    dist.barrier(group)
    return [rank, size, total[0].item(), told, other[0].item() if size > 1 else rank]


def expect_calls(rank: int, size: int) -> list[Any]:
    """Return what `check_calls` returns on a rank of a group that works."""
    return [rank, size, size * (size + 1) / 2, list(range(size)), (rank - 1) % size]


def train(dist: Any, steps: int) -> list[float]:
    """Return the losses of a small model in DDP over the default group."""
    import torch

    torch.manual_seed(0)
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = module(torch.full((2, 4), dist.get_rank() + step + 1.0)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def average_gradient(optimizer: Any, model: Any, rank: int) -> float:
    """Return the gradient of a weight that the engine's own optimizer averages over ranks, which is their mean."""
    import torch

    optimizer.zero_grad()
    model(torch.full((1, 1), float(rank))).sum().backward()
    optimizer.step()
    return float(model.weight.grad)


def await_failure(dist: Any, group: Any = None) -> str:
    """Reduce until a rank's death is an error; return its text."""
    import torch

    while True:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except dist.DistBackendError as error:
            return str(error)


def die_at_once() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# ---- programs


def exclude_from_default(dist: Any, rank: int, size: int, store: Any) -> Any:
    """All ranks live; the excluded ones go on in the world that the others leave."""
    import torch

    import engine

    others = dist.new_group(list(range(size)))
    check_calls(dist)
    wrapped = torch.nn.Linear(1, 1)
    engine.torch.broadcast_parameters(wrapped.state_dict(), root_rank=0)
    optimizer = engine.torch.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), 0.1))
    averages = [average_gradient(optimizer, wrapped, rank)]
    excluded = [1, 2] if size == 4 else [1]
    if rank in excluded:
        text = await_failure(dist)
        dist.destroy_process_group()
        return text
    aborts, begun = size == 4, time.monotonic()
    work = dist.all_reduce(torch.ones(1), group=others, async_op=True) if aborts and rank == 0 else None
    group = dist.shrink_group(excluded, shrink_flags=int(aborts))
    assert group is dist.group.WORLD
    if work is not None:  # in which no other rank took part: its end has not waited for shutdown_timeout
        assert time.monotonic() - begun < SECONDS / 4
        try:
            work.wait()
        except dist.DistBackendError:
            work = None
        assert work is None
    found = [check_calls(dist), check_calls(dist, dist.new_group(list(range(dist.get_world_size()))))]
    told = ""
    try:
        others.allreduce([torch.ones(1)]).wait()
    except dist.DistBackendError as error:
        told = str(error)
    averages.append(average_gradient(optimizer, wrapped, engine.rank()))
    losses = train(dist, 2)
    return [*found, (engine.rank(), engine.size(), averages), told, losses]


def exclude_from_groups(dist: Any, rank: int, size: int, store: Any) -> Any:
    """A group shrinks, and again; the world and its other groups stay. One whose numbers differ is refused."""
    group = dist.new_group(list(range(size)))
    whole = dist.new_group(list(range(size)))
    turned = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    found = []
    if rank != size - 1:
        group = dist.shrink_group([size - 1], group)
        found += [check_calls(dist, group), dist.get_process_group_ranks(group)]
        if rank != 1:
            group = dist.shrink_group([1], group, shrink_flags=1)
            found += [check_calls(dist, group), dist.get_process_group_ranks(group)]
    told = ""
    if rank != 0:
        try:
            dist.shrink_group([size - 1], turned)
        except dist.DistBackendError as error:
            told = str(error)
    return [found, check_calls(dist, whole), check_calls(dist), check_calls(dist, turned)[:2], told]


def die_and_shrink(dist: Any, rank: int, size: int, store: Any) -> Any:
    """The second rank is killed; the others first try what cannot be, and then go on without it, and once more."""
    part = dist.new_group(list(range(size)))
    train(dist, 1)
    if rank == 1:
        die_at_once()
    texts = [await_failure(dist)]
    try:
        dist.shrink_group([1], part)
    except dist.DistBackendError as error:
        texts.append(str(error))
    dist.shrink_group([1], shrink_flags=1)
    found = [check_calls(dist), check_calls(dist, dist.new_group([0, 1])) if dist.get_rank() < 2 else None]
    losses = train(dist, 2)
    if rank == 3:
        die_at_once()
    if size == 4:
        texts.append(await_failure(dist))
        dist.shrink_group([2], shrink_flags=1)
        found.append(check_calls(dist))
    return [texts, found, losses]


def die_two_and_exclude_one(dist: Any, rank: int, size: int, store: Any) -> Any:
    """Two of four ranks die, and the others exclude one at first: an error names the other, and they try again."""
    if rank in (1, 2):
        die_at_once()
    texts = [await_failure(dist)]
    options = dist.distributed_c10d.C10DBackend.Options("engine", timedelta(seconds=15.0))
    try:
        dist.shrink_group([1], shrink_flags=1, pg_options=options)
    except dist.DistBackendError as error:
        texts.append(str(error))
    dist.shrink_group([1, 2], shrink_flags=1)
    return [texts, check_calls(dist)]


def lose_the_store(dist: Any, rank: int, size: int, store: Any) -> Any:
    """Rank 0 dies, whose process serves the store."""
    if rank == 0:
        die_at_once()
    await_failure(dist)
    try:
        dist.shrink_group([0], shrink_flags=1)
    except dist.DistBackendError as error:
        return str(error)
    return ""


def die_and_start_again(dist: Any, rank: int, size: int, store: Any) -> Any:
    """The ranks that are left destroy the default group, and make another, as any torch allows."""
    from torch.distributed import PrefixStore

    train(dist, 1)
    if rank == 1:
        die_at_once()
    texts = [await_failure(dist)]
    try:
        dist.shrink_group([1], shrink_flags=1)
    except (NotImplementedError, AttributeError) as error:
        texts.append(str(error))
        dist.destroy_process_group()
        left = [each for each in range(size) if each != 1]
        dist.init_process_group("engine", store=PrefixStore("again", store), rank=left.index(rank), world_size=size - 1)
    return [texts, check_calls(dist), train(dist, 1)]


def refuse_to_reconfigure(dist: Any, rank: int, size: int, store: Any) -> Any:
    assert not dist.distributed_c10d._supports_reconfigure()
    texts = []
    for call in (
        dist.distributed_c10d._get_reconfigure_handle,
        lambda: dist.distributed_c10d._reconfigure(1, ["a", "b"]),
    ):
        try:
            call()
        except (RuntimeError, NotImplementedError) as error:
            texts.append(str(error))
    return texts


def main(directory: str, number: str, count: str, program: str, port: str, serves: str) -> None:
    import torch.distributed as dist

    from engine.c10d import meeting

    rank, size, pretended = int(number), int(count), int(os.environ[HOSTS])
    if pretended > 1:
        meeting._describe_host = lambda: f"host {rank % pretended}"
    store = dist.TCPStore("127.0.0.1", int(port), size, serves == "True" and rank == 0, timedelta(seconds=SECONDS))
    dist.init_process_group("engine", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60.0))
    result = globals()[program](dist, rank, size, store)
    Path(directory, f"result.{rank}").write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
