"""Configuration of model parallelism: sizes, pipeline schedule and communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from megatron.core.config import flag_messages
from megatron.core.config.option import library_field, option
from megatron.core.config.rule import CheckedConfig, first_of, rules

_training = partial(option, group="training")
_distributed = partial(option, group="distributed")
_moe = partial(option, group="moe")
_OF_TE = "it selects a path of Transformer Engine; results do not depend on it"
_OWN_CHOICE = "this version makes this choice itself; results do not depend on it"
_OF_WRAPPER = "the data-parallel wrapper starts its reductions and gathers itself"
COMM_TYPES = ("p2p", "a2a", "allgather", "a2a+p2p")  # of context parallelism


@dataclass(kw_only=True)
class _LibraryFields(CheckedConfig):
    """Fields of Megatron Core that no flag sets."""

    virtual_pipeline_model_parallel_size: int | None = None
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    pipeline_dtype: torch.dtype | None = None
    # `get_forward_backward_func` uses these four, if its caller passes no hooks.
    timers: Any = None
    barrier_with_L1_time: bool = True
    grad_scale_func: Callable[..., Any] | None = None
    finalize_model_grads_func: Callable[..., Any] | None = None
    variable_seq_lengths: bool = False

    no_sync_func: Any = library_field(None, _OF_WRAPPER)
    grad_sync_func: Any = library_field(None, _OF_WRAPPER)
    param_sync_func: Any = library_field(None, _OF_WRAPPER)
    enable_autocast: bool = library_field(
        False, "use bf16 or fp16 instead of autocast", refused=True
    )
    autocast_dtype: torch.dtype | None = library_field(None, "it only adjusts enable_autocast")
    num_microbatches_with_partial_activation_checkpoints: int | None = library_field(
        None, "recomputation covers all micro-batches; results do not depend on it"
    )
    moe_extended_tp: bool = library_field(False, "use expert_tensor_parallel_size", refused=True)
    use_te_rng_tracker: bool = library_field(False, _OF_TE)
    tp_comm_atomic_ag: bool = library_field(False, _OF_TE)
    tp_comm_atomic_rs: bool = library_field(False, _OF_TE)
    tp_comm_overlap_disable_qkv: bool = library_field(False, _OF_TE)
    tp_comm_overlap_disable_fc1: bool = library_field(False, _OF_TE)
    batch_p2p_comm: bool = library_field(True, _OWN_CHOICE)
    batch_p2p_sync: bool = library_field(True, _OWN_CHOICE)
    deallocate_pipeline_outputs: bool = library_field(False, _OWN_CHOICE)
    _cpu_offloading_context: Any = library_field(None, _OWN_CHOICE)
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = library_field(True, "cpu_offloading does not offload weights")
    cpu_offloading_double_buffering: bool = library_field(False, _OWN_CHOICE)


@dataclass(kw_only=True)
class ModelParallelConfig(_LibraryFields):
    """Configuration of model parallelism: sizes, pipeline schedule and communication."""

    clone_scatter_output_in_embedding: bool = _training(
        True,
        "Do not clone the scattered embedding output of sequence parallelism.",
        ignored="the slice never keeps the complete tensor in memory",
    )
    tp_comm_overlap: bool = _training(
        False,
        "Run GEMMs fused with all-gathers and reduce-scatters of sequence parallelism: over the "
        "symmetric memory of the GPUs of a tensor-parallel group, or with Transformer Engine over "
        "its user buffers.",
    )
    tp_comm_overlap_cfg: str | None = _training(
        None,
        "YAML file with settings of Transformer Engine's user buffers (--tp-comm-overlap): a "
        "mapping from names such as qkv_fprop to method, num_sm, num_splits and others.",
    )
    tp_comm_overlap_ag: bool = _training(
        True, "Exclude all-gathers from --tp-comm-overlap.", flag="--disable-tp-comm-overlap-ag"
    )
    tp_comm_overlap_rs: bool = _training(
        True, "Exclude reduce-scatters from --tp-comm-overlap.", flag="--disable-tp-comm-overlap-rs"
    )
    tp_comm_overlap_rs_dgrad: bool = _training(
        False, "Overlap the reduce-scatter of input gradients too."
    )
    tp_comm_bulk_dgrad: bool = _training(
        True,
        "Exclude the all-gather during input gradients from Transformer Engine's user buffers.",
        flag="--disable-tp-comm-bulk-dgrad",
    )
    tp_comm_bulk_wgrad: bool = _training(
        True,
        "Exclude the reduce-scatter during weight gradients from Transformer Engine's user "
        "buffers.",
        flag="--disable-tp-comm-bulk-wgrad",
    )
    tp_comm_bootstrap_backend: str = _training(
        "nccl",
        "Backend of the process groups that set up Transformer Engine's user buffers.",
        choices=("nccl", "mpi", "gloo"),
    )
    use_cpu_initialization: bool | None = _training(
        None,
        "Initialize weights on the CPU.",
        ignored="initial weights depend on seed, name and index alone, on any device",
    )
    deterministic_mode: bool = _training(
        False, "Use deterministic operations only, so that repeated runs are bitwise identical."
    )
    async_tensor_model_parallel_allreduce: bool = _training(
        False,
        "Do not overlap the all-reduce of input gradients with weight gradients.",
        ignored=flag_messages.OLD_SPELLING,
        default=True,
    )
    sequence_parallel: bool = _training(
        False,
        "Shard hidden states along the sequence over tensor-parallel ranks, outside of the GEMMs.",
    )
    gradient_accumulation_fusion: bool = _training(
        False,
        "Do not accumulate weight gradients into the gradient buffer inside the GEMM.",
        default=True,
    )
    tp_comm_split_ag: bool = _training(
        True, "Alias of --disable-tp-comm-overlap-ag.", flag="--disable-tp-comm-split-ag"
    )
    tp_comm_split_rs: bool = _training(
        True, "Alias of --disable-tp-comm-overlap-rs.", flag="--disable-tp-comm-split-rs"
    )
    pipeline_model_parallel_comm_backend: str | None = _training(
        None,
        "Backend of pipeline communication.",
        choices=("nccl", "ucc"),
        ignored="stages communicate through --distributed-backend, like all groups",
    )
    cpu_offloading: bool = _training(
        False,
        "Offload the activations of the first --cpu-offloading-num-layers layers to host "
        "memory until backward.",
    )
    cpu_offloading_num_layers: int = _training(
        0, "Number of layers per stage that --cpu-offloading offloads."
    )
    cross_entropy_loss_fusion: bool = _training(
        False, "Use a fused cross-entropy loss.", ignored=flag_messages.NO_KERNEL
    )
    cross_entropy_fusion_impl: str = _training(
        "native",
        "Implementation of --cross-entropy-loss-fusion.",
        choices=("native", "te"),
        ignored=flag_messages.NO_KERNEL,
    )
    perform_initialization: bool = option(
        True,
        "Do not initialize weights, because a checkpoint replaces all of them.",
        group="checkpointing",
        flag="--no-initialization",
    )
    tensor_model_parallel_size: int = _distributed(
        1, "Tensor-parallel size: ranks that each weight matrix is sharded over.", at_least=1
    )
    pipeline_model_parallel_size: int = _distributed(
        1, "Pipeline-parallel size: number of pipeline stages.", at_least=1
    )
    encoder_pipeline_model_parallel_size: int = _distributed(
        0,
        "Number of pipeline stages, counted from the first, for T5's encoder; the others "
        "hold its decoder.",
    )
    num_layers_in_first_pipeline_stage: int | None = _distributed(
        None,
        "Number of layers on the first pipeline rank.",
        flag="--decoder-first-pipeline-num-layers",
        dest="decoder_first_pipeline_num_layers",
    )
    num_layers_in_last_pipeline_stage: int | None = _distributed(
        None,
        "Number of layers on the last pipeline rank.",
        flag="--decoder-last-pipeline-num-layers",
        dest="decoder_last_pipeline_num_layers",
    )
    pipeline_model_parallel_layout: Any = _distributed(
        None,
        "Layers of each pipeline stage, such as Et*3|t*4|t*3L: E embedding, t transformer "
        "layer, m MTP layer, L loss.",
        parse=str,
    )
    pipeline_split: str = _distributed(
        "even",
        "Split of layers over pipeline stages: even, or auto, which balances the estimated "
        "time of embedding, layers and loss.",
        choices=("even", "auto"),
    )
    pipeline_schedule: str | None = _distributed(
        None,
        "Pipeline schedule; 1f1b, or interleaved with virtual stages, if not given. zb-h1 "
        "and zb-v fill the pipeline bubble with weight gradients.",
        choices=("1f1b", "interleaved", "zb-h1", "zb-v"),
    )
    num_layers_per_virtual_pipeline_stage: int | None = _distributed(
        None, "Layers per virtual pipeline stage; excludes --num-virtual-stages-per-pipeline-rank."
    )
    num_virtual_stages_per_pipeline_rank: int | None = _distributed(
        None,
        "Virtual pipeline stages per pipeline rank; excludes "
        "--num-layers-per-virtual-pipeline-stage.",
    )
    microbatch_group_size_per_vp_stage: int | None = _distributed(
        None,
        "Consecutive micro-batches per virtual stage; the pipeline-parallel size if not given.",
        flag="--microbatch-group-size-per-virtual-pipeline-stage",
    )
    overlap_p2p_comm: bool = _distributed(
        False,
        "Do not overlap pipeline send/receive with computation.",
        flag="--no-overlap-p2p-communication",
        default=True,
    )
    overlap_p2p_comm_warmup_flush: bool = _distributed(
        False,
        "Also overlap pipeline send/receive in the warmup and flush phases.",
        flag="--overlap-p2p-communication-warmup-flush",
    )
    defer_embedding_wgrad_compute: bool = _distributed(
        False,
        "Defer the output layer's weight gradient to the pipeline flush; excludes "
        "--loss-chunk-size.",
    )
    wgrad_deferral_limit: int = _distributed(
        0, "Maximum number of micro-batches whose weight gradient is deferred; 0 is no limit."
    )
    scatter_gather_tensors_in_pipeline: bool = _distributed(
        True,
        "Do not scatter tensors over tensor-parallel ranks for pipeline send/receive.",
        ignored=flag_messages.OLD_SPELLING,
    )
    use_ring_exchange_p2p: bool = _distributed(
        False,
        "Use a custom ring exchange between stages.",
        ignored="no released PyTorch has this operation; stages use batched send and receive",
    )
    account_for_embedding_in_pipeline_split: bool = _distributed(
        False, "Count the embedding as one layer of the pipeline split."
    )
    account_for_loss_in_pipeline_split: bool = _distributed(
        False, "Count the loss as one layer of the pipeline split."
    )
    context_parallel_size: int = _distributed(
        1, "Context-parallel size: ranks that each sequence is sharded over.", at_least=1
    )
    cp_comm_type: str | Sequence[str] | None = _distributed(
        None,
        "Communication of context parallelism: p2p (ring), a2a (all-to-all), allgather (also "
        "all_gather) or a2a+p2p; one for all layers or one per layer.",
        nargs="+",
        default=("p2p",),
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = _distributed(
        None,
        "All-to-all size and ring size of --cp-comm-type a2a+p2p; their product is "
        "--context-parallel-size.",
        nargs="+",
    )
    hybrid_context_parallel: bool = _distributed(
        False,
        "Share each row of --sft --no-sft-packing over as many data-parallel ranks as it needs (a "
        "power of two), and pack short rows: ranks get balanced work, whatever the lengths.",
    )
    max_seqlen_per_dp_cp_rank: int | None = _distributed(
        None,
        "Most tokens of a micro-batch on a rank with --hybrid-context-parallel.",
        at_least=1,
    )
    expert_model_parallel_size: int = _moe(
        1,
        "Expert-parallel size: ranks that the experts of a layer are distributed over.",
        at_least=1,
    )
    expert_tensor_parallel_size: int | None = _moe(
        None, "Tensor-parallel size of experts; --tensor-model-parallel-size if not given."
    )
    overlap_moe_expert_parallel_comm: bool = _moe(
        False,
        "Overlap the MoE all-to-all of one micro-batch with computation of another; needs "
        "--expert-model-parallel-size above 1.",
    )
    delay_wgrad_compute: bool = _moe(
        False,
        "Compute weight gradients separately from input gradients, for more overlap; needs "
        "--overlap-moe-expert-parallel-comm.",
    )

    RULES = rules(
        {
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes: the all-to-all "
            "size and the ring size, whose product is {context_parallel_size}": lambda c: (
                c.hierarchical_context_parallel_sizes is None
                and c.context_parallel_size > 1
                and "a2a+p2p" in c.cp_comm_types
            ),
            f"--cp-comm-type {{found}}: use one of {', '.join(COMM_TYPES)}": lambda c: [
                name for name in dict.fromkeys(c.cp_comm_types) if name not in COMM_TYPES
            ],
            # with fewer, the first rank would wait for its own output
            "{--microbatch-group-size-per-virtual-pipeline-stage} is less than "
            "{--pipeline-model-parallel-size}: "
            "give {pipeline_model_parallel_size} or more": lambda c: (
                c.virtual_pipeline_model_parallel_size is not None
                and c.microbatch_group_size_per_vp_stage < c.pipeline_model_parallel_size
            ),
        },
        first_of(
            {
                "--hierarchical-context-parallel-sizes {found}: give two sizes, of the all-to-all "
                "and of the ring": lambda c: (
                    len(sizes := c.hierarchical_context_parallel_sizes or (1, 1)) != 2
                    and " x ".join(map(str, sizes))
                ),
                "--hierarchical-context-parallel-sizes {found} differs from "
                "{--context-parallel-size}: give two sizes whose "
                "product is {context_parallel_size}": lambda c: (
                    (sizes := c.hierarchical_context_parallel_sizes) is not None
                    and prod(sizes) != c.context_parallel_size
                    and f"{' x '.join(map(str, sizes))} = {prod(sizes)}"
                ),
            },
        ),
    )
    LIBRARY_RULES = rules(
        {
            "--sequence-parallel needs --tensor-model-parallel-size above 1": lambda c: (
                c.sequence_parallel and c.tensor_model_parallel_size < 2
            ),
            "--defer-embedding-wgrad-compute needs --pipeline-model-parallel-size above 1": (
                lambda c: c.defer_embedding_wgrad_compute and c.pipeline_model_parallel_size < 2
            ),
            "--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm": None,
        },
    )

    @property
    def cp_comm_types(self) -> tuple[str, ...]:
        """Communication of context parallelism: one for all layers or one per layer."""
        types = as_tuple(self.cp_comm_type or "p2p")
        return tuple("allgather" if name == "all_gather" else name for name in types)

    def derive(self) -> None:
        """Fill in values that depend on other fields."""
        super().derive()
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size
        if self.autocast_dtype is None:
            self.autocast_dtype = self.params_dtype
        if self.microbatch_group_size_per_vp_stage is None:
            self.microbatch_group_size_per_vp_stage = self.pipeline_model_parallel_size


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return ``value`` as a tuple, which projects may set to one value or to a list."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)
