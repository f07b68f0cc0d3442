"""Sample from logits once, outside an engine."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron.core.inference.sampling import filters, noise
from megatron.core.inference.sampling.blocks import Blocks
from megatron.core.inference.sampling_params import SamplingParams


def sample_tokens(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return one token [b] for each row of ``logits`` [b, v] under ``params``.

    Noise comes from torch's generator, or from ``params.seed``.  Penalties do not apply.
    """
    if params.is_greedy:
        return logits.argmax(-1)
    count, vocab_size = logits.shape
    blocks = Blocks.of(logits.float())
    full = np.ones(count, np.float32)
    wanted = filters.Filters(
        full * np.float32(params.temperature),
        np.full(count, min(params.top_k or vocab_size, vocab_size), np.int64),
        full * np.float32(params.top_p or 1.0),
        full * np.float32(params.min_p),
    )

    def upload(values: object) -> Tensor:
        return torch.as_tensor(values, device=logits.device)

    seed = int(torch.randint(2**62, ())) if params.seed is None else params.seed
    keys = noise.row_keys([seed] * count, np.arange(count))
    scale = filters.scale_of(blocks, wanted, upload)
    return noise.choose(blocks, scale, upload(keys))[0]
