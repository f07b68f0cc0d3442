"""Rules about parallel sizes, process groups, and sharded parameters."""

from __future__ import annotations

from math import prod

from megatron.core.config.rule import first_of, given, rules, where
from megatron.core.device import CPU, CUDA, backend_serves
from megatron.core.distributed.distributed_data_parallel_config import num_instances
from megatron.core.parallel.context_parallel_partition import sequence_divisor
from megatron.core.ssm.mamba_hybrid_layer_allocation import EXPERTS, MLP
from megatron.core.transformer.layer_layout import has_explicit_layout, layout_problems
from megatron.training.arguments.rules.rule import Settings


def _find_wrong_world(c: Settings, *sizes: int) -> int:
    """Return the product of ``sizes`` if it does not divide the number of ranks; else 0."""
    ranks = prod(sizes)
    return ranks if min(sizes) >= 1 and c.world_size % ranks else 0


def _find_wrong_expert_world(c: Settings) -> int:
    sizes = c.expert_tensor_parallel_size or 1, c.expert_model_parallel_size
    if sizes == (c.tensor_model_parallel_size, 1):  # same as the dense sizes
        return 0
    return _find_wrong_world(c, *sizes, c.pipeline_model_parallel_size)


def _expert_data_parallel_size(c: Settings) -> int:
    ranks = (c.expert_tensor_parallel_size or 1) * c.expert_model_parallel_size
    return int(c.world_size // max(1, ranks * c.pipeline_model_parallel_size))


def _find_unequal_groups(c: Settings) -> int:
    """Return the expert-data-parallel size if it differs from the data-parallel size."""
    size = _expert_data_parallel_size(c)
    has_groups = (
        c.expert_model_parallel_size > 1 or size != c.data_parallel_size * c.context_parallel_size
    )
    return size if has_groups and size != c.data_parallel_size else 0


def _find_undivided_ranks(c: Settings) -> list[str]:
    """Return the groups of ranks that the optimizer instances do not divide."""
    ranks = c.data_parallel_size
    if not c.use_tp_pp_dp_mapping:  # with it, cp ranks stay in one instance
        ranks *= c.context_parallel_size
    counts = {"ranks that hold the same parameters": ranks}
    if c.expert_model_parallel_size > 1 or c.num_moe_experts is not None:
        counts["data-parallel ranks of the experts"] = _expert_data_parallel_size(c)
    instances = num_instances(c.config.ddp)
    return [f"{count} {name}" for name, count in counts.items() if count % instances]


_SIZES = rules(
    {
        "{world_size} ranks cannot be divided into {--tensor-model-parallel-size} x "
        "{--pipeline-model-parallel-size} x {--context-parallel-size} = {found}: start a multiple "
        "of {found} ranks": lambda c: _find_wrong_world(
            c,
            c.tensor_model_parallel_size,
            c.pipeline_model_parallel_size,
            c.context_parallel_size,
        ),
        "{world_size} ranks cannot be divided into --expert-tensor-parallel-size {found[0]} x "
        "{--expert-model-parallel-size} x {--pipeline-model-parallel-size} = {found[1]}: start a "
        "multiple of {found[1]} ranks": lambda c: (
            (ranks := _find_wrong_expert_world(c)) and (c.expert_tensor_parallel_size or 1, ranks)
        ),
    },
    where(
        lambda c: c.tensor_model_parallel_size >= 1,
        {
            "{--ffn-hidden-size} is not a multiple of {--tensor-model-parallel-size}: change one "
            "of them": lambda c: (
                c.has_layer(MLP + EXPERTS) and c.ffn_hidden_size % c.tensor_model_parallel_size
            ),
            "{--seq-length} is not a multiple of {--tensor-model-parallel-size}, as "
            "--sequence-parallel needs: use a multiple of {tensor_model_parallel_size}": lambda c: (
                c.sequence_parallel
                and c.context_parallel_size == 1
                and c.seq_length % c.tensor_model_parallel_size
            ),
        },
    ),
    {
        "--use-tp-pp-dp-mapping needs as many data-parallel ranks for experts ({found[0]}) as for "
        "the other layers ({data_parallel_size}): make --expert-tensor-parallel-size x "
        "--expert-model-parallel-size equal --tensor-model-parallel-size x "
        "--context-parallel-size = {found[1]}, or use the default rank order": lambda c: (
            c.use_tp_pp_dp_mapping
            and c.pipeline_model_parallel_size > 1
            and (size := _find_unequal_groups(c))
            and (size, c.tensor_model_parallel_size * c.context_parallel_size)
        ),
        "{--num-distributed-optimizer-instances} does not "
        "divide the {found}: use a divisor of it": lambda c: (
            _find_undivided_ranks(c) if num_instances(c.config.ddp) > 1 else ()
        ),
    },
)


def _find_partial_stages(c: Settings) -> tuple[int, int] | None:
    """Return the layers, and the multiple that virtual stages of equal size need."""
    slots = c.num_layers + c.account_for_embedding_in_pipeline_split
    slots += c.account_for_loss_in_pipeline_split
    needed = c.pipeline_model_parallel_size * c.num_layers_per_virtual_pipeline_stage
    return (slots, needed) if needed > 0 and slots % needed else None


_PIPELINE = rules(
    {
        "{found}": lambda c: (
            list(layout_problems(c.model, c.pipeline_model_parallel_size))
            # Rules of T5 check the stages of an encoder and a decoder.
            if not c.kind.has_encoder
            and c.num_layers
            and c.pipeline_model_parallel_size >= 1
            and not has_explicit_layout(c.model)
            else ()
        ),
        "{virtual_pipeline_model_parallel_size} virtual stages a rank need "
        "--pipeline-model-parallel-size of 2 or more: "
        "raise it; one rank has no pipeline bubble": lambda c: (
            c.pipeline_model_parallel_size == 1
            and c.virtual_pipeline_model_parallel_size is not None
        ),
    },
    where(
        "--num-layers-per-virtual-pipeline-stage",
        {
            "{--num-layers-per-virtual-pipeline-stage} and "
            "{--num-virtual-stages-per-pipeline-rank} "
            "set the same value: keep one": "--num-virtual-stages-per-pipeline-rank",
        },
        first_of(
            {
                "--num-layers-per-virtual-pipeline-stage needs ranks of equal depth: with "
                "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers use "
                "--num-virtual-stages-per-pipeline-rank": lambda c: (
                    c.num_layers_in_first_pipeline_stage is not None
                    or c.num_layers_in_last_pipeline_stage is not None
                ),
                "{found[0]} layers are not a multiple of {--pipeline-model-parallel-size} x "
                "{--num-layers-per-virtual-pipeline-stage} = {found[1]}: "
                "change one of them": lambda c: (
                    c.pipeline_model_parallel_size > 1 and _find_partial_stages(c)
                ),
            },
        ),
        {
            "--num-layers-per-virtual-pipeline-stage fixes the sizes that --pipeline-split auto "
            "chooses: use --num-virtual-stages-per-pipeline-rank": "--pipeline-split auto",
        },
    ),
    {
        "--pipeline-model-parallel-layout already sets the number of virtual stages: keep it to "
        "place layers by hand, or --num-layers-per-virtual-pipeline-stage or "
        "--num-virtual-stages-per-pipeline-rank for equal stages": lambda c: (
            c.pipeline_model_parallel_layout is not None
            and (
                c.num_layers_per_virtual_pipeline_stage is not None
                or c.num_virtual_stages_per_pipeline_rank is not None
            )
        ),
    },
)


_CONTEXT_PARALLEL = rules(
    where(
        lambda c: c.context_parallel_size > 1 and c.tensor_model_parallel_size >= 1,
        first_of(
            {
                "{--seq-length} is not a multiple of 2 x {--context-parallel-size} = {found}: use "
                "a multiple of {found}": lambda c: (
                    c.seq_length % (part := 2 * c.context_parallel_size) and part
                ),
                "{--seq-length} leaves {found[0]} tokens to each of {--context-parallel-size} "
                "ranks, which --sequence-parallel cannot divide by "
                "{--tensor-model-parallel-size}: use a multiple of {found[1]}": lambda c: (
                    c.seq_length
                    % (
                        part := sequence_divisor(
                            cp=c.context_parallel_size,
                            tp=c.tensor_model_parallel_size,
                            sequence_parallel=c.sequence_parallel,
                        )
                    )
                    and (c.seq_length // c.context_parallel_size, part)
                ),
            },
        ),
    ),
)

_NOT_HYBRID = (
    "--num-experts --mtp-num-layers --experimental-attention-variant --tp-comm-overlap "
    "--cp-comm-type a2a a2a+p2p --batch-invariant-mode --full-validation --iterations-to-skip "
    "--log-loss-by-source --rehearse-memory --virtual-ranks --logits-load-dir --logits-save-dir "
    "--export-kd-teacher-load"
)
_HYBRID = where(
    "--hybrid-context-parallel",
    {
        "--hybrid-context-parallel needs --sft: rows of different lengths": None,
        "--hybrid-context-parallel needs --no-sft-packing: it packs short rows itself": None,
        "--hybrid-context-parallel needs --max-seqlen-per-dp-cp-rank: the most tokens of a "
        "micro-batch on a rank": None,
        "{found} with --hybrid-context-parallel, which chooses the ranks and the micro-batch of "
        "each row: use 1": given(
            "--context-parallel-size --pipeline-model-parallel-size --micro-batch-size",
            lambda size: size != 1,
        ),
        "{found} with --hybrid-context-parallel: ranks of one row would drop out alike: use "
        "0": given("--attention-dropout --hidden-dropout", lambda share: share > 0),
        "{found} and --hybrid-context-parallel exclude each other: leave one out": _NOT_HYBRID,
        "--hybrid-context-parallel with {data_parallel_size} data-parallel ranks: groups are "
        "powers of two; use 1, 2, 4, 8 or more": lambda c: (
            c.data_parallel_size & (c.data_parallel_size - 1)
        ),
        "{--max-seqlen-per-dp-cp-rank} on {data_parallel_size} data-parallel ranks is less than "
        "{--seq-length}: use {found} or more": lambda c: (
            (least := -(-c.seq_length // max(c.data_parallel_size, 1)))
            > (c.max_seqlen_per_dp_cp_rank or least)
            and least
        ),
    },
)

# gloo's collectives take tensors of a GPU; its send would read their addresses on the host.
GLOO_RULES = where(
    lambda c: c.distributed_backend == "gloo" and c.device == CUDA,
    {
        "--distributed-backend gloo with {found}: gloo cannot send tensors of a GPU from stage to "
        "stage; use "
        "nccl, or --device cpu": given("--pipeline-model-parallel-size", lambda size: size > 1),
        "--distributed-backend gloo with --cp-comm-type {found}: gloo cannot send tensors of a "
        "GPU around a ring; use nccl, --cp-comm-type a2a, or --device cpu": lambda c: (
            c.context_parallel_size > 1
            and max({"p2p", "a2a+p2p"} & {*c.cp_comm_types}, default=None)
        ),
    },
)

_COMMUNICATION = rules(
    {
        "--overlap-param-gather needs --overlap-grad-reduce, which makes buckets: add it": None,
        "--overlap-param-gather-with-optimizer-step needs --overlap-param-gather: add it": None,
        "{--distributed-backend} needs GPUs and --device is {device}: use gloo, or --device cuda "
        "on a machine with GPUs": lambda c: not backend_serves(c.device, c.distributed_backend),
    },
    GLOO_RULES,
    where(
        "--virtual-ranks",
        {
            # these are threads
            "{--virtual-ranks} are threads of one process, but {world_size} processes were "
            "started: use python for virtual ranks, or "
            "torchrun alone for one process per rank": lambda c: c.world_size != c.virtual_ranks,
            "{--virtual-ranks} compute "
            "on the CPU: use --device cpu instead of {--device}": lambda c: c.device != CPU,
        },
    ),
)


def _sharding_flag(c: Settings) -> str:
    """Return the flag that shards the parameters."""
    return "--use-torch-fsdp2" if c.use_torch_fsdp2 else c["--data-parallel-sharding-strategy"]


_SHARDING = rules(
    where(
        lambda c: c.is_fully_sharded,
        {
            # FSDP2 reduces what autograd has accumulated in the backward pass; gradients that are
            # computed later would be missing.
            "{found[0]} reduces weight gradients in the backward pass, {found[1]} computes them "
            "after it: drop the second, or use --use-distributed-optimizer": lambda c: [
                (_sharding_flag(c), later)
                for later in (
                    *given("--pipeline-schedule", lambda name: name.startswith("zb"))(c),
                    *given("--defer-embedding-wgrad-compute")(c),
                )
            ],
            # FSDP2 keeps its state per process and uses the process groups of torch.distributed.
            "{found} needs one process per rank: use torchrun instead of {--virtual-ranks}, or "
            "--use-distributed-optimizer "
            "instead of FSDP": lambda c: c.virtual_ranks is not None and _sharding_flag(c),
        },
    ),
    where(
        "--use-torch-fsdp2",
        {
            # which shards the optimizer state itself
            "--use-torch-fsdp2 and --use-distributed-optimizer exclude each other: keep the first "
            "to shard parameters, gradients and optimizer state, the second for optimizer state "
            "alone": lambda c: c.config.optimizer.use_distributed_optimizer,
        },
    ),
)

RULES = rules(
    _SIZES,
    _PIPELINE,
    _CONTEXT_PARALLEL,
    _HYBRID,
    _COMMUNICATION,
    _SHARDING,
)
