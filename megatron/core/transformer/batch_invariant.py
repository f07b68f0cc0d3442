"""Batch invariance: bits of a token's hidden states depend on the tokens before it alone.

Neither other sequences of a batch nor the split of a sequence into passes changes them, so that a
training pass and the generation engine compute the same log-probabilities, by bits.

Of torch's operations on a CPU, matmuls depend on the number of rows, and sigmoid, SiLU, softplus
and GELU (tanh) on the place of a value unless rows have a multiple of 16 values; softmax, top-k,
exp, GELU (erf), tanh, embeddings and rotary positions do not.  Norms choose their kernel by whether
the rows are contiguous, which a single row always is.  MLPs use compiled kernels, which do not
depend on the rows.  `make_batch_invariant` replaces the others.

On a GPU, for generation only, matmuls, attention over pages, norms and sums of probabilities are
Triton's kernels, whose tiles and order do not depend on the number of rows; other operations
compute each value alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.autograd import Context, Function
from megatron.core.config.errors import ConfigError, MissingDependency
from megatron.core.device import cpu_kernels
from megatron.core.fusions.rms_norm import norm_rows_alike
from megatron.core.fusions.small_linear import small_linear
from megatron.core.optional import why_missing
from megatron.core.tensor_parallel.layers import Linear
from megatron.core.tensor_parallel.linear import LinearCall, linear
from megatron.core.tensor_parallel.quantized_linear import LinearQuantizer
from megatron.core.transformer.dot_product_attention import CAUSAL, DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.norms import Norm

TRAINING = "--batch-invariant-mode"


def make_batch_invariant(model: nn.Module, flag: str) -> None:
    """Let all layers of ``model`` compute by kernels that sum in a fixed order; backward does not.

    Raises MissingDependency or ConfigError, which name ``flag``, if that is not possible.
    """
    for module in model.modules():
        if (reason := _dependence(module)) is not None:
            raise ConfigError(f"{flag}: {reason}; leave the flag out for this model")
    _check_kernels(model, flag)

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, LinearCall(weight, bias, is_own=False), multiply=small_linear)

    for module in model.modules():
        if isinstance(module, Linear):
            module.multiply = small_linear
        elif isinstance(module, DotProductAttention):
            module.is_batch_invariant = True
        elif isinstance(module, Norm):
            module.norm_rows = norm_rows_alike
        elif isinstance(module, TopKRouter):
            module.multiply = multiply
            module.rule = replace(module.rule, sigmoid=sigmoid)
        elif isinstance(module, SharedExpertMLP):
            module.multiply = multiply
            module.sigmoid = sigmoid
        elif isinstance(module, MLASelfAttention):
            module.multiply_heads = multiply_heads


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x); its bits do not depend on the place of a value, as torch's do."""
    return _Sigmoid.apply(x)


class _Sigmoid(Function[Tensor]):
    @staticmethod
    def forward(ctx: Context[None], x: Tensor) -> Tensor:
        y = 1 / (1 + torch.exp(-x))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors  # the derivative of the formula is NaN where e^-x is infinite
        return grad * y * (1 - y)


def multiply_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head with its matrix, row by row: [s, b, n, i], [n, o, i] -> [s, b, n, o].

    No gradient: only generation multiplies heads.
    """
    heads = zip(x.unbind(2), weight.contiguous(), strict=True)
    return torch.stack([small_linear(row, matrix) for row, matrix in heads], 2)


def _dependence(module: nn.Module) -> str | None:
    """Return why the bits of ``module`` depend on the number of rows, None if they need not."""
    matmuls = "torch's matmuls, whose bits depend on the number of rows"
    if getattr(module, "position_embedding_type", None) in ("alibi", "relative"):
        return f"attention with position biases runs {matmuls}"
    if getattr(module, "has_scan", False):
        return f"the scan of a Mamba layer runs {matmuls}"
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
    if flag == TRAINING:
        raise ConfigError(f"{flag} runs on a CPU only: add --device cpu, or leave it out")
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
