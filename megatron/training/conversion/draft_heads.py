"""Folders of draft heads, which vLLM and SGLang read beside the folder of their model.

EAGLE-3 is a LlamaForCausalLMEagle3: ``fc``, ``midlayer.*``, ``norm``, ``lm_head`` [d, h], ``d2t``
(for each of its d tokens, id minus place) and ``t2d`` (for each token, whether it is drafted).
Medusa is a MedusaModel: ``blocks.<k>.layers.0`` and ``lm_heads.<k>``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Arguments, JsonObject
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.peft.draft_heads import aux_layers
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.adapters import EAGLE_3, HEAD_SIZES, HEADS, MTP
from megatron.training.conversion import hf_folder
from megatron.training.conversion.lazy import as_lazy
from megatron.training.conversion.tensors import Rule

FOLDER = "draft"  # in the folder of the model
_PREFIX = "draft."
_EAGLE = "LlamaForCausalLMEagle3"
_MEDUSA = "MedusaModel"
_MAP = "d2t"
_LAYER = "midlayer."
_EAGLE_RULES = {
    "fc.weight": Rule(("fc.weight",)),
    "self_attention.linear_qkv.weight": Rule(
        tuple(f"{_LAYER}self_attn.{part}_proj.weight" for part in "qkv"), is_qkv=True
    ),
    "self_attention.linear_proj.weight": Rule((f"{_LAYER}self_attn.o_proj.weight",)),
    "mlp.linear_fc1.weight": Rule((f"{_LAYER}mlp.gate_proj.weight", f"{_LAYER}mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": Rule((f"{_LAYER}mlp.down_proj.weight",)),
    **{
        f"{name}.weight": Rule((f"{_LAYER}{name}.weight",))
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    },
    "norm.weight": Rule(("norm.weight",)),
    "output_layer.weight": Rule(("lm_head.weight",)),
}
# Values of the model's config.json that hold for the layer of EAGLE-3 too.
_SHARED = (
    "rope_theta rope_scaling rope_parameters max_position_embeddings bos_token_id eos_token_id "
    "pad_token_id dtype torch_dtype"
).split()
_UNREAD = {"t2d", "embed_tokens.weight"}


def has_heads(args: Arguments) -> bool:
    """Return whether the command line of a checkpoint describes draft heads."""
    return any(args.get(name) for name in HEAD_SIZES)


def as_model(args: Arguments) -> JsonObject:
    """Return the command line of the model without heads; trained layers of MTP are part of it."""
    own = {name: value for name, value in args.items() if name not in HEADS}
    is_mtp = args.get("export_eagle_algorithm") in (None, MTP)
    trained = args.get("export_num_mtp") or (is_mtp and args.get("export_num_eagle_layers"))
    return own | ({"mtp_num_layers": trained} if trained else {})


def split(weights: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """Return the weights of the model, and the weights of its heads by their names there."""
    model = {name: t for name, t in weights.items() if not name.startswith(_PREFIX)}
    heads = {k.removeprefix(_PREFIX): t for k, t in weights.items() if k not in model}
    return model, heads


def write(
    folder: Path, heads: Mapping[str, LazyTensor], model: TransformerConfig, config: JsonObject
) -> None:
    """Write ``heads`` of a model with ``config``, its config.json, into ``folder``."""
    vocab_size = int(config["vocab_size"])
    own: dict[str, Any] = {"hidden_size": model.hidden_size, "vocab_size": vocab_size}
    count = sum(name.endswith("linear.bias") for name in heads)
    more: dict[str, Tensor] = {}
    if count:
        own |= {"architectures": [_MEDUSA], "model_type": "medusa", "num_heads": count}
        own |= {"num_hidden_layers": 1, "truncated_vocab_size": vocab_size, "medusa_fc_bias": True}
    else:
        if model.rotary_interleaved:
            raise CheckpointError(
                "--format hf: the layer of EAGLE-3 rotates pairs of neighbours, as its model with "
                "--rotary-interleaved does; a Llama does not"
            )
        drafted = heads["output_layer.weight"].shape[0]
        ids = heads[_MAP].make() if _MAP in heads else torch.arange(drafted)
        is_drafted = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        more = {_MAP: ids - torch.arange(drafted), "t2d": is_drafted}
        layers = aux_layers(model.num_layers)
        own |= {
            **{name: config[name] for name in _SHARED if name in config},
            "architectures": [_EAGLE],
            "model_type": "llama",
            "draft_vocab_size": drafted,
            "intermediate_size": heads["mlp.linear_fc2.weight"].shape[1],
            "num_hidden_layers": 1,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_query_groups,
            "head_dim": model.kv_channels,
            "rms_norm_eps": model.layernorm_epsilon,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            # vLLM counts the layers that follow these outputs, SGLang the layers that have them.
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [*layers],
            },
        }
    tensors = [
        tensor for name, rule in _rules(count).items() for tensor in rule.split(heads[name], model)
    ]
    folder.mkdir()
    hf_folder.write_config(folder, own)
    hf_folder.write_weights(folder, [*tensors, *as_lazy(more).values()])


def is_folder_of_heads(folder: Path) -> bool:
    """Return whether ``folder`` has the config.json of draft heads."""
    path = folder / hf_folder.CONFIG
    names = hf_folder.read_json(path).get("architectures") if path.exists() else None
    return isinstance(names, list) and bool({_EAGLE, _MEDUSA} & set(names))


def read(
    folder: Path, model: TransformerConfig, vocab_size: int
) -> tuple[dict[str, LazyTensor], JsonObject]:
    """Read a folder of heads of ``model``; return our tensors and flags.  Raises CheckpointError.

    Sizes that do not fit are reported when the tensors are loaded.
    """
    config = hf_folder.read_json(folder / hf_folder.CONFIG)
    left = dict(hf_folder.read_weights(folder))
    is_medusa = _MEDUSA in config["architectures"]
    wanted: dict[str, object] = {"hidden_size": model.hidden_size, "num_hidden_layers": 1}
    wanted["vocab_size"] = vocab_size
    if is_medusa:
        wanted["truncated_vocab_size"] = vocab_size
    else:
        wanted["num_attention_heads"] = model.num_attention_heads
        wanted["num_key_value_heads"] = model.num_query_groups
        layers = [layer + 1 for layer in aux_layers(model.num_layers)]
        wanted["eagle_aux_hidden_state_layer_ids"] = layers
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise CheckpointError(
                f"{folder}: config.json has {name} {config[name]}, heads of this model need {value}"
            )
    count = int(config.get("num_heads", 0)) if is_medusa else 0
    out: dict[str, LazyTensor] = {}
    for name, rule in _rules(count).items():
        missing = next((theirs for theirs in rule.theirs if theirs not in left), None)
        if missing is not None:
            raise CheckpointError(f"{folder} has no {missing}, which these draft heads need")
        parts = [left.pop(theirs) for theirs in rule.theirs]
        like = [torch.empty(part.shape, device=torch.device("meta")) for part in parts]
        size = tuple(rule.to_ours(like, model).shape)
        out[_PREFIX + name] = rule.join(_PREFIX + name, parts, model, size)
    flags: JsonObject = {"export_num_medusa_heads": count}
    if not is_medusa:
        drafted = out["draft.output_layer.weight"].shape[0]
        offsets = left.pop(_MAP, None)
        flags = {"export_num_eagle_layers": 1, "export_eagle_algorithm": EAGLE_3}
        flags["export_eagle_ffn_hidden_size"] = out["draft.mlp.linear_fc2.weight"].shape[1]
        if drafted != vocab_size:
            if offsets is None:
                raise CheckpointError(f"{folder} drafts {drafted} tokens and has no {_MAP}")
            flags["export_draft_vocab_size"] = drafted
            out |= as_lazy({_PREFIX + _MAP: offsets.make() + torch.arange(drafted)})
    if others := sorted(left.keys() - _UNREAD):
        raise CheckpointError(f"{folder} has tensors of other draft heads: {', '.join(others[:3])}")
    return out, flags


def _rules(num_heads: int) -> dict[str, Rule]:
    """Return the rules of Medusa, or of EAGLE-3 for 0 heads."""
    if not num_heads:
        return _EAGLE_RULES
    pairs = [
        pair
        for k in range(num_heads)
        for pair in (
            (f"heads.{k}.linear.weight", f"blocks.{k}.layers.0.weight"),
            (f"heads.{k}.linear.bias", f"blocks.{k}.layers.0.bias"),
            (f"heads.{k}.output_layer.weight", f"lm_heads.{k}.weight"),
        )
    ]
    return {ours: Rule((theirs,)) for ours, theirs in pairs}
