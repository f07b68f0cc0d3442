"""dist_checkpointing.save and load as Megatron Core's users call them."""

from __future__ import annotations

import threading
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.async_requests import AsyncCallsQueue
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.serialization import (
    check_is_distributed_checkpoint,
    load_plain_tensors,
    load_sharded_metadata,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.enums import AttnBackend
from tests.support.ranks import run_ranks


def tensor_of(key: str, value: torch.Tensor, *offsets: tuple[int, int, int]) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, value, *offsets)


def test_a_nested_state_dict_comes_back_with_common_values(tmp_path: Path) -> None:
    saved = {
        "model": {"w": tensor_of("w", torch.arange(6.0).view(2, 3))},
        "list": [tensor_of("v", torch.ones(2, dtype=torch.bfloat16)), 7],
        "iteration": 5,
        "args": Namespace(lr=1e-3, shape=(2, 3), names={1: "one", 2: None}),
        "loose": torch.arange(3),
        "rate": float("inf"),
        "blob": b"\0\1",
        "empty": {},
        "object": ShardedObject("extra", {"scale": [1.5]}, (1,), (0,)),
        "mine": LocalNonpersistentObject("not saved"),
    }
    dist_checkpointing.save(saved, tmp_path)
    asked = {
        "model": {"w": tensor_of("w", torch.zeros(2, 3))},
        "list": [tensor_of("v", torch.zeros(2, dtype=torch.bfloat16)), 0],
        "object": ShardedObject("extra", None, (1,), (0,)),
        "mine": LocalNonpersistentObject("here"),
    }
    loaded = dist_checkpointing.load(asked, str(tmp_path))
    assert torch.equal(loaded["model"]["w"], torch.arange(6.0).view(2, 3))
    assert torch.equal(loaded["list"][0], torch.ones(2, dtype=torch.bfloat16))
    assert torch.equal(loaded["loose"], torch.arange(3))
    assert loaded["list"][1] == 7
    assert loaded["object"] == {"scale": [1.5]}
    assert (loaded["iteration"], loaded["mine"], loaded["blob"]) == (5, "here", b"\0\1")
    assert (loaded["rate"], loaded["empty"]) == (float("inf"), {})
    assert loaded["args"] == Namespace(lr=1e-3, shape=(2, 3), names={1: "one", 2: None})
    common = dist_checkpointing.load_common_state_dict(tmp_path)
    assert common["args"].lr == 1e-3
    assert "model" not in common


def test_a_factory_is_saved_in_its_parts_and_merged_after_loading(tmp_path: Path) -> None:
    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        return [tensor_of(f"{key}.{i}", half) for i, half in enumerate(data.chunk(2))]

    def entry(value: torch.Tensor) -> ShardedTensorFactory:
        return ShardedTensorFactory("glu", value, build, torch.cat)

    dist_checkpointing.save({"glu": entry(torch.arange(4.0))}, tmp_path)
    halves = dist_checkpointing.load({"up": tensor_of("glu.1", torch.zeros(2))}, tmp_path)
    assert halves["up"].tolist() == [2, 3]
    whole = dist_checkpointing.load({"glu": entry(torch.zeros(4))}, tmp_path)
    assert whole["glu"].tolist() == [0, 1, 2, 3]


