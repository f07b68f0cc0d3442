"""In-process restart by NVIDIA's wrapper (nvidia-resiliency-ext), where the package is installed.

The wrapper has its own monitor processes, rank assignment and store.  It ends all ranks if the
process of rank 0 is lost, which serves its store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron.core.diagnostics import collective_tracer
from megatron.core.diagnostics.fault_injection import ATTEMPT
from megatron.training.fault_tolerance.inprocess.abort import outlive_nccl_errors


class WrapperAttempt:
    """One call of the training function by NVIDIA's wrapper."""

    def __init__(self, wrapper: Any, store: dist.Store | None) -> None:
        self.number: int = wrapper.iteration
        os.environ[ATTEMPT] = str(self.number)
        outlive_nccl_errors()
        self.store = store and dist.PrefixStore(f"attempt/{self.number}", store)
        self.result: tuple[str, str | None] = ("done", None)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context manager for the training function; the wrapper restarts after an Exception."""
        collective_tracer.note_collectives()
        yield
