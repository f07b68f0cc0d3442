"""Megatron-LM's checkpoint functions for scripts; they act on the current run."""

from __future__ import annotations

import argparse
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import NoReturn

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.dist_checkpointing.folders import read_tracker
from megatron.core.dist_checkpointing.formats import format_of
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel.default_groups import default_groups, library_call
from megatron.training.checkpointing.checkpoint_args import apply_checkpoint_args
from megatron.training.checkpointing.checkpoint_tensors import RunParts
from megatron.training.checkpointing.checkpointer import Checkpointer
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.paths import checkpoint_folder, resolve_folder
from megatron.training.checkpointing.paths import (
    get_checkpoint_tracker_filename as get_checkpoint_tracker_filename,
)
from megatron.training.compat import global_vars
from megatron.training.compat.utils import Model, chunks_of
from megatron.training.models.registry import layers_of_stages
from megatron.training.step.run import ModelRun

_OF_LAYOUT = "pipeline_rank expert_rank tensor_rank pipeline_parallel expert_parallel"
_WITHOUT_EFFECT = "checkpointing_context train_data_iterator preprocess_common_state_dict_fn"


class CheckpointType(Enum):
    """Kinds of checkpoints that Megatron-LM's functions tell apart."""

    LEGACY = 1
    LOCAL = 2
    GLOBAL = 3
    TORCH_DCP = 4


@library_call(
    "iteration model optimizer opt_param_scheduler num_floating_point_operations_so_far "
    f"checkpointing_context {_OF_LAYOUT} non_persistent_ckpt train_data_iterator "
    "preprocess_common_state_dict_fn",
    unused=f"{_OF_LAYOUT} {_WITHOUT_EFFECT}",
)
def save_checkpoint(
    iteration: int,
    model: Model,
    optimizer: MegatronOptimizer | None,
    opt_param_scheduler: OptimizerParamScheduler | None,
    num_floating_point_operations_so_far: float,
    *,
    non_persistent_ckpt: bool = False,
) -> None:
    """Save the given objects and the counters of the run in ``--save``.  Collective.

    With ``non_persistent_ckpt``, saves a non-persistent checkpoint instead
    (--non-persistent-ckpt-type).  The run determines the layout, whatever ranks are given.

    The checkpoint is on disk when this returns, also with --async-save, because a script does not
    poll a background save.  Raises ConfigError, SaveFailed.
    """
    run = global_vars.get_run()
    if non_persistent_ckpt and run.config.checkpoint.non_persistent_ckpt_type is None:
        raise ConfigError(
            "save_checkpoint(non_persistent_ckpt=True) needs --non-persistent-ckpt-type global or "
            "local: where is it to be kept?"
        )
    counters = run.state.to_dict() | {
        "iteration": iteration,
        "num_floating_point_operations_so_far": num_floating_point_operations_so_far,
    }
    saves = run.checkpoints if isinstance(run, ModelRun) else Checkpointer()
    parts = _parts(model, optimizer, opt_param_scheduler)
    saves.publish(run, parts, counters, is_transient=non_persistent_ckpt)


def load_checkpoint(
    ddp_model: Model,
    optimizer: MegatronOptimizer | None,
    opt_param_scheduler: OptimizerParamScheduler | None,
    load_arg: str = "load",
    strict: bool = True,
    checkpointing_context: object = None,
    skip_load_to_model_and_opt: bool = False,
) -> tuple[int, float]:
    """Load the given objects from the directory of option ``load_arg``.  Collective.

    Also sets the counters of the run.  Returns the iteration and the floating-point operations so
    far, both 0 if there is nothing to load.  Without ``strict``, differing keys are logged.
    ``skip_load_to_model_and_opt`` has no effect: Megatron-LM's scripts set it where the checkpoint
    is read straight into the sharded model, as all formats are here.
    """
    del checkpointing_context, skip_load_to_model_and_opt
    run = global_vars.get_run()
    config = run.config.checkpoint
    config = replace(config, load=vars(config)[load_arg])
    if not strict:
        config = replace(config, dist_ckpt_strictness="log_all")
    loaded = load_run(config, _parts(ddp_model, optimizer, opt_param_scheduler))
    if loaded is None:
        return 0, 0
    run = model_run(ddp_model)
    run.checkpoints.adapter_base = None if loaded.base is None else loaded.base.arguments
    run.checkpoints.started_from = loaded.started_from
    run.state.load(dict(loaded.counters))
    return loaded.iteration, run.state.num_floating_point_operations_so_far


