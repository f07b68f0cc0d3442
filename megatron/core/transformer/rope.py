"""Rotary position embeddings: frequencies, their scalings to longer contexts, and their table.

``d`` head width, ``r`` rotated width (``rotary_percent`` of it), ``s`` positions.  Frequencies
[r/2] turn pair i by ``position * frequency[i]``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.fusions.rope import RotaryTable


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How frequencies are changed for contexts longer than those trained on.

    ``llama3``: long wavelengths are divided by ``factor``, short ones kept.  ``yarn``: the same
    with a linear ramp between ``beta_fast`` and ``beta_slow`` turns.  ``longrope``: a factor for
    each pair, ``short_factors`` up to ``original_max_positions`` tokens, ``long_factors`` beyond.
    """

    kind: str  # llama3, yarn, longrope
    factor: float = 8.0
    original_max_positions: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    round_correction_range: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float | None = None  # None: the kind's own rule

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            return yarn_mscale(self.factor, 1.0)
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_positions))
        return 1.0


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much larger scores are made where contexts are stretched by ``factor``."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def base_frequencies(width: int, base: float) -> Tensor:
    """base^(-2i/width) for pair i: [width/2] float32."""
    return 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


def llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide by the factor where a turn is longer than the original context allows."""
    turns_kept = scaling.original_max_positions / scaling.high_freq_factor
    turns_divided = scaling.original_max_positions / scaling.low_freq_factor
    wavelength = 2 * math.pi / frequencies
    divided = torch.where(wavelength > turns_divided, frequencies / scaling.factor, frequencies)
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * divided / scaling.factor + smooth * divided
    is_between = (wavelength >= turns_kept) & (wavelength <= turns_divided)
    return torch.where(is_between, between, divided)


def yarn_frequencies(width: int, base: float, scaling: RopeScaling) -> Tensor:
    """A ramp over pairs from the base frequencies to the ones divided by the factor."""

    def pair_with(turns: float) -> float:
        context = scaling.original_max_positions
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.round_correction_range:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    divided_share = ramp.clamp(0, 1)
    base_freq = base_frequencies(width, base)
    return base_freq / scaling.factor * divided_share + base_freq * (1 - divided_share)


def longrope_frequencies(
    width: int, base: float, scaling: RopeScaling, num_positions: int
) -> Tensor:
    """Base frequencies over the factors of the short or the long context."""
    is_long = num_positions > scaling.original_max_positions
    factors = scaling.long_factors if is_long else scaling.short_factors
    assert len(factors) == width // 2, f"longrope needs {width // 2} factors, not {len(factors)}"
    stretch = torch.tensor(factors, dtype=torch.float32)
    return 1.0 / (stretch * base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


class RotaryEmbedding(nn.Module):
    """The angles of rotary positions for one model; tables are kept between calls."""

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        *,
        scaling: RopeScaling | None = None,
    ) -> None:
        """``rope_scaling`` is Llama 3's; ``scaling`` any kind, and goes before it."""
        super().__init__()
        self.width = int(kv_channels * rotary_percent) // 2 * 2
        self.base, self.interleaved = rotary_base, rotary_interleaved
        self.interpolation_factor = seq_len_interpolation_factor
        if scaling is None and rope_scaling:
            scaling = RopeScaling(kind="llama3", factor=rope_scaling_factor)
        self.scaling = scaling
        self._table: RotaryTable | None = None
        self._table_key: object = None
        self._held: Tensor | None = None

    def frequencies(self, num_positions: int) -> Tensor:
        """[r/2] float32 on the CPU, for contexts of ``num_positions``."""
        scaling = self.scaling
        if scaling is None:
            return base_frequencies(self.width, self.base)
        if scaling.kind == "llama3":
            return llama3_frequencies(base_frequencies(self.width, self.base), scaling)
        if scaling.kind == "yarn":
            return yarn_frequencies(self.width, self.base, scaling)
        assert scaling.kind == "longrope", f"no rope scaling {scaling.kind!r}"
        return longrope_frequencies(self.width, self.base, scaling, num_positions)

    def angles(self, positions: Tensor, num_positions: int) -> Tensor:
        """[s] or [s, b] positions -> [s, 1 or b, 1, r/2] float32."""
        where = positions.float()
        if self.interpolation_factor is not None:
            where = where / self.interpolation_factor
        frequencies = self.frequencies(num_positions).to(positions.device)
        angles = where.unsqueeze(-1) * frequencies
        return angles[:, None, None] if positions.dim() == 1 else angles[:, :, None]

    def table(
        self, num_positions: int, offset: int, dtype: torch.dtype, held: Tensor | None = None
    ) -> RotaryTable:
        """The table of positions offset .. offset + num_positions - 1, or of those in ``held``."""
        key = (num_positions, offset, dtype, device.current())
        if key != self._table_key or held is not self._held or self._table is None:
            positions = held
            if positions is None:
                positions = torch.arange(offset, offset + num_positions, device=device.current())
            self._table = self.table_at(positions, offset + num_positions, dtype)
            self._table_key, self._held = key, held
        return self._table

    def table_at(self, positions: Tensor, num_positions: int, dtype: torch.dtype) -> RotaryTable:
        """The table of given positions, in a context of ``num_positions``."""
        angles = self.angles(positions, num_positions)
        amplitude = self.scaling.amplitude if self.scaling else 1.0
        cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
        return RotaryTable(cos.to(dtype), sin.to(dtype), self.interleaved)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """[s, 1, 1, r] float32: the angle that each element is turned by."""
        positions = torch.arange(offset, offset + max_seq_len, device=device.current())
        angles = self.angles(positions, offset + max_seq_len)
        if self.interleaved:
            return torch.stack((angles, angles), -1).flatten(-2)
        return torch.cat((angles, angles), -1)
