"""The file of --export-kd-cfg: which outputs are compared, and how the losses are combined."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from megatron.core.config.errors import ConfigError
from megatron.core.text_files import parse_yaml, read_text
from megatron.post_training.distillation.losses import HIDDEN_LOSSES

LOGITS = "output_layer"
FINAL_NORM = "decoder.final_layernorm"
_LAYER = re.compile(r"decoder\.layers\.(\d{1,5})")


class LayerPair(NamedTuple):
    """Two outputs that a loss compares: indices of layers, or None after the final norm."""

    student: int | None
    teacher: int | None
    loss: str = "cosine"  # a key of `HIDDEN_LOSSES`


@dataclass(frozen=True, kw_only=True)
class KDConfig:
    """Settings of the distillation loss; the names and defaults are Megatron-LM's."""

    intermediate_layer_pairs: tuple[LayerPair, ...] = ()
    skip_lm_loss: bool = True
    kd_loss_scale: float = 1.0
    logit_kl_temperature: float = 1.0


def read_kd_config(path: str | None) -> KDConfig:
    """Return the settings of the file ``path``; the defaults without one.  Raises ConfigError."""
    if path is None:
        return KDConfig()
    what = f"--export-kd-cfg {path}"
    content = parse_yaml(
        read_text(path, what, ConfigError, "a YAML or JSON file"), what, ConfigError
    )
    if not isinstance(content, dict):
        raise ConfigError(
            f"{what}: a mapping of settings is needed, for example skip_lm_loss: true"
        )
    known = {"logit_layers", *(f.name for f in fields(KDConfig))}
    for name in content:
        if name not in known:
            raise ConfigError(f"{what}: unknown setting {name!r}; use {', '.join(sorted(known))}")
    logits = content.pop("logit_layers", [LOGITS, LOGITS])
    if logits != [LOGITS, LOGITS]:
        raise ConfigError(
            f"{what}: logit_layers {logits!r}: the logits of both models are the outputs of "
            f"{LOGITS}; write [{LOGITS}, {LOGITS}]"
        )
    pairs = content.pop("intermediate_layer_pairs", None) or []
    if not isinstance(pairs, list):
        raise ConfigError(f"{what}: intermediate_layer_pairs {pairs!r}: a list of pairs is needed")
    values = {name: _checked(name, value, what) for name, value in content.items()}
    return KDConfig(intermediate_layer_pairs=tuple(_pair(p, what) for p in pairs), **values)


def _checked(name: str, value: Any, what: str) -> Any:
    if name == "skip_lm_loss":
        if not isinstance(value, bool):
            raise ConfigError(f"{what}: skip_lm_loss {value!r}: write true or false")
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise ConfigError(f"{what}: {name} {value!r}: a finite number above 0 is needed")
    return float(value)


def _pair(pair: Any, what: str) -> LayerPair:
    """Return the pair [student, teacher] or [student, teacher, loss]."""
    is_pair = isinstance(pair, list) and len(pair) in (2, 3)
    if not is_pair or not all(isinstance(part, str) for part in pair):
        raise ConfigError(
            f"{what}: intermediate_layer_pairs {pair!r}: write [student layer, teacher layer], and "
            "the loss cosine (default) or mse as third value"
        )
    loss = pair[2] if len(pair) == 3 else "cosine"
    if loss not in HIDDEN_LOSSES:
        raise ConfigError(
            f"{what}: intermediate_layer_pairs {pair!r}: loss {loss}: use cosine or mse"
        )
    return LayerPair(_index(pair[0], what), _index(pair[1], what), loss)


def _index(name: str, what: str) -> int | None:
    if name == FINAL_NORM:
        return None
    found = _LAYER.fullmatch(name)
    if found is None:
        raise ConfigError(
            f"{what}: intermediate_layer_pairs: {name} is not available; use decoder.layers.N, the "
            f"output of a layer, or {FINAL_NORM}"
        )
    return int(found[1])
