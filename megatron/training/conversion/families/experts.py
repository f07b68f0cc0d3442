"""Mixture of experts: config.json entries, tensor names, and Llama-like families with experts.

gpt-oss has sinks, windows in every other layer, YaRN, and experts with biases and clamped gates.
The experts of a layer are one tensor [E, in, out], in which outputs of the gate and of the up
projection alternate.  Published models store it in mxfp4 (`lazy`), which is read, not written.
"""

from __future__ import annotations

from operator import not_

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.families.fields import HEAD_DIM, demand, same, tied, windows
from megatron.training.conversion.families.llama import NO_BIAS, SILU, llama_like
from megatron.training.conversion.family import Config, Field, Names, Values
from megatron.training.conversion.tensors import Rule

TOPK = same("num_experts_per_tok", "moe_router_topk")
WIDTH = same("moe_intermediate_size", "moe_ffn_hidden_size")


def gated(ours: str, theirs: str, gate: str, up: str, down: str) -> Names:
    """Return the names of a gated MLP's matrices."""
    return {
        f"{ours}.linear_fc1": Rule((f"{theirs}.{gate}", f"{theirs}.{up}")),
        f"{ours}.linear_fc2": f"{theirs}.{down}",
    }


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
EXPERT_LAYER: Names = {
    "mlp.router": "mlp.gate",
    **gated("mlp.experts.local_experts.{}", "mlp.experts.{}", *PROJECTIONS),
}

# norm_topk_prob: true is a softmax over the chosen experts (weights sum to 1), false over all.
NORMED = same("norm_topk_prob", "moe_router_pre_softmax", False, not_, not_)
# Factor of the weights of the chosen experts.
SCALED = same(
    "routed_scaling_factor",
    "moe_router_topk_scaling_factor",
    1.0,
    write=lambda factor: factor or 1.0,
)


def _read_sparse(config: Config) -> Values:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    return {"expert_layers": tuple(i not in dense and (i + 1) % step == 0 for i in layers)}


SPARSE = Field(
    _read_sparse,
    lambda shape: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            i for i, has_experts in enumerate(shape.expert_layers) if not has_experts
        ],
    },
)
# Layers without experts come first.
FIRST_DENSE = Field(
    lambda config: {
        "expert_layers": tuple(
            i >= config.get("first_k_dense_replace", 0) for i in range(config["num_hidden_layers"])
        )
    },
    lambda shape: {"first_k_dense_replace": [*shape.expert_layers, True].index(True)},
)
SHARED = Field(
    lambda config: {
        "moe_shared_expert_intermediate_size": config["n_shared_experts"]
        * config["moe_intermediate_size"]
    },
    lambda shape: {
        "n_shared_experts": (shape.moe_shared_expert_intermediate_size or 0)
        // (shape.moe_ffn_hidden_size or 1)
    },
)


def groups(counted: int) -> Field:
    """Convert group-limited routing; a group's score is that of its ``counted`` best experts."""

    return Field(
        lambda config: {
            "moe_router_num_groups": config.get("n_group") or 1,
            "moe_router_group_topk": config.get("topk_group") or 1,
            "moe_router_group_score_topk": counted,
        },
        lambda shape: {
            "n_group": shape.moe_router_num_groups or 1,
            "topk_group": shape.moe_router_group_topk or 1,
        },
    )


_SOFTMAX: Values = {"moe_router_score_function": "softmax"}

# Every layer has experts; intermediate_size is the width of an expert.
IN_ALL_LAYERS = (
    same("num_local_experts", "num_experts"),
    TOPK,
    Field(
        lambda config: {
            "moe_ffn_hidden_size": config["intermediate_size"],
            "expert_layers": (True,) * config["num_hidden_layers"],
        }
    ),
)
MIXTRAL = llama_like(
    "mixtral",
    "Mixtral",
    *SILU,
    HEAD_DIM,
    windows(),
    *IN_ALL_LAYERS,
    epsilon=1e-5,
    layer={
        "mlp.router": "block_sparse_moe.gate",
        **gated("mlp.experts.local_experts.{}", "block_sparse_moe.experts.{}", "w1", "w3", "w2"),
    },
    always=_SOFTMAX,
)


_QWEN = (*SILU, TOPK, WIDTH, NORMED, SPARSE)

# Qwen 2 with experts and a gated shared expert.
QWEN2_MOE = llama_like(
    "qwen2_moe",
    "Qwen2Moe",
    *_QWEN,
    # Even layers below max_window_layers have a window.
    windows(
        lambda c, layer: layer % 2 == 0 and layer < c.get("max_window_layers", 28), switch=True
    ),
    demand(qkv_bias=True),
    same("num_experts", "num_experts", 60),
    same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    layer={
        **EXPERT_LAYER,
        **gated("mlp.shared_experts", "mlp.shared_expert", *PROJECTIONS),
        "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    },
    always={**_SOFTMAX, "add_qkv_bias": True, "moe_shared_expert_gate": True},
)


def _read_count(config: Config) -> Values:
    """Read num_experts of published models, or num_local_experts of transformers 5.23."""
    count = config.get("num_experts") or config.get("num_local_experts")
    if not count:
        raise CheckpointError("config.json has no num_experts")
    return {"num_experts": count}


# Qwen 3 with experts, and a window in every layer or in none.
QWEN3_MOE = llama_like(
    "qwen3_moe",
    "Qwen3Moe",
    *_QWEN,
    HEAD_DIM,
    windows(switch=True),
    NO_BIAS,
    Field(_read_count, lambda shape: {"num_experts": shape.num_experts}),
    layer=EXPERT_LAYER,
    always={**_SOFTMAX, "qk_norm": "head"},
)


_EXPERT = "mlp.experts.local_experts.{}."


GPT_OSS = llama_like(
    "gpt_oss",
    "GptOss",
    HEAD_DIM,
    tied(False),
    windows(lambda config, layer: layer % 2 == 0),
    *IN_ALL_LAYERS,
    same("swiglu_limit", "activation_func_clamp_value", 7.0, float),
    demand(
        attention_bias=True,
        hidden_act="silu",
        swiglu_alpha=1.702,
    ),
    epsilon=1e-5,
    layer={
        "self_attention.core_attention.softmax_offset": "self_attn.sinks",
        "mlp.router": "mlp.router",
        f"{_EXPERT}linear_fc1.weight": Rule(
            ("mlp.experts.gate_up_proj.{}",), transposed=True, by_turns=True
        ),
        f"{_EXPERT}linear_fc1.bias": Rule(("mlp.experts.gate_up_proj_bias.{}",), by_turns=True),
        f"{_EXPERT}linear_fc2.weight": Rule(("mlp.experts.down_proj.{}",), transposed=True),
        f"{_EXPERT}linear_fc2.bias": "mlp.experts.down_proj_bias.{}",
    },
    stacked=tuple(
        f"mlp.experts.{name}_proj{kind}" for name in ("gate_up", "down") for kind in ("", "_bias")
    ),
    always={
        "activation": "quick_gelu",
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "moe_router_score_function": "softmax",
    },
)
