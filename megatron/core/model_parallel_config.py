"""How the world is cut up, and how its parts talk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option

_training = partial(option, group="training")
_tp_overlap = partial(_training, ignored=flag_messages.only_with("--tp-comm-overlap"))
_distributed = partial(option, group="distributed")
_moe = partial(option, group="moe")


@dataclass(frozen=True, kw_only=True)
class ModelParallelConfig:
    """How the world is cut up, and how its parts talk."""

    clone_scatter_output_in_embedding: bool = _training(
        True,
        "Keep the whole embedding output alive behind the slice of sequence parallelism.",
        ignored="the slice never holds on to the whole tensor here",
    )
    tp_comm_overlap: bool = _training(
        False,
        "Overlap tensor-parallel communication with matrix products through Transformer Engine.",
        refused=flag_messages.TP_OVERLAP,
    )
    tp_comm_overlap_cfg: str | None = _tp_overlap(None, "YAML file that tunes --tp-comm-overlap.")
    tp_comm_overlap_ag: bool = _tp_overlap(
        True, "Leave all-gathers out of --tp-comm-overlap.", flag="--disable-tp-comm-overlap-ag"
    )
    tp_comm_overlap_rs: bool = _tp_overlap(
        True, "Leave reduce-scatters out of --tp-comm-overlap.", flag="--disable-tp-comm-overlap-rs"
    )
    tp_comm_overlap_rs_dgrad: bool = _tp_overlap(
        False, "Overlap the reduce-scatter of input gradients too."
    )
    tp_comm_bulk_dgrad: bool = _tp_overlap(
        True,
        "Leave the all-gather beside input gradients out of --tp-comm-overlap.",
        flag="--disable-tp-comm-bulk-dgrad",
    )
    tp_comm_bulk_wgrad: bool = _tp_overlap(
        True,
        "Leave the reduce-scatter beside weight gradients out of --tp-comm-overlap.",
        flag="--disable-tp-comm-bulk-wgrad",
    )
    tp_comm_bootstrap_backend: str = _tp_overlap(
        "nccl",
        "Collective library that sets --tp-comm-overlap up.",
        choices=("nccl", "mpi", "gloo"),
    )
    use_cpu_initialization: bool | None = _training(
        None,
        "Draw initial weights in host memory.",
        ignored="initial weights depend on seed, name and index alone, wherever they are drawn",
    )
    deterministic_mode: bool = _training(
        False, "Use only operations that give the same bits every time."
    )
    async_tensor_model_parallel_allreduce: bool = _training(
        True,
        "Do not overlap the all-reduce of input gradients with weight gradients.",
        ignored=flag_messages.OLD_SPELLING,
    )
    sequence_parallel: bool = _training(
        False,
        "Cut activations along the sequence over the tensor-parallel ranks outside the "
        "matrix products.",
    )
    gradient_accumulation_fusion: bool = _training(
        True,
        "Do not let products of weight gradients be added to the gradient buffers themselves, "
        "where that is the faster way.",
    )
    tp_comm_split_ag: bool = _tp_overlap(
        True, "Old spelling of --disable-tp-comm-overlap-ag.", flag="--disable-tp-comm-split-ag"
    )
    tp_comm_split_rs: bool = _tp_overlap(
        True, "Old spelling of --disable-tp-comm-overlap-rs.", flag="--disable-tp-comm-split-rs"
    )
    pipeline_model_parallel_comm_backend: str | None = _training(
        None,
        "Collective library between pipeline stages.",
        choices=("nccl", "ucc"),
        ignored="stages talk through the library of all groups, --distributed-backend",
        refused_values={"ucc": "PyTorch is not built with UCC; use nccl"},
    )
    perform_initialization: bool = option(
        True,
        "Do not draw initial weights, because a checkpoint replaces them all.",
        group="checkpointing",
        flag="--no-initialization",
    )
    tensor_model_parallel_size: int = _distributed(
        1, "Ranks that share each weight matrix.", at_least=1
    )
    pipeline_model_parallel_size: int = _distributed(
        1, "Stages that the layers are divided into.", at_least=1
    )
    encoder_pipeline_model_parallel_size: int = _distributed(
        0,
        "How many of the pipeline stages, the first ones, hold the encoder of an encoder-decoder "
        "model; the others hold its decoder.",
    )
    decoder_first_pipeline_num_layers: int | None = _distributed(
        None, "Layers of the first pipeline stage."
    )
    decoder_last_pipeline_num_layers: int | None = _distributed(
        None, "Layers of the last pipeline stage."
    )
    pipeline_model_parallel_layout: str | None = _distributed(
        None, "Contents of each pipeline stage, such as Et*3|t*4|t*3L."
    )
    pipeline_split: str = _distributed(
        "even",
        "Layers per pipeline stage: equally many, or (auto) such that embedding, layers and loss "
        "take each stage as equal a time as can be.",
        choices=("even", "auto"),
    )
    pipeline_schedule: str | None = _distributed(
        None,
        "Order of work in the pipeline; 1f1b, or interleaved where ranks have virtual stages, if "
        "not given.  zb-h1 and zb-v fill waiting time with weight gradients.",
        choices=("1f1b", "interleaved", "zb-h1", "zb-v"),
    )
    num_layers_per_virtual_pipeline_stage: int | None = _distributed(
        None, "Layers of each virtual stage of the interleaved schedule."
    )
    num_virtual_stages_per_pipeline_rank: int | None = _distributed(
        None, "Virtual stages of each pipeline rank in the interleaved schedule."
    )
    microbatch_group_size_per_vp_stage: int | None = _distributed(
        None,
        "Micro-batches that go through one virtual stage in a row.",
        flag="--microbatch-group-size-per-virtual-pipeline-stage",
    )
    overlap_p2p_comm: bool = _distributed(
        True,
        "Do not overlap transfers between stages with compute.",
        flag="--no-overlap-p2p-communication",
    )
    overlap_p2p_comm_warmup_flush: bool = _distributed(
        False,
        "Overlap transfers in the warm-up and flush phases too.",
        flag="--overlap-p2p-communication-warmup-flush",
    )
    defer_embedding_wgrad_compute: bool = _distributed(
        False, "Compute the output layer's weight gradient when the pipeline idles."
    )
    wgrad_deferral_limit: int = _distributed(
        0, "Micro-batches whose deferred weight gradient is kept; 0 means all."
    )
    scatter_gather_tensors_in_pipeline: bool = _distributed(
        True,
        "Send whole tensors between stages on every tensor-parallel rank.",
        ignored=flag_messages.OLD_SPELLING,
    )
    use_ring_exchange_p2p: bool = _distributed(
        False,
        "Use a custom ring exchange between stages.",
        refused="no released PyTorch has this operation; use batched send and receive, which run "
        "without the flag",
    )
    account_for_embedding_in_pipeline_split: bool = _distributed(
        False, "Count the embedding as a layer when layers are divided into stages."
    )
    account_for_loss_in_pipeline_split: bool = _distributed(
        False, "Count the loss as a layer when layers are divided into stages."
    )
    context_parallel_size: int = _distributed(1, "Ranks that share each sequence.", at_least=1)
    cp_comm_type: tuple[str, ...] = _distributed(
        ("p2p",),
        "How the ranks of a context-parallel group exchange keys and values: p2p, a2a, allgather "
        "(also spelled all_gather) or a2a+p2p; one for all layers, or one for each.",
        nargs="+",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = _distributed(
        None,
        "Ranks that trade heads, and ranks of a ring of such sets, for --cp-comm-type a2a+p2p.",
        nargs="+",
    )
    expert_model_parallel_size: int = _moe(
        1, "Ranks that the experts of a layer are divided over.", at_least=1
    )
    expert_tensor_parallel_size: int | None = _moe(
        None, "Ranks that share each expert's matrices; the tensor-parallel size if not given."
    )
    overlap_moe_expert_parallel_comm: bool = _moe(
        False, "Overlap the travel of tokens with another micro-batch's compute."
    )
    delay_wgrad_compute: bool = _moe(
        False, "Compute weight gradients apart from input gradients, to overlap more."
    )
