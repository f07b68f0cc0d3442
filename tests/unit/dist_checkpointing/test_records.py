"""Records of what a rank holds."""

from __future__ import annotations

import doctest
import random
from dataclasses import replace

import pytest
import torch

from megatron.core.dist_checkpointing.records import (
    Replica,
    TensorRecord,
    from_param,
    to_write,
)
from megatron.core.params import param_info
from tests.support.tiny_checkpoint import (
    PARAMS,
    global_tensors,
    info,
    local_shape,
    records,
    shares,
)


def paste(target: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    """Write the pieces of ``record`` where they belong; each place must still be NaN."""
    for piece in record.pieces:
        box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
        assert target[box].isnan().all()
        target[box] = piece.data
    return target


def test_doctests():
    assert doctest.testmod(param_info).failed == 0


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_pieces_of_all_ranks_make_the_whole_tensor_without_padding(tp):
    whole = global_tensors()
    found = {name: torch.full(t.shape, torch.nan) for name, t in whole.items()}
    for rank in range(tp):
        for record in records(shares(whole, tp, rank), tp, rank):
            if record.replica is not None:
                paste(found[record.key], record)
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), name


def test_pieces_are_views_of_the_share():
    local = shares(global_tensors(), 2, 1)
    for record in records(local, 2, 1):
        for piece in record.pieces:
            piece.data.fill_(7.0)
    assert (local["layers.0.gated.weight"] == 7.0).all()
    assert (local["embedding.weight"][:4] == 7.0).all()
    assert (local["embedding.weight"][4:] == 0.0).all()  # padding is nobody's


@pytest.mark.parametrize("seed", range(8))
def test_flat_ranges_of_all_owners_make_the_whole_tensor(seed):
    rng = random.Random(seed)
    whole = global_tensors(seed)
    tp = rng.choice([1, 2])
    for name, tensor in whole.items():
        found = torch.full(tensor.shape, torch.nan)
        num_elements = shares(whole, tp, 0)[name].numel()
        cuts = sorted({0, num_elements, *(rng.randint(0, num_elements) for _ in range(3))})
        for rank in range(tp if PARAMS[name][1] is not None else 1):
            flat = shares(whole, tp, rank)[name].reshape(-1)
            for start, stop in zip(cuts, cuts[1:], strict=False):
                part = param_info.FlatPart(local_shape(name, tp), start)
                record = from_param(
                    name, replace(info(name, tp, rank), part=part), flat[start:stop]
                )
                paste(found, record)
        assert torch.equal(found, tensor), (name, cuts)


@pytest.mark.parametrize("share_work", [True, False])
def test_every_record_has_one_writer_among_its_replicas(share_work):
    count = 3

    def held_by(index: int) -> list[TensorRecord]:
        return [
            from_param(
                f"p{i}",
                param_info.ParamInfo(global_shape=(size,)),
                torch.zeros(size),
                Replica(index, count, "dp"),
            )
            for i, size in enumerate([5, 900, 3, 400, 500, 2, 7])
        ]

    written = [to_write(held_by(index), share_work) for index in range(count)]
    keys = sorted(t.key for ts in written for t in ts)
    assert keys == [f"p{i}" for i in range(7)]
    loads = [sum(t.num_bytes for t in ts) for ts in written]
    if share_work:
        assert max(loads) == 900 * 4
        assert min(loads) > 400 * 4
    else:
        assert loads[1:] == [0, 0]


def test_what_another_rank_always_writes_is_left_out():
    record = from_param("p", param_info.ParamInfo(global_shape=(2,)), torch.zeros(2), None)
    assert to_write([record]) == []
