"""Load each shard once for all ranks that hold the same one, then broadcast it between them.

On a file system that all ranks share, data-parallel ranks that read the same bytes compete for its
bandwidth; their own network is usually faster.

Order of collectives: weights before optimizer state; of each, group by group; within a group the
order of `assigned`, one broadcast for each piece.  A rank that cannot read broadcasts unspecified
values and raises at the end, so that no other rank waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.errors import CheckpointError
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.dist_checkpointing.mapping import ShardedTensor, assigned, weights_then_state
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.parallel.json_collectives import on_wire

_READ_AHEAD = 4  # pieces of one rank in host memory before they are broadcast

Fill = Callable[[Sequence[ShardedTensor]], None]


def fill_shared(
    wanted: Sequence[ShardedTensor],
    reader: CheckpointReader,
    groups: Mapping[str, ProcessGroup],
    fill: Fill,
) -> None:
    """Fill the views of ``wanted`` from ``reader``.

    ``groups`` maps `Replica.among` to the group whose ranks hold the same pieces; ``fill`` reads
    the tensors that no other rank of these groups holds.  Collective over every group.  Raises
    CheckpointError and OSError after the last collective, on the rank that cannot read.
    """
    errors: list[Exception] = []
    active = {among: group for among, group in groups.items() if group.size() > 1}
    for part in weights_then_state(wanted):
        for among, group in active.items():
            held = [t for t in part if t.key in reader.tensors and _among(t) == among]
            errors += _broadcast(held, reader, group)
        try:
            fill([t for t in part if _among(t) not in active])
        except (CheckpointError, OSError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _among(tensor: ShardedTensor) -> str | None:
    return None if tensor.replica is None else tensor.replica.among


def _broadcast(
    tensors: Sequence[ShardedTensor], reader: CheckpointReader, group: ProcessGroup
) -> list[Exception]:
    """Read this rank's share of ``tensors`` and broadcast it; return the errors of its reads."""
    errors: list[Exception] = []

    def read(tensor: ShardedTensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        buffer = torch.empty(shape, dtype=reader.tensors[tensor.key].dtype)
        try:
            fault_point("load.tensor")
            reader.read_box(tensor.key, offset, buffer)
        except (CheckpointError, OSError) as error:
            errors.append(error)
        return buffer

    plan = [
        (tensor, piece, owner) for tensor, _, owner in assigned(tensors) for piece in tensor.pieces
    ]
    mine = [partial(read, t, p.offset, p.shape) for t, p, owner in plan if owner == group.rank()]
    with ThreadPoolExecutor(_READ_AHEAD) as pool:
        buffers = _in_order(mine, pool)
        for tensor, piece, owner in plan:
            if owner == group.rank():
                buffer = next(buffers)
            else:
                buffer = torch.empty(piece.shape, dtype=reader.tensors[tensor.key].dtype)
            sent = on_wire(buffer.reshape(-1).view(torch.uint8), group)
            dist.broadcast(sent, group=group, group_src=owner)
            values = sent.view(buffer.dtype).reshape(piece.shape)
            piece.fill(partial(_copy, values))
    return errors


def _copy(values: Tensor, out: Tensor) -> None:
    with torch.no_grad():
        out.copy_(values)


def _in_order(calls: Sequence[Callable[[], Tensor]], pool: ThreadPoolExecutor) -> Iterator[Tensor]:
    """Yield the results of ``calls`` in order, with up to `_READ_AHEAD` calls running ahead."""
    waiting = deque(calls)
    running: deque[Future[Tensor]] = deque()
    while waiting or running:
        while waiting and len(running) < _READ_AHEAD:
            running.append(pool.submit(waiting.popleft()))
        yield running.popleft().result()
