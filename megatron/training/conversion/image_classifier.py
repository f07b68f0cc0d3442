"""ViT image classifiers from Hugging Face and back: config.json from and to flags, and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.training.config.run import RunConfig
from megatron.training.conversion.families.fields import demand, same
from megatron.training.conversion.family import Config, Field, Values
from megatron.training.conversion.source import default_args, run_config
from megatron.training.conversion.verify import model_on_meta
from megatron.training.conversion.vision import (
    EncoderFamily,
    export_encoder,
    image_sizes,
    import_encoder,
    names_of_layer,
    sizes,
)

ARCHITECTURE = "ViTForImageClassification"
_QKV = " ".join(f"attention.attention.{name}" for name in ("query", "key", "value"))


def _write_labels(flags: Any) -> Values:
    labels = {str(number): f"LABEL_{number}" for number in range(flags.num_classes)}
    back = {label: int(number) for number, label in labels.items()}
    return {"id2label": labels, "label2id": back, "qkv_bias": True}


_VIT = EncoderFamily(
    subtype=ARCHITECTURE,
    fields=(
        demand(hidden_act="gelu", num_channels=3),
        *sizes(12, 768, 3072, 12),
        same("layer_norm_eps", "norm_epsilon", 1e-12),
        same("hidden_dropout_prob", "hidden_dropout", 0.0),
        same("attention_probs_dropout_prob", "attention_dropout", 0.0),
        image_sizes(
            224,
            16,
            lambda flags: {
                "image_size": flags.img_h
                if flags.img_h == flags.img_w
                else [flags.img_h, flags.img_w],
                "patch_size": flags.patch_dim,
            },
        ),
        Field(
            lambda config: {"num_classes": len(config.get("id2label", {0: "", 1: ""}))},
            _write_labels,
        ),
    ),
    outside={
        "class_token": "vit.embeddings.cls_token",
        "conv1": "vit.embeddings.patch_embeddings.projection",
        "position_embeddings.weight": "vit.embeddings.position_embeddings",
        "decoder.final_layernorm": "vit.layernorm",
        "classifier": "classifier",
    },
    layer=names_of_layer(
        *("layernorm_before", _QKV, "attention.output.dense", "layernorm_after"),
        *("intermediate.dense", "output.dense"),
    ),
    layer_prefix="vit.encoder.layer.{}.",
)
# Fields of the layers that have one value in this architecture.
_LAYERS = (
    "activation_func bias_activation_fusion add_bias_linear add_qkv_bias gated_linear_unit "
    "normalization qk_layernorm num_query_groups kv_channels layernorm_zero_centered_gamma "
    "layer_norm_placement"
).split()


def is_image_classifier(config: Config) -> bool:
    """Return whether config.json is that of a ViT with a classifier."""
    return config.get("model_type") == "vit" and ARCHITECTURE in config.get("architectures", ())


def flags_of_classifier(config: Config) -> JsonObject:
    """Return the flags, dest -> value, that build the model.  Raises CheckpointError."""
    return {
        "model_kind": "vit",
        "bias_gelu_fusion": False,  # GELU by its formula, not by tanh
        **{"tokenizer_type": "NullTokenizer", "vocab_size": 1},
        **_VIT.flags(config),
    }


def import_classifier(config: Config, weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors of `ViTClassifier` by name.  Raises CheckpointError."""
    run = run_config(default_args() | flags_of_classifier(config))
    return import_encoder(_VIT, model_on_meta(run, 1), config, weights)


def export_classifier(
    run: RunConfig, weights: Mapping[str, LazyTensor], came_with: Config
) -> tuple[JsonObject, list[LazyTensor]]:
    """Return config.json and their tensors; the reverse of `import_classifier`."""
    config = _config_of(run, came_with)
    return config, export_encoder(_VIT, run.model, config, weights)


def _config_of(run: RunConfig, came_with: Config) -> JsonObject:
    """Return a config.json of the model; the one it came with, if that describes it."""
    values = {**vars(run.vision), **vars(run.model), **vars(run.image_classifier)}
    flags = SimpleNamespace(**values, norm_epsilon=run.model.layernorm_epsilon)
    config: JsonObject = {"architectures": [ARCHITECTURE], "model_type": "vit"}
    for each in _VIT.fields:
        config |= each.write(flags)
    described = flags_of_classifier(config)
    built = run_config(default_args() | described)
    for name in _LAYERS:
        mine = getattr(run.model, name)
        theirs = getattr(built.model, name)
        if mine != theirs:
            raise CheckpointError(f"a {ARCHITECTURE} has {name} {theirs}, and this model {mine}")
    if is_image_classifier(came_with) and flags_of_classifier(came_with) == described:
        return {**came_with}
    return config
