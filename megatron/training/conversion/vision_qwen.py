"""Qwen2-VL's encoder and projector from Hugging Face and back: tensors bit by bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.activations import quick_gelu
from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.conversion.family import Config
from megatron.training.conversion.tensors import Rule
from megatron.training.conversion.vision import as_lazy

_LAYER = {
    "input_layernorm": "norm1",
    "self_attention.linear_qkv": "attn.qkv",
    "self_attention.linear_proj": "attn.proj",
    "pre_mlp_layernorm": "norm2",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
}
_PATCHES = "patch_embed.proj.weight"
_OUR_PATCHES = "vision_model.conv1.weight"
_OUTSIDE = {
    "vision_model.ln_post": "merger.ln_q",
    "vision_projection.encoder.linear_fc1": "merger.mlp.0",
    "vision_projection.encoder.linear_fc2": "merger.mlp.2",
}


def layers_of_qwen(config: Config, **changes: Any) -> TransformerConfig:
    """Return the config of the layers of Qwen2-VL's encoder.  Raises CheckpointError."""
    if config.get("hidden_act", "quick_gelu") != "quick_gelu":
        raise CheckpointError(
            f"vision_config has hidden_act {config['hidden_act']}: only quick_gelu can be converted"
        )
    width = config["embed_dim"]
    return _config(
        {
            "num_layers": config["depth"],
            "hidden_size": width,
            "num_attention_heads": config["num_heads"],
            "ffn_hidden_size": int(width * config["mlp_ratio"]),
            "activation_func": quick_gelu,
            **changes,
        }
    )


def projector_of_qwen(config: Config, **changes: Any) -> TransformerConfig:
    """Return the config of the projector: two layers, the first as wide as a block of patches."""
    width = config["embed_dim"] * config["spatial_merge_size"] ** 2
    return _config(
        {
            "num_layers": 1,
            "hidden_size": config["hidden_size"],
            "num_attention_heads": 1,
            "ffn_hidden_size": width,
            "activation_func": torch.nn.functional.gelu,
            **changes,
        }
    )


def _config(values: dict[str, Any]) -> TransformerConfig:
    always = {
        "layernorm_epsilon": 1e-6,
        "bias_activation_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return TransformerConfig(**always | values)


def qwen_from_hf(layers: TransformerConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the encoder and the projector by the names of `LLaVAModel`.

    ``tensors``: those of ``model.visual``.  Raises CheckpointError for one that is missing or left.
    """
    return {name: t.make() for name, t in import_qwen(layers, as_lazy(tensors)).items()}


def import_qwen(
    layers: TransformerConfig, weights: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Do `qwen_from_hf` for tensors that are made later."""
    left = dict(weights)
    try:
        patches = left.pop(_PATCHES)
        shape = (patches.shape[0], math.prod(patches.shape[1:]))
        found = {_OUR_PATCHES: _reshaped(_OUR_PATCHES, patches, shape)}
        for ours, theirs in _names(layers).items():
            tensor = left.pop(theirs)
            make = tensor.make
            if ".linear_qkv." in ours:
                make = partial(_interleaved, tensor, layers)
            found[ours] = replace(tensor, name=ours, make=make)
    except KeyError as error:
        raise CheckpointError(f"the encoder has no tensor {error.args[0]}") from None
    if left:
        raise CheckpointError(f"{next(iter(left))} has no counterpart in Qwen2-VL's encoder")
    return found


def qwen_to_hf(
    layers: TransformerConfig, config: Config, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the reverse of `qwen_from_hf`."""
    return {t.name: t.make() for t in export_qwen(layers, config, as_lazy(tensors))}


def export_qwen(
    layers: TransformerConfig, config: Config, tensors: Mapping[str, LazyTensor]
) -> list[LazyTensor]:
    """Do `qwen_to_hf` for tensors that are made later."""
    side = config["patch_size"]
    frames = config["temporal_patch_size"]
    patches = tensors[_OUR_PATCHES]
    out = [_reshaped(_PATCHES, patches, (patches.shape[0], 3, frames, side, side))]
    for ours, theirs in _names(layers).items():
        tensor = tensors[ours]
        make = tensor.make
        if ".linear_qkv." in ours:
            make = partial(_one_after_another, tensor, layers)
        out.append(replace(tensor, name=theirs, make=make))
    return out


def _reshaped(name: str, tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    return LazyTensor(name, tensor.dtype, shape, lambda: tensor.make().reshape(shape))


def _interleaved(tensor: LazyTensor, layers: TransformerConfig) -> Tensor:
    return _QKV.to_ours(list(tensor.make().chunk(3)), layers)  # type: ignore[arg-type]


def _one_after_another(tensor: LazyTensor, layers: TransformerConfig) -> Tensor:
    return torch.cat(_QKV.to_theirs(tensor.make(), layers))  # type: ignore[arg-type]


_QKV = Rule(("q", "k", "v"), is_qkv=True)


def _names(layers: TransformerConfig) -> dict[str, str]:
    """Return our name -> theirs of each tensor but that of the patches."""
    modules = dict(_OUTSIDE)
    for number in range(layers.num_layers):
        for ours, theirs in _LAYER.items():
            modules[f"vision_model.decoder.layers.{number}.{ours}"] = f"blocks.{number}.{theirs}"
    return {
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    }
