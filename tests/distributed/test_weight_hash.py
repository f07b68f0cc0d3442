"""Hashes of weights: the same in every layout, and different where a bit is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron.core.config.errors import MegatronError
from megatron.core.dist_checkpointing import hashing
from megatron.core.dist_checkpointing.records import Piece, TensorRecord, from_param
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.params.param_info import ParamInfo
from megatron.training.process import exit_report
from megatron.training.step.weight_hash import check_replicas, params_hash
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, heard, run_gpt
from tests.support.tiny_run import advance, make_parts

HASH = re.compile(r" params hash at iteration +(\d+): ([0-9a-f]{16})$")


def whole(key: str, values: torch.Tensor) -> TensorRecord:
    return from_param(key, ParamInfo(global_shape=tuple(values.shape)), values)


def number(tensor: TensorRecord) -> int:
    return int(hashing.hash_here(tensor))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_every_bit_every_place_and_the_name_count(dtype):
    values = torch.arange(24, dtype=torch.float32).view(2, 3, 4).to(dtype)
    swapped = values.clone()
    swapped[0, 0, 0], swapped[1, 2, 3] = values[1, 2, 3], values[0, 0, 0]
    flipped = values.clone()
    flipped.view(torch.uint8)[1, 2, 3] ^= 1
    reshaped = values.view(3, 2, 4)
    hashes = {
        number(whole("a", values)),
        number(whole("b", values)),
        number(whole("a", swapped)),
        number(whole("a", flipped)),
        number(whole("a", -values)),
    }
    assert len(hashes) == 5
    assert number(whole("a", values.clone())) == number(whole("a", values))
    assert number(whole("a", reshaped)) == number(whole("a", values))


def test_shares_add_up_whatever_the_cut(monkeypatch):
    values = torch.randn(7, 5)
    expected = number(whole("a", values)) % 2**64
    monkeypatch.setattr(hashing, "_BLOCK", 8)
    boxes = [((0, 0), values[:4, :2]), ((0, 2), values[:4, 2:]), ((4, 0), values[4:])]
    shares = [
        TensorRecord(key="a", global_shape=(7, 5), dtype=values.dtype, pieces=(Piece(o, box),))
        for o, box in boxes
    ]
    assert sum(number(share) for share in shares) % 2**64 == expected
    assert number(whole("s", torch.tensor(2.5))) != number(whole("s", torch.tensor(2.0)))


def hash_of_layout(rank, world_size, tp, seed):
    parts = make_parts(create_process_groups(*make_grids(world_size, tp=tp)), seed=seed)
    before = params_hash(parts)
    advance(parts, 1)
    return before, params_hash(parts)


def test_the_layout_is_not_in_the_hash():
    one = run_ranks(hash_of_layout, 1, 1, 0)[0]
    assert one[0] != one[1]
    assert run_ranks(hash_of_layout, 1, 1, 1)[0][0] != one[0]
    for world_size, tp in [(2, 2), (2, 1), (4, 2)]:
        assert run_ranks(hash_of_layout, world_size, tp, 0) == [one] * world_size


def drift(rank, world_size):
    """One bit of one share on one rank."""
    parts = make_parts(create_process_groups(*make_grids(world_size, tp=2)))
    check_replicas(parts, 1)
    if rank == 3:
        parts.model_chunks[0].layers_0_qkv_weight.data.view(torch.int32)[1, 2] ^= 1 << 7
    with pytest.raises(MegatronError) as caught:
        check_replicas(parts, 2)
    return str(caught.value), exit_report._suspects


def test_drift_of_one_bit_names_the_parameter_and_blames_the_rank_on_every_rank():
    results = run_ranks(drift, 6)
    assert results == [results[0]] * 6
    message, suspects = results[0]
    assert message.startswith("after step 2 weights differ between data-parallel ranks")
    assert re.findall(r"rank (\d) has other values of layers.0.qkv.weight", message) == ["3"]
    assert [(suspect["rank"], suspect["why"]) for suspect in suspects] == [
        (3, "weights differ from those of its replicas after step 2")
    ]


def test_of_two_replicas_nobody_is_blamed():
    results = run_ranks(drift, 4)
    assert results == [results[0]] * 4
    message, suspects = results[0]
    assert (
        "ranks 1 3 have different values of layers.0.qkv.weight, without a majority that shows "
        "which are wrong"
    ) in message
    assert suspects == []


@pytest.mark.feature("Logging: replicas of the weights are compared, drift names rank and weight")
def test_a_run_whose_replicas_drift_ends_and_one_whose_do_not_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--check-weight-hash-across-dp-replicas-interval", "2", "--micro-batch-size", "1"]
    assert len(run_gpt(tmp_path, *flags, world_size=2)) > 0
    monkeypatch.setenv("FAULTS", "step.updated:bitflip:rank2:step4")
    with pytest.raises(AssertionError, match="exit code 1"):
        run_ranks(heard, 4, [*TINY, *flags])


@pytest.mark.feature("Logging: a hash of all weights that no layout changes")
def test_two_runs_are_compared_step_by_step(tmp_path: Path):
    flags = ["--log-params-hash-interval", "2", "--metrics-file", str(tmp_path / "m")]
    ((lines, _),) = run_ranks(heard, 1, [*TINY, *flags])
    seen = dict(found.groups() for line in lines if (found := HASH.match(line)))
    assert list(seen) == ["2", "4"]
    assert len(set(seen.values())) == 2
    again = run_gpt(tmp_path, *flags[:2], "--use-distributed-optimizer")
    logged = {line["iteration"]: line["params-hash"] for line in again if "params-hash" in line}
    assert logged == {int(i): int(text, 16) >> 40 for i, text in seen.items()}
