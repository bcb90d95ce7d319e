"""TRL's SFTTrainer with a small Llama, and a tokenizer and texts that are made here."""

from __future__ import annotations

from compared import make_tokens, run_program, save_start
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = 60


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0 to w59."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number + 3 for number in range(WORDS)}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def train() -> nn.Module:
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=WORDS + 3,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config)
    save_start(model)
    texts = [
        " ".join(f"w{each}" for each in row[: 6 + number % 10]) for number, row in enumerate(make_tokens(48, 16, WORDS))
    ]
    options = SFTConfig(
        "checkpoints",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=0.01,
        max_length=32,
        logging_steps=2,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
    trainer = SFTTrainer(
        model, options, train_dataset=Dataset.from_list([{"text": each} for each in texts]), processing_class=tokenizer
    )
    trainer.train()
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    return model


if __name__ == "__main__":
    run_program(train)
