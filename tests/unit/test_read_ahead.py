"""Micro-batches that are read before they are asked for come in order, once each."""

from __future__ import annotations

import torch

from megatron.training.data.loaders import ReadAhead, read_ahead


def test_what_was_read_ahead_comes_first() -> None:
    read = []

    def batches():
        for i in range(3):
            read.append(i)
            yield {"tokens": torch.full((2,), i), "name": "batch"}

    data = ReadAhead(batches())
    seen = [int(next(data)["tokens"][0])]
    assert read == [0]
    read_ahead([data, None])
    read_ahead(data)
    assert read == [0, 1], "one at most"
    seen += [int(batch["tokens"][0]) for batch in data]
    assert seen == [0, 1, 2]
    read_ahead(data)
    assert next(data, None) is None, "the end is told to who asks, not ahead"


def test_an_iterator_of_a_script_is_left_alone() -> None:
    mine = iter([1, 2])
    read_ahead(mine)
    assert next(mine) == 1


def test_what_is_looked_at_first_is_still_the_next() -> None:
    batches = ReadAhead(iter([1, 2]))
    assert [batches.first(), batches.first(), *batches] == [1, 1, 1, 2]
