"""preprocess_mmdata.py: pairs of text and image in one token file with modes."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.tokenizer import TokenizerSpec, create_tokenizer
from tests.support.tokenizer_files import SPM_MODEL
from tools import merge_datasets, preprocess_mmdata

TOKENIZER = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(SPM_MODEL)]
IMAGES = {"b.jpg": b"\x01\x02\x03\x04\x05", "a.jpg": b"abcdefgh", "c.jpg": b""}


@pytest.fixture
def source(tmp_path):
    """A directory with three images, and their texts."""
    (tmp_path / "images").mkdir()
    for name, data in IMAGES.items():
        (tmp_path / "images" / name).write_bytes(data)
    lines = [json.dumps({"text": text}) for text in ("a cat", "two dogs on a hill", "nothing")]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def preprocess(source, *flags, images="images", prefix="out", pad_length=6):
    words = ["--input", str(source / "text.jsonl"), "--input-image", str(source / images)]
    words += ["--output-prefix", str(source / prefix), "--pad-length", str(pad_length)]
    preprocess_mmdata.main([*words, *TOKENIZER, *flags])
    return str(source / f"{prefix}_mm")


def tokenizer():
    spec = TokenizerSpec(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(SPM_MODEL))
    return create_tokenizer(spec)


@pytest.mark.feature("Data: texts and images in .bin/.idx with modes (tools/preprocess_mmdata.py)")
def test_a_document_is_a_text_and_the_bytes_of_its_image(source):
    data = IndexedDataset(preprocess(source), multimodal=True)
    assert data.index.dtype == np.int32
    assert data.sequence_modes.tolist() == [0, 1] * 3
    assert data.document_indices.tolist() == [0, 2, 4, 6]
    assert data[2][0].tolist() == tokenizer().tokenize("two dogs on a hill")
    for i, name in enumerate(sorted(IMAGES)):
        values, mode = data[2 * i + 1]
        num_padding = int(values[0])
        stored = values[1:].tobytes()
        assert mode == 1
        assert stored[: len(stored) - num_padding] == IMAGES[name]


def test_the_files_have_the_layout_of_megatron_lm_byte_by_byte(source):
    prefix = preprocess(source, "--append-eod", "--workers", "3", pad_length=4)
    eod = tokenizer().eod
    expected_bin = b""
    lengths = []
    for text, name in zip(("a cat", "two dogs on a hill", "nothing"), sorted(IMAGES), strict=True):
        ids = tokenizer().tokenize(text)[:4]
        ids += [eod] * (4 - len(ids))
        padding = -len(IMAGES[name]) % 4
        image = struct.pack("<i", padding) + IMAGES[name] + bytes(padding)
        expected_bin += struct.pack("<4i", *ids) + image
        lengths += [4, len(image) // 4]
    pointers = [4 * sum(lengths[:i]) for i in range(6)]
    expected_idx = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 6, 4)
    expected_idx += struct.pack("<6i", *lengths) + struct.pack("<6q", *pointers)
    expected_idx += struct.pack("<4q", 0, 2, 4, 6) + bytes([0, 1] * 3)
    with open(f"{prefix}.bin", "rb") as bin_file, open(f"{prefix}.idx", "rb") as idx_file:
        assert bin_file.read() == expected_bin
        assert idx_file.read() == expected_idx


def test_a_list_of_images_gives_their_order(source):
    (source / "list.txt").write_text("images/c.jpg\nimages/a.jpg\nimages/a.jpg\n")
    data = IndexedDataset(preprocess(source, images="list.txt"), multimodal=True)
    assert [len(data[i][0]) for i in (1, 3, 5)] == [1, 3, 3]


def test_files_are_merged_with_their_modes(source):
    (source / "parts").mkdir()
    for part in ("x", "y"):
        preprocess(source, prefix=f"parts/{part}")
    words = ["--input", str(source / "parts"), "--output-prefix", str(source / "merged")]
    merge_datasets.main([*words, "--multimodal"])
    data = IndexedDataset(str(source / "merged"), multimodal=True)
    assert data.sequence_modes.tolist() == [0, 1] * 6
    assert data.document_indices.tolist() == [0, 2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("lines", [2, 4])
def test_texts_and_images_that_do_not_pair_are_an_error(source, lines):
    (source / "text.jsonl").write_text('{"text": "a"}\n' * lines)
    with pytest.raises(DataError, match="belong together line by line"):
        preprocess(source)
    assert not (source / "out_mm.idx").exists()


@pytest.mark.parametrize("line", ["{", "[]", '{"caption": "a"}', '{"text": 3}'])
def test_a_line_without_text_is_named(source, line):
    (source / "text.jsonl").write_text(f'{{"text": "a"}}\n{line}\n{{"text": "a"}}\n')
    with pytest.raises(DataError, match=r"text\.jsonl, line 2"):
        preprocess(source)


def test_wrong_inputs_are_named(source):
    (source / "list.txt").write_text("images/missing.jpg\n" * 3)
    with pytest.raises(DataError, match=r"missing\.jpg: .*line 1 of"):
        preprocess(source, images="list.txt")
    with pytest.raises(DataError, match="--input-image .*nowhere"):
        preprocess(source, images="nowhere")
    (source / "empty").mkdir()
    with pytest.raises(DataError, match="names no image"):
        preprocess(source, images="empty")
    with pytest.raises(ConfigError, match="--pad-length 0"):
        preprocess(source, pad_length=0)


def test_flags_without_effect_are_announced(source, capsys):
    preprocess(source, "--split-sentences", "--keep-newlines")
    assert "without effect" in capsys.readouterr().err
