"""Logits of the last stage in chunks of tokens, and losses of language modelling from them.

``s`` tokens, ``b`` sequences, ``h`` hidden size, ``v`` vocabulary, ``x/tp`` this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.config.errors import ConfigError
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.training.config.run import RunConfig
from megatron.training.models.kind import Batch


def in_chunks(
    model: LanguageModule,
    function: Callable[..., tuple[Tensor, ...]],
    states: Sequence[Tensor],
    tokens: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Call ``function`` on chunks of --loss-chunk-size tokens; return its results, joined.

    ``states`` [s, b, h] (or [s/tp, b, h]) and ``tokens`` [b, s, ...] become its arguments [c, b, h]
    and [c, b, ...]; its results [c, b, ...] become [b, s, ...].  With several chunks their
    activations are recomputed in backward: the logits of one chunk exist at a time.
    """
    config, (num_rows, batch_size) = model.config, states[0].shape[:2]
    # A sequence-parallel rank has a part of each chunk, so a chunk has tokens of all parts.
    num_parts = model.tp_group.size() if config.sequence_parallel else 1
    held = [x.transpose(0, 1).unflatten(0, (num_parts, num_rows)) for x in tokens]
    size = config.loss_chunk_size
    rows = max(1, size // (num_parts * batch_size)) if size else num_rows
    results = []
    for begin in range(0, num_rows, rows):
        chunk = [x[begin : begin + rows] for x in states]
        chunk += [x[:, begin : begin + rows].flatten(0, 1) for x in held]
        if rows >= num_rows or not torch.is_grad_enabled():
            result = function(*chunk)
        else:
            result = checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False)
        results.append([x.unflatten(0, (num_parts, -1)) for x in result])
    joined = (torch.cat(parts, 1).flatten(0, 1) for parts in zip(*results, strict=True))
    return tuple(x.transpose(0, 1) for x in joined)


def lm_losses(model: LanguageModule, logits: Tensor, labels: Tensor, *, learns: bool) -> Tensor:
    """Return the cross entropy of each token: logits [c, b, v/tp], labels [c, b] -> [c, b].

    Without ``learns`` it has no gradient.
    """
    read = logits if learns else logits.detach()
    return model.compute_language_model_loss(labels.transpose(0, 1), read).transpose(0, 1)


def sum_of_masked(
    _config: RunConfig, _groups: ProcessGroupCollection, batch: Batch, losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss of pretraining: the sum over tokens, their number, and what is logged."""
    mask = batch["loss_mask"].float()
    total = (losses.float() * mask).sum()
    num_tokens = mask.sum()
    return total, num_tokens.int(), {"lm loss": torch.stack([total.detach(), num_tokens])}


def require_wrapper(chunks: Sequence[nn.Module], wrapper: type[nn.Module], flag: str) -> None:
    """Raise ConfigError unless each of ``chunks`` contains a ``wrapper``."""
    if not all(any(isinstance(m, wrapper) for m in chunk.modules()) for chunk in chunks):
        raise ConfigError(
            f"{flag} has no effect on this program: its model provider builds a model itself; "
            "return megatron.training.runtime.setup.build_stage(get_run(), ...) from it"
        )
