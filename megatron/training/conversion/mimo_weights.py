"""Initial weights of the parts of a MiMo model, from checkpoints of these parts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from megatron.core.dist_checkpointing.formats import open_reader
from megatron.core.dist_checkpointing.mapping import from_param
from megatron.core.models.mimo import MimoModel
from megatron.core.params.param_info import info_of
from megatron.training.checkpointing.checkpoint_args import compare_models
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.config.run import RunConfig
from megatron.training.conversion.hf_folder import read_weights
from megatron.training.conversion.vision import WHISPER, import_encoder
from megatron.training.models.encoders import whisper_config
from megatron.training.models.mimo import AUDIO_ENCODER

_LANGUAGE = "language_model."
# What may precede the names of the encoder, by the class that has written the folder.
_WHISPER_PREFIXES = ("model.encoder.", "encoder.")


def load_parts(model: MimoModel, config: RunConfig) -> MimoModel:
    """Read the weights that --language-model-checkpoint and --audio-encoder-model name.

    A checkpoint of the complete model, which is read later, overrides them.  Raises
    CheckpointError if a checkpoint holds another model.
    """
    if config.mimo.language_model_checkpoint is not None:
        _load_language_model(model, config, config.mimo.language_model_checkpoint)
    if config.mimo.audio_encoder_model is not None and "audios" in model.modality_submodules:
        encoders = model.modality_submodules["audios"].get_submodule("encoders")
        _load_whisper(encoders.get_submodule(AUDIO_ENCODER), config.mimo.audio_encoder_model)
    return model


def _load_language_model(model: MimoModel, config: RunConfig, folder: str) -> None:
    content = open_checkpoint(folder)
    asked = {**config.asked, "model_kind": "gpt", "num_layers": config.model.num_layers}
    compare_models(content.asked, asked, is_finetuning=True).check(content.folder)
    with open_reader(content.folder) as reader:
        for param in model.language_model.parameters():
            info = info_of(param)
            reader.load(from_param(info.name.removeprefix(_LANGUAGE), info, param), cast=True)


@torch.no_grad()
def _load_whisper(encoder: nn.Module, folder: str) -> None:
    config = whisper_config(folder)
    weights = {
        name.removeprefix(prefix): tensor
        for name, tensor in read_weights(Path(folder)).items()
        for prefix in _WHISPER_PREFIXES
        if name.startswith(prefix)
    }
    WHISPER.flags(config)  # refuses what the encoder here does not compute
    found = import_encoder(WHISPER, encoder, config, weights)
    for name, param in encoder.named_parameters():
        whole = found[name].make()
        for offset, view in info_of(param).pieces(param):
            box = tuple(slice(i, i + n) for i, n in zip(offset, view.shape, strict=True))
            view.copy_(whole[box])
