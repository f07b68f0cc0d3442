"""Build a vision-language model (LLaVA), its datasets and its batch table from a RunConfig."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.image_text_dataset import ImageTextDataset, ImageTextDatasetConfig
from megatron.core.datasets.images import LLAVA_NEXT_GRIDS, MERGE, STATISTICS, ImageSettings
from megatron.core.datasets.multimodal_dataset import MockMultimodalDataset, MultimodalDatasetConfig
from megatron.core.datasets.packing import pack_samples
from megatron.core.enums import AttnMaskType
from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX, LLaVAModel
from megatron.core.models.multimodal.qwen2_vl_model import Qwen2VLModel
from megatron.core.models.vision.kinds import KINDS
from megatron.core.text_files import parse_yaml, read_text
from megatron.training.config.run import RunConfig
from megatron.training.config.vision import VisionConfig
from megatron.training.models.attention_request import documents_are_bounds
from megatron.training.models.encoders import image_encoder, num_image_embeddings
from megatron.training.models.gpt import gpt_layer_spec, text_arguments
from megatron.training.models.kind import (
    Batch,
    BatchTable,
    ModelImplementation,
    TensorSpec,
    language_arguments,
)


def build_vlm_model(config: RunConfig, *, vp_stage: int | None = None, **stage: Any) -> LLaVAModel:
    """Build one pipeline stage on the current device; the first has the encoder of images."""
    kind = Qwen2VLModel if KINDS[config.vision.vision_model_type].reads_any_size else LLaVAModel
    model = kind(**llava_arguments(config, **stage), vp_stage=vp_stage)
    model.freeze(config.vision.freeze_LM, config.vision.freeze_ViT, False)
    return model


def llava_arguments(config: RunConfig, **stage: Any) -> dict[str, Any]:
    """Return the arguments of `LLaVAModel`; ``stage``: see `build_vlm_model`."""
    vision = config.vision
    arguments = language_arguments(config, **stage)
    encoder = image_encoder(config)
    spec = gpt_layer_spec(config)
    if sees_images_whole(vision):
        for layer in getattr(spec, "layer_specs", None) or [spec]:
            layer.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.arbitrary
    return {
        "language_transformer_config": config.model,
        "language_transformer_layer_spec": spec,
        "language_vocab_size": arguments.pop("vocab_size"),
        "language_max_sequence_length": arguments.pop("max_sequence_length"),
        "vision_transformer_config": encoder.layers,
        "vision_transformer_layer_spec": encoder.layer_spec,
        "drop_vision_class_token": vision.disable_vision_class_token,
        "vision_projection_config": encoder.projector,
        "vision_projection_layer_spec": encoder.projector_spec,
        "vision_projection_type": vision.vision_projection_type,
        "img_h": vision.img_h,
        "img_w": vision.img_w,
        "patch_dim": vision.patch_dim,
        "pixel_shuffle": vision.pixel_shuffle,
        "encoder_options": encoder_options(vision),
        "vision_model_subtype": vision.vision_model_type,
        "row_length": config.data.seq_length,
        "has_image_newline": bool(vision.grids),
        "packs_samples": _packing(config),
        **arguments,
        **({"row_ends": vision.image_row_end_tokens} if ends_rows(vision) else {}),
    }


def encoder_options(vision: VisionConfig) -> dict[str, Any]:
    """Return the arguments of `LLaVAModel.build_encoder` that only some encoders have."""
    kind = KINDS[vision.vision_model_type]
    if kind.is_pooled:
        return {"pooled_embeddings": vision.pooled_image_embeddings}
    options: dict[str, Any] = {}
    if kind.reads_any_size:
        options["frames_per_patch"] = STATISTICS[vision.vision_model_type].frames
    if kind.has_position_table:
        options["num_positions"] = vision.vision_num_position_embeddings
        options["taps"] = vision.deepstack_visual_indexes
    return options


def _packing(config: RunConfig) -> Literal["no", "mask", "bounds"]:
    if not config.vision.use_packed_sequence:
        return "no"
    is_mask = sees_images_whole(config.vision) or not documents_are_bounds(config)
    return "mask" if is_mask else "bounds"


def ends_rows(vision: VisionConfig) -> bool:
    """Return whether tokens of text end the rows of embeddings of an image."""
    return KINDS[vision.vision_model_type].ends_rows


def sees_images_whole(vision: VisionConfig) -> bool:
    """Return whether the embeddings of an image attend to all of their image."""
    return KINDS[vision.vision_model_type].is_pooled


def vlm_dataset_config(config: RunConfig, **common: Any) -> BlendedMegatronDatasetConfig:
    """Return the dataset config; --dataloader-seq-length counts an image as no token."""
    if not config.data.mock_data:
        return _image_text_config(config, **common)
    vision = config.vision
    begin: Callable[[dict[str, Any]], dict[str, Any]] = begin_with_image
    copies = 1  # of an image's values
    if vision.grids:
        begin = partial(begin_with_tiles, vision)
        copies = vision.max_tiles
    elif KINDS[vision.vision_model_type].reads_any_size:
        begin = partial(begin_with_patches, vision)
        copies = STATISTICS[vision.vision_model_type].frames
    return MultimodalDatasetConfig(
        image_h=vision.img_h * copies,
        image_w=vision.img_w,
        preprocess_func=partial(pack_halves, begin) if vision.use_packed_sequence else begin,
        **text_arguments(config),
        **(common | {"sequence_length": _text_length(config)}),
    )


def _image_text_config(config: RunConfig, **common: Any) -> ImageTextDatasetConfig:
    vision = config.vision
    return ImageTextDatasetConfig(
        images=image_settings(vision),
        image_token_index=DEFAULT_IMAGE_TOKEN_INDEX,
        embeddings_per_tile=embeddings_per_tile(vision),
        decoder_sequence_length=vision.row_length,
        use_tile_tags=vision.use_tile_tags,
        packs_samples=vision.use_packed_sequence,
        caption_prompt=vision.caption_prompt,
        caption_prompts=() if vision.prompt_path is None else read_prompts(vision.prompt_path),
        weighs_answers=vision.use_loss_scaling,
        broken_samples=vision.broken_samples,
        **(common | {"sequence_length": _text_length(config) + 1}),
    )


def read_prompts(path: str) -> tuple[str, ...]:
    """Return the questions before captions from the JSON file of --prompt-path.

    Raises ConfigError unless ``CaptioningPretraining`` has a list ``llava`` or ``raw`` of texts.
    """
    what = f"--prompt-path {path}"
    found = parse_yaml(read_text(path, what, ConfigError), what, ConfigError)  # includes JSON
    kinds = found.get("CaptioningPretraining") if isinstance(found, dict) else None
    prompts = (kinds.get("llava") or kinds.get("raw")) if isinstance(kinds, dict) else None
    is_list = isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts)
    if not prompts or not is_list:
        raise ConfigError(
            f'{what}: {{"CaptioningPretraining": {{"llava": [texts]}}}} is needed; for one '
            "question, use --caption-prompt"
        )
    return tuple(prompts)


def embeddings_per_tile(vision: VisionConfig) -> int:
    """Return how many positions of a row a tile, or a block of patches, takes."""
    if KINDS[vision.vision_model_type].reads_any_size:
        return 1
    return num_image_embeddings(vision)


def image_settings(vision: VisionConfig) -> ImageSettings:
    """Return how images become tiles of pixels."""
    return ImageSettings(
        img_h=vision.img_h,
        img_w=vision.img_w,
        vision_model_type=vision.vision_model_type,
        tiling=_tiling(vision),
        patch_dim=vision.patch_dim,
        max_num_tiles=vision.max_num_tiles,
        resolutions=vision.grids or LLAVA_NEXT_GRIDS,
        use_thumbnail=vision.use_thumbnail,
        use_area_weighted_aspect_ratio=vision.use_area_weighted_aspect_ratio,
    )


def _tiling(vision: VisionConfig) -> Literal["none", "dynamic", "anyres", "patches"]:
    if KINDS[vision.vision_model_type].reads_any_size:
        return "patches"
    if vision.grids:
        return "anyres"
    return "dynamic" if vision.use_tiling else "none"


def begin_with_image(sample: dict[str, Any]) -> dict[str, Any]:
    """Put the token of an image before a text of s tokens; all tensors become [s + 1].

    What the image predicts, the first token, carries no loss.
    """
    tokens = torch.as_tensor(sample["tokens"])
    first = tokens.new_full((1,), DEFAULT_IMAGE_TOKEN_INDEX)
    num_tiles = torch.zeros(len(tokens) + 1, dtype=torch.int64)
    num_tiles[0] = 1
    loss_mask = torch.as_tensor(sample["loss_mask"])
    return {
        "tokens": torch.cat([first, tokens]),
        "labels": torch.cat([tokens[:1], torch.as_tensor(sample["labels"])]),
        "loss_mask": torch.cat([loss_mask.new_zeros(1), loss_mask]),
        "position_ids": torch.arange(len(tokens) + 1),
        "num_tiles": num_tiles,
        "images": torch.as_tensor(sample["image"]).float().unsqueeze(0),
    }


def begin_with_tiles(vision: VisionConfig, sample: dict[str, Any]) -> dict[str, Any]:
    """Do `begin_with_image` with tiles in rows (LLaVA-NeXT), whose grid depends on the text.

    ``sample`` has the largest number of tiles below each other as its image.
    """
    sample = begin_with_image(sample)
    height, width = vision.grids[int(sample["tokens"].sum()) % len(vision.grids)]
    rows = height // vision.img_h
    columns = width // vision.img_w
    num_tiles = 1 + rows * columns
    tiles = sample["images"].view(3, -1, vision.img_h, vision.img_w).transpose(0, 1)
    sample["num_tiles"][0] = num_tiles
    sample["images"] = tiles[:num_tiles].contiguous()
    sample["image_sizes"] = torch.tensor([[rows, columns, height, width]])
    return sample


def begin_with_patches(vision: VisionConfig, sample: dict[str, Any]) -> dict[str, Any]:
    """Do `begin_with_image` with blocks of patches (Qwen2-VL), whose number depends on the text.

    ``sample`` has two frames of the largest image below each other as its image.
    """
    sample = begin_with_image(sample)
    block = MERGE * vision.patch_dim
    rows = 1 + int(sample["tokens"].sum()) % (vision.img_h // block)
    columns = vision.img_w // block
    shape = image_settings(vision).tile_shape
    sample["num_tiles"][0] = rows * columns
    sample["images"] = sample["images"].reshape(-1, *shape)[: rows * columns].clone()
    sample["image_sizes"] = torch.tensor([[1, MERGE * rows, MERGE * columns]])
    return sample


def pack_halves(
    begin: Callable[[dict[str, Any]], dict[str, Any]], sample: dict[str, Any]
) -> dict[str, Any]:
    """Return a row of two samples: each half of the text after an image, the same in both.

    The last token is left out: a row is as long as with one image.
    """
    names = ("tokens", "labels", "loss_mask")
    text = {name: torch.as_tensor(sample[name]) for name in names}
    length = len(text["tokens"]) - 1
    bounds = (slice(0, length // 2), slice(length // 2, length))
    halves = [{name: part[bound] for name, part in text.items()} for bound in bounds]
    return pack_samples(
        [begin({**half, "image": sample["image"]}) for half in halves], length + 2, 0
    )


def vlm_batch(config: RunConfig, stage: int, num_stages: int) -> BatchTable:
    """Return the tensors that ``stage`` reads, None for those it does not.

    tokens, labels, loss_mask, position_ids and num_tiles are [b, s + 1] for s tokens of text;
    images is [t, 3, H, W] for the t tiles of all rows.  Every stage reads tokens, numbers of tiles
    and, where tiles are arranged in rows, image_sizes [images, 4]: the positions follow from them.
    With --use-packed-sequence they read position_ids, too, which tell where samples begin.
    Images of any size are [blocks, 4, values of a patch], and image_sizes [images, 3].
    """
    vision = config.vision
    reads_any_size = KINDS[vision.vision_model_type].reads_any_size
    fields = 3 if reads_any_size else 4
    sizes = TensorSpec(torch.int64, (-1, fields), config.training.micro_batch_size)
    shape = (config.training.micro_batch_size, _text_length(config) + 1)
    ids = TensorSpec(torch.int64, shape)
    encoder = image_encoder(config)
    of_image = encoder.num_embeddings if reads_any_size else encoder.max_tiles
    max_tiles = config.training.micro_batch_size * of_image
    tiles = TensorSpec(torch.float32, (-1, *image_settings(vision).tile_shape), max_tiles)
    is_first = stage == 0
    is_last = stage == num_stages - 1
    return {
        "tokens": ids,
        "num_tiles": ids,
        "image_sizes": sizes if vision.grids or reads_any_size else None,
        "labels": ids if is_last else None,
        "loss_mask": TensorSpec(torch.float32, shape) if is_last else None,
        "position_ids": ids if is_first or vision.use_packed_sequence else None,
        "images": tiles if is_first else None,
    }


def apply_vlm(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Run one stage: the last returns losses and their mask [b, L/cp], others hidden states."""
    output, mask = model(
        batch["images"],
        batch["tokens"],
        batch["position_ids"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        num_image_tiles=batch["num_tiles"],
        image_sizes=batch.get("image_sizes"),
    )
    return output, mask


def _text_length(config: RunConfig) -> int:
    assert config.vision.dataloader_seq_length is not None, "it follows from --seq-length"
    return config.vision.dataloader_seq_length


VLM = ModelImplementation(
    build=build_vlm_model,
    datasets=(ImageTextDataset, MockMultimodalDataset),
    dataset_config=vlm_dataset_config,
    batch=vlm_batch,
    apply=apply_vlm,
    splits_sequences=True,
)
