"""Config fields of Megatron-LM in a --yaml-cfg file: applied, announced or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.optional import available
from megatron.training.arguments.config_keys import ACTIVATIONS
from megatron.training.arguments.parser import build_parser, parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.arguments.sections import flags_and_defaults
from megatron.training.config.run import RunConfig

GPT_CONFIG = Path(__file__).parents[2] / "golden/gpt_config.yaml"
# Fields of ModelParallelConfig, TransformerConfig and MLATransformerConfig of core_v0.14 that
# no flag sets, with their defaults.
FIELDS_WITHOUT_FLAG = {
    **dict.fromkeys(
        "virtual_pipeline_model_parallel_size timers finalize_model_grads_func grad_scale_func "
        "no_sync_func grad_sync_func param_sync_func autocast_dtype pipeline_dtype "
        "num_microbatches_with_partial_activation_checkpoints _cpu_offloading_context "
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage init_method "
        "output_layer_init_method embedding_init_method moe_router_topk_limited_devices "
        "params_dtype quant_recipe".split()
    ),
    **dict.fromkeys(
        "enable_autocast use_te_rng_tracker tp_comm_atomic_ag tp_comm_atomic_rs "
        "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 variable_seq_lengths "
        "deallocate_pipeline_outputs cpu_offloading_double_buffering gated_linear_unit "
        "activation_func_fp8_input_store bias_activation_fusion memory_efficient_layer_norm "
        "fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red use_kitchen "
        "moe_token_dropping cuda_graph_use_single_mempool cuda_graph_retain_backward_graph "
        "disable_parameter_transpose_cache heterogeneous_block_specs "
        "hetereogenous_dist_checkpoint is_hybrid_model moe_extended_tp".split(),
        False,
    ),
    **dict.fromkeys("batch_p2p_comm batch_p2p_sync cpu_offloading_activations".split(), True),
    "cpu_offloading_weights": False,
    "activation_func": "gelu",
}


def run_of(content: dict[str, object], tmp_path: Path, *words: str) -> RunConfig:
    shape = {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 32,
        "micro_batch_size": 2, "train_iters": 10, "lr": 0.1, "mock_data": True,
        "tokenizer_type": "NullTokenizer", "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps({**shape, "language_model": content}))
    return resolve(parse_args(argv=["--yaml-cfg", str(tmp_path / "run.json"), *words]), 1)


@pytest.mark.skipif(not available("yaml"), reason="PyYAML is not installed")
@pytest.mark.feature("Command line: a YAML file of Megatron-LM, examples/gpt3/gpt_config.yaml")
def test_the_keys_of_megatrons_gpt_config_start_a_run() -> None:
    run = resolve(parse_args(argv=["--yaml-cfg", str(GPT_CONFIG)]), 2)
    model = run.model
    assert (model.gated_linear_unit, model.activation_func.__name__) == (True, "silu")
    assert (model.layernorm_epsilon, model.layernorm_zero_centered_gamma) == (1e-6, True)
    assert (model.tensor_model_parallel_size, model.sequence_parallel) == (2, True)
    assert (run.training.train_samples, run.data.split) == (268554688, "99,1,0")
    announced = [w for w in run.warnings if "tp_comm_atomic_ag" in w]
    assert len(announced) == 1
    assert "is without effect" in announced[0]


def test_every_field_at_its_default_changes_nothing(tmp_path: Path) -> None:
    known = {action.dest for action in build_parser()._actions}
    fields = {k: v for k, v in FIELDS_WITHOUT_FLAG.items() if k not in known}
    assert run_of(fields, tmp_path).warnings == run_of({}, tmp_path).warnings


@pytest.mark.parametrize(
    ("content", "flag"),
    [
        ({"activation_func": "swiglu", "gated_linear_unit": False}, "--swiglu"),
        ({"activation_func": "silu", "gated_linear_unit": True}, "--swiglu"),
        ({"activation_func": "gelu", "gated_linear_unit": True}, "--geglu"),
        ({"gated_linear_unit": True}, "--geglu"),
        ({"gated_linear_unit": True, "swiglu": True}, "--swiglu"),
        ({"activation_func": "squared_relu"}, "--squared-relu"),
        ({"activation_func": "relu"}, "--relu"),
        ({"activation_func": "openai_gelu"}, "--openai-gelu"),
        ({"activation_func": "quick_gelu", "gated_linear_unit": True}, "--quick-geglu"),
        ({"bias_activation_fusion": False}, "--no-bias-gelu-fusion --no-bias-swiglu-fusion"),
        ({"init_method": "xavier_uniform"}, "--init-method-xavier-uniform"),
    ],
)
def test_a_field_sets_what_its_flag_sets(
    tmp_path: Path, content: dict[str, object], flag: str
) -> None:
    assert run_of(content, tmp_path).model == run_of({}, tmp_path, *flag.split()).model


def test_a_renamed_field_sets_its_flag(tmp_path: Path) -> None:
    content = {"original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2}
    args = {"position_embedding_type": "rope", "rope_type": "yarn", "rotary_scaling_factor": 2}
    model = run_of({**content, **args}, tmp_path).model
    assert (model.yarn_original_max_position_embeddings, model.yarn_beta_fast) == (64, 16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"activation_func": "swish"}, "activation_func swish: use one of gelu, "),
        ({"activation_func": "relu", "gated_linear_unit": True}, "activation_func relu with gated"),
        ({"activation_func": "gelu", "swiglu": True}, "activation_func gelu and swiglu"),
        ({"params_dtype": "torch.float16"}, "params_dtype: 'torch.float16' is not available: "),
        ({"timers": "x"}, "timers: 'x' is not available: "),
        ({"init_method": "kaiming"}, "init_method: 'kaiming' is not available: "),
        ({"moe_token_dropping": True}, "moe_token_dropping: True is not available: "),
        ({"batch_p2p_comm": "odd"}, "batch_p2p_comm: 'odd' is not true or false"),
        ({"bias_dropout_fusion": None}, "bias_dropout_fusion: None is not true or false"),
        ({"grad_scale_fun": None}, "grad_scale_fun is not a flag: did you mean grad_scale_func?"),
    ],
)
def test_a_value_that_cannot_be_had_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(SystemExit):
        run_of(content, tmp_path)
    assert message in capsys.readouterr().err


def test_a_field_of_the_implementation_is_announced_once(tmp_path: Path) -> None:
    warnings = run_of({"batch_p2p_comm": False}, tmp_path).warnings
    assert len([w for w in warnings if "batch_p2p_comm False is without effect: " in w]) == 1


def test_null_leaves_the_default(tmp_path: Path) -> None:
    run = run_of({"clip_grad": None, "use_cpu_initialization": None, "seed": None}, tmp_path)
    assert (run.optimizer.clip_grad, run.training.seed) == (1.0, 1234)
    assert run.model == run_of({}, tmp_path).model


def test_the_activations_name_flags() -> None:
    assert {dest for dest in ACTIVATIONS.values() if dest} <= flags_and_defaults().keys()
