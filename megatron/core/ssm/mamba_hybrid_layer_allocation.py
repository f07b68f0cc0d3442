"""Layer pattern of a hybrid stack, and sizes of a Mamba-2 mixer (pure arithmetic).

One letter per layer stands for its kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.transformer.config.attention import KDA
from megatron.core.transformer.transformer_config import TransformerConfig

MAMBA = "M"
ATTENTION = "*"
MLP = "-"
EXPERTS = "E"
KINDS = {MAMBA: "Mamba", ATTENTION: "attention", MLP: "MLP", EXPERTS: "experts"}


class Symbols:
    """The letters, by Megatron Core's names for them."""

    MAMBA = MAMBA
    ATTENTION = ATTENTION
    MLP = MLP
    MOE = EXPERTS
    VALID = frozenset(KINDS)


def layer_pattern(
    num_layers: int,
    attention_ratio: float = 0.0,
    mlp_ratio: float = 0.0,
    override: str | None = None,
) -> str:
    """Return ``override``, or a pattern with attention and MLP layers evenly among Mamba layers.

    The ratios are fractions of ``num_layers``.  Raises ConfigError for ratios outside 0 to 1, and
    for an override with another length or unknown letters.

    >>> layer_pattern(12, attention_ratio=1 / 6, mlp_ratio=0.5)
    'M--*M-M-*-M-'
    """
    for problem in pattern_problems(num_layers, attention_ratio, mlp_ratio, override):
        raise ConfigError(problem)
    if override is not None:
        return override
    letters = [MAMBA] * num_layers
    num_attention = round(num_layers * attention_ratio)
    num_mlp = round(num_layers * mlp_ratio)
    num_mamba = num_layers - num_attention
    if num_attention:  # equal numbers of Mamba layers before, between and after them
        for i in _spread(range(num_layers), num_mamba / (num_attention + 1)):
            letters[i] = ATTENTION
    if num_mlp:  # replace Mamba layers that remain
        places = [i for i, letter in enumerate(letters) if letter == MAMBA]
        for i in _spread(places, (num_mamba - num_mlp) / num_mlp):
            letters[i] = MLP
    return "".join(letters)


def _spread(places: Sequence[int], gap: float) -> Iterator[int]:
    """Yield evenly spaced ``places``, with on average ``gap`` skipped places before each."""
    left = gap
    for place in places:
        if left < 0.5:
            left += gap
            yield place
        else:
            left -= 1


def pattern_problems(
    num_layers: int,
    attention_ratio: float,
    mlp_ratio: float,
    override: str | None,
    ahead: str | None = None,
) -> Iterator[str]:
    """Yield an error message, with a suggested fix, for each invalid value.

    ``ahead``: the letters of an MTP layer.
    """
    ratios = {"--hybrid-attention-ratio": attention_ratio, "--hybrid-mlp-ratio": mlp_ratio}
    for flag, ratio in ratios.items():
        if not 0 <= ratio <= 1:
            yield f"{flag} {ratio}: a share of the layers, from 0 to 1, is needed"
    if sum(ratios.values()) > 1:
        given = " and ".join(f"{flag} {ratio}" for flag, ratio in ratios.items())
        yield f"{given} are more than all layers: lower one of them"
    if ahead is not None:
        yield from _unknown_letters("--mtp-hybrid-override-pattern", ahead)
    if override is None:
        return
    if "/" in override:
        yield (
            f"--hybrid-override-pattern {override}: each / begins the letters of an MTP layer: "
            "write equal ones, as many as --mtp-num-layers (or once, with "
            "--mtp-use-repeated-layer), which --mtp-hybrid-override-pattern may repeat"
        )
        return
    yield from _unknown_letters("--hybrid-override-pattern", override)
    if len(override) != num_layers:
        yield (
            f"--hybrid-override-pattern {override} has {len(override)} layers and --num-layers is "
            f"{num_layers}: write a letter for each layer"
        )


def _unknown_letters(flag: str, pattern: str) -> Iterator[str]:
    strange = sorted(set(pattern) - KINDS.keys())
    if strange or not pattern:
        known = ", ".join(f"{letter} ({kind})" for letter, kind in KINDS.items())
        yield f"{flag} {pattern}: {''.join(strange) or 'nothing'} is none of {known}"


@dataclass(frozen=True)
class MixerShape:
    """Global sizes of a mixer, before sharding."""

    hidden: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int = 4

    @property
    def inner(self) -> int:
        """Width of z and of x."""
        return self.num_heads * self.head_dim

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Widths of x, B and C."""
        return self.inner, self.num_groups * self.state_dim, self.num_groups * self.state_dim

    @property
    def projected(self) -> tuple[int, ...]:
        """Widths of z, x, B, C and dt."""
        return self.inner, *self.convolved, self.num_heads

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the mixer, without the norm before it."""
        matrices = self.hidden * (sum(self.projected) + self.inner)
        convolution = sum(self.convolved) * (self.conv_width + 1)
        return matrices + convolution + 3 * self.num_heads + self.inner

    @property
    def flops_per_token(self) -> int:
        """Forward FLOPs per token: matmuls, convolution, and the scan counted as a recurrence."""
        matrices = 2 * self.hidden * (sum(self.projected) + self.inner)
        convolution = 2 * self.conv_width * sum(self.convolved)
        return matrices + convolution + 6 * self.inner * self.state_dim


