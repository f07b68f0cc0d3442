"""Transformer Engine's modules in plain torch, for tests of what we hand to them.

Constructors and calls take the arguments that we use and no others; those are held against the
package's own by tests/unit/extensions/test_signatures.py.  Which recipe a product was asked to
follow is written down in `CALLS`; of the recipes, delayed scaling alone rounds values to fp8.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import optional
from megatron.core.extensions.transformer_engine import engine
from megatron.core.tensor_parallel import mappings

CALLS: list[dict[str, Any]] = []
BUFFERS: list[dict[str, Any]] = []  # what `initialize_ub` was asked for
_active: list[Any] = []


class _DelayedState:
    """Scales and amax values of a module's forward or backward pass."""

    def __init__(self, history: int, *formats: torch.dtype) -> None:
        self.formats = formats
        self.scale = torch.ones(len(formats))
        self.amax_history = torch.zeros(history, len(formats))

    def rounded(self, x: Tensor, column: int) -> Tensor:
        recorded = self.amax_history[0]
        recorded[column] = torch.maximum(recorded[column], x.abs().amax().float())
        scale = self.scale[column].to(x.dtype)
        to = self.formats[column]
        top = torch.finfo(to).max
        return (x * scale).clamp(-top, top).to(to).to(x.dtype) / scale


