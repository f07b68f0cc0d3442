"""Pretrain RETRO: a GPT whose tokens attend to neighbors of earlier chunks of their text."""

from __future__ import annotations

from megatron.training.process import early_sigterm  # before the imports that take seconds

if __name__ == "__main__":
    early_sigterm.begin_imports()

# isort: split
from megatron.core.enums import ModelType
from megatron.training.training import pretrain
from pretrain_gpt import forward_step as forward_step
from pretrain_gpt import model_provider as model_provider
from pretrain_gpt import train_valid_test_datasets_provider

if __name__ == "__main__":
    early_sigterm.end_imports()
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"model_kind": "retro", "tokenizer_type": "GPT2BPETokenizer"},
    )
