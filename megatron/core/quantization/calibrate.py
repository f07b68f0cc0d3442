"""Calibration: find the scales of a quantized model, in any parallel layout (PTQ).

``i``/``o`` input and output width of a layer over all ranks; W [o, i], inputs x [t, i].

1. Layers whose recipe needs it collect statistics of their unrounded inputs: SmoothQuant the
   largest magnitude of each channel, AWQ and GPTQ the second moments H = x^T x [i, i] (fp32, in
   memory for all layers of the rank at once).
2. SmoothQuant (arXiv 2211.10438) and AWQ (arXiv 2306.00978) multiply the columns of W by factors
   and divide the rows that compute these channels: a norm before qkv or fc1, the values before
   proj, the up projection before fc2 of a gated MLP.  So no layer needs factors at run time.  A
   layer is not smoothed if its channels come from a nonlinear function or feed other layers too
   (experts' fc1), nor in MLA and cross attention.
3. Scales of weights; GPTQ (arXiv 2210.17323) rounds the weight, column by column.
4. Static scales of inputs are measured on the changed, unrounded model.

Collectives, in the same order on all ranks of a group.  In the passes: an all-gather over tp of the
inputs of row-parallel layers.  After them: statistics are reduced over data parallelism, and over
tp where it shards tokens; weights of row-parallel layers are all-gathered over tp; scales and
losses that cover all rows of a column-parallel layer are reduced over tp.  Layers of experts use
expt_tp and expt_dp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.parallel.collectives import all_reduce_over, broadcast_json, gather_json
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import info_of
from megatron.core.quantization.formats import (
    NumberFormat,
    amax_of,
    codes_of,
    scale_of,
    scales_of,
    second_scale_of,
    values_of,
)
from megatron.core.quantization.observers import ObserverKind, RangeObserver
from megatron.core.quantization.quantizer import FakeQuantizer, FixedRounding, quantized_layers
from megatron.core.tensor_parallel.layers import Linear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import all_gather_last_dim
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.transformer_layer import TransformerLayer

_ALPHA = 0.5  # share of the inputs in SmoothQuant's factors
_EXPONENTS = 21  # of AWQ, from 0 to 1
_GAIN = 1e-3  # in loss that a larger exponent needs: layouts round losses differently
_DAMPING = 0.01  # of GPTQ, in mean diagonals of H
_COLUMNS = 128  # that GPTQ updates at once


@torch.no_grad()
def calibrate(
    chunks: Sequence[nn.Module],
    run_forward: Callable[[], object],
    groups: ProcessGroupCollection,
    *,
    observer: ObserverKind = "max",
) -> int:
    """Set the scales of all quantizers of ``chunks``; return the number of layers of this rank.

    ``run_forward`` runs the same calibration samples through the model, each time that it is
    called: up to three times.  May change weights, as described above.  Collective over all ranks.
    Raises ConfigError for weights or inputs without finite values, as of an expert without tokens.
    """
    sites = {
        layer: _Site(layer, quantizer, groups) for layer, quantizer in quantized_layers(chunks)
    }
    of_cache = [
        _RangeSite(module, groups)
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, FixedRounding)
    ]
    every = [*sites.values(), *of_cache]
    ranged = [site for site in every if site.has_range]
    needs = [any(site.algorithm != "max" for site in sites.values()), bool(ranged)]
    everywhere = torch.tensor(needs, dtype=torch.int32, device=device.current())
    all_reduce_over(everywhere, groups.world, op=ReduceOp.MAX)
    needs_statistics, needs_ranges = everywhere.tolist()
    _raise_for(
        [site.name for site in sites.values() if not site.weight.isfinite().all()],
        "--load: the weights of {} are not finite: calibrate another checkpoint",
        groups,
    )
    if needs_statistics:
        statistics = {layer: _Statistics(site) for layer, site in sites.items()}
        _run_observed(every, {s: statistics[layer] for layer, s in sites.items()}, run_forward)
        for found in statistics.values():
            found.reduce()
        _raise_for(
            [s.name for layer, s in sites.items() if not statistics[layer].is_usable],
            _NO_INPUT,
            groups,
        )
        for layer, source in _channel_sources(chunks):
            site = sites.get(layer)
            factors = None if site is None else _factors(site, statistics[layer], source)
            if site is not None and factors is not None:
                site.scale_columns(factors)
                source.divide(site.local(factors))
    for layer, site in sites.items():
        if site.algorithm == "gptq":
            site.round_weight(statistics[layer])
        else:
            site.set_scales()
    if needs_ranges:
        ranges = {site: RangeObserver(site.device, observer) for site in ranged}
        _run_observed(every, ranges, run_forward)
        for site, found in ranges.items():
            found.end_first_pass(*site.all_groups)
        _raise_for(
            [s.name for s, found in ranges.items() if not 0 < found.amax < float("inf")],
            _NO_INPUT,
            groups,
        )
        if observer != "max":
            _run_observed(every, ranges, run_forward)
        for site, found in ranges.items():
            site.set_input_scale(found)
    return len(sites)


def _run_observed(
    sites: Sequence[_RangeSite],
    observers: Mapping[_RangeSite, Callable[[Tensor], None]],
    run_forward: Callable[[], object],
) -> None:
    for site in sites:
        site.quantizer.observe = observers.get(site, _ignore)
    run_forward()
    for site in sites:
        site.quantizer.observe = None


def _ignore(x: Tensor) -> None:
    """Observe nothing; the layer does not round ``x`` meanwhile."""


_NO_INPUT = (
    "--calib-size: the calibration samples have no token, only zeros or values that are not "
    "finite for {}: give more samples, or exclude the layers by --kitchen-config-file"
)


def _raise_for(names: list[str], problem: str, groups: ProcessGroupCollection) -> None:
    """Raise the same ConfigError on all ranks if any has ``names`` of layers.  Collective."""
    found = gather_json(names, groups.world)
    bad = sorted({name for each in found or [] for name in each})
    if bad := broadcast_json(bad, groups.world):
        raise ConfigError(problem.format(f"{len(bad)} layers ({', '.join(bad[:3])})"))


class _RangeSite:
    """Values that are rounded by one scale, which all ranks share: keys or values of a layer."""

    has_range = True

    def __init__(
        self, quantizer: FakeQuantizer | FixedRounding, groups: ProcessGroupCollection
    ) -> None:
        self.quantizer: Any = quantizer
        self.tp = groups.tp
        self.data = groups.dp_cp

    @property
    def name(self) -> str:
        """Name of the scale, for error messages."""
        return info_of(self.quantizer.input_scale).name

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return cast(torch.device, self.quantizer.input_scale.device)

    @property
    def all_groups(self) -> tuple[ProcessGroup, ...]:
        """The groups whose ranks have a part of the values each, or the same values."""
        return self.tp, self.data

    def set_input_scale(self, observed: RangeObserver) -> None:
        """Set the static scale.  Collective."""
        to = self.quantizer.recipe.input
        amax = observed.range(to, *self.all_groups).view(1, 1)
        found = second_scale_of(amax) if to.has_two_levels else scale_of(amax, to)
        self.quantizer.input_scale.copy_(found)


class _Site(_RangeSite):
    """A quantized layer on this rank, and the ranks that share it."""

    def __init__(
        self, layer: Linear, quantizer: FakeQuantizer, groups: ProcessGroupCollection
    ) -> None:
        assert layer.weight is not None, "a quantized layer has a weight"
        super().__init__(quantizer, groups)
        self.weight = layer.weight
        self.to = quantizer.recipe.weight
        self.algorithm = quantizer.recipe.algorithm
        info = info_of(layer.weight)
        self.is_sharded = info.shard_count > 1
        if info.is_expert:
            self.tp = groups.expt_tp
            self.data = groups.expt_dp
        self.is_row = isinstance(layer, RowParallelLinear)
        self.has_range = quantizer.input_scale is not None

    @property
    def name(self) -> str:
        """Name of the layer."""
        return info_of(self.weight).name.removesuffix(".weight")

    @property
    def reduced(self) -> tuple[ProcessGroup, ...]:
        """The groups that sum statistics of inputs of full width."""
        return (self.data,) if self.is_row else self.all_groups

    def full(self, x: Tensor) -> Tensor:
        """Return x [.., i] of this rank's columns [.., i/tp].  Collective for a row layer."""
        return all_gather_last_dim(x.contiguous(), self.tp) if self.is_row else x

    def local(self, vector: Tensor) -> Tensor:
        """Return this rank's part of values [.., i] for each column."""
        if not self.is_row:
            return vector
        return vector.chunk(self.tp.size(), -1)[self.tp.rank()]

    def over_rows(self, values: Tensor, op: ReduceOp.RedOpType) -> Tensor:
        """Reduce values that cover this rank's rows.  Collective for a column layer."""
        return values if self.is_row else all_reduce_over(values, self.tp, op=op)

    def scale_columns(self, factors: Tensor) -> None:
        """Multiply the columns of the weight by ``factors`` [i]."""
        self.weight.copy_(self.weight.float() * self.local(factors))

    def set_scales(self) -> None:
        """Compute the scales of the weight.  Collective over tp for scales that span ranks."""
        quantizer = self.quantizer
        to = self.to
        amax = amax_of(self.weight, to)
        if self.is_sharded and info_of(quantizer.weight_scale).shard_dim is None:
            all_reduce_over(amax, self.tp, op=ReduceOp.MAX)
        scale_2 = None
        if quantizer.weight_scale_2 is not None:
            largest = amax.amax().view(1, 1)
            largest = all_reduce_over(largest, self.tp, op=ReduceOp.MAX)
            scale_2 = second_scale_of(largest)
            quantizer.weight_scale_2.copy_(scale_2)
        quantizer.weight_scale.copy_(scale_of(amax, to, scale_2))

    def round_weight(self, statistics: _Statistics) -> None:
        """Round the weight by GPTQ, and set its scales."""
        values, scale = gptq(self.full(self.weight).float(), statistics.moments, self.to)
        self.weight.copy_(self.local(values))
        is_by_column = info_of(self.quantizer.weight_scale).shard_dim == 1
        self.quantizer.weight_scale.copy_(self.local(scale) if is_by_column else scale)


