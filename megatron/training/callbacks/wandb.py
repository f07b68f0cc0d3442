"""Weights & Biases: the numbers of TensorBoard without the twins; on the last rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatron.core.optional import require
from megatron.training.callbacks.records import EvalRecord, Sink, StepRecord
from megatron.training.config.run import RunConfig


class WandbSink(Sink):
    """A run of --wandb-project called --wandb-exp-name."""

    name = "wandb"

    def __init__(self, config: RunConfig, arguments: Mapping[str, Any]) -> None:
        logging = config.logging
        self._wandb = require("wandb", "--wandb-project")
        self.errors = (OSError, self._wandb.Error)
        folder = logging.wandb_save_dir or os.path.join(config.checkpoint.save or ".", "wandb")
        os.makedirs(folder, exist_ok=True)
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
            self._wandb.log(values, record.iteration)

    def write_eval(self, record: EvalRecord) -> None:
        tags = {key: f"{key} {record.split}{record.suffix}" for key in record.losses}
        values = {tags[key]: loss for key, loss in record.losses.items()}
        values |= {f"{tags[key]} ppl": ppl for key, ppl in record.perplexities.items()}
        self._wandb.log(values, record.iteration)

    def close(self) -> None:
        self._wandb.finish()