def load_args_from_checkpoint(
    args: argparse.Namespace, load_arg: str = "load", checkpointing_context: object = None
) -> tuple[argparse.Namespace, argparse.Namespace | None]:
    """Set the model's flags in ``args`` from a checkpoint; return them and the stored arguments.

    The stored arguments are None if there is no checkpoint.
    """
    del checkpointing_context
    asked = apply_checkpoint_args(args, vars(args)[load_arg])
    return args, None if asked is None else argparse.Namespace(**asked)


def get_checkpoint_name(
    checkpoints_path: str,
    iteration: int,
    release: bool = False,
    pipeline_parallel: bool | None = None,
    tensor_rank: int | None = None,
    pipeline_rank: int | None = None,
    expert_parallel: bool | None = None,
    expert_rank: int | None = None,
    return_base_dir: bool = False,
    basename: str = "model_optim_rng.pt",
) -> str:
    """Return the folder of an iteration (``return_base_dir``), or a rank's file in it.

    The file is that of Megatron-LM's legacy format, ``mp_rank_TT[_PPP][_EEE]/BASENAME``.  The
    process groups give what is None.
    """
    folder = checkpoint_folder(checkpoints_path, iteration, release)
    if return_base_dir:
        return folder
    groups = default_groups()
    name = f"mp_rank_{groups.tp.rank() if tensor_rank is None else tensor_rank:02d}"
    if groups.pp.size() > 1 if pipeline_parallel is None else pipeline_parallel:
        name += f"_{groups.pp.rank() if pipeline_rank is None else pipeline_rank:03d}"
    if groups.ep.size() > 1 if expert_parallel is None else expert_parallel:
        name += f"_{groups.ep.rank() if expert_rank is None else expert_rank:03d}"
    return str(Path(folder) / name / basename)


def isfile(filename: str) -> bool:
    """Return whether there is a file of this name."""
    return Path(filename).is_file()


def find_checkpoint_rank_0(
    checkpoints_path: str, iteration: int, release: bool = False
) -> str | None:
    """Return the folder of a distributed checkpoint, or rank 0's file of a legacy one.

    None if neither exists.
    """
    folder = Path(checkpoint_folder(checkpoints_path, iteration, release))
    if format_of(folder) not in (None, "torch"):
        return str(folder)
    return next(map(str, sorted(folder.glob("mp_rank_00*/*.pt"))), None)


def read_metadata(tracker_filename: str) -> tuple[int, bool]:
    """Return the iteration that the tracker file names, and whether it names a release.

    Raises CheckpointError if the file is missing or invalid.
    """
    tracker = read_tracker(Path(tracker_filename).parent)
    if tracker is None:
        raise CheckpointError(f"{tracker_filename} does not exist: the folder has no checkpoint")
    return tracker.iteration or 0, tracker.iteration is None


def get_load_checkpoint_path_by_args(args: argparse.Namespace, load_arg: str = "load") -> str:
    """Return the folder of the checkpoint that ``args`` select.  Raises CheckpointError."""
    return str(resolve_folder(vars(args)[load_arg], vars(args).get("ckpt_step")))


def _get_checkpoint_format(checkpoint_name: str) -> str:
    """Return the format of a checkpoint's folder.  Raises CheckpointError if it is none."""
    if (found := format_of(Path(checkpoint_name))) is None:
        raise CheckpointError(f"{checkpoint_name} is not the folder of a checkpoint")
    return found


def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
    """Finish a save in the background that is done; ``blocking``: wait for it.  Collective."""
    del terminate
    run = global_vars.get_run()
    if isinstance(run, ModelRun):
        run.checkpoints.wait(run) if blocking else run.checkpoints.poll(run)


def model_run(model: Model) -> ModelRun:
    """Return the current run; if it has no model yet, first extend it to a run of ``model``."""
    run = global_vars.get_run()
    if isinstance(run, ModelRun):
        return run
    run = ModelRun(
        **vars(run), model_chunks=chunks_of(model), forward_step_func=_unknown_forward_step
    )
    global_vars.set_run(run)
    return run


def _unknown_forward_step(*_: object) -> NoReturn:
    raise AssertionError("train_step() and evaluate_and_print_results() get the forward step")


def _parts(
    model: Model, optimizer: MegatronOptimizer | None, scheduler: OptimizerParamScheduler | None
) -> RunParts:
    run = global_vars.get_run()
    is_per_rank = run.config.checkpoint.ckpt_format == "torch"
    return RunParts(
        model_chunks=chunks_of(model),
        groups=run.groups,
        optimizer=optimizer,
        scheduler=scheduler,
        stages=layers_of_stages(run.config) if is_per_rank else (),
        asked=run.config.asked,
    )
