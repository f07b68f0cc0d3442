"""Small helpers under the names that scripts import."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise AssertionError unless ``denominator`` divides ``numerator``."""
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"


def divide(numerator: int, denominator: int) -> int:
    """``numerator // denominator``, which must leave no remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """``logger.log(*args)`` on one rank: ``args`` are level, message and its values."""
    if not dist.is_initialized() or dist.get_rank() == rank:
        extra = {**kwargs.pop("extra", {}), "all_ranks": True}  # the handler lets it through
        logger.log(*args, extra=extra, **kwargs)
