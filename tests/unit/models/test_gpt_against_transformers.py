"""GPTModel with the weights of small random `transformers` models gives their logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from tests import tolerances
from tests.unit.models.reference.hf import from_gpt2, from_gpt_oss, from_llama
from tests.unit.one_process import one_process_groups, tiny_config

transformers = pytest.importorskip("transformers")

# Loaded here and not in a test: their modules set environment variables.
CLASSES: dict[str, Any] = {
    f"{family}{part}": getattr(transformers, f"{family}{part}")
    for family in ("GPT2", "GptOss", "Llama", "Qwen2", "Qwen3", "Olmo2", "Gemma2")
    for part in ("Config", "LMHeadModel" if family == "GPT2" else "ForCausalLM")
}
LENGTH, VOCABULARY = 24, 96
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "pad_token_id": None,  # a padding row would get no gradient
}
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "ffn_hidden_size": 88,
    "layernorm_epsilon": 1e-6,
}
ROPE: dict[str, Any] = {"position_embedding_type": "rope"}


def hf_model(model: str, config: str, **changes: Any) -> Any:
    torch.manual_seed(3)
    made = CLASSES[config](**COMMON | changes)
    out = CLASSES[model](made).eval()
    with torch.no_grad():
        for name, param in out.named_parameters():
            if param.dim() == 1:  # norms and biases start as constants: make them count
                param.add_(0.1 * torch.randn_like(param))
            elif "embed" not in name:
                param.mul_(3)
    return out


def our_model(layer: dict[str, Any], model: dict[str, Any]) -> GPTModel:
    config = tiny_config(**layer)
    spec = get_gpt_layer_local_spec(config.num_moe_experts, config=config)
    args = (config, spec, VOCABULARY, 64)
    return GPTModel(*args, pg_collection=one_process_groups(), **model).eval()


def check(hf: Any, ours: GPTModel, convert: Callable[[dict[str, Tensor]], Any]) -> None:
    """Equal logits, and equal gradients of a loss that weighs tokens differently."""
    missing = ours.load_state_dict(convert(dict(hf.named_parameters())))
    assert not missing.missing_keys
    ids = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    tokens, labels = ids[:, :-1], ids[:, 1:]
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    expected = hf(tokens, use_cache=False).logits
    torch.testing.assert_close(ours(tokens, positions, None), expected, **tolerances.LOGITS)
    weight = torch.linspace(0.5, 1.5, 2 * LENGTH)
    loss = F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="none")
    (loss * weight).mean().backward()
    own_loss = ours(tokens, positions, None, labels=labels)
    torch.testing.assert_close(own_loss.flatten(), loss, **tolerances.LOGITS)
    (own_loss.flatten() * weight).mean().backward()
    grads = convert({n: p.grad for n, p in hf.named_parameters()})
    for name, param in ours.named_parameters():
        assert param.grad is not None, name
        error, norm = (param.grad - grads[name]).norm(), grads[name].norm()
        assert error <= tolerances.GRADIENT["rtol"] * norm, f"{name}: {error} of {norm}"


@pytest.mark.feature(
    "Model: GPT-2, Llama, Qwen, OLMo 2, Gemma 2: logits and gradients of transformers"
)
def test_gpt2() -> None:
    hf = hf_model(
        "GPT2LMHeadModel",
        "GPT2Config",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=True,
    )
    ours = our_model(
        {"bias_activation_fusion": True}, {"share_embeddings_and_output_weights": True}
    )
    check(hf, ours, lambda w: from_gpt2(w, 2, 4))


def test_llama() -> None:
    hf = hf_model("LlamaForCausalLM", "LlamaConfig")
    check(hf, our_model(LLAMA, ROPE), lambda w: from_llama(w, 2, 2))


def test_llama_with_its_rope_scaling() -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    hf = hf_model("LlamaForCausalLM", "LlamaConfig", rope_parameters=scaling, head_dim=32)
    model = {**ROPE, "rotary_base": 5000, "rope_scaling": True, "rope_scaling_factor": 4.0}
    check(hf, our_model({**LLAMA, "kv_channels": 32}, model), lambda w: from_llama(w, 2, 2))


def test_qwen2() -> None:
    hf = hf_model("Qwen2ForCausalLM", "Qwen2Config", tie_word_embeddings=True)
    tied = {**ROPE, "share_embeddings_and_output_weights": True}
    check(hf, our_model({**LLAMA, "add_qkv_bias": True}, tied), lambda w: from_llama(w, 2, 2))


def test_qwen3_with_norms_of_queries_and_keys() -> None:
    hf = hf_model("Qwen3ForCausalLM", "Qwen3Config", head_dim=16)
    layer = {**LLAMA, "kv_channels": 16, "qk_layernorm": True}
    check(hf, our_model(layer, ROPE), lambda w: from_llama(w, 2, 2))


def test_olmo2_with_norms_after_and_norms_over_all_heads() -> None:
    hf = hf_model("Olmo2ForCausalLM", "Olmo2Config")
    layer = {
        **LLAMA,
        "layernorm_epsilon": 1e-5,
        "layer_norm_placement": "post",
        "qk_layernorm_full_width": True,
    }
    norms = {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
    check(hf, our_model(layer, ROPE), lambda w: from_llama(w, 2, 2, norms))


def test_gemma2_with_soft_caps_sandwich_norms_and_a_window() -> None:
    hf = hf_model(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        head_dim=8,
        query_pre_attn_scalar=16,
        sliding_window=5,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=6.0,
        tie_word_embeddings=True,
    )
    layer = {
        **LLAMA,
        "activation_func": F.gelu,
        "bias_activation_fusion": True,
        "layernorm_zero_centered_gamma": True,
        "layer_norm_placement": "sandwich",
        "softmax_scale": 16**-0.5,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 6.0,
        "embedding_scale": 0.0,
        "window_size": (4, 0),
        "window_attn_skip_freq": (1, 0),
    }
    norms = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
    tied = {**ROPE, "share_embeddings_and_output_weights": True}
    check(hf, our_model(layer, tied), lambda w: from_llama(w, 2, 2, norms))


@pytest.mark.feature(
    "Model: gpt-oss (sinks, alternating windows, YaRN, experts with biases and clamped gates): "
    "logits and gradients of transformers"
)
def test_gpt_oss() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 4.0}
    yarn |= {"beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 40}
    hf = hf_model(
        "GptOssForCausalLM", "GptOssConfig", rope_parameters=yarn, head_dim=16, sliding_window=6,
        num_local_experts=4, num_experts_per_tok=2, swiglu_limit=0.3,
    )  # fmt: skip
    layer = {
        **LLAMA, "kv_channels": 16, "add_bias_linear": True, "softmax_type": "learnable",
        "window_size": (5, 0), "window_attn_skip_freq": 2, "num_moe_experts": 4,
        "moe_router_topk": 2, "activation_func": quick_gelu, "activation_func_clamp_value": 0.3,
        "glu_linear_offset": 1.0, "rope_type": "yarn", "rotary_scaling_factor": 8.0,
        "yarn_original_max_position_embeddings": 40, "yarn_beta_fast": 4.0,
        "yarn_correction_range_round_to_int": False,
        "layernorm_epsilon": 1e-5,
    }  # fmt: skip
    ours = our_model(layer, {**ROPE, "rotary_base": 150000})
    check(hf, ours, lambda w: from_gpt_oss(w, 2, 2))
