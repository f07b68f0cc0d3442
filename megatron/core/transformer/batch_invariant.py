"""Batch invariance: bits of a token's hidden states depend on the tokens before it alone.

Neither other requests of a batch nor the split of a sequence into passes changes them, with
--inference-batch-invariant.

Of torch's operations on a CPU, matmuls depend on the number of rows, and sigmoid, SiLU, softplus
and GELU (tanh) on the place of a value unless rows have a multiple of 16 values; softmax, top-k,
exp, GELU (erf), tanh, embeddings and rotary positions do not.  Norms choose their kernel by whether
the rows are contiguous, which a single row always is.  MLPs use compiled kernels, which do not
depend on the rows.  `make_batch_invariant` and `use_fast_linears` replace the others.

On a GPU matmuls, attention over pages and sums of probabilities are Triton's kernels, whose tiles
and order do not depend on the number of rows.  Kernels of norms, torch's or Triton's, compute each
row alone, and other operations each value.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.config.errors import ConfigError, MissingDependency
from megatron.core.device import cpu_kernels
from megatron.core.fusions.small_linear import small_linear
from megatron.core.optional import why_missing
from megatron.core.tensor_parallel.layers import Linear
from megatron.core.tensor_parallel.quantized_linear import LinearQuantizer
from megatron.core.transformer.dot_product_attention import CAUSAL, DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

FLAG = "--inference-batch-invariant"


def make_batch_invariant(model: nn.Module, flag: str = FLAG) -> None:
    """Let all layers of ``model``, which only generates, compute by kernels of a fixed order.

    Linear layers are left to the caller.  ``flag`` asks for it, in messages.  Raises
    MissingDependency or ConfigError if that is not possible.
    """
    for module in model.modules():
        if (reason := _dependence(module)) is not None:
            raise ConfigError(f"{flag}: {reason}; leave the flag out for this model")
    _check_kernels(model, flag)
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.multiply = small_linear
            module.rule = replace(module.rule, sigmoid=sigmoid, softplus=softplus)
        elif isinstance(module, SharedExpertMLP):
            module.multiply = small_linear
            module.sigmoid = sigmoid
        elif isinstance(module, MLASelfAttention):
            module.multiply_heads = multiply_heads


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x); its bits do not depend on the place of a value, as torch's do."""
    return 1 / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x); its bits do not depend on the place of a value, as torch's do."""
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def multiply_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head with its matrix, row by row: [s, b, n, i], [n, o, i] -> [s, b, n, o]."""
    heads = zip(x.unbind(2), weight.contiguous(), strict=True)
    return torch.stack([small_linear(row, matrix) for row, matrix in heads], 2)


def _dependence(module: nn.Module) -> str | None:
    """Return why the bits of ``module`` depend on the number of rows, None if they need not."""
    matmuls = "torch's matmuls, whose bits depend on the number of rows"
    if getattr(module, "position_embedding_type", None) in ("alibi", "relative"):
        return f"attention with position biases runs {matmuls}"
    if getattr(module, "has_scan", False):
        return f"the scan of a Mamba layer runs {matmuls}"
    if getattr(module, "lora", None) is not None:
        return f"a low-rank adapter runs {matmuls}"
    if isinstance(module, DotProductAttention):
        if module.attn_mask_type not in CAUSAL:
            return (
                "only causal attention has a kernel whose bits do not depend on the number of rows"
            )
        if module.cp_comm is not None:
            return "with context parallelism the order of sums depends on the ranks"
    if isinstance(module, Linear) and isinstance(module.quantizer, LinearQuantizer):
        return "scales of fp8 and fp4 depend on all rows"
    return None


def _check_kernels(model: nn.Module, flag: str) -> None:
    if any(device.is_cuda(p.device) for p in model.parameters()):
        _check_gpu(model, flag)
        return
    for dtype in {p.dtype for p in model.parameters()}:
        reason = cpu_kernels.unsupported_reason(dtype)
        names = "small_linear", "paged_attention"
        if reason is None and not all(cpu_kernels.has(name, dtype) for name in names):
            reason = "the compiled kernels are of an older version"
        if reason is not None:
            raise MissingDependency(f"{flag} needs compiled kernels: {reason}")


def _check_gpu(model: nn.Module, flag: str) -> None:
    """Raise unless all sums of ``model`` have a kernel of a GPU with a fixed order."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            raise ConfigError(
                f"{flag} on a GPU: grouped GEMMs of experts sum in an order that depends on the "
                "number of rows; add --device cpu, or leave it out"
            )
        group = getattr(module, "tp_group", None)
        if group is not None and group.size() > 1:
            raise ConfigError(
                f"{flag} on a GPU: NCCL adds in an order that depends on the number of rows; use "
                "--tensor-model-parallel-size 1, with a replica of the model on each rank"
            )
    if (reason := why_missing("triton")) is not None:
        raise MissingDependency(f"{flag} on a GPU needs Triton's kernels: {reason}")
