"""Compare the model of a checkpoint with the model that this run's command line describes.

Flags such as --num-attention-heads or --norm-epsilon change what the model computes, but not the
shape of any tensor, so with another value the run would silently train another model.  Both command
lines are resolved, so that an omitted value equals its default.  Flags that the checkpoint does not
contain, and flags that the rest of the model does not read, are not compared.  The lists of flags
are in `checkpoint_args`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Arguments, JsonObject
from megatron.core.ssm.mamba_hybrid_layer_allocation import ATTENTION, layer_pattern
from megatron.training.arguments.derive import DERIVATIONS
from megatron.training.arguments.flat_values import flat_values
from megatron.training.arguments.resolve import assemble
from megatron.training.arguments.sections import flags_and_defaults
from megatron.training.checkpointing.checkpoint_args import (
    EXPERTS,
    FORCED,
    FORCED_PREFIXES,
    IF_UNSET,
    IMAGES,
    LATENT,
    LEARNED_ANEW,
    LOGGED,
    MIMO,
    NOT_COMPARED,
    SHOWN_BY_TENSORS,
    TILES,
    YARN,
    saved_namespace,
)
from megatron.training.checkpointing.save import plain
from megatron.training.models.registry import model_kind

_ROTARY = ("rotary_", "rope_", "longrope_", "use_rope_scaling", "no_rope_freq", *YARN)
_OF_ATTENTION = ("num_attention_heads", "num_query_groups", "kv_channels", "softmax_", "window_")
_DERIVED = "kv_channels softmax_scale ffn_hidden_size max_position_embeddings".split()
_NO_PLAIN_GELU = ("swiglu", "geglu", "quick_geglu", "relu", "squared_relu", "openai_gelu")
_OF_ALIGNMENT = ("sft", "context_parallel_size")  # what --sft-alignment follows from
# Effective values of omitted flags, where the configuration has None.
_MEANT = {
    "embedding_scale": 1.0,
    "output_scale": 1.0,
    "rotary_seq_len_interpolation_factor": 1,
    "moe_router_topk_scaling_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
}

_OTHER_TOKENS = (
    "ids of equal value may be other tokens; give the tokenizer of the checkpoint, or "
    "--use-checkpoint-args"
)


@dataclass(frozen=True)
class ModelDifferences:
    """Flags whose values differ: for each of them a phrase with both values.

    ``refused``: they make it another model.  ``shown``: the tensors differ as well.  ``logged``: a
    run may change them.  ``warned``: every program may, but seldom should.  ``may_finetune``:
    --finetune would accept everything that is refused.
    """

    refused: tuple[str, ...]
    shown: tuple[str, ...]
    logged: tuple[str, ...]
    warned: tuple[str, ...] = ()
    may_finetune: bool = False

    def check(self, folder: Path) -> None:
        """Raise CheckpointError that lists the differences, if any of them is refused."""
        if not self.refused:
            return
        lines = "".join(f"\n  - {line}" for line in (*self.refused, *self.shown))
        also = ", or --finetune to train the changed model from these weights"
        raise CheckpointError(
            f"{folder} holds another model than the command line describes:{lines}\n"
            "give the values of the checkpoint, or leave these flags out and add "
            "--use-checkpoint-args"
            f"{also if self.may_finetune else ''}"
        )


def compare_models(stored: Arguments, asked: Arguments, *, is_finetuning: bool) -> ModelDifferences:
    """Compare the command line of a checkpoint with this run's (dest -> value).

    Raises CheckpointError for a stored command line that describes no model.
    """
    kind = asked.get("model_kind") or "gpt"
    try:
        theirs = _resolved(stored, kind)
        following = _following(stored, theirs, asked, kind)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise CheckpointError(
            f"the command line in the checkpoint describes no model: {error}"
        ) from None
    mine = _resolved(asked, kind)
    groups: dict[str, list[str]] = {"refused": [], "shown": [], "logged": [], "learned": []}
    warned: list[str] = []
    for name in _compared(stored, theirs, mine):
        if _is_same(theirs[name], mine[name]) or name in following:
            continue
        flag = flags_and_defaults()[name][0]
        line = f"{name}: {theirs[name]} in the checkpoint, {mine[name]} in this run ({flag})"
        if name == "tokenizer_type":
            warned += [f"{line}: {_OTHER_TOKENS}"] if theirs[name] is not None else []
        elif name in LOGGED:
            groups["logged"] += [line] if theirs[name] is not None else []
        elif name in SHOWN_BY_TENSORS:
            groups["shown"].append(line)
        else:
            groups["learned" if name in LEARNED_ANEW else "refused"].append(line)
    learned, refused = groups["learned"], groups["refused"]
    return ModelDifferences(
        refused=(*refused, *(() if is_finetuning else learned)),
        shown=tuple(groups["shown"]),
        logged=(*groups["logged"], *(learned if is_finetuning else ())),
        warned=tuple(warned),
        may_finetune=not refused,
    )


def _compared(stored: Arguments, theirs: Arguments, mine: Arguments) -> Iterator[str]:
    """Yield the flags that the checkpoint contains and both models read."""
    prefixed = (name for name in stored if name.startswith(FORCED_PREFIXES))
    for name in dict.fromkeys((*FORCED, *IF_UNSET, *prefixed, *LOGGED)):
        if name in NOT_COMPARED or name not in stored or name not in mine:
            continue
        if name == "heterogeneous_layers_config_encoded_json" and not stored[name]:
            continue  # older checkpoints contain the path of the file
        if _is_read(name, theirs) and _is_read(name, mine):
            yield name


def _following(stored: Arguments, theirs: Arguments, asked: Arguments, kind: str) -> set[str]:
    """Return flags that neither side gave and whose values follow from compared flags.

    Megatron-LM stores derived values, so a stored value that equals the derived one counts as not
    given.
    """
    derived = _resolved({k: v for k, v in stored.items() if k not in _DERIVED}, kind)
    out = {n for n in _DERIVED if asked.get(n) is None and theirs[n] == derived[n]}
    grouped = "group_query_attention"
    return out if stored.get(grouped) or asked.get(grouped) else out | {"num_query_groups"}


def _is_read(name: str, values: Arguments) -> bool:
    """Return whether the model that ``values`` describe depends on flag ``name``."""
    is_latent = bool(values["multi_latent_attention"])
    is_moe = bool(values["num_experts"])
    kind = model_kind(values["model_kind"])
    conditions = (
        (_ROTARY, is_latent or values["position_embedding_type"] in ("rope", "mrope")),
        (("mrope_section",), values["position_embedding_type"] == "mrope"),
        (YARN, values["rope_type"] == "yarn"),
        (("rope_scaling_factor",), bool(values["use_rope_scaling"])),
        (("relative_attention_",), values["position_embedding_type"] == "relative"),
        (LATENT[1:], is_latent),
        (tuple(each for each in EXPERTS if each != "num_experts"), is_moe),
        (("moe_",), is_moe),
        (("mamba_", "hybrid_"), kind.is_hybrid),
        (("hybrid_attention_ratio", "hybrid_mlp_ratio"), False),  # the pattern includes both
        (_OF_ATTENTION, not kind.is_hybrid or _has_attention(values)),
        (("bias_gelu_fusion",), not any(values[name] for name in _NO_PLAIN_GELU)),
        (("decoder_num_layers", "decoder_seq_length"), kind.has_encoder),
        (("img_h", "img_w"), values["vision_model_type"] != "qwen2_vl"),
        (IMAGES, kind.reads_images or kind.classifies_images),
        ((*TILES, "dataloader_seq_length"), kind.reads_images),
        (("num_classes",), kind.classifies_images),
        (MIMO, kind.has_placeholders),
        (("bert_binary_head",), kind.has_masked_lm_head),
        (("lora_",), values["lora_rank"] is not None),
        (("sft_",), bool(values["sft"])),
    )
    return all(is_so for names, is_so in conditions if name.startswith(names))


def _has_attention(values: Arguments) -> bool:
    return ATTENTION in (values["hybrid_override_pattern"] or "")


def _resolved(asked: Arguments, kind: str) -> JsonObject:
    """Return all flags of the model that ``asked`` describes, derived values included."""
    names = {*FORCED, *IF_UNSET, *LOGGED, *_OF_ALIGNMENT}
    said = {
        name: value
        for name, value in asked.items()
        if name in names or name.startswith(FORCED_PREFIXES)
    }
    namespace = saved_namespace({**said, "model_kind": kind})
    namespace.world_size = 1
    for derive in DERIVATIONS:
        list(derive(namespace) or ())  # its messages were reported when the run was resolved
    values = flat_values(assemble(namespace, asked=vars(namespace)))
    for name, meant in _MEANT.items():
        values[name] = meant if values[name] is None else values[name]
    if values["rope_type"] is None:
        values["rope_type"] = "yarn" if values["multi_latent_attention"] else "rope"
    if values["softmax_scale"] is None and values["kv_channels"]:
        values["softmax_scale"] = values["kv_channels"] ** -0.5
    if values["lora_alpha"] is None:
        values["lora_alpha"] = values["lora_rank"]
    if model_kind(kind).is_hybrid and values["num_layers"]:
        if values["mamba_num_heads"] is None:
            values["mamba_num_heads"] = 2 * values["hidden_size"] // values["mamba_head_dim"]
        values["hybrid_override_pattern"] = layer_pattern(
            values["num_layers"],
            values["hybrid_attention_ratio"],
            values["hybrid_mlp_ratio"],
            values["hybrid_override_pattern"],
        )
    return {name: plain(value) for name, value in values.items()}


def _is_same(theirs: object, mine: object) -> bool:
    """Return whether two plain values are equal; floats to the 7 digits of float32."""
    if isinstance(theirs, list) and isinstance(mine, list):
        return len(theirs) == len(mine) and all(map(_is_same, theirs, mine))
    if isinstance(theirs, float) and isinstance(mine, float):
        return math.isclose(theirs, mine, rel_tol=1e-7)
    return bool(theirs == mine)
