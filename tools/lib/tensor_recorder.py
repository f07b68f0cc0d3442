"""Callback that writes sketches of all gradients and weights of a run, for compare_layouts.py.

Each rank writes ``tensors-RANK.jsonl`` into the folder that the environment variable ``FOLDER``
names: the weights before the first step as step 0, then of each step the gradients before clipping,
without the loss scale, and the buffers that the step has changed, such as the biases of routers.
Names, offsets and shapes are those of the complete tensors, without vocabulary padding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.training.callbacks import Callback, StepResult, TrainingRun
from megatron.training.checkpointing.checkpoint_tensors import model_tensors
from tools.lib.sketches import sums_under_signs

FOLDER = "COMPARE_LAYOUTS_FOLDER"
# Values below this share of the largest one of their piece may be zero in another layout.
_NOISE = 1e-6


class RecordTensors(Callback):
    """Write sketches of weights, gradients and buffers of this rank."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def on_train_start(self, run: TrainingRun) -> None:
        path = Path(os.environ[FOLDER]) / f"tensors-{dist.get_rank()}.jsonl"
        self._file = path.open("w")
        self._write_model(run, 0)
        optimizer = run.optimizer
        reduce_norm = optimizer.squared_norm

        def squared_norm() -> Tensor:
            squares = reduce_norm()
            found = [
                (info.name, info.global_shape, offset, piece)
                for info, grad in optimizer._grads
                for offset, piece in info.pieces(grad.detach())
            ]
            self._write(run.state.iteration + 1, "gradient", found, optimizer.loss_scale)
            return squares

        optimizer.squared_norm = squared_norm  # type: ignore[method-assign]

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        self._write_model(run, run.state.iteration)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write_model(self, run: TrainingRun, step: int) -> None:
        """Write all weights, or after a step the buffers.  Collective over data-parallel ranks."""
        records = model_tensors(run.parts)
        for kind, is_buffer in (("weight", False), ("buffer", True)):
            if step == 0 or is_buffer:
                found = [
                    (record.key, record.global_shape, piece.offset, piece.data)
                    for record in records
                    if record.is_buffer == is_buffer
                    for piece in record.pieces
                ]
                self._write(step, kind, found)

    def _write(self, step: int, kind: str, found: Iterable[Any], scale: float = 1.0) -> None:
        assert self._file is not None, "training has not started"
        with torch.no_grad():
            pieces = [
                {"name": name, "offset": offset, "shape": tuple(values.shape)}
                | _numbers(name, values, offset, shape, scale)
                for name, shape, offset, values in found
                if values.is_floating_point()
            ]
        line = {"step": step, "kind": kind, "pieces": pieces}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _numbers(
    name: str, values: Tensor, offset: tuple[int, ...], shape: tuple[int, ...], scale: float
) -> dict[str, Any]:
    values = values.float() / scale if values.dtype != torch.float64 else values / scale
    size = values.abs()
    largest = float(size.max()) if values.numel() else 0.0
    zeros = int((values == 0).sum())
    return {
        "norm": float(values.norm(dtype=torch.float64)),
        "sums": sums_under_signs(name, values, offset, shape),
        "zeros": zeros,
        "near": int((size <= _NOISE * largest).sum()) - zeros,
    }
