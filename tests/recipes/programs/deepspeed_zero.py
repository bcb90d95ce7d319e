"""DeepSpeed with a small GPT-2, whose optimizer's state (ZeRO 1) and gradients, too (ZeRO 2), are in parts on ranks."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from compared import make_tokens, run_program, save_start
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


def train(stage: str) -> nn.Module:
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    save_start(model)
    options = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(stage)},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=options)
    assert engine.zero_optimization_stage() == int(stage)
    own = make_tokens(64, 16, 64)[dist.get_rank() :: dist.get_world_size()]
    for first in range(0, len(own), 4):
        tokens = own[first : first + 4]
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    return model


if __name__ == "__main__":
    run_program(train, lambda backend: deepspeed.init_distributed(dist_backend=backend))
