"""Position of each parameter in the buffers of Megatron-LM's distributed optimizer, in elements.

A buffer has the parameters of one dtype of one model chunk, in reverse order; each starts at a
multiple of 64.  It consists of buckets; the padding after a bucket is not saved.  A bucket ends
when it has ``bucket_size`` elements, and before and after an embedding shared by two stages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import lcm

from megatron.core.config.value_types import Arguments

_PARAM_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
_HIGH_BUS_BANDWIDTH_ALIGNMENT = 2**16


def starts_in_buffer(
    numels: Sequence[int],
    bucket_size: int | None,
    alone: Collection[int] = (),
    bucket_alignment: int = _BUCKET_ALIGNMENT,
    replicas: int = 1,
) -> tuple[list[int], int]:
    """Return the start of each parameter among the saved elements, and their total number.

    ``numels`` in the order of the model; each parameter in ``alone`` has its own bucket.

    >>> starts_in_buffer([100, 64, 30], None)
    ([128, 64, 0], 228)
    >>> starts_in_buffer([100, 64, 30], 30)
    ([94, 30, 0], 194)
    """
    starts = [0] * len(numels)
    closed = end = 0  # saved elements of closed buckets; end of the open bucket
    for index in reversed(range(len(numels))):
        begin = _round_up(end, _PARAM_ALIGNMENT)
        if index in alone and end:
            closed += begin if begin % replicas == 0 else _round_up(begin, bucket_alignment)
            begin = end = 0
        starts[index] = closed + begin
        end = begin + numels[index]
        if index in alone or (bucket_size is not None and end >= bucket_size):
            closed, end = closed + end, 0
    return starts, closed + end


def bucket_rules(
    arguments: Arguments, *, num_params: int, is_first: bool, is_expert: bool = False
) -> tuple[int | None, int, int]:
    """Return (bucket size, alignment of bucket ends, data-parallel size) of a command line.

    The size, in elements, is None for one bucket.  ``is_first``: the first model chunk of the first
    stage; other chunks have one bucket.  ``is_expert``: buffers of experts, which have their own
    data-parallel size.
    """
    replicas = int(arguments.get("data_parallel_size") or 1)
    replicas *= int(arguments.get("context_parallel_size") or 1)
    if is_expert:
        tp = int(arguments.get("tensor_model_parallel_size") or 1)
        expert_tp = int(arguments.get("expert_tensor_parallel_size") or tp)
        replicas = replicas * tp // (expert_tp * int(arguments["expert_model_parallel_size"]))
    alignment = lcm(replicas, _BUCKET_ALIGNMENT)
    if arguments.get("ddp_pad_buckets_for_high_nccl_busbw"):
        alignment = lcm(alignment, _HIGH_BUS_BANDWIDTH_ALIGNMENT)
    size = None
    overlapped = arguments.get("overlap_grad_reduce")
    if overlapped and is_first and not arguments.get("overlap_param_gather_with_optimizer_step"):
        size = arguments.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * replicas)
        if arguments.get("ddp_num_buckets"):
            size = num_params // arguments["ddp_num_buckets"]
    return size, alignment, replicas


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
