"""Save and load a run: model, optimizer, scheduler, random states, counters."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from megatron.core.config.errors import ConfigError
from megatron.core.config.value_types import Arguments
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.dist_checkpointing.all_ranks import PendingSave, SaveFailed, SaveResult, load
from megatron.core.dist_checkpointing.background import BackgroundSave, HostBuffer, finish_apart
from megatron.core.dist_checkpointing.formats import FORMATS
from megatron.core.dist_checkpointing.manifest import TRUE_VOCAB_SIZE
from megatron.core.dist_checkpointing.records import OPTIMIZER_PREFIX, SavePlan
from megatron.core.dist_checkpointing.validation import NEEDS_SCALES
from megatron.core.parallel.collectives import broadcast_json
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.parallel.run_store import RunStore
from megatron.core.peft.lora import begin_magnitudes, store_base
from megatron.core.tensor_parallel.frozen_weight import StoredFormat
from megatron.training.arguments.config_file import write_config
from megatron.training.checkpointing.base_model import identify, of_adapters
from megatron.training.checkpointing.checkpoint_tensors import RunParts, model_tensors
from megatron.training.checkpointing.load import BLENDS, load_run
from megatron.training.checkpointing.non_persistent import keeps_parts, transient
from megatron.training.checkpointing.paths import checkpoint_folder
from megatron.training.checkpointing.save import announce_memory, log_saved, save_run
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.process import exit_report
from megatron.training.process.exit_report import in_phase
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.context import RunContext
from megatron.training.runtime.flat_namespace import legacy_namespace


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent:
    """Event in the life of a checkpoint.  --async-save uses ``scheduled`` and ``finalized``.

    ``stall_s`` is the time in seconds for which training stopped.
    """

    kind: Literal["saved", "scheduled", "finalized", "deleted"]
    iteration: int
    stall_s: float = 0.0


@dataclass
class Checkpointer:
    """Saves and loads the checkpoints of a run; holds what outlives one save.

    All methods but `finish_at_failure` and `abandon` are collective over all ranks.  ``parts`` are
    the objects that are saved or loaded.  What happens to checkpoints is appended to ``events``,
    for the callbacks of the run.
    """

    loaded_from: str | None = None  # folder of the checkpoint that the run began with
    started_from: str | None = None  # folder of the weights that the run started from
    adapter_base: Arguments | None = None  # what checkpoints of adapters say about their base
    saved_at: int | None = None  # iteration of the newest checkpoint of this run
    pending: BackgroundSave | None = None  # with --async-save
    failed_saves: int = 0  # consecutive
    events: list[CheckpointEvent] = field(default_factory=list)
    _snapshot_memory: HostBuffer = field(default_factory=HostBuffer)
    _plan: SavePlan = field(default_factory=dict)

    @in_phase("loading a checkpoint")
    def load(self, run: RunContext, parts: RunParts) -> None:
        """Load ``parts`` and the counters of ``run``.

        Without --load and --pretrained-checkpoint nothing is loaded.
        """
        run.timers("load-checkpoint", log_level=0).start(barrier=True)
        loaded = load_run(run.config.checkpoint, parts)
        if run.config.checkpoint.non_persistent_ckpt_type == "in_memory":
            announce_memory(run.config.checkpoint, parts)
        run.timers("load-checkpoint").stop(barrier=True)
        if run.config.adapters.lora is not None or run.config.adapters.has_heads:
            base = loaded.base if loaded is not None else identify(parts, None)
            self.adapter_base = None if base is None else base.arguments
            if (base_dtype := run.config.adapters.lora_base_dtype) is not None:
                store_base(parts.model_chunks, cast(StoredFormat, base_dtype))
            if begin_magnitudes(parts.model_chunks) and parts.optimizer is not None:
                parts.optimizer.reload_model_params()
        if loaded is None:
            if run.config.quantization.has_quantizers:
                raise ConfigError(f"--export-quant-cfg without a checkpoint: {NEEDS_SCALES}")
            return
        self.started_from = loaded.started_from
        run.timers.log(["load-checkpoint"])
        run.state.load(dict(loaded.counters))
        self._forget_unsaved_best(run)
        run.objective.saved = loaded.objective_state
        run.blends = list(loaded.blends)
        self.loaded_from = loaded.folder
        exit_report.note(loaded_iteration=loaded.iteration, iteration=loaded.iteration)
        if loaded.iteration > 0 or not run.config.checkpoint.moe_use_upcycling:
            self.saved_at = run.state.iteration
        # The learning rate follows the consumed samples even if no scheduler state was loaded.
        if parts.scheduler is not None and not loaded.has_schedule and run.state.iteration > 0:
            parts.scheduler.step(run.state.consumed_train_samples)

    @in_phase("loading a checkpoint")
    def load_best(self, run: RunContext, parts: RunParts) -> None:
        """Load the weights of the best step of --save-best, unless this step is the best one."""
        self._forget_unsaved_best(run)
        config = run.config.checkpoint
        best = run.state.best_iteration
        if best in (0, run.state.iteration):
            return
        assert config.save is not None, "the flags were checked"
        folder = Path(checkpoint_folder(config.save, best))
        tensors = model_tensors(parts)
        if self.adapter_base is not None:
            tensors = of_adapters(tensors)
        load(folder, tensors, run.groups.world, leave_out=(*parts.unused, OPTIMIZER_PREFIX))
        print_rank_0(f"  loaded the weights of the best iteration, {best}, from {folder}")

    def _forget_unsaved_best(self, run: RunContext) -> None:
        """Forget the best step unless --save has it: the run may have begun elsewhere."""
        config = run.config.checkpoint
        state = run.state
        if not config.save_best or config.save is None or state.best_iteration == 0:
            return
        folder = checkpoint_folder(config.save, state.best_iteration)
        if not broadcast_json(os.path.isdir(folder), run.groups.world):
            print_rank_0(f"WARNING: the best evaluation is forgotten: there is no {folder}")
            state.best_iteration = 0

    def save(
        self,
        run: RunContext,
        parts: RunParts,
        *,
        is_last: bool = False,
        is_transient: bool = False,
    ) -> None:
        """Save a checkpoint of this step; with --async-save, start to save it in the background.

        After a failed save training continues with a warning, unless more than
        --ckpt-max-failed-saves failed in a row.  ``is_last``: wait for the save, and raise
        SaveFailed if it fails.  ``is_transient``: a non-persistent checkpoint
        (--non-persistent-save-interval), which has its own directory.
        """
        in_background = bool(run.config.checkpoint.async_save) and not is_last
        iteration = run.state.iteration
        failure = None
        began_s = time.perf_counter()
        run.timers("save-checkpoint", log_level=0).start(barrier=True)
        self.wait(run)
        fault_point("save.before", step=iteration)
        try:
            saved = self.publish(
                run,
                parts,
                run.state.to_dict(),
                is_transient=is_transient,
                in_background=in_background,
            )
        except SaveFailed as error:
            failure = error
        run.timers("save-checkpoint").stop(barrier=True)
        run.timers.log(["save-checkpoint"])
        stall_s = time.perf_counter() - began_s
        if failure is not None:
            if is_last:
                raise failure
            self._go_on_after(failure, run)
            return
        if not is_transient:
            self.saved_at = iteration
        if saved is None:
            event = CheckpointEvent(kind="scheduled", iteration=iteration, stall_s=stall_s)
            self.events.append(event)
        else:
            self._note(saved, CheckpointEvent(kind="saved", iteration=iteration, stall_s=stall_s))

    @in_phase("saving a checkpoint")
    def publish(
        self,
        run: RunContext,
        parts: RunParts,
        counters: Mapping[str, float],
        *,
        is_transient: bool = False,
        in_background: bool = False,
    ) -> SaveResult | None:
        """Save and return the result; None if the save continues in the background.

        ``is_transient``: see `save`.  Raises SaveFailed.
        """
        config = run.config.checkpoint
        is_local = is_transient and keeps_parts(config)
        if is_transient:
            config = transient(config)

        def go_on(begun: PendingSave) -> None:
            self.pending = BackgroundSave(begun, self._snapshot_memory, run.groups.world)
            print_rank_0(
                f"  scheduled an async checkpoint save at iteration {begun.iteration:7d} "
                f"to {config.save}"
            )

        return save_run(
            config,
            self._with_origin(run, parts),
            counters,
            is_local=is_local,
            plan=self._plan if config.ckpt_assume_constant_structure else None,
            go_on=go_on if in_background and not is_local else None,
            asked=_asked(run, config),
            write_config=lambda path: write_config(run.config, path),
        )

    def convert(self, run: RunContext, parts: RunParts) -> None:
        """Save the loaded run in the format of --ckpt-convert-format."""
        options = run.config.checkpoint
        assert options.ckpt_convert_format is not None
        assert options.ckpt_convert_save is not None
        target = replace(
            options,
            save=str(Path(options.ckpt_convert_save) / options.ckpt_convert_format),
            ckpt_format=options.ckpt_convert_format,
        )
        parts = self._with_origin(run, parts)
        save_run(target, parts, run.state.to_dict(), asked=_asked(run, target))
        print_rank_0(f"> converted checkpoint: {options.load} -> {target.save}")

    def poll(self, run: RunContext) -> None:
        """Process a background save that has finished."""
        self._ask(run, BackgroundSave.poll)

    def wait(self, run: RunContext) -> None:
        """Wait for the background save, if there is one."""
        self._ask(run, BackgroundSave.wait)

    def finish_at_failure(self, groups: ProcessGroupCollection, store: RunStore) -> None:
        """Finish the pending save after an exception has ended the run, and log the result.

        Not collective: every rank calls it, at whatever point it has stopped.
        """
        world = groups.world
        try:
            saved = finish_apart(self.pending, store, world.rank(), world.size())
        except (SaveFailed, RuntimeError, AssertionError) as error:  # AssertionError: thread failed
            if self.pending is not None:
                print_rank_0(
                    f"WARNING: the pending checkpoint of iteration {self.pending.iteration} is "
                    f"lost: {error}"
                )
            return
        if saved is not None:
            exit_report.note(saved_iteration=saved.iteration)
            log_saved(groups, saved)

    def abandon(self) -> None:
        """Wait until this rank's threads no longer write a pending save, which is lost.

        For a run that continues in the same process.  Not collective.
        """
        if self.pending is not None:
            self.pending.wait_for_threads()

    def _ask(self, run: RunContext, how: Callable[[BackgroundSave], SaveResult | None]) -> None:
        pending = self.pending
        if pending is None:
            return
        try:
            saved = how(pending)
        except SaveFailed as error:
            self.pending = self.saved_at = None
            self._go_on_after(error, run)
            return
        if saved is not None:
            self.pending = None
            log_saved(run.groups, saved)
            waited_s = pending.waited_s
            event = CheckpointEvent(kind="finalized", iteration=pending.iteration, stall_s=waited_s)
            self._note(saved, event)

    def _note(self, saved: SaveResult, event: CheckpointEvent) -> None:
        self.failed_saves = 0
        exit_report.note(saved_iteration=event.iteration)
        self.events.append(event)
        self.events += [CheckpointEvent(kind="deleted", iteration=i) for i in saved.deleted]

    def _go_on_after(self, error: SaveFailed, run: RunContext) -> None:
        """Warn of a failed save; all ranks call this alike.

        Raises SaveFailed if more than --ckpt-max-failed-saves failed in a row.
        """
        self.failed_saves += 1
        limit = run.config.checkpoint.ckpt_max_failed_saves
        if self.failed_saves > limit:
            raise SaveFailed(
                f"{error}; it is failed save {self.failed_saves} in a row and "
                f"--ckpt-max-failed-saves is {limit}"
            )
        print_rank_0(
            f"WARNING: {error}; training goes on: it is failed save {self.failed_saves} in a row, "
            f"--ckpt-max-failed-saves is {limit}"
        )

    def _with_origin(self, run: RunContext, parts: RunParts) -> RunParts:
        """Return ``parts`` with the weights that the run began with, and the objective's state."""
        return replace(
            parts,
            base=self.adapter_base,
            started_from=self.started_from,
            objective_state=run.objective.saved,
        )


def _asked(run: RunContext, options: CheckpointConfig) -> Arguments:
    """Return the parsed command line; for Megatron-LM's formats with its derived arguments."""
    if not FORMATS[options.ckpt_format].is_foreign:
        return {**run.config.asked, **({BLENDS: run.blends} if run.blends else {})}
    # Functions are omitted: their text would contain an address of this process.
    values = vars(legacy_namespace(run))
    asked = {name: value for name, value in values.items() if not callable(value)}
    return asked | {TRUE_VOCAB_SIZE: run.tokenizer.vocab_size}
