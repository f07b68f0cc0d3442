"""Muon: update each matrix along the orthogonal matrix nearest to its momentum.

Embeddings, the output layer, norms and biases use the rule of --muon-scalar-optimizer.

The complete matrix is orthogonalised, whatever the sharding.  Tensor-parallel shards:
`newton_schulz.orthogonalize_share`.  Shards of the distributed optimizer or FSDP: one of the ranks
that hold a part of the matrix is its owner, chosen so that the work is balanced.  The other ranks
send their parts of the momentum to the owner and receive their parts of the result, so that each
value is sent at most once in each direction, and a matrix that one rank holds alone is not sent.

Collectives of a step, for each batch of matrices in the order of the model: an all-to-all over the
ranks that share an optimizer instance, the collectives of --muon-tp-mode, an all-to-all back.  The
all-to-alls are left out for batches in which every matrix is held by one rank.  All ranks build the
same batches from the spans of all ranks, and join the collectives of every batch, even one in which
they hold no matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.optimizer.mixed_precision import OptimizedParam
from megatron.core.optimizer.newton_schulz import (
    coefficients_of,
    orthogonalize_share,
    products_in,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import ParamGroup, is_matrix
from megatron.core.optimizer.reduced_precision_state import StateChunk, StateStorage
from megatron.core.optimizer.update_rules import State, UpdateRule
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import ParamInfo, info_of

Span = tuple[int, int]
# Elements per batch and sharing rank: bounds the memory of the all-to-all buffers.
_BATCH_PER_RANK = 2**26


def owners_of(shapes: Sequence[tuple[int, int]], spans: Sequence[Sequence[Span]]) -> list[int]:
    """Return the owner of each matrix: the rank with least work among those that hold a part.

    ``spans[i][rank]``: elements (start, stop) of matrix i on that rank.  Work counts as
    rows * columns * min(rows, columns), the cost of a Newton-Schulz iteration.

    >>> owners_of([(4, 2), (4, 4), (4, 2)], [[(0, 8), (8, 8)], [(0, 8), (8, 16)], [(0, 2), (2, 8)]])
    [0, 1, 0]
    """
    work, owners = [0] * len(spans[0]) if spans else [], []
    for shape, held in zip(shapes, spans, strict=True):
        counts = [stop - start for start, stop in held]
        holders = [rank for rank, count in enumerate(counts) if count]
        owner = min(holders, key=lambda rank: (work[rank], -counts[rank]))
        work[owner] += prod(shape) * min(shape)
        owners.append(owner)
    return owners


@dataclass(frozen=True, eq=False)
class _Matrix:
    """A matrix of the model; ``param`` is None on a rank that holds no part of it."""

    info: ParamInfo
    shape: torch.Size  # of the tensor-parallel shard
    param: OptimizedParam | None
    spans: Sequence[Span]  # by rank
    owner: int


class Muon(UpdateRule):
    """Muon for groups marked "is_matrix"; ``scalar`` updates the other parameters."""

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        config: OptimizerConfig,
        *,
        scalar: UpdateRule,
        params: Sequence[OptimizedParam],
        spans: Mapping[nn.Parameter, Sequence[Span]],
        process_groups: ProcessGroupCollection,
    ) -> None:
        """``spans``: for each sharded parameter, the elements that each sharing rank holds."""
        others = iter(scalar.param_groups)
        super().__init__([g if g["is_matrix"] else next(others) for g in groups], config)
        self.scalar, self._groups = scalar, process_groups
        scalar._steps = self._steps
        mine = {p.model: p for p in params}
        known = spans or {m: [(0, m.numel())] for m in mine}
        names = {m: info_of(m).name or (mine[m].name if m in mine else "") for m in known}
        self._batches = [
            (is_expert, batch)
            for is_expert in (False, True)
            for batch in _batches(
                [m for m in known if is_matrix(names[m], m) and info_of(m).is_expert == is_expert],
                mine,
                known,
            )
        ]
        self._group_of = {p: group for group in self.param_groups for p in group["params"]}
        self._others = {p for p, group in self._group_of.items() if not group["is_matrix"]}

    def new_state(self, param: nn.Parameter) -> State:
        if param in self._others:
            return self.scalar.new_state(param)
        return {"momentum_buffer": torch.zeros_like(param, dtype=torch.float32)}

    def update(self, chunk: StateChunk, group: ParamGroup, grad_scale: Tensor | None) -> None:
        self.scalar.update(chunk, group, grad_scale)

    @torch.no_grad()
    def step(
        self, divisor: float | Tensor = 1.0, only: Container[nn.Parameter] | None = None
    ) -> None:
        """Update as `UpdateRule.step` does.  Collective over the ranks of the model."""
        assert only is None, "matrices are updated at once"
        super().step(divisor, self._others)
        with products_in(self.config.muon_fp32_matmul_prec) as dtype:
            for is_expert, batch in self._batches:
                self._step_batch(batch, divisor, is_expert, dtype)

    def _step_batch(
        self,
        batch: Sequence[_Matrix],
        divisor: float | Tensor,
        is_expert: bool,
        dtype: torch.dtype,
    ) -> None:
        group, tp = _sharers(self._groups, is_expert), _tensor_ranks(self._groups, is_expert)
        rank = group.rank() if len(batch[0].spans) > 1 else 0
        means = [self._mean(m.param.main, divisor) if m.param else None for m in batch]
        wholes = _to_owners(batch, means, rank, group)
        for number, matrix in enumerate(batch):
            whole = wholes[number]
            if whole is not None:
                share = whole.view(matrix.shape).to(dtype)
                wholes[number] = self._orthogonal(share, matrix.info, tp)
        directions = _from_owners(batch, wholes, rank, group)
        for matrix, direction in zip(batch, directions, strict=True):
            # FSDP2 shards rows: with fewer rows than ranks, some ranks hold an empty shard.
            if matrix.param is not None and matrix.param.main.numel():
                assert direction is not None
                self._move(matrix.param.main, direction)

    def _orthogonal(self, share: Tensor, info: ParamInfo, tp: ProcessGroup) -> Tensor:
        config = self.config
        return orthogonalize_share(
            share,
            info,
            tp,
            coefficients_of(config.muon_coefficient_type, config.muon_num_ns_steps),
            mode=config.muon_tp_mode,
            scale_mode=config.muon_scale_mode,
            split_interleaved=config.muon_split_qkv,
        )

    def _mean(self, param: nn.Parameter, divisor: float | Tensor) -> Tensor:
        """Update the momentum and return the matrix to orthogonalise, flat.

        m = mu m + (1 - mu) g; the result is m, or with Nesterov mu m + (1 - mu) g of the new m.
        """
        assert param.grad is not None, "a parameter is updated without a gradient"
        buffer, momentum = self.state_of(param)["momentum_buffer"], self.config.muon_momentum
        assert isinstance(buffer, Tensor)
        grad = param.grad.float() / divisor
        buffer.lerp_(grad, 1.0 - momentum)
        mean = grad.lerp(buffer, momentum) if self.config.muon_nesterov else buffer
        return mean.reshape(-1)

    def _move(self, param: nn.Parameter, direction: Tensor) -> None:
        group, main = self._group_of[param], self.state_of(param).get("main")
        values = main.read() if isinstance(main, StateStorage) else param.data
        values.mul_(1.0 - group["lr"] * group["weight_decay"])
        factor = -group["lr"] * self.config.muon_extra_scale_factor
        values.add_(direction.view_as(values), alpha=factor)
        if isinstance(main, StateStorage):
            main.write(values)


def _batches(
    models: Sequence[nn.Parameter],
    mine: Mapping[nn.Parameter, OptimizedParam],
    spans: Mapping[nn.Parameter, Sequence[Span]],
) -> Iterator[list[_Matrix]]:
    """Yield the batches of matrices, the same on all ranks that share the matrices."""
    infos = [info_of(m) for m in models]
    shapes = [
        i.part.shape if i.part else tuple(m.shape) for i, m in zip(infos, models, strict=True)
    ]
    owners = owners_of([(s[0], s[1]) for s in shapes], [spans[m] for m in models])
    batch: list[_Matrix] = []
    numel = 0
    for model, info, shape, owner in zip(models, infos, shapes, owners, strict=True):
        batch.append(_Matrix(info, torch.Size(shape), mine.get(model), spans[model], owner))
        numel += prod(shape)
        if numel >= _BATCH_PER_RANK * len(spans[model]):
            yield batch
            batch, numel = [], 0
    if batch:
        yield batch


def _sharers(groups: ProcessGroupCollection, is_expert: bool) -> ProcessGroup:
    """Return the group of ranks that hold different parts of the same parameters."""
    # True with one instance of the optimizer, and when instances divide the update (HSDP).
    if groups.intra_dist_opt.size() == groups.world.size():
        return groups.expt_dp if is_expert else groups.dp_cp
    return groups.intra_expt_dp if is_expert else groups.intra_dp_cp


def _tensor_ranks(groups: ProcessGroupCollection, is_expert: bool) -> ProcessGroup:
    return groups.expt_tp if is_expert else groups.tp


def _to_owners(
    batch: Sequence[_Matrix], means: Sequence[Tensor | None], rank: int, group: ProcessGroup
) -> list[Tensor | None]:
    """Return the assembled tensor-parallel shards of the matrices that this rank owns.

    A matrix that this rank holds alone is returned without a copy; the result may be the momentum
    buffer itself, so the caller must not write to it.
    """
    wholes: list[Tensor | None] = [None] * len(batch)
    received = _exchange(batch, lambda n, _: means[n], rank, group, is_to_owner=True)
    for number, matrix in enumerate(batch):
        mean, numel = means[number], prod(matrix.shape)
        if matrix.owner == rank and mean is not None:
            start, stop = matrix.spans[rank]
            whole = mean if stop - start == numel else mean.new_empty(numel)
            whole[start:stop] = mean
            wholes[number] = whole
    for (number, source), values in received.items():
        held = wholes[number]
        assert held is not None
        held[slice(*batch[number].spans[source])] = values
    return wholes


def _from_owners(
    batch: Sequence[_Matrix], results: Sequence[Tensor | None], rank: int, group: ProcessGroup
) -> list[Tensor | None]:
    """Return this rank's part of each result, flat; None for matrices it holds no part of."""

    def part(number: int, holder: int) -> Tensor | None:
        result = results[number]
        return None if result is None else result.view(-1)[slice(*batch[number].spans[holder])]

    received = _exchange(batch, part, rank, group, is_to_owner=False)
    return [received.get((n, rank), part(n, rank)) for n in range(len(batch))]