def test_strict_says_what_is_done_about_differing_keys(tmp_path: Path) -> None:
    dist_checkpointing.save(
        {"a": tensor_of("a", torch.ones(2)), "b": tensor_of("b", torch.ones(2))}, tmp_path
    )
    fewer = {"a": tensor_of("a", torch.zeros(2))}
    assert dist_checkpointing.load(fewer, tmp_path)["a"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="b"):
        dist_checkpointing.load(fewer, tmp_path, strict="raise_all")
    more = {**fewer, "c": tensor_of("c", torch.zeros(2))}
    with pytest.raises(CheckpointError, match="c"):
        dist_checkpointing.load(more, tmp_path)
    state, missing, unexpected = dist_checkpointing.load(
        more, tmp_path, strict=StrictHandling.RETURN_ALL
    )
    assert (set(state), missing, unexpected) == ({"a"}, {"b"}, {"c"})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (object(), "x is a object, which is not saved: no pickle is written"),
        (tensor_of("w", torch.ones(2), (0, 0, 2)), "w: 2 of its 4 elements have no writer"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, entry: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        dist_checkpointing.save({"x": entry}, tmp_path)
    assert not (tmp_path / "metadata.json").exists()


@pytest.mark.parametrize("kind", ["safetensors_dist", "torch_dist"])
def test_every_tensor_has_one_main_replica(tmp_path: Path, kind: str) -> None:
    def save(**entries: ShardedTensor) -> None:
        dist_checkpointing.save(entries, tmp_path, (kind, 1))

    weight = torch.ones(2)
    save(a=tensor_of("w", weight), tied=tensor_of("w", weight))
    with pytest.raises(CheckpointError, match="w: two entries of one rank are this part"):
        save(a=tensor_of("w", weight), b=tensor_of("w", torch.zeros(2)))
    with pytest.raises(CheckpointError, match="w: 2 of its 2 elements have no writer"):
        save(a=replace(tensor_of("w", weight), replica_id=1))
    flat = replace(tensor_of("w", torch.ones(2, 2)), replica_id=1)
    with pytest.raises(CheckpointError, match="w: 4 of its 4 elements have no writer"):
        save(a=replace(flat, data=torch.ones(2), flattened_range=slice(0, 2)))


def test_a_missing_folder_and_other_strategies_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="this folder does not exist: make it first"):
        dist_checkpointing.save({"a": 1}, tmp_path / "none")
    with pytest.raises(CheckpointError, match="strategy .* is not available: leave it out"):
        dist_checkpointing.save({"a": 1}, tmp_path, ("zarr", 1))
    with pytest.raises(CheckpointError, match="part 2 of 2 along axis 0 is not a part"):
        tensor_of("w", torch.ones(2), (0, 2, 2))


def test_a_second_save_overwrites_the_first(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        dist_checkpointing.save({"a": tensor_of("a", torch.full((2,), value))}, tmp_path)
    loaded = dist_checkpointing.load({"a": tensor_of("a", torch.zeros(2))}, tmp_path)
    assert loaded["a"].tolist() == [2, 2]


def _save_parts(rank: int, world_size: int, folder: str) -> list[float]:
    part = torch.full((2,), float(rank))
    state = {
        "rows": ShardedTensor.from_rank_offsets(
            "rows", part, (0, rank, world_size), prepend_axis_num=1
        ),
        "same": ShardedTensor.from_rank_offsets("same", torch.ones(3), replica_id=rank),
        "object": ShardedObject("rng", rank, (world_size,), (rank,)),
    }
    dist_checkpointing.save(state, folder)
    wanted = torch.zeros(2)
    other = (rank + 1) % world_size
    loaded = dist_checkpointing.load(
        {
            "rows": ShardedTensor.from_rank_offsets(
                "rows", wanted, (0, other, world_size), prepend_axis_num=1
            ),
            "object": ShardedObject("rng", None, (world_size,), (other,)),
        },
        folder,
    )
    return [*loaded["rows"].tolist(), loaded["object"]]


def test_ranks_save_parts_that_any_rank_loads(tmp_path: Path) -> None:
    assert run_ranks(_save_parts, 3, str(tmp_path)) == [[1, 1, 1], [2, 2, 2], [0, 0, 0]]
    whole = dist_checkpointing.load({"rows": tensor_of("rows", torch.zeros(3, 2))}, tmp_path)
    assert whole["rows"].tolist() == [[0, 0], [1, 1], [2, 2]]


def _fail_on_one(rank: int, world_size: int, folder: str, kind: str, in_background: bool) -> str:
    unsaved: Any = threading.Lock() if in_background else lambda: None
    entry = ShardedObject("x", unsaved if rank == 1 else 1, (2,), (rank,))
    try:
        request = dist_checkpointing.save(
            {"x": entry}, folder, (kind, 1), async_sharded_save=in_background
        )
        if request is not None:
            request.execute_sync()
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("kind", "in_background", "message"),
    [
        ("safetensors_dist", False, "rank 1: x is a function, which is not saved"),
        ("torch_dist", False, "rank 1: x/shard_1_2 cannot be pickled"),
        ("torch_dist", True, "rank 1: cannot pickle '_thread.lock' object"),
    ],
)
def test_every_rank_learns_why_one_could_not_save(
    tmp_path: Path, kind: str, in_background: bool, message: str
) -> None:
    messages = run_ranks(_fail_on_one, 2, str(tmp_path), kind, in_background)
    assert all(message in each for each in messages), messages


