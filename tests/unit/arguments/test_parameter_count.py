"""The estimate of --check-only is the size of the model that is built."""

from __future__ import annotations

import json

import pytest

from megatron.training.arguments.parameter_count import padded_vocab_size, rank_parameters
from megatron.training.gpt import build_gpt_model
from tests.unit.arguments.commands import run_of
from tests.unit.one_process import one_process_groups

FULL = {"attention": {}, "ffn": {"ffn_mult": 2.0}}
LINEAR = {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}}
ABSENT = {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}}
SHAPES = {"block_configs": [FULL, LINEAR, ABSENT, FULL]}


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--swiglu --untie-embeddings-and-output-weights --disable-bias-linear",
        "--position-embedding-type rope --normalization RMSNorm --squared-relu",
        "--group-query-attention --num-query-groups 2 --kv-channels 16 --add-qkv-bias",
        "--qk-layernorm --normalization RMSNorm --disable-bias-linear --add-qkv-bias",
        "--qk-layernorm --qk-layernorm-full-width --layer-norm-placement sandwich",
        "--layer-norm-placement post --geglu",
        "--qk-l2-norm --position-embedding-type none",
        "--swiglu --normalization RMSNorm --disable-bias-linear "
        f"--heterogeneous-layers-config-encoded-json {json.dumps(SHAPES, separators=(',', ':'))}",
    ],
)
def test_the_estimate_is_exact_on_one_rank(words: str) -> None:
    run = run_of(words)
    padded = padded_vocab_size(run)
    assert padded == 128
    model = build_gpt_model(
        run, vocab_size=101, padded_vocab_size=padded, groups=one_process_groups()
    )
    built = sum(p.numel() for p in model.parameters())
    assert rank_parameters(run) == (built, True)


def test_padding_follows_tensor_parallelism_unless_given() -> None:
    assert padded_vocab_size(run_of("--tensor-model-parallel-size 4", world_size=4)) == 512
    assert padded_vocab_size(run_of("--padded-vocab-size 104")) == 104


def test_tensor_parallel_ranks_share_the_matrices() -> None:
    whole, _ = rank_parameters(run_of("--make-vocab-size-divisible-by 2"))
    half, _ = rank_parameters(
        run_of("--make-vocab-size-divisible-by 1 --tensor-model-parallel-size 2", world_size=2)
    )
    run = run_of()
    hidden, layers = run.model.hidden_size, run.model.num_layers
    # Norms, biases behind row-parallel products and positions are whole on every rank.
    shared = layers * (4 * hidden + 2 * hidden) + hidden * (32 + 2)
    assert 2 * half - shared == whole