def _exchange(
    batch: Sequence[_Matrix],
    part: Callable[[int, int], Tensor | None],
    rank: int,
    group: ProcessGroup,
    *,
    is_to_owner: bool,
) -> dict[tuple[int, int], Tensor]:
    """Send parts between holders and owners; return them by (matrix, holder).

    ``part(matrix, holder)`` returns a part that this rank sends.  Collective over ``group``; every
    rank computes the counts from the spans, so no sizes are communicated.
    """
    pairs = [
        (number, holder)
        for number, matrix in enumerate(batch)
        for holder, (start, stop) in enumerate(matrix.spans)
        if start < stop and holder != matrix.owner
    ]
    if not pairs:
        return {}

    def numel(pair: tuple[int, int]) -> int:
        start, stop = batch[pair[0]].spans[pair[1]]
        return stop - start

    def between(source: int, target: int) -> list[tuple[int, int]]:
        ends = (source, target) if is_to_owner else (target, source)
        return [(n, holder) for n, holder in pairs if (holder, batch[n].owner) == ends]

    ranks = range(group.size())
    sent, expected = [between(rank, r) for r in ranks], [between(r, rank) for r in ranks]
    counts = [[sum(map(numel, pairs)) for pairs in lists] for lists in (sent, expected)]
    values = [part(*pair) for pairs in sent for pair in pairs]
    where = device.current()
    outgoing = torch.cat([torch.empty(0, device=where), *(v for v in values if v is not None)])
    incoming = torch.empty(sum(counts[1]), device=where)
    dist.all_to_all_single(incoming, outgoing, counts[1], counts[0], group=group)
    flat = [pair for pairs in expected for pair in pairs]
    return dict(zip(flat, incoming.split([numel(pair) for pair in flat]), strict=True))
