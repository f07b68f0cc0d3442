"""Build the parts of a run: groups, context with tokenizer, model, optimizer, scheduler."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import nn

from megatron.core import device, distributed
from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.diagnostics.timers import Timers
from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.distributed.distributed_data_parallel_config import (
    is_fully_sharded,
    num_instances,
)
from megatron.core.extensions.transformer_engine import use_user_buffers
from megatron.core.inference.fast_linear import compute_as_engine
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.param_groups import (
    ParamCondition,
    is_of_head,
    no_weight_decay_on_embeddings,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, schedule_lengths
from megatron.core.parallel.collectives import all_gather_json, largest_of_ranks
from megatron.core.parallel.communicators import Communicators
from megatron.core.parallel.process_groups_config import (
    ProcessGroupCollection,
    create_process_groups,
    make_grids,
)
from megatron.core.parallel.rank_grid import RankGrid
from megatron.core.params.param_init import initialize_parameters
from megatron.core.peft.draft_heads import attach_draft_heads
from megatron.core.peft.lora import attach_adapters, check_targets, names_in
from megatron.core.quantization.quantizer import attach_quantizers
from megatron.core.tensor_parallel.overlap import overlap_layers
from megatron.core.tensor_parallel.quantized_linear import quantizers_of
from megatron.core.transformer.module import Float16Module
from megatron.training.config.run import RunConfig
from megatron.training.estimates.automatic_settings import (
    chunk_line,
    resolve_loss_chunks,
    resolve_pipeline_split,
)
from megatron.training.models.attention_request import documents_are_bounds
from megatron.training.models.registry import build_model_stage, model_kind_of
from megatron.training.process.exit_report import in_phase
from megatron.training.process.rank_print import is_short, print_detail, print_rank_0, ranks_here
from megatron.training.runtime.context import RunContext
from megatron.training.tokenizer import (
    TokenizerSpec,
    create_tokenizer,
    pad_vocab_size,
    padding_message,
)
from megatron.training.tokenizer.fingerprint import check_vocab

ModelProvider = Callable[..., nn.Module]
_BLACKWELL = (10, 0)  # compute capability
_COUNTED_TOKENS = 1 << 24  # of each prefix of --export-draft-vocab-data


def build_context(
    config: RunConfig, groups: ProcessGroupCollection, *, started_at_s: float
) -> RunContext:
    """Build the tokenizer; resolve the padded vocabulary size and the settings that need it.

    Collective over all ranks.
    """
    batches = NumMicroBatchesCalculator.from_config(config.training, config.data_parallel_size)
    train_iters = number_of_train_iters(config, batches)
    print_detail(f"> building {config.tokenizer.tokenizer_type} tokenizer ...")
    tokenizer = create_tokenizer(TokenizerSpec.of(config.tokenizer))
    padded_vocab_size = config.tokenizer.padded_vocab_size
    tensor_size = config.model.tensor_model_parallel_size
    if padded_vocab_size is not None:
        check_vocab(tokenizer, padded_vocab_size, tensor_size)
    else:
        divisor = config.language_model.make_vocab_size_divisible_by
        padded_vocab_size = pad_vocab_size(tokenizer.vocab_size, divisor, tensor_size)
        print_detail(padding_message(tokenizer.vocab_size, padded_vocab_size))
    if config.model.pipeline_split == "auto":
        config = resolve_pipeline_split(config, padded_vocab_size)
        layout = config.model.pipeline_model_parallel_layout
        print_rank_0(f" > --pipeline-split auto: --pipeline-model-parallel-layout '{layout}'")
    # Ranks that compute a loss together must split it into the same chunks: the least memory.
    (memory,) = largest_of_ranks([-device.total_memory(ranks_here())])
    config = resolve_loss_chunks(config, padded_vocab_size, -int(memory))
    if (line := chunk_line(config, padded_vocab_size)) is not None:
        print_rank_0(line)
    return RunContext(
        config=config,
        groups=groups,
        timers=Timers(
            config.logging.timing_log_level,
            config.logging.timing_log_option,
            prints=config.logging.timing_log_level > 0 or not is_short(),
        ),
        batches=batches,
        started_at_s=started_at_s,
        tokenizer=tokenizer,
        padded_vocab_size=padded_vocab_size,
        train_iters=train_iters,
    )


@in_phase("building the model")
@torch.inference_mode(False)  # a script may be inside: it would make parameters without a version
def build_model_chunks(
    run: RunContext, model_provider: ModelProvider, *, wrap: bool = True
) -> list[nn.Module]:
    """Return the model chunks of this rank: on the device, initialized, in the run's precision.

    ``wrap`` adds the data-parallel wrapper and compilation.  With --init-model-with-meta-device
    each rank allocates only its shard of a fully sharded model.  Every rank must call this: the
    wrapper may communicate.  Raise ConfigError if a rank has several virtual stages and
    ``model_provider`` does not take ``vp_stage``.
    """
    ddp = run.config.ddp
    on_meta = wrap and ddp.init_model_with_meta_device and is_fully_sharded(ddp)
    stages = range(len(run.stages))
    chunks = [_build_chunk(run, model_provider, chunk, on_meta=on_meta) for chunk in stages]
    if (recipes := run.config.quantization.recipes) is not None:
        for chunk in chunks:
            rounds_cache = run.config.quantization.export_kv_cache_quant
            attach_quantizers(chunk, recipes, rounds_cache=rounds_cache)
    if run.config.adapters.lora is not None:
        with torch.device("meta") if on_meta else contextlib.nullcontext():
            for chunk in chunks:
                attach_adapters(chunk, run.config.adapters.lora)
    if run.config.adapters.has_heads:
        drafted = _frequent_tokens(run)
        for chunk in chunks:
            attach_draft_heads(chunk, run.config.adapters, drafted)
    if wrap and run.config.model.batch_invariant_mode:
        if run.config.data.reset_attention_mask and not documents_are_bounds(run.config):
            raise ConfigError(
                "--reset-attention-mask and --batch-invariant-mode: the engine's attention has no "
                "mask of documents here; leave one out, or pack conversations with --sft"
            )
        for chunk in chunks:
            compute_as_engine(chunk)
    for chunk in chunks:
        _initialize(run, chunk)
    _print_number_of_parameters(run, chunks)
    chunks = [_wrapped(run, chunk, wrap) for chunk in chunks]
    if run.config.model.tp_comm_overlap and device.is_cuda():  # a CPU has announced it
        _overlap(run, chunks)
    if wrap:
        for model in chunks:
            if run.config.model.uses_graphs:
                assert isinstance(model, DataParallelBase), "_wrapped() made it"
                model.keep_values()
        for quantizer in quantizers_of(chunks):
            quantizer.keeps_transposed = ddp.keep_fp8_transpose_cache
    if on_meta:
        for model in chunks:
            _initialize(run, model)
    return chunks


def _frequent_tokens(run: RunContext) -> torch.Tensor | None:
    """Return ids, in order, of the most frequent tokens of --export-draft-vocab-data.

    None without it.  Raises DataError for a token that is not in the vocabulary.
    """
    settings = run.config.adapters
    counts = np.zeros(run.tokenizer.vocab_size, np.int64)
    for prefix in settings.export_draft_vocab_data if settings.has_eagle else ():
        data = IndexedDataset(prefix)
        ends = data.sequence_lengths.cumsum(dtype=np.int64)
        tokens = np.concatenate(data[: int(np.searchsorted(ends, _COUNTED_TOKENS)) + 1])
        found = np.bincount(tokens, minlength=len(counts))
        if len(found) > len(counts):
            raise DataError(
                f"--export-draft-vocab-data {prefix} has the token {len(found) - 1}, and the "
                f"tokenizer {len(counts)} tokens: give data of the same tokenizer"
            )
        counts += found
    if not counts.any() or not settings.export_draft_vocab_size:
        return None
    order = np.argsort(-counts, kind="stable")[: settings.export_draft_vocab_size]
    return torch.from_numpy(np.sort(order))


def build_stage(run: RunContext, *, vp_stage: int | None = None, **arguments: Any) -> Any:
    """Build one pipeline stage for this rank.

    ``pre_process`` makes it the first stage (with embedding), ``post_process`` the last (with
    output layer); see `ModelImplementation`.
    """
    return build_model_stage(
        run.config,
        vocab_size=run.tokenizer.vocab_size,
        padded_vocab_size=run.padded_vocab_size,
        groups=run.groups,
        vp_stage=vp_stage,
        **arguments,
    )


def _overlap(run: RunContext, chunks: list[nn.Module]) -> None:
    """Let GEMMs overlap with tensor-parallel collectives.  Collective over all ranks."""
    model = run.config.model
    training = run.config.training
    of_engine: str | None = "encoder and decoder have other lengths than one of its buffers"
    if not model_kind_of(run.config).has_encoder:
        tokens = run.config.data.seq_length * training.micro_batch_size
        tokens //= model.context_parallel_size
        of_engine = use_user_buffers(chunks, model, run.groups.tp, num_tokens=tokens)
    found = [overlap_layers(x, run.groups.tp, model) for x in chunks]
    reasons = [reason for overlapped in found for reason in overlapped.reasons]
    if of_engine is not None and not any(overlapped.num_layers for overlapped in found):
        why = "; ".join(dict.fromkeys([of_engine, *reasons]))
        print_rank_0(f"WARNING: --tp-comm-overlap is without effect: {why}")
        return
    if of_engine is not None and reasons:
        why = "; ".join(dict.fromkeys(reasons))
        print_rank_0(f"WARNING: --tp-comm-overlap is without effect on some layers: {why}")
    if of_engine is not None and model.tp_comm_overlap_cfg is not None:
        print_rank_0(f"WARNING: --tp-comm-overlap-cfg is without effect: {of_engine}")


def _initialize(run: RunContext, model: nn.Module) -> None:
    """Initialize the parameters that are allocated; those on the meta device are skipped."""
    config = run.config
    initialize_parameters(model, config.training.seed, random=config.model.perform_initialization)


def _build_chunk(
    run: RunContext, model_provider: ModelProvider, chunk: int, *, on_meta: bool
) -> nn.Module:
    stage = run.stages[chunk]
    arguments: dict[str, Any] = {
        "pre_process": stage == 0,
        "post_process": stage == run.placement.num_stages - 1,
    }
    takes_stage = "vp_stage" in inspect.signature(model_provider).parameters
    if takes_stage:
        arguments["vp_stage"] = chunk if len(run.stages) > 1 else None
    elif len(run.stages) > 1:
        raise ConfigError(
            f"a pipeline rank with {len(run.stages)} virtual stages needs a model provider that "
            "takes vp_stage: add it and pass it to the model, or use one virtual stage"
        )
    with torch.device("meta") if on_meta else contextlib.nullcontext():
        model = model_provider(**arguments)
    tensors = itertools.chain(model.parameters(), model.buffers())
    if on_meta or all(tensor.device == device.current() for tensor in tensors):
        return model  # to() replaces parameters, and a planned one has references
    return model.to(device.current())


def _wrapped(run: RunContext, model: nn.Module, with_data_parallelism: bool) -> nn.Module:
    """Return ``model`` in the run's precision, optionally in the data-parallel wrapper."""
    config = run.config
    model_config = vars(model).get("config", config.model)  # a user's provider may have changed it
    if config.model.fp16 or config.model.bf16:
        model = Float16Module(model_config, model)
    if with_data_parallelism:
        wrapper = (
            distributed.FullyShardedDataParallel
            if is_fully_sharded(config.ddp)
            else distributed.DistributedDataParallel
        )
        ddp = replace(
            config.ddp, grad_reduce_in_fp32=config.ddp.grad_reduce_in_fp32 and _sums_gradients(run)
        )
        wrapped = wrapper(
            config=model_config, ddp_config=ddp, module=model, pg_collection=run.groups
        )
        if config.training.data_parallel_random_init:
            wrapped.broadcast_params()
        return wrapped
    return model


