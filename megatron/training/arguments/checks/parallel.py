"""Checks of parallel sizes and process groups."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.device import CPU, CUDA, backend_serves
from megatron.core.distributed.sharding import num_instances
from megatron.core.pipeline_parallel.schedule_order import wrong_chunks
from megatron.core.ssm.mamba_hybrid_layer_allocation import ATTENTION, EXPERTS, MLP
from megatron.core.transformer.layer_layout import layout_problems
from megatron.training.arguments.hybrid_pattern import hybrid_pattern
from megatron.training.config.run import RunConfig
from megatron.training.models.registry import model_kind_of


def degrees_fit_the_world(run: RunConfig) -> Iterator[str]:
    """Require a world size that is a multiple of tp x pp x cp."""
    m = run.model
    tp, pp, cp = (
        m.tensor_model_parallel_size,
        m.pipeline_model_parallel_size,
        m.context_parallel_size,
    )
    replica = tp * pp * cp
    if min(tp, pp, cp) >= 1 and run.world_size % replica:
        yield (
            f"{run.world_size} ranks cannot be divided into --tensor-model-parallel-size "
            f"{tp} x --pipeline-model-parallel-size {pp} x --context-parallel-size {cp} = "
            f"{replica}: start a multiple of {replica} ranks"
        )


def expert_degrees_fit_the_world(run: RunConfig) -> Iterator[str]:
    """Require a world size that is a multiple of etp x ep x pp."""
    m = run.model
    etp, ep, pp = (
        m.expert_tensor_parallel_size or 1,
        m.expert_model_parallel_size,
        m.pipeline_model_parallel_size,
    )
    is_apart = ep > 1 or etp != m.tensor_model_parallel_size  # otherwise same as the dense sizes
    if is_apart and min(etp, ep, pp) >= 1 and run.world_size % (etp * ep * pp):
        yield (
            f"{run.world_size} ranks cannot be divided into --expert-tensor-parallel-size {etp} x "
            f"--expert-model-parallel-size {ep} x --pipeline-model-parallel-size {pp} = "
            f"{etp * ep * pp}: start a multiple of {etp * ep * pp} ranks"
        )


def heads_fit_tensor_parallel(run: RunConfig) -> Iterator[str]:
    """Require that tensor parallelism can split the attention heads evenly, if there are any."""
    m = run.model
    tp = m.tensor_model_parallel_size
    if ATTENTION not in (hybrid_pattern(run) or ATTENTION):
        return
    for flag, count in (
        ("--num-attention-heads", m.num_attention_heads),
        ("--num-query-groups", m.num_query_groups if run.asked["group_query_attention"] else 0),
    ):
        if tp >= 1 and count % tp:
            yield (
                f"{flag} {count} cannot be split over --tensor-model-parallel-size {tp}: use a "
                f"tensor-parallel size that divides {count}"
            )


def mlp_fits_tensor_parallel(run: RunConfig) -> Iterator[str]:
    """Require that tensor parallelism can split the inner width of the MLP evenly, if any."""
    inner, tp = run.model.ffn_hidden_size, run.model.tensor_model_parallel_size
    has_mlp = bool({MLP, EXPERTS} & set(hybrid_pattern(run) or MLP))
    if has_mlp and tp >= 1 and inner % tp:
        yield (
            f"--ffn-hidden-size {inner} is not a multiple of --tensor-model-parallel-size {tp}: "
            "change one of them"
        )


def sequence_fits_sequence_parallel(run: RunConfig) -> Iterator[str]:
    """Require that sequence parallelism can split the sequence evenly."""
    seq, m = run.data.seq_length, run.model
    tp = m.tensor_model_parallel_size
    if m.sequence_parallel and m.context_parallel_size == 1 and tp >= 1 and seq % tp:
        yield (
            f"--seq-length {seq} is not a multiple of --tensor-model-parallel-size {tp}, as "
            f"--sequence-parallel needs: use a multiple of {tp}"
        )


def layers_fit_the_pipeline(run: RunConfig) -> Iterator[str]:
    """Require that the pipeline flags agree and assign each layer to one stage."""
    is_one_stack = not model_kind_of(run).has_encoder  # encoder_decoder.py checks the others
    if is_one_stack and run.model.num_layers and run.model.pipeline_model_parallel_size >= 1:
        yield from layout_problems(run.model, run.model.pipeline_model_parallel_size)


def virtual_stages_suit_the_pipeline(run: RunConfig) -> Iterator[str]:
    """Require several pipeline ranks for virtual stages.

    Refuse several flags that set the number of virtual stages.
    """
    m = run.model
    pp, chunks = m.pipeline_model_parallel_size, m.num_virtual_stages_per_pipeline_rank
    size = m.num_layers_per_virtual_pipeline_stage
    if size is not None and chunks is not None:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {size} and "
            f"--num-virtual-stages-per-pipeline-rank {chunks} set the same value: keep one"
        )
    if pp == 1 and m.virtual_pipeline_model_parallel_size is not None:
        yield (
            f"{m.virtual_pipeline_model_parallel_size} virtual stages a rank need "
            "--pipeline-model-parallel-size of 2 or more: raise it; one rank has no pipeline bubble"
        )
    ends = (m.decoder_first_pipeline_num_layers, m.decoder_last_pipeline_num_layers)
    if size is not None and any(end is not None for end in ends):
        yield (
            "--num-layers-per-virtual-pipeline-stage needs ranks of equal depth: with "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers use "
            "--num-virtual-stages-per-pipeline-rank"
        )
    elif size is not None and pp > 1 and size > 0:
        slots = m.num_layers + m.account_for_embedding_in_pipeline_split
        slots += m.account_for_loss_in_pipeline_split
        if slots % (pp * size):
            yield (
                f"{slots} layers are not a multiple of --pipeline-model-parallel-size {pp} x "
                f"--num-layers-per-virtual-pipeline-stage {size} = {pp * size}: change one of them"
            )
    if size is not None and m.pipeline_split == "auto":
        yield (
            "--num-layers-per-virtual-pipeline-stage fixes the sizes that --pipeline-split auto "
            "chooses: use --num-virtual-stages-per-pipeline-rank"
        )
    if m.pipeline_model_parallel_layout is not None and (size is not None or chunks is not None):
        yield (
            "--pipeline-model-parallel-layout already sets the number of virtual stages: keep it "
            "to "
            "place layers by hand, or --num-layers-per-virtual-pipeline-stage or "
            "--num-virtual-stages-per-pipeline-rank for equal stages"
        )


def schedule_suits_the_virtual_stages(run: RunConfig) -> Iterator[str]:
    """Require the number of virtual stages that the schedule supports."""
    m = run.model
    if m.pipeline_schedule is not None and m.pipeline_model_parallel_size > 1:
        num_chunks = m.virtual_pipeline_model_parallel_size or 1
        if sentence := wrong_chunks(m.pipeline_schedule, num_chunks):
            yield sentence


def groups_of_micro_batches_fill_the_pipeline(run: RunConfig) -> Iterator[str]:
    """Require groups of at least as many micro-batches as pipeline ranks.

    With fewer, the first rank would wait for its own output.
    """
    m = run.model
    group, pp = m.microbatch_group_size_per_vp_stage, m.pipeline_model_parallel_size
    if m.virtual_pipeline_model_parallel_size is not None and group is not None and group < pp:
        yield (
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is less than "
            f"--pipeline-model-parallel-size {pp}: give {pp} or more"
        )


def rank_order_suits_experts(run: RunConfig) -> Iterator[str]:
    """Require equal data-parallel sizes of dense and MoE layers for tp-pp-dp rank order."""
    m = run.model
    pp = m.pipeline_model_parallel_size
    expert_dp = run.world_size // max(
        1, (m.expert_tensor_parallel_size or 1) * m.expert_model_parallel_size * pp
    )
    dp = run.data_parallel_size
    apart = m.expert_model_parallel_size > 1 or expert_dp != dp * m.context_parallel_size
    if run.distributed.use_tp_pp_dp_mapping and pp > 1 and apart and expert_dp != dp:
        yield (
            f"--use-tp-pp-dp-mapping needs as many data-parallel ranks for experts ({expert_dp}) "
            "as "
            f"for the other layers ({dp}): make --expert-tensor-parallel-size x "
            "--expert-model-parallel-size equal --tensor-model-parallel-size x "
            f"--context-parallel-size = {m.tensor_model_parallel_size * m.context_parallel_size}, "
            "or use the default rank order"
        )


def optimizer_instances_divide_the_replicas(run: RunConfig) -> Iterator[str]:
    """Require that the optimizer instances divide the data-parallel ranks evenly."""
    m, instances, replicas = run.model, num_instances(run.ddp), run.data_parallel_size
    if not run.distributed.use_tp_pp_dp_mapping:  # with it, cp ranks stay in one instance
        replicas *= m.context_parallel_size
    counts = {"ranks that hold the same parameters": replicas}
    if m.expert_model_parallel_size > 1 or m.num_moe_experts is not None:
        cut = (m.expert_tensor_parallel_size or 1) * m.expert_model_parallel_size
        counts["data-parallel ranks of the experts"] = run.world_size // max(
            1, cut * m.pipeline_model_parallel_size
        )
    for what, count in counts.items():
        if instances > 1 and count % instances:
            yield (
                f"--num-distributed-optimizer-instances {instances} does not divide the {count} "
                f"{what}: use a divisor of it"
            )


def gathers_overlap_with_reductions(run: RunConfig) -> Iterator[str]:
    """Require --overlap-grad-reduce for --overlap-param-gather: both use its buckets."""
    if run.ddp.overlap_param_gather and not run.ddp.overlap_grad_reduce:
        yield "--overlap-param-gather needs --overlap-grad-reduce, which makes buckets: add it"
    if run.optimizer.overlap_param_gather_with_optimizer_step and not run.ddp.overlap_param_gather:
        yield "--overlap-param-gather-with-optimizer-step needs --overlap-param-gather: add it"


def backend_suits_the_device(run: RunConfig) -> Iterator[str]:
    """Refuse NCCL without GPUs."""
    d = run.distributed
    if not backend_serves(d.device, d.distributed_backend):
        yield (
            f"--distributed-backend {d.distributed_backend} needs GPUs and --device is "
            f"{d.device}: use gloo, or --device cuda on a machine with GPUs"
        )


def gloo_sends_no_tensors_of_a_gpu(run: RunConfig) -> Iterator[str]:
    """Refuse layouts that send tensors of a GPU from rank to rank over gloo.

    gloo's collectives take such tensors; its send would read their addresses on the host.
    """
    m = run.model
    d = run.distributed
    if d.distributed_backend != "gloo" or d.device != CUDA:
        return
    if m.pipeline_model_parallel_size > 1:
        yield (
            f"--distributed-backend gloo with --pipeline-model-parallel-size "
            f"{m.pipeline_model_parallel_size}: gloo cannot send tensors of a GPU from stage to "
            "stage; use nccl, or --device cpu"
        )
    rings = {"p2p", "a2a+p2p"} & set(m.cp_comm_type)
    if m.context_parallel_size > 1 and rings:
        yield (
            f"--distributed-backend gloo with --cp-comm-type {rings.pop()}: gloo cannot send "
            "tensors of a GPU around a ring; use nccl, --cp-comm-type a2a, or --device cpu"
        )


def virtual_ranks_are_alone(run: RunConfig) -> Iterator[str]:
    """Require one process and the CPU for --virtual-ranks, which are threads."""
    ranks, device = run.distributed.virtual_ranks, run.distributed.device
    if ranks is None:
        return
    if run.world_size != ranks:
        yield (
            f"--virtual-ranks {ranks} are threads of one process, but {run.world_size} processes "
            "were "
            "started: use python for virtual ranks, or torchrun alone for one process per rank"
        )
    if device != CPU:
        yield (
            f"--virtual-ranks {ranks} compute on the CPU: use --device cpu instead of --device "
            f"{device}"
        )
