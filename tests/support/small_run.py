"""A TrainingRun of one rank as the code under test gets it, without starting torch.distributed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron.core.diagnostics.timers import Timers
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.training.config.run import RunConfig
from megatron.training.step.run import TrainingRun
from tests.support.one_process import one_process_groups


def small_run(config: RunConfig, **fields: Any) -> TrainingRun:
    """The run of ``config`` without model, optimizer or data; ``fields`` replace its fields."""
    values: dict[str, Any] = {
        "groups": one_process_groups(),
        "timers": Timers(config.logging.timing_log_level, config.logging.timing_log_option),
        "batches": NumMicroBatchesCalculator.from_config(
            config.training, config.data_parallel_size
        ),
        "started_at_s": 0.0,
        "tokenizer": SimpleNamespace(vocab_size=100),
        "padded_vocab_size": 128,
        "model_chunks": [],
        "forward_step_func": None,
        "optimizer": None,
        "scheduler": None,
        "train_iters": config.training.train_iters or 0,
    }
    return TrainingRun(config=config, **(values | fields))
