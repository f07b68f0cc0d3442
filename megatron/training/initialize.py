"""Start-up and end of a run in this process: flags, device, process groups and random seeds.

Order of collectives: the rendezvous of the default group, then the creation of each process group
of the layout, in the same order on every rank.
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.config.rule import problems_of
from megatron.core.config_logger import has_config_logger_enabled, log_config_to_disk
from megatron.core.device import cpu_tuning, determinism, nccl_allocator
from megatron.core.diagnostics.fault_injection import check_faults
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    install_num_microbatches_calculator,
)
from megatron.core.parallel import parallel_state
from megatron.core.parallel.communicators import end_group_threads_at_exit
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.schedules import graphs_of
from megatron.core.quantization.quant_config import text_of_globs
from megatron.core.rerun.results import steps_to_skip
from megatron.core.rerun.state_machine import destroy_rerun_state_machine
from megatron.core.tensor_parallel.random import model_parallel_seed
from megatron.training import inprocess_restart, planning
from megatron.training.arguments.flat_values import resolve_args
from megatron.training.arguments.input_files import take_retro_project, take_splits_of_dataset
from megatron.training.arguments.parser import OF_PROGRAM, apply_defaults, parse_args
from megatron.training.arguments.rules.parallel import GLOO_RULES
from megatron.training.arguments.rules.requirements import NEEDS_GPU
from megatron.training.arguments.rules.rule import Settings
from megatron.training.arguments.sections import SECTIONS
from megatron.training.callbacks.user import callback_problems
from megatron.training.checkpointing.checkpoint_args import apply_checkpoint_args
from megatron.training.checkpointing.model_folder_args import start_from_model_folder
from megatron.training.checkpointing.paths import find, is_same_directory
from megatron.training.checkpointing.source import continuation
from megatron.training.compat import global_vars
from megatron.training.config.run import RunConfig
from megatron.training.fault_tolerance.failure_watch import notify_launcher
from megatron.training.models.registry import model_kind
from megatron.training.process import exit_report
from megatron.training.process.preflight import (
    folder_problems,
    needs_rendezvous,
    rendezvous_problems,
    set_gpu_defaults,
)
from megatron.training.process.rank_print import (
    choose_style,
    print_detail,
    print_rank_0,
    rank,
    setup_logging,
    survive_lost_output,
    world_size,
)
from megatron.training.process.rendezvous import claim_gpu, meet
from megatron.training.process.signals import catch_stop_signal, end_with_launcher
from megatron.training.runtime.context import RunContext
from megatron.training.runtime.setup import build_context, create_groups
from megatron.training.startup_log import print_config_file
from megatron.training.step.run import ModelRun, TrainingRun

ExtraArgs = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
_PROCESS_STARTED_AT_S = time.time()
_LAUNCHER_ENDS_RANKS_S = 20.0  # after its own failure: rank 0 may have started later


def configure(
    extra_args_provider: ExtraArgs | None = None,
    args_defaults: Mapping[str, object] | None = None,
    argv: Sequence[str] | None = None,
    *,
    ignore_unknown_args: bool = False,
    parsed_args: argparse.Namespace | None = None,
    trains: bool = True,
) -> RunConfig:
    """Parse and check the command line, or check ``parsed_args``.  Local: no communication.

    ``trains``: see RunConfig.

    Raises ConfigError that lists every conflict.  With --check-only it prints the layout and raises
    SystemExit.
    """
    end_with_launcher()
    survive_lost_output()
    check_faults()
    ranks = world_size()  # first: every later check depends on it
    if parsed_args is None:
        namespace = parse_args(
            extra_args_provider, ignore_unknown_args, argv=argv, args_defaults=args_defaults
        )
    else:
        namespace = parsed_args
        apply_defaults(namespace, args_defaults or {})
    if trains:
        print_config_file(namespace)
    _check_kind(namespace, args_defaults or {})
    take_splits_of_dataset(namespace)
    take_retro_project(namespace)
    start_from_model_folder(namespace, ranks, trains=trains)
    if namespace.use_checkpoint_args and namespace.load is not None:
        apply_checkpoint_args(namespace)
    _choose_kind(namespace)
    _read_layers(namespace)
    namespace.kitchen_config_file = text_of_globs(namespace.kitchen_config_file)
    path = namespace.result_rejected_tracker_filename
    if path is not None and (rejected := steps_to_skip(path)):
        skipped = {*(namespace.iterations_to_skip or ()), *rejected}
        namespace.iterations_to_skip = sorted(skipped)
    problems = callback_problems(namespace.callback)
    if namespace.check_only:
        status = planning.check_only(namespace, problems=problems, trains=trains)
        if status and rank() != 0:
            _wait_for_the_end()
        raise SystemExit(status)
    config = _checked(namespace, ranks, problems, trains)
    for warning in config.warnings:
        print_rank_0(f"WARNING: {warning}")
    return config


def continued(config: RunConfig, attempt: int) -> RunConfig:
    """Return the configuration with which ``attempt`` continues what the one before has saved."""
    asked = config.checkpoint
    if attempt == 0 or asked.save is None or is_same_directory(asked.load, asked.save):
        return config
    if asked.load is not None and find(asked.save, None) is None:
        return config
    return replace(config, checkpoint=continuation(asked))


def _checked(
    namespace: argparse.Namespace, ranks: int, problems: list[str], trains: bool
) -> RunConfig:
    """Return the resolved configuration of the run.

    Raises one ConfigError for all problems of flags, environment and folders, including
    ``problems``, the messages that were found before.
    """
    if namespace.virtual_ranks is None and not dist.is_initialized():
        problems = [*problems, *rendezvous_problems(os.environ, ranks)]
    if namespace.inprocess_restart:
        problems = [*problems, *inprocess_restart.problems()]
    try:
        config = resolve_args(namespace, ranks, trains=trains)
    except ConfigError as error:
        if error.problems:
            ConfigError.raise_for((*error.problems, *problems))
        raise
    ConfigError.raise_for((*problems, *folder_problems(config)))
    return config


def _check_kind(namespace: argparse.Namespace, defaults: Mapping[str, object]) -> None:
    """Raise ConfigError if --model-kind is not the kind that this entry script trains."""
    kind = defaults.get("model_kind", namespace.model_kind)
    if namespace.model_kind != kind:
        raise ConfigError(
            f"--model-kind {namespace.model_kind}: this program trains {kind}; use "
            f"{model_kind(namespace.model_kind).entry_script} for that kind"
        )


def _choose_kind(namespace: argparse.Namespace) -> None:
    """Set the model kind of a script that names none: mamba, if its flags describe such a model.

    Megatron-LM's scripts build the model of --model-provider, a flag of their own.
    """
    given = vars(namespace)
    if given["model_kind"] is not None:
        return
    is_own = "model_provider" in given.get(OF_PROGRAM, ())
    describes = given["is_hybrid_model"] or given["hybrid_override_pattern"]
    if describes or (is_own and given["model_provider"] in ("mamba", "hybrid")):
        given["model_kind"] = "mamba"


def _read_layers(namespace: argparse.Namespace) -> None:
    """Read the file of --heterogeneous-layers-config-path into the arguments.

    Checkpoints store the arguments, so a checkpoint then contains the text of the file.  Raises
    ConfigError if it cannot be read.
    """
    path = namespace.heterogeneous_layers_config_path
    if path is not None and not namespace.heterogeneous_layers_config_encoded_json:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--heterogeneous-layers-config-path {path} cannot be read: {error}"
            ) from None
        namespace.heterogeneous_layers_config_encoded_json = text


def start(config: RunConfig) -> RunContext:
    """Connect the ranks, create the process groups and the context.  Collective over all ranks."""
    connect(config)
    return create_context(config, install_groups(config))


def connect(config: RunConfig, store: dist.Store | None = None) -> None:
    """Choose the device and create the default process group.  Collective over all ranks.

    ``store``: used in place of the launcher's store, by ranks that have already met.
    Raises ConfigError if the requested device is missing, or if the environment forbids
    --deterministic-mode.
    """
    choose_style(config.logging.log_style)
    setup_logging(config.logging.logging_level)
    if config.training.exit_signal_handler:
        catch_stop_signal()  # a SIGTERM during setup then stops the train loop
    local_rank = int(os.environ.get("LOCAL_RANK", config.distributed.local_rank))
    try:
        device.choose(config.distributed.device, local_rank)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if device.is_cuda():
        set_gpu_defaults(os.environ)
    if config.model.deterministic_mode:  # before the first GEMM and before NCCL starts
        ConfigError.raise_for(determinism.require(os.environ))
    if not device.is_cuda():
        if config.distributed.device == "auto":
            for warning in NEEDS_GPU.warnings(config.asked):
                print_rank_0(f"WARNING: {warning}")
        if config.model.params_dtype == torch.bfloat16 and not cpu_tuning.multiplies_bf16():
            print_rank_0(
                "WARNING: --bf16: this CPU has no instructions for bf16 matmuls (avx512_bf16, "
                "amx_bf16), which can be 40 times slower than in fp32; on this CPU fp32, the "
                "default, "
                "is faster"
            )
        cpu_tuning.keep_freed_memory()
        cpu_tuning.choose_float32_products(config.model.hidden_size)
    _init_default_group(config, store)
    if config.profiling.record_memory_history:
        path = Path(config.profiling.memory_snapshot_path)
        device.record_memory_history(str(path.with_name(f"oom_rank-{rank()}_{path.name}")))
    if has_config_logger_enabled(config.model):
        for section in (vars(config)[name] for name in SECTIONS):
            log_config_to_disk(config.model, vars(section), prefix=type(section).__name__)


def install_groups(config: RunConfig) -> ProcessGroupCollection:
    """Create the process groups of the layout; set the random seeds.  Collective over all ranks."""
    groups = create_groups(config)
    tp, pp = config.model.tensor_model_parallel_size, config.model.pipeline_model_parallel_size
    print_detail(f"> initialized tensor model parallel with size {tp}")
    print_detail(f"> initialized pipeline model parallel with size {pp}")
    parallel_state.install(groups)
    _set_seeds(config, groups)
    if config.model.disable_bf16_reduced_precision_matmul:
        device.keep_bf16_sums_in_fp32()
    return groups


def create_context(config: RunConfig, groups: ProcessGroupCollection) -> RunContext:
    """Build the context of the run of this process, with the tokenizer.

    Collective over all ranks.
    """
    run = build_context(config, groups, started_at_s=_PROCESS_STARTED_AT_S)
    global_vars.set_run(run)
    install_num_microbatches_calculator(
        run.batches, consumed_samples=lambda: run.state.consumed_train_samples
    )
    return run


def initialize_megatron(
    extra_args_provider: ExtraArgs | None = None,
    args_defaults: Mapping[str, object] | None = None,
    ignore_unknown_args: bool = False,
    allow_no_cuda: bool = True,
    skip_mpu_initialization: bool = False,
    get_embedding_ranks: object = None,
    get_position_embedding_ranks: object = None,
    parsed_args: argparse.Namespace | None = None,
    store: object = None,
) -> None:
    """Set up device, process groups, seeds and tokenizer for scripts with their own train loop.

    Collective over all ranks.  ``allow_no_cuda``, ``get_embedding_ranks``,
    ``get_position_embedding_ranks`` and ``store`` have no effect: a GPU is never required, and the
    layout determines which ranks hold the embeddings.  --lr, a length of the run and what else only
    training needs is required where the script builds an optimizer.  Logs and process groups are
    closed when the program exits.  Raises ConfigError.
    """
    del allow_no_cuda, get_embedding_ranks, get_position_embedding_ranks, store
    if skip_mpu_initialization:
        raise ConfigError(
            "initialize_megatron(skip_mpu_initialization=True): the process groups are always "
            "created by this function; pass False, the default"
        )
    config = configure(
        extra_args_provider,
        args_defaults,
        ignore_unknown_args=ignore_unknown_args,
        parsed_args=parsed_args,
        trains=False,
    )
    if config.distributed.virtual_ranks is not None and not dist.is_initialized():
        raise ConfigError(
            f"--virtual-ranks {config.distributed.virtual_ranks}: this script has its own train "
            "loop; give its main function to megatron.core.virtual_ranks.run instead"
        )
    atexit.register(_end)
    start(config)


def _end() -> None:
    if isinstance(run := global_vars.current_run(), ModelRun):
        run.callbacks.close()
    # Python sets this attribute when it prints the exception that ends the program.
    shut_down(has_failed=getattr(sys, "last_value", None) is not None)


def _init_default_group(config: RunConfig, store: dist.Store | None) -> None:
    if dist.is_initialized():
        return
    backend = config.distributed.distributed_backend or device.default_backend()
    if not device.backend_serves(device.current().type, backend):
        # Scripts for a cluster request NCCL; they also run on a machine without a GPU.
        print_rank_0(
            f"WARNING: --distributed-backend {backend} is without effect: no GPU was found"
        )
        backend = device.default_backend()
    if device.is_cuda():  # --device auto was not checked
        on_a_gpu = replace(config, distributed=replace(config.distributed, device=device.CUDA))
        ConfigError.raise_for(problems_of(GLOO_RULES, Settings(on_a_gpu)))
    allocators = (os.environ.get(f"PYTORCH_{kind}ALLOC_CONF", "") for kind in ("CUDA_", ""))
    if config.model.uses_graphs and any("expandable_segments:True" in a for a in allocators):
        # NCCL cannot register expandable segments as buffers of captured collectives.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if config.ddp.nccl_ub and device.is_cuda():
        nccl_allocator.init()
    timeout = timedelta(minutes=config.distributed.distributed_timeout_minutes)
    end_group_threads_at_exit()
    print_detail("> initializing torch distributed ...")
    # Without device_id: with one, torch splits the communicator of each new group from that of all
    # ranks at once, so that every rank of the run joins every ncclCommSplit.  A rank outside of a
    # gloo group joins it too, but no rank inside (torch 2.11 to 2.13): the run would hang.
    if needs_rendezvous(os.environ):
        rank, world_size = int(os.environ["RANK"]), config.world_size
        store = store or meet(rank, world_size, timeout)
        if device.is_cuda() and "nccl" in backend:  # gloo connects ranks on one GPU too
            claim_gpu(store, rank)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    else:  # no launcher: a single rank needs no rendezvous
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )


def _set_seeds(config: RunConfig, groups: ProcessGroupCollection) -> None:
    """Seed the random generators of this rank: dropout and the data loader use them.

    Initial weights do not: they depend on --seed alone.
    """
    seed = config.training.seed + 100 * groups.pp.rank()
    if config.training.data_parallel_random_init:
        seed += 10 * groups.dp.rank()
    print_detail(f"> setting random seeds to {config.training.seed} ...")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    cp_rank = groups.cp.rank() if groups.cp.size() > 1 else None
    has_graphs = config.model.uses_graphs
    if has_graphs:
        device.leave_default_stream()
    model_parallel_seed(seed, tp_rank=groups.tp.rank(), cp_rank=cp_rank, capturable=has_graphs)


def fail(error: Exception) -> None:
    """Print ``error`` without a traceback; write it for the launcher and the supervisor."""
    exit_report.write_error(error)
    text = f"{type(error).__name__}: {error}"
    print(text, file=sys.stderr, flush=True)
    first, *more = text.splitlines()
    count = "1 reason" if len(more) == 1 else f"{len(more)} reasons"
    notify_launcher(f"{first.rstrip(':')} ({count}, printed above)" if more else text)


def fail_before_start(error: Exception) -> None:
    """Report an error that every rank has found by itself: rank 0 does so at once.

    The other ranks first wait for the launcher to end them, and report the error if it does not.
    """
    if rank() != 0:
        _wait_for_the_end()
    fail(error)


def _wait_for_the_end() -> None:
    """Give the launcher time to end this rank after rank 0 has failed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_LAUNCHER_ENDS_RANKS_S)


def is_set_up() -> bool:
    """Return whether this process has the groups of a run: `shut_down` destroys them."""
    return parallel_state.is_initialized()


def shut_down(*, has_failed: bool = False) -> None:
    """Clear the global state and destroy the process groups, before the interpreter exits.

    ``has_failed``: an exception ends this process, and other ranks may be in collectives that it
    will not join.  NCCL destroys a group only after its pending collectives, so groups are aborted.

    CUDA graphs are released first: NCCL does not destroy a group while a graph holds a collective
    of that group.  So are the hooks of parameters: through torch's C++ objects, which the garbage
    collector does not see, they would keep the model and its process groups alive.
    """
    run = global_vars.current_run()
    chunks = run.model_chunks if isinstance(run, ModelRun) else []
    for chunk in chunks:
        for param in chunk.parameters():
            for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
                if hooks:
                    hooks.clear()
    for graphs in (g for chunk in chunks for g in graphs_of(chunk)):
        graphs.release()
    if isinstance(run, TrainingRun) and run.step_graph is not None:
        run.step_graph.release()
    global_vars.set_run(None)
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        if has_failed and dist.get_backend() == dist.Backend.NCCL:
            distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
