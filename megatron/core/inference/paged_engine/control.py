"""Messages between rank 0, which plans, and the ranks that execute: arrays of int64 over gloo.

Order: rank 0 sends each rank the plans of its replica; ranks execute them in that order; the rank
of a replica that samples sends the result of each plan back.  Results arrive in the order of the
plans, since gloo keeps the order of messages between two ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.config.errors import LaunchError
from megatron.core.inference.paged_engine.step_plan import Integers

_FIRST = 512  # numbers in the first message; longer ones need a second message
_MOST_PENDING = 256  # messages; each is received within a round of steps
# Ranks wait for the next plan as long as a server is idle; the death of the root ends the wait.
_LONGEST_IDLE = timedelta(days=3650)


class ControlChannel:
    """Sends and receives arrays between the first rank of ``world``, the root, and the others.

    Construction is collective over all ranks.  ``peers``: ranks of every channel that they
    construct at the same time, in the same order on all of them; default: ``world`` alone.
    ``timeout_s``: the longest wait for a result.  The channel has a group of its own:
    collectives of the model may be in flight at the same time.
    """

    def __init__(
        self,
        world: ProcessGroup,
        peers: Sequence[Sequence[int]] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.longest_step = timedelta(seconds=timeout_s)  # that the root waits for a result
        self.ranks = [0]  # global ranks, the root first; unused with one rank
        self._group: ProcessGroup | None = None
        # Tensors must live until gloo has sent them.
        self._pending: deque[tuple[dist.Work, torch.Tensor]] = deque()
        if world.size() == 1:
            return
        self.ranks = dist.get_process_group_ranks(world)
        for ranks in peers or [self.ranks]:
            # Not use_local_synchronization: its name of a group is wrong on ranks that belong to
            # different numbers of groups.
            group = dist.new_group(
                list(ranks), timeout=_LONGEST_IDLE, backend="gloo", group_desc="generation control"
            )
            if list(ranks) == self.ranks:
                self._group = group

    @property
    def root(self) -> int:
        """Global rank of the process that plans."""
        return self.ranks[0]

    def send(self, array: Integers, rank: int) -> None:
        """Send to global ``rank`` without waiting: it may be sending to this rank itself."""
        first = np.zeros(_FIRST, dtype=np.int64)
        first[0] = len(array)
        head = array[: _FIRST - 1]
        first[1 : 1 + len(head)] = head
        self._start(torch.from_numpy(first), rank)
        if len(array) >= _FIRST:
            self._start(torch.from_numpy(np.ascontiguousarray(array[_FIRST - 1 :])), rank)
        while len(self._pending) > _MOST_PENDING:
            self._pending.popleft()[0].wait()

    def flush(self) -> None:
        """Wait until all messages have been received."""
        while self._pending:
            self._pending.popleft()[0].wait()

    def _start(self, tensor: torch.Tensor, rank: int) -> None:
        work = dist.isend(tensor, rank, group=self._group)
        assert work is not None, "this rank is in the group"
        self._pending.append((work, tensor))

    def receive(self, rank: int) -> Integers:
        """Wait for the next message of global ``rank``."""
        first = torch.empty(_FIRST, dtype=torch.int64)
        self._receive(first, rank)
        length = int(first[0])
        if length < _FIRST:
            return first[1 : 1 + length].numpy()
        rest = torch.empty(length - _FIRST + 1, dtype=torch.int64)
        self._receive(rest, rank)
        return torch.cat([first[1:], rest]).numpy()

    def _receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Fill ``tensor``.  Raises LaunchError if ``rank`` ends, or takes too long for a step."""
        work = dist.irecv(tensor, rank, group=self._group)
        assert work is not None, "this rank is in the group"
        try:
            if rank == self.root:
                work.wait()
            else:
                work.wait(self.longest_step)
        except RuntimeError as error:
            reason = str(error).partition(". This")[0]  # before gloo's advice
            what = "plans" if rank == self.root else "the result of a step"
            raise LaunchError(
                f"rank {rank} has not sent {what}: {reason}; look for its last message, and start "
                "all ranks again"
            ) from error

    def all_reduce_min(self, numbers: torch.Tensor) -> None:
        """Replace ``numbers`` by their minima over all ranks.  Collective."""
        if self._group is not None:
            dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=self._group)
