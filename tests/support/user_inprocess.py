"""A training script with the calls of Megatron-LM's pretrain_gpt.py for in-process restart."""

from __future__ import annotations

from megatron.core.enums import ModelType
from megatron.training import inprocess_restart, pretrain
from pretrain_gpt import forward_step, model_provider, train_valid_test_datasets_provider

if __name__ == "__main__":
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"model_kind": "gpt", "tokenizer_type": "GPT2BPETokenizer"},
        store=store,
    )
