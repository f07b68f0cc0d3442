"""When a run saves and what it takes over when it loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.formats import FORMATS
from megatron.core.faults import fault_point
from megatron.core.transformer.layer_layout import layer_ranges
from megatron.training.arguments.config_file import write_config
from megatron.training.arguments.legacy import legacy_namespace
from megatron.training.callbacks.base import CheckpointEvent
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.run_tensors import RunParts
from megatron.training.checkpointing.save import save_run
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.printing import print_rank_0
from megatron.training.runtime import Runtime


def load(run: Runtime) -> None:
    """Fill model, optimizer, scheduler, random states and counters.  Collective.

    Nothing happens without --load and --pretrained-checkpoint.
    """
    run.timers("load-checkpoint", log_level=0).start(barrier=True)
    loaded = load_run(run.config.checkpoint, _parts(run))
    run.timers("load-checkpoint").stop(barrier=True)
    if loaded is None:
        return
    run.timers.log(["load-checkpoint"])
    run.state.load(dict(loaded.counters))
    run.saved_at = run.state.iteration
    # The learning rate follows the samples, also where the optimizer's state was left behind.
    if run.scheduler is not None and run.scheduler.num_steps == 0 and run.state.iteration > 0:
        run.scheduler.step(run.state.consumed_train_samples)


def save(run: Runtime) -> None:
    """Publish a checkpoint of the present step.  Collective over all ranks."""
    with run.callbacks.paused(run, "checkpoint"):
        _save(run)


def _save(run: Runtime) -> None:
    iteration = run.state.iteration
    fault_point("save.before", step=iteration)
    run.timers("save-checkpoint", log_level=0).start(barrier=True)
    deleted = save_run(
        run.config.checkpoint,
        _parts(run),
        run.state.to_dict(),
        asked=_asked(run, run.config.checkpoint),
        write_config=lambda path: write_config(run.config, path),
    )
    run.timers("save-checkpoint").stop(barrier=True)
    run.timers.log(["save-checkpoint"])
    run.saved_at = iteration
    run.callbacks.on_checkpoint(run, CheckpointEvent(kind="saved", iteration=iteration))
    if deleted is not None:
        run.callbacks.on_checkpoint(run, CheckpointEvent(kind="deleted", iteration=deleted))


def convert(run: Runtime) -> None:
    """Write what was loaded in the format of --ckpt-convert-format.  Collective."""
    options = run.config.checkpoint
    assert options.ckpt_convert_format is not None
    assert options.ckpt_convert_save is not None
    target = replace(
        options,
        save=str(Path(options.ckpt_convert_save) / options.ckpt_convert_format),
        ckpt_format=options.ckpt_convert_format,
    )
    save_run(target, _parts(run), run.state.to_dict(), asked=_asked(run, target))
    print_rank_0(f"> converted checkpoint: {options.load} -> {target.save}")


def save_unless_saved(run: Runtime) -> None:
    """`save` if the run saves at all and this step is not in a checkpoint yet."""
    if run.config.checkpoint.save is not None and run.saved_at != run.state.iteration:
        save(run)


def _asked(run: Runtime, options: CheckpointConfig) -> Mapping[str, Any]:
    """The command line as parsed; for Megatron-LM with what it derives from it."""
    is_foreign = FORMATS[options.ckpt_format].is_foreign
    return vars(legacy_namespace(run)) if is_foreign else run.config.asked


def _parts(run: Runtime) -> RunParts:
    return RunParts(
        model_chunks=run.model_chunks,
        groups=run.groups,
        optimizer=run.optimizer,
        scheduler=run.scheduler,
        stages=layer_ranges(run.config.model, run.groups.pp.size()),
    )
