"""Whisper's encoder: a spectrogram becomes one embedding for each 20 ms of sound.

``b`` recordings, ``m`` frequencies, ``n`` embeddings, each of two frames, ``h`` hidden size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import DataError
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.models.mimo.submodules.base import ModalitySubmodules
from megatron.core.models.vision.clip_vit_model import replicated
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_init import Init
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

_LONGEST_WAVE = 10_000.0


class WhisperEncoderModel(VisionModule):
    """Maps spectrograms of one length to embeddings; its layers run as those of images."""

    position_embeddings: Tensor

    @library_call()
    def __init__(
        self,
        transformer_config: TransformerConfig,
        transformer_layer_spec: ModuleSpec,
        num_mel_bins: int = 80,
        max_source_positions: int = 1500,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """``num_mel_bins``: m; ``max_source_positions``: n."""
        super().__init__(transformer_config)
        config = transformer_config
        h = config.hidden_size
        self.num_mel_bins = num_mel_bins
        self.seq_length = max_source_positions
        self.conv1 = _Convolution(config, num_mel_bins, stride=1)
        self.conv2 = _Convolution(config, h, stride=2)
        places = waves(max_source_positions, h, config.params_dtype)
        self.register_buffer("position_embeddings", places, persistent=False)
        self.ln_post = Norm(config, h, config.layernorm_epsilon, has_partial_gradient=False)
        self.build_layers(transformer_layer_spec, pg_collection)
        self.finalize_parameters()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Encode log-mel spectrograms: [b, m, 2 n] -> [b, n, h].

        Collective over the tensor-parallel group.  Raises DataError for another shape.
        """
        if x.shape[1:] != (self.num_mel_bins, 2 * self.seq_length):
            raise DataError(
                f"a spectrogram of shape {tuple(x.shape[1:])} does not fit an encoder of "
                f"{(self.num_mel_bins, 2 * self.seq_length)}: pad or cut the sound"
            )
        hidden = F.gelu(self.conv2(F.gelu(self.conv1(x))))
        hidden = hidden.transpose(1, 2) + self.position_embeddings
        out: Tensor = self.ln_post(self.run_layers(hidden, attention_mask))
        return out


class _Convolution(nn.Module):
    """A convolution of width 3 along time."""

    def __init__(self, config: TransformerConfig, num_inputs: int, *, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.weight = replicated(config, (config.hidden_size, num_inputs, 3), config.init_method)
        self.bias = replicated(config, (config.hidden_size,), Init("zeros"))

    def forward(self, x: Tensor) -> Tensor:
        """Convolve: [b, channels, t] -> [b, h, t/stride]."""
        x = x.to(self.weight.dtype)
        return F.conv1d(x, self.weight, self.bias, stride=self.stride, padding=1)


def waves(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return the sines, then the cosines of a place at wave lengths of 2 pi to 20,000 pi."""
    steps = torch.arange(width // 2, dtype=torch.float64) / (width // 2 - 1)
    angles = torch.arange(count)[:, None] * torch.exp(-math.log(_LONGEST_WAVE) * steps)
    return torch.cat([angles.sin(), angles.cos()], 1).to(dtype)


class AudioModalitySubmodules(ModalitySubmodules):
    """Encoders of sound, decoders into sound, and their projections."""
