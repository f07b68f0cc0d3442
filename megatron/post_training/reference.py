"""Frozen models beside the trained one: reference of DPO, reference policy of GRPO, teacher.

`score` runs the model of a run forward with its current weights.  DPO calls it before the first
step, because its reference model has the weights that the run begins with.  GRPO calls it while
`ReferencePolicy` has replaced the weights of the model by copies in host memory: from
--pretrained-checkpoint, or from the start of the run.  With adapters the reference policy is their
base, so the adapters are zero meanwhile.

A teacher is the model of another checkpoint, of any size, sharded over the same ranks as the
student.  No module of the student contains it, so it has no optimizer state, no gradient buffer and
no entry in the checkpoints of the run.

Order of collectives: `score` runs the forward passes; `load_teacher` calls `all_ranks.load`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import device
from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.config.option import dest_of, options_of
from megatron.core.config.value_types import Arguments
from megatron.core.dist_checkpointing.all_ranks import load
from megatron.core.dist_checkpointing.formats import format_of
from megatron.core.dist_checkpointing.records import OPTIMIZER_PREFIX
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.parallel.collectives import all_or_none
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import local_part
from megatron.training.arguments.resolve import resolve
from megatron.training.checkpointing.base_model import identify
from megatron.training.checkpointing.checkpoint_args import (
    FORCED,
    FORCED_PREFIXES,
    IF_UNSET,
    saved_namespace,
    without_code_and_paths,
)
from megatron.training.checkpointing.checkpoint_tensors import RunParts, model_tensors
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.paths import read_content, resolve_folder
from megatron.training.config.run import RunConfig
from megatron.training.config.tokenizer import TokenizerConfig
from megatron.training.data.batch import next_batch
from megatron.training.data.loaders import chunk_iterators
from megatron.training.estimates.automatic_settings import balanced_sizes
from megatron.training.models.kind import Batch
from megatron.training.models.registry import build_model_stage, implementation_of
from megatron.training.process.rank_print import print_rank_0
from megatron.training.step.run import ModelRun
from megatron.training.step.train_step import forward_backward
from megatron.training.step.weight_hash import params_hash

_MTP = "mtp."  # prefix of tensors for multi-token prediction, which a teacher does not need
# Flags (dests) of the run that hold for the teacher too: layout, batch, data, precision, kernels.
_SHARED = frozenset(
    (
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "cp_comm_type hierarchical_context_parallel_sizes sequence_parallel "
        "pipeline_schedule microbatch_group_size_per_vp_stage micro_batch_size "
        "global_batch_size seq_length encoder_seq_length bf16 fp16 fp32_residual_connection "
        "reset_attention_mask reset_position_ids transformer_impl attention_backend "
        "use_flash_attn deterministic_mode make_vocab_size_divisible_by device mock_data"
    ).split()
) | {dest_of(f, opt) for f, opt in options_of(TokenizerConfig)}
_OF_EXPERTS = frozenset({"expert_model_parallel_size", "expert_tensor_parallel_size"})


def score(
    run: ModelRun, loader: Any, count: int, report: Callable[[Batch, Tensor], dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """Run ``count`` micro-batches of ``loader`` forward; return ``report(batch, output)`` of each.

    On ranks of the last stage; collective over all ranks.
    """
    apply = implementation_of(run.config).apply

    def forward_step(data: Iterator[Any] | None, model: nn.Module) -> tuple[Any, Any]:
        batch = next_batch(run, data, model)

        def reported(output: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            first: Tensor = output[0] if isinstance(output, tuple) else output  # BERT has two
            none = first.new_zeros(())
            return none, none + 1, report(batch, output)

        return apply(model, batch), reported

    for chunk in run.model_chunks:
        chunk.eval()
    with torch.no_grad():
        found = forward_backward(
            replace(run, forward_step_func=forward_step),
            chunk_iterators(run, loader, prefetches=False),
            count,
            forward_only=True,
        )
    for chunk in run.model_chunks:
        chunk.train()
    return found


def sum_over_ranks(run: ModelRun, values: Tensor) -> Tensor:
    """Return the sum of ``values`` over all ranks, in host memory.  Collective over all ranks."""
    total = values.to(device.current())
    if run.groups.world.size() > 1:
        dist.all_reduce(total, group=run.groups.world)
    return total.cpu()


class ReferencePolicy:
    """Weights of another policy; ``hash`` identifies them in every layout.

    ``folder``: the checkpoint that holds them; None for the base of adapters.
    Construction and `in_model` are collective over all ranks: they complete pending parameter
    all-gathers.
    """

    def __init__(self, run: ModelRun) -> None:
        """Copy the weights of the model, or load others; the model keeps its own.

        Raises CheckpointError if the weights are missing, or differ from the weights that a
        resumed run was trained with.
        """
        state = run.objective.saved or {}
        before = state.get("reference")
        given = run.config.checkpoint.pretrained_checkpoint
        self.folder: str | None = None
        if run.config.adapters.lora is not None:
            self._weights = [torch.zeros_like(values) for values in _copies(run)]
            self.hash = identify(run.parts, None).hash
        elif given is None and before is None:
            self.folder = run.checkpoints.loaded_from
            if self.folder is None:
                raise CheckpointError(
                    f"--load {run.config.checkpoint.load} holds no checkpoint yet, and "
                    "--grpo-kl-beta needs a reference policy: give --pretrained-checkpoint, or "
                    "use --grpo-kl-beta 0"
                )
            print_rank_0(f" the reference policy is the loaded model, {self.folder}")
            self._weights = _copies(run)
            self.hash = f"{params_hash(run.parts):016x}"
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

    def _load(self, run: ModelRun) -> None:
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
        self.hash = f"{params_hash(run.parts):016x}"
        _restore(run, own)

    @contextmanager
    def in_model(self, run: ModelRun) -> Iterator[None]:
        """Give the model these weights until the context ends."""
        own = _copies(run)
        _restore(run, self._weights)
        try:
            yield
        finally:
            _restore(run, own)


def _held(run: ModelRun) -> list[Tensor]:
    """Return the tensors that another policy changes: with adapters these alone."""
    model_tensors(run.parts)  # completes pending all-gathers
    has_adapters = run.config.adapters.lora is not None
    return [
        local_part(tensor.detach())
        for chunk in run.model_chunks
        for _, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
        if tensor.requires_grad or not has_adapters
    ]


def _copies(run: ModelRun) -> list[Tensor]:
    return [tensor.to(device.CPU, copy=True) for tensor in _held(run)]


@torch.no_grad()
def _restore(run: ModelRun, copies: list[Tensor]) -> None:
    for tensor, copy in zip(_held(run), copies, strict=True):
        tensor.copy_(copy)


def teacher_config(config: RunConfig) -> RunConfig:
    """Return the configuration of the teacher of ``config`` in the layout of this run.

    Reads the checkpoint's arguments; local.  Raises CheckpointError for a checkpoint that cannot be
    read, ConfigError for a model that cannot be a teacher in this run.
    """
    directory = config.distillation.export_kd_teacher_load
    assert directory is not None, "the run has a teacher"
    what = f"--export-kd-teacher-load {directory}"
    try:
        stored = without_code_and_paths(read_content(teacher_folder(config)).asked, {})
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{what}: {error}") from None
    kind = config.language_model.model_kind
    # Other vocabularies of one kind of tokenizer have other sizes, which the loader compares.
    for name, mine in (("model_kind", kind), ("tokenizer_type", config.tokenizer.tokenizer_type)):
        if stored.get(name) not in (None, mine):
            raise ConfigError(
                f"{what}: the teacher was trained with --{name.replace('_', '-')} {stored[name]}, "
                f"this run has {mine}: both models need the same"
            )
    try:
        resolved = resolve(_namespace(config, stored), config.world_size)
    except ConfigError as error:
        raise ConfigError(
            f"{what}: the teacher does not fit the layout of this run: {error}"
        ) from None
    return replace(resolved, model=resolved.model.changed(perform_initialization=False))


def teacher_folder(config: RunConfig) -> Path:
    """Return the folder of the teacher's checkpoint.  Raises CheckpointError."""
    asked = config.distillation
    folder = resolve_folder(asked.export_kd_teacher_load or "")
    wanted = asked.export_kd_teacher_ckpt_format
    found = format_of(folder)
    if wanted is not None and wanted != found:
        raise CheckpointError(
            f"{folder} is of format {found}, --export-kd-teacher-ckpt-format is {wanted}: leave "
            "the flag out, the format is recognized"
        )
    return folder


