"""Pretrain Mamba and hybrid models: samples, batches and loss are GPT's, the model is another."""

from __future__ import annotations

from megatron.training.process import early_sigterm  # before the imports that take seconds

if __name__ == "__main__":
    early_sigterm.begin_imports()

# isort: split
import pretrain_gpt
from megatron.core.config.errors import ConfigError
from megatron.core.enums import ModelType
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.training.global_vars import get_run
from megatron.training.models.registry import model_kind_of
from megatron.training.training import pretrain
from pretrain_gpt import forward_step as forward_step
from pretrain_gpt import loss_func as loss_func
from pretrain_gpt import train_valid_test_datasets_provider


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> MambaModel:
    """This rank's stage of the model.  Raises ConfigError in a script for another kind of model."""
    kind = model_kind_of(get_run().config)
    if not kind.is_hybrid:
        raise ConfigError(
            f"pretrain_mamba.model_provider: the flags describe {kind.title}; give "
            "--is-hybrid-model or --hybrid-override-pattern, or call initialize_megatron() with "
            'args_defaults={"model_kind": "mamba"}'
        )
    model: MambaModel = pretrain_gpt.model_provider(pre_process, post_process, vp_stage)
    return model


if __name__ == "__main__":
    early_sigterm.end_imports()
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"model_kind": "mamba", "tokenizer_type": "GPT2BPETokenizer"},
    )
