"""How tokens are chosen for a request.  Field names and defaults of Megatron-LM come first."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatron.core.config.errors import ConfigError

_LARGEST = sys.float_info.max
_PROBABILITY = (0, 1, "a probability, 0 to 1")
_COUNT = (0, math.inf, "0 or more")
_FINITE = (-_LARGEST, _LARGEST, "a finite number")
_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0, _LARGEST, "a number of 0 or more"),
    "top_k": (0, math.inf, "0 for no limit, or more"),
    "top_p": _PROBABILITY,
    "top_p_decay": (0, 1, "a factor, 0 to 1"),
    "top_p_bound": _PROBABILITY,
    "min_p": _PROBABILITY,
    "num_tokens_to_generate": _COUNT,
    "top_n_logprobs": _COUNT,
    "min_tokens": _COUNT,
    "repetition_penalty": (sys.float_info.min, _LARGEST, "a number above 0"),
    "presence_penalty": _FINITE,
    "frequency_penalty": _FINITE,
}


@dataclass
class SamplingParams:
    """``temperature`` 0 or ``top_k`` 1 is greedy.  Filters apply in the order of the fields below.

    Order on logits: ``logit_bias``, penalties, ``min_tokens``, ``forbidden_after`` and
    ``bad_words``, ``allowed_token_ids``, temperature, ``top_k``, ``top_p``, ``min_p``.
    Log-probabilities are of the model, before all of these.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 0.0  # 0 and 1: no limit
    return_log_probs: bool = False
    return_segments: bool = False  # the text of each token
    num_tokens_to_generate: int = 30
    top_n_logprobs: int = 0  # most likely tokens to return beside each generated token
    return_prompt_top_n_logprobs: bool = False
    # Not in Megatron-LM:
    seed: int | None = None  # None: drawn when the request is added
    top_p_decay: float = 0.0  # multiplies top_p after each token; 0 and 1: top_p stays
    top_p_bound: float = 0.0  # least top_p with a decay
    min_p: float = 0.0  # least probability, as a fraction of the most likely token's
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen, prompt included
    presence_penalty: float = 0.0  # subtracted once for each token generated before
    frequency_penalty: float = 0.0  # subtracted for each time that a token was generated
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    min_tokens: int = 0  # no end of text before this many tokens
    # Directly after one of the first tokens, none of the second.
    forbidden_after: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    stop_token_ids: tuple[int, ...] = ()  # end the text, besides the end-of-document token
    ignore_eos: bool = False  # continue after the end-of-document token
    return_prompt_log_probs: bool = False
    prompt_log_probs_only: bool = False  # generate nothing; for scoring
    allowed_token_ids: tuple[int, ...] = ()  # no other tokens; empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids that a text never has in sequence

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise ConfigError(problem)

    def problems(self) -> list[str]:
        """Return one sentence for each value that is out of range."""
        return [
            f"--{name.replace('_', '-')} {getattr(self, name)}: give {what}"
            for name, (least, most, what) in _RANGES.items()
            if not least <= getattr(self, name) <= most
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; attributes that a script has added are left out."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        bias = {str(token): value for token, value in self.logit_bias.items()}
        return {**found, "logit_bias": bias}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return parameters from values of `to_json`, some or all fields.  Raises ConfigError."""
        bias = {int(token): value for token, value in values.get("logit_bias", {}).items()}
        return cls(**{name: _as_tuple(v) for name, v in values.items()} | {"logit_bias": bias})

    def add_attributes(self, attribute_value_pair: Mapping[str, object]) -> None:
        """Set further attributes, as Megatron-LM's scripts do."""
        vars(self).update(attribute_value_pair)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.top_k == 1 or self.temperature == 0

    @property
    def has_penalty(self) -> bool:
        """Whether the choice of a token depends on the tokens before the last one."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1, 0, 0) or bool(self.bad_words)


def _as_tuple(value: Any) -> Any:
    """Return a tuple, whose items are tuples too, for a list of JSON; other values as they are."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
