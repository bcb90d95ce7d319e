"""Lightning with a small model: accumulated and clipped gradients, a metric over all ranks, and a checkpoint."""

from __future__ import annotations

from typing import Any

import lightning
import torch
import torch.distributed as dist
from compared import run_program, save_start
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(lightning.LightningModule):
    """Two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        chosen, right = batch
        loss = nn.functional.mse_loss(self.layers(chosen), right)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train() -> nn.Module:
    model = Regressor()
    save_start(model)
    samples = torch.randn(80, 16)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(process_group_backend=dist.get_backend()),
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        default_root_dir="checkpoints",
    )
    trainer.fit(model, DataLoader(TensorDataset(samples, samples.sin().sum(1, True)), 4, shuffle=True))
    assert trainer.world_size == dist.get_world_size() and trainer.callback_metrics["loss"].isfinite()
    return model


if __name__ == "__main__":
    run_program(train)
