"""Parameters by formula are those of the layers that are built."""

from __future__ import annotations

import json

import pytest

from megatron.core.peft.lora import attach_adapters
from megatron.training.estimates.parameters import (
    adapter_parameters,
    known_padded_vocab_size,
    layer_parameters,
)
from megatron.training.estimates.theoretical_memory import count_parameters
from megatron.training.models.gpt import build_gpt_model
from megatron.training.models.registry import build_model_stage
from tests.support.command_lines import run_of
from tests.support.one_process import one_process_groups

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
        "--qk-l2-norm --qk-layernorm --position-embedding-type rope",
        "--multi-latent-attention",
        "--multi-latent-attention --q-lora-rank 8 --experimental-attention-variant dsa "
        "--dsa-indexer-topk-freq 2 --dsa-indexer-skip-topk-offset 1 --dsa-indexer-n-heads 3 "
        "--normalization RMSNorm",
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
        "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 6 "
        "--linear-value-head-dim 4 --attention-output-gate --add-qkv-bias --num-experts 4",
        "--enable-mhc-connections --mhc-num-residual-streams 3 --normalization RMSNorm",
        "--experimental-attention-variant kda --linear-attention-freq 2 --multi-latent-attention "
        "--linear-num-key-heads 2 --linear-num-value-heads 2 --linear-key-head-dim 6 "
        "--linear-value-head-dim 4 --layer-norm-placement post_softmax",
        "--softmax-type learnable --num-experts 4 --quick-geglu "
        "--moe-shared-expert-intermediate-size 8",
        "--num-experts 4 --moe-latent-size 12 --moe-shared-expert-intermediate-size 8",
        "--mtp-num-layers 2 --position-embedding-type rope --num-experts 4 --disable-bias-linear "
        "--moe-layer-freq [1,0,0,1]",
        "--mtp-num-layers 3 --mtp-use-repeated-layer --position-embedding-type rope",
        "--swiglu --normalization RMSNorm --disable-bias-linear "
        f"--heterogeneous-layers-config-encoded-json {json.dumps(SHAPES, separators=(',', ':'))}",
    ],
)
def test_the_estimate_is_exact_on_one_rank(words: str) -> None:
    run = run_of(words)
    padded = known_padded_vocab_size(run)
    assert padded == 128
    model = build_gpt_model(
        run, vocab_size=101, padded_vocab_size=padded, groups=one_process_groups()
    )
    parts = [model.decoder.layers] if model.mtp is None else [model.decoder.layers, model.mtp]
    counted = sum(p.numel() for part in parts for p in part.parameters())
    assert layer_parameters(run) == counted


OTHERS = [
    "--model-kind mamba --hybrid-override-pattern M*-M --mamba-num-groups 1",
    "--model-kind mamba --mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-"
    "dim 8 --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear",
    "--model-kind mamba --num-experts 4 --hybrid-override-pattern ME*E --mamba-num-groups 2 "
    "--swiglu",
    "--model-kind mamba --num-experts 4 --hybrid-override-pattern ME*E/M*E/M*E --mamba-num-groups "
    "2 --position-embedding-type none",
    "--model-kind bert",
    "--model-kind bert --bert-no-binary-head --untie-embeddings-and-output-weights",
    "--model-kind t5 --decoder-num-layers 2 --decoder-seq-length 8",
    "--model-kind t5 --decoder-num-layers 2 --untie-embeddings-and-output-weights",
    "--model-kind t5 --decoder-num-layers 3 --decoder-seq-length 8 --disable-bias-linear "
    "--position-embedding-type relative --normalization RMSNorm",
    "--model-kind retro --retro-add-retriever --retro-chunk-length 8 --num-layers 9 "
    "--retro-encoder-layers 5",
]