@pytest.mark.parametrize("kind", ["safetensors_dist", "torch_dist"])
def test_either_format_has_objects_metadata_and_plain_tensors(tmp_path: Path, kind: str) -> None:
    states = {"numbers": np.arange(3, dtype=np.uint32), "bytes": torch.arange(2), "pair": (1, 2.5)}
    saved = {
        "w": tensor_of("w", torch.arange(6.0).view(2, 3)),
        "rng": ShardedObject("rng", [states], (1, 1), (0, 0), replica_id=(0, 0)),
        "args": Namespace(backend=AttnBackend.flash),
        "padded": tensor_of("padded", torch.ones(4, 2)),
    }
    dist_checkpointing.save(saved, tmp_path, (kind, 1), content_metadata={"kind": kind})
    assert check_is_distributed_checkpoint(tmp_path)
    common = dist_checkpointing.load_common_state_dict(tmp_path)
    assert common == {"args": saved["args"], "content_metadata": {"kind": kind}}
    assert dist_checkpointing.load_content_metadata(preloaded_state_dict=common) == {"kind": kind}
    described = load_sharded_metadata(tmp_path)
    assert described["w"].global_shape == (2, 3)
    assert described["rng/shard_0.0_1.1"].key == "rng"
    assert torch.equal(load_plain_tensors(tmp_path)["w"], torch.arange(6.0).view(2, 3))
    half = tensor_of("w", torch.zeros(2, 3, dtype=torch.bfloat16)).without_data()
    wider = replace(tensor_of("padded", torch.full((5, 2), 7.0)), allow_shape_mismatch=True)
    asked = {"w": half, "rng": replace(saved["rng"], data=None), "padded": wider}
    loaded = dist_checkpointing.load(asked, tmp_path, (kind, 1))
    assert loaded["w"].dtype == torch.bfloat16
    assert loaded["w"].flatten().tolist() == list(range(6))
    assert loaded["padded"].sum(dim=1).tolist() == [2, 2, 2, 2, 0]
    (found,) = loaded["rng"]
    assert np.array_equal(found["numbers"], states["numbers"])
    assert found["numbers"].dtype == np.uint32
    assert (found["bytes"].tolist(), found["pair"]) == ([0, 1], (1, 2.5))


def test_modes_of_strictness_return_what_they_say(tmp_path: Path) -> None:
    kept = {"a": tensor_of("a", torch.ones(2)), "o": ShardedObject("o", 3, (1,), (0,))}
    dist_checkpointing.save({**kept, "b": tensor_of("b", torch.ones(2))}, tmp_path)
    more = {**kept, "c": tensor_of("c", torch.ones(2)), "p": ShardedObject("p", 4, (1,), (0,))}
    for mode, missing in (("return_all", {"b"}), ("return_unexpected", set())):
        found = dist_checkpointing.load(more, tmp_path, strict=mode)
        assert (set(found[0]), *found[1:]) == ({"a", "o"}, missing, {"c", "p/shard_0_1"})
    for mode in ("log_all", "log_unexpected", "ignore_all"):
        assert set(dist_checkpointing.load(more, tmp_path, strict=mode)) == {"a", "o"}
    with pytest.raises(ValueError, match="Invalid strict flag: 'some'"):
        dist_checkpointing.load(kept, tmp_path, strict="some")


def _save_in_background(rank: int, world_size: int, folder: str, kind: str) -> list[Any]:
    queue = AsyncCallsQueue()
    values = torch.full((2,), float(rank))
    state = {"w": tensor_of("w", values, (0, rank, world_size)), "step": 1}
    request = dist_checkpointing.save(state, folder, (kind, 1), async_sharded_save=True)
    values.fill_(9.0)
    done: list[Any] = []
    request.add_finalize_fn(lambda: done.append(check_is_distributed_checkpoint(folder)))
    assert queue.schedule_async_request(request) == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert queue.get_num_unfinalized_calls() == 0
    with pytest.raises(RuntimeError, match="frozen"):
        request.freeze().add_finalize_fn(print)
    request = dist_checkpointing.save({"x": object()}, folder, async_sharded_save=True)
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointError, match="x is a object, which is not saved"):
        queue.close()
    return done


@pytest.mark.parametrize("kind", ["safetensors_dist", "torch_dist"])
def test_a_request_writes_in_the_background_what_the_values_were(tmp_path: Path, kind: str) -> None:
    assert run_ranks(_save_in_background, 2, str(tmp_path), kind) == [[True], [True]]
    assert load_plain_tensors(tmp_path)["w"].tolist() == [0, 0, 1, 1]
