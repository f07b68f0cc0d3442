"""Each rule has a command line that breaks it and the sentence that it then says."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.arguments.checks.ranges import AT_LEAST
from megatron.training.arguments.resolve import CHECKS
from megatron.training.arguments.sections import flags_and_defaults
from megatron.training.arguments.without_effect import NEEDS
from tests.unit.arguments.commands import problems_of, run_of

Case = tuple[str, int, tuple[str, ...], str]  # words, world size, flags left out, the sentence


def read_cases() -> dict[str, list[Case]]:
    """check -> command lines that break it, from broken_command_lines.txt."""
    cases: dict[str, list[Case]] = {}
    name, words, world_size, without = "", "", 1, ()
    for line in (Path(__file__).parent / "broken_command_lines.txt").read_text().splitlines():
        mark, rest = line[:1], line[2:]
        if mark == "[":
            name = line.strip("[]")
        elif mark == "+":
            words, world_size, without = rest, 1, ()
        elif mark == "-":
            without = (*without, rest)
        elif mark == "@":
            world_size = int(rest)
        elif mark == "=":
            cases.setdefault(name, []).append((words, world_size, without, rest))
    return cases


BROKEN = read_cases()


def test_the_good_command_line_has_no_problem_and_no_warning() -> None:
    assert run_of().warnings == ()


def test_every_rule_has_a_command_line_that_breaks_it() -> None:
    assert {check.__name__ for check in CHECKS} == set(BROKEN)


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in BROKEN.items() for case in cases]
)
def test_a_broken_rule_says_its_sentence(name: str, case: Case) -> None:
    words, world_size, without, sentence = case
    assert sentence in problems_of(words, world_size, without)


@pytest.mark.parametrize("dest", sorted(AT_LEAST))
def test_a_number_below_its_smallest_value_is_named(dest: str) -> None:
    flag, least = flags_and_defaults()[dest][0], AT_LEAST[dest]
    text = str(least - 1)
    problems = problems_of(f"{flag} {text}")
    assert any(p.startswith(f"{flag} ") and f"at least {least} is needed" in p for p in problems)


@pytest.mark.feature("Command line: all conflicts at once, each with its cure")
def test_all_problems_come_at_once() -> None:
    problems = problems_of(
        "--bf16 --fp16 --log-interval 0 --use-legacy-models --tensor-model-parallel-size 3",
        world_size=4,
    )
    starts = ("--use-legacy-models", "--log-interval", "4 ranks", "--num-att", "--bf16")
    for start in starts:
        assert any(p.startswith(start) for p in problems), (start, problems)


WHOLE_GRADIENTS = next(n.flags for n in NEEDS if n.words.startswith("whole gradients"))


VALUES = {
    "mask_prob": "0.5",
    "short_seq_prob": "0.5",
    "muon_coefficient_type": "simple",
    "muon_extra_scale_factor": "2",
    "muon_fp32_matmul_prec": "high",
    "muon_scalar_optimizer": "lion",
    "muon_scale_mode": "shape_scaling",
    "muon_tp_mode": "blockwise",
    "memory_budget_fraction": "0.5",
    "tiktoken_special_tokens": "a",
    "tiktoken_pattern": "v1",
    "fp8_recipe": "tensorwise",
    "fp8_amax_compute_algo": "max",
    "lr_wsd_decay_style": "cosine",
    "cuda_graph_scope": "attn",
    "wandb_exp_name": "e",
    "wandb_save_dir": "d",
    "memory_snapshot_path": "p",
    "profile_ranks": "3",
    "cp_comm_type": "a2a",
    "hierarchical_context_parallel_sizes": "1 1",
    "pipeline_schedule": "1f1b",
    "pipeline_split": "auto",
    "hybrid_attention_ratio": "0.5",
    "hybrid_mlp_ratio": "0.5",
    "hybrid_override_pattern": "MM",
    "moe_layer_freq": "2",
    "rope_type": "rope",
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
    "moe_router_score_function": "sigmoid",
    "moe_token_dispatcher_type": "alltoall",
    "moe_token_drop_policy": "position",
    "async_save_when_busy": "skip",
    "non_persistent_local_ckpt_algo": "atomic",
}
SWITCHES = {
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "enable_cuda_graph": "--enable-cuda-graph",
    "external_cuda_graph": "--external-cuda-graph",
    "record_memory_history": "--record-memory-history",
    "rehearse_memory": "--rehearse-memory --skip-train",
    "cpu_offloading": "--cpu-offloading --cpu-offloading-num-layers 1",
    "overlap_cpu_optimizer_d2h_h2d": "--overlap-cpu-optimizer-d2h-h2d",
    "pin_cpu_grads": "--no-pin-cpu-grads",
    "pin_cpu_params": "--no-pin-cpu-params",
    "muon_nesterov": "--muon-nesterov",
    "muon_split_qkv": "--muon-no-split-qkv",
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "bert_binary_head": "--bert-no-binary-head",
    "fp8_param_gather": "--fp8-param-gather",
    "fp8_wgrad": "--no-fp8-wgrad",
    "first_last_layers_bf16": "--first-last-layers-bf16",
    "moe_grouped_gemm": "--moe-grouped-gemm",
    "cache_mla_latents": "--cache-mla-latents",
    "rotary_interleaved": "--rotary-interleaved",
    "yarn_correction_range_round_to_int": "--no-yarn-correction-range-round-to-int",
    "use_rope_scaling": "--use-rope-scaling",
    "reset_position_ids": "--reset-position-ids",
    "overlap_param_gather": "--overlap-param-gather --overlap-grad-reduce",
    "disable_straggler_on_startup": "--disable-straggler-on-startup",
    "overlap_param_gather_with_optimizer_step": (
        "--overlap-param-gather-with-optimizer-step --overlap-param-gather --overlap-grad-reduce"
    ),
    "delay_wgrad_compute": "--delay-wgrad-compute",
    "manual_gc_eval": "--no-manual-gc-eval",
    "use_pytorch_profiler": "--use-pytorch-profiler",
    "no_save_optim": "--no-save-optim",
    "no_save_rng": "--no-save-rng",
    "async_save": "--async-save",
    "ckpt_incremental": "--ckpt-incremental",
    "no_load_optim": "--no-load-optim",
    "no_load_rng": "--no-load-rng",
    "use_checkpoint_opt_param_scheduler": "--use-checkpoint-opt_param-scheduler",
    "torch_fsdp2_reshard_after_forward": "--torch-fsdp2-no-reshard-after-forward",
    "gradient_reduce_div_fusion": "--no-gradient-reduce-div-fusion",
    "init_model_with_meta_device": "--init-model-with-meta-device",
    "enable_full_sharding_in_hsdp": "--enable-full-sharding-in-hsdp",
    "data_parallel_sharding_strategy": "--data-parallel-sharding-strategy optim_grads",
    "overlap_grad_reduce": "--overlap-grad-reduce",
    "ddp_pad_buckets_for_high_nccl_busbw": "--ddp-pad-buckets-for-high-nccl-busbw",
    "ddp_average_in_collective": "--ddp-average-in-collective",
    "use_tokenizer_model_from_checkpoint_args": ("--no-use-tokenizer-model-from-checkpoint-args"),
    "defer_embedding_wgrad_compute": "--defer-embedding-wgrad-compute",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
    "align_grad_reduce": "--no-align-grad-reduce",
    "account_for_embedding_in_pipeline_split": "--account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split",
    "moe_apply_probs_on_input": "--moe-apply-probs-on-input",
    "moe_layer_recompute": "--moe-layer-recompute",
    "moe_pad_expert_input_to_capacity": "--moe-pad-expert-input-to-capacity",
    "moe_per_layer_logging": "--moe-per-layer-logging",
    "moe_router_enable_expert_bias": "--moe-router-enable-expert-bias",
    "moe_router_force_load_balancing": "--moe-router-force-load-balancing",
    "moe_router_pre_softmax": "--moe-router-pre-softmax",
    "moe_enable_deepep": "--moe-enable-deepep",
    "moe_shared_expert_overlap": "--moe-shared-expert-overlap",
    "moe_shared_expert_gate": "--moe-shared-expert-gate",
}


@pytest.mark.parametrize("dest", [dest for need in NEEDS for dest in need.flags])
def test_a_flag_whose_partner_is_missing_gets_a_warning(dest: str) -> None:
    fractions = ("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2", "muon_momentum")
    numbers = dict.fromkeys((*fractions, "rotary_percent", "optimizer_offload_fraction"), "0.5") | {
        "muon_num_ns_steps": "3"
    }
    flag = "--" + dest.replace("_vp_stage", "_virtual_pipeline_stage").replace("_", "-")
    words = SWITCHES.get(dest) or f"{flag} {VALUES.get(dest) or numbers.get(dest, '5')}"
    if dest == "reset_position_ids":
        words += " --position-embedding-type rope"
    if dest in next(need.flags for need in NEEDS if need.words == "a GPU"):
        words += " --device cpu"
    if dest.startswith("adam"):
        words += " --optimizer sgd"
    if dest in (*WHOLE_GRADIENTS, "check_weight_hash_across_dp_replicas_interval"):
        words += " --use-torch-fsdp2"
    without: tuple[str, ...] = ()
    if dest.endswith("_samples"):
        words, without = words + " --train-samples 100", ("--train-iters",)
    warning = f"{SWITCHES.get(dest, flag).split()[0]} is without effect: it needs "
    assert any(w.startswith(warning) for w in run_of(words, without=without).warnings)


@pytest.mark.parametrize(
    ("pattern", "idle"), [("MMMM", 14), ("MM*M", 2 + 1), ("MM-M", 1 + 11), ("M*EM", 1)]
)
def test_what_no_layer_of_a_hybrid_reads_gets_a_warning(pattern: str, idle: int) -> None:
    words = (
        "--group-query-attention --num-query-groups 2 --window-size 4,0 --qk-layernorm "
        "--attn-logit-softcapping 30 --position-embedding-type rope --rotary-base 500 "
        "--rotary-percent 0.5 --apply-query-key-layer-scaling --no-rope-freq 2 "
        "--window-attn-skip-freq 2 --softmax-type learnable --ffn-hidden-size 512 --swiglu"
    )
    if "E" in pattern:
        words += " --num-experts 2"
    run = run_of(
        f"--model-kind mamba --hybrid-override-pattern {pattern} --num-layers 4 {words} "
        "--hybrid-mlp-ratio 0.5 --mamba-num-groups 2"
    )
    found = [w for w in run.warnings if "hybrid-override-pattern" in w]
    assert len(found) == idle, found


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        ("--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1", 1),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", 1),
        ("--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1", 0),
        ("--moe-router-score-function sigmoid --moe-router-pre-softmax", 1),
        ("--moe-router-load-balancing-type sinkhorn --moe-router-pre-softmax", 1),
        ("--moe-router-load-balancing-type none --moe-router-pre-softmax", 0),
        (
            "--moe-router-force-load-balancing --moe-router-num-groups 2 --moe-router-group-topk 1 "
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            3,
        ),
        ("--moe-router-load-balancing-type sinkhorn --moe-router-topk 1 "
         "--moe-router-score-function sigmoid", 0),
    ],
)  # fmt: skip
def test_what_a_router_does_not_read_gets_a_warning(words: str, idle: int) -> None:
    warnings = run_of(f"--num-experts 4 {words}").warnings
    assert len([w for w in warnings if "is without effect: it needs " in w]) == idle, warnings
