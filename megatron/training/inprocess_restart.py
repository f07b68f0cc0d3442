"""Megatron-LM's function for in-process restart; `pretrain` itself restarts here."""

from __future__ import annotations

from collections.abc import Callable


def maybe_wrap_for_inprocess_restart(
    pretrain: Callable[..., None],
) -> tuple[Callable[..., None], None]:
    """Return ``pretrain`` unchanged, and None in place of the store."""
    return pretrain, None
