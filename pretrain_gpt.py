"""Pretrain GPT: the model, a micro-batch and the loss; everything else is `pretrain`."""

from __future__ import annotations

from megatron.training.process import early_sigterm  # before the imports that take seconds

if __name__ == "__main__":
    early_sigterm.begin_imports()

# isort: split
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megatron.post_training  # noqa: F401  registers its objectives
from megatron.core.diagnostics.straggler import StragglerDetector
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.data.batch import next_batch
from megatron.training.data.datasets import build_datasets
from megatron.training.global_vars import get_run
from megatron.training.models.registry import implementation_of
from megatron.training.runtime.setup import build_stage
from megatron.training.training import pretrain

stimer = StragglerDetector()  # measures under --log-straggler


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> GPTModel:
    """This rank's stage of the model."""
    return build_stage(
        get_run(), pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
    )


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the token losses [b, s], the number of tokens that carry loss, and what is logged."""
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * mask)
    num_tokens = mask.sum()
    reported = torch.stack([loss.detach(), num_tokens])
    return loss, num_tokens.to(torch.int), {"lm loss": reported}


def forward_step(data_iterator: Iterator[Any] | None, model: GPTModel) -> tuple[Tensor, Any]:
    """Output of one micro-batch, and the function that turns it into the loss.

    The output is token losses for pretraining; stages before the last return hidden states.
    """
    run = get_run()
    batch = next_batch(run, data_iterator, model)
    objective = implementation_of(run.config)
    with stimer:
        output = objective.apply(model, batch)
    if objective.loss is not None:
        return output, partial(objective.loss, run.config, run.groups, batch)
    return output, partial(loss_func, batch["loss_mask"])


def train_valid_test_datasets_provider(num_samples: Sequence[int | None]) -> tuple[Any, Any, Any]:
    """Train, validation and test set."""
    return build_datasets(get_run(), num_samples)


if __name__ == "__main__":
    early_sigterm.end_imports()
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"model_kind": "gpt", "tokenizer_type": "GPT2BPETokenizer"},
    )
