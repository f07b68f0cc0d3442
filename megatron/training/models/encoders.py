"""Encoders of images and of sound, and their projectors, as the flags describe them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from megatron.core.activations import openai_gelu, quick_gelu
from megatron.core.config.errors import ConfigError
from megatron.core.datasets.images import FRAMES
from megatron.core.models.vision.kinds import KINDS, VisionKind, get_num_image_embeddings
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
_COLORS = 3


@dataclass(frozen=True)
class Convention:
    """What the layers of an encoder's architecture have, whatever the language model has."""

    activation: Any
    normalization: str = "LayerNorm"
    eps: float = 1e-5
    has_qk_norm: bool = False  # over all heads
    has_layer_scale: bool = False

    @property
    def values(self) -> dict[str, Any]:
        """Fields of the config of the layers."""
        return {
            "activation_func": self.activation,
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "bias_activation_fusion": False,
            "gated_linear_unit": False,
            "layernorm_epsilon": self.eps,
            "layernorm_zero_centered_gamma": False,
            "normalization": self.normalization,
            "qk_layernorm": False,
            "qk_layernorm_full_width": self.has_qk_norm,
        }


_CONVENTIONS = {
    "clip": Convention(quick_gelu),
    "siglip": Convention(openai_gelu, eps=1e-6),
    "siglip_without_norm": Convention(openai_gelu, eps=1e-6),
    "internvit": Convention(
        F.gelu, normalization="RMSNorm", eps=1e-6, has_qk_norm=True, has_layer_scale=True
    ),
    "internvit300M": Convention(F.gelu, eps=1e-6, has_layer_scale=True),
    "vit": Convention(F.gelu, eps=1e-12),
    "qwen2_vl": Convention(quick_gelu, eps=1e-6),
}


@dataclass(frozen=True, kw_only=True)
class ImageEncoder:
    """Configs and sizes of the encoder and the projector."""

    layers: TransformerConfig  # of the encoder
    projector: TransformerConfig  # its width is the language model's
    kind: VisionKind
    has_layer_scale: bool
    num_patches: int  # of a tile
    num_embeddings: int  # of a tile, for the language model
    max_tiles: int  # of a sample
    pixels: int  # of a patch, in all colors
    projector_has_norm: bool  # of its input
    projector_input: int  # channels

    @property
    def layer_spec(self) -> ModuleSpec:
        """Spec of the encoder's layers."""
        return get_vit_layer_with_local_spec(self.layers, has_layer_scale=self.has_layer_scale)

    @property
    def projector_spec(self) -> ProjectorSubmodules:
        """Specs of the projector's parts."""
        return get_projector_spec(has_norm=self.projector_has_norm)

    @property
    def input_products(self) -> tuple[int, int]:
        """Multiply-adds before the layers, of one tile: without, and with gradients of inputs."""
        return self.num_patches * self.pixels * self.layers.hidden_size, 0

    @property
    def num_tokens(self) -> int:
        """Embeddings of a tile in the encoder: patches and the class token."""
        return self.num_patches + self.kind.has_class_token


def image_encoder(config: RunConfig) -> ImageEncoder:
    """Return the encoder of a model kind that reads images.

    --seq-length has places for one image of as many tiles as the flags allow.
    """
    vision = config.vision
    layers = encoder_config(config)
    sizes = vision.img_h, vision.img_w, vision.patch_dim
    merges_patches = vision.pixel_shuffle or KINDS[vision.vision_model_type].reads_any_size
    return ImageEncoder(
        layers=layers,
        projector=projector_config(config),
        kind=KINDS[vision.vision_model_type],
        has_layer_scale=has_layer_scale(config),
        num_patches=num_patches(vision),
        num_embeddings=get_num_image_embeddings(
            *sizes,
            vision.vision_model_type,
            vision.disable_vision_class_token,
            1,
            vision.pixel_shuffle,
        ),
        max_tiles=max(vision.max_tiles, config.mimo.num_frames),
        pixels=pixels_of_patch(vision),
        projector_has_norm=projector_has_norm(config),
        projector_input=layers.hidden_size * (4 if merges_patches else 1),
    )


def num_patches(vision: VisionConfig) -> int:
    """Return the number of patches of an image, or of a tile of one."""
    return (vision.img_h // vision.patch_dim) * (vision.img_w // vision.patch_dim)


def pixels_of_patch(vision: VisionConfig) -> int:
    """Return the values of a patch, in all colors and frames."""
    frames = FRAMES if KINDS[vision.vision_model_type].reads_any_size else 1
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
        kind = _convention(config)
        values |= kind.values
    if vision.recompute_vision:
        values |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(**values)


def projector_config(config: RunConfig) -> TransformerConfig:
    """Return the config of the projector, whose output has the language model's width.

    With --vision-model-type it is that of LLaVA and InternVL: GELU, biases, one width; that of
    Qwen2-VL is as wide as its input.
    """
    values = _inherited(config)
    if follows_architecture(config):
        is_wide = KINDS[config.vision.vision_model_type].reads_any_size
        width = 4 * encoder_config(config).hidden_size if is_wide else config.model.hidden_size
        values |= {
            "activation_func": F.gelu,
            "add_bias_linear": True,
            "bias_activation_fusion": False,
            "ffn_hidden_size": width,
            "gated_linear_unit": False,
            "layernorm_epsilon": 1e-5,
            "layernorm_zero_centered_gamma": False,
            "normalization": "LayerNorm",
        }
    return TransformerConfig(**values)


def follows_architecture(config: RunConfig) -> bool:
    """Return whether layers have the convention of the encoder's architecture.

    That is so with --vision-model-type, and with all providers of MiMo but mock.
    """
    return config.asked.get("vision_model_type") is not None or config.mimo.model_provider != "mock"


def projector_has_norm(config: RunConfig) -> bool:
    """Return whether a norm precedes the projector, as in InternVL."""
    return config.vision.vision_model_type.startswith("internvit")


def has_layer_scale(config: RunConfig) -> bool:
    """Return whether the encoder's layers scale each channel of what they add."""
    return _convention(config).has_layer_scale


def _inherited(config: RunConfig) -> dict[str, Any]:
    model = config.model
    values = {name: getattr(model, name) for name in _INHERITED}
    if config.mimo.encoder_tp is not None:
        values["tensor_model_parallel_size"] = config.mimo.encoder_tp
    return values


def _convention(config: RunConfig) -> Convention:
    return _CONVENTIONS[config.vision.vision_model_type]


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
