"""Layer pattern of a hybrid stack: one letter per layer for its kind (pure arithmetic)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.core.config.errors import ConfigError

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
KINDS = {MAMBA: "Mamba", ATTENTION: "attention", MLP: "MLP", EXPERTS: "experts"}


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
    num_attention, num_mlp = round(num_layers * attention_ratio), round(num_layers * mlp_ratio)
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
    num_layers: int, attention_ratio: float, mlp_ratio: float, override: str | None
) -> Iterator[str]:
    """Yield an error message, with a suggested fix, for each invalid value."""
    ratios = {"--hybrid-attention-ratio": attention_ratio, "--hybrid-mlp-ratio": mlp_ratio}
    for flag, ratio in ratios.items():
        if not 0 <= ratio <= 1:
            yield f"{flag} {ratio}: a share of the layers, from 0 to 1, is needed"
    if sum(ratios.values()) > 1:
        given = " and ".join(f"{flag} {ratio}" for flag, ratio in ratios.items())
        yield f"{given} are more than all layers: lower one of them"
    if override is None:
        return
    strange = sorted(set(override) - KINDS.keys())
    if strange:
        known = ", ".join(f"{letter} ({kind})" for letter, kind in KINDS.items())
        yield f"--hybrid-override-pattern {override}: {''.join(strange)} is none of {known}"
    if len(override) != num_layers:
        yield (
            f"--hybrid-override-pattern {override} has {len(override)} layers and --num-layers is "
            f"{num_layers}: write a letter for each layer"
        )
