"""Pretrain an image classifier (ViT): the model, a micro-batch, the loss and the accuracy."""

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
from megatron.core.models.vision.vit_classifier import ViTClassifier
from megatron.training.data.batch import next_batch
from megatron.training.global_vars import get_run
from megatron.training.models.vit import apply_vit
from megatron.training.training import pretrain
from pretrain_gpt import model_provider, train_valid_test_datasets_provider

stimer = StragglerDetector()  # measures under --log-straggler


def loss_func(
    labels: Tensor, loss_mask: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the losses, the number of images, and the loss and accuracy to log.

    ``labels`` and ``loss_mask`` are [b], ``logits`` [b, c].  Images with a mask of 0, which fill
    the last batch of an evaluation, do not count.
    """
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    loss = torch.sum(losses * loss_mask)
    num_images = loss_mask.sum()
    num_correct = torch.sum((logits.argmax(-1) == labels) * loss_mask)
    reported = {
        "loss": torch.stack([loss.detach(), num_images]),
        "accuracy": torch.stack([num_correct, num_images]),
    }
    return loss, num_images.to(torch.int), reported


def forward_step(data_iterator: Iterator[Any] | None, model: ViTClassifier) -> tuple[Tensor, Any]:
    """Return the logits of one micro-batch, and the function that computes the loss from them.

    Stages before the last return hidden states instead of logits.
    """
    batch = next_batch(get_run(), data_iterator, model)
    with stimer:
        logits = apply_vit(model, batch)
    return logits, partial(loss_func, batch["labels"], batch["loss_mask"])


if __name__ == "__main__":
    early_sigterm.end_imports()
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"model_kind": "vit", "tokenizer_type": "NullTokenizer", "vocab_size": 1},
    )
