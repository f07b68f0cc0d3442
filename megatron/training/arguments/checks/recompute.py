"""Checks of recomputation and offloading of activations."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.distributed.sharding import is_fully_sharded
from megatron.training.config.run import RunConfig

MODULES = ("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj")


def full_recompute_says_which_layers(run: RunConfig) -> Iterator[str]:
    """Require method and number of layers for full recomputation, and only for it."""
    m = run.model
    if m.recompute_granularity == "full":
        if m.recompute_method is None:
            yield "--recompute-granularity full needs --recompute-method uniform or block"
        if m.recompute_num_layers is None:
            yield "--recompute-granularity full needs --recompute-num-layers"
        return
    for flag, value in (
        ("--recompute-method", m.recompute_method),
        ("--recompute-num-layers", m.recompute_num_layers),
    ):
        if value is not None:
            yield f"{flag} {value} needs --recompute-granularity full"


def selective_recompute_knows_its_modules(run: RunConfig) -> Iterator[str]:
    """Require modules that exist and that the layers have."""
    m = run.model
    has_shared = m.moe_shared_expert_intermediate_size is not None
    for name, flag, is_there in (
        ("moe", "--num-experts", m.num_moe_experts is not None),
        ("moe_act", "--num-experts", m.num_moe_experts is not None),
        ("shared_experts", "--moe-shared-expert-intermediate-size", has_shared),
        ("mla_up_proj", "--multi-latent-attention", m.multi_latent_attention),
    ):
        if name in (m.recompute_modules or ()) and not is_there:
            yield (
                f"--recompute-modules {name} needs {flag}: add it; core_attn and layernorm are "
                "in every transformer layer"
            )
    unknown = [name for name in m.recompute_modules or () if name not in MODULES]
    if unknown:
        yield f"--recompute-modules {' '.join(unknown)}: use {', '.join(MODULES)}"
    if m.recompute_modules == ():
        yield f"--recompute-modules names no module: give some of {', '.join(MODULES)}"
    if m.recompute_modules is not None and m.recompute_granularity != "selective":
        yield "--recompute-modules needs --recompute-granularity selective"


def saved_activations_are_cut_by_tensor_parallel(run: RunConfig) -> Iterator[str]:
    """Require tensor parallelism without sequence parallelism.

    --distribute-saved-activations splits hidden states over the tensor-parallel ranks; sequence
    parallelism does so already.
    """
    m = run.model
    if not m.distribute_saved_activations:
        return
    if m.tensor_model_parallel_size == 1 or m.recompute_granularity != "full":
        yield (
            "--distribute-saved-activations needs --tensor-model-parallel-size greater than 1 "
            "and --recompute-granularity full"
        )
    if m.sequence_parallel:
        yield (
            "--distribute-saved-activations and --sequence-parallel exclude each other: keep "
            "--sequence-parallel, which already shards hidden states over the same ranks"
        )


def the_budget_is_a_share(run: RunConfig) -> Iterator[str]:
    """Require --memory-budget-fraction in (0, 1]; it is a share of device memory."""
    if not 0 < run.model.memory_budget_fraction <= 1:
        yield (
            f"--memory-budget-fraction {run.model.memory_budget_fraction}: use a share "
            "greater than 0 and at most 1"
        )


def chunks_of_the_loss_defer_nothing(run: RunConfig) -> Iterator[str]:
    """Refuse a chunked loss with a deferred weight gradient of the output layer.

    The chunks of the logits are freed before that gradient would be computed.
    """
    m = run.model
    if m.loss_chunk_size and m.defer_embedding_wgrad_compute:
        yield (
            f"--loss-chunk-size {m.loss_chunk_size} and --defer-embedding-wgrad-compute exclude "
            "each other: keep the first to save the memory of the logits, the second to defer the "
            "output layer's weight gradient into the pipeline bubble"
        )


def offloaded_layers_are_some(run: RunConfig) -> Iterator[str]:
    """Require that some but not all layers are offloaded.

    Backward needs the last layers right away.  Refuse other features that handle saved tensors.
    """
    m = run.model
    if not m.cpu_offloading:
        return
    if not 0 < m.cpu_offloading_num_layers < max(2, m.num_layers):
        yield (
            f"--cpu-offloading-num-layers {m.cpu_offloading_num_layers} of --num-layers "
            f"{m.num_layers}: with --cpu-offloading use 1 or more, but not all layers"
        )
    for other, is_on, purpose in (
        (
            f"--recompute-granularity {m.recompute_granularity}",
            m.recompute_granularity is not None,
            "to compute them again in backward",
        ),
        ("--enable-cuda-graph", m.uses_graphs, "to reduce launch overhead"),
        (
            "--overlap-moe-expert-parallel-comm",
            m.overlap_moe_expert_parallel_comm,
            "to overlap the experts' all-to-all",
        ),
        ("fully sharded parameters (FSDP)", is_fully_sharded(run.ddp), "to shard parameters"),
    ):
        if is_on:
            yield (
                f"--cpu-offloading and {other} exclude each other: keep the first to move "
                f"activations to host memory, the second {purpose}"
            )
