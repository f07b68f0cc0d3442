"""Environments for tests of reinforcement learning; prompts and answers are ids in decimal."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.records import Piece
from megatron.post_training.rl.environment import Environment, Prompt
from megatron.post_training.rl.trainer import RolloutTraining
from megatron.training.checkpointing.checkpoint_tensors import RunParts, model_tensors
from megatron.training.step.run import Callback, TrainingRun


class Echo(Environment):
    """The reward is the share of the answer's tokens that repeat the prompt's last one."""

    def __init__(self, count: int = 10) -> None:
        self.prompts = [f"{(7 * i) % 20} {i}" for i in range(count)]

    def reward(self, prompt: Prompt, answer: str) -> float:
        assert isinstance(prompt, str)
        words = answer.split()
        return sum(word == prompt.split()[-1] for word in words) / max(len(words), 1)


class Dying(Echo):
    """Kill the process at call ``calls`` of `reward`, unless the file ``marker`` exists."""

    def __init__(self, calls: int, marker: str) -> None:
        super().__init__()
        self._left = calls
        self._marker = Path(marker)

    def reward(self, prompt: Prompt, answer: str) -> float:
        self._left -= 1
        if not self._left and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reward(prompt, answer)


class CompareWeights(Callback):
    """At the end, give the engine the weights and compare them with those of training, by bits."""

    def on_train_end(self, run: TrainingRun) -> None:
        (trainer,) = (c for c in run.callbacks if isinstance(c, RolloutTraining))
        assert trainer.engine is not None
        trainer.engine.update()
        module = trainer.engine.writer.engine.model.module
        mine = model_tensors(RunParts(model_chunks=run.model_chunks, groups=run.groups))
        pieces = [(t.key, p.offset, p.data) for t in mine for p in t.pieces if isinstance(p, Piece)]
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, pieces)
        engine_groups = trainer.engine.writer.engine.model.groups
        held = model_tensors(RunParts(model_chunks=[module], groups=engine_groups))
        whole = {t.key: torch.full(t.global_shape, torch.nan) for t in held}
        for key, offset, data in (piece for rank in ranks for piece in rank):
            at = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
            whole[key][at] = data
        for tensor in held:
            for piece in tensor.pieces:
                assert isinstance(piece, Piece)
                shape = zip(piece.offset, piece.data.shape, strict=True)
                at = tuple(slice(o, o + n) for o, n in shape)
                assert torch.equal(piece.data, whole[tensor.key][at]), tensor.key
        Path(f"{run.config.logging.metrics_file}.compared").write_text(str(len(held)))
