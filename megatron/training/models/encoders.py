"""Encoders of images and of sound, and their projectors, as the flags describe them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from megatron.core.activations import openai_gelu, quick_gelu
from megatron.core.config.errors import ConfigError
from megatron.core.datasets.images import STATISTICS
from megatron.core.models.vision.kinds import KINDS, get_num_image_embeddings
from megatron.core.models.vision.multimodal_projector import ProjectorSubmodules, get_projector_spec
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.text_files import read_text
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run import RunConfig
from megatron.training.config.vision import VisionConfig

# What the encoder and the projector have in common with the language model.
_INHERITED = (
    "activation_func activation_func_clamp_value add_bias_linear add_qkv_bias attention_backend "
    "attention_dropout attention_softmax_in_fp32 bf16 "
    "bias_activation_fusion bias_dropout_fusion calculate_per_token_loss "
    "deterministic_mode disable_bf16_reduced_precision_matmul ffn_hidden_size fp16 fp8 "
    "fp8_amax_compute_algo fp8_amax_history_len fp8_interval fp8_margin fp8_param fp8_recipe "
    "fp8_wgrad gated_linear_unit gradient_accumulation_fusion hidden_dropout hidden_size "
    "init_method_std init_method_xavier_uniform init_seed kv_channels layernorm_epsilon "
    "layernorm_zero_centered_gamma masked_softmax_fusion normalization num_attention_heads "
    "num_layers num_query_groups params_dtype perform_initialization qk_layernorm "
    "tensor_model_parallel_size transformer_impl "
).split()
_COLORS = 3


def _convention(
    activation: Any, eps: float = 1e-5, normalization: str = "LayerNorm", has_qk_norm: bool = False
) -> dict[str, Any]:
    """Return what an architecture's layers have, whatever the language model has."""
    return {
        "activation_func": activation,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "bias_activation_fusion": False,
        "gated_linear_unit": False,
        "layernorm_epsilon": eps,
        "layernorm_zero_centered_gamma": False,
        "normalization": normalization,
        "qk_layernorm": False,
        "qk_layernorm_full_width": has_qk_norm,  # over all heads
    }


_CONVENTIONS = {
    "clip": _convention(quick_gelu),
    "siglip": _convention(openai_gelu, 1e-6),
    "siglip_without_norm": _convention(openai_gelu, 1e-6),
    "internvit": _convention(F.gelu, 1e-6, "RMSNorm", has_qk_norm=True),
    "internvit300M": _convention(F.gelu, 1e-6),
    "vit": _convention(F.gelu, 1e-12),
    "gemma3": _convention(openai_gelu, 1e-6),
    "qwen2_vl": _convention(quick_gelu, 1e-6),
    "qwen3_vl": _convention(openai_gelu, 1e-6),
    "pixtral": {
        **_convention(F.silu, 1e-5, "RMSNorm"),
        **{"gated_linear_unit": True, "add_bias_linear": False, "add_qkv_bias": False},
    },
}


@dataclass(frozen=True, kw_only=True)
class MediaEncoder:
    """Configs and sizes of an encoder of images or of sound, and of its projector."""

    layers: TransformerConfig  # of the encoder
    projector: TransformerConfig  # its width is the language model's
    is_internvit: bool = False  # layers scale their channels
    norms_output: bool = False  # before the projector
    merges: bool = False  # four embeddings by a matrix, before the projector
    num_tokens: int  # embeddings of a tile or a sound in the encoder
    num_embeddings: int  # of a tile or a sound, for the language model
    max_tiles: int = 1  # of a sample, which has one sound
    num_mel_bins: int = 0  # frequencies of a spectrogram
    projector_input: int  # channels
    input_products: tuple[int, int]  # multiply-adds before the layers: without, with input grads
    input_parameters: int  # before the layers
    num_norms: int  # outside of the layers

    @property
    def layer_spec(self) -> ModuleSpec:
        """Spec of the encoder's layers."""
        return get_vit_layer_with_local_spec(self.layers, has_layer_scale=self.is_internvit)

    @property
    def projector_spec(self) -> ProjectorSubmodules:
        """Specs of the projector's parts."""
        return get_projector_spec(has_norm=self.norms_output, merges=self.merges)


def image_encoder(config: RunConfig) -> MediaEncoder:
    """Return the encoder of a model kind that reads images.

    --seq-length has places for one image of as many tiles as the flags allow.
    """
    vision = config.vision
    layers = encoder_config(config)
    hidden = layers.hidden_size
    kind = KINDS[vision.vision_model_type]
    pixels = pixels_of_patch(vision)
    num_tokens = num_patches(vision) + kind.has_class_token
    positions = 0 if kind.reads_any_size else num_tokens
    if kind.has_position_table:
        positions = vision.vision_num_position_embeddings
    joins = vision.pixel_shuffle or (kind.reads_any_size and not kind.ends_rows)
    is_internvit = vision.vision_model_type.startswith("internvit")
    return MediaEncoder(
        layers=layers,
        projector=projector_config(config),
        is_internvit=is_internvit,
        norms_output=is_internvit or kind.is_pooled or kind.ends_rows,
        merges=kind.ends_rows,
        num_tokens=num_tokens,
        num_embeddings=num_image_embeddings(vision),
        max_tiles=max(vision.max_tiles, config.mimo.num_frames),
        projector_input=hidden * (4 if joins else 1),
        input_products=(num_patches(vision) * pixels * hidden, 0),
        input_parameters=hidden * (pixels + positions + kind.has_class_token + kind.has_patch_bias),
        num_norms=kind.has_norm_before + kind.has_norm_after,
    )


