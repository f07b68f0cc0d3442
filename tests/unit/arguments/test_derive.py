"""Values that follow from other values."""

from __future__ import annotations

import copy
import dataclasses
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F

from megatron.core.activations import openai_gelu, quick_gelu, squared_relu
from megatron.core.config.errors import ConfigError
from megatron.core.config.option import Option
from megatron.core.enums import AttnBackend
from megatron.training.arguments.flat_values import flat_values
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.arguments.sections import flags_and_defaults, options_by_dest
from tests.support.command_lines import argv, run_of


def test_resolve_changes_nothing_and_answers_alike() -> None:
    args = parse_args(argv=argv("--swiglu --bf16"))
    before = copy.deepcopy(vars(args))
    assert resolve(args, 2) == resolve(args, 2)
    assert vars(args) == before


def test_a_run_config_cannot_be_written_to() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        run_of().training.seed = 1  # type: ignore[misc]


def test_replicas_are_what_the_model_leaves() -> None:
    run = run_of("--tensor-model-parallel-size 2", world_size=8)
    assert run.data_parallel_size == 4
    assert run.training.global_batch_size == 2 * 4


def test_the_global_batch_asked_for_stays() -> None:
    assert run_of("--global-batch-size 16", world_size=4).training.global_batch_size == 16


@pytest.mark.parametrize(
    ("words", "width"),
    [
        ("", 256),
        ("--ffn-hidden-size 100", 100),
        ("--swiglu --hidden-size 768", 2048),
        ("--geglu", 256),
    ],
)
def test_mlp_width_follows_the_hidden_size(words: str, width: int) -> None:
    assert run_of(words).model.ffn_hidden_size == width


def test_head_width_and_groups_follow_the_heads() -> None:
    plain = run_of("--num-query-groups 2").model
    assert (plain.kv_channels, plain.num_query_groups) == (8, 8)
    grouped = run_of("--group-query-attention --num-query-groups 2 --kv-channels 16").model
    assert (grouped.kv_channels, grouped.num_query_groups) == (16, 2)
    assert run_of("--group-query-attention").model.num_query_groups == 1


@pytest.mark.parametrize(
    ("words", "function", "gated"),
    [
        ("", F.gelu, False),
        ("--swiglu", F.silu, True),
        ("--geglu", F.gelu, True),
        ("--geglu --openai-gelu", openai_gelu, True),
        ("--quick-geglu", quick_gelu, True),
        ("--squared-relu", squared_relu, False),
        ("--relu", F.relu, False),
        ("--openai-gelu", openai_gelu, False),
    ],
)
def test_shorthands_choose_the_activation(words: str, function: object, gated: bool) -> None:
    model = run_of(words).model
    assert model.activation_func is function
    assert model.gated_linear_unit is gated


def test_activations_are_what_their_names_say() -> None:
    x = torch.tensor([-2.0, 0.5, 3.0])
    torch.testing.assert_close(squared_relu(x), torch.tensor([0.0, 0.25, 9.0]))
    inner = 0.7978845608028654 * (x + 0.044715 * x**3)
    torch.testing.assert_close(openai_gelu(x), 0.5 * x * (1 + torch.tanh(inner)))


@pytest.mark.parametrize(
    ("words", "dtype"),
    [("", torch.float32), ("--bf16", torch.bfloat16), ("--fp16", torch.float16)],
)
def test_precision_flags_give_the_dtype(words: str, dtype: torch.dtype) -> None:
    model = run_of(words).model
    assert model.params_dtype is model.pipeline_dtype is dtype
    assert (model.bf16, model.fp16) == (dtype is torch.bfloat16, dtype is torch.float16)


def test_bf16_gradients_are_summed_in_fp32_unless_asked_otherwise() -> None:
    assert run_of("--bf16").ddp.grad_reduce_in_fp32 is True
    assert run_of("").ddp.grad_reduce_in_fp32 is False
    overruled = run_of("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32")
    assert overruled.ddp.grad_reduce_in_fp32 is False
    assert overruled.warnings == (
        "--grad-reduce-in-bf16 overrules --accumulate-allreduce-grads-in-fp32",
    )


