"""Torchtitan's own trainer with a small Llama of its family: FSDP2, and tensor parallelism on the second dimension.

Torchtitan expects an accelerator. On a machine without one it gets the CPU in its place, with the few questions about
a device that torch.cpu does not answer. Texts and tokenizer are made here, so that nothing is downloaded.
"""

from __future__ import annotations

import json
import types
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from compared import make_tokens, run_program, save_start
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from torch.distributed.fsdp import FSDPModule

WORDS = 60


def import_for_cpu() -> None:
    """Import torchtitan with the CPU as its device, which its modules take over by name at their import."""
    cpu = types.ModuleType("cpu_of_torchtitan")
    cpu.__dict__.update(vars(torch.cpu))
    cpu.__dict__.update(
        set_device=lambda device: None,
        get_device_name=lambda device=None: "CPU",
        get_device_properties=lambda device: types.SimpleNamespace(total_memory=1 << 30),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda device: {},
        current_device=lambda: 0,
    )
    with (
        patch("torch._utils._get_available_device_type", lambda: "cpu"),
        patch("torch._utils._get_device_module", lambda kind: cpu),
    ):
        import torchtitan.train  # noqa: F401


def write_assets(directory: Path) -> None:
    """Write a tokenizer of the words w0 to w59."""
    vocabulary = {"<eos>": 0, "<bos>": 1, "<unk>": 2} | {f"w{number}": number + 3 for number in range(WORDS)}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.add_special_tokens(["<eos>", "<bos>"])
    directory.mkdir()
    inner.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))


def train(tensor_parallel: str) -> nn.Module:
    import_for_cpu()
    from datasets import Dataset
    from torchtitan.config import ConfigManager
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
    from torchtitan.train import Trainer

    assets = Path(f"assets.{dist.get_rank()}")
    write_assets(assets)
    rows = [{"text": " ".join(f"w{each}" for each in row)} for row in make_tokens(128, 40, WORDS)]
    DATASETS["made"] = DatasetConfig("here", lambda path: Dataset.from_list(rows), lambda row: row["text"])
    llama3_args["small"] = TransformerModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=WORDS + 4, multiple_of=16)
    config = ConfigManager().parse_args(
        [
            *("--model.flavor", "small", "--model.hf_assets_path", str(assets)),
            *("--training.dataset", "made", "--training.seq_len", "32", "--training.local_batch_size", "4"),
            *("--training.steps", "8", "--training.mixed_precision_param", "float32"),
            *("--lr_scheduler.warmup_steps", "2", "--optimizer.lr", "0.01", "--optimizer.implementation", "foreach"),
            *("--parallelism.tensor_parallel_degree", tensor_parallel),
            *("--metrics.log_freq", "2", "--debug.seed", "1"),
        ]
    )
    trainer = Trainer(config)
    (model,) = trainer.model_parts
    save_start(model)
    if dist.get_backend() == "gloo":  # which cannot scale while it sums, as torchtitan asks of it: by 1
        for each in model.modules():
            if isinstance(each, FSDPModule):
                each.set_force_sum_reduction_for_comms(True)
    trainer.train()
    trainer.close()
    return model


if __name__ == "__main__":
    run_program(train)
