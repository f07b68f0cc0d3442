"""First-fit-decreasing packing of conversations into rows."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.core.datasets.packing import PackedEpochs, first_fit_decreasing
from megatron.training.data.balanced_rows import plan_rounds


def plain_first_fit_decreasing(lengths, capacity):
    """The definition: one item after the other."""
    bins = []
    room = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, left in enumerate(room) if left >= lengths[item]), None)
        if place is None:
            bins.append([])
            room.append(capacity)
            place = len(bins) - 1
        bins[place].append(item)
        room[place] -= lengths[item]
    return bins


def log_normal_lengths(n, capacity, seed=0):
    random = np.random.default_rng(seed)
    return np.clip(random.lognormal(5.0, 0.8, n).astype(np.int64), 1, capacity)


@pytest.mark.parametrize("seed", range(5))
def test_bins_are_those_of_the_definition(seed):
    lengths = log_normal_lengths(400, 1024, seed)
    found = first_fit_decreasing(lengths, 1024)
    assert [row.tolist() for row in found] == plain_first_fit_decreasing(lengths.tolist(), 1024)
    assert first_fit_decreasing(np.empty(0, np.int64), 8) == []


@pytest.mark.parametrize("capacity", [1024, 4096])
def test_rows_are_at_least_95_percent_full_on_log_normal_lengths(capacity):
    epochs = PackedEpochs(log_normal_lengths(5000, capacity), capacity, seed=1)
    assert epochs.fill >= 0.95


@pytest.mark.parametrize("packs", [True, False])
def test_an_epoch_contains_each_conversation_once(packs):
    lengths = log_normal_lengths(300, 512)
    lengths[::7] = 0  # left out
    epochs = PackedEpochs(lengths, 512, seed=3, packs=packs)
    n = epochs.rows_per_epoch
    for epoch in range(3):
        rows = [epochs[i] for i in range(epoch * n, (epoch + 1) * n)]
        assert sorted(np.concatenate(rows).tolist()) == np.flatnonzero(lengths).tolist()
        assert all(lengths[row].sum() <= 512 for row in rows)
        assert packs or all(len(row) == 1 for row in rows)


def test_a_row_depends_on_its_number_and_the_seed_only():
    lengths = log_normal_lengths(200, 512)
    one = PackedEpochs(lengths, 512, seed=3)
    again = PackedEpochs(lengths, 512, seed=3)
    n = one.rows_per_epoch
    numbers = [0, 5, n + 5, 2 * n - 1, 5]
    in_order = {i: one[i].tolist() for i in sorted(set(numbers))}
    assert [again[i].tolist() for i in numbers] == [in_order[i] for i in numbers]
    assert in_order[5] != in_order[n + 5]
    other = PackedEpochs(lengths, 512, seed=4)
    assert [other[i].tolist() for i in range(n)] != [one[i].tolist() for i in range(n)]


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_plan_has_each_row_once_on_the_fewest_ranks_with_balanced_work(num_ranks):
    lengths = np.minimum(log_normal_lengths(128, 8192), 1000 * num_ranks).tolist()
    rounds = plan_rounds(lengths, num_ranks, 1000, lambda n: n * n)
    found = {}
    loads = np.zeros(num_ranks)
    for slots in rounds:
        for rank, slot in enumerate(slots):
            first = rank // slot.size * slot.size
            assert slots[first].rows == slot.rows, "ranks of a group have other rows"
            assert slot.num_tokens == sum(-(-lengths[i] // slot.size) for i in slot.rows) <= 1000
            assert slot.size == 1 or (
                len(slot.rows) == 1 and lengths[slot.rows[0]] > 500 * slot.size
            )
            for i in slot.rows:
                found.setdefault(i, []).append(rank)
                loads[rank] += lengths[i] ** 2 / slot.size
    sizes = {i: len(ranks) for i, ranks in found.items()}
    assert sorted(found) == list(range(128))
    assert all(lengths[i] <= 1000 * size for i, size in sizes.items())
    assert loads.max() < 1.1 * loads.mean()
    assert len(rounds) < 1.3 * sum(lengths) / (1000 * num_ranks) + 1
    static = np.array(lengths).reshape(-1, num_ranks) ** 2.0  # each rank the next row
    assert num_ranks == 1 or loads.max() < static.sum(0).max()
