"""Muon: update each matrix along the orthogonal matrix nearest to its momentum.

Embeddings, the output layer, norms and biases use the rule of --muon-scalar-optimizer.

The complete matrix is orthogonalised, whatever the sharding.  Tensor-parallel shards:
`orthogonalize_share`.  Shards of the distributed optimizer or FSDP: one of the ranks
that hold a part of the matrix is its owner, chosen so that the work is balanced.  The other ranks
send their parts of the momentum to the owner and receive their parts of the result, so that each
value is sent at most once in each direction, and a matrix that one rank holds alone is not sent.

Collectives of a step, for each batch of matrices in the order of the model: an all-to-all over the
ranks that share an optimizer instance, the collectives of --muon-tp-mode, an all-to-all back.  The
all-to-alls are left out for batches in which every matrix is held by one rank.  All ranks build the
same batches from the spans of all ranks, and join the collectives of every batch, even one in which
they hold no matrix.

Newton-Schulz iterations orthogonalise, which need only matmuls: X <- aX + (bA + cA^2)X with
A = X X^T moves all singular values towards 1, and X approaches the nearest matrix with orthogonal
rows.  If tensor-parallel ranks hold shards of the columns of X, A is the sum of the ranks'
products; X is transposed first if they hold shards of its rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.optimizer.mixed_precision import OptimizedParam
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import ParamGroup, is_matrix
from megatron.core.optimizer.reduced_precision_state import StateChunk, StateStorage
from megatron.core.optimizer.update_rules import State, UpdateRule
from megatron.core.parallel.collectives import all_gather_single
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import ParamInfo, info_of

Span = tuple[int, int]
# Elements per batch and sharing rank: bounds the memory of the all-to-all buffers.
_BATCH_PER_RANK = 2**26
Coefficients = tuple[tuple[float, float, float], ...]

# One triple (a, b, c) per iteration; iterations beyond the list use the last one.  simple: Keller
# Jordan; quintic: Franz Louis Cesista, searched for 5 iterations; polar_express: arXiv 2505.16932,
# optimal for each iteration.
COEFFICIENTS: dict[str, Coefficients] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845749493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.875, -1.25, 0.375),
    ),
}
SCALES = {
    "spectral": lambda rows, cols: max(rows, cols) ** 0.5,
    "unit_rms_norm": lambda rows, cols: (rows / cols) ** 0.5,
    "shape_scaling": lambda rows, cols: max(1.0, rows / cols) ** 0.5,
}
_EPS = 1e-7


def owners_of(shapes: Sequence[tuple[int, int]], spans: Sequence[Sequence[Span]]) -> list[int]:
    """Return the owner of each matrix: the rank with least work among those that hold a part.

    ``spans[i][rank]``: elements (start, stop) of matrix i on that rank.  Work counts as
    rows * columns * min(rows, columns), the cost of a Newton-Schulz iteration.

    >>> owners_of([(4, 2), (4, 4), (4, 2)], [[(0, 8), (8, 8)], [(0, 8), (8, 16)], [(0, 2), (2, 8)]])
    [0, 1, 0]
    """
    work = [0] * len(spans[0]) if spans else []
    owners = []
    for shape, held in zip(shapes, spans, strict=True):
        counts = [stop - start for start, stop in held]
        holders = [rank for rank, count in enumerate(counts) if count]
        owner = min(holders, key=lambda rank: (work[rank], -counts[rank]))
        work[owner] += prod(shape) * min(shape)
        owners.append(owner)
    return owners


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix of the model; ``param`` is None on a rank that holds no part of it."""

    info: ParamInfo
    shape: torch.Size  # of the tensor-parallel shard
    param: OptimizedParam | None
    spans: Sequence[Span]  # by rank
    owner: int