VLM = "--model-kind vlm --img-h 24 --img-w 36 --patch-dim 6 --vision-num-layers 3"
OTHERS += [
    f"{VLM}",
    f"{VLM} --swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2",
    f"{VLM} --vision-model-type internvit --disable-vision-class-token --pixel-shuffle "
    "--vision-hidden-size 48 --vision-num-attention-heads 6 --disable-bias-linear --img-w 24",
    f"{VLM} --vision-model-type siglip --vision-projection-type affine --vision-ffn-hidden-size 40",
    "--model-kind vit --position-embedding-type learned_absolute --img-h 24 --img-w 36 "
    "--patch-dim 6 --num-classes 7",
    f"{VLM} --img-w 24 --disable-vision-class-token --image-grid-pinpoints 48 24",
    f"{VLM} --vision-model-type qwen2_vl",
    f"{VLM} --vision-model-type gemma3 --img-w 24 --pooled-image-embeddings 4 --patch-dim 6",
    f"{VLM} --vision-model-type qwen3_vl --vision-num-position-embeddings 9 "
    "--deepstack-visual-indexes 0 2",
    f"{VLM} --vision-model-type pixtral --normalization RMSNorm",
    f"{VLM} --vision-model-type gemma3 --img-w 24 --pooled-image-embeddings 4 --patch-dim 6 "
    "--vision-projection-type affine",
    f"{VLM} --vision-model-type vit --vision-projection-type affine --disable-bias-linear",
]

OTHERS += [
    "--model-kind mimo --image-size 24 --patch-dim 6",
    "--model-kind mimo --model-provider llava_avlm --image-size 24 --patch-dim 6 "
    "--audio-seq-length 5 --vision-num-layers 3 --vision-hidden-size 48 "
    "--vision-num-attention-heads 6 --swiglu --normalization RMSNorm",
]


@pytest.mark.parametrize("words", OTHERS)
def test_the_estimate_of_other_kinds_is_exact_on_one_rank(words: str) -> None:
    run = run_of(f"--position-embedding-type none {words}")
    sizes = {"vocab_size": 128, "padded_vocab_size": 128}
    model = build_model_stage(run, groups=one_process_groups(), **sizes)
    counted = sum(p.numel() for p in model.parameters())
    count = count_parameters(run, 128)
    every = count.layers + count.embeddings + count.images
    assert every == counted == count.most_loaded_shard


def test_padding_follows_tensor_parallelism_unless_given() -> None:
    assert known_padded_vocab_size(run_of("--tensor-model-parallel-size 4", world_size=4)) == 512
    assert known_padded_vocab_size(run_of("--padded-vocab-size 104")) == 104


def test_tensor_parallel_ranks_share_the_matrices() -> None:
    whole = layer_parameters(run_of())
    half = layer_parameters(run_of("--tensor-model-parallel-size 2", world_size=2))
    model = run_of().model
    # Norms, and biases behind row-parallel products, are whole on every rank.
    shared = model.num_layers * (4 + 2) * model.hidden_size
    assert 2 * half - shared == whole


@pytest.mark.parametrize(
    "words",
    [
        "--swiglu --group-query-attention --num-query-groups 2 --lora-target-modules q_proj v_proj "
        "up_proj embed_tokens output_layer --untie-embeddings-and-output-weights",
        "--num-experts 4 --moe-layer-freq [1,0,0,1] --moe-shared-expert-intermediate-size 8",
        "--num-experts 4 --moe-latent-size 12",
        "--num-experts 4 --swiglu --lora-target-modules experts.linear_fc1 linear_proj",
        "--multi-latent-attention --q-lora-rank 8 --position-embedding-type rope --lora-use-dora",
        "--multi-latent-attention --q-lora-rank 8 --position-embedding-type rope "
        "--experimental-attention-variant dsa",
        "--mtp-num-layers 2 --mtp-use-repeated-layer --position-embedding-type rope",
        "--model-kind mamba --hybrid-override-pattern M*-M --mamba-num-groups 1",
        "--experimental-attention-variant gdn --linear-attention-freq 2 --attention-output-gate",
    ],
)
def test_the_number_of_adapter_parameters_is_exact(words: str) -> None:
    run = run_of(f"{words} --lora-rank 3")
    sizes = {"vocab_size": 128, "padded_vocab_size": 128}
    model = build_model_stage(run, groups=one_process_groups(), **sizes)
    assert run.adapters.lora is not None
    attach_adapters(model, run.adapters.lora)
    counted = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapter_parameters(run, 128) == counted > 0
    count = count_parameters(run, 128)
    assert count.trained_of_shard == counted
    assert count.most_loaded_shard == counted + count.layers + count.embeddings
