"""Pretrain BERT: the model, a micro-batch and the two losses; everything else is `pretrain`."""

from __future__ import annotations

from megatron.training.process import early_sigterm  # before the imports that take seconds

if __name__ == "__main__":
    early_sigterm.begin_imports()

# isort: split
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.diagnostics.straggler import StragglerDetector
from megatron.core.enums import ModelType
from megatron.core.models.bert.bert_model import BertModel
from megatron.training.data.batch import next_batch
from megatron.training.global_vars import get_run
from megatron.training.models.bert import apply_bert
from megatron.training.training import pretrain
from pretrain_gpt import model_provider, train_valid_test_datasets_provider

stimer = StragglerDetector()  # measures under --log-straggler


def loss_func(
    loss_mask: Tensor, sentence_order: Tensor | None, output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum over hidden tokens, their number, and what is logged.

    The order of sentences adds the mean over the samples, which counts once a micro-batch.
    """
    losses, order = output
    mask = loss_mask.reshape(-1).float()
    loss, num_tokens = torch.sum(losses.reshape(-1).float() * mask), mask.sum()
    reported = {"lm loss": torch.stack([loss.detach(), num_tokens])}
    if order is not None:
        assert sentence_order is not None, "the binary head needs is_random"
        sums = F.cross_entropy(order.float(), sentence_order, ignore_index=-1, reduction="sum")
        num_samples = (sentence_order >= 0).float().sum()  # others fill a batch up
        num_tokens = num_tokens.clamp(min=1)  # it counts also where no token is hidden
        loss = loss + sums / num_samples.clamp(min=1) * num_tokens
        reported["sop loss"] = torch.stack([sums.detach(), num_samples])
    return loss, num_tokens.to(torch.int), reported


def forward_step(data_iterator: Iterator[Any] | None, model: BertModel) -> tuple[Any, Any]:
    """What the model says of one micro-batch, and the function that turns it into the loss.

    Stages before the last return hidden states in its place.
    """
    batch = next_batch(get_run(), data_iterator, model)
    with stimer:
        output = apply_bert(model, batch)
    return output, partial(loss_func, batch["loss_mask"], batch["is_random"])


if __name__ == "__main__":
    early_sigterm.end_imports()
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"model_kind": "bert", "tokenizer_type": "BertWordPieceLowerCase"},
    )