class _Statistics:
    """Statistics of a layer's inputs, of full width."""

    def __init__(self, site: _Site) -> None:
        width = site.weight.shape[1] * (site.tp.size() if site.is_row else 1)
        zeros = site.weight.new_zeros
        self.site = site
        self.name = site.name
        self.is_needed = site.algorithm != "max"
        self.amax = zeros(width, dtype=torch.float32)
        has_moments = site.algorithm in ("awq", "gptq")
        self.moments = zeros((width, width) if has_moments else (0, 0), dtype=torch.float32)
        self.tokens = zeros((), dtype=torch.float64)

    @property
    def is_usable(self) -> bool:
        """Whether finite tokens were counted on all ranks, or none are needed."""
        is_finite = (self.amax.sum() + self.moments.sum()).isfinite()
        return not self.is_needed or bool((self.tokens > 0) & is_finite)

    def __call__(self, x: Tensor) -> None:
        """Add the tokens of ``x``.  Collective for a row layer."""
        if not self.is_needed:
            return
        rows = self.site.full(x.detach().flatten(0, -2)).float()
        if not len(rows):
            return
        self.tokens += len(rows)
        self.amax = torch.maximum(self.amax, rows.abs().amax(0))
        if self.moments.numel():
            self.moments.addmm_(rows.t(), rows)

    def reduce(self) -> None:
        """Add the statistics of all ranks.  Collective.  Ranks with equal tokens count alike."""
        all_reduce_over(self.tokens, *self.site.reduced)
        all_reduce_over(self.amax, *self.site.reduced, op=ReduceOp.MAX)
        if self.moments.numel():
            all_reduce_over(self.moments, *self.site.reduced)
            self.moments /= self.tokens.clamp(min=1).float()


