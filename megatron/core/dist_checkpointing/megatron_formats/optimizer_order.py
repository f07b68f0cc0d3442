"""Match the optimizer state of format torch, which numbers its parameters, with parameter names.

Parameters are in the order of the model.  Those without weight decay (biases and one-dimensional
tensors) form separate groups.  The numbers of a group follow the order of its parameters.

A buffer of the distributed optimizer has the parameters of one dtype of one model chunk, in reverse
order; each starts at a multiple of 64 elements.  It consists of buckets; the padding after a bucket
is not saved.  A bucket ends when it has ``bucket_size`` elements, and before and after an embedding
shared by two stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import lcm, prod
from typing import Any

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Arguments, Shape, StateDict, Unpickled
from megatron.core.dist_checkpointing.key_names import is_vocabulary
from megatron.core.dist_checkpointing.megatron_formats.archive import StoredArray
from megatron.core.dist_checkpointing.megatron_formats.dcp_index import DcpTensor
from megatron.core.dist_checkpointing.megatron_formats.names import is_expert

Param = tuple[str, Any]  # name, and a rank's shard: anything with a shape and a dtype
Chunks = Sequence[Sequence[Param]]  # the parameters of each model chunk
State = tuple[str, str, Unpickled]  # kind of state, name of the parameter, array or `DcpTensor`

BUFFER_KINDS = {"param": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def optimizer_state(
    what: object,
    optimizer: Unpickled,
    buffers: Unpickled,
    chunks: Iterable[Iterable[Param]],
    arguments: Arguments,
    stage: int,
    hint: str = "",
) -> list[State]:
    """Return the optimizer state of the parameters of one rank, by kind and name.

    ``buffers``: contents of its distrib_optim.pt, or None.  ``chunks``: its parameters, per model
    chunk.  If experts have a separate optimizer, optimizer and buffers are lists of two, with the
    experts' second.  Raises CheckpointError, with ``what`` and ``hint`` in its message, if the
    state does not match these parameters.
    """
    try:
        params = [list(chunk) for chunk in chunks]
        if not isinstance(optimizer, list) and not isinstance(buffers, list):
            return list(_state(optimizer, buffers, params, arguments, stage))
        states: list[State] = []
        for which in (False, True):
            mine = [[p for p in chunk if is_expert(p[0]) is which] for chunk in params]
            if any(mine):
                own = optimizer[which] if isinstance(optimizer, list) else optimizer
                states += _state(own, buffers and buffers[which], mine, arguments, stage, which)
        return states
    except (
        CheckpointError,  # the layers cannot be split over the pipeline stages
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"{what} does not fit the model beside it ({error}){hint}; --no-load-optim does without"
        ) from None


def _state(
    optimizer: Unpickled,
    buffers: Unpickled,
    chunks: Chunks,
    arguments: Arguments,
    stage: int,
    of_experts: bool = False,
) -> Iterator[State]:
    if buffers is not None:
        yield from _from_buffers(buffers, chunks, arguments, stage, of_experts)
        return
    inner = optimizer.get("optimizer", optimizer)
    groups = inner["param_groups"]
    sorts = list(map(sort_of, groups))
    members: list[list[Param]] = [[] for _ in groups]
    for name, array in (param for chunk in chunks for param in chunk):
        members[sorts.index(group_of(name, len(array.shape), arguments))].append((name, array))
    for group, params in zip(groups, members, strict=True):
        for index, (name, array) in zip(group["params"], params, strict=True):
            for kind, value in inner["state"].get(index, {}).items():
                if kind != "step" and isinstance(value, StoredArray | DcpTensor):
                    _check(name, value.shape, array.shape)
                    yield kind, name, value
    mains = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16", ()))
    for params, values in zip(members, mains, strict=False):
        halves = [param for param in params if param[1].dtype.itemsize == 2]
        for (name, array), value in zip(halves, values, strict=True):
            _check(name, value.shape, array.shape)
            yield "fp32_param", name, value


def group_of(name: str, num_dims: int, arguments: Arguments) -> tuple[float, bool]:
    """Return (weight decay multiplier, whether --decoupled-lr applies) of a parameter."""
    decays = 0.0 if name.endswith(".bias") or num_dims == 1 else 1.0
    is_end = is_vocabulary(name) or name.startswith("embedding.")
    return decays, is_end and arguments.get("decoupled_lr") is not None


def sort_of(group: StateDict) -> tuple[float, bool]:
    """Return what `group_of` returns for the parameters of ``group``."""
    decays = 0.0 if group.get("wd_mult", 1.0) == 0.0 else 1.0  # muP has other factors than 1
    return decays, bool(group.get("is_decoupled_lr"))


def numbered_groups(
    known: Iterable[StateDict], params: Iterable[tuple[str, int]], arguments: Arguments
) -> list[tuple[StateDict, list[str]]]:
    """Return (group with its parameter numbers, names) pairs, in order of first appearance.

    ``params``: name and number of dimensions, in the order of the model.
    """
    by_sort = {sort_of(group): group for group in known}
    met: dict[tuple[float, bool], list[str]] = {}
    for name, num_dims in params:
        met.setdefault(group_of(name, num_dims, arguments), []).append(name)
    groups, done = [], 0
    for sort, names in met.items():
        groups.append(({**by_sort[sort], "params": list(range(done, done + len(names)))}, names))
        done += len(names)
    return groups


def _from_buffers(
    buffers: Unpickled, chunks: Chunks, arguments: Arguments, stage: int, of_experts: bool
) -> Iterator[State]:
    number = 0
    for chunk, params in enumerate(chunks):
        for _ in range(len({array.dtype for _, array in params})):
            ((dtypes, stored),) = buffers[number].items()
            mine = [param for param in params if param[1].dtype == dtypes[0]]
            starts, total = starts_in_buffer(
                [(name, prod(array.shape)) for name, array in mine],
                arguments,
                num_params=sum(prod(array.shape) for _, array in params),
                is_first=stage == 0 and chunk == 0,
                of_experts=of_experts,
            )
            for kind, ours in BUFFER_KINDS.items():
                whole = stored[kind]
                _check(f"buffer {number}", whole.shape, (total,))
                for (name, array), start in zip(mine, starts, strict=True):
                    yield ours, name, whole.flat(start, array.shape)
            number += 1


def _check(name: str, have: Shape, want: Shape) -> None:
    if have != want:
        raise ValueError(f"{name} has shape {list(have)}, {list(want)} was expected")


_PARAM_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
_HIGH_BUS_BANDWIDTH_ALIGNMENT = 2**16


def starts_in_buffer(
    params: Sequence[tuple[str, int]],
    arguments: Arguments,
    *,
    num_params: int,
    is_first: bool,
    of_experts: bool = False,
) -> tuple[list[int], int]:
    """Return the start of each parameter among the saved elements, and their total number.

    ``params``: name and elements, in the order of the model; ``num_params``: elements of the model
    chunk, also of other dtypes.  ``is_first``: the first model chunk of the first stage; other
    chunks have one bucket.  ``of_experts``: buffers of experts, which have their own data-parallel
    size.

    >>> params = [("a", 100), ("b", 64), ("c", 30)]
    >>> starts_in_buffer(params, {}, num_params=194, is_first=True)
    ([128, 64, 0], 228)
    >>> arguments = {"overlap_grad_reduce": True, "ddp_bucket_size": 30}
    >>> starts_in_buffer(params, arguments, num_params=194, is_first=True)
    ([94, 30, 0], 194)
    """
    tp, pp, cp, dp = (
        int(arguments.get(size) or 1)
        for size in (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
            *("context_parallel_size", "data_parallel_size"),
        )
    )
    replicas = dp * cp
    if of_experts:
        expert_tp = int(arguments.get("expert_tensor_parallel_size") or tp)
        replicas = replicas * tp // (expert_tp * int(arguments["expert_model_parallel_size"]))
    alignment = lcm(replicas, _BUCKET_ALIGNMENT)
    if arguments.get("ddp_pad_buckets_for_high_nccl_busbw"):
        alignment = lcm(alignment, _HIGH_BUS_BANDWIDTH_ALIGNMENT)
    bucket_size = None
    overlapped = arguments.get("overlap_grad_reduce")
    if overlapped and is_first and not arguments.get("overlap_param_gather_with_optimizer_step"):
        bucket_size = arguments.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * replicas)
        if arguments.get("ddp_num_buckets"):
            bucket_size = num_params // arguments["ddp_num_buckets"]
    shares_embedding = pp > 1 and not arguments.get("untie_embeddings_and_output_weights")
    starts: list[int] = []
    closed = end = 0  # saved elements of closed buckets; end of the open bucket
    for name, numel in reversed(params):
        is_alone = shares_embedding and is_vocabulary(name)
        begin = _round_up(end, _PARAM_ALIGNMENT)
        if is_alone and end:
            closed += begin if begin % replicas == 0 else _round_up(begin, alignment)
            begin = 0
        starts.insert(0, closed + begin)
        end = begin + numel
        if is_alone or (bucket_size is not None and end >= bucket_size):
            closed = closed + end
            end = 0
    return starts, closed + end


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
