"""Configuration of model parallelism: sizes, pipeline schedule and communication."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option

_training = partial(option, group="training")
_distributed = partial(option, group="distributed")
_moe = partial(option, group="moe")


@dataclass(frozen=True, kw_only=True)
class ModelParallelConfig:
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
        True,
        "Do not overlap the all-reduce of input gradients with weight gradients.",
        ignored=flag_messages.OLD_SPELLING,
    )
    sequence_parallel: bool = _training(
        False,
        "Shard hidden states along the sequence over tensor-parallel ranks, outside of the GEMMs.",
    )
    gradient_accumulation_fusion: bool = _training(
        True,
        "Do not accumulate weight gradients into the gradient buffer inside the GEMM.",
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
    decoder_first_pipeline_num_layers: int | None = _distributed(
        None, "Number of layers on the first pipeline rank."
    )
    decoder_last_pipeline_num_layers: int | None = _distributed(
        None, "Number of layers on the last pipeline rank."
    )
    pipeline_model_parallel_layout: str | None = _distributed(
        None,
        "Layers of each pipeline stage, such as Et*3|t*4|t*3L: E embedding, t transformer "
        "layer, m MTP layer, L loss.",
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
        True,
        "Do not overlap pipeline send/receive with computation.",
        flag="--no-overlap-p2p-communication",
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
    cp_comm_type: tuple[str, ...] = _distributed(
        ("p2p",),
        "Communication of context parallelism: p2p (ring), a2a (all-to-all), allgather (also "
        "all_gather) or a2a+p2p; one for all layers or one per layer.",
        nargs="+",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = _distributed(
        None,
        "All-to-all size and ring size of --cp-comm-type a2a+p2p; their product is "
        "--context-parallel-size.",
        nargs="+",
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