def _namespace(config: RunConfig, stored: Arguments) -> Namespace:
    """Return the command line that builds the teacher: its model, the layout of this run."""
    is_of_model = {*FORCED, *IF_UNSET}
    described = {
        name: value
        for name, value in stored.items()
        if name in is_of_model or name.startswith(FORCED_PREFIXES)
    }
    values = vars(saved_namespace(described))
    shared = _SHARED | _OF_EXPERTS if values["num_experts"] else _SHARED
    values |= {name: config.asked[name] for name in shared if name in config.asked}
    values |= {
        "model_kind": config.language_model.model_kind,
        "skip_train": True,
        "mtp_num_layers": None,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    num_layers = values["num_layers"] or 0
    num_stages = config.placement.num_stages
    if num_layers % num_stages == 0:
        values["num_virtual_stages_per_pipeline_rank"] = config.placement.num_chunks
    else:
        sizes = balanced_sizes([1.0] * num_layers, num_stages)
        values["pipeline_model_parallel_layout"] = f"E{'|'.join('t' * size for size in sizes)}L"
    return Namespace(**values)


def build_teacher(
    config: RunConfig, *, groups: ProcessGroupCollection, vp_stage: int | None, **stage: Any
) -> LanguageModule:
    """Build one frozen stage of the teacher, whose configuration is ``config``, without weights."""
    with torch.device(device.current()):  # also where the student is built on meta
        model = build_model_stage(config, groups=groups, vp_stage=vp_stage, **stage)
    assert isinstance(model, LanguageModule), "the checks admit language models only"
    for param in model.parameters():
        # No checkpoint has the padding rows of the vocabulary: set them to 0.
        param.data = torch.zeros_like(param.data, dtype=config.model.params_dtype)
    return model.eval().requires_grad_(False)


def load_teacher(
    config: RunConfig, stages: Sequence[nn.Module], groups: ProcessGroupCollection
) -> None:
    """Load the weights of this rank's ``stages`` of the teacher.  Collective over all ranks.

    The checkpoint may have any layout.  Raises CheckpointError, the same on every rank.
    """
    directory = config.distillation.export_kd_teacher_load
    folder = all_or_none(partial(teacher_folder, config), directory or "", groups.world)
    try:
        load(
            folder,
            model_tensors(RunParts(model_chunks=stages, groups=groups)),
            groups.world,
            leave_out=(OPTIMIZER_PREFIX, _MTP),
            cast=True,
        )
    except CheckpointError as error:
        raise CheckpointError(f"--export-kd-teacher-load {directory}: {error}") from None
    print_rank_0(f"  successfully loaded the teacher from {folder}")
