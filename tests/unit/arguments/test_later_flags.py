"""Flags of later Megatron-LM versions: their effects, and spellings of flags that exist."""

from __future__ import annotations

import runpy
import sys
from unittest import mock

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.transformer.layer_layout import layer_ranges
from megatron.inference.engine_flags import engine_options
from megatron.training.arguments.parser import build_parser, parse_args
from tests.repo.source import ROOT
from tests.support.command_lines import argv, run_of

HYBRID = "--model-kind mamba --mamba-num-groups 2 --hybrid-layer-pattern "


@pytest.mark.parametrize(
    ("flags", "scope"),
    [
        ("--cuda-graph-impl local", "full"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router", "attn"),
        ("--cuda-graph-impl local --cuda-graph-modules mlp mamba", "full"),
        (
            "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad",
            "full_iteration",
        ),
        ("--enable-cuda-graph --cuda-graph-modules attn", "attn"),
    ],
)
def test_cuda_graphs_are_chosen_by_implementation_and_modules(flags: str, scope: str) -> None:
    model = run_of(f"{flags} --device auto").model
    assert model.uses_graphs
    assert model.graph_scope == scope


def test_what_cannot_be_captured_names_the_flag_that_asks_for_it() -> None:
    run = run_of("--cuda-graph-impl local --fp8-format e4m3")
    assert not run.model.uses_graphs
    assert any(w.startswith("--cuda-graph-impl local is without effect") for w in run.warnings)
    part = run_of("--cuda-graph-impl full_iteration --fp16").warnings
    assert any(w.startswith("--cuda-graph-impl full_iteration: each layer") for w in part)


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_the_backend_of_the_flex_dispatcher_is_deepep_or_pytorch(backend: str) -> None:
    experts = "--num-experts 4 --moe-token-dispatcher-type flex --moe-router-dtype fp32"
    run = run_of(f"{experts} --disable-bias-linear --moe-flex-dispatcher-backend {backend}")
    assert run.model.moe_enable_deepep == (backend == "deepep")
    told = [w for w in run.warnings if "--moe-flex-dispatcher-backend" in w]
    assert bool(told) == (backend != "deepep")


def test_a_bar_in_a_hybrid_pattern_ends_a_pipeline_stage() -> None:
    run = run_of(f"{HYBRID}M-*|M --pipeline-model-parallel-size 2", 2, without=("--num-layers",))
    assert run.model.num_layers == 4
    assert [*map(len, layer_ranges(run.model, 2))] == [3, 1]
    assert run.asked["hybrid_override_pattern"] == "M-*M"  # so that others load the checkpoint
    alone = run_of(f"{HYBRID}M-*|M", without=("--num-layers",))
    assert alone.language_model.hybrid_override_pattern == "M-*M"
    assert alone.model.pipeline_model_parallel_layout is None


@pytest.mark.parametrize(
    ("more", "depths"),
    [
        ("M-|*M/M*/M*", 2),
        ("M-|*M/M* --mtp-num-layers 3 --mtp-use-repeated-layer", 3),
        ("M-|*M --mtp-num-layers 2 --mtp-hybrid-override-pattern M*", 2),
    ],
)
def test_a_slash_in_a_hybrid_pattern_begins_an_mtp_layer(more: str, depths: int) -> None:
    words = f"{HYBRID}{more} --pipeline-model-parallel-size 2 --position-embedding-type none"
    run = run_of(words, 2, without=("--num-layers",))
    assert (run.model.num_layers, run.model.mtp_num_layers) == (4, depths)
    assert run.model.pipeline_model_parallel_layout == f"Ett|tt{'m' * depths}L"
    assert run.model.num_layers_ahead == 2 * depths
    for dest, value in (("", "M-*M"), ("mtp_", "M*")):
        assert run.asked[f"{dest}hybrid_override_pattern"] == value


def test_base_weights_are_frozen_for_the_mtp_layers() -> None:
    words = "--position-embedding-type rope --load x --mtp-num-layers 2"
    run = run_of(f"{words} --freeze-base-for-mtp")
    assert run.adapters.export_num_mtp == run.asked["export_num_mtp"] == 2
    assert run.warnings == run_of(f"{words} --export-num-mtp 2").warnings


def test_instances_of_a_sharded_model_share_optimizer_state_by_the_later_name() -> None:
    flags = (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy"
    )
    run = run_of(f"{flags} optim", 4)
    assert run.optimizer.use_distributed_optimizer
    assert not run_of(f"{flags} no_shard", 4).optimizer.use_distributed_optimizer


def test_fsdp_reduces_gradients_in_the_type_that_is_asked_for() -> None:
    flags = "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    flags += "--megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype"
    assert not run_of(f"{flags} bf16", 2).ddp.grad_reduce_in_fp32
    assert run_of(f"{flags} fp32", 2).ddp.grad_reduce_in_fp32


def test_mock_data_is_announced_where_rollouts_are_trained_on() -> None:
    run = run_of("--perform-rl-step --langrl-env-config x.yaml --grpo-kl-beta 0 --mock-data")
    assert [w for w in run.warnings if w.startswith("--mock-data is without effect")]
    assert not [w for w in run_of("--mock-data").warnings if w.startswith("--mock-data")]


def test_layers_for_inference_are_this_programs_own() -> None:
    assert run_of("--transformer-impl inference_optimized").model.transformer_impl == "local"


def test_later_spellings_set_the_flags_that_exist() -> None:
    words = (
        "--disable-use-tokenizer-model-from-checkpoint-args --no-tp-comm-overlap-ag "
        "--inference-dynamic-batching-max-requests 5 --moe-flex-dispatcher-num-sms 7"
    )
    args = parse_args(argv=argv(words))
    assert args.use_tokenizer_model_from_checkpoint_args is False
    assert args.tp_comm_overlap_ag is False
    assert args.inference_dynamic_batching_max_requests_override == 5
    assert args.moe_deepep_num_sms == 7


def test_every_switch_that_turns_something_off_is_spelled_both_ways() -> None:
    spelled = build_parser()._option_string_actions
    flags = [flag for flag, action in spelled.items() if action.nargs == 0]
    assert {f"--disable-{flag[5:]}" for flag in flags if flag.startswith("--no-")} <= {*spelled}


def test_flags_of_the_engine_are_read() -> None:
    flags = (
        "--inference-dynamic-batching-max-tokens 64 --inference-dynamic-batching-block-size 32 "
        "--no-inference-dynamic-batching-prefix-caching --inference-logging-step-interval 9 "
        "--mamba-inference-ssm-states-dtype fp16 --inference-cuda-graph-scope"
    )
    options = engine_options(parse_args(argv=[*flags.split(), "none"]))
    assert (options.max_step_tokens, options.page_size, options.log_interval) == (64, 32, 9)
    assert (options.has_prefix_cache, options.num_cuda_graphs) == (False, 0)
    assert options.state_dtypes == (None, "fp16")
    assert engine_options(parse_args(argv=[*flags.split(), "block"])).num_cuda_graphs == 16


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("pretrain_hybrid.py", "mamba"),
        ("examples/bert/pretrain_bert.py", "bert"),
        ("examples/t5/pretrain_t5.py", "t5"),
    ],
)
def test_later_paths_of_programs_start_the_same_program(program: str, kind: str) -> None:
    words = [str(ROOT / program), *argv("--model-kind gpt --device cpu --check-only")]
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "path", [*sys.path]),
        pytest.raises((SystemExit, ConfigError)),
        mock.patch("sys.stderr") as heard,
    ):
        runpy.run_path(words[0], run_name="__main__")
    said = "".join(str(call.args[0]) for call in heard.write.call_args_list)
    assert f"this program trains {kind}" in said


def test_reasons_are_sentences_and_not_names() -> None:
    run = run_of("--verify-integrity --enable-chunked-prefill")
    said = [w for w in run.warnings if "is without effect" in w]
    assert sum("this program always does so" in w for w in said) == 2
    assert not any("ALWAYS_SO" in w for w in said)