def _sums_gradients(run: RunContext) -> bool:
    """Return whether fp32 gradients can differ from the 16-bit gradients of one backward pass.

    Without accumulation, reduction or scaling they cannot: fp32 would store the same 16-bit values.
    On a GPU they can, because the GEMM writes weight gradients in fp32.
    """
    config, training = run.config, run.config.training
    return (
        config.world_size > 1
        or device.is_cuda()
        or training.global_batch_size != training.micro_batch_size
        or config.model.calculate_per_token_loss
        or config.model.mtp_num_layers is not None
        or config.adapters.has_heads
    )


def check_adapter_targets(run: RunContext, chunks: Sequence[nn.Module]) -> None:
    """Raise ConfigError if one of --lora-target-modules is no layer of the model.

    Collective over all ranks, which have other layers.
    """
    config = run.config.adapters.lora
    if config is None:
        return
    mine = [names_in(chunk, config.targets) for chunk in chunks]
    every = [pair for of_rank in all_gather_json(mine, run.groups.world) for pair in of_rank]
    check_targets(config.targets, every)


@in_phase("building the optimizer")
def build_optimizer(
    run: RunContext,
    chunks: Sequence[nn.Module],
    *,
    no_weight_decay_cond: ParamCondition | None = None,
    scale_lr_cond: ParamCondition | None = None,
    lr_mult: float = 1.0,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Return the optimizer of ``chunks`` and its scheduler.

    `make_param_groups` defines the two conditions and ``lr_mult``.
    """
    own_embedding_std = run.config.asked.get("embedding_init_method_std") is not None
    if no_weight_decay_cond is None and own_embedding_std:
        no_weight_decay_cond = no_weight_decay_on_embeddings
    head_lr_mult = run.config.scheduler.head_lr_mult
    if lr_mult == 1.0 and head_lr_mult != 1.0:
        lr_mult, scale_lr_cond = head_lr_mult, scale_lr_cond or is_of_head
    optimizer = get_megatron_optimizer(
        run.config.optimizer,
        chunks,
        no_weight_decay_cond=no_weight_decay_cond,
        scale_lr_cond=scale_lr_cond,
        lr_mult=lr_mult,
        pg_collection=run.groups,
    )
    optimizer.timers = run.timers
    return optimizer, build_scheduler(run, optimizer)


def _print_number_of_parameters(run: RunContext, chunks: Sequence[nn.Module]) -> None:
    if run.groups.dp.rank() == 0 and run.groups.cp.rank() == 0:
        number = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        tp, pp = run.groups.tp.rank(), run.groups.pp.rank()
        print(
            f" > number of parameters on (tensor, pipeline) model parallel rank "
            f"({tp}, {pp}): {number}",
            flush=True,
        )


def grids_of(config: RunConfig) -> tuple[RankGrid, RankGrid]:
    """Return the rank grids (rank order and group sizes) for dense and for expert layers."""
    m = config.model
    return make_grids(
        config.world_size,
        tp=m.tensor_model_parallel_size,
        pp=m.pipeline_model_parallel_size,
        cp=m.context_parallel_size,
        ep=m.expert_model_parallel_size,
        expt_tp=m.expert_tensor_parallel_size,
        order="tp-cp-ep-pp-dp" if config.distributed.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )


def create_groups(config: RunConfig, *, only_mine: bool = False) -> ProcessGroupCollection:
    """Create all process groups of the run.  Collective over all ranks.

    With ``only_mine`` only the groups of this rank are created, without communication; this needs a
    fake process group.
    """
    dense, expert = grids_of(config)
    return create_process_groups(
        dense,
        expert,
        communicators=Communicators.from_flags(
            timedelta(minutes=config.distributed.distributed_timeout_minutes),
            config.distributed.nccl_communicator_config_path,
            high_priority_groups(config),
            warn=lambda warning: print_rank_0(f"WARNING: {warning}"),
        ),
        context_levels=config.model.hierarchical_context_parallel_sizes,
        num_distributed_optimizer_instances=num_instances(config.ddp),
        encoder_stages=config.model.encoder_pipeline_model_parallel_size,
        only_mine=only_mine,
    )


def high_priority_groups(config: RunConfig) -> tuple[str, ...]:
    """Return the groups that use high-priority streams: those of the flag, and by default others.

    FSDP's all-gathers run beside the kernels of the previous layer and must not queue after them.
    Without FSDP the same holds for tensor- and context-parallel collectives, which overlap with
    GEMMs, unless their kernels start in the order of their launch.
    """
    model = config.model
    groups = config.distributed.high_priority_stream_groups
    if is_fully_sharded(config.ddp):
        groups += ("dp_cp", "ep_dp") if model.expert_model_parallel_size > 1 else ("dp_cp",)
    elif not (
        # Blackwell starts the kernels of different streams out of order even then.
        os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        and device.capability(device.current()) < _BLACKWELL
    ):
        groups += ("tp",) if model.tensor_model_parallel_size > 1 else ()
        groups += ("cp", "cp_inner", "cp_outer") if model.context_parallel_size > 1 else ()
    return tuple(dict.fromkeys(groups))


def number_of_train_iters(config: RunConfig, batches: NumMicroBatchesCalculator) -> int:
    """Return the number of steps; a sample-based run drops its last partial batch."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    if config.training.train_samples is None:
        return 0
    iters = batches.train_iters(config.training.train_samples)
    print_rank_0(f"setting training iterations to {iters}")
    return iters


def recount_train_iters(run: RunContext) -> None:
    """Recompute ``run.train_iters`` after loading, so that a resumed run reads all its samples.

    The number of remaining steps differs if the batch size has changed since the checkpoint.
    """
    samples, state = run.config.training.train_samples, run.state
    if run.config.training.train_iters is None and samples is not None:
        left = run.batches.train_iters(samples, state.consumed_train_samples)
        run.train_iters = state.iteration + left
    elif run.samples_of_epochs is not None:
        unread = max(0, run.samples_of_epochs - state.consumed_train_samples)
        run.train_iters = state.iteration + -(-unread // run.batches.full_global_batch_size)


def build_scheduler(run: RunContext, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return the learning rate and weight decay scheduler of ``optimizer``.

    Raise ConfigError without --lr.
    """
    asked = run.config.optimizer
    scheduler = run.config.scheduler
    if asked.lr is None:
        raise ConfigError("--lr is missing: give the peak learning rate")
    lengths = schedule_lengths(
        scheduler,
        train_iters=run.config.training.train_iters,
        train_samples=run.config.training.train_samples,
        global_batch_size=run.batches.global_batch_size_wanted,
    )
    start, end = scheduler.start_weight_decay, scheduler.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=scheduler.lr_warmup_init,
        max_lr=asked.lr,
        min_lr=asked.min_lr or 0.0,
        lr_decay_style=scheduler.lr_decay_style,
        start_wd=asked.weight_decay if start is None else start,
        end_wd=asked.weight_decay if end is None else end,
        wd_incr_style=scheduler.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=scheduler.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=scheduler.override_opt_param_scheduler,
        lr_wsd_decay_style=scheduler.lr_wsd_decay_style,
        **lengths,
    )
