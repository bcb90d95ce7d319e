"""Hugging Face Trainer with a small GPT-2: accumulated and clipped gradients, and an evaluation."""

from __future__ import annotations

from compared import make_tokens, run_program, save_start
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def train() -> nn.Module:
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    save_start(model)
    samples = [{"input_ids": each, "labels": each} for each in make_tokens(56, 16, 64)]
    options = TrainingArguments(
        "checkpoints",
        use_cpu=True,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=0.01,
        max_grad_norm=0.5,
        eval_strategy="epoch",
        save_strategy="epoch",
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(model, options, train_dataset=samples[:40], eval_dataset=samples[40:])
    assert trainer.accelerator.num_processes == 2 and trainer.args.parallel_mode.value == "distributed"
    trainer.train()
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    return model


if __name__ == "__main__":
    run_program(train)
