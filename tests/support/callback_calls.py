"""A run of one rank that does not train: configuration from a command line, and state."""

from __future__ import annotations

from typing import Any

from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.config.run import RunConfig
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import TrainingRun
from tests.support.small_run import small_run

TINY_GPT = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 10 "
    "--lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 511 --mock-data --log-interval 1"
)


def run_config(flags: str = "", world_size: int = 1) -> RunConfig:
    """Return the configuration of TINY_GPT with additional ``flags``."""
    return resolve(parse_args(argv=f"{TINY_GPT} {flags}".split()), world_size)


class OneRank(TrainingRun):
    """A TrainingRun of one rank, without process groups: it is rank 0 and computes the loss."""

    is_rank_0 = True
    is_last_loss_rank = True


def fake_run(flags: str = "", **changes: Any) -> Any:
    """Return a TrainingRun of one rank without torch.distributed, models or data.

    ``changes``: attributes to set.
    """
    config = run_config(flags)
    run = OneRank(**vars(small_run(config, padded_vocab_size=512)))
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def step_result(**changes: Any) -> StepResult:
    """Return the result of a successful step; ``changes`` replace fields."""
    fields: dict[str, Any] = {
        "losses": {"lm loss": 6.25},
        "grad_norm": 0.5,
        "num_zeros": None,
        "params_norm": None,
        "learning_rate": 1e-3,
        "decoupled_learning_rate": None,
        "loss_scale": 1.0,
        "skipped": False,
        "nan": False,
        "batch_size": 8,
        "num_tokens": 512,
    }
    return StepResult(**(fields | changes))
