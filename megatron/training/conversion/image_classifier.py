"""ViT image classifiers from Hugging Face and back: config.json from and to flags, and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.training.config.run import RunConfig
from megatron.training.conversion.family import Config
from megatron.training.conversion.source import default_args, run_config
from megatron.training.conversion.vision import (
    encoder_on_meta,
    export_encoder,
    import_encoder,
    layers_of,
    sizes_of,
)

ARCHITECTURE = "ViTForImageClassification"
_HEAD = ("classifier.weight", "classifier.bias")
_NORM = "ln_post."
_OUR_NORM = "decoder.final_layernorm."  # in the encoder, in the classifier
# Names in released folders -> those of the encoder's family.
_SPELLINGS = (
    ("vit.", ""),
    ("encoder.layer.", "layers."),
    ("attention.attention.query.", "attention.q_proj."),
    ("attention.attention.key.", "attention.k_proj."),
    ("attention.attention.value.", "attention.v_proj."),
    ("attention.output.dense.", "attention.o_proj."),
    ("intermediate.dense.", "mlp.fc1."),
    ("output.dense.", "mlp.fc2."),
)
_USUAL: Config = {
    **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"intermediate_size": 3072, "hidden_act": "gelu", "layer_norm_eps": 1e-12},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    **{"image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True},
}
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
    config = {**_USUAL, **config}
    for name in ("hidden_act", "num_channels"):
        if config[name] != _USUAL[name]:
            raise CheckpointError(
                f"config.json has {name} {config[name]}: only {_USUAL[name]} can be converted"
            )
    layers = layers_of(config)
    height, width, side = sizes_of(config)
    return {
        "model_kind": "vit",
        "num_layers": layers.num_layers,
        "hidden_size": layers.hidden_size,
        "ffn_hidden_size": layers.ffn_hidden_size,
        "num_attention_heads": layers.num_attention_heads,
        "norm_epsilon": layers.layernorm_epsilon,
        "bias_gelu_fusion": False,  # GELU by its formula, not by tanh
        "hidden_dropout": config["hidden_dropout_prob"],
        "attention_dropout": config["attention_probs_dropout_prob"],
        "num_classes": len(config.get("id2label", {0: "", 1: ""})),
        **{"img_h": height, "img_w": width, "patch_dim": side},
        **{"tokenizer_type": "NullTokenizer", "vocab_size": 1},
    }


def import_classifier(config: Config, weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors of `ViTClassifier` by name.  Raises CheckpointError."""
    body = {}
    for name, tensor in weights.items():
        for released, ours in _SPELLINGS:
            name = name.replace(released, ours, 1)
        body[name] = tensor
    if missing := [name for name in _HEAD if name not in body]:
        raise CheckpointError(f"the weights have no {missing[0]}, which a {ARCHITECTURE} needs")
    head = {name: body.pop(name) for name in _HEAD}
    config = {**_USUAL, **config}
    found = import_encoder(encoder_on_meta(config), config, body) | head
    renamed = {name.replace(_NORM, _OUR_NORM): tensor for name, tensor in found.items()}
    return {name: replace(tensor, name=name) for name, tensor in renamed.items()}


def export_classifier(
    run: RunConfig, weights: Mapping[str, LazyTensor], came_with: Config
) -> tuple[JsonObject, list[LazyTensor]]:
    """Return config.json and their tensors; the reverse of `import_classifier`."""
    config = _config_of(run, came_with)
    body = {name.replace(_OUR_NORM, _NORM): tensor for name, tensor in weights.items()}
    head = [body.pop(name) for name in _HEAD]
    out = []
    for tensor in export_encoder(encoder_on_meta(config), config, body):
        name = tensor.name
        for released, ours in _SPELLINGS[1:]:
            name = name.replace(ours, released, 1)
        out.append(replace(tensor, name=f"vit.{name}"))
    return config, out + head


def _config_of(run: RunConfig, came_with: Config) -> JsonObject:
    """Return a config.json of the model; the one it came with, if that describes it."""
    model = run.model
    height = run.vision.img_h
    width = run.vision.img_w
    labels = {str(number): f"LABEL_{number}" for number in range(run.image_classifier.num_classes)}
    config: JsonObject = {
        **_USUAL,
        "architectures": [ARCHITECTURE],
        "model_type": "vit",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_hidden_size,
        "layer_norm_eps": model.layernorm_epsilon,
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "image_size": height if height == width else [height, width],
        "patch_size": run.vision.patch_dim,
        "id2label": labels,
        "label2id": {label: int(number) for number, label in labels.items()},
    }
    flags = flags_of_classifier(config)
    built = run_config(default_args() | flags)
    for name in _LAYERS:
        mine = getattr(model, name)
        theirs = getattr(built.model, name)
        if mine != theirs:
            raise CheckpointError(f"a {ARCHITECTURE} has {name} {theirs}, and this model {mine}")
    if is_image_classifier(came_with) and flags_of_classifier(came_with) == flags:
        return {**came_with}
    return config
