"""The reference policy of the KL term, in host memory: the weights of --pretrained-checkpoint.

Without that flag they are the weights that the run began with.  Its log-probabilities are computed
by the model of the run, which holds its weights meanwhile.  In a run with adapters it is their
base: the adapters are zero meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.config.errors import CheckpointError
from megatron.core.params.param_info import local_part
from megatron.training.checkpointing.base_model import identify
from megatron.training.checkpointing.checkpoint_tensors import RunParts, model_tensors
from megatron.training.checkpointing.load import load_run
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.runtime import Runtime
from megatron.training.step.weight_hash import params_hash


class ReferencePolicy:
    """Weights of another policy; ``hash`` identifies them in every layout.

    ``folder``: the checkpoint that holds them; None for the base of adapters.
    Construction and `in_model` are collective over all ranks: they complete pending parameter
    all-gathers.
    """

    def __init__(self, run: Runtime) -> None:
        """Copy the weights of the model, or load others; the model keeps its own.

        Raises CheckpointError if the weights are gone or are not those of a run that goes on.
        """
        state = run.objective_state or {}
        before = state.get("reference")
        given = run.config.checkpoint.pretrained_checkpoint
        self.folder: str | None = None
        if run.config.adapters.lora is not None:
            self._weights = [torch.zeros_like(values) for values in _copies(run)]
            self.hash = identify(_parts(run), None).hash
        elif given is None and before is None:
            self.folder = run.loaded_from
            if self.folder is None:
                raise CheckpointError(
                    f"--load {run.config.checkpoint.load} holds no checkpoint yet, and "
                    "--grpo-kl-beta needs a reference policy: give --pretrained-checkpoint, or "
                    "use --grpo-kl-beta 0"
                )
            print_rank_0(f" the reference policy is the loaded model, {self.folder}")
            self._weights = _copies(run)
            self.hash = f"{params_hash(_parts(run)):016x}"
        else:
            self.folder = given or state.get("reference_folder")
            self._load(run)
        if before is not None and self.hash != before:
            raise CheckpointError(
                f"--pretrained-checkpoint {given or self.folder}: its weights are not those of "
                "the reference policy that this run has been trained with: give the same "
                "checkpoint again, or start a new run with --finetune "
                "and another --save"
            )

    def _load(self, run: Runtime) -> None:
        """Load the weights in ``self.folder``.  Collective over all ranks."""
        given = run.config.checkpoint.pretrained_checkpoint
        if given is None and (self.folder is None or not Path(self.folder).is_dir()):
            raise CheckpointError(
                f"--grpo-kl-beta: the weights {self.folder} that this run began with, its "
                "reference policy, are gone: restore them, or give a copy with "
                "--pretrained-checkpoint"
            )
        own = _copies(run)
        print_rank_0(f" loading the reference policy from {self.folder}")
        asked = replace(
            run.config.checkpoint,
            load=self.folder,
            save=None,
            finetune=True,
            ckpt_step=None,
            non_persistent_ckpt_type=None,
            pretrained_checkpoint=None,
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
