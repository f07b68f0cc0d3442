"""Write metrics to TensorBoard under Megatron-LM's tags, on the last rank.

Most tags have a second curve, ``{tag} vs samples``, whose step is the number of consumed samples.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.optional import require
from megatron.training.callbacks.records import EvalRecord, Sink, StepRecord
from megatron.training.config.logging import LoggingConfig
from megatron.training.step.run import SinkFailed

SAMPLES = " vs samples"
# Tags besides the losses that also get a curve over samples.
WITH_TWIN = frozenset(
    "learning-rate batch-size loss-scale world-size grad-norm num-zeros params-norm".split()
)


class TensorBoardSink(Sink):
    """Write scalars and, at the start, the arguments as text.

    The run starts from ``iteration`` and ``consumed_samples``.  Values that an earlier run logged
    after that point are marked as superseded.
    """

    name = "tensorboard"

    def __init__(
        self,
        config: LoggingConfig,
        arguments: Mapping[str, Any],
        iteration: int,
        consumed_samples: int,
    ) -> None:
        assert config.tensorboard_dir is not None, "the caller has asked for --tensorboard-dir"
        self._config = config
        # import late: only the rank that writes needs it
        tensorboard = require("torch.utils.tensorboard", "--tensorboard-dir")
        history = History.read(config.tensorboard_dir, iteration, consumed_samples)
        self._writer = tensorboard.SummaryWriter(
            log_dir=config.tensorboard_dir,
            max_queue=config.tensorboard_queue_size,
            purge_step=iteration + 1 if history.is_superseded else None,
        )
        if history.is_superseded:
            for event in history.twins:
                self._writer.file_writer.add_event(event, event.step, event.wall_time)
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


class History:
    """Events that earlier runs left in a directory, relative to the point where this run starts.

    The purge step of TensorBoard, an iteration, hides all events from that step on.  That includes
    curves over samples, whose steps are larger numbers; events of these curves that are still valid
    are therefore written again.
    """

    def __init__(self) -> None:
        self.is_superseded = False  # an earlier run got further
        self.twins: list[Any] = []  # valid events of curves over samples, in their order

    @classmethod
    def read(cls, folder: str, iteration: int, consumed_samples: int) -> History:
        """Read the event files in ``folder``."""
        history = cls()
        for path in sorted(Path(folder).glob("*tfevents*")):
            for event in _events(path):
                for value in event.summary.value:
                    is_twin = value.tag.endswith(SAMPLES)
                    if event.step > (consumed_samples if is_twin else iteration):
                        history.is_superseded = True
                    elif is_twin:
                        history.twins.append(event)
        return history


def _events(path: Path) -> Iterator[Any]:
    """Yield the events of a file up to an incomplete record.  Raise SinkFailed for damage.

    A record is its length (8 bytes), a checksum (4), the event and a checksum (4).
    """
    parse = require("tensorboard.compat.proto.event_pb2", "--tensorboard-dir").Event.FromString
    damage = require("google.protobuf.message", "--tensorboard-dir").DecodeError
    data = path.read_bytes()
    start = 0
    while start + 16 <= len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        if start + 16 + length > len(data):
            return
        try:
            event = parse(data[start + 12 : start + 12 + length])
        except damage as error:
            raise SinkFailed(
                f"{path} is damaged at byte {start} ({error}); move it away, so that the next run "
                "can log into this folder"
            ) from error
        yield event
        start += 16 + length
