"""Initial weights are a function of seed, name and index alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron.core.params import param_init
from megatron.core.params.param_info import FlatPart, ParamInfo, name_parameters, set_info
from megatron.core.params.param_init import Init, fill_parameter, initialize_parameters, philox


def filled(info: ParamInfo, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full(shape, float("nan"), dtype=dtype)
    fill_parameter(out, info, seed=5)
    return out


def normal(*shape: int, **changes: object) -> ParamInfo:
    info = ParamInfo(global_shape=shape, name="a.weight", init="normal", init_std=0.5)
    return replace(info, **changes)


def test_philox_gives_the_published_words() -> None:
    words = philox(torch.zeros(1, dtype=torch.int64), (0, 0))
    assert [int(w) for w in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    # counter words 0 and 1 set; from an independent implementation of the published algorithm
    counter, key = (3 << 32) + 7, (0xA4093822, 0x299F31D0)
    words = philox(torch.tensor([counter]), key)
    assert [int(w) for w in words] == plain_philox(counter, key)


def plain_philox(counter: int, key: tuple[int, int]) -> list[int]:
    c = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    k = list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.feature("Layouts: initial weights that depend on seed and name, never on the layout")
@pytest.mark.parametrize("shape", [(8, 12), (6, 7), (10, 3), (4, 1)])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("blocks", [(1,), (1, 1), (4, 4, 1, 1, 2)])
def test_shards_put_together_are_the_whole(
    shape: tuple[int, int], dim: int, blocks: tuple[int, ...]
) -> None:
    sizes = [2 * shape[dim] * block for block in blocks]
    shape = tuple(sum(sizes) if d == dim else n for d, n in enumerate(shape))
    whole = filled(normal(*shape), shape)
    assert not whole.isnan().any()
    for rank in range(2):
        local = tuple(n // 2 if d == dim else n for d, n in enumerate(shape))
        info = normal(*shape, shard_dim=dim, shard_index=rank, shard_count=2, blocks=blocks)
        mine = filled(info, local)
        expected = [part.chunk(2, dim)[rank] for part in whole.split(sizes, dim)]
        assert torch.equal(mine, torch.cat(expected, dim))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("init", ["normal", "ones"])
def test_a_part_of_a_shard_is_drawn_alone(dim: int, init: str) -> None:
    info = normal(
        10, 8, shard_dim=dim, shard_index=1, shard_count=2, blocks=(1,) * (2 - dim), init=init
    )
    share = (6, 8) if dim == 0 else (10, 4)  # six rows of twelve: two are padding
    whole = filled(info, share)
    for start, stop in ((0, 8), (8, 24), (3, 40), (40, 40)):
        mine = filled(replace(info, part=FlatPart(share, start)), (stop - start,))
        assert torch.equal(mine, whole.view(-1)[start:stop])


def test_cutting_into_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    column = normal(12, 26, shard_dim=1, shard_index=1, shard_count=2)
    expected = filled(normal(12, 26), (12, 26)), filled(column, (12, 13))
    for chunk in (1, 4, 10, 64):
        monkeypatch.setattr(param_init, "_CHUNK_CPU", chunk)
        assert torch.equal(filled(normal(12, 26), (12, 26)), expected[0])
        assert torch.equal(filled(column, (12, 13)), expected[1])


def test_padding_rows_are_zero_and_the_rest_does_not_feel_them() -> None:
    whole = filled(normal(5, 4), (5, 4))
    for rank, rows in enumerate((4, 1)):
        mine = filled(normal(5, 4, shard_dim=0, shard_index=rank, shard_count=2), (4, 4))
        assert torch.equal(mine[:rows], whole[4 * rank : 4 * rank + rows])
        assert (mine[rows:] == 0).all()
    assert (filled(normal(5, 4, shard_dim=0, shard_index=2, shard_count=3), (4, 4)) == 0).all()


def test_seed_and_name_matter_and_nothing_else_does() -> None:
    a = filled(normal(64), (64,))
    assert torch.equal(a, filled(normal(64), (64,)))
    assert not torch.equal(a, filled(normal(64, name="b.weight"), (64,)))
    other = torch.empty(64)
    fill_parameter(other, normal(64), seed=6)
    assert not torch.equal(a, other)


def test_lower_precision_is_the_same_number_rounded() -> None:
    exact = filled(normal(999), (999,), torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(filled(normal(999), (999,), dtype), exact.to(dtype))
        info = replace(normal(999), dtype=dtype)  # kept in fp32 for layers that see less
        assert torch.equal(filled(info, (999,), torch.float32), exact.to(dtype).float())


def test_normal_and_xavier_have_the_moments_they_should() -> None:
    x = filled(normal(400, 500), (400, 500), torch.float64) / 0.5
    moments = [x.mean(), x.var() - 1, x.pow(3).mean(), x.pow(4).mean() - 3]
    assert all(abs(float(m)) < 0.03 for m in moments)
    assert abs(float((x.view(-1)[:-1] * x.view(-1)[1:]).mean())) < 0.01
    uniform = filled(normal(400, 500, init="xavier_uniform"), (400, 500), torch.float64)
    bound = math.sqrt(6 / 900)
    assert uniform.abs().max() < bound
    assert abs(float(uniform.var() / (bound**2 / 3)) - 1) < 0.01


def test_a_model_is_filled_once_for_a_seed() -> None:
    model = nn.Linear(3, 2)
    set_info(model.weight, normal(2, 3))
    set_info(model.bias, ParamInfo(global_shape=(2,), name="a.bias", init="ones"))
    initialize_parameters(model, 5)
    assert torch.equal(model.weight, filled(normal(2, 3), (2, 3)))
    assert torch.equal(model.bias, torch.ones(2))
    with torch.no_grad():
        model.weight.zero_()
    initialize_parameters(model, 5)
    assert (model.weight == 0).all()
    initialize_parameters(model, 6)
    assert (model.weight != 0).all()


def test_parameters_that_nobody_described_keep_their_values() -> None:
    model = nn.LayerNorm(3)
    name_parameters(model)
    initialize_parameters(model, 5)
    assert torch.equal(model.weight, torch.ones(3))


def test_without_random_values_only_constants_are_written() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    set_info(model.weight, normal(2, 3))
    set_info(model.bias, ParamInfo(global_shape=(2,), name="a.bias", init="ones"))
    initialize_parameters(model, 5, random=False)
    assert torch.equal(model.weight, before)
    assert torch.equal(model.bias, torch.ones(2))


def test_parameters_made_under_meta_wait_for_memory() -> None:
    with torch.device("meta"):
        param = param_init.new_parameter((2, 3), torch.float32, normal(2, 3))
    assert param.is_meta
    assert not param_init.new_parameter((2, 3), torch.float32, normal(2, 3)).is_meta


def test_init_is_also_a_function_on_tensors() -> None:
    assert torch.equal(Init("ones")(torch.empty(3)), torch.ones(3))
    assert torch.equal(Init("zeros")(torch.empty(3)), torch.zeros(3))
    assert 0.1 < float(Init("normal", 0.2)(torch.empty(500)).std()) < 0.3
    assert float(Init("xavier_uniform")(torch.empty(5, 5)).abs().max()) <= math.sqrt(0.6)


def test_parameters_that_a_subclass_adds_are_filled_too() -> None:
    model = nn.Module()
    for name in ("first", "added"):
        param = nn.Parameter(torch.full((4,), float("nan")))
        set_info(param, ParamInfo(global_shape=(4,), name=name, init="ones"))
        setattr(model, name, param)
        initialize_parameters(model, 1)
    assert torch.equal(model.added.detach(), torch.ones(4))