def test_an_adaptive_loss_scale_meets_overflow_on_purpose() -> None:
    assert run_of("--fp16").ddp.check_for_nan_in_grad is False
    assert run_of("--fp16 --loss-scale 8").ddp.check_for_nan_in_grad is True
    assert run_of("--bf16").ddp.check_for_nan_in_grad is True


def test_sequence_parallelism_needs_tensor_parallelism() -> None:
    run = run_of("--sequence-parallel")
    assert run.model.sequence_parallel is False
    assert run.warnings == (
        "--sequence-parallel is without effect: --tensor-model-parallel-size is 1",
    )
    two = run_of("--sequence-parallel --tensor-model-parallel-size 2", world_size=2)
    assert two.model.sequence_parallel is True
    assert two.model.expert_tensor_parallel_size == 2


def test_old_names_of_numbers_still_give_them() -> None:
    run = run_of(
        "--encoder-num-layers 6 --encoder-seq-length 16", without=("--num-layers", "--seq-length")
    )
    assert (run.model.num_layers, run.data.seq_length) == (6, 16)
    assert run.language_model.max_position_embeddings == 16


def test_old_spellings_of_features_still_choose_them() -> None:
    assert run_of("--use-rotary-position-embeddings").language_model.position_embedding_type == (
        "rope"
    )
    assert run_of("--recompute-activations").model.recompute_granularity == "selective"
    assert run_of("--use-flash-attn").model.attention_backend is AttnBackend.flash
    assert run_of("--use-flash-attn --attention-backend local").model.attention_backend is (
        AttnBackend.local
    )


def test_adaptive_recomputation_is_full_and_says_so() -> None:
    run = run_of("--recompute-granularity adaptive --memory-budget-fraction 0.5")
    m = run.model
    found = m.recompute_granularity, m.recompute_method, m.recompute_num_layers
    assert found == ("full", "uniform", 1)
    assert [w.split(" ")[0] for w in run.warnings] == [
        "--memory-budget-fraction",
        "--recompute-granularity",
    ]


def test_biases_come_and_go_together() -> None:
    assert run_of().model.add_qkv_bias is True
    without = run_of("--disable-bias-linear").model
    assert (without.add_bias_linear, without.add_qkv_bias) == (False, False)
    assert without.bias_activation_fusion is False
    assert run_of("--disable-bias-linear --add-qkv-bias").model.add_qkv_bias is True


def test_query_key_scaling_takes_the_softmax_to_fp32() -> None:
    assert run_of("--apply-query-key-layer-scaling").model.attention_softmax_in_fp32 is True


def test_a_constant_weight_decay_has_equal_ends() -> None:
    s = run_of("--weight-decay 0.3").scheduler
    assert (s.start_weight_decay, s.end_weight_decay) == (0.3, 0.3)


def test_data_are_split_by_default_with_a_warning() -> None:
    run = run_of("--data-path prefix", without=("--mock-data",))
    assert run.data.split == "969, 30, 1"
    assert run.data.data_path == ("prefix",)
    assert run.data.dataloader_type == "single"
    assert any("--split is not given: --data-path is split" in w for w in run.warnings)
    run = run_of("--data-args-path file", without=("--mock-data",))
    assert run.data.split == "969, 30, 1"
    assert any("--split is not given: --data-args-path is split" in w for w in run.warnings)
    phases = "--phase-transition-iterations 1 --phase-data-args-path a b"
    run = run_of(phases, without=("--mock-data",))
    assert run.data.split == "969, 30, 1"


def test_an_inverted_flag_reaches_its_field() -> None:
    assert run_of().model.persist_layer_norm is True
    assert run_of("--no-persist-layer-norm").model.persist_layer_norm is False


def test_a_users_flags_land_in_extra() -> None:
    args = parse_args(lambda p: p.add_argument("--mine") and p, argv=[*argv(), "--mine", "3"])
    assert resolve(args, 1).extra == {"mine": "3"}
    assert resolve(args, 1, extra={"other": 1}).extra == {"other": 1}


