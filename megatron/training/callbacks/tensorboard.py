"""Write metrics to TensorBoard under Megatron-LM's tags, on the last rank.

Most tags have a second curve, ``{tag} vs samples``, whose step is the number of consumed samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.optional import require
from megatron.training.callbacks.records import EvalRecord, Sink, StepRecord
from megatron.training.config.logging import LoggingConfig

SAMPLES = " vs samples"
# Tags besides the losses that also get a curve over samples.
WITH_TWIN = frozenset(
    "learning-rate batch-size loss-scale world-size grad-norm num-zeros params-norm".split()
)


class TensorBoardSink(Sink):
    """Write scalars and, at the start from ``iteration``, the arguments as text."""

    name = "tensorboard"

    def __init__(self, config: LoggingConfig, arguments: Mapping[str, Any], iteration: int) -> None:
        self._config = config
        # import late: only the rank that writes needs it
        tensorboard = require("torch.utils.tensorboard", "--tensorboard-dir")
        self._writer = tensorboard.SummaryWriter(
            log_dir=config.tensorboard_dir, max_queue=config.tensorboard_queue_size
        )
        for name, value in arguments.items():
            self._writer.add_text(name, str(value), global_step=iteration)

    @property
    def writer(self) -> Any:
        return self._writer

    def write_step(self, record: StepRecord) -> None:
        for tag, value in {**record.values, **record.losses}.items():
            if tag == "loss-scale" and not self._config.log_loss_scale_to_tensorboard:
                continue
            self._writer.add_scalar(tag, value, record.iteration)
            if tag in WITH_TWIN or tag in record.losses:
                self._writer.add_scalar(tag + SAMPLES, value, record.consumed_samples)
        if record.interval is not None:
            self._writer.flush()  # keep what the console has shown if the run is killed

    def write_eval(self, record: EvalRecord) -> None:
        perplexities = record.perplexities
        for key, loss in record.losses.items():
            tag = f"{key} {record.split}{record.suffix}"
            values = {tag: loss}
            if self._config.log_validation_ppl_to_tensorboard and key in perplexities:
                values[f"{tag} ppl"] = perplexities[key]
            for name, value in values.items():
                self._writer.add_scalar(name, value, record.iteration)
                self._writer.add_scalar(name + SAMPLES, value, record.consumed_samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
