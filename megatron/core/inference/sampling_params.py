"""Sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """``temperature`` 0 or ``top_k`` 1 is greedy; ``top_k`` and ``top_p`` exclude each other."""

    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 0.0  # 0: no limit
    return_log_probs: bool = False
    num_tokens_to_generate: int = 30
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.top_k and self.top_p:
            raise ConfigError(
                f"--top-k {self.top_k} and --top-p {self.top_p} exclude each other: give one"
            )
        if self.temperature < 0:
            raise ConfigError(f"--temperature {self.temperature} is negative: give 0 or more")
        if not 0 <= self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p} is not a probability: give 0 to 1")
        if self.top_k < 0:
            raise ConfigError(f"--top-k {self.top_k} is negative: give 0 for no limit")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.top_k == 1 or self.temperature == 0
