"""Write the values of TensorBoard to Weights & Biases, without the curves over samples."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.optional import require
from megatron.training.callbacks.records import EvalRecord, Sink, StepRecord
from megatron.training.config.run import RunConfig
from megatron.training.step.run import SinkFailed


class WandbSink(Sink):
    """A W&B run named --wandb-exp-name in project --wandb-project, on the last rank."""

    name = "wandb"

    def __init__(self, config: RunConfig, arguments: Mapping[str, Any]) -> None:
        logging = config.logging
        self._wandb = require("wandb", "--wandb-project")
        folder = wandb_folder(config)
        os.makedirs(folder, exist_ok=True)
        with _errors_of_wandb():
            self._wandb.init(
                dir=folder,
                name=logging.wandb_exp_name,
                project=logging.wandb_project,
                config=dict(arguments),
            )

    @property
    def writer(self) -> Any:
        return self._wandb

    def write_step(self, record: StepRecord) -> None:
        values: dict[str, float] = {**record.values, **record.losses}
        if values:
            values["samples vs steps"] = record.consumed_samples
            with _errors_of_wandb():
                self._wandb.log(values, record.iteration)

    def write_eval(self, record: EvalRecord) -> None:
        tags = {key: f"{key} {record.split}{record.suffix}" for key in record.losses}
        values = {tags[key]: loss for key, loss in record.losses.items()}
        values |= {f"{tags[key]} ppl": ppl for key, ppl in record.perplexities.items()}
        with _errors_of_wandb():
            self._wandb.log(values, record.iteration)

    def close(self) -> None:
        with _errors_of_wandb():
            self._wandb.finish()


def wandb_folder(config: RunConfig) -> str:
    """Return the folder for the files of wandb on this host."""
    return config.logging.wandb_save_dir or os.path.join(config.checkpoint.save or ".", "wandb")


@contextlib.contextmanager
def _errors_of_wandb() -> Iterator[None]:
    """Convert any exception of wandb to SinkFailed: they have no common base class."""
    try:
        yield
    except Exception as error:
        raise SinkFailed(f"{type(error).__name__}: {error}") from error
