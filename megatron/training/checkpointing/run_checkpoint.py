"""Save and load a run: model, optimizer, scheduler, random states, counters."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

from megatron.core.config.value_types import Arguments
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.dist_checkpointing.background import (
    BackgroundSave,
    Worker,
    finish_apart,
    start_in_thread,
)
from megatron.core.dist_checkpointing.formats import FORMATS
from megatron.core.dist_checkpointing.manifest import TRUE_VOCAB_SIZE
from megatron.core.dist_checkpointing.mapping import SavePlan
from megatron.core.dist_checkpointing.serialization import SaveFailed, SaveResult
from megatron.core.parallel.run_store import RunStore
from megatron.core.peft.lora import store_base
from megatron.core.tensor_parallel.frozen_weight import StoredFormat
from megatron.training.arguments.config_file import write_config
from megatron.training.checkpointing.base_model import identify
from megatron.training.checkpointing.checkpoint_tensors import RunParts
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.loader_state import save_loader_state
from megatron.training.checkpointing.non_persistent import keeps_parts, remove_memory, transient
from megatron.training.checkpointing.save import (
    announce_memory,
    begin_save,
    contents_of,
    finish_save,
    log_saved,
    save_local_run,
    save_run,
)
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.estimates.model_layers import layers_of_stages
from megatron.training.models.registry import implementation_of
from megatron.training.process import exit_report
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.flat_namespace import legacy_namespace
from megatron.training.runtime.phases import in_phase
from megatron.training.runtime.runtime import CheckpointEvent, Runtime


@in_phase("loading a checkpoint")
def load(run: Runtime) -> None:
    """Load model, optimizer, scheduler, random states and counters.  Collective over all ranks.

    Without --load and --pretrained-checkpoint it loads only weights that the run does not train.
    """
    fault_point("load.before")
    load_frozen = implementation_of(run.config).load_frozen
    if load_frozen is not None:
        load_frozen(run)
    run.timers("load-checkpoint", log_level=0).start(barrier=True)
    loaded = load_run(run.config.checkpoint, _parts(run))
    if run.config.checkpoint.non_persistent_ckpt_type == "in_memory":
        announce_memory(run.config.checkpoint, _parts(run))
    run.timers("load-checkpoint").stop(barrier=True)
    if run.config.adapters.lora is not None:
        base = loaded.base if loaded is not None else identify(_parts(run), None)
        run.adapter_base = None if base is None else base.arguments
        if (base_dtype := run.config.adapters.lora_base_dtype) is not None:
            store_base(run.model_chunks, cast(StoredFormat, base_dtype))
    if loaded is None:
        return
    run.started_from = loaded.started_from
    run.timers.log(["load-checkpoint"])
    run.state.load(dict(loaded.counters))
    run.objective_state = loaded.objective_state
    run.loaded_from = loaded.folder
    exit_report.note(loaded_iteration=loaded.iteration, iteration=loaded.iteration)
    if loaded.iteration > 0 or not run.config.checkpoint.moe_use_upcycling:
        run.saved_at = run.state.iteration
    # The learning rate follows the consumed samples even if no scheduler state was loaded.
    if run.scheduler is not None and not loaded.has_schedule and run.state.iteration > 0:
        run.scheduler.step(run.state.consumed_train_samples)


def save(run: Runtime, *, is_last: bool = False, is_transient: bool = False) -> None:
    """Save a checkpoint of this step; with --async-save, start to save it in the background.

    Collective over all ranks.  After a failed save training continues with a warning, unless more
    than --ckpt-max-failed-saves failed in a row.  ``is_last``: wait for the save, and raise
    SaveFailed if it fails.  ``is_transient``: a non-persistent checkpoint
    (--non-persistent-save-interval), which has its own directory.
    """
    config = run.config.checkpoint
    is_local = is_transient and keeps_parts(config)
    in_background = bool(config.async_save) and not is_last and not is_local
    if is_transient:
        config = transient(config)
    iteration, failure = run.state.iteration, None
    with run.callbacks.paused(run, "checkpoint"):
        began_s = time.perf_counter()
        run.timers("save-checkpoint", log_level=0).start(barrier=True)
        _ask(run, BackgroundSave.wait)
        fault_point("save.before", step=iteration)
        save_loader_state(run)
        try:
            saved = _save(run, config, in_background, is_local)
        except SaveFailed as error:
            failure = error
        run.timers("save-checkpoint").stop(barrier=True)
        run.timers.log(["save-checkpoint"])
        stall_s = time.perf_counter() - began_s
    if failure is not None:
        if is_last:
            raise failure
        _go_on_after(failure, run)
        return
    if not is_transient:
        run.saved_at = iteration
    if saved is None:
        run.callbacks.on_checkpoint(
            run, CheckpointEvent(kind="scheduled", iteration=iteration, stall_s=stall_s)
        )
    else:
        _report(run, saved, CheckpointEvent(kind="saved", iteration=iteration, stall_s=stall_s))


@in_phase("saving a checkpoint")
def _save(
    run: Runtime, config: CheckpointConfig, in_background: bool, is_local: bool
) -> SaveResult | None:
    """Save and return the result; None if the save continues in the background."""
    contents = contents_of(
        config,
        _parts(run),
        run.state.to_dict(),
        asked=_asked(run, config),
        write_config=lambda path: write_config(run.config, path),
    )
    if is_local:
        return save_local_run(config, contents, run.groups)
    if config.ckpt_assume_constant_structure:
        run.save_plan = run.save_plan or SavePlan()
    begun = begin_save(config, contents, run.groups, run.save_plan)
    if not in_background:
        return finish_save(begun, run.groups)
    start = start_in_thread
    if config.use_persistent_ckpt_worker:
        run.checkpoint_worker = run.checkpoint_worker or Worker()
        start = run.checkpoint_worker.start
    run.pending_save = BackgroundSave(begun, run.snapshot_memory, run.groups.world, start)
    print_rank_0(
        f"  scheduled an async checkpoint save at iteration {begun.iteration:7d} to {config.save}"
    )
    return None


def convert(run: Runtime) -> None:
    """Save the loaded run in the format of --ckpt-convert-format.  Collective over all ranks."""
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


def poll(run: Runtime) -> None:
    """Process a background save that has finished.  Collective while a save is pending."""
    _ask(run, BackgroundSave.poll)


def save_unless_saved(run: Runtime, *, is_transient: bool = False) -> None:
    """Call `save` if the run saves checkpoints and none of them has this step yet."""
    config = run.config.checkpoint
    if not (is_transient or config.save is not None) or run.saved_at == run.state.iteration:
        return
    if run.pending_save is None or config.async_save_when_busy == "wait":
        save(run, is_transient=is_transient)
    else:
        print_rank_0(
            f"NOTE: iteration {run.state.iteration} is not saved: the checkpoint of iteration "
            f"{run.pending_save.iteration} is still being written (--async-save-when-busy skip)"
        )


def save_last(run: Runtime) -> None:
    """Wait for the pending save; then save this step if no checkpoint has it.  Collective."""
    if run.pending_save is not None:
        with run.callbacks.paused(run, "checkpoint"):
            _ask(run, BackgroundSave.wait)
    if run.config.checkpoint.save is not None and run.saved_at != run.state.iteration:
        save(run, is_last=True)


def forget_memory(run: Runtime) -> None:
    """Delete the checkpoints in host memory: the run has ended normally."""
    if run.config.checkpoint.non_persistent_ckpt_type == "in_memory":
        remove_memory(run.config.checkpoint)


def finish_at_failure(run: Runtime, store: RunStore) -> None:
    """Finish the pending save after an exception has ended the run, and log the result.

    Not collective: every rank calls it, at whatever point it has stopped.
    """
    world = run.groups.world
    try:
        saved = finish_apart(run.pending_save, store, world.rank(), world.size())
    except (SaveFailed, RuntimeError, AssertionError) as error:  # AssertionError: thread failed
        if run.pending_save is not None:
            iteration = run.pending_save.iteration
            print_rank_0(
                f"WARNING: the pending checkpoint of iteration {iteration} is lost: {error}"
            )
        return
    if saved is not None:
        exit_report.note(saved_iteration=saved.iteration)
        log_saved(run.groups, saved)


def abandon_save(run: Runtime) -> None:
    """Wait until this rank's threads no longer write a pending save, which is lost.

    For a run that continues in the same process.  Not collective.
    """
    if run.pending_save is not None:
        run.pending_save.abandon()
    if run.checkpoint_worker is not None:
        run.checkpoint_worker.close()


def _ask(run: Runtime, how: Callable[[BackgroundSave], SaveResult | None]) -> None:
    pending = run.pending_save
    if pending is None:
        return
    try:
        saved = how(pending)
    except SaveFailed as error:
        run.pending_save = run.saved_at = None
        _go_on_after(error, run)
        return
    if saved is not None:
        run.pending_save = None
        log_saved(run.groups, saved)
        waited_s = pending.waited_s
        event = CheckpointEvent(kind="finalized", iteration=pending.iteration, stall_s=waited_s)
        _report(run, saved, event)


def _report(run: Runtime, saved: SaveResult, event: CheckpointEvent) -> None:
    run.failed_saves = 0
    exit_report.note(saved_iteration=event.iteration)
    run.callbacks.on_checkpoint(run, event)
    for iteration in saved.deleted:
        run.callbacks.on_checkpoint(run, CheckpointEvent(kind="deleted", iteration=iteration))


def _go_on_after(error: SaveFailed, run: Runtime) -> None:
    """Warn of a failed save; all ranks call this alike.

    Raises SaveFailed if more than --ckpt-max-failed-saves failed in a row.
    """
    run.failed_saves += 1
    limit = run.config.checkpoint.ckpt_max_failed_saves
    if run.failed_saves > limit:
        raise SaveFailed(
            f"{error}; it is failed save {run.failed_saves} in a row and --ckpt-max-failed-saves "
            f"is {limit}"
        )
    print_rank_0(
        f"WARNING: {error}; training goes on: it is failed save {run.failed_saves} in a row, "
        f"--ckpt-max-failed-saves is {limit}"
    )


def _asked(run: Runtime, options: CheckpointConfig) -> Arguments:
    """Return the parsed command line; for Megatron-LM's formats with its derived arguments."""
    if not FORMATS[options.ckpt_format].is_foreign:
        return run.config.asked
    # Functions are omitted: their text would contain an address of this process.
    values = vars(legacy_namespace(run))
    asked = {name: value for name, value in values.items() if not callable(value)}
    return asked | ({} if run.tokenizer is None else {TRUE_VOCAB_SIZE: run.tokenizer.vocab_size})


def _parts(run: Runtime) -> RunParts:
    return RunParts(
        model_chunks=run.model_chunks,
        groups=run.groups,
        optimizer=run.optimizer,
        scheduler=run.scheduler,
        stages=layers_of_stages(run.config),
        kind=run.config.language_model.model_kind,
        asked=run.config.asked,
        rerun=run.rerun,
        base=run.adapter_base,
        started_from=run.started_from,
        objective_state=run.objective_state,
    )
