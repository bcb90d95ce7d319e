"""A small CNN learns to read handwritten digits, on any number of ranks.

python examples/digits.py
enginerun -np 2 python examples/digits.py
torchrun --nproc-per-node 2 examples/digits.py

Whatever the number of ranks, the model sees the same batches and its loss falls along the same curve.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import Log, many, stop
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import engine.torch

TRAINING = 1500  # of the 1797 pictures; the others are for the examination


class CNN(nn.Sequential):
    """Two convolutions and two dense layers for pictures of 8 x 8 pixels.

    It has no batch normalisation: that would make a sample's loss depend on which others are on its rank. And it is
    smooth: where a rectifier or a maximum switches, the last bit of a sum decides, and curves of different sums part.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
            nn.Tanh(),
            nn.Linear(128, 10),
        )


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures [1797, 1, 8, 8] from 0 to 1 and their labels, in an order that mixes the writers."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pictures = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return pictures[order], torch.tensor(data.target)[order]


def batch(step: int, size: int) -> torch.Tensor:
    """Which training pictures a step uses: for a step always the same ones, in every epoch each once."""
    epoch, place = divmod(step, TRAINING // size)
    order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(epoch))
    return order[place * size : (place + 1) * size]


@torch.no_grad()
def examine(model: nn.Module, pictures: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of pictures read correctly; each rank reads some of them. Collective."""
    rank, size = engine.rank(), engine.size()
    right = (model(pictures[rank::size]).argmax(dim=1) == labels[rank::size]).sum()
    return engine.allreduce(right, op=engine.Sum, name="right").item() / len(labels)


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    add = parser.add_argument
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=100, help="pictures in a step, over all ranks (default 100)")
    add("--compression", default="none", choices=["none", "fp16", "bf16", "fp8"], help="how gradients travel")
    add("--bucket-view", action="store_true", help="keep gradients in shared memory")
    add("--no-wrap", action="store_true", help="leave DistributedOptimizer out, to see that it is needed")
    add("--log", type=Path, help="write a line of JSON for each step to this file")
    return parser.parse_args()


def main() -> None:
    """Train, then examine."""
    args = options()
    engine.init()
    rank, size = engine.rank(), engine.size()
    if args.batch % size or args.batch > TRAINING:
        stop(f"a batch of {args.batch} of {TRAINING} pictures cannot be shared equally by {many(size, 'rank')}")

    torch.manual_seed(rank)  # Every rank invents a model of its own; that of rank 0 is the one to train.
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if not args.no_wrap:
        optimizer = engine.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            compression=getattr(engine.Compression, args.compression),
            gradient_as_bucket_view=args.bucket_view,
        )
    engine.torch.broadcast_parameters(model.state_dict(), root_rank=0)

    pictures, labels = digits()
    with Log("digits", args.steps, args.batch, args.log, active=rank == 0) as log:
        for step in range(args.steps):
            waited = engine.counters()["wait_ns"]
            mine = batch(step, args.batch)[rank::size]
            loss = functional.cross_entropy(model(pictures[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()  # Gradients are averaged over the ranks when it returns.
            optimizer.step()
            mean = engine.allreduce(loss.detach(), name="loss").item()
            log.step(mean, (engine.counters()["wait_ns"] - waited) / 1e9)
        share = examine(model, pictures[TRAINING:], labels[TRAINING:])
        log.say(f"{share:.1%} of {len(labels) - TRAINING} unseen digits read correctly by {many(size, 'rank')}")
    if not args.no_wrap:
        engine.torch.check_consistency(model.state_dict())  # Every rank holds the same model, to the bit.


if __name__ == "__main__":
    main()
