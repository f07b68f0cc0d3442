"""The reference policy of the KL term: the weights of --pretrained-checkpoint in host memory.

Its log-probabilities are computed by the model of the run, which holds its weights meanwhile.  In a
run with adapters it is their base: the adapters are zero meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.params.param_info import local_part
from megatron.training.checkpointing.base_model import identify
from megatron.training.checkpointing.checkpoint_tensors import RunParts, model_tensors
from megatron.training.checkpointing.load import load_run
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.runtime import Runtime
from megatron.training.step.weight_hash import params_hash


class ReferencePolicy:
    """Weights of another policy; ``hash`` identifies them in every layout.

    Construction and `in_model` are collective over all ranks: they complete pending parameter
    all-gathers.
    """

    def __init__(self, run: Runtime) -> None:
        """Load the weights of --pretrained-checkpoint; the model keeps its own."""
        if run.config.adapters.lora is not None:
            self._weights = [torch.zeros_like(values) for values in _copies(run)]
            self.hash = identify(_parts(run), None).hash
            return
        own = _copies(run)
        config = run.config.checkpoint
        print_rank_0(f" loading the reference policy from {config.pretrained_checkpoint}")
        asked = replace(
            config,
            load=config.pretrained_checkpoint,
            save=None,
            finetune=True,
            ckpt_step=None,
            non_persistent_ckpt_type=None,
        )
        parts = RunParts(
            model_chunks=run.model_chunks,
            groups=run.groups,
            kind=run.config.language_model.model_kind,
            asked=run.config.asked,
        )
        load_run(asked, parts)
        self._weights = _copies(run)
        self.hash = f"{params_hash(_parts(run)):016x}"
        _restore(run, own)

    @contextmanager
    def in_model(self, run: Runtime) -> Iterator[None]:
        """Give the model these weights until the context ends."""
        own = _copies(run)
        _restore(run, self._weights)
        try:
            yield
        finally:
            _restore(run, own)


def _parts(run: Runtime) -> RunParts:
    return RunParts(model_chunks=run.model_chunks, groups=run.groups)


def _held(run: Runtime) -> list[Tensor]:
    """Return the tensors that another policy changes: with adapters these alone."""
    model_tensors(_parts(run))  # completes pending all-gathers
    has_adapters = run.config.adapters.lora is not None
    return [
        local_part(tensor.detach())
        for chunk in run.model_chunks
        for tensor in (*chunk.parameters(), *chunk.buffers())
        if tensor.requires_grad or not has_adapters
    ]


def _copies(run: Runtime) -> list[Tensor]:
    return [tensor.to(device.CPU, copy=True) for tensor in _held(run)]


@torch.no_grad()
def _restore(run: Runtime, copies: list[Tensor]) -> None:
    for tensor, copy in zip(_held(run), copies, strict=True):
        tensor.copy_(copy)
