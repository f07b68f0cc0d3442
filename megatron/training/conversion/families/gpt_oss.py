"""gpt-oss: sinks, windows in every other layer, YaRN, experts with biases and clamped gates.

The experts of a layer are one tensor [E, in, out], in which outputs of the gate and of the up
projection alternate.  Published models store it in mxfp4 (`quantized`), which is read, not written.
"""

from __future__ import annotations

from megatron.training.conversion.families.experts import IN_ALL_LAYERS
from megatron.training.conversion.families.fields import HEAD_DIM, demand, same, tied, windows
from megatron.training.conversion.families.llama import llama_like
from megatron.training.conversion.tensors import Rule

_EXPERT = "mlp.experts.local_experts.{}."


GPT_OSS = llama_like(
    "gpt_oss",
    "GptOss",
    HEAD_DIM,
    tied(False),
    windows(lambda config, layer: layer % 2 == 0),
    *IN_ALL_LAYERS,
    same("swiglu_limit", "activation_func_clamp_value", 7.0, float),
    demand("attention_bias", True),
    demand("hidden_act", "silu"),
    demand("swiglu_alpha", 1.702),
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
