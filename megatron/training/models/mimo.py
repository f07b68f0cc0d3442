"""Build a MiMo model, its datasets and its batch table from a RunConfig."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.image_text_dataset import ImageTextDataset, ImageTextDatasetConfig
from megatron.core.datasets.megatron_dataset import Sample
from megatron.core.datasets.multimodal_dataset import MockMultimodalDataset, MultimodalDatasetConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mimo import (
    AudioModalitySubmodules,
    MimoModel,
    MimoModelConfig,
    VisionModalitySubmodules,
)
from megatron.core.models.mimo.submodules.audio import WhisperEncoderModel
from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX
from megatron.core.models.multimodal.splicing import splice
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.multimodal_projector import (
    MultimodalProjector,
)
from megatron.core.parallel.hyper_comm_grid import HyperCommGrid
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.config.run import RunConfig
from megatron.training.models.encoders import MediaEncoder, audio_encoder, image_encoder
from megatron.training.models.gpt import gpt_layer_spec
from megatron.training.models.kind import (
    Batch,
    BatchTable,
    ModelImplementation,
    TensorSpec,
    language_arguments,
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
    group = HyperCommGrid([size, config.world_size // size], ["tp", "copies"]).create_pg("tp")
    assert group is not None, "the grid spans the world"
    return own.with_tensor_parallelism(group)


def image_spec(config: RunConfig, groups: ProcessGroupCollection) -> ModuleSpec:
    """Return the spec of the encoder of images and its projection."""
    vision = config.vision
    encoder = {
        "model_subtype": vision.vision_model_type,
        "img_h": vision.img_h,
        "img_w": vision.img_w,
        "patch_dim": vision.patch_dim,
        "drop_class_token": vision.disable_vision_class_token,
        "merges_neighbours": vision.pixel_shuffle,
    }
    parts = _encoder_and_projection(
        config, groups, image_encoder(config), IMAGE_ENCODER, ModuleSpec(CLIPViTModel, encoder)
    )
    return ModuleSpec(VisionModalitySubmodules, submodules=parts)


def audio_spec(config: RunConfig, groups: ProcessGroupCollection) -> ModuleSpec:
    """Return the spec of the encoder of sound and its projection."""
    sound = audio_encoder(config)
    encoder: dict[str, object] = {
        "num_mel_bins": sound.num_mel_bins,
        "max_source_positions": config.mimo.audio_seq_length,
    }
    parts = _encoder_and_projection(
        config, groups, sound, AUDIO_ENCODER, ModuleSpec(WhisperEncoderModel, encoder)
    )
    return ModuleSpec(AudioModalitySubmodules, submodules=parts)


def _encoder_and_projection(
    config: RunConfig,
    groups: ProcessGroupCollection,
    media: MediaEncoder,
    name: str,
    encoder: ModuleSpec,
) -> dict[str, Any]:
    common = {
        "transformer_config": media.layers,
        "transformer_layer_spec": media.layer_spec,
        "pg_collection": groups,
    }
    projection = {
        "config": media.projector,
        "projector_type": config.vision.vision_projection_type,
        "input_size": media.projector_input,
        "tp_group": groups.tp,
    }
    return {
        "encoders": {name: ModuleSpec(encoder.module, common | encoder.params)},
        "input_projections": [ModuleSpec(MultimodalProjector, projection, media.projector_spec)],
    }


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


_SOUND_STREAM = 2  # random numbers of the spectrogram; those of the pixels are stream 1


@dataclass(frozen=True, kw_only=True)
class PlaceholderRows:
    """Turns a sample of a vision-language model into a row of ``length`` with placeholders.

    An image token becomes ``embeddings_per_tile`` tokens for each tile.  The row begins with
    ``audio_length`` placeholders for each spectrogram.  ``num_positions``: positions of the model;
    a row may be longer by padding.
    """

    length: int
    num_positions: int
    embeddings_per_tile: int
    audio_length: int
    special_token_ids: dict[str, int]
    pad: int

    def __call__(self, sample: Sample) -> Sample:
        """Return the row.  Text with the id of a placeholder becomes padding."""
        sounds: Tensor | None = sample.get("audios")
        num_before = 0 if sounds is None else len(sounds) * self.audio_length
        tokens = torch.as_tensor(sample["tokens"])[None]
        is_image = tokens == DEFAULT_IMAGE_TOKEN_INDEX
        counts = torch.as_tensor(sample["num_tiles"])[None] * self.embeddings_per_tile
        where = splice(is_image, counts, self.length - num_before)
        text = tokens.gather(1, where.token).masked_fill(~where.is_text, self.pad)
        for token in self.special_token_ids.values():
            text = text.masked_fill(text == token, self.pad)
        ids = text.masked_fill(where.is_image, self.special_token_ids["images"])
        labels = where.labels(torch.as_tensor(sample["labels"])[None])
        mask = where.loss_mask(torch.as_tensor(sample["loss_mask"])[None])
        before = ids.new_full((num_before,), self.special_token_ids.get("audios", self.pad))
        row = {
            "tokens": torch.cat([before, ids[0]]),
            "labels": torch.cat([torch.zeros_like(before), labels[0]]),
            "loss_mask": torch.cat([mask.new_zeros(num_before), mask[0]]),
            "position_ids": torch.arange(self.length).clamp(max=self.num_positions - 1),
            "images": torch.as_tensor(sample["images"]).float(),
        }
        return row if sounds is None else row | {"audios": sounds.float()}


@dataclass(kw_only=True)
class MimoImageTextConfig(ImageTextDatasetConfig):
    """``rows`` makes the rows; ``audio_shape``: frequencies and frames of a spectrogram."""

    rows: Callable[[Sample], Sample]
    audio_shape: tuple[int, int] | None = None


class MimoImageTextDataset(ImageTextDataset):
    """Samples of image-text shards, which have no sound."""

    config: MimoImageTextConfig

    def __getitem__(self, idx: int | None) -> Sample:
        sample = super().__getitem__(idx)
        if self.config.audio_shape is not None:
            sample["audios"] = torch.zeros(0, *self.config.audio_shape)
        return self.config.rows(sample)


@dataclass(kw_only=True)
class MockMimoConfig(MultimodalDatasetConfig):
    """``image_h`` is the height of all ``num_frames`` frames of a video, one below the other.

    ``preprocess_func`` puts the image before the text; ``rows`` makes the rows afterwards.
    """

    rows: Callable[[Sample], Sample]
    num_frames: int = 1
    audio_shape: tuple[int, int] | None = None


class MockMimoDataset(MockMultimodalDataset):
    """Synthetic samples: a sound, an image or video, then text."""

    config: MockMimoConfig

    def __getitem__(self, idx: int | None) -> Sample:
        sample = super().__getitem__(idx)
        if self.config.audio_shape is not None:
            random = self.random_of(0 if idx is None else int(idx), _SOUND_STREAM)
            sound = random.standard_normal((1, *self.config.audio_shape), np.float32)
            sample["audios"] = torch.from_numpy(sound)
        sample["images"] = sample["images"][0].unflatten(1, (self.config.num_frames, -1))
        sample["images"] = sample["images"].transpose(0, 1).contiguous()
        sample["num_tiles"] = sample["num_tiles"] * self.config.num_frames
        return self.config.rows(sample)


MIMO = ModelImplementation(
    build=build_mimo_model,
    datasets=(MimoImageTextDataset, MockMimoDataset),
    dataset_config=mimo_dataset_config,
    batch=mimo_batch,
    apply=apply_mimo,
    splits_sequences=True,
)
