"""Checks of --compile."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.distributed.sharding import is_fully_sharded
from megatron.training.config.run import RunConfig
from megatron.training.models.registry import model_kind_of


def compiled_layers_are_plain(run: RunConfig) -> Iterator[str]:
    """Refuse --compile with features that the traced layers do not support.

    The compiler traces plain arithmetic.  It does not support layers that draw random numbers, save
    tensors themselves, quantize or wait for communication.
    """
    m = run.model
    if m.compile == "none":
        return
    excluded = {
        "dropout: give --hidden-dropout 0 --attention-dropout 0": (
            m.hidden_dropout > 0 or m.attention_dropout > 0
        ),
        f"--recompute-granularity {m.recompute_granularity}: use --compile layer with "
        "--recompute-granularity full": m.recompute_granularity not in (None, "full"),
        f"--model-kind {run.language_model.model_kind}: use pretrain_gpt.py, or train this model "
        "with --compile none": not model_kind_of(run).supports_compile,
        f"--num-experts {m.num_moe_experts}: use --compile none": m.num_moe_experts is not None,
        f"--virtual-ranks {run.distributed.virtual_ranks}: use torchrun, with one process per "
        "rank": run.distributed.virtual_ranks is not None,
        f"--{m.format_flag}: keep --compile for bf16 and fp32 GEMMs, or use --compile none for "
        "quantized ones": m.is_quantized,
        "fully sharded parameters: use --use-distributed-optimizer instead of FSDP": (
            is_fully_sharded(run.ddp)
        ),
        f"--context-parallel-size {m.context_parallel_size}: for long sequences use --compile "
        "layer with --tensor-model-parallel-size and --sequence-parallel": (
            m.context_parallel_size > 1
        ),
        "--multi-latent-attention: use --compile none for it, or keep --compile with "
        "--group-query-attention": m.multi_latent_attention,
        "--cpu-offloading: to save memory use --compile layer with --recompute-granularity "
        "full": m.cpu_offloading,
        "CUDA graphs: keep --compile to fuse operations, or --enable-cuda-graph with --compile "
        "none to reduce launch overhead": m.uses_graphs,
        f"--pipeline-schedule {m.pipeline_schedule}: use the default schedule, which is 1F1B, or "
        "interleaved with --num-virtual-stages-per-pipeline-rank": m.pipeline_schedule is not None,
        "--defer-embedding-wgrad-compute: use --compile none to defer weight gradients": (
            m.defer_embedding_wgrad_compute
        ),
    }
    for words, is_asked in excluded.items():
        if is_asked:
            yield f"--compile {m.compile} does not support {words}"


def one_region_holds_no_collectives(run: RunConfig) -> Iterator[str]:
    """Refuse --compile model with operations between layers.

    They would be traced together with the layers.
    """
    m = run.model
    comes_between = m.recompute_granularity == "full" or run.ddp.overlap_param_gather
    if m.compile == "model" and (comes_between or m.tensor_model_parallel_size > 1):
        yield (
            "--compile model compiles all layers as one region and does not support "
            "--recompute-granularity full, --overlap-param-gather or tensor parallelism: use "
            "--compile layer"
        )
