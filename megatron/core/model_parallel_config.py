"""How the world is cut up, and how its parts talk."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class ModelParallelConfig:
    """How the world is cut up, and how its parts talk."""

    clone_scatter_output_in_embedding: bool = option(True, "", group="training")
    tp_comm_overlap: bool = option(False, "", group="training")
    tp_comm_overlap_cfg: str | None = option(None, "", group="training")
    tp_comm_overlap_ag: bool = option(
        True,
        "",
        group="training",
        flag="--disable-tp-comm-overlap-ag",
    )
    tp_comm_overlap_rs: bool = option(
        True,
        "",
        group="training",
        flag="--disable-tp-comm-overlap-rs",
    )
    tp_comm_overlap_rs_dgrad: bool = option(False, "", group="training")
    tp_comm_bulk_dgrad: bool = option(
        True,
        "",
        group="training",
        flag="--disable-tp-comm-bulk-dgrad",
    )
    tp_comm_bulk_wgrad: bool = option(
        True,
        "",
        group="training",
        flag="--disable-tp-comm-bulk-wgrad",
    )
    tp_comm_bootstrap_backend: str = option(
        "nccl",
        "",
        group="training",
        choices=("nccl", "mpi", "gloo"),
    )
    use_cpu_initialization: bool | None = option(None, "", group="training")
    deterministic_mode: bool = option(False, "", group="training")
    async_tensor_model_parallel_allreduce: bool = option(True, "", group="training")
    sequence_parallel: bool = option(False, "", group="training")
    gradient_accumulation_fusion: bool = option(True, "", group="training")
    tp_comm_split_ag: bool = option(True, "", group="training", flag="--disable-tp-comm-split-ag")
    tp_comm_split_rs: bool = option(True, "", group="training", flag="--disable-tp-comm-split-rs")
    pipeline_model_parallel_comm_backend: str | None = option(
        None,
        "",
        group="training",
        choices=("nccl", "ucc"),
    )
    perform_initialization: bool = option(
        True,
        "",
        group="checkpointing",
        flag="--no-initialization",
    )
    tensor_model_parallel_size: int = option(1, "", group="distributed")
    pipeline_model_parallel_size: int = option(1, "", group="distributed")
    decoder_first_pipeline_num_layers: int | None = option(None, "", group="distributed")
    decoder_last_pipeline_num_layers: int | None = option(None, "", group="distributed")
    pipeline_model_parallel_layout: str | None = option(None, "", group="distributed")
    num_layers_per_virtual_pipeline_stage: int | None = option(None, "", group="distributed")
    num_virtual_stages_per_pipeline_rank: int | None = option(None, "", group="distributed")
    microbatch_group_size_per_vp_stage: int | None = option(
        None,
        "",
        group="distributed",
        flag="--microbatch-group-size-per-virtual-pipeline-stage",
    )
    overlap_p2p_comm: bool = option(
        True,
        "",
        group="distributed",
        flag="--no-overlap-p2p-communication",
    )
    overlap_p2p_comm_warmup_flush: bool = option(
        False,
        "",
        group="distributed",
        flag="--overlap-p2p-communication-warmup-flush",
    )
    defer_embedding_wgrad_compute: bool = option(False, "", group="distributed")
    wgrad_deferral_limit: int = option(0, "", group="distributed")
    scatter_gather_tensors_in_pipeline: bool = option(True, "", group="distributed")
    use_ring_exchange_p2p: bool = option(False, "", group="distributed")
    account_for_embedding_in_pipeline_split: bool = option(False, "", group="distributed")
    account_for_loss_in_pipeline_split: bool = option(False, "", group="distributed")
    context_parallel_size: int = option(1, "", group="distributed")
    cp_comm_type: tuple[str, ...] = option(("p2p",), "", group="distributed", nargs="+")
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = option(
        None,
        "",
        group="distributed",
        nargs="+",
    )
    expert_model_parallel_size: int = option(1, "", group="moe")
    expert_tensor_parallel_size: int | None = option(None, "", group="moe")
    overlap_moe_expert_parallel_comm: bool = option(False, "", group="moe")
    delay_wgrad_compute: bool = option(False, "", group="moe")
