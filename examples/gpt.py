"""A byte-level GPT learns the source of Python's standard library, on any number of ranks.

python examples/gpt.py
enginerun -np 2 python examples/gpt.py
torchrun --nproc-per-node 2 examples/gpt.py

Whatever the number of ranks, the model sees the same batches and its loss falls along the same curve.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from common import Log, many, stop
from torch import nn
from torch.nn import functional

import engine.torch

WIDTH, HEADS, LAYERS, CONTEXT = 192, 6, 6, 128  # 2.8 million parameters
BYTES = 256


class Block(nn.Module):
    """Attention to what came before, then a small network for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.queries_keys_values(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.think(self.norm2(x))


class GPT(nn.Module):
    """Predicts each next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.guess = nn.Linear(WIDTH, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1])
        return self.guess(self.norm(self.blocks(self.bytes(text) + self.positions(places))))


def library() -> torch.Tensor:
    """The standard library's own source: the bytes of its modules, one after the other."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(module.read_bytes() for module in modules)), dtype=torch.uint8)


def batch(text: torch.Tensor, step: int, size: int) -> torch.Tensor:
    """Pieces of the text, [size, CONTEXT + 1]: for a step always the same ones."""
    random = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT, (size, 1), generator=random)
    return text[starts + torch.arange(CONTEXT + 1)].long()


@torch.no_grad()
def write(model: GPT, start: str, length: int) -> str:
    """What the model thinks comes after `start`."""
    text = torch.tensor([list(start.encode())])
    random = torch.Generator().manual_seed(0)
    for _ in range(length):
        chances = functional.softmax(model(text[:, -CONTEXT:])[:, -1] / 0.8, dim=-1)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=random)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on the standard library's source.")
    add = parser.add_argument
    add("--steps", type=int, default=200)
    add("--batch", type=int, default=16, help="samples in a step, over all ranks (default 16)")
    add("--write", type=int, default=0, metavar="N", help="when trained, write N bytes of source")
    add("--bucket-view", action="store_true", help="keep gradients in shared memory")
    add("--no-wrap", action="store_true", help="leave DistributedOptimizer out, to see that it is needed")
    add("--log", type=Path, help="write a line of JSON for each step to this file")
    return parser.parse_args()


def main() -> None:
    """Train."""
    args = options()
    engine.init()
    rank, size = engine.rank(), engine.size()
    if args.batch % size:
        stop(f"a batch of {args.batch} cannot be shared equally by {many(size, 'rank')}")

    torch.manual_seed(rank)  # Every rank invents a model of its own; that of rank 0 is the one to train.
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    if not args.no_wrap:
        views = args.bucket_view
        optimizer = engine.DistributedOptimizer(optimizer, model.named_parameters(), gradient_as_bucket_view=views)
    engine.torch.broadcast_parameters(model.state_dict(), root_rank=0)

    text = library()
    with Log("gpt", args.steps, args.batch, args.log, active=rank == 0) as log:
        parameters = sum(each.numel() for each in model.parameters())
        log.say(f"{parameters / 1e6:.1f} million parameters, {len(text) / 1e6:.1f} MB of text, {many(size, 'rank')}")
        for step in range(args.steps):
            waited = engine.counters()["wait_ns"]
            mine = batch(text, step, args.batch)[rank::size]
            guesses = model(mine[:, :-1])
            loss = functional.cross_entropy(guesses.reshape(-1, BYTES), mine[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()  # Gradients are averaged over the ranks when it returns: clip them as ever.
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            mean = engine.allreduce(loss.detach(), name="loss").item()
            log.step(mean, (engine.counters()["wait_ns"] - waited) / 1e9)
        if args.write and rank == 0:
            log.say(write(model, "def ", args.write))
    if not args.no_wrap:
        engine.torch.check_consistency(model.state_dict())  # Every rank holds the same model, to the bit.


if __name__ == "__main__":
    main()