class MatrixRule(UpdateRule):
    """Rule for groups marked "is_matrix", on complete matrices; ``scalar`` updates the others."""

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        config: OptimizerConfig,
        scalar: UpdateRule,
        params: Sequence[OptimizedParam],
        spans: Mapping[nn.Parameter, Sequence[Span]],
        process_groups: ProcessGroupCollection,
    ) -> None:
        """``spans``: for each sharded parameter, the elements that each sharing rank holds."""
        others = iter(scalar.param_groups)
        super().__init__([g if g["is_matrix"] else next(others) for g in groups], config)
        self.scalar = scalar
        self.groups = process_groups
        scalar._steps = self._steps
        mine = {p.model: p for p in params}
        known = spans or {m: [(0, m.numel())] for m in mine}
        matrices = [
            m for m in known if is_matrix(info_of(m).name or (mine[m].name if m in mine else ""), m)
        ]
        self._batches = [
            batch
            for is_expert in (False, True)
            for batch in _batches(
                [m for m in matrices if info_of(m).is_expert == is_expert], mine, known
            )
        ]
        # The matrices whose updates this rank computes.
        self.owned = {
            m.param.main: m
            for batch in self._batches
            for m in batch
            if m.param is not None and m.owner == self._sharing(m)[1]
        }
        self._group_of = {p: group for group in self.param_groups for p in group["params"]}
        self._others = {p for p, group in self._group_of.items() if not group["is_matrix"]}

    @abstractmethod
    def contribution(self, param: nn.Parameter, grad: Tensor) -> Tensor:
        """Return this rank's part of the matrix of which `direction` gets the whole."""

    @abstractmethod
    def direction(self, matrix: Matrix, share: Tensor) -> Tensor:
        """Return the fp32 update of ``share``, this rank's tensor-parallel shard of a matrix.

        Called by the owner; collective over the tensor-parallel ranks.
        """

    def tp_group(self, matrix: Matrix) -> ProcessGroup:
        """Return the ranks over which the rows or columns of ``matrix`` are sharded."""
        return self.groups.expt_tp if matrix.info.is_expert else self.groups.tp

    def new_state(self, param: nn.Parameter) -> State:
        return self.scalar.new_state(param) if param in self._others else self.matrix_state(param)

    @abstractmethod
    def matrix_state(self, param: nn.Parameter) -> State:
        """Return the state of a matrix, of which ``param`` is this rank's part.

        Its tensors have the shape of the part; those whose name ends with a number, any shape.
        """

    def update(self, chunk: StateChunk, group: ParamGroup, grad_scale: Tensor | None) -> None:
        self.scalar.update(chunk, group, grad_scale)

    @torch.no_grad()
    def step(
        self, divisor: float | Tensor = 1.0, only: Container[nn.Parameter] | None = None
    ) -> None:
        """Update all parameters as `UpdateRule.step` does.  Collective over the model's ranks."""
        assert only is None or all(param in only for param in self._group_of), (
            f"{type(self).__name__} updates all matrices at once: it excludes "
            "optimizer_cpu_offload and overlap_param_gather_with_optimizer_step"
        )
        super().step(divisor, self._others)
        for batch in self._batches:
            self._step_batch(batch, divisor)

    def _sharing(self, matrix: Matrix) -> tuple[ProcessGroup, int]:
        """Return the ranks that hold different parts of the same parameters, and this one's index.

        These are all instances of the optimizer if there is one, or if they divide the update
        (HSDP).
        """
        groups = self.groups
        if groups.intra_dist_opt.size() == groups.world.size():
            group = groups.expt_dp if matrix.info.is_expert else groups.dp_cp
        else:
            group = groups.intra_expt_dp if matrix.info.is_expert else groups.intra_dp_cp
        return group, group.rank() if len(matrix.spans) > 1 else 0

    def _step_batch(self, batch: Sequence[Matrix], divisor: float | Tensor) -> None:
        group, rank = self._sharing(batch[0])
        mine: dict[int, Tensor] = {}
        for number, matrix in enumerate(batch):
            if matrix.param is not None:
                main = matrix.param.main
                assert main.grad is not None, "a parameter is updated without a gradient"
                mine[number] = self.contribution(main, main.grad.float() / divisor).reshape(-1)
        received = _exchange(batch, lambda n, _: mine[n], rank, group, is_to_owner=True)
        results: dict[int, Tensor] = {}
        for number, matrix in enumerate(batch):
            if matrix.owner == rank:
                holders = sorted((s, h) for h, s in enumerate(matrix.spans) if s[0] < s[1])
                parts = [mine[number] if h == rank else received[number, h] for _, h in holders]
                results[number] = self.direction(matrix, torch.cat(parts).view(matrix.shape))

        def result(number: int, holder: int) -> Tensor:
            return results[number].view(-1)[slice(*batch[number].spans[holder])]

        received = _exchange(batch, result, rank, group, is_to_owner=False)
        for number, matrix in enumerate(batch):
            # FSDP2 shards rows: with fewer rows than ranks, some ranks hold an empty shard.
            if matrix.param is not None and matrix.param.main.numel():
                is_owner = matrix.owner == rank
                direction = result(number, rank) if is_owner else received[number, rank]
                self._move(matrix.param.main, direction)

    def _move(self, param: nn.Parameter, direction: Tensor) -> None:
        group = self._group_of[param]
        main = self.state_of(param).get("main")
        values = main.read() if isinstance(main, StateStorage) else param.data
        values.mul_(1.0 - group["lr"] * group["weight_decay"])
        values.add_(direction.view_as(values), alpha=-group["lr"])
        if isinstance(main, StateStorage):
            main.write(values)


