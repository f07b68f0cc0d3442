"""Build a MiMo model, its datasets and its batch table from a RunConfig."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.models.audio.whisper_encoder import WhisperEncoderModel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mimo import (
    AudioModalitySubmodules,
    MimoModel,
    MimoModelConfig,
    VisionModalitySubmodules,
)
from megatron.core.models.mimo.submodules.vision import PatchFeatures
from megatron.core.models.vision.multimodal_projector import (
    MultimodalProjector,
    ProjectorSubmodules,
    get_projector_spec,
)
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.parallel.hyper_comm_grid import HyperCommGrid
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.config.run import RunConfig
from megatron.training.models.audio_encoder import audio_encoder
from megatron.training.models.gpt import gpt_layer_spec
from megatron.training.models.image_encoder import image_encoder, projector_config
from megatron.training.models.kind import (
    Batch,
    BatchTable,
    ModelImplementation,
    TensorSpec,
    language_arguments,
)
from megatron.training.models.mimo_data import (
    MimoImageTextConfig,
    MimoImageTextDataset,
    MockMimoConfig,
    MockMimoDataset,
    PlaceholderRows,
)
from megatron.training.models.vlm import VLM

IMAGE_ENCODER = "clip_encoder"
AUDIO_ENCODER = "whisper_encoder"


def build_mimo_model(
    config: RunConfig, *, groups: ProcessGroupCollection, vp_stage: int | None = None, **stage: Any
) -> MimoModel:
    """Build one pipeline stage on the current device; the first has the encoders.

    Collective over all ranks with --encoder-tp, which creates process groups.
    """
    of_encoders = encoder_groups(config, groups)
    parts = {"images": image_spec(config, of_encoders)}
    if config.mimo.has_sound:
        parts["audios"] = audio_spec(config, of_encoders)
    language = {
        "config": config.model,
        "transformer_layer_spec": gpt_layer_spec(config),
        "vp_stage": vp_stage,
        **language_arguments(config, groups=groups, **stage),
    }
    spec = ModuleSpec(GPTModel, language)
    model = MimoModel(MimoModelConfig(spec, parts, config.mimo.special_token_ids))
    model.freeze(language_model=config.vision.freeze_LM, encoders=config.vision.freeze_ViT)
    return model


def encoder_groups(config: RunConfig, groups: ProcessGroupCollection) -> ProcessGroupCollection:
    """Return the groups of encoders: whole rows, and the tensor parallelism of --encoder-tp."""
    own = groups.without_context_parallelism()
    size = config.mimo.encoder_tp
    if size is None:
        return own
    grid = HyperCommGrid([size, config.world_size // size], ["tp", "copies"])
    group = grid.create_pg("tp")
    assert group is not None, "the grid spans the world"
    return own.with_tensor_parallelism(group)


def image_spec(config: RunConfig, groups: ProcessGroupCollection) -> ModuleSpec:
    """Return the spec of the encoder of images and its projection."""
    vision = config.vision
    of_images = image_encoder(config)
    encoder = {
        "transformer_config": of_images.layers,
        "transformer_layer_spec": of_images.layer_spec,
        "model_subtype": vision.vision_model_type,
        "img_h": vision.img_h,
        "img_w": vision.img_w,
        "patch_dim": vision.patch_dim,
        "drop_class_token": vision.disable_vision_class_token,
        "merges_neighbours": vision.pixel_shuffle,
        "pg_collection": groups,
    }
    projection = _projection(config, groups, of_images.projector_input, of_images.projector_spec)
    return ModuleSpec(
        VisionModalitySubmodules,
        submodules={
            "encoders": {IMAGE_ENCODER: ModuleSpec(PatchFeatures, encoder)},
            "input_projections": [projection],
        },
    )


def audio_spec(config: RunConfig, groups: ProcessGroupCollection) -> ModuleSpec:
    """Return the spec of the encoder of sound and its projection."""
    sound = audio_encoder(config)
    encoder = {
        "transformer_config": sound.layers,
        "transformer_layer_spec": get_vit_layer_with_local_spec(sound.layers),
        "num_mel_bins": sound.num_mel_bins,
        "max_source_positions": config.mimo.audio_seq_length,
        "pg_collection": groups,
    }
    projection = _projection(config, groups, sound.layers.hidden_size, get_projector_spec())
    return ModuleSpec(
        AudioModalitySubmodules,
        submodules={
            "encoders": {AUDIO_ENCODER: ModuleSpec(WhisperEncoderModel, encoder)},
            "input_projections": [projection],
        },
    )


def _projection(
    config: RunConfig,
    groups: ProcessGroupCollection,
    input_size: int,
    parts: ProjectorSubmodules,
) -> ModuleSpec:
    params = {
        "config": projector_config(config),
        "projector_type": config.vision.vision_projection_type,
        "input_size": input_size,
        "tp_group": groups.tp,
    }
    return ModuleSpec(MultimodalProjector, params, parts)


def mimo_dataset_config(config: RunConfig, **common: Any) -> BlendedMegatronDatasetConfig:
    """Return the dataset config: that of the vision-language model, and the rows."""
    of_images = VLM.dataset_config(config, **common)
    mimo = config.mimo
    vision = config.vision
    assert vision.row_length is not None, "it follows from --seq-length"
    rows = PlaceholderRows(
        length=config.data.seq_length,
        num_positions=vision.row_length,
        embeddings_per_tile=image_encoder(config).num_embeddings,
        audio_length=mimo.audio_seq_length,
        special_token_ids=mimo.special_token_ids,
        pad=mimo.pad_token_id,
    )
    values = {f.name: getattr(of_images, f.name) for f in fields(of_images) if f.init}
    values |= {"rows": rows, "audio_shape": _audio_shape(config) if mimo.has_sound else None}
    if not config.data.mock_data:
        # Text may take the places of images that a sample does not have.
        return MimoImageTextConfig(**values | {"sequence_length": vision.row_length})
    height = vision.img_h * mimo.num_frames
    return MockMimoConfig(**values | {"image_h": height, "num_frames": mimo.num_frames})


def _audio_shape(config: RunConfig) -> tuple[int, int]:
    """Return frequencies and frames of a spectrogram: Whisper halves the number of frames."""
    return audio_encoder(config).num_mel_bins, 2 * config.mimo.audio_seq_length


def mimo_batch(config: RunConfig, stage: int, num_stages: int) -> BatchTable:
    """Return the tensors that ``stage`` reads, None for those it does not."""
    vision = config.vision
    rows = config.training.micro_batch_size
    shape = rows, config.data.seq_length
    is_first = stage == 0
    is_last = stage == num_stages - 1
    max_tiles = rows * image_encoder(config).max_tiles
    ids = TensorSpec(torch.int64, shape)
    tiles = TensorSpec(torch.float32, (-1, 3, vision.img_h, vision.img_w), max_tiles)
    table: BatchTable = {
        "tokens": ids if is_first else None,
        "labels": ids if is_last else None,
        "loss_mask": TensorSpec(torch.float32, shape) if is_last else None,
        "position_ids": ids if is_first else None,
        "images": tiles if is_first else None,
    }
    if config.mimo.has_sound:
        sounds = TensorSpec(torch.float32, (-1, *_audio_shape(config)), rows)
        table["audios"] = sounds if is_first else None
    return table


def apply_mimo(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Run one stage: the last returns losses and their mask [b, L/cp], others hidden states."""
    inputs = {"images": {IMAGE_ENCODER: {"x": batch["images"]}}}
    if "audios" in batch:
        inputs["audios"] = {AUDIO_ENCODER: {"x": batch["audios"]}}
    output, mask = model(
        batch["tokens"],
        batch["position_ids"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        modality_inputs=inputs,
    )
    return output, mask


def image_embeddings(model: MimoModel, pixels: Tensor, sizes: Tensor | None) -> Tensor:
    """Encode and project tiles on the first stage: [t, 3, H, W] -> [t n, h]."""
    assert sizes is None, "MiMo models read images of one size"
    found: Tensor = model.modality_submodules["images"]({IMAGE_ENCODER: {"x": pixels}})
    return found


MIMO = ModelImplementation(
    build=build_mimo_model,
    datasets=(MimoImageTextDataset, MockMimoDataset),
    dataset_config=mimo_dataset_config,
    batch=mimo_batch,
    apply=apply_mimo,
    splits_sequences=True,
)
