"""--tp-comm-overlap for Transformer Engine's layers: GEMMs that run while their collective does.

The package allocates one communication buffer per kind of GEMM (``qkv``, ``proj``, ``fc1`` and
``fc2``, forward and backward) for all layers, of the size of a micro-batch's hidden states.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError
from megatron.core.extensions.transformer_engine.engine import package
from megatron.core.extensions.transformer_engine.layers import (
    TEColumnParallelLinear,
    TERowParallelLinear,
)
from megatron.core.parallel.collectives import is_so_everywhere
from megatron.core.text_files import parse_yaml, read_text
from megatron.core.transformer.transformer_config import TransformerConfig

_BUFFERS = {"linear_qkv": "qkv", "linear_proj": "proj", "linear_fc1": "fc1", "linear_fc2": "fc2"}
_Sharded = TEColumnParallelLinear | TERowParallelLinear
_FP8_RECIPES = ("delayed", "tensorwise", "mxfp8")  # the package's buffers take no others


def use_user_buffers(
    models: Sequence[nn.Module],
    config: TransformerConfig,
    tp_group: ProcessGroup,
    *,
    num_tokens: int,
) -> str | None:
    """Let the package's layers in ``models`` overlap; return why they cannot, or None.

    ``num_tokens``: those of a micro-batch that the ranks of ``tp_group`` share.  Raises ConfigError
    for an unreadable --tp-comm-overlap-cfg.  Collective over all ranks of the run.
    """
    layers = [pair for model in models for pair in _layers_with_buffers(model, config.hidden_size)]
    if is_so_everywhere(not layers, dist.group.WORLD):
        return "no layer of Transformer Engine has sequence parallelism"
    if reason := _unsupported_reason(config, tp_group):
        return reason
    reason = _initialize(config, tp_group, num_tokens)
    if not is_so_everywhere(reason is None, dist.group.WORLD):
        return reason or "another rank cannot allocate user buffers"
    for layer, buffer in layers:
        assert layer.engine is not None, "chosen by it"
        layer.engine.rebuild(ub_name=buffer, **_arguments(config, layer))
    return None


def _layers_with_buffers(model: nn.Module, hidden_size: int) -> Iterator[tuple[_Sharded, str]]:
    """Yield the layers that gather or scatter hidden states, with the names of their buffers.

    Shared experts may compute while the hidden states of others are in the buffers.
    """
    for name, layer in model.named_modules():
        buffer = _BUFFERS.get(name.rpartition(".")[2])
        if buffer is None or "shared_experts" in name or not isinstance(layer, _Sharded):
            continue
        width = layer.input_size if isinstance(layer, TEColumnParallelLinear) else layer.output_size
        if layer.sequence_parallel and layer.engine is not None and width == hidden_size:
            yield layer, buffer


def _unsupported_reason(config: TransformerConfig, tp_group: ProcessGroup) -> str | None:
    """Return why the package has no buffers for this run; None if it may have."""
    if config.fp4 is not None or (config.fp8 and config.fp8_recipe not in _FP8_RECIPES):
        return (
            f"--{config.format_flag}: user buffers of Transformer Engine need bf16, or fp8 with "
            "--fp8-recipe delayed, tensorwise or mxfp8"
        )
    ranks = dist.get_process_group_ranks(tp_group)
    size = tp_group.size()
    if ranks[0] % size or ranks != list(range(ranks[0], ranks[0] + size)):
        return f"user buffers of Transformer Engine need tensor parallelism innermost, not {ranks}"
    return None


def _initialize(config: TransformerConfig, tp_group: ProcessGroup, num_tokens: int) -> str | None:
    """Allocate the buffers; return why the package refuses to, or None.

    Collective over all ranks: the package creates groups of its own.
    """
    te: Any = package()
    settings = {}
    if config.tp_comm_overlap_cfg is not None:
        what = f"--tp-comm-overlap-cfg {config.tp_comm_overlap_cfg}"
        settings = parse_yaml(
            read_text(config.tp_comm_overlap_cfg, what, ConfigError), what, ConfigError
        )
        if not isinstance(settings, dict):
            raise ConfigError(
                f"{what}: a mapping from names of buffers (qkv_fprop, ...) to settings is needed, "
                f"not {type(settings).__name__}"
            )
    given: dict[str, object] = {"use_fp8": config.fp8 is not None}
    if "quantization_modes" in inspect.signature(te.initialize_ub).parameters:
        modes = te.UserBufferQuantizationMode
        given = {"quantization_modes": [modes.FP8 if config.fp8 else modes.NONE]}
        if config.fp8 and config.first_last_layers_bf16:
            given["quantization_modes"] = [modes.FP8, modes.NONE]
    try:
        te.initialize_ub(
            shape=[num_tokens, config.hidden_size],
            tp_size=tp_group.size(),
            dtype=config.params_dtype,
            ub_cfgs=settings,
            bootstrap_backend=config.tp_comm_bootstrap_backend,
            **given,
        )
    except RuntimeError as error:  # no multicast between the GPUs, or no such backend
        return f"Transformer Engine: {str(error).splitlines()[0]}"
    return None


def _arguments(config: TransformerConfig, layer: _Sharded) -> dict[str, bool]:
    """Return the package's arguments that select the collectives to overlap."""
    gathers = config.tp_comm_overlap_ag and config.tp_comm_split_ag
    if isinstance(layer, TERowParallelLinear):
        scatters = config.tp_comm_overlap_rs and config.tp_comm_split_rs
        return {"ub_overlap_ag": gathers, "ub_overlap_rs": scatters}
    return {
        "ub_overlap_ag": gathers,
        "ub_overlap_rs_dgrad": config.tp_comm_overlap_rs_dgrad,
        "ub_bulk_dgrad": config.tp_comm_bulk_dgrad,
        "ub_bulk_wgrad": config.tp_comm_bulk_wgrad,
    }
