"""Published models: their config.json is understood, and has their number of weights.

Needs neither `transformers` nor memory: shapes only.
"""

from __future__ import annotations

import ast
from math import prod
from typing import Any

import pytest

from megatron.core.config.errors import CheckpointError
from megatron.training.arguments.parser import build_parser
from megatron.training.conversion import hf
from megatron.training.conversion.convert import run_config
from megatron.training.conversion.shape import args_of, shape_of
from megatron.training.conversion.tensors import tensors_of
from tests.support.command_lines import run_of


def entries(text: str) -> dict[str, Any]:
    pairs = (pair.split("=") for pair in text.split())
    return {name: ast.literal_eval(value) for name, value in pairs}


DEEPSEEK = (
    "num_attention_heads=128 num_key_value_heads=128 max_position_embeddings=163840 "
    "q_lora_rank=1536 kv_lora_rank=512 qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128 "
    "moe_layer_freq=1 n_group=8 rms_norm_eps=1e-6 rope_theta=10000 "
)
MODELS = {  # billions of weights, without what tokens ahead share
    "deepseek_v3": (
        682.6,
        DEEPSEEK + "num_hidden_layers=61 hidden_size=7168 intermediate_size=18432 "
        "moe_intermediate_size=2048 n_routed_experts=256 n_shared_experts=1 vocab_size=129280 "
        "num_experts_per_tok=8 topk_group=4 first_k_dense_replace=3 routed_scaling_factor=2.5 "
        "norm_topk_prob=True num_nextn_predict_layers=1 scoring_func='sigmoid'",
    ),
    "deepseek_v2": (
        235.7,
        DEEPSEEK + "num_hidden_layers=60 hidden_size=5120 intermediate_size=12288 "
        "moe_intermediate_size=1536 n_routed_experts=160 n_shared_experts=2 vocab_size=102400 "
        "num_experts_per_tok=6 topk_group=3 first_k_dense_replace=1 routed_scaling_factor=16.0 "
        "norm_topk_prob=False topk_method='group_limited_greedy'",
    ),
    "qwen3_moe": (
        30.5,
        "num_hidden_layers=48 hidden_size=2048 intermediate_size=6144 moe_intermediate_size=768 "
        "num_attention_heads=32 num_key_value_heads=4 head_dim=128 num_experts=128 "
        "num_experts_per_tok=8 norm_topk_prob=True mlp_only_layers=[] vocab_size=151936 "
        "max_position_embeddings=40960 rope_theta=1000000.0 sliding_window=None",
    ),
    "qwen2_moe": (
        57.4,
        "num_hidden_layers=28 hidden_size=3584 intermediate_size=18944 moe_intermediate_size=2560 "
        "num_attention_heads=28 num_key_value_heads=4 num_experts=64 num_experts_per_tok=8 "
        "norm_topk_prob=False shared_expert_intermediate_size=20480 vocab_size=151936 "
        "max_position_embeddings=131072 rope_theta=1000000.0 sliding_window=65536",
    ),
    "mixtral": (
        46.7,
        "num_hidden_layers=32 hidden_size=4096 intermediate_size=14336 num_attention_heads=32 "
        "num_key_value_heads=8 num_local_experts=8 num_experts_per_tok=2 vocab_size=32000 "
        "max_position_embeddings=32768 rope_theta=1000000.0",
    ),
    "gpt_oss": (
        20.9,
        "num_hidden_layers=24 hidden_size=2880 intermediate_size=2880 num_attention_heads=64 "
        "num_key_value_heads=8 head_dim=64 num_local_experts=32 num_experts_per_tok=4 "
        "sliding_window=128 max_position_embeddings=131072 vocab_size=201088 rope_theta=150000",
    ),
    "olmo3": (
        7.3,
        "num_hidden_layers=32 hidden_size=4096 intermediate_size=11008 num_attention_heads=32 "
        "num_key_value_heads=32 sliding_window=4096 vocab_size=100278 "
        "max_position_embeddings=65536 rope_theta=500000",
    ),
    "exaone4": (
        32.0,
        "num_hidden_layers=64 hidden_size=5120 intermediate_size=27392 num_attention_heads=40 "
        "num_key_value_heads=8 head_dim=128 sliding_window=4096 sliding_window_pattern='LLLG' "
        "vocab_size=102400 max_position_embeddings=131072 rope_theta=1000000 "
        "rope_scaling={'factor':16.0,'high_freq_factor':4.0,'low_freq_factor':1.0,"
        "'original_max_position_embeddings':8192,'rope_type':'llama3'}",
    ),
    "granite": (
        8.2,
        "num_hidden_layers=40 hidden_size=4096 intermediate_size=12800 num_attention_heads=32 "
        "num_key_value_heads=8 vocab_size=49159 max_position_embeddings=131072 "
        "rope_theta=10000000.0 embedding_multiplier=12.0 attention_multiplier=0.0078125 "
        "residual_multiplier=0.22 logits_scaling=16.0 tie_word_embeddings=True",
    ),
    "seed_oss": (
        36.2,
        "num_hidden_layers=64 hidden_size=5120 intermediate_size=27648 num_attention_heads=80 "
        "num_key_value_heads=8 head_dim=128 attention_bias=True vocab_size=155136 "
        "max_position_embeddings=524288 rope_theta=10000000.0",
    ),
    "glm4": (
        9.4,
        "num_hidden_layers=40 hidden_size=4096 intermediate_size=13696 num_attention_heads=32 "
        "num_key_value_heads=2 head_dim=128 attention_bias=False vocab_size=151552 "
        "max_position_embeddings=32768 partial_rotary_factor=0.5 rms_norm_eps=1e-5",
    ),
    "smollm3": (
        3.1,
        "num_hidden_layers=36 hidden_size=2048 intermediate_size=11008 num_attention_heads=16 "
        "num_key_value_heads=4 vocab_size=128256 max_position_embeddings=65536 "
        "rope_theta=5000000.0 use_sliding_window=False sliding_window=None "
        "tie_word_embeddings=True",
    ),
}
NEMOTRON = (
    "vocab_size=131072 num_attention_heads=32 head_dim=128 mamba_head_dim=64 n_groups=8 "
    "ssm_state_size=128 max_position_embeddings=8192 "
)
MODELS |= {
    "nemotron_h": (
        8.1,
        NEMOTRON + "hidden_size=4096 intermediate_size=21504 num_key_value_heads=8 "
        "mamba_num_heads=128 hybrid_override_pattern="
        "'M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-'",
    ),
    "nemotron_h, experts": (
        31.6,
        NEMOTRON + "hidden_size=2688 intermediate_size=1856 num_key_value_heads=2 "
        "mamba_num_heads=64 n_routed_experts=128 num_experts_per_tok=6 moe_intermediate_size=1856 "
        "moe_shared_expert_intermediate_size=3712 routed_scaling_factor=2.5 n_group=1 topk_group=1 "
        "hybrid_override_pattern='MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME'",
    ),
    "mamba2": (
        2.7,
        "hidden_size=2560 num_hidden_layers=64 vocab_size=50288 num_heads=80 head_dim=64 "
        "state_size=128 n_groups=1 tie_word_embeddings=True",
    ),
    "t5": (
        2.9,
        "d_model=1024 d_ff=16384 d_kv=128 num_heads=32 num_layers=24 vocab_size=32128 "
        "tie_word_embeddings=True",
    ),
    "megatron-bert": (
        0.3,
        "hidden_size=1024 num_hidden_layers=24 num_attention_heads=16 intermediate_size=4096 "
        "max_position_embeddings=512 vocab_size=29056 tie_word_embeddings=True",
    ),
}
YARN = {
    "deepseek_v3": {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    "deepseek_v2": {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
    "gpt_oss": {"factor": 32.0, "truncate": False},
    "olmo3": {"factor": 8.0, "attention_factor": 1.2079441541679836},
}
COMMON = {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1}


# The count of weights is linear in the number of experts: two small numbers of experts give the
# count for any.  Models with fewer than 100 experts are built with all of them.
FEW_EXPERTS = (16, 24)


def number_of_weights(family: Any, config: dict[str, Any]) -> int:
    """Count the weights of a published model, and require a rule for each tensor."""

    def count(config: dict[str, Any]) -> int:
        shape = family.shape(config)
        sizes = tensors_of(shape)
        for tensor in sizes:
            assert family.rule(tensor, shape)
        return sum(map(prod, sizes.values()))

    key = "num_experts" if "num_experts" in config else "n_routed_experts"
    num_experts = config.get(key, 0)
    if num_experts < 100:
        return count(config)
    fewer, more = FEW_EXPERTS
    first = count({**config, key: fewer})
    of_each, rest = divmod(count({**config, key: more}) - first, more - fewer)
    assert rest == 0
    return first + of_each * (num_experts - fewer)


@pytest.mark.parametrize("kind", MODELS)
def test_a_published_model_has_its_number_of_weights(kind: str) -> None:
    billions, text = MODELS[kind]
    name = kind.partition(",")[0]
    config = {"model_type": name, "tie_word_embeddings": False, **entries(text)}
    if kind in YARN:
        more = {"original_max_position_embeddings": 4096}
        config["rope_scaling"] = {**COMMON, **more, **YARN[kind]}
    family = hf.family_of(config)
    assert round(number_of_weights(family, config) / 1e9, 1) == billions
    shape = family.shape(config)
    # Its flags build it, and its own config.json can be made from them.
    asked = vars(build_parser().parse_args([])) | args_of(shape) | {"micro_batch_size": 1}
    asked |= {"tokenizer_type": "NullTokenizer", "vocab_size": shape.vocab_size - 1}
    assert list(shape.differences(shape_of(run_config(asked), shape.vocab_size))) == []
    assert hf.choose_family(shape, name) is family


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--moe-latent-size", "12"), ("--moe-router-score-function", "sqrtsoftplus")],
)
def test_experts_that_no_family_has_are_refused(flag: str, value: str) -> None:
    run = run_of(
        "--num-experts 4 --swiglu --normalization RMSNorm --disable-bias-linear "
        f"--position-embedding-type rope --untie-embeddings-and-output-weights {flag} {value}"
    )
    name = f"{flag[2:].replace('-', '_')} {value}"
    with pytest.raises(CheckpointError, match=f"nearest, MixtralForCausalLM has no .*{name}"):
        hf.choose_family(shape_of(run, 100), None)
