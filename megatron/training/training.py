"""`pretrain`: parse the command line, set up the run, train and evaluate."""

from __future__ import annotations

import argparse
import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron.core import virtual_ranks
from megatron.core.config.errors import MegatronError
from megatron.core.enums import ModelType
from megatron.core.optional import lazy_exports
from megatron.core.parallel.run_store import RunStore
from megatron.core.pipeline_parallel.microbatch import ForwardStepFunc
from megatron.training.callbacks.default import default_callbacks
from megatron.training.callbacks.periodic import save_last
from megatron.training.callbacks.user import require_callbacks
from megatron.training.checkpointing.non_persistent import remove_memory
from megatron.training.compat import global_vars
from megatron.training.config.run import RunConfig
from megatron.training.data import loaders
from megatron.training.data.datasets import count_epochs, prepare_datasets
from megatron.training.fault_tolerance import sections
from megatron.training.fault_tolerance.failure_watch import failure_watch, notify_launcher
from megatron.training.ft_integration import maybe_setup_simulated_fault
from megatron.training.initialize import (
    configure,
    connect,
    continued,
    create_context,
    fail,
    fail_before_start,
    install_groups,
    shut_down,
)
from megatron.training.inprocess_restart import (
    begin_attempt,
    maybe_wrap_for_inprocess_restart,
)
from megatron.training.models.registry import implementation_of
from megatron.training.planning.memory_warmup import make_optimizer_state, rehearse
from megatron.training.planning.out_of_memory import report_oom
from megatron.training.process import exit_report
from megatron.training.process.rank_print import print_detail, print_rank_0
from megatron.training.runtime import setup
from megatron.training.runtime.setup import recount_train_iters
from megatron.training.runtime.step_graph import StepGraph
from megatron.training.startup_log import (
    print_datetime,
    print_expert_waits,
    print_gradient_accumulation_fusion,
    print_settings,
    print_summary,
)
from megatron.training.step import evaluate as evaluation
from megatron.training.step.rerun import install_state_machine
from megatron.training.step.run import Callback, ModelRun, TrainingRun
from megatron.training.step.train_step import train

_HUGGING_FACE_WRITER = "megatron.training.conversion.live"  # a layer above, which few runs need
# Functions for scripts with their own train loop, which import them from this module.
_TRAIN_LOOP = (
    "build_train_valid_test_data_iterators build_train_valid_test_datasets "
    "evaluate_and_print_results get_model get_optimizer_param_scheduler "
    "get_train_valid_test_num_samples save_checkpoint_and_time setup_model_and_optimizer "
    "train_step training_log update_train_iters"
).split()
__getattr__ = lazy_exports(
    __name__, dict.fromkeys(_TRAIN_LOOP, "megatron.training.compat.train_loop")
)


