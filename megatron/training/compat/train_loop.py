"""Megatron-LM's functions for scripts with their own train loop.

They act on the run that ``initialize_megatron()`` has started, and have the arguments and results
of Megatron-LM's.  ``train_step`` counts the step, so a script must not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron.core.config.errors import ConfigError
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.param_groups import ParamCondition
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.microbatch import ForwardStepFunc
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.rerun.state_machine import RerunDataIterator
from megatron.training.arguments.resolve import require_training
from megatron.training.callbacks.default import default_callbacks
from megatron.training.callbacks.metrics import Metrics
from megatron.training.compat.checkpointing import model_run, save_checkpoint
from megatron.training.compat.global_vars import get_run, set_run
from megatron.training.compat.utils import Model, chunks_of
from megatron.training.data import loaders
from megatron.training.data.datasets import prepare_datasets
from megatron.training.estimates.flops import num_floating_point_operations
from megatron.training.process.rank_print import print_rank_0, print_rank_last
from megatron.training.runtime import setup
from megatron.training.runtime.context import StepResult
from megatron.training.runtime.setup import build_scheduler
from megatron.training.runtime.step_graph import StepGraph
from megatron.training.step import evaluate
from megatron.training.step import train_step as optimizer_step
from megatron.training.step.rerun import StepRejected, install_state_machine, run_step
from megatron.training.step.run import ModelRun, TrainingRun

T = TypeVar("T")
ThreeSets = tuple[object, object, object]  # training, validation, test


def get_model(
    model_provider_func: setup.ModelProvider, model_type: object = None, wrap_with_ddp: bool = True
) -> list[nn.Module]:
    """Build and return the model chunks of this rank.  Collective over all ranks."""
    del model_type
    return setup.build_model_chunks(get_run(), model_provider_func, wrap=wrap_with_ddp)


def get_optimizer_param_scheduler(optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build the scheduler of ``optimizer``'s parameter groups that the flags request."""
    run = get_run()
    run.config = require_training(run.config)
    return build_scheduler(run, optimizer)


def setup_model_and_optimizer(
    model_provider_func: setup.ModelProvider,
    model_type: object = None,
    no_wd_decay_cond: ParamCondition | None = None,
    scale_lr_cond: ParamCondition | None = None,
    lr_mult: float = 1.0,
    checkpointing_context: object = None,
) -> tuple[list[nn.Module], MegatronOptimizer, OptimizerParamScheduler]:
    """Build model chunks, optimizer and scheduler, and load ``--load``.  Collective.

    ``no_wd_decay_cond(name, param)`` selects parameters without weight decay; ``scale_lr_cond(name,
    param)`` those whose learning rate is multiplied by ``lr_mult``.
    """
    del model_type, checkpointing_context
    context = get_run()
    context.config = require_training(context.config)
    chunks = setup.build_model_chunks(context, model_provider_func)
    setup.check_adapter_targets(context, chunks)
    optimizer, scheduler = setup.build_optimizer(
        context,
        chunks,
        no_weight_decay_cond=no_wd_decay_cond,
        scale_lr_cond=scale_lr_cond,
        lr_mult=lr_mult,
    )
    run = _training_run(chunks, optimizer, scheduler)
    run.load()
    run.callbacks = default_callbacks(run)
    asked = {
        "--save-best": context.config.checkpoint.save_best,
        "--early-stopping-patience": context.config.validation.early_stopping_patience,
        "--save-hf": context.config.checkpoint.save_hf,
    }
    if flags := ", ".join(flag for flag, value in asked.items() if value):
        print_rank_0(f"WARNING: {flags}: without effect, because the script has its own train loop")
    return chunks, optimizer, scheduler


@dataclass(kw_only=True)
class _ScriptRun(TrainingRun):
    """The run of a script; ``last_step`` is the result that `training_log` logs."""

    last_step: StepResult | None = None


