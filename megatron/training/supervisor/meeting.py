"""Exchange of the nodes during and after an attempt, through the store of its round.

Keys: ``alive/I`` counts signs of life of node I, ``ended`` exists once a node ends the attempt,
``join`` once further nodes wait, ``report/I`` is the report of node I, ``decision`` is what all
nodes do next.  Each node comes to a decision by itself; the first that is written is valid for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from torch.distributed import Store

from megatron.training.supervisor.evidence import NodeReport
from megatron.training.supervisor.policy import Decision

_BEAT_S = 2.0
_POLL_S = 0.1


class Meeting:
    """This node's part in the exchange of one attempt.  The methods raise torch's DistError."""

    def __init__(self, store: Store, rank: int, world_size: int, node_timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = node_timeout_s
        self._beaten_at_s = float("-inf")
        self._seen: dict[int, tuple[int, float]] = {}  # node -> its count, and since when

    def beat(self) -> None:
        """Give a sign of life, at intervals."""
        if time.monotonic() - self._beaten_at_s > _BEAT_S:
            self._beaten_at_s = time.monotonic()
            self._store.add(f"alive/{self._rank}", 1)

    def lost(self, ranks: Iterable[int]) -> list[int]:
        """Return the nodes of ``ranks`` that gave no sign of life for the time limit."""
        now_s = time.monotonic()
        lost = []
        for rank in ranks:
            count = self._store.add(f"alive/{rank}", 0)
            known = self._seen.get(rank)
            if known is None or known[0] != count:
                self._seen[rank] = (count, now_s)
            elif now_s - known[1] > self._timeout_s:
                lost.append(rank)
        return lost

    def neighbour(self) -> list[int]:
        """Return the next node, which this one watches; none if it is alone."""
        return [(self._rank + 1) % self._world_size] if self._world_size > 1 else []

    def has(self, event: str) -> bool:
        """Return whether a node has called ``announce(event)``."""
        return bool(self._store.check([event]))

    def announce(self, event: str) -> None:
        """Publish ``ended`` or ``join``."""
        self._store.set(event, "")

    def collect(
        self, report: NodeReport, limit_s: float, on_poll: Callable[[], None]
    ) -> tuple[list[NodeReport], list[int]]:
        """Publish ``report``; return the reports of all nodes, and the ranks of lost ones.

        Waits without limit for nodes whose ranks train on, and ``limit_s`` after an attempt has
        ended by a failure.
        """
        self._store.set(f"report/{self._rank}", report.to_text())
        missing = set(range(self._world_size))
        ended_at_s: float | None = None
        lost: list[int] = []
        while True:
            missing -= {rank for rank in missing if self.has(f"report/{rank}")}
            lost = [rank for rank in self.lost(sorted(missing)) if rank in missing]
            if ended_at_s is None and self.has("ended"):
                ended_at_s = time.monotonic()
            is_over = ended_at_s is not None and time.monotonic() - ended_at_s > limit_s
            if is_over or not missing - set(lost):
                break
            self.beat()
            on_poll()
            time.sleep(_POLL_S)
        present = [rank for rank in range(self._world_size) if rank not in missing]
        texts = [self._store.get(f"report/{rank}").decode() for rank in present]
        return [NodeReport.from_text(text) for text in texts], sorted(missing)

    def agree(self, decision: Decision) -> Decision:
        """Return the decision of the node that decided first."""
        text = self._store.compare_set("decision", "", decision.to_text())
        return Decision.from_text(text.decode())