def num_image_embeddings(vision: VisionConfig) -> int:
    """Return the embeddings of a tile, or of the largest image, for the language model."""
    return get_num_image_embeddings(
        vision.img_h,
        vision.img_w,
        vision.patch_dim,
        vision.vision_model_type,
        vision.disable_vision_class_token,
        1,
        vision.pixel_shuffle,
        vision.pooled_image_embeddings,
    )


def num_patches(vision: VisionConfig) -> int:
    """Return the number of patches of an image, or of a tile of one."""
    return (vision.img_h // vision.patch_dim) * (vision.img_w // vision.patch_dim)


def pixels_of_patch(vision: VisionConfig) -> int:
    """Return the values of a patch, in all colors and frames."""
    kind = vision.vision_model_type
    frames = STATISTICS[kind].frames if KINDS[kind].reads_any_size else 1
    return _COLORS * frames * vision.patch_dim**2


def encoder_config(config: RunConfig) -> TransformerConfig:
    """Return the config of the encoder's layers.

    Without --vision-model-type they have the language model's activation and norm, as in
    Megatron-LM's pretrain_vlm.py.
    """
    vision = config.vision
    values = _inherited(config)
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
    if follows_architecture(config):
        values |= _CONVENTIONS[vision.vision_model_type]
    if vision.recompute_vision:
        values |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig.unchecked(**values)


def projector_config(config: RunConfig) -> TransformerConfig:
    """Return the config of the projector, whose output has the language model's width.

    With --vision-model-type it is that of LLaVA and InternVL: GELU, biases, one width; that of
    Qwen2-VL is as wide as its input, that of Gemma-3 has Gemma's norm and no biases, and that of
    Mistral 3 the language model's norm and no biases.
    """
    values = _inherited(config)
    if follows_architecture(config):
        kind = KINDS[config.vision.vision_model_type]
        is_wide = kind.reads_any_size and not kind.ends_rows
        width = 4 * encoder_config(config).hidden_size if is_wide else config.model.hidden_size
        eps = 1e-6 if kind.has_position_table else 1e-5
        values |= _convention(F.gelu, eps) | {"ffn_hidden_size": width}
        if kind.is_pooled or kind.ends_rows:
            eps = 1e-6 if kind.is_pooled else config.model.layernorm_epsilon
            values |= _convention(F.gelu, eps, "RMSNorm") | {"add_bias_linear": False}
            values["layernorm_zero_centered_gamma"] = kind.is_pooled
    return TransformerConfig.unchecked(**values)


def follows_architecture(config: RunConfig) -> bool:
    """Return whether layers have the convention of the encoder's architecture.

    That is so with --vision-model-type, and with all providers of MiMo but mock.
    """
    return config.asked.get("vision_model_type") is not None or config.mimo.model_provider != "mock"


def _inherited(config: RunConfig) -> dict[str, Any]:
    model = config.model
    values = {name: getattr(model, name) for name in _INHERITED}
    values["apply_rope_fusion"] = True
    if config.mimo.encoder_tp is not None:
        values["tensor_model_parallel_size"] = config.mimo.encoder_tp
    return values


def format_problem(checkpoint_format: str) -> str | None:
    """Return why a checkpoint format cannot hold a model that reads images, or None."""
    if checkpoint_format in ("safetensors_dist", "torch_dist"):
        return None
    return (
        f"{checkpoint_format} stores the modules of a language model alone, without an encoder of "
        "images: use safetensors_dist or torch_dist"
    )


_NUM_MEL_BINS = 80
_KERNEL = 3  # frames of a convolution


def encoders_of(config: RunConfig) -> list[MediaEncoder]:
    """Return the encoders of a model kind that reads images."""
    return [image_encoder(config), *([audio_encoder(config)] if config.mimo.has_sound else [])]


def audio_encoder(config: RunConfig) -> MediaEncoder:
    """Return the encoder of sound: with the size in --audio-encoder-model, or that of images.

    Raises ConfigError if the folder has no config.json of a Whisper model.
    """
    layers = encoder_config(config).changed(**_convention(F.gelu))
    num_mel_bins = _NUM_MEL_BINS
    if config.mimo.audio_encoder_model is not None:
        given = whisper_config(config.mimo.audio_encoder_model)
        num_mel_bins = given["num_mel_bins"]
        sizes = {
            "num_layers": given["encoder_layers"],
            "hidden_size": given["d_model"],
            "num_attention_heads": given["encoder_attention_heads"],
            "ffn_hidden_size": given["encoder_ffn_dim"],
            "kv_channels": None,
            "num_query_groups": None,
        }
        layers = replace(layers, **sizes)
    hidden = layers.hidden_size
    length = config.mimo.audio_seq_length
    return MediaEncoder(
        layers=layers,
        projector=projector_config(config),
        num_tokens=length,
        num_embeddings=length,
        num_mel_bins=num_mel_bins,
        projector_input=hidden,
        # Of two convolutions; the first has twice as many frames.
        input_products=(2 * length * _KERNEL * num_mel_bins * hidden, length * _KERNEL * hidden**2),
        input_parameters=hidden * (_KERNEL * (num_mel_bins + hidden) + 2),
        num_norms=1,
    )


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
