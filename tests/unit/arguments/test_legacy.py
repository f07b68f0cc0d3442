"""Scripts written for the reference get the namespace they expect."""

from __future__ import annotations

import argparse
import copy
import pickle
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron.training.arguments as facade
from megatron.core.config.errors import ConfigError
from megatron.training.arguments.flat_values import resolve_args
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.compat import global_vars
from megatron.training.config.run import RunConfig
from megatron.training.runtime.context import TrainState
from megatron.training.runtime.flat_namespace import legacy_namespace
from megatron.training.step.run import TrainingRun
from tests.support.command_lines import argv, run_of
from tests.support.small_run import small_run


def run_with_tokenizer(config: RunConfig, **settings: Any) -> TrainingRun:
    """A run of 10 iterations whose tokenizer has 100 tokens, padded to 128."""
    tokenizer = SimpleNamespace(vocab_size=100)
    return small_run(config, **{"padded_vocab_size": 128, "tokenizer": tokenizer, **settings})


def namespace(words: str = "", **settings: Any) -> Any:
    return legacy_namespace(run_with_tokenizer(run_of(words), **settings))


def test_derived_values_are_there_under_the_reference_names() -> None:
    args = namespace("--swiglu --bf16", state=TrainState(iteration=3, consumed_train_samples=6))
    assert (args.rank, args.world_size, args.data_parallel_size) == (0, 1, 1)
    assert args.params_dtype is torch.bfloat16
    assert (args.padded_vocab_size, args.train_iters) == (128, 10)
    assert (args.iteration, args.consumed_train_samples) == (3, 6)
    assert (args.num_query_groups, args.ffn_hidden_size, args.kv_channels) == (8, 128, 8)
    assert args.virtual_pipeline_model_parallel_size is None
    assert args.use_dist_ckpt is True


def test_every_flag_of_the_parser_is_there() -> None:
    of_parser = {"parse_warnings", "dests_given"}
    assert not vars(parse_args(argv=argv())).keys() - vars(namespace()).keys() - of_parser


def test_dests_keep_the_reference_meaning() -> None:
    args = namespace("--norm-epsilon 1e-6 --no-persist-layer-norm")
    assert (args.norm_epsilon, args.no_persist_layer_norm) == (1e-6, True)
    assert args.profile_ranks == [0]


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("micro_batch_size", "set --micro-batch-size or give pretrain"),
        ("no_persist_layer_norm", "set --no-persist-layer-norm or"),
        ("iteration", "steps are counted by pretrain"),
        ("curr_iteration", "steps are counted by pretrain"),
        ("my_model", "keep the value in a variable of your own"),
    ],
)
def test_writing_says_what_to_do_instead(name: str, cure: str) -> None:
    with pytest.raises(ConfigError, match=f"get_args.. is read-only, {name} = 4 .*{cure}"):
        setattr(namespace(), name, 4)


def test_the_value_that_is_there_may_be_assigned() -> None:
    args = namespace()
    args.micro_batch_size = 2
    args.load = None
    args.padded_vocab_size = int(args.padded_vocab_size)
    with pytest.raises(ConfigError, match="micro_batch_size = True changes nothing"):
        args.micro_batch_size = True
    assert args.micro_batch_size == 2


def test_a_parser_of_a_program_takes_all_flags() -> None:
    parser = facade.add_megatron_arguments(argparse.ArgumentParser())
    assert parser.parse_args(["--num-layers", "4", "--bf16"]).num_layers == 4


def test_a_script_may_say_that_a_missing_checkpoint_ends_it() -> None:
    runtime = run_with_tokenizer(run_of(""))
    args = legacy_namespace(runtime)
    args.exit_on_missing_checkpoint = True
    assert args.exit_on_missing_checkpoint
    assert runtime.config.checkpoint.exit_on_missing_checkpoint


def test_deleting_says_that_it_changes_nothing() -> None:
    with pytest.raises(ConfigError, match="deleting seed would change nothing"):
        del namespace().seed


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))]
)
def test_a_copy_may_be_written(make: Any) -> None:
    args = namespace("--swiglu")
    mine = make(args)
    assert vars(mine) == vars(args)
    mine.num_layers = 7
    assert facade.core_transformer_config_from_args(mine).num_layers == 7
    assert args.num_layers == 4


def test_get_args_is_one_object_whose_counters_are_current() -> None:
    run = run_with_tokenizer(run_of(""), train_iters=0)
    global_vars.set_run(run)
    try:
        args = global_vars.get_args()
        assert (args.iteration, args.padded_vocab_size, args.train_iters) == (0, 128, 10)
        run.state.iteration, run.train_iters = 5, 12
        assert global_vars.get_args() is args
        assert (args.iteration, args.curr_iteration) == (5, 5)
        assert args.train_iters == 12
        extended = replace(run, train_iters=13)
        global_vars.set_run(extended)
        assert global_vars.get_args() is args
        assert args.train_iters == 13
        other = run_with_tokenizer(run_of("--seed 5"))
        global_vars.set_run(other)
        assert global_vars.get_args().seed == 5
    finally:
        global_vars.set_run(None)


