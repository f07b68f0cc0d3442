"""Match the optimizer state of format torch, which numbers its parameters, with parameter names.

Parameters are in the order of the model.  Those without weight decay (biases and one-dimensional
tensors) form separate groups.  The numbers of a group follow the order of its parameters.

A buffer of the distributed optimizer has the parameters of one dtype of one model chunk, in reverse
order; each starts at a multiple of 64 elements.  It consists of buckets; the padding after a bucket
is not saved.  A bucket ends when it has ``bucket_size`` elements, and before and after an embedding
shared by two stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import lcm, prod
from typing import Protocol

import torch

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Arguments, StateDict, Unpickled
from megatron.core.dist_checkpointing.megatron_formats.archive import StoredArray
from megatron.core.dist_checkpointing.megatron_formats.dcp_index import DcpTensor
from megatron.core.dist_checkpointing.megatron_formats.names import is_expert, is_vocabulary


class ParamShare(Protocol):
    """Shape and dtype of a rank's shard of a parameter."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


Param = tuple[str, ParamShare]
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
        return list(_state(optimizer, buffers, params, arguments, stage))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{what} does not fit the model beside it ({error}){hint}; --no-load-optim does without"
        ) from None


def _state(
    optimizer: Unpickled, buffers: Unpickled, chunks: Chunks, arguments: Arguments, stage: int
) -> Iterator[State]:
    are_two = isinstance(optimizer, list) or isinstance(buffers, list)
    for which in (False, True) if are_two else (None,):
        mine, own, own_buffers = chunks, optimizer, buffers
        if which is not None:
            mine = [[p for p in chunk if is_expert(p[0]) is which] for chunk in chunks]
            own = optimizer[which] if isinstance(optimizer, list) else optimizer
            own_buffers = None if buffers is None else buffers[which]
        if which is not None and not any(mine):
            continue
        if own_buffers is not None:
            yield from _from_buffers(own_buffers, mine, arguments, stage, bool(which))
        else:
            yield from _by_number(own, mine, arguments)


def _by_number(optimizer: Unpickled, chunks: Chunks, arguments: Arguments) -> Iterator[State]:
    inner = optimizer.get("optimizer", optimizer)
    groups = inner["param_groups"]
    members = _members(groups, [param for chunk in chunks for param in chunk], arguments)
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


def _members(
    groups: Sequence[StateDict], params: Sequence[Param], arguments: Arguments
) -> list[list[Param]]:
    """Return the parameters of each group."""
    sorts = [(float(g.get("wd_mult", 1.0)), bool(g.get("is_decoupled_lr"))) for g in groups]
    members: list[list[Param]] = [[] for _ in groups]
    for name, array in params:
        members[sorts.index(group_of(name, len(array.shape), arguments))].append((name, array))
    return members


def group_of(name: str, num_dims: int, arguments: Arguments) -> tuple[float, bool]:
    """Return (weight decay multiplier, whether --decoupled-lr applies) of a parameter."""
    decays = 0.0 if name.endswith(".bias") or num_dims == 1 else 1.0
    is_end = is_vocabulary(name) or name.startswith("embedding.")
    return decays, is_end and arguments.get("decoupled_lr") is not None


def numbered_groups(
    known: Sequence[StateDict], params: Sequence[tuple[str, int]], arguments: Arguments
) -> list[tuple[StateDict, list[str]]]:
    """Return (group with its parameter numbers, names) pairs, in order of first appearance.

    ``params``: name and number of dimensions, in the order of the model.
    """
    by_sort = {(float(g["wd_mult"]), bool(g["is_decoupled_lr"])): g for g in known}
    met: dict[tuple[float, bool], list[str]] = {}
    for name, num_dims in params:
        met.setdefault(group_of(name, num_dims, arguments), []).append(name)
    groups, done = [], 0
    for sort, names in met.items():
        numbers = list(range(done, done + len(names)))
        groups.append(({**by_sort[sort], "params": numbers}, names))
        done += len(names)
    return groups


def _from_buffers(
    buffers: Unpickled,
    chunks: Chunks,
    arguments: Arguments,
    stage: int,
    of_experts: bool = False,
) -> Iterator[State]:
    is_tied = not arguments.get("untie_embeddings_and_output_weights")
    shares_embedding = is_tied and int(arguments.get("pipeline_model_parallel_size") or 1) > 1
    number = 0
    for chunk, params in enumerate(chunks):
        size, alignment, replicas = bucket_rules(
            arguments,
            num_params=sum(prod(array.shape) for _, array in params),
            is_first=stage == 0 and chunk == 0,
            is_expert=of_experts,
        )
        for _ in range(len({array.dtype for _, array in params})):
            ((dtypes, stored),) = buffers[number].items()
            number += 1
            mine = [param for param in params if param[1].dtype == dtypes[0]]
            alone = [i for i, p in enumerate(mine) if shares_embedding and is_vocabulary(p[0])]
            starts, total = starts_in_buffer(
                [prod(array.shape) for _, array in mine], size, alone, alignment, replicas
            )
            for kind, ours in BUFFER_KINDS.items():
                whole = stored[kind]
                _check(f"buffer {number - 1}", whole.shape, (total,))
                for (name, array), start in zip(mine, starts, strict=True):
                    yield ours, name, whole.flat(start, array.shape)


def _check(name: str, have: tuple[int, ...], want: tuple[int, ...]) -> None:
    if have != want:
        raise ValueError(f"{name} has shape {list(have)}, {list(want)} was expected")


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
