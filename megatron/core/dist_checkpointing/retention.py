"""Which checkpoints of a directory stay when a new one is published.  No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.dist_checkpointing.folders import Found


@dataclass(frozen=True)
class Retention:
    """Keep the ``last`` newest whole ones, and those whose iteration is a multiple.

    With ``multiples_of`` alone only the one before the newest is looked at: older ones are those
    of runs that did not ask for it.
    """

    last: int | None = None
    multiples_of: int | None = None

    def doomed(self, order: Sequence[Found]) -> list[Found]:
        """What may be deleted of ``order``, which is newest first; never its first.

        A damaged one does not count as kept: were it the only older one, nothing would be left to
        go back to.
        """
        if self.last is not None:
            whole = [i for i, found in enumerate(order) if found.problem is None]
            old = order[whole[self.last - 1] + 1 :] if len(whole) >= self.last else ()
        else:
            old = order[1:2] if self.multiples_of is not None else ()
        return [found for found in old if not self._is_multiple(found)]

    def _is_multiple(self, found: Found) -> bool:
        return self.multiples_of is not None and (found.iteration or 0) % self.multiples_of == 0


KEEP_ALL = Retention()
