"""Settings of PEFT's adapters: adapter_config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.value_types import JsonObject

CONFIG = "adapter_config.json"
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of adapters",
}
_TOO_LARGE = 1e6  # of ranks and scales


def read_config(folder: Path) -> JsonObject:
    """Return adapter_config.json.  Raises CheckpointError for adapters of another kind."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(f"{folder / CONFIG} has peft_type {kind}: only LORA can be read")
    for name, words in _UNSUPPORTED.items():
        if config.get(name):
            raise CheckpointError(f"{folder / CONFIG} has {name}: {words} are not available")
    patterns = [config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    if not (_is_size(config.get("r")) and _is_size(config.get("lora_alpha", 8))):
        raise CheckpointError(f"{folder / CONFIG} has no rank r or lora_alpha above 0")
    if not all(
        isinstance(found, dict) and all(map(_is_pattern, found.items())) for found in patterns
    ):
        raise CheckpointError(
            f"{folder / CONFIG} has a rank_pattern or alpha_pattern that is no table of names and "
            "numbers"
        )
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{folder / CONFIG} has bias {config['bias']}: train it with none")
    return config


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < _TOO_LARGE


def _is_pattern(entry: tuple[str, object]) -> bool:
    try:
        re.compile(entry[0])
    except re.error:
        return False
    return _is_size(entry[1])


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
    modules = set(config.get("modules_to_save") or ())
    if modules - {"score", "classifier"}:  # PEFT lists both names of a classifier's head
        raise CheckpointError(
            f"{folder / CONFIG} has modules_to_save {sorted(modules)}: the score of a reward "
            "model is the only complete module that can be read; train the adapters without others"
        )
    return bool(modules)
