"""ViT image classifiers from Hugging Face and back: config.json from and to flags, and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron.core import optional
from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.training.arguments.parser import build_parser
from megatron.training.config.run import RunConfig
from megatron.training.conversion import hf_folder
from megatron.training.conversion.family import Config
from megatron.training.conversion.source import (
    TO_RESOLVE,
    ConversionRequest,
    Source,
    config_beside,
    run_config,
    weights_of,
)
from megatron.training.conversion.verify import TOLERANCE, groups_of_one_rank, our_model
from megatron.training.conversion.vision import (
    build_encoder,
    export_encoder,
    import_encoder,
    layers_of,
    sizes_of,
)

Say = Callable[[str], None]

ARCHITECTURE = "ViTForImageClassification"
_HEAD = ("classifier.weight", "classifier.bias")
_NORMS = {"ln_post": "decoder.final_layernorm"}  # name in the encoder -> in the classifier
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


def classifier_from_hf(
    wanted: ConversionRequest, config: Config, weights: Mapping[str, LazyTensor], say: Say
) -> Source:
    """Return the source that a folder is.  Raises CheckpointError."""
    spelled = {_respelled(name): tensor for name, tensor in weights.items()}
    missing = [name for name in _HEAD if name not in spelled]
    if missing:
        raise CheckpointError(f"the weights have no {missing[0]}, which a {ARCHITECTURE} needs")
    body = {name: t for name, t in spelled.items() if name not in _HEAD}
    with torch.device("meta"):
        encoder = build_encoder({**_USUAL, **config}, groups_of_one_rank())
    found = import_encoder(encoder, {**_USUAL, **config}, body)
    tensors = {_renamed(name): replace(t, name=_renamed(name)) for name, t in found.items()}
    tensors |= {name: replace(spelled[name], name=name) for name in _HEAD}
    say(f"{wanted.source} is a {ARCHITECTURE} of {_count(tensors)} weights")
    dtype = tensors[_HEAD[0]].dtype
    precision = {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    args = vars(build_parser().parse_args([])) | flags_of_classifier(config) | precision
    args |= TO_RESOLVE
    if wanted.verify:
        say(_compare(wanted.source, run_config(args), tensors))
    return Source(tensors=tensors, args=args, common={}, layout={}, beside=wanted.source)


def classifier_to_hf(source: Source, wanted: ConversionRequest, run: RunConfig, say: Say) -> Path:
    """Write a folder of Hugging Face.  Raises CheckpointError."""
    weights = weights_of(source)
    config = _config_of(run, config_beside(source))
    back = {ours: name for name, ours in _NORMS.items()}
    body = {}
    for name, tensor in weights.items():
        module, _, kind = name.rpartition(".")
        short = f"{back[module]}.{kind}" if module in back else name
        body[short] = replace(tensor, name=short)
    head = [body.pop(name) for name in _HEAD]
    with torch.device("meta"):
        encoder = build_encoder(config, groups_of_one_rank())
    tensors = [*export_encoder(encoder, config, body), *head]
    tensors = [replace(tensor, name=_spelled_back(tensor.name)) for tensor in tensors]
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    config = {**config, name: str(tensors[0].dtype).removeprefix("torch.")}
    with hf_folder.new_folder(wanted.target) as folder:
        hf_folder.write_config(folder, config)
        hf_folder.write_weights(folder, tensors, wanted.max_shard_bytes)
        if source.beside is not None:
            hf_folder.copy_beside(source.beside, folder)
        if wanted.verify:
            say(_compare(folder, run, weights))
    say(f"wrote {ARCHITECTURE}, {_count(weights)} weights, to {wanted.target}")
    return wanted.target


def _config_of(run: RunConfig, came_with: Config) -> JsonObject:
    """Return a config.json of the model; the one it came with, if that describes it."""
    model = run.model
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
        "image_size": [run.vision.img_h, run.vision.img_w],
        "patch_size": run.vision.patch_dim,
        "id2label": labels,
        "label2id": {label: int(number) for number, label in labels.items()},
    }
    if run.vision.img_h == run.vision.img_w:
        config["image_size"] = run.vision.img_h
    flags = flags_of_classifier(config)
    built = run_config(vars(build_parser().parse_args([])) | flags | TO_RESOLVE)
    for name in ("activation_func", "bias_activation_fusion", *_LAYERS):
        mine = getattr(model, name)
        theirs = getattr(built.model, name)
        if mine != theirs:
            raise CheckpointError(f"a {ARCHITECTURE} has {name} {theirs}, and this model {mine}")
    if is_image_classifier(came_with) and flags_of_classifier(came_with) == flags:
        return {**came_with}
    return config


_LAYERS = (
    "add_bias_linear add_qkv_bias gated_linear_unit normalization qk_layernorm num_query_groups "
    "kv_channels layernorm_zero_centered_gamma layer_norm_placement"
).split()


@torch.no_grad()
def _compare(folder: Path, config: RunConfig, tensors: Mapping[str, LazyTensor]) -> str:
    """Compare the logits of two images.  Raises CheckpointError if they differ."""
    reason = optional.why_missing("transformers")
    if reason is not None:
        return f'the logits were not compared: {reason} (pip install "megatron-train[hf]")'
    transformers = optional.require("transformers", "comparing logits")
    options = {"local_files_only": True, "trust_remote_code": False, "dtype": torch.float32}
    auto = transformers.AutoModelForImageClassification
    model = auto.from_pretrained(folder, attn_implementation="eager", **options).eval()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, config.vision.img_h, config.vision.img_w, generator=generator)
    theirs: Tensor = model(images).logits
    ours: Tensor = our_model(config, tensors, 1)(images)
    apart = float((ours - theirs).abs().max())
    largest = max(1.0, float(theirs.abs().max()))
    if not apart <= TOLERANCE * largest:
        raise CheckpointError(
            f"the logits of both forms differ by {apart:.3g}, the largest is {largest:.3g}: "
            "this conversion is wrong and is not kept; please report it with config.json"
        )
    return f"the logits of 2 images agree within {apart:.2g} (the largest {largest:.3g})"


def _renamed(name: str) -> str:
    module, _, kind = name.rpartition(".")
    return f"{_NORMS[module]}.{kind}" if module in _NORMS else name


def _respelled(name: str) -> str:
    for released, ours in _SPELLINGS:
        name = name.replace(released, ours, 1)
    return name


def _spelled_back(name: str) -> str:
    if name in _HEAD:
        return name
    for released, ours in _SPELLINGS[1:]:
        name = name.replace(ours, released, 1)
    return f"vit.{name}"


def _count(tensors: Mapping[str, LazyTensor]) -> str:
    return f"{sum(t.num_bytes // t.dtype.itemsize for t in tensors.values()):,}"