def _training_run(
    model: Model, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
) -> _ScriptRun:
    """Make the current run one that trains these objects; return it."""
    run = model_run(model)
    if not isinstance(run, _ScriptRun):
        graph = StepGraph.of(run.config.model)
        run = _ScriptRun(**vars(run), optimizer=optimizer, scheduler=scheduler, step_graph=graph)
        set_run(run)
        install_state_machine(run)
    run.model_chunks = chunks_of(model)
    run.optimizer = optimizer
    run.scheduler = scheduler
    return run


class DataIterator(Generic[T]):
    """Endless iterator over micro-batches; ``iter()`` of it is one pass from the first on."""

    def __init__(self, loader: DataLoader[T]) -> None:
        self.loader, self.dataset = loader, loader.dataset
        self._current: Iterator[T] = iter(loader)

    def __iter__(self) -> Iterator[T]:
        return iter(self.loader)

    def __next__(self) -> T:
        try:
            return next(self._current)
        except StopIteration:
            self._current = iter(self.loader)
            return next(self._current)


def get_train_valid_test_num_samples() -> tuple[int | None, int | None, int | None]:
    """Return how many samples the training, validation and test sets must provide.

    None stands for one complete pass.
    """
    return loaders.train_valid_test_num_samples(get_run())


def build_train_valid_test_datasets(
    build_train_valid_test_datasets_provider: loaders.Provider,
    train_valid_test_num_samples: Sequence[int | None] | None = None,
) -> ThreeSets:
    """Call the provider with the numbers of samples; return its data sets."""
    return build_train_valid_test_datasets_provider(
        train_valid_test_num_samples or get_train_valid_test_num_samples()
    )


def build_train_valid_test_data_iterators(
    build_train_valid_test_datasets_provider: loaders.Provider,
) -> ThreeSets:
    """Build iterators of the three sets, None where this rank reads no data.  Collective.

    Training continues after the run's consumed samples.  With --multiple-validation-sets the second
    item is a list.
    """
    run = get_run()
    prepare_datasets(run)
    data = loaders.build_data(run, build_train_valid_test_datasets_provider)
    if isinstance(run, ModelRun):
        run.data = data
    valid = [_endless(loader) for loader in data.valid_loaders]
    several = run.config.validation.multiple_validation_sets
    return data.train, valid if several else next(iter(valid), None), _endless(data.test_loader)


def _endless(loader: object) -> object:
    return DataIterator(loader) if isinstance(loader, DataLoader) else loader


def train_step(
    forward_step_func: ForwardStepFunc,
    data_iterator: object,
    model: Model,
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    config: object = None,
    forward_backward_func: object = None,
) -> tuple[Mapping[str, Tensor | float], int, bool, bool, int, Tensor | float | None, int | None]:
    """Run one optimizer step on a global batch, and count it.  Collective over all ranks.

    Returns losses (last stage), 1 if the update was skipped, should_checkpoint, should_exit, exit
    code, gradient norm and number of zeros.  should_exit: the result of the step was rejected
    (--rerun-mode) and nothing was updated; save a checkpoint if should_checkpoint, and exit.
    """
    del config  # the model has its own
    if forward_backward_func not in (None, get_forward_backward_func()):
        raise ConfigError(
            "train_step(forward_backward_func=...): the layout has one schedule, that of "
            "get_forward_backward_func(); leave the argument out"
        )
    run = _training_run(model, optimizer, opt_param_scheduler)
    run.forward_step_func = forward_step_func
    run.data.train = _rewindable(data_iterator)
    try:
        result = run.last_step = run_step(run, optimizer_step.train_step)
    except StepRejected as rejected:
        print_rank_0(rejected)
        run.checkpoints.saved_at = None
        return {}, 1, rejected.should_checkpoint, True, rejected.exit_code, None, None
    flops = num_floating_point_operations(run.config, result.batch_size, run.padded_vocab_size)
    run.state.advance(result, flops)
    skipped = int(result.skipped)
    return result.losses, skipped, False, False, 0, result.grad_norm, result.num_zeros


