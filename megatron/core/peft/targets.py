"""Names of the layers that get adapters: Megatron-LM's, and those of the PEFT library.

A layer has its global module name (``decoder.layers.0.self_attention.linear_qkv``).  A layer that
stacks several matrices of Hugging Face's models has one part for each: q, k and v, or gate and up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from megatron.core.config.errors import ConfigError

ALL_LINEAR = "all-linear"
WHOLE = ""  # the part of a layer with one matrix
_OUTSIDE = ("word_embeddings", "output_layer")  # not part of all-linear, as in PEFT
# PEFT's name -> our layers and the part of each.
_OF_PEFT: Mapping[str, Mapping[str, str]] = {
    "q_proj": {"linear_qkv": "q", "linear_q_proj": WHOLE, "linear_q": WHOLE},
    "k_proj": {"linear_qkv": "k", "linear_kv": "k"},
    "v_proj": {"linear_qkv": "v", "linear_kv": "v"},
    "o_proj": {"linear_proj": WHOLE},
    "gate_proj": {"linear_fc1": "gate"},
    "up_proj": {"linear_fc1": "up"},
    "down_proj": {"linear_fc2": WHOLE},
    "w1": {"linear_fc1": "gate"},
    "w3": {"linear_fc1": "up"},
    "w2": {"linear_fc2": WHOLE},
    "q_a_proj": {"linear_q_down_proj": WHOLE},
    "q_b_proj": {"linear_q_up_proj": WHOLE},
    "kv_a_proj_with_mqa": {"linear_kv_down_proj": WHOLE},
    "kv_b_proj": {"linear_kv_up_proj": WHOLE},
    "embed_tokens": {"word_embeddings": WHOLE},
    "lm_head": {"output_layer": WHOLE},
}
_EXPERT = re.compile(r"\.local_experts\.\d+\.")
_MODULES_OF_PEFT = {"self_attn": "self_attention", "model": "decoder"}


def targeted_parts(target: str, module: str, parts: Sequence[str]) -> tuple[str, ...]:
    """Return the parts of layer ``module`` that ``target`` selects, of ``parts``.

    ``target`` is a name, or the end of a dotted name (``self_attention.linear_proj``), in which
    the experts of a layer have no numbers (``experts.linear_fc1``).
    """
    *inside, last = target.split(".")
    *around, own = _EXPERT.sub(".", module).split(".")
    if target == ALL_LINEAR:
        return () if own in _OUTSIDE else tuple(parts)
    wanted = [_MODULES_OF_PEFT.get(each, each) for each in inside]
    if wanted and around[-len(wanted) :] != wanted:
        return ()
    if last == own:
        return tuple(parts)
    part = _OF_PEFT.get(last, {}).get(own)
    if part is None:
        return ()
    if part == "up" and WHOLE in parts:  # an MLP without a gate
        part = WHOLE
    return (part,) if part in parts else ()


def names_of(module: str, parts: Sequence[str]) -> set[str]:
    """Return the names that select layer ``module`` or one of its parts."""
    own = module.rsplit(".", 1)[-1]
    theirs = (name for name in _OF_PEFT if targeted_parts(name, module, parts))
    return {own, *theirs}


def check_targets(targets: Iterable[str], matched: set[str], names: Iterable[str]) -> None:
    """Raise ConfigError for targets that match no layer; ``names`` are those that would."""
    unknown = [target for target in targets if target not in matched]
    if unknown:
        raise ConfigError(
            f"--lora-target-modules {' '.join(unknown)}: the model has no layer of this name; it "
            f"has {', '.join(sorted(names))}; {ALL_LINEAR} selects all but "
            f"{' and '.join(_OUTSIDE)}"
        )
