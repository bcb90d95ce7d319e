"""Digits with Lightning, which starts the ranks itself: `python examples/torch_lightning.py --ranks 2`.

`torchrun --nproc-per-node 2 examples/torch_lightning.py` works, too. The engine is named in the strategy;
`--backend gloo` trains the same model without it.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from common import TRAINING, build_reader, digits, need_library
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="engine", help="of torch.distributed (default: engine)")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch", type=int, default=60, help="samples in a step, over all ranks")
parser.add_argument("--ranks", type=int, default=2, help="on this host; torchrun's own number comes first (default: 2)")
options = parser.parse_args()

need_library("lightning", "pip install lightning")
import lightning  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

here = int(os.environ.get("LOCAL_WORLD_SIZE", options.ranks))
hosts = int(os.environ.get("GROUP_WORLD_SIZE", 1))


class Reader(lightning.LightningModule):
    """Convolution and two dense layers, which print their loss after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build_reader()

    def on_train_start(self) -> None:
        """Note when the training begins."""
        self.began = time.perf_counter()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Return the loss of this rank's part of a batch."""
        chosen, right = batch
        self.loss = torch.nn.functional.cross_entropy(self.layers(chosen), right)
        return self.loss

    def on_train_epoch_end(self) -> None:
        """Print the loss of the last step over all ranks."""
        total = self.trainer.strategy.reduce(self.loss.detach(), reduce_op="mean").item()
        done = self.current_epoch + 1
        pace = done * TRAINING / (time.perf_counter() - self.began)
        self.print(f"epoch {done}: loss {total:.6f}, {pace:.0f} samples/s", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer that Lightning steps."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


pictures, labels = (torch.from_numpy(each) for each in digits())
labels = labels.long()
training = TensorDataset(pictures[:TRAINING], labels[:TRAINING])
torch.manual_seed(0)
model = Reader()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=here,
    num_nodes=hosts,
    strategy=DDPStrategy(process_group_backend=options.backend),
    max_epochs=options.epochs,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(training, options.batch // trainer.world_size, shuffle=True, drop_last=True))

if trainer.is_global_zero:
    with torch.no_grad():
        correct = (model.layers(pictures[TRAINING:]).argmax(1) == labels[TRAINING:]).float().mean()
    backend = dist.get_backend()
    print(f"{correct:.1%} of 297 new digits are read correctly by {trainer.world_size} ranks on {backend}")
dist.destroy_process_group()
