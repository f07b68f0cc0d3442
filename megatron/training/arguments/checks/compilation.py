"""Rules about --compile."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.distributed.sharding import is_fully_sharded
from megatron.training.arguments.model_layers import kind_of
from megatron.training.config.run import RunConfig


def compiled_layers_are_plain(run: RunConfig) -> Iterator[str]:
    """The compiler traces arithmetic: nothing that draws, saves, quantises or waits by itself."""
    m = run.model
    if m.compile == "none":
        return
    needs = {
        "layers without dropout: give --hidden-dropout 0 --attention-dropout 0": (
            m.hidden_dropout == 0 and m.attention_dropout == 0
        ),
        "layers that keep all or nothing: give --recompute-granularity full or none at all": (
            m.recompute_granularity in (None, "full")
        ),
        "--model-kind gpt: give that": kind_of(run) == "gpt",
        "dense layers: leave --num-experts out": m.num_moe_experts is None,
        "processes: leave --virtual-ranks out": run.distributed.virtual_ranks is None,
        "16 and 32 bits: leave --fp8-format and --fp4-format out": not m.is_quantized,
        "whole weights: use --use-distributed-optimizer for FSDP": not is_fully_sharded(run.ddp),
        "whole sequences: leave --context-parallel-size out": m.context_parallel_size == 1,
        "plain attention: leave --multi-latent-attention out": not m.multi_latent_attention,
        "activations on the device: leave --cpu-offloading and --enable-cuda-graph out": (
            not m.cpu_offloading and not m.uses_graphs
        ),
        "gradients at once: leave --pipeline-schedule and --defer-embedding-wgrad-compute out": (
            m.pipeline_schedule is None and not m.defer_embedding_wgrad_compute
        ),
    }
    for words, is_met in needs.items():
        if not is_met:
            yield f"--compile {m.compile} is for {words}, or drop it"


def one_region_holds_no_collectives(run: RunConfig) -> Iterator[str]:
    """What comes between layers would be traced with them."""
    m = run.model
    comes_between = m.recompute_granularity == "full" or run.ddp.overlap_param_gather
    if m.compile == "model" and (comes_between or m.tensor_model_parallel_size > 1):
        yield (
            "--compile model leaves no layers to recompute, nothing to wait for and no products "
            "to divide: give --compile layer"
        )
