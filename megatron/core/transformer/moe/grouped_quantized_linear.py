"""Grouped GEMMs of experts in fp8, on a GPU with Triton.

Dimensions as in `grouped_linear`, codes and scales as a loop over the experts' `LinearQuantizer`
would compute them: one scale per expert and tensor, or one per block.  The host needs no row
counts.  Forward, input gradients and weight gradients are fp8 GEMMs.

Collectives over ``amax_group`` with one scale per tensor, in this order: a max-reduction of the
amax values of all weights after each change, and with delayed scaling of those of x and of the
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.fusions import kernels
from megatron.core.params.param_info import info_of
from megatron.core.tensor_parallel.layers import Linear
from megatron.core.tensor_parallel.quantized_linear import (
    GRADIENT,
    INPUT,
    LinearQuantizer,
    Recipe,
    agreed_amax,
)
from megatron.core.tensor_parallel.weight_gradient import (
    add_to_main_grad,
    adds_to_main_grad,
)
from megatron.core.transformer.moe.grouped_linear import (
    GroupedGemms,
    GroupedWeightGrad,
    RowGroups,
    stacked,
)


class _Codes(NamedTuple):
    """Codes of rows [m, c], transposed [c, p], or of matrices [e, o, i], and their scales.

    The kernels describe p and the shapes of scales.
    """

    codes: Tensor
    scale: Tensor


class GroupQuantizer(GroupedGemms):
    """Quantizes the GEMM operands of one matrix of all experts, with the experts' quantizers."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        found = [linear.quantizer for linear in linears]
        self._quantizers = [q for q in found if isinstance(q, LinearQuantizer)]
        assert len(self._quantizers) == len(found), "checked by `unsupported_reason`"
        self._kept: dict[bool, _Codes] = {}  # quantized weights; key: whether transposed
        self._kept_of: list[tuple[int, int]] = []  # addresses and versions of their weights

    @staticmethod
    def unsupported_reason(linears: Sequence[Linear], where: torch.device) -> str | None:
        """Return why ``where`` has no kernels for these quantized layers; None if it has.

        The layers have weights that `grouped_linear.unsupported_reason` supports.
        """
        quantizer = linears[0].quantizer
        weight: Any = linears[0].weight
        if not isinstance(quantizer, LinearQuantizer) or quantizer.recipe.is_fp4:
            return "their values are fp4"
        if info_of(weight).gathered_as_codes:
            return "--fp8-param-gather stores their weights in fp8"
        if not device.multiplies_fp8(where):
            return "this GPU has no fp8 matmuls"
        if kernels.find("grouped_matmul", weight) is None:
            return "fp8 experts need Triton"
        return None

    @property
    def recipe(self) -> Recipe:
        """The recipe of all experts."""
        return self._quantizers[0].recipe

    def rows(self, which: int, x: Tensor, ends: Tensor, *, turned: bool) -> tuple[_Codes, _Codes]:
        """Quantize the contiguous rows ``x`` [m, c]; ``which``: INPUT or GRADIENT.

        Return codes for a GEMM that sums over c, and if ``turned`` those for a GEMM that sums over
        the rows.
        """
        recipe = self.recipe
        to = (recipe.forward if which == INPUT else recipe.backward).dtype
        fused = _found("quantize", x)
        scaling: dict[str, Any] = {"block": recipe.block}
        if recipe.block is None:
            amax = self._range(which, fused.amax_of_groups(x, ends))
            scaling = {"amax": amax, "margin": recipe.margin if recipe.history else 0}
        rows, columns = fused.quantize_groups(x, to, ends, turned=turned, **scaling)
        return _Codes(*rows), _Codes(*columns)

    def input(
        self, x: Tensor, groups: RowGroups, needs_weight_grad: bool
    ) -> tuple[_Codes, tuple[Tensor, ...]]:
        """See `GroupedGemms`."""
        saves_codes = self.recipe.wgrad and needs_weight_grad
        rows, columns = self.rows(INPUT, x, groups.ends, turned=saves_codes)
        return rows, tuple(columns) if saves_codes else (x,)

    def product(
        self,
        rows: _Codes,
        groups: RowGroups,
        weights: Sequence[Tensor],
        like: Tensor,
        *,
        of_gradient: bool = False,
    ) -> Tensor:
        """See `GroupedGemms`."""
        block = self.recipe.block or 0
        y: Tensor = _found("grouped_matmul", rows.codes).product(
            rows,
            self.weights(weights, transposed=of_gradient),
            groups.ends,
            like.dtype,
            block=block,
            is_square=block > 0 and self.recipe.has_square_blocks,
            fast=not of_gradient,
        )
        return y

    def gradient(
        self, grad: Tensor, groups: RowGroups, saved: list[Tensor]
    ) -> tuple[_Codes, Callable[[Sequence[Tensor | None]], GroupedWeightGrad]]:
        """See `GroupedGemms`."""
        x, *scales = saved
        rows, columns = self.rows(GRADIENT, grad, groups.ends, turned=bool(scales))
        if not scales:
            return rows, lambda weights: GroupedWeightGrad(weights, grad, x, groups)
        codes = _Codes(x, scales[0])
        return rows, lambda weights: _QuantizedWeightGrad(
            weights, columns, codes, groups, self.recipe
        )

    def _range(self, which: int, amax: Tensor) -> Tensor:
        """Return the magnitudes [e] that the scales must represent; note ``amax`` [e]."""
        first = self._quantizers[0]
        if not first.recipe.history:
            return amax
        if first.training:
            noted = [quantizer.amax[which] for quantizer in self._quantizers]
            torch._foreach_maximum_(noted, list(amax.unbind()))
        past = torch.stack([quantizer.amax_history[which] for quantizer in self._quantizers])
        known = past.amax(1) if first.recipe.takes_max else past[:, 0]
        own = agreed_amax(amax.clone(), first.amax_group)
        # A value that is not finite makes all codes of its expert NaN, although `known` clips it.
        return torch.where(known > 0, known + 0 * amax, own)

    def weights(self, weights: Sequence[Tensor], *, transposed: bool = False) -> _Codes:
        """Quantize the weights [e, o, i], or ``transposed`` [e, i, o].

        Kept until a weight changes, under a wrapper that keeps complete weights; transposed ones
        only with --keep-fp8-transpose-cache.
        """
        recipe = self.recipe
        first = self._quantizers[0]
        state = [(weight.data_ptr(), weight._version) for weight in weights]
        if self._kept_of != state:
            self._kept = {}
            self._kept_of = state
        found = self._kept.get(transposed)
        if found is not None:
            return found
        if transposed and (recipe.block is None or recipe.has_square_blocks):
            plain = self.weights(weights)
            scale = plain.scale if recipe.block is None else plain.scale.transpose(1, 2)
            found = _Codes(_found("quantize", plain.codes).transposed(plain.codes), scale)
        else:
            found = self._quantized(stacked(weights), turned=transposed)
        if hasattr(weights[0], "main_grad") and (not transposed or first.keeps_transposed):
            self._kept[transposed] = found
        return found

    def _quantized(self, whole: Tensor, *, turned: bool) -> _Codes:
        recipe = self.recipe
        fused = _found("quantize", whole)
        to = recipe.forward.dtype
        if recipe.block is not None:
            shape = {"is_square": recipe.has_square_blocks, "turned": turned}
            return _Codes(*fused.quantize_matrices(whole, to, recipe.block, **shape))
        experts, o, i = whole.shape
        rows = whole.reshape(experts * o, i)
        ends = torch.arange(o, experts * o + 1, o, dtype=torch.int32, device=whole.device)
        amax = agreed_amax(fused.amax_of_groups(rows, ends), self._quantizers[0].amax_group)
        (codes, scale), _ = fused.quantize_groups(rows, to, ends, amax=amax)
        return _Codes(codes.view_as(whole), scale)