class Muon(MatrixRule):
    """Muon for matrices."""

    def matrix_state(self, param: nn.Parameter) -> State:
        return {"momentum_buffer": torch.zeros_like(param, dtype=torch.float32)}

    def step(
        self, divisor: float | Tensor = 1.0, only: Container[nn.Parameter] | None = None
    ) -> None:
        with products_in(self.config.muon_fp32_matmul_prec) as self._dtype:
            super().step(divisor, only)

    def contribution(self, param: nn.Parameter, grad: Tensor) -> Tensor:
        """Update the momentum and return the matrix to orthogonalise.

        m = mu m + (1 - mu) g; the result is m, or with Nesterov mu m + (1 - mu) g of the new m.
        """
        buffer = self.state_of(param)["momentum_buffer"]
        momentum = self.config.muon_momentum
        assert isinstance(buffer, Tensor)
        buffer.lerp_(grad, 1.0 - momentum)
        return grad.lerp(buffer, momentum) if self.config.muon_nesterov else buffer

    def direction(self, matrix: Matrix, share: Tensor) -> Tensor:
        group = self.tp_group(matrix)
        found = orthogonalize_share(share.to(self._dtype), matrix.info, group, self.config)
        return found * self.config.muon_extra_scale_factor


def _batches(
    models: Sequence[nn.Parameter],
    mine: Mapping[nn.Parameter, OptimizedParam],
    spans: Mapping[nn.Parameter, Sequence[Span]],
) -> Iterator[list[Matrix]]:
    """Yield the batches of matrices, the same on all ranks that share the matrices."""
    infos = [info_of(m) for m in models]
    shapes = [
        torch.Size(i.part.shape if i.part else m.shape) for i, m in zip(infos, models, strict=True)
    ]
    owners = owners_of([(s[0], s[1]) for s in shapes], [spans[m] for m in models])
    batch: list[Matrix] = []
    numel = 0
    for model, info, shape, owner in zip(models, infos, shapes, owners, strict=True):
        batch.append(Matrix(info, shape, mine.get(model), spans[model], owner))
        numel += prod(shape)
        if numel >= _BATCH_PER_RANK * len(spans[model]):
            yield batch
            batch = []
            numel = 0
    if batch:
        yield batch


def _exchange(
    batch: Sequence[Matrix],
    part: Callable[[int, int], Tensor],
    rank: int,
    group: ProcessGroup,
    *,
    is_to_owner: bool,
) -> dict[tuple[int, int], Tensor]:
    """Send parts between holders and owners; return them by (matrix, holder).

    ``part(matrix, holder)`` returns a part that this rank sends.  Collective over ``group``; every
    rank computes the counts from the spans, so no sizes are communicated.
    """
    sizes = {
        (number, holder): stop - start
        for number, matrix in enumerate(batch)
        for holder, (start, stop) in enumerate(matrix.spans)
        if start < stop and holder != matrix.owner
    }
    if not sizes:
        return {}

    def between(source: int, target: int) -> list[tuple[int, int]]:
        ends = (source, target) if is_to_owner else (target, source)
        return [(n, holder) for n, holder in sizes if (holder, batch[n].owner) == ends]

    ranks = range(group.size())
    sent = [between(rank, r) for r in ranks]
    expected = [between(r, rank) for r in ranks]
    counts = [[sum(sizes[pair] for pair in pairs) for pairs in lists] for lists in (sent, expected)]
    where = device.current()
    values = [part(*pair) for pairs in sent for pair in pairs]
    outgoing = torch.cat([torch.empty(0, device=where), *values])
    incoming = torch.empty(sum(counts[1]), device=where)
    dist.all_to_all_single(incoming, outgoing, counts[1], counts[0], group=group)
    flat = [pair for pairs in expected for pair in pairs]
    return dict(zip(flat, incoming.split([sizes[pair] for pair in flat]), strict=True))


def orthogonalize(
    matrix: Tensor,
    coefficients: Sequence[tuple[float, float, float]],
    *,
    cut: tuple[int, ProcessGroup] | None = None,
) -> Tensor:
    """Return ``matrix`` [m, n] with all singular values moved close to 1, in its dtype.

    ``cut``: (dimension, group) if the ranks of ``group`` hold shards of ``matrix`` along this
    dimension.  Then collective over the group: one all-reduce for the norm and one per iteration.
    """
    is_tall = matrix.shape[0] > matrix.shape[1] if cut is None else cut[0] == 0
    x: Tensor = matrix.T if is_tall else matrix
    norm = x.norm() if cut is None else _summed(x.square().sum(), cut).sqrt()
    x = x / norm.clamp(min=_EPS)
    for a, b, c in coefficients:
        gram = _summed(x @ x.T, cut)
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _summed(tensor: Tensor, cut: tuple[int, ProcessGroup] | None) -> Tensor:
    if cut is not None:
        dist.all_reduce(tensor, group=cut[1])
    return tensor


