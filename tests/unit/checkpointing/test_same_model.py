"""A checkpoint of another model is refused, whatever the shapes of its tensors say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.plain_values import plain
from megatron.training.arguments.parser import build_parser
from megatron.training.checkpointing.checkpoint_args import ModelDifferences, compare_models
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.checkpointing.save import save_run
from tests.support.reference_checkpoints import unpack
from tests.support.tiny_run import counters, make_parts, options

GPT = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
ROPE = f"{GPT} --position-embedding-type rope"
MOE = f"{GPT} --num-experts 4"
LATENT = f"{GPT} --multi-latent-attention"
MAMBA = "--model-kind mamba --num-layers 4 --hidden-size 64 --seq-length 32"
YARN = f"{ROPE} --rope-type yarn --rotary-scaling-factor 4"
SWIGLU = f"{GPT} --swiglu"
PARSER = build_parser()


def asked(flags: str) -> dict[str, Any]:
    return vars(PARSER.parse_args(flags.split()))


def compared(saved: str, flags: str, *, is_finetuning: bool = False) -> ModelDifferences:
    stored = {name: plain(value) for name, value in asked(saved).items()}
    return compare_models(stored, asked(flags), is_finetuning=is_finetuning)


REFUSED = [
    (GPT, "--num-attention-heads 8", "num_attention_heads: 4 in the checkpoint, 8 in this run"),
    (GPT, "--norm-epsilon 1e-6", "norm_epsilon: 1e-05 in the checkpoint, 1e-06 in this run"),
    (GPT, "--kv-channels 32", "kv_channels: 16"),
    (GPT, "--group-query-attention --num-query-groups 2", "num_query_groups: 4"),
    (GPT, "--position-embedding-type none", "position_embedding_type: learned_absolute"),
    (GPT, "--normalization RMSNorm", "normalization: LayerNorm"),
    (GPT, "--apply-layernorm-1p", "apply_layernorm_1p: False"),
    (GPT, "--layer-norm-placement post", "layer_norm_placement: pre"),
    (GPT, "--apply-residual-connection-post-layernorm", "apply_residual_connection"),
    (GPT, "--swiglu", "swiglu: False"),
    (GPT, "--squared-relu", "squared_relu: False"),
    (GPT, "--relu", "relu: False"),
    (GPT, "--softmax-scale 1.0", "softmax_scale: 0.25"),
    (GPT, "--softmax-type off-by-one", "softmax_type: vanilla"),
    (GPT, "--attn-logit-softcapping 50", "attn_logit_softcapping: None"),
    (GPT, "--final-logit-softcapping 30", "final_logit_softcapping: None"),
    (GPT, "--embedding-scale 0", "embedding_scale: 1.0"),
    (GPT, "--output-scale 0.5", "output_scale: 1.0"),
    (GPT, "--qk-l2-norm", "qk_l2_norm: False"),
    (GPT, "--window-size 8,0", "window_size: None"),
    (ROPE, "--rotary-percent 0.5", "rotary_percent: 1.0"),
    (ROPE, "--rotary-interleaved", "rotary_interleaved: False"),
    (ROPE, "--rotary-base 500000", "rotary_base: 10000 in the checkpoint, 500000 in this run"),
    (ROPE, "--rotary-seq-len-interpolation-factor 2", "rotary_seq_len_interpolation_factor: 1"),
    (ROPE, "--use-rope-scaling", "use_rope_scaling: False"),
    (ROPE, "--no-rope-freq 2", "no_rope_freq: None"),
    (YARN, "--rotary-scaling-factor 8", "rotary_scaling_factor: 4.0"),
    (YARN, "--yarn-beta-fast 16", "yarn_beta_fast: 32.0"),
    (MOE, "--moe-router-topk 1", "moe_router_topk: 2"),
    (MOE, "--moe-router-score-function sigmoid", "moe_router_score_function: softmax"),
    (MOE, "--moe-router-pre-softmax", "moe_router_pre_softmax: False"),
    (MOE, "--moe-router-topk-scaling-factor 2.5", "moe_router_topk_scaling_factor: 1.0"),
    (MOE, "--moe-router-num-groups 2 --moe-router-group-topk 1", "moe_router_group_topk: None"),
    (MOE, "--moe-apply-probs-on-input", "moe_apply_probs_on_input: False"),
    (LATENT, "--qk-head-dim 64", "qk_head_dim: 128"),
    (MAMBA, "--mamba-state-dim 64", "mamba_state_dim: 128"),
    (MAMBA, "--mamba-head-dim 32", "mamba_head_dim: 64"),
    (SWIGLU, "--activation-func-clamp-value 7", "activation_func_clamp_value: None"),
]


@pytest.mark.parametrize(("saved", "more", "line"), REFUSED)
def test_another_function_is_refused(saved: str, more: str, line: str) -> None:
    found = compared(saved, f"{saved} {more}")
    with pytest.raises(CheckpointError, match="holds another model") as error:
        found.check(Path("ckpt"))
    assert f"\n  - {line}" in str(error.value)
    assert not compared(f"{saved} {more}", f"{saved} {more}").refused
    assert compared(f"{saved} {more}", saved).refused  # nor the other way round


@pytest.mark.parametrize(
    ("saved", "flags"),
    [
        (GPT, GPT),
        (MAMBA, MAMBA),
        (GPT, f"{GPT} --kv-channels 16 --ffn-hidden-size 256 --encoder-num-layers 2"),
        (GPT, f"{GPT} --group-query-attention --num-query-groups 4"),
        (GPT, f"{GPT} --softmax-scale 0.25 --embedding-scale 1 --output-scale 1"),
        (GPT, f"{GPT} --rotary-base 500000 --rotary-percent 0.5 --use-rope-scaling"),  # not read
        (GPT, f"{GPT} --moe-router-topk 1 --mamba-state-dim 64 --qk-head-dim 4"),
        (ROPE, f"{GPT} --use-rotary-position-embeddings --yarn-beta-fast 16"),
        (SWIGLU, f"{SWIGLU} --ffn-hidden-size 128 --no-bias-gelu-fusion"),
        (MOE, f"{MOE} --moe-grouped-gemm --moe-token-dispatcher-type alltoall"),
        (MOE, f"{MOE} --moe-router-dtype fp32 --moe-aux-loss-coeff 1"),
        (MAMBA, f"{MAMBA} --hybrid-override-pattern MMMM --mamba-num-heads 2"),
        (MAMBA, f"{MAMBA} --num-attention-heads 8"),  # without attention
        (GPT, f"{GPT} --apply-query-key-layer-scaling --attention-softmax-in-fp32 --bf16"),
        (GPT, f"{GPT} --tensor-model-parallel-size 2 --sequence-parallel --lr 1 --clip-grad 2"),
        (GPT, f"{GPT} --transformer-impl local --attention-backend fused --use-flash-attn"),
        (ROPE, f"{ROPE} --rope-type rope"),
        (LATENT, f"{LATENT} --rope-type yarn"),
        (YARN, f"{YARN} --yarn-beta-fast 32 --yarn-beta-slow 1"),
        (f"{GPT} --kv-channels 8", f"{GPT} --kv-channels 8 --softmax-scale 0.353553391"),
        (f"{ROPE} --longrope-short-factor 1 0.3", f"{ROPE} --longrope-short-factor 1 0.300000001"),
    ],
)
def test_the_same_function_in_other_words_is_not_refused(saved: str, flags: str) -> None:
    for one, other in ((saved, flags), (flags, saved)):
        found = compared(one, other)
        assert (found.refused, found.shown, found.logged) == ([], [], [])


def test_all_differences_are_in_one_message() -> None:
    found = compared(GPT, f"{GPT} --num-attention-heads 8 --norm-epsilon 1e-6 --hidden-size 32")
    with pytest.raises(CheckpointError) as error:
        found.check(Path("ckpt/iter_0000001"))
    text = str(error.value)
    assert text.startswith("ckpt/iter_0000001 holds another model than the command line describes:")
    assert all(name in text for name in ("num_attention_heads: 4", "norm_epsilon", "hidden_size"))
    assert "add --use-checkpoint-args" in text
    assert "--finetune" not in text  # it would not help
    assert "kv_channels" not in text  # it follows from the others


def test_another_alignment_of_conversations_is_another_order_of_samples() -> None:
    sft = f"{ROPE} --sft"
    split = f"{sft} --context-parallel-size 2"
    found = compared(sft, split)
    assert found.refused == ["sft_alignment: 1 in the checkpoint, 4 in this run (--sft-alignment)"]
    assert found.may_finetune
    assert not compared(sft, split, is_finetuning=True).refused
    assert not compared(f"{sft} --sft-alignment 4", split).refused
    assert not compared(ROPE, split).refused  # from pretraining
    assert "sft_packing" in compared(sft, f"{sft} --no-sft-packing").logged[0]


@pytest.mark.parametrize(
    "more",
    [
        "--rotary-base 500000",
        "--use-rope-scaling --rope-scaling-factor 16",
        "--window-size 8,0",
        "--rope-type yarn --rotary-scaling-factor 4",
        "--rotary-seq-len-interpolation-factor 2",
    ],
)
def test_finetuning_may_lengthen_the_context(more: str) -> None:
    with pytest.raises(CheckpointError, match="or --finetune to train the changed model"):
        compared(ROPE, f"{ROPE} {more}").check(Path("ckpt"))
    found = compared(ROPE, f"{ROPE} {more}", is_finetuning=True)
    assert not found.refused
    assert more.split()[0].removeprefix("--").replace("-", "_") in " ".join(found.logged)
    assert compared(GPT, f"{GPT} --norm-epsilon 1e-6", is_finetuning=True).refused


def test_what_a_run_may_change_is_told_with_both_values() -> None:
    saved = f"{ROPE} --data-path a --seed 1 --hidden-dropout 0.1"
    now = f"{ROPE} --data-path b --split 1,1,1 --seed 2 --hidden-dropout 0 --adam-beta2 0.95"
    found = compared(saved, f"{now} --seq-length 64")
    assert not found.refused
    assert not found.shown
    told = [line.split(" ")[0] for line in found.logged]
    assert told == [
        *("hidden_dropout:", "seq_length:", "data_path:", "split:", "seed:", "adam_beta2:"),
    ]
    assert "seed: 1 in the checkpoint, 2 in this run (--seed)" in found.logged


def test_what_the_tensors_show_is_left_to_them() -> None:
    found = compared(GPT, f"{GPT} --num-layers 3 --disable-bias-linear --num-experts 4")
    assert not found.refused
    assert [line.split(":")[0] for line in found.shown] == [
        *("add_qkv_bias", "add_bias_linear", "num_experts", "num_layers"),
    ]


@pytest.mark.parametrize("name", ["gpt_torch", "gpt_torch_dist", "gpt_torch_tp2pp2_distopt"])
def test_checkpoints_of_megatron_are_compared(tmp_path: Path, name: str) -> None:
    stored = open_checkpoint(str(unpack(tmp_path, name))).asked
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads {} --seq-length 64"
    assert compare_models(stored, asked(shape.format(4)), is_finetuning=False).refused == []
    refused = compare_models(stored, asked(shape.format(8)), is_finetuning=False).refused
    assert "num_attention_heads: 4 in the checkpoint, 8 in this run" in " ".join(refused)


def test_flags_that_the_checkpoint_does_not_know_are_not_compared() -> None:
    stored = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    found = compare_models(stored, asked(f"{GPT} --norm-epsilon 1e-6"), is_finetuning=False)
    assert found == ModelDifferences([], [], [], [], may_finetune=True)


@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, -3.5])
def test_a_stored_command_line_that_is_none_is_an_error(value: Any) -> None:
    stored = {**asked(GPT), "num_attention_heads": value}
    with pytest.raises(CheckpointError):
        compare_models(stored, asked(GPT), is_finetuning=False).check(Path("ckpt"))


@pytest.mark.feature("Checkpoints: a run that would train another model than was saved is refused")
def test_a_load_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = asked(f"{GPT} --seed 1")
    parts = make_parts()
    save_run(options(tmp_path), parts, counters(1), asked=saved)
    other = replace(parts, asked=asked(f"{GPT} --num-attention-heads 8"))
    for more in ({}, {"finetune": True}):
        with pytest.raises(CheckpointError, match="num_attention_heads: 4 in the checkpoint, 8"):
            load_run(options(tmp_path, **more), other)
    same = replace(parts, asked=asked(f"{GPT} --seed 2"))
    loaded = load_run(options(tmp_path), same)
    assert loaded is not None
    assert "NOTE: seed: 1 in the checkpoint, 2 in this run (--seed)" in capsys.readouterr().out


def test_every_program_warns_of_another_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bpe = f"{GPT} --tokenizer-type GPT2BPETokenizer --vocab-file v.json --merge-file m.txt"
    parts = make_parts()
    save_run(options(tmp_path), parts, counters(1), asked=asked(bpe))
    null = asked(f"{GPT} --tokenizer-type NullTokenizer --vocab-size 50256")
    for optimizer in (parts.optimizer, None):  # a program that generates text has none
        capsys.readouterr()
        config = options(tmp_path, no_load_optim=True)
        load_run(config, replace(parts, asked=null, optimizer=optimizer, scheduler=None))
        (warning,) = [
            line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")
        ]
        assert warning == (
            "WARNING: tokenizer_type: GPT2BPETokenizer in the checkpoint, NullTokenizer in this "
            "run (--tokenizer-type): ids of equal value may be other tokens; give the tokenizer "
            "of the checkpoint, or --use-checkpoint-args"
        )