class _QuantizedWeightGrad(GroupedWeightGrad):
    """`GroupedWeightGrad` of transposed codes."""

    def __init__(
        self,
        weights: Sequence[Tensor | None],
        grad: _Codes,
        rows: _Codes,
        groups: RowGroups,
        recipe: Recipe,
    ) -> None:
        super().__init__(weights, grad.codes, rows.codes, groups)
        self._scales = grad.scale, rows.scale
        self._block = recipe.block or 0

    def _has_added(self, total: Tensor, *, keep: bool) -> bool:
        operands = zip((self.grad, self.x), self._scales, strict=True)
        options = {"keep": keep, "block": self._block}
        fused = _found("grouped_matmul", self.grad)
        fused.add_scaled_products(*operands, self._groups.ends, total, **options)
        return True

    def _computed(self) -> list[Tensor | None]:
        first = self.params[0]
        like = first.main_grad if adds_to_main_grad(first) else first
        products = like.new_empty((len(self._weights), *first.shape))
        self._has_added(products, keep=False)
        return [
            add_to_main_grad(weight, product) if adds_to_main_grad(weight) else product
            for weight, product in zip(self._weights, products, strict=True)
            if weight is not None
        ]


def _found(name: str, x: Tensor) -> ModuleType:
    fused = kernels.find(name, x)
    assert fused is not None, "checked by `GroupQuantizer.unsupported_reason`"
    return fused
