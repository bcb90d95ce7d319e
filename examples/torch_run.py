# /// script
# requires-python = ">=3.11"
# dependencies = ["enginerun[run]", "torch>=2.2"]
#
# [tool.uv.sources]
# enginerun = { index = "wheels" }
#
# [[tool.uv.index]]
# name = "wheels"
# url = "../dist"
# format = "flat"
# explicit = true
# ///
"""A training that starts its own ranks: `uv run examples/torch_run.py`, or `python examples/torch_run.py`.

uv makes an environment from the block above. The engine comes from the wheels in dist/ (`make wheels`), and from no
index. Other programs that read the block, such as pipx, know no `tool.uv`, and would ask PyPI for a name that is not
ours.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import mse_loss

import engine.torch


def train(epochs: int) -> float:
    """Train on this rank's share of the data; return the loss over all of it."""
    engine.init()
    torch.manual_seed(0)
    x = torch.randn(1024, 20)
    y = x.sin().sum(dim=1, keepdim=True)
    share = slice(engine.rank(), None, engine.size())

    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer = engine.DistributedOptimizer(optimizer, model.named_parameters())
    engine.torch.broadcast_parameters(model.state_dict(), root_rank=0)

    for _ in range(epochs):
        for inputs, targets in zip(x[share].split(32), y[share].split(32), strict=True):
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return mse_loss(model(x), y).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on several ranks of this host.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    given = parser.parse_args()
    losses = engine.run(train, (given.epochs,), num_proc=given.ranks)
    print(f"{given.ranks} ranks, loss {losses[0]:.4f}, the same on all: {len({*losses}) == 1}")
