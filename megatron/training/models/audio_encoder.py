"""The encoder of sound as flags describe it; imports no model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from megatron.core.config.errors import ConfigError
from megatron.core.text_files import read_text
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run import RunConfig
from megatron.training.models.image_encoder import (
    Convention,
    ImageEncoder,
    encoder_config,
    image_encoder,
    projector_config,
)

_NUM_MEL_BINS = 80
_KERNEL = 3  # frames of a convolution
_WHISPER = Convention(F.gelu)


@dataclass(frozen=True, kw_only=True)
class AudioEncoder:
    """Layers of Whisper's encoder, the frequencies of its spectrograms, and its projector.

    A sample has one sound.  Sizes have the names that they have in an `ImageEncoder`.
    """

    layers: TransformerConfig
    projector: TransformerConfig  # its width is the language model's
    num_mel_bins: int
    num_tokens: int
    max_tiles: int = 1
    projector_has_norm: bool = False

    @property
    def num_embeddings(self) -> int:
        """Embeddings of a sound for the language model."""
        return self.num_tokens

    @property
    def projector_input(self) -> int:
        """Channels that the projector reads."""
        return self.layers.hidden_size

    @property
    def input_products(self) -> tuple[int, int]:
        """Multiply-adds of the convolutions: without, and with gradients of inputs."""
        hidden = self.layers.hidden_size
        return (
            2 * self.num_tokens * _KERNEL * self.num_mel_bins * hidden,
            self.num_tokens * _KERNEL * hidden**2,
        )

    @property
    def input_parameters(self) -> int:
        """Parameters of the convolutions."""
        hidden = self.layers.hidden_size
        return hidden * (_KERNEL * (self.num_mel_bins + hidden) + 2)


def encoders_of(config: RunConfig) -> list[ImageEncoder | AudioEncoder]:
    """Return the encoders of a model kind that reads images."""
    return [image_encoder(config), *([audio_encoder(config)] if config.mimo.has_sound else [])]


def audio_encoder(config: RunConfig) -> AudioEncoder:
    """Return the encoder of sound: with the size in --audio-encoder-model, or that of images.

    Raises ConfigError if the folder has no config.json of a Whisper model.
    """
    folder = config.mimo.audio_encoder_model
    layers = replace(encoder_config(config), **_WHISPER.values)
    made = AudioEncoder(
        layers=layers,
        projector=projector_config(config),
        num_mel_bins=_NUM_MEL_BINS,
        num_tokens=config.mimo.audio_seq_length,
    )
    if folder is None:
        return made
    given = whisper_config(folder)
    sizes = {
        "num_layers": given["encoder_layers"],
        "hidden_size": given["d_model"],
        "num_attention_heads": given["encoder_attention_heads"],
        "ffn_hidden_size": given["encoder_ffn_dim"],
        "kv_channels": None,
        "num_query_groups": None,
    }
    return replace(made, layers=replace(layers, **sizes), num_mel_bins=given["num_mel_bins"])


def whisper_config(folder: str) -> dict[str, Any]:
    """Return config.json of a folder.  Raises ConfigError if it is not that of a Whisper model."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"--audio-encoder-model {folder}: it has no config.json; give the folder of a Whisper "
            "model in Hugging Face format (nothing is downloaded)"
        )
    given = json.loads(read_text(path, str(path), ConfigError))
    if not isinstance(given, dict) or given.get("model_type") != "whisper":
        raise ConfigError(f"--audio-encoder-model {folder}: config.json describes no Whisper model")
    return given
