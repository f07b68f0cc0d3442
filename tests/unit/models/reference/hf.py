"""Weights of `transformers` models under our names.

Each function is linear in the weights, so it maps gradients as well.  ``n`` query heads, ``g``
key/value heads, ``d`` head width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def interleave(query: Tensor, key: Tensor, value: Tensor, num_groups: int) -> Tensor:
    """Rows of q, k and v -> rows of one matrix, group by group."""
    parts = [part.unflatten(0, (num_groups, -1)) for part in (query, key, value)]
    return torch.cat(parts, 1).flatten(0, 1)


def from_gpt2(hf: Mapping[str, Tensor], num_layers: int, num_heads: int) -> Weights:
    """GPT2LMHeadModel; its matrices are transposed."""
    out = {
        "embedding.word_embeddings.weight": hf["transformer.wte.weight"],
        "embedding.position_embeddings.weight": hf["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": hf["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": hf["transformer.ln_f.bias"],
    }
    table = {
        "ln_1": "input_layernorm",
        "attn.c_proj": "self_attention.linear_proj",
        "ln_2": "pre_mlp_layernorm",
        "mlp.c_fc": "mlp.linear_fc1",
        "mlp.c_proj": "mlp.linear_fc2",
    }
    for i in range(num_layers):
        theirs, ours = f"transformer.h.{i}.", f"decoder.layers.{i}."
        for name, our_name in table.items():
            weight = hf[f"{theirs}{name}.weight"]
            out[f"{ours}{our_name}.weight"] = weight.t() if weight.dim() == 2 else weight
            out[f"{ours}{our_name}.bias"] = hf[f"{theirs}{name}.bias"]
        for kind in ("weight", "bias"):
            q, k, v = hf[f"{theirs}attn.c_attn.{kind}"].t().chunk(3)
            out[f"{ours}self_attention.linear_qkv.{kind}"] = interleave(q, k, v, num_heads)
    return out


def from_llama(
    hf: Mapping[str, Tensor],
    num_layers: int,
    num_groups: int,
    norms: Mapping[str, str] | None = None,
) -> Weights:
    """Llama and its kin; ``norms`` maps their names of norms in a layer to ours."""
    norms = norms or {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "pre_mlp_layernorm",
    }
    out = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if "lm_head.weight" in hf:
        out["output_layer.weight"] = hf["lm_head.weight"]
    for i in range(num_layers):
        theirs, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        for name, our_name in norms.items():
            out[f"{ours}{our_name}.weight"] = hf[f"{theirs}{name}.weight"]
        for kind in ("weight", "bias"):
            if f"{theirs}self_attn.q_proj.{kind}" in hf:
                qkv = (hf[f"{theirs}self_attn.{x}_proj.{kind}"] for x in "qkv")
                out[f"{ours}self_attention.linear_qkv.{kind}"] = interleave(*qkv, num_groups)
        for x in "qk":
            if f"{theirs}self_attn.{x}_norm.weight" in hf:
                norm = hf[f"{theirs}self_attn.{x}_norm.weight"]
                out[f"{ours}self_attention.{x}_layernorm.weight"] = norm
        out[f"{ours}self_attention.linear_proj.weight"] = hf[f"{theirs}self_attn.o_proj.weight"]
        if f"{theirs}mlp.gate_proj.weight" not in hf:
            continue
        gate_up = [hf[f"{theirs}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        out[f"{ours}mlp.linear_fc1.weight"] = torch.cat(gate_up)
        out[f"{ours}mlp.linear_fc2.weight"] = hf[f"{theirs}mlp.down_proj.weight"]
    return out


def from_gpt_oss(hf: Mapping[str, Tensor], num_layers: int, num_groups: int) -> Weights:
    """Its experts are matrices [E, in, out], gate and up by turns."""
    out = from_llama(hf, num_layers, num_groups)
    for i in range(num_layers):
        theirs, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        out[f"{ours}self_attention.linear_proj.bias"] = hf[f"{theirs}self_attn.o_proj.bias"]
        out[f"{ours}self_attention.core_attention.softmax_offset"] = hf[f"{theirs}self_attn.sinks"]
        experts = {
            "linear_fc1.weight": hf[f"{theirs}mlp.experts.gate_up_proj"].transpose(1, 2),
            "linear_fc1.bias": hf[f"{theirs}mlp.experts.gate_up_proj_bias"],
            "linear_fc2.weight": hf[f"{theirs}mlp.experts.down_proj"].transpose(1, 2),
            "linear_fc2.bias": hf[f"{theirs}mlp.experts.down_proj_bias"],
        }
        for kind in ("weight", "bias"):
            out[f"{ours}mlp.router.{kind}"] = hf[f"{theirs}mlp.router.{kind}"]
            gate_up = experts[f"linear_fc1.{kind}"]
            experts[f"linear_fc1.{kind}"] = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1)
        for name, values in experts.items():
            for expert, value in enumerate(values):
                out[f"{ours}mlp.experts.local_experts.{expert}.{name}"] = value
    return out
