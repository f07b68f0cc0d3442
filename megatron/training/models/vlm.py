"""Build a vision-language model (LLaVA), its datasets and its batch table from a RunConfig."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.activations import openai_gelu, quick_gelu
from megatron.core.datasets.multimodal_dataset import MockMultimodalDataset, MultimodalDatasetConfig
from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX, LLaVAModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run import RunConfig
from megatron.training.models.gpt import gpt_layer_spec, text_arguments
from megatron.training.models.kind import (
    Batch,
    BatchTable,
    ModelImplementation,
    TensorSpec,
    language_arguments,
)

# What the encoder and the projector have in common with the language model.
_INHERITED = (
    "activation_func activation_func_clamp_value add_bias_linear add_qkv_bias attention_backend "
    "attention_dropout attention_softmax_in_fp32 batch_invariant_mode bf16 "
    "bias_activation_fusion bias_dropout_fusion calculate_per_token_loss compile "
    "deterministic_mode disable_bf16_reduced_precision_matmul ffn_hidden_size fp16 fp8 "
    "fp8_amax_compute_algo fp8_amax_history_len fp8_interval fp8_margin fp8_param fp8_recipe "
    "fp8_wgrad gated_linear_unit gradient_accumulation_fusion hidden_dropout hidden_size "
    "init_method_std init_method_xavier_uniform init_seed kv_channels layernorm_epsilon "
    "layernorm_zero_centered_gamma masked_softmax_fusion normalization num_attention_heads "
    "num_layers num_query_groups params_dtype perform_initialization qk_layernorm "
    "tensor_model_parallel_size transformer_impl "
).split()


@dataclass(frozen=True)
class _Convention:
    """What the layers of an encoder's architecture have, whatever the language model has."""

    activation: Any
    normalization: str = "LayerNorm"
    eps: float = 1e-5
    qk_layernorm: bool = False
    has_layer_scale: bool = False


_CONVENTIONS = {
    "clip": _Convention(quick_gelu),
    "siglip": _Convention(openai_gelu, eps=1e-6),
    "internvit": _Convention(
        F.gelu, normalization="RMSNorm", eps=1e-6, qk_layernorm=True, has_layer_scale=True
    ),
    "internvit300M": _Convention(F.gelu, eps=1e-6, has_layer_scale=True),
    "vit": _Convention(F.gelu, eps=1e-12),
}


def build_vlm_model(config: RunConfig, *, vp_stage: int | None = None, **stage: Any) -> LLaVAModel:
    """Build one pipeline stage on the current device; the first has the encoder of images."""
    vision = config.vision
    arguments = language_arguments(config, **stage)
    of_images = encoder_config(config)
    model = LLaVAModel(
        config.model,
        gpt_layer_spec(config),
        arguments.pop("vocab_size"),
        arguments.pop("max_sequence_length"),
        of_images,
        get_vit_layer_with_local_spec(
            of_images, has_layer_scale=_convention(config).has_layer_scale
        ),
        vision.disable_vision_class_token,
        projector_config(config),
        MLPSubmodules(ColumnParallelLinear, RowParallelLinear),
        vision.vision_projection_type,
        img_h=vision.img_h,
        img_w=vision.img_w,
        patch_dim=vision.patch_dim,
        pixel_shuffle=vision.pixel_shuffle,
        vision_model_subtype=vision.vision_model_type,
        row_length=config.data.seq_length,
        vp_stage=vp_stage,
        **arguments,
    )
    model.freeze(vision.freeze_LM, vision.freeze_ViT, False)
    return model


def encoder_config(config: RunConfig) -> TransformerConfig:
    """Return the config of the encoder's layers.

    Without --vision-model-type they have the language model's activation and norm, as in
    Megatron-LM's pretrain_vlm.py.
    """
    vision = config.vision
    values = _inherited(config.model)
    width = vision.vision_hidden_size
    if width is not None:
        values |= {"hidden_size": width, "ffn_hidden_size": 4 * width}
    if width is not None or vision.vision_num_attention_heads is not None:
        values |= {"kv_channels": None, "num_query_groups": None}
    given = {
        "num_layers": vision.vision_num_layers,
        "ffn_hidden_size": vision.vision_ffn_hidden_size,
        "num_attention_heads": vision.vision_num_attention_heads,
    }
    values |= {name: value for name, value in given.items() if value is not None}
    if config.asked.get("vision_model_type") is not None:
        kind = _convention(config)
        values |= {
            "activation_func": kind.activation,
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "bias_activation_fusion": False,
            "gated_linear_unit": False,
            "layernorm_epsilon": kind.eps,
            "layernorm_zero_centered_gamma": False,
            "normalization": kind.normalization,
            "qk_layernorm": kind.qk_layernorm,
        }
    return TransformerConfig(**values)


def projector_config(config: RunConfig) -> TransformerConfig:
    """Return the config of the projector, whose output has the language model's width."""
    return TransformerConfig(**_inherited(config.model))


def _inherited(model: TransformerConfig) -> dict[str, Any]:
    return {name: getattr(model, name) for name in _INHERITED}


def _convention(config: RunConfig) -> _Convention:
    return _CONVENTIONS[config.vision.vision_model_type]


def vlm_dataset_config(config: RunConfig, **common: Any) -> MultimodalDatasetConfig:
    """Return the dataset config; --dataloader-seq-length counts an image as no token."""
    return MultimodalDatasetConfig(
        image_h=config.vision.img_h,
        image_w=config.vision.img_w,
        preprocess_func=begin_with_image,
        **text_arguments(config),
        **(common | {"sequence_length": _text_length(config)}),
    )


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
        "images": torch.as_tensor(sample["image"]).unsqueeze(0),
    }


def vlm_batch(config: RunConfig, stage: int, num_stages: int) -> BatchTable:
    """Return the tensors that ``stage`` reads, None for those it does not.

    tokens, labels, loss_mask, position_ids and num_tiles are [b, s + 1] for s tokens of text;
    images is [t, 3, H, W] for the t tiles of all rows.  Every stage reads tokens and numbers of
    tiles, from which the positions follow.
    """
    vision = config.vision
    shape = (config.training.micro_batch_size, _text_length(config) + 1)
    ids = TensorSpec(torch.int64, shape)
    tiles = TensorSpec(torch.float32, (-1, 3, vision.img_h, vision.img_w))
    is_first, is_last = stage == 0, stage == num_stages - 1
    return {
        "tokens": ids,
        "num_tiles": ids,
        "labels": ids if is_last else None,
        "loss_mask": TensorSpec(torch.float32, shape) if is_last else None,
        "position_ids": ids if is_first else None,
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
    )
    return output, mask


def _text_length(config: RunConfig) -> int:
    assert config.vision.dataloader_seq_length is not None, "it follows from --seq-length"
    return config.vision.dataloader_seq_length


VLM = ModelImplementation(
    build=build_vlm_model,
    datasets=(MockMultimodalDataset, MockMultimodalDataset),
    dataset_config=vlm_dataset_config,
    batch=vlm_batch,
    apply=apply_vlm,
    splits_sequences=True,
)
