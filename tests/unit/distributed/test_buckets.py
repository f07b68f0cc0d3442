"""The arithmetic of gradient buffers."""

from __future__ import annotations

import random

import pytest

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.buffer_plan import bucket_multiple, plan_buffer, target_bucket_size


def random_cases() -> list[tuple[list[int], int | None, int, int]]:
    rng = random.Random(5)
    cases = []
    for _ in range(200):
        numels = [rng.choice([1, 3, 64, 100, 1000, 4096]) for _ in range(rng.randint(1, 30))]
        size = rng.choice([None, 1, 500, 5000, 10**9])
        cases.append((numels, size, rng.choice([1, 16, 64]), rng.choice([1, 128, 384])))
    return cases


@pytest.mark.parametrize("case", range(0, 200, 20))
def test_every_element_has_one_place_and_every_parameter_one_bucket(case: int):
    for numels, size, alignment, multiple in random_cases()[case : case + 20]:
        layout = plan_buffer(numels, size, param_alignment=alignment, bucket_multiple=multiple)
        spans = sorted(layout.spans)
        assert [stop - start for start, stop in layout.spans] == numels
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
        members = [p for bucket in layout.buckets for p in bucket.params]
        assert members == list(reversed(range(len(numels))))
        position = 0
        for bucket in layout.buckets:
            assert bucket.start == position
            position = bucket.stop
            assert (bucket.stop - bucket.start) % multiple == 0
            for param in bucket.params:
                start, stop = layout.spans[param]
                assert bucket.start <= start <= stop <= bucket.stop
        assert layout.numel == position
        if multiple % alignment == 0:
            assert all(start % alignment == 0 for start, _ in layout.spans)


@pytest.mark.parametrize("case", range(0, 200, 50))
def test_a_bucket_closes_with_the_parameter_that_fills_it(case: int):
    for numels, size, _, _ in random_cases()[case : case + 50]:
        buckets = plan_buffer(numels, size).buckets
        filled = [sum(numels[p] for p in bucket.params) for bucket in buckets]
        last = [numels[bucket.params[-1]] for bucket in buckets]
        if size is None:
            assert len(buckets) == 1
        else:
            assert all(n >= size for n in filled[:-1])
            assert all(n - m < size for n, m in zip(filled, last, strict=True))


def test_no_parameters_make_no_buckets():
    assert plan_buffer([], 10).numel == 0


def test_buckets_divide_evenly_over_the_group():
    assert bucket_multiple(3, for_high_bus_bandwidth=False) == 384
    assert bucket_multiple(3, for_high_bus_bandwidth=True) == 3 * 2**16


@pytest.mark.parametrize(
    ("group_size", "flags", "size"),
    [
        (2, {}, 40_000_000),
        (64, {}, 64_000_000),
        (2, {"bucket_size": 500}, 500),
        (2, {"ddp_num_buckets": 3}, 34),
        (2, {"bucket_size": 500, "overlap_grad_reduce": False}, None),
    ],
)
def test_the_bucket_size_follows_the_flags(group_size: int, flags: dict, size: int | None):
    config = DistributedDataParallelConfig(**{"overlap_grad_reduce": True, **flags})
    assert target_bucket_size(config, 100, group_size) == size