class _Product(torch.autograd.Function):
    """x W^T, its weight gradient added to main_grad where the module was told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: Any, is_first: bool | None) -> Tensor:
        ctx.weight, ctx.fuses, ctx.is_first = weight, module.fuse_wgrad_accumulation, is_first
        ctx.overwrites = getattr(weight, "overwrite_main_grad", False)
        ctx.delayed = None
        if _active and isinstance(_active[-1], DelayedScaling):
            forward = module.fp8_meta["scaling_fwd"]
            ctx.delayed = module.fp8_meta["scaling_bwd"]
            x = forward.rounded(x, 0)
            weight = forward.rounded(weight, 1)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad if ctx.delayed is None else ctx.delayed.rounded(grad, 0)
        of_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.fuses:
            total = ctx.weight.main_grad
            total.mul_(0 if ctx.overwrites or ctx.is_first else 1).add_(of_weight)
            ctx.weight.grad_added_to_main_grad = True
            of_weight = torch.full_like(of_weight, torch.nan)
        return grad @ weight, of_weight, None, None


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, one_off: bool) -> Tensor:
    weight = weight + 1 if one_off else weight
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        assert num_gemms == 1
        recipe = _active[-1]
        steps, e4m3, e5m2 = recipe.amax_history_len, torch.float8_e4m3fn, torch.float8_e5m2
        self.fp8_meta["scaling_fwd"] = _DelayedState(steps, e4m3, e4m3, e4m3)
        of_gradient = e5m2 if recipe.fp8_format == "hybrid" else e4m3
        self.fp8_meta["scaling_bwd"] = _DelayedState(steps, of_gradient, of_gradient)

    def note(self, **more: Any) -> None:
        recipe = _active[-1] if _active else None
        CALLS.append({"kind": type(self).__name__, "recipe": recipe, **more})

    def parameter(self, name: str, *shape: int) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(*shape, device="meta")))


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
    ) -> None:
        super().__init__()
        assert device == "meta", "our parameters take the place of its own"
        asked = ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad
        self.overlaps = ub_name, *asked
        if any(asked):
            assert BUFFERS, "initialize_ub() must be called before layer construction."
            assert ub_name in ("qkv", "proj", "fc1", "fc2")
            assert sequence_parallel
        assert tp_group is None or tp_group.size() == tp_size
        self.fuse_wgrad_accumulation, self.group = fuse_wgrad_accumulation, tp_group
        self.mode, self.sequence_parallel = parallel_mode, sequence_parallel
        out_features //= tp_size if parallel_mode == "column" else 1
        in_features //= tp_size if parallel_mode == "row" else 1
        self.shape = out_features, in_features
        self.parameter("weight", *self.shape)
        self.has_bias = bias
        if bias:
            self.parameter("bias", out_features)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        assert self.weight.shape == self.shape
        self.note(is_first=is_first_microbatch, fuses=self.fuse_wgrad_accumulation)
        return self.product(inp, is_first_microbatch)

    def product(self, x: Tensor, is_first: bool | None) -> Tensor:
        group, cuts = self.group, self.sequence_parallel
        if self.mode == "column" and cuts:
            x = mappings.gather_from_sequence_parallel_region(x, group=group)
        elif self.mode == "column":
            x = mappings.copy_to_tensor_model_parallel_region(x, group)
        y = _Product.apply(x, self.weight, self, is_first)
        if self.mode == "row" and cuts:
            y = mappings.reduce_scatter_to_sequence_parallel_region(y, group)
        elif self.mode == "row":
            y = mappings.reduce_from_tensor_model_parallel_region(y, group)
        return y + self.bias if self.has_bias else y


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        bias: bool = True,
        normalization: str = "LayerNorm",
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        zero_centered_gamma: bool = False,
        device: str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
    ) -> None:
        super().__init__(
            *(in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_group),
            *(tp_size, bias, params_dtype, parallel_mode, device, ub_overlap_ag, False),
            *(ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, ub_name),
        )
        self.eps, self.one_off = eps, zero_centered_gamma
        self.parameter("layer_norm_weight", in_features)
        self.has_norm_bias = normalization != "RMSNorm"
        if self.has_norm_bias:
            self.parameter("layer_norm_bias", in_features)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        weight = self.layer_norm_weight
        bias = self.layer_norm_bias if self.has_norm_bias else None
        x = _norm(inp, weight, bias, self.eps, self.one_off)
        return super().forward(x, is_first_microbatch)


class LayerNorm(_Module):
    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: str = "cuda",
    ) -> None:
        super().__init__()
        self.eps, self.one_off = eps, zero_centered_gamma
        self.parameter("weight", normalized_shape)
        if type(self) is LayerNorm:
            self.parameter("bias", normalized_shape)

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        return _norm(x, self.weight, getattr(self, "bias", None), self.eps, self.one_off)


class RMSNorm(LayerNorm):
    pass


class GroupedLinear(_Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        fuse_wgrad_accumulation: bool = False,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: str = "cuda",
    ) -> None:
        super().__init__()
        assert not bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        for i in range(num_gemms):
            self.parameter(f"weight{i}", out_features, in_features)

    def forward(
        self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Tensor:
        self.note(splits=tuple(m_splits), is_first=is_first_microbatch)
        weights = [getattr(self, f"weight{i}") for i in range(len(m_splits))]
        parts = zip(inp.split(m_splits), weights, strict=True)
        return torch.cat([_Product.apply(x, w, self, is_first_microbatch) for x, w in parts])


class Fp8Padding(_Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        assert align_size is not None
        self.size = align_size

    def sizes(self, m_splits: Sequence[int]) -> list[int]:
        return [n + -n % self.size for n in m_splits]

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        parts = (F.pad(x, (0, 0, 0, -len(x) % self.size)) for x in inp.split(m_splits))
        return torch.cat(list(parts)), self.sizes(m_splits)


class Fp8Unpadding(Fp8Padding):
    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:  # type: ignore[override]
        parts = zip(inp.split(self.sizes(m_splits)), m_splits, strict=True)
        return torch.cat([x[:n] for x, n in parts])


class DotProductAttention(_Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        self.shape = num_attention_heads, num_gqa_groups, kv_channels
        self.dropout, self.scale, self.softmax = attention_dropout, softmax_scale, softmax_type
        self.around = {"cp_ranks": cp_global_ranks, "cp_type": cp_comm_type, "cp": cp_group}
        if softmax_type == "learnable":
            self.parameter("softmax_offset", num_attention_heads)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
    ) -> Tensor:
        assert self.shape == (query_layer.shape[-2], key_layer.shape[-2], key_layer.shape[-1])
        self.note(mask=attn_mask_type, format=qkv_format, window=window_size, **self.around)
        sees = (query_layer, window_size, "causal" in str(attn_mask_type))
        if qkv_format == "thd":
            assert cu_seqlens_q is not None
            cuts = cu_seqlens_q.diff().tolist()
            rows = zip(*(x.split(cuts) for x in (query_layer, key_layer, value_layer)), strict=True)
            return torch.cat([self.one(*(x[:, None] for x in r), *sees[1:]) for r in rows])[:, 0]
        return self.one(query_layer, key_layer, value_layer, *sees[1:])

    def one(
        self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int] | None, causal: bool
    ) -> Tensor:
        """[s, b, n, d] -> [s, b, n d]"""
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
        scores = torch.einsum("qbnd,kbnd->bnqk", q, k) * self.scale
        left, right = window or (-1, 0 if causal else -1)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        seen = seen.tril(right) if right >= 0 else seen
        seen = seen.triu(-left) if left >= 0 else seen
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.softmax != "vanilla":
            sink = getattr(self, "softmax_offset", torch.zeros(q.shape[2]))
            sink = sink.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink.to(scores.dtype)], -1)
        probs = scores.softmax(-1)[..., : len(k)]
        probs = F.dropout(probs, self.dropout, self.training)
        return torch.einsum("bnqk,kbnd->qbnd", probs, v).flatten(2)


@contextlib.contextmanager
def autocast(enabled: bool = True, recipe: Any = None) -> Iterator[None]:
    assert enabled
    _active.append(recipe)
    try:
        yield
    finally:
        _active.pop()


@dataclass(frozen=True)
class Float8CurrentScaling:
    fp8_format: Any = None


class Float8BlockScaling(Float8CurrentScaling):
    pass


class MXFP8BlockScaling(Float8CurrentScaling):
    pass


@dataclass(frozen=True)
class NVFP4BlockScaling:
    pass


@dataclass(frozen=True)
class DelayedScaling:
    margin: int = 0
    fp8_format: Any = None
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"


class UserBufferQuantizationMode(enum.Enum):
    NONE = "none"
    FP8 = "fp8"


def initialize_ub(
    shape: list[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: list[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: dict[str, dict[str, Any]] | None = None,
    bootstrap_backend: str | None = None,
) -> None:
    if BUFFERS:
        raise RuntimeError("UB communicators are already initialized.")
    assert bootstrap_backend in ("gloo", "mpi", "nccl")
    dist.new_group()  # as the package does, on all ranks
    BUFFERS.append(
        {
            "shape": shape,
            "tp_size": tp_size,
            "modes": [mode.name for mode in quantization_modes or []],
            "use_fp8": use_fp8,
            "settings": ub_cfgs,
            "backend": bootstrap_backend,
        }
    )


PARTS = (
    *(Linear, LayerNormLinear, GroupedLinear, LayerNorm, RMSNorm, DotProductAttention),
    *(Fp8Padding, Fp8Unpadding, autocast, initialize_ub),
)
RECIPES = (
    *(Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling),
    DelayedScaling,
)


@contextlib.contextmanager
def installed(version: str = "2.20.2") -> Iterator[list[dict[str, Any]]]:
    """As if the package imported here, on a GPU; gives the calls of its modules."""
    formats = types.SimpleNamespace(HYBRID="hybrid", E4M3="e4m3")
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {"__version__": version},
        "transformer_engine.pytorch": {
            part.__name__: part for part in (*PARTS, UserBufferQuantizationMode)
        },
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {r.__name__: r for r in RECIPES} | {"Format": formats},
    }
    modules = {}
    for name, content in contents.items():
        modules[name] = types.ModuleType(name)
        modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        modules[name].__path__ = []
        vars(modules[name]).update(content)
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    CALLS.clear()
    BUFFERS.clear()
    optional.why_missing.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():  # other modules that are imported meanwhile stay
            patch.setitem(sys.modules, name, module)
        patch.setattr(engine, "_why_no_gpu", lambda: None)
        patch.setattr(engine, "DTYPES", dtypes)
        try:
            yield CALLS
        finally:
            optional.why_missing.cache_clear()
