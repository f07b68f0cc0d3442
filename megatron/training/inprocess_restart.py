"""Restart inside the process, for scripts that offer it.

``--inprocess-restart`` is refused when the command line is read, so a program runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable


def maybe_wrap_for_inprocess_restart(
    pretrain: Callable[..., None],
) -> tuple[Callable[..., None], None]:
    """``pretrain`` and the store to hand it: unwrapped, and None."""
    return pretrain, None
