"""The work that `benchmarks.kernels` measures, at the sizes of a layer 1,024 wide.

``num_bytes`` counts what has to be read and written if every number travels once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.fusions.linear_cross_entropy import loss_and_gradient

_TOKENS, _VOCABULARY = 1024, 50304


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Case:
    """``work`` through the public function; ``prepare`` before each call is not measured."""

    name: str
    num_bytes: int
    work: Callable[[], object]
    prepare: Callable[[], object] = _nothing


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device.current()).to(dtype)


def cross_entropy() -> Case:
    """Logits to gradient and loss."""
    source = _random(_TOKENS, _VOCABULARY)
    logits, target = source.clone(), torch.randint(_VOCABULARY, (_TOKENS,), device=source.device)
    group = ProcessGroup(0, 1)
    return Case(
        "softmax cross entropy and its gradient, bf16",
        2 * logits.nbytes,
        lambda: loss_and_gradient(logits, target, group=group, num_columns=_VOCABULARY),
        lambda: logits.copy_(source),
    )


CASES: list[Callable[[], Case]] = [cross_entropy]
