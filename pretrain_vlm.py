"""Pretrain a vision-language model: a micro-batch; the rest is that of other kinds."""

from __future__ import annotations

from megatron.training.process import early_sigterm  # before the imports that take seconds

if __name__ == "__main__":
    early_sigterm.begin_imports()

# isort: split
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core.enums import ModelType
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.training.data.batch import next_batch
from megatron.training.global_vars import get_run
from megatron.training.models.registry import implementation_of
from megatron.training.runtime.setup import build_stage
from megatron.training.training import pretrain
from pretrain_gpt import loss_func, stimer, train_valid_test_datasets_provider


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> LLaVAModel:
    """This rank's stage of the model."""
    return build_stage(
        get_run(), pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
    )


def forward_step(data_iterator: Iterator[Any] | None, model: nn.Module) -> tuple[Tensor, Any]:
    """Token losses of one micro-batch, and the function that turns them into the loss.

    Stages before the last return hidden states in their place.  examples/mimo/train.py uses it.
    """
    run = get_run()
    batch = next_batch(run, data_iterator, model)
    with stimer:
        losses, loss_mask = implementation_of(run.config).apply(model, batch)
    return losses, partial(weighted_loss, loss_mask)


def weighted_loss(weights: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """As `loss_func`, with a sum of weights that need not be a whole number."""
    loss, _, reported = loss_func(weights, losses)
    return loss, reported["lm loss"][1], reported


if __name__ == "__main__":
    early_sigterm.end_imports()
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_and_decoder,
        forward_step,
        args_defaults={"model_kind": "vlm", "tokenizer_type": "GPT2BPETokenizer"},
    )
