"""Costs of a rank: records without torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan import PassKind


class Collective(NamedTuple):
    """One collective or send between ranks."""

    kind: str
    group: str  # name of the process group
    group_size: int
    num_bytes: int  # of the largest tensor: complete input or output of a rank

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends, with ring algorithms."""
        share = (self.group_size - 1) / self.group_size
        factors = {"all-reduce": 2 * share, "send": 1.0, "broadcast": 1.0}
        return self.num_bytes * factors.get(self.kind, share)


@dataclass(frozen=True, kw_only=True)
class State:
    """Bytes that a rank holds between steps; ``host``: optimizer state in host memory."""

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """Cost of one pass of one micro-batch through one chunk.

    Bytes are relative to those alive before the pass, tensors received from other stages included.
    """

    peak: int
    kept: int  # after it, without ``gathered``; negative if more is freed than made
    handed_on: int  # additional: the tensor for another stage, until it is sent
    sent: Counter[Collective]  # between ranks of a stage
    # FSDP weights that stay gathered between the chunk's forward and its next backward pass, once
    # for all micro-batches.
    gathered: int = 0


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """Cost of one step on a rank, pass by pass."""

    state: State
    num_parameters: int
    passes: dict[tuple[PassKind, int], PassCost]  # of (kind, chunk)
    message: int  # bytes between two stages
    lasting: int  # bytes of tables that the first passes have allocated
    step_peak: int  # bytes of the optimizer's step, above ``state`` and ``lasting``
    step_sent: Counter[Collective]  # once a step
    axes: dict[str, str]  # name of a process group -> axis
