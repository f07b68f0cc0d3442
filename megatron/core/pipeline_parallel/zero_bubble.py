"""Orders of work that fill the bubble with weight gradients (arXiv 2401.10241).  Pure.

The gradients of weights are wanted only at the end of the step; computed apart from those of
inputs they fill the time in which a rank would wait.
"""

from __future__ import annotations

from itertools import zip_longest

from megatron.core.pipeline_parallel.plan import Work


def zb_h1(*, rank: int, num_ranks: int, num_microbatches: int) -> tuple[Work, ...]:
    """1F1B whose weight work follows ``rank`` backwards later.

    Later ranks run fewer forwards ahead, so that all keep as many micro-batches as rank 0 does.
    """
    forwards = [Work("forward", m, 0) for m in range(num_microbatches)]
    backwards = [Work("backward", m, 0) for m in range(num_microbatches)]
    weights = [Work("weight", m, 0) for m in range(num_microbatches)]
    ahead = min(num_ranks - rank, num_microbatches)
    behind = min(rank, num_microbatches)
    steps = zip_longest(backwards, [*[None] * behind, *weights], forwards[ahead:])
    return (*forwards[:ahead], *(work for step in steps for work in step if work is not None))


def zb_v(*, rank: int, num_ranks: int, num_microbatches: int) -> tuple[Work, ...]:
    """Two chunks per rank in V placement, with as many passes alive as 2 * 1F1B.

    The pattern needs 2 * num_ranks - 1 micro-batches; of fewer, the missing ones are left out.
    """
    total = max(num_microbatches, 2 * num_ranks - 1)
    behind = num_ranks - rank
    rounds = (
        [("f0", 2 * behind - 1), ("f1 f0", rank), ("f1 b1 w1", behind)]
        + [("f0 b0 w0 f1 b1 w1", total - num_ranks), ("b0 b1", rank), ("b0 w0", behind)]
        + [("w1", rank), ("w0", rank)]
    )
    kinds = {"f": "forward", "b": "backward", "w": "weight"}
    done = dict.fromkeys(("f0", "f1", "b0", "b1", "w0", "w1"), 0)
    order = []
    for passes, times in rounds:
        for name in passes.split() * times:
            if done[name] < num_microbatches:
                order.append(Work(kinds[name[0]], done[name], int(name[1])))  # type: ignore[arg-type]
            done[name] += 1
    return tuple(order)