def pretrain(
    train_valid_test_dataset_provider: loaders.Provider,
    model_provider: setup.ModelProvider,
    model_type: ModelType,
    forward_step_func: ForwardStepFunc,
    process_non_loss_data_func: Callable[..., object] | None = None,
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    args_defaults: Mapping[str, object] | None = None,
    get_embedding_ranks: object = None,
    get_position_embedding_ranks: object = None,
    non_loss_data_func: Callable[..., object] | None = None,
    store: dist.Store | None = None,
    inprocess_call_wrapper: Any = None,
    *,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Parse the command line, set up, train and evaluate.  Collective over all ranks.

    ``train_valid_test_dataset_provider`` is called once, ``model_provider`` once per model chunk of
    this rank.  ``forward_step_func(data_iterator, model)`` returns the output and a function that
    computes the loss from it.  ``callbacks`` are called after the built-in ones.  ``store`` is used
    for the process groups; NVIDIA's in-process restart passes
    ``inprocess_call_wrapper``.

    A user's error (MegatronError) ends the program with one message and its exit code; an exception
    on any rank ends all ranks.  A step whose result was rejected ends it with status 16 or 17
    (--rerun-mode).  With --inprocess-restart all of this is called again after a fault, and it also
    returns in ranks that waited in reserve.
    """
    del model_type, get_embedding_ranks, get_position_embedding_ranks  # the layout decides
    script = _Script(
        train_valid_test_dataset_provider,
        model_provider,
        forward_step_func,
        process_non_loss_data_func,
        non_loss_data_func,
        extra_args_provider,
        args_defaults,
        callbacks,
    )
    call: Callable[..., None] = partial(_pretrain, script)
    if inprocess_call_wrapper is None:  # the script has not wrapped this function itself
        call, restart_store = maybe_wrap_for_inprocess_restart(call)
        call(store=restart_store or store)
    else:
        call(store=store, inprocess_call_wrapper=inprocess_call_wrapper)


@dataclass(frozen=True)
class _Script:
    """Arguments of `pretrain`."""

    provider: loaders.Provider
    model_provider: setup.ModelProvider
    forward_step_func: ForwardStepFunc
    process_non_loss_data_func: Callable[..., object] | None
    non_loss_data_func: Callable[..., object] | None
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None
    args_defaults: Mapping[str, object] | None
    callbacks: Sequence[Callback]


def _pretrain(
    script: _Script, store: dist.Store | None, inprocess_call_wrapper: Any = None
) -> None:
    """Call `_whole_run` and report errors; NVIDIA's wrapper gets errors that it may restart."""
    restarts = inprocess_call_wrapper is not None
    try:
        require_callbacks(script.callbacks)
        sections.start_heartbeat()
        attempt = 0
        if restarts:
            attempt, store = begin_attempt(inprocess_call_wrapper, store)
        config = configure(script.extra_args_provider, script.args_defaults)
    except MegatronError as error:
        fail_before_start(error)
        raise SystemExit(error.exit_code) from None
    try:
        if config.distributed.virtual_ranks is None:
            _whole_run(script, continued(config, attempt), store, restarts)
        else:
            sections.monitor.close()  # threads have no heartbeat of their own
            virtual_ranks.run(
                lambda *_ranks: _whole_run(script, config, store), config.distributed.virtual_ranks
            )
    except MegatronError as error:
        if restarts and error.exit_code == MegatronError.exit_code:
            raise
        fail(error)  # the wrapper restarts after an Exception, and ends at SystemExit
        raise SystemExit(error.exit_code) from None
    except BaseException as error:
        if not restarts:
            exit_report.write_error(error)
        raise


def _whole_run(
    script: _Script, config: RunConfig, store: dist.Store | None, restarts: bool = False
) -> None:
    """Set up, train and evaluate.  ``restarts``: a failure of this rank restarts all ranks."""
    connect(config, store)
    if config.resilience.enable_ft_package:
        sections.monitor.enable(config.checkpoint.save, config.resilience.calc_ft_timeouts)
        maybe_setup_simulated_fault()
    timeout_s = 60.0 * config.distributed.distributed_timeout_minutes
    try:
        with (
            nullcontext()
            if restarts
            else failure_watch(timeout_s=timeout_s, before_end=_finish_at_failure),
            report_oom(global_vars.current_run),
        ):
            run = set_up(config, script)
            if config.checkpoint.ckpt_convert_format is not None:
                run.checkpoints.convert(run, run.parts)
            else:
                _train_and_evaluate(run)
                in_memory = config.checkpoint.non_persistent_ckpt_type == "in_memory"
                if in_memory and not run.state.exit_code:
                    remove_memory(config.checkpoint)
        state = run.state
        reason = state.stop_reason
        kind = "rerun" if state.exit_code else "done" if reason is None else "stopped"
        exit_report.write(kind, state.exit_code, reason)
        if state.exit_code:
            notify_launcher(str(reason))
    finally:
        if isinstance(begun := global_vars.current_run(), ModelRun):
            begun.callbacks.close()
            if restarts:
                begun.checkpoints.abandon()
        shut_down()
    if run.state.exit_code:
        raise SystemExit(run.state.exit_code)


def _finish_at_failure(store: RunStore) -> None:
    if isinstance(run := global_vars.current_run(), ModelRun):
        run.checkpoints.finish_at_failure(run.groups, store)


def set_up(config: RunConfig, script: _Script) -> ModelRun:
    """Build everything that the run of ``config`` needs, and load the checkpoint.

    Returns a TrainingRun, or without training (--skip-train, `replace_training`) a ModelRun without
    an optimizer.  Collective over all ranks.
    """
    groups = install_groups(config)
    print_settings(config)
    context = create_context(config, groups)
    print_summary(context)
    count_epochs(context)
    print_datetime("after megatron is initialized")
    context.timers("model-and-optimizer-setup", log_level=0).start(barrier=True)
    chunks = setup.build_model_chunks(context, script.model_provider)
    setup.check_adapter_targets(context, chunks)
    print_gradient_accumulation_fusion(context.config, chunks)
    print_expert_waits(chunks)
    run = ModelRun(
        **vars(context),
        model_chunks=chunks,
        forward_step_func=script.forward_step_func,
        process_non_loss_data_func=script.process_non_loss_data_func,
        non_loss_data_func=script.non_loss_data_func,
    )
    global_vars.set_run(run)
    replaces_training = implementation_of(config).replace_training is not None
    if not (config.validation.skip_train or replaces_training):
        optimizer, scheduler = setup.build_optimizer(run, chunks)
        graph = StepGraph.of(config.model)
        run = TrainingRun(**vars(run), optimizer=optimizer, scheduler=scheduler, step_graph=graph)
        global_vars.set_run(run)
    install_state_machine(run)
    run.load()
    recount_train_iters(run)
    run.timers("model-and-optimizer-setup").stop()
    print_datetime("after model, optimizer, and learning rate scheduler are built")
    if config.checkpoint.ckpt_convert_format is not None:
        return run
    _save_hugging_face(run, checks_only=True)
    run.timers("train/valid/test-data-iterators-setup", log_level=0).start(barrier=True)
    prepare_datasets(run)
    run.data = loaders.build_data(run, script.provider)
    run.timers("train/valid/test-data-iterators-setup").stop()
    print_datetime("after dataloaders are built")
    print_detail("done with setup ...")
    run.timers.log(
        ["model-and-optimizer-setup", "train/valid/test-data-iterators-setup"], barrier=True
    )
    run.callbacks = default_callbacks(run)
    if config.checkpoint.save_hf_interval is not None:
        run.callbacks.append(importlib.import_module(_HUGGING_FACE_WRITER).StepFolders())
    # Virtual ranks are threads: each gets copies of the caller's callbacks.
    is_shared = config.distributed.virtual_ranks is not None
    for callback in copy.deepcopy(script.callbacks) if is_shared else script.callbacks:
        run.callbacks.append(callback)
    return run


def _save_hugging_face(run: ModelRun, *, checks_only: bool = False) -> None:
    """Write the folder of --save-hf, or check that this is possible.  Collective over all ranks."""
    if run.config.checkpoint.save_hf is None or run.state.stop_reason is not None:
        return
    writer = importlib.import_module(_HUGGING_FACE_WRITER)
    if checks_only:
        writer.check_model(run)
        return
    with run.callbacks.paused(run, "checkpoint") if isinstance(run, TrainingRun) else nullcontext():
        writer.save_model(run)


def _train_and_evaluate(run: ModelRun) -> None:
    if (replacement := implementation_of(run.config).replace_training) is not None:
        replacement(run)
        _save_hugging_face(run)
        return
    if not isinstance(run, TrainingRun):
        print_rank_0("skipping training (--skip-train is on) ...")
    else:
        make_optimizer_state(run)
        if run.config.training.rehearse_memory and not run.finished():
            rehearse(run)
        print_detail("training ...")
        print_datetime("before the start of training step")
        train(run)
        if run.state.stop_reason is not None:
            print_datetime(run.state.stop_reason)
            return
        print_datetime("after training is done")
        save_last(run)
        if run.config.checkpoint.save_best:
            run.checkpoints.load_best(run, run.parts)
    _save_hugging_face(run)
    for result in evaluation.evaluate_all(run, is_final=True):
        run.callbacks.on_eval_end(run, result)
    if run.data.has_test_set:
        test = evaluation.evaluate(run, run.data.test_loader, split="test", is_final=True)
        if test is not None:
            run.callbacks.on_eval_end(run, test)
