"""A small run without training: configuration from a command line, state, one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron.core.diagnostics.timers import Timers
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.config.run import RunConfig
from megatron.training.runtime.state import StepResult, TrainState

TINY_GPT = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 10 "
    "--lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 511 --mock-data --log-interval 1"
)


def run_config(flags: str = "", world_size: int = 1) -> RunConfig:
    """The configuration of a tiny GPT with ``flags`` on top."""
    return resolve(parse_args(argv=f"{TINY_GPT} {flags}".split()), world_size)


class OneRankGroup:
    """A process group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def fake_run(flags: str = "", **changes: Any) -> Any:
    """What callbacks see of a Runtime, in one process without process groups."""
    config = run_config(flags)
    group = OneRankGroup()
    fields: dict[str, Any] = {
        "phase": "start-up",
        "config": config,
        "state": TrainState(),
        "timers": Timers(config.logging.timing_log_level, config.logging.timing_log_option),
        "groups": SimpleNamespace(
            dp=group, cp=group, pp=group, tp=group, is_last_stage=True, is_first_stage=True
        ),
        "batches": SimpleNamespace(num_microbatches=lambda consumed: 4),
        "padded_vocab_size": 512,
        "train_iters": config.training.train_iters,
        "started_at_s": 0.0,
        "is_rank_0": True,
        "is_last_loss_rank": True,
        "model_chunks": [],
    }
    return SimpleNamespace(**(fields | changes))


def step_result(**changes: Any) -> StepResult:
    """An ordinary step of the tiny GPT."""
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
