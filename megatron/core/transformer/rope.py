"""Rotary position embeddings (RoPE): frequencies, context extension and cosine/sine tables.

``d`` head dimension, ``r`` rotated channels (``rotary_percent`` of d), ``s`` positions.  Channel
pair i is rotated by the angle ``position * frequencies[i]``, with frequencies [r/2].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.fusions.rope import RotaryTable
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel.context_parallel_partition import held_tokens
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import get_installed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


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
    query_beta: float | None = None  # of yarn: queries grow with the logarithm of their position

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


def yarn_mscale(scale: float = 1.0, mscale: float = 1.0) -> float:
    """Return YaRN's attention scaling, 0.1 * mscale * ln(scale) + 1; 1 without extension.

    ``scale``: context extension, new length over original length.
    """
    return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0


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


def table_of_angles(angles: Tensor, interleaved: bool, dtype: torch.dtype) -> RotaryTable:
    """Return the table for the angle of each channel, [s, 1 or b, 1, r]."""
    pairs = angles[..., ::2] if interleaved else angles[..., : angles.shape[-1] // 2]
    return RotaryTable(pairs.cos().to(dtype), pairs.sin().to(dtype), interleaved)


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
        use_cpu_initialization: bool = False,
        cp_group: ProcessGroup | None = None,
        *,
        scaling: RopeScaling | None = None,
        window_base: float | None = None,
    ) -> None:
        """Set the parameters.  ``rope_scaling`` means Llama 3's scaling; ``scaling`` overrides it.

        ``use_cpu_initialization`` has no effect: frequencies are computed on the CPU and move to
        the device in the first call.  ``cp_group``, by default that of `parallel_state` if it is
        initialized, shards the result of `forward`.

        ``seq_len_interpolation_factor`` divides positions.  ``window_base``: layers with a sliding
        window have frequencies of this base, without scaling and interpolation.
        """
        super().__init__()
        self.width = int(kv_channels * rotary_percent) // 2 * 2
        self.base = rotary_base
        self.rotary_interleaved = rotary_interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        if cp_group is None and (groups := get_installed()) is not None:
            cp_group = groups.cp
        self.cp_group = cp_group
        if scaling is None and rope_scaling:
            scaling = RopeScaling(kind="llama3", factor=rope_scaling_factor)
        self.scaling = scaling
        self.windowed: RotaryEmbedding | None = None
        if window_base is not None:
            self.windowed = RotaryEmbedding(
                kv_channels,
                rotary_percent,
                rotary_interleaved,
                rotary_base=window_base,
                cp_group=cp_group,
            )
        self._table: RotaryTable | None = None
        self._table_key: object = None
        self._held: Tensor | None = None
        self._assigned: Tensor | None = None  # frequencies that a project has set
        self._on_device: dict[object, Tensor] = {}  # frequencies, by context and device
        # Whether angles depend on the length of the context, as LongRoPE's do.
        self.reads_context = scaling is not None and scaling.kind == "longrope"

    @property
    def inv_freq(self) -> Tensor:
        """The frequencies [r/2] of contexts that are not extended; a project may assign others."""
        return self._frequencies_on(device.current(), 0)

    @inv_freq.setter
    def inv_freq(self, frequencies: Tensor) -> None:
        self._assigned = frequencies
        self._table = None
        self._on_device.clear()

    def _frequencies_on(self, where: torch.device, num_positions: int) -> Tensor:
        longest = self.scaling.original_max_positions if self.scaling else 0
        is_long = self.reads_context and num_positions > longest
        key = is_long, where
        if key not in self._on_device:  # the host would wait for each copy
            found = None if is_long else self._assigned
            found = self.frequencies(num_positions) if found is None else found
            self._on_device[key] = found.to(where)
        return self._on_device[key]

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
        if self.seq_len_interpolation_factor is not None:
            where = where / self.seq_len_interpolation_factor
        return where.unsqueeze(-1) * self._frequencies_on(positions.device, num_positions)

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
        scale: Tensor | None = None
        if self.scaling is not None and self.scaling.query_beta is not None:
            contexts = (positions / self.scaling.original_max_positions).floor()
            scale = 1 + self.scaling.query_beta * torch.log(1 + contexts)
            scale = scale.to(dtype).view(*positions.shape, *[1] * (4 - positions.dim()))
        return RotaryTable(cos.to(dtype), sin.to(dtype), self.rotary_interleaved, windowed, scale)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False) -> Tensor:
        """Return the rotation angle of each channel: [s, 1, 1, r] float32 (Megatron-LM's call).

        With a ``cp_group`` the result has the positions of this rank's tokens, but all positions
        for packed sequences.
        """
        positions = torch.arange(offset, offset + max_seq_len, device=device.current())
        if not packed_seq:
            positions = positions[self._held_tokens(max_seq_len)]
        return self._of_channels(self.angles(positions, offset + max_seq_len))[:, None, None]

    def _held_tokens(self, num_tokens: int) -> Tensor | slice:
        """Return the places of this context-parallel rank's tokens in a sequence."""
        group = self.cp_group
        if group is None or group.size() == 1:
            return slice(None)
        return held_tokens((num_tokens,), group.rank(), group.size(), device.current())

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angle of each pair: [s, r/2] float32."""
        positions = torch.arange(offset, offset + max_seq_len, device=device.current())
        return self.angles(positions, offset + max_seq_len)

    def get_cos_sin(self, max_seq_len: int, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the angle of each pair: [s, r/2] float32."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        return angles.cos(), angles.sin()

    @library_call()
    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor,
        transformer_config: TransformerConfig,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> int:
        """Return the number of positions for `forward` in a model that a project has written.

        ``transformer``: its layers, which receive ``transformer_input`` or a stage's output.
        """
        if packed_seq_params is not None:
            longest = packed_seq_params.max_seqlen_q, packed_seq_params.max_seqlen_kv
            return max(int(length or 0) for length in longest)
        sizes = transformer_config
        if inference_context is not None:
            return int(inference_context.max_sequence_length) * sizes.context_parallel_size
        received = getattr(transformer, "input_tensor", None)
        length = len(transformer_input if received is None else received)
        if sizes.sequence_parallel:
            length *= sizes.tensor_model_parallel_size
        return length * sizes.context_parallel_size

    def _of_channels(self, angles: Tensor) -> Tensor:
        """Return the angle of each channel: [..., r/2] -> [..., r]."""
        if self.rotary_interleaved:
            return torch.stack((angles, angles), -1).flatten(-2)
        return torch.cat((angles, angles), -1)


class MultimodalRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding of tokens with a time, a height and a width (M-RoPE, arXiv 2409.12191).

    Consecutive sections of the channel pairs are rotated by time, height and width in turn.  For
    text all three are the token's position, and the rotation is that of `RotaryEmbedding`.
    ``has_mixed_sections``: neighboring pairs have turns instead, as long as each section lasts.
    """

    has_mixed_sections = False

    def forward(self, position_ids: Tensor, mrope_section: Sequence[int]) -> Tensor:  # type: ignore[override]
        """Return the rotation angle of each channel: [3, b, s] -> [s, b, 1, r] float32.

        ``position_ids`` are those of complete sequences; with a ``cp_group`` the result has this
        rank's tokens.
        """
        angles = self._channel_angles(position_ids, mrope_section)
        return angles[self._held_tokens(len(angles))]

    def table_of_grid(
        self, position_ids: Tensor, mrope_section: Sequence[int], dtype: torch.dtype
    ) -> RotaryTable:
        """Return the table of the tokens at ``position_ids`` [3, b, s]."""
        angles = self._channel_angles(position_ids, mrope_section)
        return table_of_angles(angles, self.rotary_interleaved, dtype)

    def _channel_angles(self, position_ids: Tensor, sections: Sequence[int]) -> Tensor:
        """Return [s, b, 1, r]; the list of sections applies twice, once to each half."""
        angles = self.angles(position_ids, 0)
        if self.has_mixed_sections:
            chosen = angles[0].clone()
            for axis in (1, 2):
                pairs = slice(axis, 3 * sections[axis], 3)
                chosen[..., pairs] = angles[axis][..., pairs]
            chosen = self._of_channels(chosen)
        else:
            parts = self._of_channels(angles).split([*sections, *sections], -1)
            chosen = torch.cat([part[i % 3] for i, part in enumerate(parts)], -1)
        return chosen.transpose(0, 1).unsqueeze(2)


def build_rotary(
    config: TransformerConfig, max_sequence_length: int, **of_rotary: Any
) -> RotaryEmbedding:
    """Build the rotary embedding of --position-embedding-type rope from ``of_rotary``."""
    is_latent = config.multi_latent_attention
    scaling: RopeScaling | None = None
    if isinstance(config, MLATransformerConfig):
        of_rotary |= {"rotary_base": config.rotary_base, "rotary_percent": config.rotary_percent}
    if config.rope_type == "yarn" or (is_latent and config.rope_type is None):
        scaling = _yarn(config, max_sequence_length)
    elif not is_latent:
        scaling = _longrope(config, max_sequence_length)
    return RotaryEmbedding(
        config.qk_pos_emb_head_dim if is_latent else config.kv_channels,
        rotary_interleaved=config.rotary_interleaved or is_latent,
        scaling=scaling,
        window_base=config.window_rotary_base,
        **of_rotary,
    )


def _yarn(c: TransformerConfig, max_sequence_length: int) -> RopeScaling:
    """Return YaRN scaling: the default with latent attention, otherwise with --rope-type yarn."""
    factor = c.rotary_scaling_factor
    ratio = yarn_mscale(factor, c.mscale) / yarn_mscale(factor, c.mscale_all_dim)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_positions=c.yarn_original_max_position_embeddings or max_sequence_length,
        beta_fast=32.0 if c.yarn_beta_fast is None else c.yarn_beta_fast,
        beta_slow=1.0 if c.yarn_beta_slow is None else c.yarn_beta_slow,
        round_correction_range=c.yarn_correction_range_round_to_int,
        attention_factor=ratio,
        query_beta=c.yarn_query_scaling_beta,
    )


def _longrope(config: TransformerConfig, max_sequence_length: int) -> RopeScaling | None:
    """Return LongRoPE scaling if the config has its factors, else None."""
    short = config.longrope_short_factor
    long = config.longrope_long_factor
    original = config.longrope_original_max_position_embeddings
    if short is None and long is None:
        return None
    if short is None or long is None or original is None:
        raise ConfigError(
            "LongRoPE needs --longrope-short-factor, --longrope-long-factor and "
            "--longrope-original-max-position-embeddings together"
        )
    return RopeScaling(
        kind="longrope",
        factor=max_sequence_length / original,
        original_max_positions=original,
        short_factors=short,
        long_factors=long,
    )
