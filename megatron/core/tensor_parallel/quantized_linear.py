"""Linear layers with fp8 or fp4 GEMMs: forward, input gradient and weight gradient.

``t`` tokens, ``i``/``o`` input and output width of this rank's weight; x [t, i], weight [o, i],
output gradient g [t, o].  Forward computes x W^T, backward g W and g^T x, all by
`low_precision.product`.  Scales of blocks must run along the dimension that a GEMM sums over, so
recipes with blocks quantize x and g twice: along the width for x W^T and g W, and along the tokens
for g^T x.

Collectives, in addition to those of `linear`.  With sequence parallelism, the quantized x is
all-gathered instead of x.  With one scale per tensor, amax values are max-reduced over
``amax_group``, the ranks that hold other parts of a micro-batch's tensors:

- of the weight, after each change;
- of x and g with delayed scaling, as long as the history is empty;
- of x with current scaling (no history) and sequence parallelism.

`update_amax_histories` reduces the amax values of all layers at the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError
from megatron.core.fusions.quantize import product, quantize, quantize_and_look
from megatron.core.low_precision import E2M1, FloatFormat, Scaled, largest, rotated
from megatron.core.parallel.collectives import all_reduce_over
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import ParamInfo, set_info
from megatron.core.tensor_parallel.linear import Gemms, LinearCall, Params, linear_of
from megatron.core.tensor_parallel.mappings import all_gather_first_dim
from megatron.core.tensor_parallel.weight_gradient import (
    WeightGrad,
    add_to_main_grad,
    adds_to_main_grad,
    has_been_added,
)

INPUT = 0
GRADIENT = 1  # rows of an amax history


@dataclass(frozen=True)
class Recipe:
    """Quantization settings of the GEMM operands of a layer."""

    forward: FloatFormat  # format of inputs and weights
    backward: FloatFormat  # format of gradients
    block: int | None = None  # values in a row that share a scale; None: one scale per tensor
    has_square_blocks: bool = True  # weight blocks: both orientations use the same quantization
    wgrad: bool = True  # quantize the GEMM of the weight gradient too
    history: int = 0  # length of the amax history in steps; 0: scale by the tensor's own amax
    takes_max: bool = False  # use the maximum of the history instead of its newest value
    margin: int = 0  # extra headroom of delayed scales, in powers of two

    @property
    def is_fp4(self) -> bool:
        """Whether the format is fp4.

        Gradients are then rounded stochastically, and the operands of the weight gradient are
        multiplied by an orthogonal matrix that spreads outliers.
        """
        return self.forward is E2M1


class AmaxHistory(nn.Module):
    """Amax values of one linear layer, if the recipe scales by those of earlier steps.

    ``amax_history`` [2, steps]: amax of inputs and of gradients in each step, over all
    micro-batches and ranks, newest first; 0 for steps that have not happened.  ``amax`` [2]: those
    of the current step so far, on this rank.
    """

    amax_history: Tensor
    amax: Tensor

    def __init__(self, recipe: Recipe, weight: Tensor, *, is_expert: bool) -> None:
        super().__init__()
        self.recipe = recipe
        self.is_expert = is_expert
        if recipe.history:
            zeros = torch.zeros(2, recipe.history, device=weight.device)
            self.register_buffer("amax_history", zeros)
            set_info(
                self.amax_history, ParamInfo(global_shape=(2, recipe.history), is_expert=is_expert)
            )
            self.register_buffer("amax", zeros.new_zeros(2), persistent=False)

    def known(self, which: int) -> Tensor:
        """Return the amax that the history gives for inputs or gradients; 0 if it is empty."""
        past = self.amax_history[which]
        return past.amax() if self.recipe.takes_max else past[0]

    @staticmethod
    def end_batch(models: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
        """Append to the histories; `finalize_model_grads` calls it once a step."""
        update_amax_histories(models, groups)

    def end_pass(self) -> None:
        """Complete ``amax`` at the end of a step."""


class LinearQuantizer(AmaxHistory, Gemms):
    """Runs the GEMMs of one linear layer in low precision; holds cached weights."""

    def __init__(
        self, recipe: Recipe, weight: Tensor, *, amax_group: ProcessGroup, is_expert: bool
    ) -> None:
        super().__init__(recipe, weight, is_expert=is_expert)
        self.amax_group = amax_group
        self._kept: dict[bool, Scaled] = {}  # cached quantized weight; key: transposed blocks
        self._kept_of: tuple[int, int] | None = None  # address and version of the cached weight
        self.keeps_transposed = False  # --keep-fp8-transpose-cache
        self._transposed: Scaled | None = None  # contiguous transposed weight [i, o] of this step
        self._is_warm = [False, False]  # whether the rows of the history have a value

    def forward(self, x: Tensor, call: LinearCall) -> Tensor:
        """Compute x W^T + b as `linear` does."""
        return linear_of(x, call, self)

    def input(self, x: Tensor, call: LinearCall, keeps: bool) -> tuple[Scaled, tuple[Tensor, ...]]:
        """See `Gemms`.  Keeps x as the GEMM of the weight gradient reads it: quantized or not."""
        recipe = self.recipe
        flat = x.flatten(0, -2)
        gather = call.gather_group
        saves_codes = recipe.wgrad and keeps
        # An all-gather in backward needs the rows of the tokens, not of their transpose.
        turns = saves_codes and gather is None
        rows = self.rows(INPUT, flat, is_gathered=gather is not None, turns=turns)
        if not saves_codes:
            return rows, (flat if keeps else flat.new_empty(0, 0),)
        is_whole = recipe.block is None
        codes = _turned(rows) if is_whole else self.columns(INPUT, flat, gather)
        return rows, (codes.codes, codes.scale)

    def gradient(self, grad: Tensor, saved: list[Tensor]) -> Scaled:
        """See `Gemms`."""
        return self.rows(GRADIENT, grad.flatten(0, -2), turns=len(saved) > 1)

    def gather(self, rows: Scaled, group: ProcessGroup) -> Scaled:
        """All-gather codes as bytes, and scales if they belong to blocks.  Collective."""
        codes = all_gather_first_dim(rows.codes.view(torch.uint8), group).view(rows.codes.dtype)
        scale = rows.scale if rows.block is None else all_gather_first_dim(rows.scale, group)
        return Scaled(codes, scale, rows.block)

    def product(
        self, rows: Scaled, matrix: Scaled, dtype: torch.dtype, bias: Tensor | None, forward: bool
    ) -> Tensor:
        """See `Gemms`."""
        return product(rows, matrix, dtype, bias=bias, fast=forward)

    def weight_grad(
        self,
        params: Params,
        grad: Tensor,
        rows: Scaled,
        saved: list[Tensor],
        call: LinearCall,
    ) -> WeightGrad:
        """See `Gemms`."""
        x, *scales = saved
        flat = grad.flatten(0, -2)
        if not scales:
            return WeightGrad(*params, flat, x, group=call.gather_group, is_own=True)
        size = self.recipe.block
        block = None if size is None else (size, 1)
        codes = _turned(rows) if size is None else self.columns(GRADIENT, flat)
        return _ScaledWeightGrad(
            *params, flat, codes, Scaled(x, scales[0], block), group=call.gather_group
        )

    def rows(
        self, which: int, x: Tensor, *, is_gathered: bool = False, turns: bool = False
    ) -> Scaled:
        """Quantize ``x`` [t, w] for a GEMM that sums over w.

        ``which``: INPUT or GRADIENT.  ``is_gathered``: ranks all-gather the result, so their
        scales must be equal.  ``turns``: a GEMM of the transposed matrix follows, if the recipe has
        one scale per tensor.  May be collective over ``amax_group``, as described above.
        """
        recipe = self.recipe
        to = self._format(which)
        if recipe.block is not None:
            at_random = recipe.is_fp4 and which == GRADIENT
            return quantize(x, to, (1, recipe.block), at_random=at_random)
        if not recipe.history:
            amax = largest(x)
            amax = agreed_amax(amax, self.amax_group) if is_gathered else amax
            return quantize(x, to, amax=amax, turns=turns)
        known = self.known(which)
        # This synchronizes with a GPU, but only as long as the history is empty.
        self._is_warm[which] = self._is_warm[which] or bool(known > 0)
        if self._is_warm[which]:
            scaled, amax = quantize_and_look(x, to, known, recipe.margin, turns=turns)
            self._note(which, amax)
            return scaled
        amax = largest(x)
        self._note(which, amax)
        amax = agreed_amax(amax, self.amax_group)
        return quantize(x, to, amax=amax, margin=recipe.margin, turns=turns)

    def _note(self, which: int, amax: Tensor) -> None:
        if self.training:
            self.amax[which] = torch.maximum(self.amax[which], amax)

    def columns(self, which: int, x: Tensor, group: ProcessGroup | None = None) -> Scaled:
        """Quantize ``x`` [t, w] for a GEMM that sums over t; only for recipes with blocks.

        Raises ConfigError if, with sequence parallelism (``group``), a block would contain tokens
        of two ranks.
        """
        recipe = self.recipe
        size = self.recipe.block
        assert size is not None, "one scale serves both directions"
        if group is not None and len(x) % size:
            raise ConfigError(
                f"--sequence-parallel: {len(x)} tokens of a micro-batch on a rank are no multiple "
                f"of {size}, of which each {size} share a scale in this fp8 or fp4 recipe: change "
                "--seq-length or --micro-batch-size, or use --fp8-recipe tensorwise"
            )
        x = rotated(x) if recipe.is_fp4 else x
        at_random = recipe.is_fp4 and which == GRADIENT
        return quantize(x, self._format(which), (size, 1), at_random=at_random)

    def matrix(
        self, weight: Tensor, dtype: torch.dtype | None = None, *, transposed: bool = False
    ) -> Scaled:
        """Quantize the weight [o, i], or ``transposed`` [i, o], for a GEMM over the last dimension.

        Lifetime of the cache: under a data-parallel wrapper that keeps complete weights, which
        ``main_grad`` indicates, the result is cached until the weight changes (optimizer steps and
        parameter all-gathers increase its version).  With ``keeps_transposed`` a contiguous copy of
        the transposed weight is cached too, under any wrapper, at most until
        `update_amax_histories`: only backward passes use it, and these end with the step.
        """
        state = weight.data_ptr(), weight._version
        is_whole = hasattr(weight, "main_grad")
        if self._kept_of != state:
            self._kept = {}
            self._kept_of = state
            if is_whole:
                self._transposed = None
        kept = self._kept if is_whole else {}
        if not (transposed and self.keeps_transposed):
            return self._quantized(weight, kept, transposed)
        if self._transposed is None:
            scaled = self._quantized(weight, kept, transposed)
            codes = scaled.codes.contiguous()
            self._transposed = Scaled(codes, scaled.scale.contiguous(), scaled.block)
        return self._transposed

    def _quantized(self, weight: Tensor, kept: dict[bool, Scaled], transposed: bool) -> Scaled:
        """Return the quantized weight: the all-gathered codes, the one in ``kept``, or a new one.

        A new one is added to ``kept``.
        """
        gathered = getattr(weight, "gathered_codes", None)
        if gathered is not None and gathered.version == weight._version:
            stored: Scaled = gathered.scaled
            return stored.t() if transposed else stored
        size = self.recipe.block
        to = self.recipe.forward
        flips = size is not None and not self.recipe.has_square_blocks and transposed
        if flips not in kept:
            block = None
            if size is not None and self.recipe.has_square_blocks:
                block = size, size
            elif size is not None:
                block = (size, 1) if flips else (1, size)
            values = weight.detach()
            amax = agreed_amax(largest(values), self.amax_group) if block is None else None
            kept[flips] = quantize(values, to, block, amax=amax)
        scaled = kept[flips]
        return scaled.t() if transposed else scaled

    def _format(self, which: int) -> FloatFormat:
        return self.recipe.forward if which == INPUT else self.recipe.backward


def agreed_amax(amax: Tensor, group: ProcessGroup) -> Tensor:
    """Return the largest ``amax`` of the ranks, in place.  Collective over ``group``."""
    return all_reduce_over(amax, group, op=dist.ReduceOp.MAX)


def quantizers_of(models: Sequence[nn.Module]) -> list[LinearQuantizer]:
    """Return the quantizers of all layers of ``models``."""
    return [m for model in models for m in model.modules() if isinstance(m, LinearQuantizer)]


@torch.no_grad()
def update_amax_histories(models: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
    """Append the amax values of the step, over all micro-batches and ranks, to the histories.

    Call it at the end of each step.  A layer without tokens or with a non-finite amax repeats its
    newest value.  Drops cached transposed weights.  Collective over tp_dp_cp, and for experts over
    expt_tp and expt_dp.
    """
    for each in quantizers_of(models):
        each._transposed = None  # the weight may change
    found = [m for model in models for m in model.modules() if isinstance(m, AmaxHistory)]
    delayed = [layer for layer in found if layer.recipe.history]
    for layer in delayed:
        layer.end_pass()
    for is_expert, over in ((False, (groups.tp_dp_cp,)), (True, (groups.expt_tp, groups.expt_dp))):
        chosen = [layer for layer in delayed if layer.is_expert == is_expert]
        if not chosen:
            continue
        amaxes = torch.stack([layer.amax for layer in chosen])
        all_reduce_over(amaxes, *over, op=dist.ReduceOp.MAX)
        for layer, amax in zip(chosen, amaxes, strict=True):
            history = layer.amax_history
            newest = torch.where(amax.isfinite() & (amax > 0), amax, history[:, 0])
            history.copy_(torch.cat([newest.unsqueeze(1), history[:, :-1]], 1))
            layer.amax.zero_()


class _ScaledWeightGrad(WeightGrad):
    """`WeightGrad` with quantized operands; the codes of x are all-gathered as bytes."""

    def __init__(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
        grad: Tensor,
        codes: Scaled,
        x: Scaled,
        *,
        group: ProcessGroup | None,
    ) -> None:
        # A queue keeps the unquantized gradient only if the bias gradient, its sum, needs it.
        grad = codes.codes if bias is None else grad
        super().__init__(weight, bias, grad, x.codes.view(torch.uint8), group=group, is_own=True)
        self._codes = codes
        self._scaled = x

    def start(self) -> None:
        group = self.group
        scale = self._scaled.scale
        if group is not None and self._scaled.block is not None:
            scale = all_gather_first_dim(scale, group)
            self._scaled = Scaled(self._scaled.codes, scale, self._scaled.block)
        super().start()

    def _product(self, weight: Tensor) -> Tensor | None:
        x = Scaled(self.x.view(self._scaled.codes.dtype), self._scaled.scale, self._scaled.block)
        grad = self._codes.t()
        if adds_to_main_grad(weight):
            total = weight.main_grad
            if not weight.overwrite_main_grad:
                return add_to_main_grad(weight, product(grad, x.t(), total.dtype))
            product(grad, x.t(), total.dtype, out=total)
            return has_been_added(weight)
        return product(grad, x.t(), weight.dtype)


def _turned(rows: Scaled) -> Scaled:
    """Return the matrix with the memory of its transpose alone, if it has both."""
    return rows if rows.turned is None else Scaled(rows.turned.t(), rows.scale)