def _rewindable(data: object) -> object:
    """Return iterators that can return the micro-batches of this step again."""
    if isinstance(data, list):
        return [_rewindable(each) for each in data]
    is_plain = data is not None and not isinstance(data, RerunDataIterator)
    return RerunDataIterator(data) if is_plain else data  # type: ignore[arg-type]


def evaluate_and_print_results(
    prefix: str,
    forward_step_func: ForwardStepFunc,
    data_iterator: evaluate.Loader | None,
    model: Model,
    iteration: int,
    process_non_loss_data_func: Callable[..., object] | None = None,
    config: object = None,
    verbose: bool = False,
    write_to_tensorboard: bool = True,
    non_loss_data_func: Callable[..., object] | None = None,
) -> None:
    """Evaluate ``--eval-iters`` global batches; print the mean losses on the last rank.

    Collective over all ranks.
    """
    del iteration, config, verbose  # the run and the model have them
    run = model_run(model)
    run.forward_step_func = forward_step_func
    run.model_chunks = chunks_of(model)
    run.process_non_loss_data_func = process_non_loss_data_func
    run.non_loss_data_func = non_loss_data_func
    result = evaluate.evaluate(run, data_iterator)
    if result is None:
        return
    if write_to_tensorboard:
        run.callbacks.on_eval_end(run, result)
    if not (write_to_tensorboard and len(run.callbacks)):
        losses = " | ".join(f"{key} value: {loss:.6E}" for key, loss in result.losses.items())
        print_rank_last(f" validation loss at {prefix} | {losses} |")


def training_log(
    loss_dict: Mapping[str, Tensor | float],
    total_loss_dict: object,
    learning_rate: float,
    decoupled_learning_rate: float | None,
    iteration: int,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: Tensor | float | None,
    params_norm: float | None,
    num_zeros_in_grad: int | None,
) -> bool:
    """Log the step that `train_step` has made, as the flags request.  Collective.

    Call `setup_model_and_optimizer` first.  Sums over steps are stored in the run;
    ``total_loss_dict`` is not changed.  Always returns False: flags decide when memory is reported.
    """
    del total_loss_dict, iteration, report_memory_flag
    run = get_run()
    last_step = run.last_step if isinstance(run, _ScriptRun) else None
    if not isinstance(run, _ScriptRun) or last_step is None:
        raise AssertionError("train_step() comes before training_log()")
    result = replace(
        last_step,
        losses=loss_dict,
        grad_norm=grad_norm,
        num_zeros=num_zeros_in_grad,
        params_norm=params_norm,
        learning_rate=learning_rate,
        decoupled_learning_rate=decoupled_learning_rate,
        loss_scale=loss_scale,
        skipped=bool(skipped_iter),
    )
    timer = run.timers("interval-time", log_level=0)
    if not timer.is_running:  # usually the script has started it before its loop
        timer.start()
    for callback in run.callbacks:
        if isinstance(callback, Metrics):
            callback.on_step_end(run, result)
    return False


def save_checkpoint_and_time(
    iteration: int,
    model: Model,
    optimizer: MegatronOptimizer | None,
    opt_param_scheduler: OptimizerParamScheduler | None,
    num_floating_point_operations_so_far: float,
    checkpointing_context: object = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: object = None,
) -> None:
    """Call `save_checkpoint` and log its time.  Collective over all ranks."""
    del checkpointing_context, train_data_iterator
    run = get_run()
    run.timers("save-checkpoint", log_level=0).start(barrier=True)
    save_checkpoint(
        iteration,
        model,
        optimizer,
        opt_param_scheduler,
        num_floating_point_operations_so_far,
        non_persistent_ckpt=non_persistent_ckpt,
    )
    run.timers("save-checkpoint").stop(barrier=True)
    run.timers.log(["save-checkpoint"])


def update_train_iters(args: argparse.Namespace) -> None:
    """Set ``args.train_iters`` from ``train_samples``; get_args() has it set already."""
    if args.train_iters or not args.train_samples:
        return
    batches = NumMicroBatchesCalculator.from_config(args, args.data_parallel_size)
    vars(args).update(train_iters=batches.train_iters(args.train_samples))
