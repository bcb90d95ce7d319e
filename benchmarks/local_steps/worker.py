"""Rank of the measurements of local steps: `worker.py PART SETTINGS`, with settings as JSON; rank 0 prints a result."""

from __future__ import annotations

import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import engine
import engine.torch as hvd

WIDTH, HEADS, LAYERS, CONTEXT, BYTES = 64, 4, 2, 64, 256
CLIP = 1.0


class TinyBlock(nn.Module):
    """Attention to what came before, then a small network for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.widen = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.project(self.norms[0](x)).view(batch, length, 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        result: torch.Tensor = x + self.widen(self.norms[1](x))
        return result


class TinyGPT(nn.Module):
    """Model of bytes with 0.14 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(TinyBlock() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.guess = nn.Linear(WIDTH, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1])
        result: torch.Tensor = self.guess(self.norm(self.blocks(self.bytes(text) + self.positions(places))))
        return result


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the source of the standard library as bytes: what is trained on, and what losses are measured on."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(module.read_bytes() for module in modules)), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def draw_batch(text: torch.Tensor, generator: torch.Generator, count: int) -> torch.Tensor:
    """Return random pieces of a text, [count, CONTEXT + 1]."""
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)].long()


def compute_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(batch[:, :-1]).reshape(-1, BYTES), batch[:, 1:].reshape(-1))


def build_outer(model: nn.Module, inner: torch.optim.Optimizer, settings: dict[str, Any]) -> hvd.OuterOptimizer:
    """Return the optimizer under test."""
    names = ("every", "fragments", "delay", "lr", "momentum", "mix")
    compression = getattr(engine.Compression, settings["compression"])
    options = {name: settings[name] for name in names if settings.get(name) is not None}
    return hvd.OuterOptimizer(inner, model.named_parameters(), compression=compression, **options)


def train_model(seed: int, local: bool, settings: dict[str, Any]) -> float:
    """Train a model, and return the loss of the final one on text that it has not seen."""
    torch.manual_seed(seed)
    model = TinyGPT()
    hvd.broadcast_parameters(model.state_dict(), 0)
    inner: Any = torch.optim.AdamW(model.parameters(), lr=settings["inner_lr"], betas=(0.9, 0.95))
    steps, warm = settings["steps"], settings["steps"] // 20 + 1
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        inner, lambda step: min(1.0, (step + 1) / warm) * max(0.1, 1.0 - step / steps)
    )
    optimizer: Any = hvd.DistributedOptimizer(inner)
    text, unseen = read_text()
    generator = torch.Generator().manual_seed(1000 * seed + engine.rank())
    for step in range(steps):
        if local and step == settings["synchronous_steps"]:
            optimizer = build_outer(model, inner.unwrap(), settings)
        optimizer.zero_grad()
        compute_loss(model, draw_batch(text, generator, settings["batch"])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
    if local:
        optimizer.synchronize_all()
    engine.check_consistency(dict(model.named_parameters()))
    with torch.no_grad():
        drawn = torch.Generator().manual_seed(7)
        return statistics.mean(compute_loss(model, draw_batch(unseen, drawn, 64)).item() for _ in range(8))


def measure_losses(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the final losses of both ways to train, by seed."""
    rows = []
    for seed in settings["seeds"]:
        rows.append({"seed": seed, "synchronous": train_model(seed, False, settings)})
        rows[-1]["local"] = train_model(seed, True, settings)
        if engine.rank() == 0:
            print(f"seed {seed}: {rows[-1]}", file=sys.stderr, flush=True)
    return {"losses": rows}


def measure_steps(settings: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of a step without communication, with local steps and with averaged gradients, by round.

    The computation of a step is a pause, as of a program that waits for an accelerator, so that what other processes of
    this machine do matters less.
    """
    side = 1000
    count = settings["parameters"] // side**2
    shapes = [nn.Parameter(torch.zeros(side, side)) for _ in range(count)]
    models = {name: nn.ParameterList([each.detach().clone() for each in shapes]) for name in VARIANTS}
    optimizers: dict[str, Any] = {name: torch.optim.SGD(each.parameters(), lr=1e-3) for name, each in models.items()}
    optimizers["local"] = build_outer(models["local"], optimizers["local"], settings)
    optimizers["synchronous"] = hvd.DistributedOptimizer(optimizers["synchronous"], check_parameters=False)
    for model in models.values():
        for each in model.parameters():
            each.grad = torch.full_like(each, 1e-3)

    def run_steps(name: str, steps: int) -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            end = time.perf_counter() + settings["compute"]
            time.sleep(max(0.0, end - time.perf_counter()))
            optimizers[name].step()
        return (time.perf_counter() - begun) / steps

    every = settings["every"]
    blocks: dict[str, Callable[[], float]] = {
        "alone": lambda: run_steps("alone", 2 * every),
        "local": lambda: run_steps("local", 2 * every),
        "synchronous": lambda: run_steps("synchronous", 1),
    }
    rows = []
    for number in range(settings["rounds"] + 1):
        row: dict[str, float] = {}
        for name, block in blocks.items():
            if name == "local":
                run_steps("local", every)  # so that as much is in flight at the beginning as at the end
            engine.barrier()
            row[name] = max(engine.allgather_object(block()))
            if name == "local":
                optimizers["local"].synchronize_all()  # so that nothing is in flight beside the other variants
        rows += [row] if number else []  # The first one creates buffers.
        if engine.rank() == 0:
            print(row, file=sys.stderr, flush=True)
    return {"steps": rows}


VARIANTS = ("alone", "local", "synchronous")
PARTS = {"loss": measure_losses, "steps": measure_steps}


def main() -> None:
    """Measure one part on this rank."""
    part, settings = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    engine.init()
    result = PARTS[part](settings)
    if engine.rank() == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
