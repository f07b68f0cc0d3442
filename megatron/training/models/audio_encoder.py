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
from megatron.training.models.image_encoder import Convention, encoder_config

_NUM_MEL_BINS = 80
_WHISPER = Convention(F.gelu)


@dataclass(frozen=True, kw_only=True)
class AudioEncoder:
    """Layers of Whisper's encoder, and the frequencies of its spectrograms."""

    layers: TransformerConfig
    num_mel_bins: int


def audio_encoder(config: RunConfig) -> AudioEncoder:
    """Return the encoder of sound: with the size in --audio-encoder-model, or that of images.

    Raises ConfigError if the folder has no config.json of a Whisper model.
    """
    layers, folder = encoder_config(config), config.mimo.audio_encoder_model
    if folder is None:
        return AudioEncoder(layers=replace(layers, **_WHISPER.values), num_mel_bins=_NUM_MEL_BINS)
    given = whisper_config(folder)
    sizes = {
        "num_layers": given["encoder_layers"],
        "hidden_size": given["d_model"],
        "num_attention_heads": given["encoder_attention_heads"],
        "ffn_hidden_size": given["encoder_ffn_dim"],
        "kv_channels": None,
        "num_query_groups": None,
    }
    layers = replace(layers, **_WHISPER.values, **sizes)
    return AudioEncoder(layers=layers, num_mel_bins=given["num_mel_bins"])


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
