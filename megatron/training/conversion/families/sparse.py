"""DeepSeek-V3.2 and GLM-5: DeepSeek V3 with an indexer that selects the keys of each query.

In GLM-5 layers may take the keys that an earlier layer selects; these have no indexer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from megatron.core.config.errors import CheckpointError
from megatron.core.transformer.config.attention import SPARSE_VARIANT
from megatron.training.conversion.families.experts import DEEPSEEK_V3, FIXED_EPSILON
from megatron.training.conversion.family import Config, Field, Names, Values, same
from megatron.training.conversion.shape import ModelShape

_FULL, _SHARED = "full", "shared"
_DENSE, _SPARSE = "dense", "sparse"
_INDEXER = "self_attention.core_attention.indexer"


def _read_layers(config: Config) -> Values:
    num_layers, num_dense = config["num_hidden_layers"], config.get("first_k_dense_replace", 3)
    kinds = config.get("mlp_layer_types") or [
        _DENSE if i < num_dense else _SPARSE for i in range(num_layers)
    ]
    if strange := {*kinds} - {_DENSE, _SPARSE}:
        raise CheckpointError(f"config.json has mlp_layer_types {', '.join(sorted(strange))}")
    return {"expert_layers": tuple(kind == _SPARSE for kind in kinds)}


def _write_layers(shape: ModelShape) -> Values:
    return {"mlp_layer_types": [_SPARSE if sparse else _DENSE for sparse in shape.expert_layers]}


def _kinds(freq: int, offset: int, num_layers: int) -> list[str]:
    """Return whether each layer has an indexer, ``full``, or takes another layer's keys."""
    return [_SHARED if max(i + 1 - offset, 0) % max(freq, 1) else _FULL for i in range(num_layers)]


def _read_indexers(config: Config) -> Values:
    num_layers = config["num_hidden_layers"]
    kinds: Sequence[str] = (
        config.get("indexer_types")
        or config.get("index_topk_pattern")
        or _kinds(
            config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2), num_layers
        )
    )
    kinds = [{"F": _FULL, "S": _SHARED}.get(kind, kind) for kind in kinds]
    for freq, offset in product(range(1, num_layers + 1), range(1, num_layers + 1)):
        if kinds == _kinds(freq, offset, num_layers):
            return {"dsa_indexer_topk_freq": freq, "dsa_indexer_skip_topk_offset": offset}
    raise CheckpointError(
        f"config.json has indexer_types {kinds}: only one indexer for every N layers after the "
        "first ones can be converted"
    )


def _write_indexers(shape: ModelShape) -> Values:
    freq, offset = shape.dsa_indexer_topk_freq, shape.dsa_indexer_skip_topk_offset
    kinds = _kinds(freq, offset, shape.num_layers)
    return {"index_topk_freq": freq, "index_skip_topk_offset": offset, "indexer_types": kinds}


_LAYER: Names = {
    f"{_INDEXER}.linear_wq_b": "self_attn.indexer.wq_b",
    f"{_INDEXER}.linear_wk": "self_attn.indexer.wk",
    f"{_INDEXER}.k_norm": "self_attn.indexer.k_norm",
    f"{_INDEXER}.linear_weights_proj": "self_attn.indexer.weights_proj",
}
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    always={
        **DEEPSEEK_V3.always,
        "attention_variant": SPARSE_VARIANT,
        # Transformers has one epsilon of latent norms and one of the indexer's keys.
        "mla_latent_norm_epsilon": 1e-6,
        "dsa_indexer_k_norm_epsilon": 1e-6,
    },
    fields=(
        *(each for each in DEEPSEEK_V3.fields if each is not FIXED_EPSILON),
        Field(_read_layers, _write_layers),
        same("index_topk", "dsa_indexer_topk", 2048),
        same("index_head_dim", "dsa_indexer_head_dim", 128),
        same("index_n_heads", "dsa_indexer_n_heads", 64),
    ),
    layer={**DEEPSEEK_V3.layer, **_LAYER},
)
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    always={**DEEPSEEK_V32.always, "dsa_indexer_rope_interleaved": True},
    fields=(
        *DEEPSEEK_V32.fields,
        same("rms_norm_eps", "norm_epsilon", 1e-5),
        same("index_n_heads", "dsa_indexer_n_heads", 32),
        Field(_read_indexers, _write_indexers),
    ),
)
