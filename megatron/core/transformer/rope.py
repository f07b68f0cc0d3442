"""Rotary position embeddings (RoPE): frequencies, context extension and cosine/sine tables.

``d`` head dimension, ``r`` rotated channels (``rotary_percent`` of d), ``s`` positions.  Channel
pair i is rotated by the angle ``position * frequencies[i]``, with frequencies [r/2].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.fusions.rope import RotaryTable
from megatron.core.parallel.context_parallel_partition import held_tokens, row_lengths


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling for contexts longer than those of pretraining.

    ``llama3``: frequencies of long wavelengths are divided by ``factor``, those of short ones stay.
    ``yarn``: the same with a linear ramp between ``beta_fast`` and ``beta_slow`` rotations over the
    original context (arXiv 2309.00071).  ``longrope``: each pair has its own divisor,
    ``short_factors`` for contexts up to ``original_max_positions`` tokens, ``long_factors`` for
    longer ones (arXiv 2402.13753).
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
    attention_factor: float | None = None  # None: computed by the rule of ``kind``

    @property
    def amplitude(self) -> float:
        """Factor of the cosines and sines, which scales attention scores by its square."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            return yarn_mscale(self.factor, 1.0)
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_positions))
        return 1.0


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention scaling, 0.1 * mscale * ln(factor) + 1; 1 without extension.

    ``factor``: context extension, new length over original length.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def base_frequencies(width: int, base: float) -> Tensor:
    """Return the frequency base^(-2i/width) of each pair i: [width/2] float32."""
    return 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


def llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide the frequencies of long wavelengths by the factor, with a smooth transition."""
    context = scaling.original_max_positions
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    is_long = wavelength > context / low
    divided = torch.where(is_long, frequencies / scaling.factor, frequencies)
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * divided / scaling.factor + smooth * divided
    is_between = (wavelength >= context / high) & ~is_long
    return torch.where(is_between, between, divided)


def yarn_frequencies(width: int, base: float, scaling: RopeScaling) -> Tensor:
    """Interpolate over pairs between the base frequencies and those divided by the factor."""

    def pair_with(turns: float) -> float:
        context = scaling.original_max_positions
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.round_correction_range:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    share = ramp.clamp(0, 1)
    frequencies = base_frequencies(width, base)
    return frequencies / scaling.factor * share + frequencies * (1 - share)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of one model; caches the last table."""

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
        window_base: float | None = None,
    ) -> None:
        """Set the parameters.  ``rope_scaling`` means Llama 3's scaling; ``scaling`` overrides it.

        ``seq_len_interpolation_factor`` divides positions.  ``window_base``: layers with a sliding
        window have frequencies of this base, without scaling and interpolation.
        """
        super().__init__()
        self.width = int(kv_channels * rotary_percent) // 2 * 2
        self.base, self.interleaved = rotary_base, rotary_interleaved
        self.interpolation_factor = seq_len_interpolation_factor
        if scaling is None and rope_scaling:
            scaling = RopeScaling(kind="llama3", factor=rope_scaling_factor)
        self.scaling = scaling
        self.windowed: RotaryEmbedding | None = None
        if window_base is not None:
            self.windowed = RotaryEmbedding(
                kv_channels, rotary_percent, rotary_interleaved, rotary_base=window_base
            )
        self._table: RotaryTable | None = None
        self._table_key: object = None
        self._held: Tensor | None = None
        self._on_device: dict[object, Tensor] = {}  # frequencies, by context and device
        # Whether angles depend on the length of the context, as LongRoPE's do.
        self.reads_context = scaling is not None and scaling.kind == "longrope"

    def frequencies(self, num_positions: int) -> Tensor:
        """Return the frequencies for contexts of ``num_positions``: [r/2] float32 on the CPU."""
        scaling = self.scaling
        if scaling is None:
            return base_frequencies(self.width, self.base)
        if scaling.kind == "llama3":
            return llama3_frequencies(base_frequencies(self.width, self.base), scaling)
        if scaling.kind == "yarn":
            return yarn_frequencies(self.width, self.base, scaling)
        is_long = num_positions > scaling.original_max_positions
        factors = scaling.long_factors if is_long else scaling.short_factors
        pairs = self.width // 2
        assert len(factors) == pairs, f"longrope needs {pairs} factors, not {len(factors)}"
        exponents = torch.arange(0, self.width, 2, dtype=torch.float32) / self.width
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * self.base**exponents)

    def angles(self, positions: Tensor, num_positions: int) -> Tensor:
        """Return the angle of each pair at positions of any shape: [..., r/2] float32."""
        where = positions.float()
        if self.interpolation_factor is not None:
            where = where / self.interpolation_factor
        scaling = self.scaling
        is_long = scaling is not None and num_positions > scaling.original_max_positions
        key = is_long, positions.device
        if key not in self._on_device:  # the host would wait for each copy
            self._on_device[key] = self.frequencies(num_positions).to(positions.device)
        return where.unsqueeze(-1) * self._on_device[key]

    def table(
        self, num_positions: int, offset: int, dtype: torch.dtype, held: Tensor | None = None
    ) -> RotaryTable:
        """Return the table of positions offset .. offset + num_positions - 1, or of ``held``.

        ``held``: the positions of a context-parallel rank, [s].  The last table is cached.
        """
        end = offset + num_positions
        where = device.current()
        key = num_positions, offset, dtype, where
        if key != self._table_key or held is not self._held or self._table is None:
            positions = torch.arange(offset, end, device=where) if held is None else held
            self._table = self.table_at(positions, end, dtype)
            self._table_key, self._held = key, held
        return self._table

    def table_at(
        self, positions: Tensor, num_positions: Tensor | int, dtype: torch.dtype
    ) -> RotaryTable:
        """Return the table of ``positions`` [s] or [s, b] in a context of ``num_positions``.

        ``num_positions`` [s]: each token has a context of its own, which LongRoPE looks at.
        """
        if isinstance(num_positions, Tensor):
            short = self.table_at(positions, 0, dtype)
            if self.scaling is None or not self.reads_context:
                return short
            longest = self.scaling.original_max_positions
            long = self.table_at(positions, longest + 1, dtype)
            is_long = (num_positions > longest)[:, None, None, None]
            return short._replace(
                cos=torch.where(is_long, long.cos, short.cos),
                sin=torch.where(is_long, long.sin, short.sin),
            )
        angles = self.angles(positions, num_positions).unsqueeze(-2)
        angles = angles if positions.dim() == 2 else angles.unsqueeze(1)
        amplitude = self.scaling.amplitude if self.scaling else 1.0
        cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
        windowed = None
        if self.windowed is not None:
            windowed = self.windowed.table_at(positions, num_positions, dtype)
        return RotaryTable(cos.to(dtype), sin.to(dtype), self.interleaved, windowed)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the rotation angle of each channel: [s, 1, 1, r] float32 (Megatron-LM's call)."""
        positions = torch.arange(offset, offset + max_seq_len, device=device.current())
        return self._of_channels(self.angles(positions, offset + max_seq_len))[:, None, None]

    def _of_channels(self, angles: Tensor) -> Tensor:
        """Return the angle of each channel: [..., r/2] -> [..., r]."""
        if self.interleaved:
            return torch.stack((angles, angles), -1).flatten(-2)
        return torch.cat((angles, angles), -1)


class MultimodalRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding of tokens with a time, a height and a width (M-RoPE, arXiv 2409.12191).

    Consecutive sections of the channel pairs are rotated by time, height and width in turn.  For
    text all three are the token's position, and the rotation is that of `RotaryEmbedding`.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        cp_group: ProcessGroup | None = None,
    ) -> None:
        """Set the parameters; ``cp_group`` shards the result of `forward`."""
        super().__init__(
            kv_channels,
            rotary_percent,
            rotary_interleaved,
            seq_len_interpolation_factor,
            rotary_base,
        )
        self.cp_group = cp_group

    def forward(self, position_ids: Tensor, mrope_section: Sequence[int]) -> Tensor:  # type: ignore[override]
        """Return the rotation angle of each channel: [3, b, s] -> [s, b, 1, r] float32.

        ``position_ids`` are those of complete sequences; with a ``cp_group`` the result has this
        rank's tokens.
        """
        angles = self._channel_angles(position_ids, mrope_section)
        group = self.cp_group
        if group is None or group.size() == 1:
            return angles
        lengths = row_lengths(None, len(angles))
        return angles[held_tokens(lengths, group.rank(), group.size(), angles.device)]

    def table_of_grid(
        self, position_ids: Tensor, mrope_section: Sequence[int], dtype: torch.dtype
    ) -> RotaryTable:
        """Return the table of the tokens at ``position_ids`` [3, b, s]."""
        angles = self._channel_angles(position_ids, mrope_section)
        angles = angles[..., ::2] if self.interleaved else angles[..., : self.width // 2]
        return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype), self.interleaved)

    def _channel_angles(self, position_ids: Tensor, sections: Sequence[int]) -> Tensor:
        """Return [s, b, 1, r]; the list of sections applies twice, once to each half."""
        parts = self._of_channels(self.angles(position_ids, 0)).split([*sections, *sections], -1)
        chosen = torch.cat([part[i % 3] for i, part in enumerate(parts)], -1)
        return chosen.transpose(0, 1).unsqueeze(2)
