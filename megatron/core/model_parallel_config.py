"""How the world is cut up, and how its parts talk."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class ModelParallelConfig:
    """How the world is cut up, and how its parts talk."""

    clone_scatter_output_in_embedding: bool = option(
        True,
        "Keep the whole embedding output alive behind the slice of sequence parallelism.",
        group="training",
        ignored="the slice never holds on to the whole tensor here",
    )
    tp_comm_overlap: bool = option(
        False,
        "Overlap tensor-parallel communication with matrix products through Transformer Engine.",
        group="training",
        refused=states.TP_OVERLAP,
    )
    tp_comm_overlap_cfg: str | None = option(
        None,
        "YAML file that tunes --tp-comm-overlap.",
        group="training",
        ignored=states.only_with("--tp-comm-overlap"),
    )
    tp_comm_overlap_ag: bool = option(
        True,
        "Leave all-gathers out of --tp-comm-overlap.",
        group="training",
        flag="--disable-tp-comm-overlap-ag",
        ignored=states.only_with("--tp-comm-overlap"),
    )
    tp_comm_overlap_rs: bool = option(
        True,
        "Leave reduce-scatters out of --tp-comm-overlap.",
        group="training",
        flag="--disable-tp-comm-overlap-rs",
        ignored=states.only_with("--tp-comm-overlap"),
    )
    tp_comm_overlap_rs_dgrad: bool = option(
        False,
        "Overlap the reduce-scatter of input gradients too.",
        group="training",
        ignored=states.only_with("--tp-comm-overlap"),
    )
    tp_comm_bulk_dgrad: bool = option(
        True,
        "Leave the all-gather beside input gradients out of --tp-comm-overlap.",
        group="training",
        flag="--disable-tp-comm-bulk-dgrad",
        ignored=states.only_with("--tp-comm-overlap"),
    )
    tp_comm_bulk_wgrad: bool = option(
        True,
        "Leave the reduce-scatter beside weight gradients out of --tp-comm-overlap.",
        group="training",
        flag="--disable-tp-comm-bulk-wgrad",
        ignored=states.only_with("--tp-comm-overlap"),
    )
    tp_comm_bootstrap_backend: str = option(
        "nccl",
        "Collective library that sets --tp-comm-overlap up.",
        group="training",
        choices=("nccl", "mpi", "gloo"),
        ignored=states.only_with("--tp-comm-overlap"),
    )
    use_cpu_initialization: bool | None = option(
        None,
        "Draw initial weights in host memory.",
        group="training",
        ignored="initial weights depend on seed, name and index alone, wherever they are drawn",
    )
    deterministic_mode: bool = option(
        False,
        "Use only operations that give the same bits every time.",
        group="training",
    )
    async_tensor_model_parallel_allreduce: bool = option(
        True,
        "Do not overlap the all-reduce of input gradients with weight gradients.",
        group="training",
        ignored=states.OLD_SPELLING,
    )
    sequence_parallel: bool = option(
        False,
        "Cut activations along the sequence over the tensor-parallel ranks outside the "
        "matrix products.",
        group="training",
    )
    gradient_accumulation_fusion: bool = option(
        True,
        "Do not let products of weight gradients be added to the gradient buffers themselves, "
        "where that is the faster way.",
        group="training",
    )
    tp_comm_split_ag: bool = option(
        True,
        "Old spelling of --disable-tp-comm-overlap-ag.",
        group="training",
        flag="--disable-tp-comm-split-ag",
        ignored=states.only_with("--tp-comm-overlap"),
    )
    tp_comm_split_rs: bool = option(
        True,
        "Old spelling of --disable-tp-comm-overlap-rs.",
        group="training",
        flag="--disable-tp-comm-split-rs",
        ignored=states.only_with("--tp-comm-overlap"),
    )
    pipeline_model_parallel_comm_backend: str | None = option(
        None,
        "Collective library between pipeline stages.",
        group="training",
        choices=("nccl", "ucc"),
        ignored="stages talk through the library of all groups, --distributed-backend",
        refused_values={"ucc": "it is not built into PyTorch; drop the flag"},
    )
    perform_initialization: bool = option(
        True,
        "Do not draw initial weights, because a checkpoint replaces them all.",
        group="checkpointing",
        flag="--no-initialization",
    )
    tensor_model_parallel_size: int = option(
        1,
        "Ranks that share each weight matrix.",
        group="distributed",
    )
    pipeline_model_parallel_size: int = option(
        1,
        "Stages that the layers are divided into.",
        group="distributed",
    )
    encoder_pipeline_model_parallel_size: int = option(
        0,
        "How many of the pipeline stages, the first ones, hold the encoder of an encoder-decoder "
        "model; the others hold its decoder.",
        group="distributed",
    )
    decoder_first_pipeline_num_layers: int | None = option(
        None,
        "Layers of the first pipeline stage.",
        group="distributed",
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None,
        "Layers of the last pipeline stage.",
        group="distributed",
    )
    pipeline_model_parallel_layout: str | None = option(
        None,
        "Contents of each pipeline stage, such as Et*3|t*4|t*3L.",
        group="distributed",
    )
    pipeline_split: str = option(
        "even",
        "Layers per pipeline stage: equally many, or (auto) such that embedding, layers and loss "
        "take each stage as equal a time as can be.",
        group="distributed",
        choices=("even", "auto"),
    )
    pipeline_schedule: str | None = option(
        None,
        "Order of work in the pipeline; 1f1b, or interleaved where ranks have virtual stages, if "
        "not given.  zb-h1 and zb-v fill waiting time with weight gradients.",
        group="distributed",
        choices=("1f1b", "interleaved", "zb-h1", "zb-v"),
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None,
        "Layers of each virtual stage of the interleaved schedule.",
        group="distributed",
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        "Virtual stages of each pipeline rank in the interleaved schedule.",
        group="distributed",
    )
    microbatch_group_size_per_vp_stage: int | None = option(
        None,
        "Micro-batches that go through one virtual stage in a row.",
        group="distributed",
        flag="--microbatch-group-size-per-virtual-pipeline-stage",
    )
    overlap_p2p_comm: bool = option(
        True,
        "Do not overlap transfers between stages with compute.",
        group="distributed",
        flag="--no-overlap-p2p-communication",
    )
    overlap_p2p_comm_warmup_flush: bool = option(
        False,
        "Overlap transfers in the warm-up and flush phases too.",
        group="distributed",
        flag="--overlap-p2p-communication-warmup-flush",
    )
    defer_embedding_wgrad_compute: bool = option(
        False,
        "Compute the output layer's weight gradient when the pipeline idles.",
        group="distributed",
    )
    wgrad_deferral_limit: int = option(
        0,
        "Micro-batches whose deferred weight gradient is kept; 0 means all.",
        group="distributed",
    )
    scatter_gather_tensors_in_pipeline: bool = option(
        True,
        "Send whole tensors between stages on every tensor-parallel rank.",
        group="distributed",
        ignored=states.OLD_SPELLING,
    )
    use_ring_exchange_p2p: bool = option(
        False,
        "Use a custom ring exchange between stages.",
        group="distributed",
        refused="no released PyTorch has this operation; drop the flag",
    )
    account_for_embedding_in_pipeline_split: bool = option(
        False,
        "Count the embedding as a layer when layers are divided into stages.",
        group="distributed",
    )
    account_for_loss_in_pipeline_split: bool = option(
        False,
        "Count the loss as a layer when layers are divided into stages.",
        group="distributed",
    )
    context_parallel_size: int = option(
        1,
        "Ranks that share each sequence.",
        group="distributed",
    )
    cp_comm_type: tuple[str, ...] = option(
        ("p2p",),
        "How ranks that share a sequence exchange keys and values: p2p, a2a, allgather or a2a+p2p; "
        "one for all layers, or one for each.",
        group="distributed",
        nargs="+",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = option(
        None,
        "Ranks that trade heads, and ranks of a ring of such sets, for --cp-comm-type a2a+p2p.",
        group="distributed",
        nargs="+",
    )
    expert_model_parallel_size: int = option(
        1,
        "Ranks that the experts of a layer are divided over.",
        group="moe",
    )
    expert_tensor_parallel_size: int | None = option(
        None,
        "Ranks that share each expert's matrices; the tensor-parallel size if not given.",
        group="moe",
    )
    overlap_moe_expert_parallel_comm: bool = option(
        False,
        "Overlap the travel of tokens with another micro-batch's compute.",
        group="moe",
    )
    delay_wgrad_compute: bool = option(
        False,
        "Compute weight gradients apart from input gradients, to overlap more.",
        group="moe",
    )
