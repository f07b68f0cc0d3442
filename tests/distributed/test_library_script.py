"""A program with its own start-up: set_args() in place of initialize_megatron()."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.training import get_args, get_tokenizer, set_args
from megatron.training.arguments import (
    core_transformer_config_from_args,
    parse_args,
    validate_args,
)
from megatron.training.async_utils import maybe_finalize_async_save
from megatron.training.checkpointing import (
    find_checkpoint_rank_0,
    get_load_checkpoint_path_by_args,
    load_checkpoint,
    read_metadata,
    save_checkpoint,
)
from megatron.training.global_vars import _build_tokenizer, set_global_variables
from megatron.training.training import get_model
from tests.support.command_lines import argv
from tests.support.ranks import run_ranks


def _provider(args: Any, pre_process: bool = True, post_process: bool = True) -> GPTModel:
    config = core_transformer_config_from_args(args)
    spec = get_gpt_layer_local_spec(config=config)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=16,
        pre_process=pre_process,
        post_process=post_process,
    )


def _train(rank: int, world_size: int, root: str) -> None:
    sys.argv = ["program", *argv(f"--save {root} --load {root} --use-distributed-optimizer")]
    args = validate_args(parse_args())
    set_global_variables(args)
    assert get_args() is args
    with pytest.raises(AssertionError, match="model parallel"):
        get_tokenizer()
    parallel_state.initialize_model_parallel()
    args.own_name = "of the program"
    assert _build_tokenizer(args) is get_tokenizer()
    assert args.padded_vocab_size >= get_tokenizer().vocab_size

    def built() -> Any:
        model = get_model(partial(_provider, args))
        config = OptimizerConfig(lr=0.01, use_distributed_optimizer=True)
        return model, get_megatron_optimizer(config, model)

    model, optimizer = built()
    tokens = torch.arange(17).unsqueeze(0)
    model[0].zero_grad_buffer()
    model[0](tokens[:, :-1], torch.arange(16)[None], None, labels=tokens[:, 1:]).mean().backward()
    model[0].finish_grad_sync()
    assert optimizer.step()[0]
    args.consumed_train_samples = 7
    save_checkpoint(3, model, optimizer, None, 0.0, None, None, None, None, None, None, False)
    maybe_finalize_async_save(blocking=True)

    # The program changes its arguments after the run was created: the next load obeys them.
    args.exit_on_missing_checkpoint = True
    args.no_load_rng = True
    tracker = f"{root}/latest_checkpointed_iteration.txt"
    assert read_metadata(tracker) == (3, False)
    folder = get_load_checkpoint_path_by_args(args)
    assert folder == find_checkpoint_rank_0(root, 3) == f"{root}/iter_0000003"
    set_args(args)
    again, optimizer = built()
    assert load_checkpoint(again, optimizer, None)[0] == 3
    assert get_args().consumed_train_samples == 7
    for a, b in zip(model[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_arguments_that_a_program_sets_make_its_run(tmp_path: Path):
    run_ranks(_train, 2, str(tmp_path))