def orthogonalize_share(
    share: Tensor, info: ParamInfo, group: ProcessGroup, config: OptimizerConfig
) -> Tensor:
    """Orthogonalise and scale each matrix of a parameter; return this rank's share, in fp32.

    ``share`` [rows, columns] is this rank's tensor-parallel shard of the parameter, which may fuse
    several matrices (query, key and value; gate and up).  --muon-tp-mode duplicated gathers the
    complete matrix on every rank, distributed all-reduces within the iterations, blockwise treats
    the shard as a matrix of its own.  Collective over ``group`` if the parameter is sharded over
    it, except in mode blockwise.
    """
    coefficients = coefficients_of(config.muon_coefficient_type, config.muon_num_ns_steps)

    def compute(_: int, matrix: Tensor, cut: tuple[int, ProcessGroup] | None) -> Tensor:
        found = orthogonalize(matrix, coefficients, cut=cut).float()
        shape = list(found.shape)
        if cut is not None:
            shape[cut[0]] *= cut[1].size()
        scale: float = SCALES[config.muon_scale_mode](*shape)
        return found * scale

    mode = config.muon_tp_mode
    return map_matrices(share, info, group, compute, mode=mode, split_qkv=config.muon_split_qkv)


def map_matrices(
    share: Tensor,
    info: ParamInfo,
    group: ProcessGroup,
    compute: Callable[[int, Tensor, tuple[int, ProcessGroup] | None], Tensor],
    *,
    mode: str = "duplicated",
    split_qkv: bool = True,
) -> Tensor:
    """Return this rank's share of ``compute(number, matrix, cut)`` of each matrix, in fp32.

    `orthogonalize_share` explains ``share`` and ``mode``; ``cut`` as in `orthogonalize`.
    """
    is_sharded = info.shard_dim is not None and group.size() > 1
    dim = info.shard_dim or 0
    count = group.size() if is_sharded else 1
    shares = [share]
    if is_sharded and mode == "duplicated":
        gathered = share.new_empty(count * share.shape[0], share.shape[1])
        all_gather_single(gathered, share.contiguous(), group=group)
        shares = list(gathered.chunk(count))
    result = torch.empty_like(share, dtype=torch.float32)
    split = [_matrices(each, info, split_qkv) for each in (result, *shares)]
    for number, (place, *parts) in enumerate(zip(*split, strict=True)):
        matrix = torch.cat([part.reshape(-1, share.shape[1]) for part in parts], dim)
        cut = (dim, group) if is_sharded and mode == "distributed" else None
        found = compute(number, matrix, cut)
        if len(parts) > 1:
            found = found.chunk(count, dim)[group.rank()]
        place.copy_(found.view_as(place))
    return result


def complete_shapes(
    share: torch.Size, info: ParamInfo, count: int, *, split_qkv: bool = True
) -> list[tuple[int, int]]:
    """Return the shape of each matrix of a parameter, of which ``count`` ranks have shards."""
    parts = _matrices(torch.empty(share, device="meta"), info, split_qkv)
    shapes = [part.reshape(-1, share[1]).shape for part in parts]
    by_rows = info.shard_dim == 0
    return [(s[0] * (count if by_rows else 1), s[1] * (1 if by_rows else count)) for s in shapes]


def _matrices(share: Tensor, info: ParamInfo, split_interleaved: bool) -> Sequence[Tensor]:
    """Return views of the matrices that ``share`` fuses.

    They are concatenated (gate, up) or interleaved in blocks of rows (query, key, value).
    """
    if info.interleaved and split_interleaved:
        rows = share.view(-1, sum(info.interleaved), share.shape[1])
        return torch.split(rows, list(info.interleaved), 1)
    dim = info.shard_dim or 0
    total = sum(info.blocks)
    return torch.split(share, [share.shape[dim] * block // total for block in info.blocks], dim)


def coefficients_of(kind: str, num_steps: int) -> Coefficients:
    """Return the coefficients of each iteration."""
    known = COEFFICIENTS[kind]
    return tuple(known[min(step, len(known) - 1)] for step in range(num_steps))


@contextmanager
def products_in(precision: str) -> Iterator[torch.dtype]:
    """Yield the dtype of matrices under --muon-fp32-matmul-prec: bf16 for low, else fp32.

    Inside the context fp32 matmuls have torch's precision "medium" or "high".
    """
    before = torch.get_float32_matmul_precision()
    if precision != "low":
        torch.set_float32_matmul_precision(precision)
    try:
        yield torch.bfloat16 if precision == "low" else torch.float32
    finally:
        torch.set_float32_matmul_precision(before)