@dataclass
class _Source:
    """Parameters whose rows compute the input channels of a layer.

    ``tensors``: rows [n, ..] or [n / width, width, ..], and what is added to their values before
    they multiply.  ``shared`` consecutive blocks of ``width`` channels have one block of rows.
    """

    tensors: Sequence[tuple[Tensor, float]]
    shared: int = 1
    width: int = 1

    def common(self, values: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Make ``values`` [i] equal for channels of one row, by reducing [.., shared, width]."""
        if self.shared == 1:
            return values
        blocks = values.view(-1, self.shared, self.width)
        return reduce(blocks).unsqueeze(1).expand_as(blocks).flatten()

    def divide(self, factors: Tensor) -> None:
        """Divide the rows by ``factors``, of this rank's channels."""
        own = factors.view(-1, self.shared, self.width)[:, 0]  # [n / width, width]
        own = own.flatten() if self.width == 1 else own
        for rows, added in self.tensors:
            wide = own.view(*own.shape, *(1 for _ in rows.shape[own.dim() :]))
            rows.copy_((rows.float() + added) / wide - added)


def _channel_sources(chunks: Sequence[nn.Module]) -> Iterator[tuple[Linear, _Source]]:
    """Yield layers whose input channels are computed linearly, with their source."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                yield from _norms(module)
            if isinstance(module, SelfAttention):
                yield from _values(module)
            if isinstance(module, MLP):
                yield from _gated(module)


def _norms(layer: TransformerLayer) -> Iterator[tuple[Linear, _Source]]:
    if layer.config.apply_residual_connection_post_layernorm:
        return  # the residual stream reads the norm too
    attention = getattr(layer, "self_attention", None)
    for norm, module, name in (
        (layer.input_layernorm, attention, "linear_qkv"),
        (layer.pre_mlp_layernorm, getattr(layer, "mlp", None), "linear_fc1"),
    ):
        linear = getattr(module, name, None)
        if isinstance(norm, Norm) and isinstance(linear, Linear):
            tensors: list[tuple[Tensor, float]] = [(norm.weight, float(norm.is_zero_centered))]
            if norm.bias is not None:
                tensors.append((norm.bias, 0.0))
            yield linear, _Source(tensors)


def _values(attention: SelfAttention) -> Iterator[tuple[Linear, _Source]]:
    qkv = attention.linear_qkv
    proj = attention.linear_proj
    if not (isinstance(qkv, Linear) and isinstance(proj, Linear) and qkv.weight is not None):
        return
    rows = info_of(qkv.weight).interleaved
    if len(rows) != 3 or proj.weight is None:
        return
    width = rows[-1]
    tensors = [t.unflatten(0, (-1, sum(rows)))[:, -width:] for t in _parameters(qkv)]
    heads_of_group = proj.weight.shape[1] // (len(tensors[0]) * width)
    yield proj, _Source([(t, 0.0) for t in tensors], heads_of_group, width)


def _gated(mlp: MLP) -> Iterator[tuple[Linear, _Source]]:
    first = mlp.linear_fc1
    second = mlp.linear_fc2
    config = mlp.config
    is_linear = config.gated_linear_unit and config.activation_func_clamp_value is None
    if not (is_linear and isinstance(first, Linear) and isinstance(second, Linear)):
        return
    if not config.glu_linear_offset:
        yield second, _Source([(t.chunk(2)[1], 0.0) for t in _parameters(first)])


def _parameters(layer: Linear) -> list[Tensor]:
    found = (layer.weight, getattr(layer, "bias", None))
    return [parameter.detach() for parameter in found if parameter is not None]


def _factors(site: _Site, statistics: _Statistics, source: _Source) -> Tensor | None:
    """Return the factors [i] of the columns; None for a recipe without.  Collective over tp."""
    if site.algorithm == "smoothquant":
        inputs = source.common(statistics.amax, lambda blocks: blocks.amax(1))
        weights = site.over_rows(site.full(site.weight.abs().amax(0).float()), ReduceOp.MAX)
        weights = source.common(weights, lambda blocks: blocks.amax(1))
        factors = inputs**_ALPHA / weights.clamp(min=1e-5) ** (1 - _ALPHA)
        return torch.where(inputs > 0, factors.clamp(min=1e-5), 1.0)
    if site.algorithm != "awq":
        return None
    moments = statistics.moments
    sizes = source.common(moments.diagonal().sqrt(), lambda blocks: blocks.mean(1)).clamp(min=1e-4)
    weight = site.full(site.weight).float()
    best = losses = None
    for exponent in torch.linspace(0, 1, _EXPONENTS).tolist():
        factors = sizes**exponent
        factors = factors / (factors.amax() * factors.amin()).sqrt()
        scaled = weight * factors
        scale, scale_2 = scales_of(scaled, site.to)
        codes = codes_of(scaled, scale, site.to, scale_2)
        rounded = values_of(codes, scale, site.to, scale_2, dtype=torch.float32)
        error = rounded / factors - weight
        loss = site.over_rows((error.matmul(moments) * error).sum(), ReduceOp.SUM)
        if losses is None or loss < losses * (1 - _GAIN):
            best = factors
            losses = loss
    return best


def gptq(weight: Tensor, moments: Tensor, to: NumberFormat) -> tuple[Tensor, Tensor]:
    """Round ``weight`` [o, i] so that its products with inputs of second moments [i, i] stay near.

    Each rounded column's error is moved to the columns after it.  Returns values and scales.  The
    format's blocks must lie within rows.
    """
    width = weight.shape[1]
    group = to.block[1] or width
    weight = weight.clone()
    moments = moments.clone()
    diagonal = moments.diagonal()
    is_unused = diagonal == 0
    diagonal += torch.where(is_unused, 1.0, 0.0) + _DAMPING * diagonal.mean()
    weight[:, is_unused] = 0
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    upper = torch.linalg.cholesky(inverse, upper=True)
    single = NumberFormat(to.kind, to.bits, (1, 0))
    scales = []
    out = torch.empty_like(weight)
    for start in range(0, width, _COLUMNS):
        stop = min(start + _COLUMNS, width)
        errors = torch.zeros_like(weight[:, start:stop])
        for column in range(start, stop):
            if column % group == 0:
                scales.append(scales_of(weight[:, column : column + group], single)[0])
            values = weight[:, column : column + 1]
            codes = codes_of(values, scales[-1], single)
            rounded = values_of(codes, scales[-1], single, dtype=weight.dtype)
            error = (values - rounded) / upper[column, column]
            weight[:, column:stop] -= error * upper[column, column:stop]
            errors[:, column - start] = error[:, 0]
            out[:, column] = rounded[:, 0]
        weight[:, stop:] -= errors.matmul(upper[start:stop, stop:])
    return out, torch.cat(scales, 1)
