"""Zero-bubble schedules: fill the pipeline bubble with weight gradients (arXiv 2401.10241).

Weight gradients are needed only at the end of the step.  So a rank computes them separately from
input gradients, in passes of their own, when it would otherwise wait for another stage.  Pure: no
torch, no communication.
"""

from __future__ import annotations

from itertools import zip_longest

from megatron.core.pipeline_parallel.plan import Work


def zb_h1(*, rank: int, num_ranks: int, num_microbatches: int) -> tuple[Work, ...]:
    """Return the order of ZB-H1: 1F1B with each weight pass delayed by ``rank`` backward passes.

    Later ranks run fewer forward passes during warmup, so that no rank holds the activations of
    more micro-batches than rank 0 does.
    """
    forwards = [Work("forward", m, 0) for m in range(num_microbatches)]
    backwards = [Work("backward", m, 0) for m in range(num_microbatches)]
    weights = [Work("weight", m, 0) for m in range(num_microbatches)]
    ahead = min(num_ranks - rank, num_microbatches)
    behind = min(rank, num_microbatches)
    steps = zip_longest(backwards, [*[None] * behind, *weights], forwards[ahead:])
    return (*forwards[:ahead], *(work for step in steps for work in step if work is not None))


def zb_v(*, rank: int, num_ranks: int, num_microbatches: int) -> tuple[Work, ...]:
    """Return the order of ZB-V: two chunks per rank in V placement.

    A rank holds activations of at most 2 * num_ranks passes of a chunk, the memory of 1F1B.  The
    pattern is built for at least 2 * num_ranks - 1 micro-batches; passes of micro-batches that the
    step does not have are left out.
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