def test_the_padded_size_remembers_the_true_one_unless_padding_enters_the_loss() -> None:
    assert namespace().padded_vocab_size.true_size == 100
    assert type(namespace("--pad-vocab-in-loss").padded_vocab_size) is int


def test_a_users_flags_are_in_the_namespace() -> None:
    args = parse_args(lambda p: p.add_argument("--mine", type=int) and p, argv=argv("--mine 3"))
    runtime = run_with_tokenizer(resolve(args, 1))
    assert legacy_namespace(runtime).mine == 3


def with_a_provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--model-provider", choices=["mamba", "gpt"], default="gpt")
    parser.add_argument("--num-frames", type=int, default=3, dest="frames")
    return parser


@pytest.mark.parametrize("words", ["", "--num-experts 2"])
def test_a_flag_that_a_program_has_replaced_keeps_its_value(words: str) -> None:
    args = parse_args(with_a_provider, argv=argv(words))
    run = resolve(args, 1)
    mine = legacy_namespace(run_with_tokenizer(run))
    assert (mine.model_provider, mine.frames) == ("gpt", 3)
    assert (run.mimo.model_provider, run.mimo.num_frames) == ("mock", 1)
    assert not any("--model-provider" in warning for warning in run.warnings)
    facade.validate_args(args)
    again = resolve_args(args, 1)
    assert (again.extra["model_provider"], again.mimo) == ("gpt", run.mimo)


def test_a_list_of_one_is_its_element() -> None:
    args = namespace("--num-experts 4 --moe-aux-loss-coeff 0.1")
    assert args.moe_router_load_balancing_type == "aux_loss"
    assert args.moe_aux_loss_coeff == 0.1


@pytest.mark.feature("Scripts: get_args(), args_defaults and extra_args_provider of Megatron-LM")
def test_a_script_parses_validates_and_builds_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", *argv("--swiglu")])
    args = facade.parse_args()
    assert (args.rank, args.world_size) == (0, 1)
    with pytest.raises(ConfigError, match="call validate_args"):
        facade.core_transformer_config_from_args(args)
    facade.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer", "no_load_rng": True})
    assert (args.tokenizer_type, args.no_load_rng) == ("NullTokenizer", True)
    assert args.consumed_train_samples == 0
    assert facade.core_transformer_config_from_args(args) == run_of("--swiglu").model
    again = facade.core_transformer_config_from_args(namespace("--swiglu"))
    assert again == run_of("--swiglu").model


@pytest.mark.parametrize("words", ["", "--swiglu --bf16", "--fp16", "--recompute-activations"])
def test_validated_arguments_may_be_changed_and_validated_again(words: str) -> None:
    args = facade.validate_args(parse_args(argv=argv(words)))
    facade.validate_args(args)
    assert facade.core_transformer_config_from_args(args) == run_of(words).model
    args.num_layers, args.my_own = 6, 1
    assert resolve_args(args, 1).model.num_layers == 6
    assert resolve_args(args, 1).extra == {"my_own": 1}
    facade.validate_args(args)
    assert args.num_layers == 6
    args.hidden_size = 63
    with pytest.raises(ConfigError, match="--hidden-size 63"):
        facade.validate_args(args)


def test_validation_reports_conflicts() -> None:
    with pytest.raises(ConfigError, match="--bf16 and --fp16 exclude each other"):
        facade.validate_args(parse_args(argv=argv("--bf16 --fp16")))


def test_an_unknown_export_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        vars(facade)["__getattr__"]("nothing")


def test_tokenizer_flags_can_be_had_alone() -> None:
    parser = SimpleNamespace(added=[])
    group = SimpleNamespace(add_argument=lambda *flags, **_: parser.added.extend(flags))
    parser.add_argument_group = lambda title: group
    facade._add_tokenizer_args(parser)
    assert "--tokenizer-type" in parser.added
    own = (
        "--tokenizer-prompt-format --special-tokens --image-tag-type --force-system-message "
        "--sft-tokenizer-prompt-format --chat-template"
    )
    assert set(own.split()) < set(parser.added)
    assert len(parser.added) - len(own.split()) == 10  # those of Megatron-LM


def test_arguments_of_another_parser_are_named_and_a_run_can_be_forgotten() -> None:
    global_vars.set_args(argparse.Namespace(num_layers=2))
    assert global_vars.get_args().num_layers == 2
    with pytest.raises(ConfigError, match=r"set_args\(\) lack '\w+': take those of parse_args"):
        global_vars.get_timers()
    global_vars.destroy_global_vars()
    for kind in (RuntimeError, AssertionError):
        with pytest.raises(kind, match="nothing runs yet"):
            global_vars.get_args()