def mixer_shape(config: TransformerConfig, expand: int = 2, conv_width: int = 4) -> MixerShape:
    """Return the sizes of the mixers of a model, which are all equal."""
    return MixerShape(
        hidden=config.hidden_size,
        num_heads=config.mamba_num_heads or expand * config.hidden_size // config.mamba_head_dim,
        head_dim=config.mamba_head_dim,
        num_groups=config.mamba_num_groups,
        state_dim=config.mamba_state_dim,
        conv_width=conv_width,
    )


def mixer_problems(config: TransformerConfig) -> Iterator[str]:
    """Yield an error message, with a suggested fix, for sizes that do not fit each other, tp or cp.

    Sizes below 1 yield none: the check of smallest values reports them.
    """
    given = config.mamba_head_dim, config.mamba_num_groups, config.mamba_state_dim
    if min(*given, 1 if config.mamba_num_heads is None else config.mamba_num_heads) < 1:
        return
    width = config.mamba_head_dim
    inner = 2 * config.hidden_size
    if config.mamba_num_heads is None and inner % width:
        yield (
            f"--mamba-head-dim {width} does not divide the inner width {inner}, twice "
            f"--hidden-size {config.hidden_size}: change one of them, or give --mamba-num-heads"
        )
        return
    shape = mixer_shape(config)
    heads = shape.num_heads
    groups = shape.num_groups
    tp = config.tensor_model_parallel_size
    cp = config.context_parallel_size
    if heads % groups:
        yield (
            f"--mamba-num-groups {groups} does not divide the {heads} heads of a Mamba layer: give "
            "a divisor, or another --mamba-num-heads"
        )
        return
    for flag, count in (("--mamba-num-groups", groups), ("--mamba-num-heads", heads)):
        if count % tp:
            yield (
                f"{flag} {count} is no multiple of --tensor-model-parallel-size {tp}, whose ranks "
                f"hold whole groups and heads: use a divisor of {count} for it"
            )
            return
    if heads // tp % lcm(groups // tp, cp):
        yield (
            f"--context-parallel-size {cp} cannot divide the {heads // tp} heads in {groups // tp} "
            "groups of a Mamba layer that a tensor-parallel rank holds: use a divisor of the heads "
            "of each group, or of the groups"
        )


@dataclass(frozen=True)
class DeltaNetShape:
    """Global sizes of a layer of linear attention, before sharding.

    ``is_kda``: alpha, one value per key channel, and the gate have projections of low rank.
    """

    hidden: int
    key_heads: int
    key_width: int
    value_heads: int
    value_width: int
    conv_width: int
    is_kda: bool = False

    @property
    def inner(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_width

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values."""
        keys = self.key_heads * self.key_width
        return keys, keys, self.inner

    @property
    def projected(self) -> tuple[int, ...]:
        """Widths of queries, keys, values, gate, beta and alpha; of KDA, latents of the gates."""
        if self.is_kda:
            return *self.convolved, self.value_width, self.value_heads, self.key_width
        return *self.convolved, self.inner, self.value_heads, self.value_heads

    @property
    def decays(self) -> int:
        """Number of decays of a token."""
        return self.convolved[1] if self.is_kda else self.value_heads

    @property
    def raised(self) -> int:
        """Number of weights that raise the latents of the gate and of alpha."""
        widths = self.inner * self.value_width + self.decays * self.key_width
        return widths if self.is_kda else 0

    @property
    def num_sharded(self) -> int:
        """Number of parameters that tensor parallelism shards; the norm's are ``value_width``."""
        matrices = self.hidden * (sum(self.projected) + self.inner)
        convolution = self.conv_width * sum(self.convolved)
        return matrices + self.raised + convolution + self.value_heads + self.decays

    @property
    def mixing_per_token(self) -> int:
        """Forward multiply-adds per token besides in_proj and out_proj.

        Per state of a head: decay, the value that it predicts, its update, and its output.
        """
        states = self.inner * self.key_width
        return self.raised + self.conv_width * sum(self.convolved) + 4 * states


def delta_net_shape(config: Any) -> DeltaNetShape:
    """Return the sizes of the layers of linear attention of a model, which are all equal.

    ``config``: a TransformerConfig, or a description of a model that has its names.
    """
    return DeltaNetShape(
        hidden=config.hidden_size,
        key_heads=config.linear_num_key_heads,
        key_width=config.linear_key_head_dim,
        value_heads=config.linear_num_value_heads,
        value_width=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        is_kda=config.experimental_attention_variant == KDA,
    )
