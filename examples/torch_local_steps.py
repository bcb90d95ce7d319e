"""Train a model by local steps: ranks average what 20 steps have changed, instead of each gradient.

enginerun -np 2 python examples/torch_local_steps.py
"""

from __future__ import annotations

import argparse

import torch

import engine.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="inner steps of each rank")
    parser.add_argument("--every", type=int, default=20, help="inner steps between two synchronisations")
    parser.add_argument("--fragments", type=int, default=2, help="parts of the model, synchronised one after the other")
    parser.add_argument("--delay", type=int, default=2, help="steps for which a synchronisation may travel")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(1)
    inputs = torch.randn(2000, 10)
    targets = torch.sin(inputs).sum(1, keepdim=True)
    own = slice(hvd.rank(), None, hvd.size())  # each rank has data of its own
    model = torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    inner = torch.optim.AdamW(model.parameters(), lr=0.003)
    optimizer = hvd.OuterOptimizer(
        inner,
        model.named_parameters(),
        every=options.every,
        fragments=options.fragments,
        delay=options.delay,
        compression=hvd.Compression.bf16,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps, 0.0003)

    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(options.steps):
        drawn = torch.randint(len(inputs[own]), (32,), generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[own][drawn]), targets[own][drawn])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if hvd.rank() == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f} on this rank's batch")

    optimizer.synchronize_all()  # from here on all ranks have the same parameters
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
    if hvd.rank() == 0:
        synchronisations = options.steps // options.every
        print(f"{hvd.size()} ranks, {synchronisations} synchronisations of each parameter, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
