"""Rows of several samples: which samples a row has, and what becomes of their tensors."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.config.errors import DataError
from megatron.core.datasets.images import decode_image, size_of_image
from megatron.core.datasets.packing import RowPlan
from tests.unit.datasets.test_image_text_dataset import dataset, png
from tests.unit.datasets.test_tar_shards import write_tar

LENGTHS = np.array([[3, 9], [5, 5], [0, 0], [2, 20], [7, 7], [1, 1]])
LIMITS = (8, 20)


def test_an_epoch_has_every_usable_sample_once_and_no_row_is_too_long() -> None:
    plan = RowPlan(LENGTHS, LIMITS, 5)
    row = 0
    for epoch in range(4):
        rows = [plan[row + i] for i in range(plan.num_rows(epoch))]
        row += len(rows)
        assert sorted(number for each in rows for number in each) == [0, 1, 3, 4, 5]
        for each, following in zip(rows, [*rows[1:], None], strict=True):
            assert (LENGTHS[each].sum(0) <= LIMITS).all()
            if following is not None:  # its first sample did not fit
                assert (LENGTHS[[*each, following[0]]].sum(0) > LIMITS).any()


def test_a_row_does_not_depend_on_rows_read_before() -> None:
    one = RowPlan(LENGTHS, LIMITS, 5)
    in_order = [one[row] for row in range(12)]
    other = RowPlan(LENGTHS, LIMITS, 5)
    assert [other[row] for row in reversed(range(12))] == in_order[::-1]
    with pytest.raises(DataError, match="no sample can be used"):
        RowPlan(LENGTHS * 0, LIMITS, 5)


def shard(tmp_path: Path) -> str:
    """Four captions of different length, two of which have an image, and a broken image."""
    files = [
        ("a.txt", b"one two three"),
        ("b.txt", b"four"),
        ("b.png", png(seed=1)),
        ("c.txt", b"five six"),
        ("c.png", png(seed=2)),
        ("d.txt", b"seven eight nine ten"),
        ("e.txt", b"eleven"),
        ("e.png", png()[:20]),
    ]
    return write_tar(tmp_path / "packed.tar", files)


def test_rows_have_the_samples_one_after_the_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = shard(tmp_path)
    with caplog.at_level(logging.WARNING):
        rows = dataset(path, 6, packs_samples=True, sequence_length=16)
    assert "sample e" in caplog.text
    tokenizer = rows.config.tokenizer
    texts: list[str] = []
    for number in range(len(rows)):
        row = rows[number]
        assert len(row["tokens"]) == 16
        starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
        for first, end in zip(starts, [*starts[1:], 16], strict=True):
            assert row["position_ids"][first:end].tolist() == list(range(end - first))
            is_padding = row["num_tiles"][first:end] < 0
            assert is_padding.all() or not is_padding.any()
            if not is_padding.any():
                texts.append(" ".join(tokenizer.text(row["tokens"][first:end])))
        assert len(row["images"]) == (row["num_tiles"] > 0).sum()
        assert row["loss_mask"][row["num_tiles"] < 0].sum() == 0
    assert len(set(texts)) == 4
    assert sum("IMAGE" in text for text in set(texts)) == 2
    again = dataset(path, 6, packs_samples=True, sequence_length=16)
    for number in (4, 0):
        assert torch.equal(again[number]["tokens"], rows[number]["tokens"])
        assert torch.equal(again[number]["images"], rows[number]["images"])


@pytest.mark.parametrize("turn", [1, 3, 6, 8])
def test_the_size_of_an_image_is_that_of_its_orientation(turn: int) -> None:
    image_module = pytest.importorskip("PIL.Image")

    file = io.BytesIO()
    image = image_module.new("RGB", (9, 4))
    exif = image.getexif()
    exif[0x0112] = turn
    image.save(file, "JPEG", exif=exif)
    assert size_of_image(file.getvalue(), "a") == decode_image(file.getvalue(), "a").size
    with pytest.raises(DataError, match="a: no image that can be decoded"):
        size_of_image(b"nothing", "a")
