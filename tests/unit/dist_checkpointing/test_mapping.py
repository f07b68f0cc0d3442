"""Entries of sharded state dicts: fields, ranges of flattened boxes, parts, keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_prefix_mapping,
    replace_prefix_for_sharding,
    split_factory,
)
from megatron.core.dist_checkpointing.module_state import apply_swiglu_sharded_factory


def entry(rank: int, **more: Any) -> ShardedTensor:
    """Rank ``rank`` of two: rows of a [8, 3] tensor, of which layer 1 of 2 is stacked."""
    data = torch.arange(24.0).view(8, 3).chunk(2)[rank].clone()
    return ShardedTensor.from_rank_offsets(
        "w", data, (0, 1, 2), (1, rank, 2), prepend_axis_num=1, **more
    )


def pasted(*entries: ShardedTensor) -> torch.Tensor:
    """The global tensor that the pieces of all records make."""
    whole = torch.full(entries[0].global_shape, torch.nan)
    for each in entries:
        for piece in each.record().pieces:
            place = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
            assert whole[place].isnan().all()
            whole[place] = piece.data
    return whole


def test_a_box_knows_its_place() -> None:
    second = entry(1)
    assert (second.global_shape, second.global_offset) == ((2, 8, 3), (1, 4, 0))
    assert (second.axis_fragmentations, second.local_shape) == ((2, 2, 1), (4, 3))
    assert pasted(entry(0), second)[1].flatten().tolist() == list(range(24))


def test_a_range_of_a_flattened_box_has_parts() -> None:
    flat = replace(entry(1), data=torch.arange(12.0)[2:9], flattened_range=slice(2, 9))
    (rows,) = flat.narrow(0, 1, 2)
    assert (rows.local_shape, rows.global_shape, rows.flattened_range) == (
        (2, 3),
        (2, 4, 3),
        slice(0, 6),
    )
    assert rows.data.tolist() == [3, 4, 5, 6, 7, 8]
    assert flat.narrow(0, 3, 1) == []
    assert pasted(flat)[1, 4:].flatten()[2:9].tolist() == list(range(2, 9))
    empty = flat.without_data()
    empty.init_data(torch.get_default_device(), torch.zeros)
    assert empty.data.shape == (7,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.int8}, "data has dtype torch.float32"),
        ({"local_shape": (2, 3)}, r"data has shape \[4, 3\], not \[2, 3\]"),
        ({"global_offset": (0, 0)}, "different lengths"),
        ({"prepend_axis_num": 0}, "do not make up the axes"),
        ({"global_offset": (0, 3, 0)}, "not a multiple of local_shape"),
        ({"flattened_range": slice(0, 4, 2)}, "has a step"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        replace(entry(0), **changes)


@pytest.mark.parametrize("start", [0, 4, 7])
def test_halves_of_all_ranks_follow_each_other_however_they_are_flattened(start: int) -> None:
    parts = []
    for rank in range(2):
        factory = apply_swiglu_sharded_factory(entry(rank))
        assert apply_swiglu_sharded_factory(factory) is factory
        whole = factory.build()
        assert [part.key for part in whole] == ["w", "w"]
        assert whole[0].axis_fragmentations == (2, 4, 1)
        assert torch.equal(factory.merge_fn([part.data for part in whole]), factory.data)
        for part in (slice(0, start), slice(start, 12)):
            flat = replace(factory, data=factory.data.flatten()[part], flattened_range=part)
            parts += [each for each in flat.build() if each.data.numel()]
    first, second = torch.arange(24.0).view(2, 4, 3)
    expected = torch.cat([first[:2], second[:2], first[2:], second[2:]])
    assert torch.equal(pasted(*parts)[1], expected)


def test_named_parts_are_tensors_of_their_own() -> None:
    built = split_factory(entry(1), [3, 1], ["x", "dt"]).build()
    assert [(part.key, part.global_shape, part.global_offset) for part in built] == [
        ("w.x", (2, 6, 3), (1, 3, 0)),
        ("w.dt", (2, 2, 3), (1, 1, 0)),
    ]
    with pytest.raises(ValueError, match="do not make up"):
        split_factory(entry(1), [3, 2], ["x", "dt"])


def test_prefixes_of_keys_are_replaced() -> None:
    value = ShardedObject("a.b._extra_state", None, (2, 3), (1, 2), replica_id=(0, 1, 0))
    state = {"x": value, "y": [entry(0)]}
    apply_prefix_mapping(state, {"a.b.": "c.", "a.": "d."})
    assert value.unique_key == "c._extra_state/shard_1.2_2.3"
    again = ShardedObject.empty_from_unique_key(value.unique_key)
    assert (again.global_shape, again.global_offset) == ((2, 3), (1, 2))
    with pytest.raises(ValueError, match="key w does not begin with c"):
        replace_prefix_for_sharding(state, "c.", "e.")
