"""A Runtime of one rank as the code under test gets it, without starting torch.distributed."""

from __future__ import annotations

from typing import Any

from megatron.core.diagnostics.timers import Timers
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.training.config.run import RunConfig
from megatron.training.runtime.runtime import Runtime
from tests.unit.one_process import one_process_groups


def small_run(config: RunConfig, **fields: Any) -> Runtime:
    """The run of ``config`` without models or data; ``fields`` are those of a Runtime."""
    values: dict[str, Any] = {
        "groups": one_process_groups(),
        "timers": Timers(config.logging.timing_log_level, config.logging.timing_log_option),
        "batches": NumMicroBatchesCalculator.from_config(
            config.training, config.data_parallel_size
        ),
        "started_at_s": 0.0,
        "train_iters": config.training.train_iters or 0,
    }
    return Runtime(config=config, **(values | fields))
