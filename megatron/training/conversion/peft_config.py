"""Settings of PEFT's adapters: adapter_config.json."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.manifest import json_object

CONFIG = "adapter_config.json"
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of adapters",
}
_TOO_LARGE = 1e6  # of ranks and scales
# Patterns for which Python's `re` could search for hours: repeated groups, and many repetitions.
_REPEATED_GROUP = re.compile(r"\)[*+?{]*[*+{]")
_MOST_REPETITIONS = 3
_MOST_LETTERS = 1000


def read_config(folder: Path) -> JsonObject:
    """Return adapter_config.json.  Raises CheckpointError for adapters of another kind."""
    try:
        config = json_object((folder / CONFIG).read_bytes(), str(folder / CONFIG))
    except OSError as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read: {error}") from None
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{folder / CONFIG} has peft_type {kind}: only LORA can be read")
    for name, words in _UNSUPPORTED.items():
        if config.get(name):
            raise CheckpointError(f"{folder / CONFIG} has {name}: {words} are not available")
    if not (_is_rank(config.get("r")) and _is_size(config.get("lora_alpha", 8))):
        raise CheckpointError(f"{folder / CONFIG} has no rank r or lora_alpha above 0")
    _check_patterns(folder, config.get("rank_pattern") or {}, _is_rank)
    _check_patterns(folder, config.get("alpha_pattern") or {}, _is_size)
    dropout = config.get("lora_dropout") or 0.0
    if not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
        raise CheckpointError(
            f"{folder / CONFIG} has lora_dropout {str(dropout)[:80]}: give a number from 0 to 1"
        )
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{folder / CONFIG} has bias {config['bias']}: train it with none")
    return config


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < _TOO_LARGE


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and _is_size(value)


def _check_patterns(folder: Path, patterns: object, is_valid: Callable[[object], bool]) -> None:
    """Raise CheckpointError unless ``patterns`` maps names or simple patterns to sizes."""
    if not isinstance(patterns, dict) or not all(map(is_valid, patterns.values())):
        raise CheckpointError(
            f"{folder / CONFIG} has a rank_pattern or alpha_pattern that is no table of names and "
            "numbers"
        )
    for pattern in patterns:
        if not _is_pattern(pattern):
            raise CheckpointError(
                f"{folder / CONFIG} has the pattern {pattern[:80]!r}: a name of modules is needed, "
                f"or a regular expression of at most {_MOST_REPETITIONS} repetitions, none of a "
                "group"
            )


def _is_pattern(pattern: str) -> bool:
    repetitions = sum(map(pattern.count, "*+{"))
    if repetitions > _MOST_REPETITIONS or _REPEATED_GROUP.search(pattern):
        return False
    try:
        return len(pattern) <= _MOST_LETTERS and bool(re.compile(pattern))
    except (re.error, OverflowError, RecursionError):
        return False


def scale_of(module: str, rank: int, config: JsonObject) -> float:
    """Return alpha / rank of a module; its alpha may be that of a pattern."""
    patterns = config.get("alpha_pattern") or {}
    alpha = config.get("lora_alpha", 8)
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = value
            break
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def rank_of(module: str, config: JsonObject) -> int:
    """Return the rank of a module, which may be that of a pattern."""
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return int(rank)
    return int(config["r"])


def has_score(folder: Path, config: JsonObject) -> bool:
    """Return whether the adapters are those of a reward model.  Raises CheckpointError."""
    modules = config.get("modules_to_save") or []
    known = ("score", "classifier")  # PEFT lists both names of a classifier's head
    if not isinstance(modules, list) or not all(module in known for module in modules):
        raise CheckpointError(
            f"{folder / CONFIG} has modules_to_save {str(modules)[:80]}: the score of a reward "
            "model is the only complete module that can be read; train the adapters without others"
        )
    return bool(modules)
