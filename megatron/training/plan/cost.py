"""What is counted of a rank: data without torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan import PassKind


class Collective(NamedTuple):
    """One operation between ranks."""

    kind: str
    group: str  # name of the process group
    group_size: int
    num_bytes: int  # of the largest tensor in it: what each rank puts in or gets out in all

    @property
    def sent_bytes(self) -> float:
        """What a rank sends, with the ring algorithms."""
        share = (self.group_size - 1) / self.group_size
        factors = {"all-reduce": 2 * share, "send": 1.0, "broadcast": 1.0}
        return self.num_bytes * factors.get(self.kind, share)


@dataclass(frozen=True, kw_only=True)
class State:
    """Bytes that a rank holds from one step to the next; ``host``: of the optimizer elsewhere."""

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def total(self) -> int:
        """All on the device."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """One pass of one micro-batch through one chunk.

    Bytes are those above what was alive before, when what other stages have sent was there.
    """

    peak: int
    kept: int  # afterwards; negative where more is freed than made; without ``gathered``
    handed_on: int  # besides: the tensor for another stage, until it is sent
    sent: Counter[Collective]  # between ranks of a stage
    # Weights of FSDP that are there between the chunk's forward and its next backward pass, once
    # for all micro-batches.
    gathered: int = 0


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """What one step takes on a rank, pass by pass."""

    state: State
    num_parameters: int
    passes: dict[tuple[PassKind, int], PassCost]  # of (kind, chunk)
    message: int  # bytes between two stages
    lasting: int  # bytes of tables and the like that the first passes have made
    step_peak: int  # bytes of the optimizer's step, above ``state`` and ``lasting``
    step_sent: Counter[Collective]  # once a step
    axes: dict[str, str]  # name of a process group -> axis
