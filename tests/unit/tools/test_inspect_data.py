"""tools/inspect_data.py: samples, documents, lengths and duplicates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.config.data import DataConfig
from megatron.training.preprocess.corpus import sources_of, tokenize
from megatron.training.tokenizer.base import TokenizerSpec
from megatron.training.tokenizer.tokenizer import create_tokenizer
from tests.support.dataset_files import dataset, write
from tools.inspect_data import main

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "511"]
EOD = 511


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Two files; a document occurs in both, and one twice in the second."""
    first = [[*range(10 * i + 1, 10 * i + 9), EOD] for i in range(20)]
    second = [first[3], [400, 401, EOD], [400, 401, EOD], *([300 + i] * 12 for i in range(10))]
    return [write(tmp_path / "a", first), write(tmp_path / "b", second)]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(words)
    return capsys.readouterr().out


@pytest.mark.parametrize("order", [[], ["--index-free"]])
def test_a_sample_is_that_of_training(
    prefixes: list[str], capsys: pytest.CaptureFixture[str], order: list[str]
) -> None:
    flags = ["--data-path", prefixes[0], "--seq-length", "8", "--split", "1", *NULL, *order]
    text = run(capsys, "sample", "2", "5", *flags)
    train = dataset(prefixes[0], index_free=bool(order))
    for number in (2, 5):
        shown = text.split(f"== sample {number}: ")[1].split("== ")[0]
        words = [w for line in shown.splitlines()[1:] if line[:2] != "--" for w in line.split()]
        assert list(map(int, words)) == train[number]["tokens"].tolist()
        assert f"sample {number} of {prefixes[0]}" in shown
        assert "-- sequence " in shown


def test_tokens_without_loss_are_marked(
    prefixes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data-path", prefixes[0], "--seq-length", "18", "--split", "1", *NULL]
    text = run(capsys, "sample", "0", "--eod-mask-loss", *flags)
    assert "{-511-}" in text


def test_a_sample_of_a_blend_names_its_source(
    prefixes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data-path", "0.5", prefixes[0], "0.5", prefixes[1]]
    flags = [*data, "--train-samples", "8", "--seq-length", "8", "--split", "1", *NULL]
    text = run(capsys, "sample", *map(str, range(8)), *flags)
    assert text.count(f"of {prefixes[0]}\n") == text.count(f"of {prefixes[1]}\n") == 4


def test_a_sample_of_text_that_a_run_has_tokenized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text("".join(f'{{"text": "{i} {i + 1} {i + 2}"}}\n' for i in range(0, 90, 3)))
    tokenizer = create_tokenizer(TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=511))
    (source,) = sources_of([str(text)], DataConfig(), tokenizer)
    Path(source.directory).mkdir(parents=True)
    tokenize([source], tokenizer, 1)
    capsys.readouterr()
    flags = ["--data-path", str(text), "--seq-length", "8", "--split", "1", *NULL]
    shown = run(capsys, "sample", "0", *flags)
    assert f"sample 0 of {text}" in shown
    words = [w for line in shown.splitlines()[1:] if line[:2] != "--" for w in line.split()]
    assert len(words) == 8
    assert set(map(int, words)) <= {*range(90), EOD}


def test_a_document_is_text(prefixes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "document", "1", "--data-path", prefixes[1], *NULL)
    assert text == f"== {prefixes[1]}, document 1: 3 tokens\n400 401 511\n"


def test_lengths_are_counted_and_drawn(
    prefixes: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [line.split() for line in run(capsys, "lengths", "--data-path", *prefixes).splitlines()]
    assert rows[1] == ["20", "180", "0", "9", "9", "9", prefixes[0]]
    assert rows[2] == ["13", "135", "0", "12", "12", "12", prefixes[1]]
    pytest.importorskip("matplotlib")
    picture = tmp_path / "lengths.png"
    run(capsys, "lengths", "--data-path", *prefixes, "--output", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_duplicates_are_found_within_and_across_files(
    prefixes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run(capsys, "duplicates", "--data-path", *prefixes).splitlines()
    assert lines[0] == "2 of 33 documents repeat an earlier one (12 of 315 tokens)"
    assert f"  2 equal documents: {prefixes[0]} 3, {prefixes[1]} 0" in lines
    assert f"  2 equal documents: {prefixes[1]} 1, {prefixes[1]} 2" in lines


def test_near_duplicates_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("datasketch")
    random = np.random.default_rng(0)
    first, other = (random.integers(0, 50_000, 400).tolist() for _ in range(2))
    nearly = [*first[:200], 7, *first[201:]]  # of 5-token phrases, 5 of 396 differ
    half = [*first[:200], *other[200:]]
    prefix = write(tmp_path / "data", [first, other, nearly, half, [], [1, 2], [1, 2]])
    main(["near-duplicates", "--data-path", prefix])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "2 of 7 documents are similar to an earlier one"
    assert f"  2 similar documents: {prefix} 0, {prefix} 2" in said
    assert f"  2 similar documents: {prefix} 5, {prefix} 6" in said
    main(["near-duplicates", "--similarity", "0.25", "--data-path", prefix])
    assert f"  3 similar documents: {prefix} 0, {prefix} 2, {prefix} 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample", "--data-path", "x"], "sample needs the numbers"),
        (["document", "3", "--data-path", "x"], "--tokenizer-type is needed"),
        (["near-duplicates", "--similarity", "1", "--data-path", "x"], "--similarity 1: use a"),
    ],
)
def test_wrong_calls_are_answered(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(words)


def test_numbers_that_do_not_exist_are_answered(prefixes: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"document 99: .* has 20, from 0"):
        main(["document", "99", "--data-path", prefixes[0], *NULL])
    flags = ["--data-path", prefixes[0], "--seq-length", "8", "--split", "1", *NULL]
    with pytest.raises(ConfigError, match="sample 99: there are 22, from 0"):
        main(["sample", "99", *flags])