def test_a_count_of_zero_asks_for_nothing() -> None:
    run = run_of("--num-experts 0 --mtp-num-layers 0")
    assert (run.model.num_moe_experts, run.model.mtp_num_layers) == (None, None)
    assert run.warnings == ()


@pytest.mark.parametrize(
    ("flags", "world_size", "reason"),
    [
        ("--recompute-granularity selective", 1, "re-runs layers in backward"),
        ("--fp8-format hybrid", 1, "with --fp8-format hybrid the host updates scales"),
        ("--fp4-format e2m1", 1, "with --fp4-format e2m1 the host updates scales"),
        ("--use-torch-fsdp2", 1, "sharded parameters are gathered to a new address"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
            2,
            "--pipeline-schedule zb-h1 computes weight gradients separately",
        ),
        ("--virtual-ranks 2", 1, "--virtual-ranks are threads on a CPU"),
    ],
)
def test_what_cuda_graphs_cannot_capture_runs_eagerly(
    flags: str, world_size: int, reason: str
) -> None:
    run = run_of(f"--enable-cuda-graph {flags}", world_size)
    assert not run.model.uses_graphs
    told = [w for w in run.warnings if "nothing is captured" in w]
    assert len(told) == 1
    assert reason in told[0]


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--pipeline-model-parallel-size 2", 2),
        ("--num-experts 2 --disable-bias-linear", 1),
        ("--position-embedding-type rope --mtp-num-layers 1", 1),
        ("--model-kind bert", 1),
        ("--fp16", 1),
        ("--timing-log-level 1", 1),
        ("--log-straggler", 1),
    ],
)
def test_where_no_whole_step_is_captured_its_layers_are(flags: str, world_size: int) -> None:
    whole = "--external-cuda-graph --cuda-graph-scope full_iteration "
    run = run_of(f"{whole}{flags}", world_size)
    assert run.model.captures_layers
    assert run.model.cuda_graph_scope == "full"
    assert sum(w.startswith("--cuda-graph-scope full_iteration: each") for w in run.warnings) == 1


def other_values(opt: Option, default: object) -> list[object]:
    """Values of a flag besides its default."""
    if opt.choices is not None:
        found = [choice for choice in opt.choices if choice is not None]
        return [[each] for each in found] if isinstance(default, list) else found
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int | float):
        return [default + 1]
    return [1, "x", True] if default is None else []


def test_a_value_that_was_given_stays_or_a_warning_names_its_flag() -> None:
    """Of every flag; "yarn" is rope with --rope-type yarn, a form that layers understand."""
    base = vars(parse_args(argv=argv("--num-experts 4")))
    changed = set()
    for dest, opt in options_by_dest().items():
        if dest == "yaml_cfg":
            continue  # the other values include those of the file
        flag = flags_and_defaults()[dest][0]
        for value in other_values(opt, base[dest]):
            try:
                run = resolve(Namespace(**{**base, dest: value}), 1)
            except (ConfigError, TypeError, ValueError, AttributeError):
                continue  # refused, or of a type that the parser does not give
            kept = flat_values(run)[dest]
            if kept not in (value, [value], (value,)) and [kept] != value:
                said = any(flag in warning for warning in run.warnings)
                changed |= set() if said else {f"{flag} {value}"}
    assert changed == {"--position-embedding-type yarn"}


def test_a_norm_without_weights_replaces_the_one_with_weights() -> None:
    run = run_of("--qk-layernorm --qk-l2-norm")
    assert (run.model.qk_layernorm, run.model.qk_l2_norm) == (False, True)
    assert any(w.startswith("--qk-layernorm is without effect") for w in run.warnings)


@pytest.mark.parametrize("positions", ["learned_absolute", "none", "rope"])
def test_latent_attention_takes_the_positions_of_megatron_lm(positions: str) -> None:
    words = "--multi-latent-attention --rotary-base 500"
    run = run_of(f"{words} --position-embedding-type {positions} --max-position-embeddings 32")
    assert run.model.apply_rope_fusion, "it rotates a part of each head"
    assert not any("--rotary-base" in w for w in run.warnings)
