"""Text corpora: the shards of the tokenizing process, and training data that is still growing."""

from __future__ import annotations

import codecs
import fcntl
import gzip
import json
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets import corpus
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.corpus import Corpus, CorpusOrder, CorpusProgress, shard_prefix
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.config.data import DataConfig
from megatron.training.preprocess import corpus as writer
from megatron.training.preprocess.corpus import CorpusSource, _Writer, sources_of, start, tokenize
from megatron.training.preprocess.documents import Block, RecordFormat
from megatron.training.preprocess.run import PreprocessOptions, preprocess
from megatron.training.tokenizer.base import MegatronTokenizer, TokenizerSpec
from megatron.training.tokenizer.tokenizer import create_tokenizer
from tests.support.dataset_files import Tokenizer, config

VOCABULARY = 50_000


@pytest.fixture(scope="module")
def tokenizer() -> MegatronTokenizer:
    return create_tokenizer(TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of about 2,000 bytes, and at most 4 in a shard."""
    monkeypatch.setattr(writer, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(writer, "_MOST_BLOCKS", 4)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """400 documents of 1 to 29 tokens; no id occurs twice."""
    path = tmp_path / "text.jsonl"
    random = np.random.default_rng(0)
    ends = np.cumsum(random.integers(1, 30, 400))
    documents = [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]
    path.write_text("".join(json.dumps({"text": " ".join(map(str, d))}) + "\n" for d in documents))
    return path


def source_of(path: Path, tokenizer: MegatronTokenizer, **flags: Any) -> CorpusSource:
    data = DataConfig(data_cache_path=str(path.parent / "cache"), **flags)
    (source,) = sources_of([str(path)], data, tokenizer)
    Path(source.directory).mkdir(parents=True, exist_ok=True)
    return source


def tokens_of(directory: str) -> np.ndarray:
    """The tokens of all shards."""
    progress = CorpusProgress.read(directory)
    assert progress is not None
    numbers = range(len(progress.num_sequences))
    return np.concatenate([np.fromfile(shard_prefix(directory, n) + ".bin", "u2") for n in numbers])


def train_set(source: CorpusSource, num_samples: int | None = 100, **changes: Any) -> GPTDataset:
    asked = config(
        blend=([source.path], None),
        index_free=True,
        corpora={source.path: source.directory},
        tokenizer=Tokenizer(VOCABULARY + 1),
        **changes,
    )
    train = BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 0, 0], lambda: True, asked)
    built: Any = train.build()[0]
    return built


def samples(data: GPTDataset, numbers: range) -> list[list[int]]:
    return [data[i]["tokens"].tolist() for i in numbers]


class TestShards:
    def test_they_hold_what_preprocess_data_writes(
        self, text: Path, tokenizer: MegatronTokenizer
    ) -> None:
        source = source_of(text, tokenizer)
        tokenize([source], tokenizer, 1)
        options = PreprocessOptions(
            input=str(text),
            output_prefix=str(text.parent / "whole"),
            record_format=RecordFormat(),
            append_eod=True,
        )
        (prefix,) = preprocess(options, tokenizer)
        assert (tokens_of(source.directory) == np.fromfile(prefix + ".bin", "u2")).all()
        progress = CorpusProgress.read(source.directory)
        assert progress is not None
        assert progress.is_complete
        assert len(progress.num_sequences) > 3
        assert sum(progress.num_sequences) == len(IndexedDataset(prefix)) == 400

    def test_a_killed_writer_continues_behind_the_last_finished_shard(
        self, text: Path, tokenizer: MegatronTokenizer
    ) -> None:
        whole = source_of(text, tokenizer)
        tokenize([whole], tokenizer, 1)
        wanted = tokens_of(whole.directory)
        before = CorpusProgress.read(whole.directory)
        other = CorpusSource(**{**vars(whole), "directory": str(text.parent / "again")})
        Path(other.directory).mkdir()
        list(islice(_Writer(other, tokenizer, 1).shards(), 2))
        Path(shard_prefix(other.directory, 2) + ".bin").write_bytes(b"half")  # of the killed one
        written = os.stat(shard_prefix(other.directory, 0) + ".bin").st_mtime_ns
        tokenize([other], tokenizer, 1)
        assert (tokens_of(other.directory) == wanted).all()
        assert CorpusProgress.read(other.directory) == before
        assert os.stat(shard_prefix(other.directory, 0) + ".bin").st_mtime_ns == written

    def test_bad_lines_are_left_out_and_named(
        self, text: Path, tokenizer: MegatronTokenizer
    ) -> None:
        lines = text.read_text().splitlines()
        bad = text.parent / "bad.jsonl"
        mixed = [lines[0], "no JSON", '{"text": 5}', *lines[1:300], '{"other": "1"}', *lines[300:]]
        bad.write_text("\n".join(mixed) + "\n")
        sources = [source_of(path, tokenizer) for path in (text, bad)]
        tokenize(sources, tokenizer, 1)
        assert (tokens_of(sources[1].directory) == tokens_of(sources[0].directory)).all()
        progress = CorpusProgress.read(sources[1].directory)
        assert progress is not None
        assert progress.num_bad_lines == 3
        assert [line.split(":")[0] for line in progress.bad_lines] == [
            f"{bad}, line {number}" for number in (2, 3, 303)
        ]

    def test_a_wrong_key_ends_the_run_at_once(
        self, tmp_path: Path, tokenizer: MegatronTokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "other.jsonl"
        path.write_text('{"body": "1 2 3"}\n' * 500)
        read: list[int] = []
        texts = RecordFormat.texts

        def counted(record_format: RecordFormat, block: Block) -> Any:
            read.append(len(block.read()))
            return texts(record_format, block)

        monkeypatch.setattr(RecordFormat, "texts", counted)
        encoder = _Writer(source := source_of(path, tokenizer), tokenizer, 1).encoder
        encoder.encode(Block(str(path), 0, path.stat().st_size, 0))
        assert sum(read) <= 3 * path.stat().st_size  # not all again for each bad line
        opened = Corpus(source.directory, source.path)
        tokenize([source], tokenizer, 1)
        with pytest.raises(DataError, match=r"other\.jsonl, line 1: .*'text'; .*--data-text-key"):
            opened.shard(0)

    def test_columns_of_a_folder_of_datasets_are_read(
        self, text: Path, tokenizer: MegatronTokenizer
    ) -> None:
        arrow = pytest.importorskip("pyarrow")
        rows = [json.loads(line)["text"] for line in text.read_text().splitlines()]
        folder = text.parent / "folder"
        folder.mkdir()
        table = arrow.table({"body": rows, "number": list(range(len(rows)))})
        for i, part in enumerate((table.slice(0, 150), table.slice(150))):
            path = str(folder / f"data-{i}.arrow")
            with arrow.OSFile(path, "wb") as file, arrow.ipc.new_stream(file, part.schema) as out:
                out.write_table(part)
        listed = [{"filename": f"data-{i}.arrow"} for i in range(2)]
        (folder / "state.json").write_text(json.dumps({"_data_files": listed}))
        sources = [
            source_of(folder, tokenizer, data_text_key="body"),
            source_of(text, tokenizer),
        ]
        tokenize(sources, tokenizer, 1)
        assert (tokens_of(sources[0].directory) == tokens_of(sources[1].directory)).all()

    @pytest.mark.parametrize("failure", [OSError("no space left"), ValueError("unforeseen")])
    def test_an_error_is_recorded_and_removed_by_the_next_writer(
        self,
        text: Path,
        tokenizer: MegatronTokenizer,
        monkeypatch: pytest.MonkeyPatch,
        failure: Exception,
    ) -> None:
        source = source_of(text, tokenizer)

        def full(*_: object) -> None:
            raise failure

        with monkeypatch.context() as patch:
            patch.setattr(_Writer, "_write_shard", full)
            opened = Corpus(source.directory, source.path)
            with suppress(ValueError):
                tokenize([source], tokenizer, 1)
        with pytest.raises(DataError, match=rf"text\.jsonl cannot be tokenized: .*{failure}"):
            opened.shard(0)
        tokenize([source], tokenizer, 1)
        assert opened.shard(0) is not None

    def test_a_full_disk_has_space_for_the_record_of_the_error(
        self, text: Path, tokenizer: MegatronTokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = source_of(text, tokenizer)

        def full(*_: object) -> None:
            assert list(Path(source.directory).glob("*.bin.tmp"))
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(writer.IndexedDatasetBuilder, "finalize", full)
        opened = Corpus(source.directory, source.path)
        tokenize([source], tokenizer, 1)
        assert not list(Path(source.directory).glob("*.tmp"))
        with pytest.raises(DataError, match="cannot be tokenized: .*No space left on device"):
            opened.shard(0)

    def test_a_directory_that_cannot_be_written_is_named(
        self, text: Path, tokenizer: MegatronTokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = source_of(text, tokenizer)
        monkeypatch.setattr(writer.os, "access", lambda path, mode: False)
        spec = TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY)
        with pytest.raises(DataError, match="cannot write .*Permission denied; name a writable"):
            start([source], spec, 1)

    @pytest.mark.parametrize("compress", [bytes, gzip.compress])
    def test_byte_order_mark_and_carriage_returns_are_no_text(
        self, text: Path, tokenizer: MegatronTokenizer, compress: Callable[[bytes], bytes]
    ) -> None:
        content = codecs.BOM_UTF8 + text.read_bytes().replace(b"\n", b"\r\n")
        name = "of windows.jsonl" + (".gz" if compress is gzip.compress else "")
        (text.parent / name).write_bytes(compress(content))
        sources = [source_of(text, tokenizer), source_of(text.parent / name, tokenizer)]
        tokenize(sources, tokenizer, 1)
        assert (tokens_of(sources[0].directory) == tokens_of(sources[1].directory)).all()

    def test_changed_input_is_refused(self, text: Path, tokenizer: MegatronTokenizer) -> None:
        source = source_of(text, tokenizer)
        tokenize([source], tokenizer, 1)
        with open(text, "a") as file:
            file.write('{"text": "1"}\n')
        with pytest.raises(DataError, match="has changed since its tokens were cached: restore it"):
            source_of(text, tokenizer)

    def test_missing_input_is_refused(self, tmp_path: Path, tokenizer: MegatronTokenizer) -> None:
        with pytest.raises(ConfigError, match=r"--data-path .*none\.jsonl: no such file"):
            sources_of([str(tmp_path / "none.jsonl")], DataConfig(), tokenizer)
        assert sources_of([str(tmp_path / "a_prefix")], DataConfig(), tokenizer) == []


class TestSamples:
    def test_shards_obey_the_flags_of_data_files(
        self, text: Path, tokenizer: MegatronTokenizer
    ) -> None:
        source = source_of(text, tokenizer)
        tokenize([source], tokenizer, 1)
        damaged = Path(shard_prefix(source.directory, 0) + ".bin")
        content = bytearray(damaged.read_bytes())
        content[100] ^= 1
        damaged.write_bytes(content)
        assert samples(train_set(source), range(20))
        with pytest.raises(DataError, match=r"00000\.bin.* damaged"):
            samples(pickle.loads(pickle.dumps(train_set(source, verify_data=True))), range(20))
        train = train_set(source, mmap_bin_files=False)
        shard = train.dataset.shard(1)  # type: ignore[attr-defined]
        assert shard is not None
        assert not shard.mmap

    def test_the_stream_of_a_growing_corpus_is_that_of_the_complete_one(
        self, text: Path, tokenizer: MegatronTokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = source_of(text, tokenizer)
        shards = _Writer(source, tokenizer, 1).shards()
        waits = []

        def write_next(_: float) -> None:
            """Write a shard whenever the reader waits."""
            waits.append(next(shards, None))

        monkeypatch.setattr(corpus.time, "sleep", write_next)
        growing = train_set(source, 2000)
        early = samples(growing, range(5))
        assert len(waits) == 1  # one shard is enough to begin
        rest = samples(growing, range(5, 2000))
        complete = train_set(source, 2000)
        assert samples(complete, range(2000)) == early + rest

    def test_each_epoch_reads_each_shard_in_another_order(
        self, text: Path, tokenizer: MegatronTokenizer
    ) -> None:
        source = source_of(text, tokenizer)
        tokenize([source], tokenizer, 1)
        train = train_set(source, None)
        count = len(train)
        epochs = [samples(train, range(e * count, (e + 1) * count)) for e in range(3)]
        assert epochs[0] != epochs[1] != epochs[2]
        for epoch in epochs:
            tokens = [token for sample in epoch for token in sample if token != VOCABULARY]
            assert len(tokens) == len(set(tokens))  # no token twice
        sizes = (CorpusProgress.read(source.directory) or CorpusProgress()).num_sequences
        firsts = [sample[0] for sample in epochs[0]]
        assert np.median(firsts[: count // 4]) < np.median(firsts[-count // 4 :])  # shard by shard
        assert len(sizes) > 3

    def test_splits_of_a_corpus_are_disjoint(
        self, text: Path, tokenizer: MegatronTokenizer
    ) -> None:
        source = source_of(text, tokenizer)
        tokenize([source], tokenizer, 1)
        asked = config(
            blend=([source.path], None),
            split="80,20,0",
            index_free=True,
            corpora={source.path: source.directory},
            tokenizer=Tokenizer(VOCABULARY + 1),
        )
        built: list[Any] = BlendedMegatronDatasetBuilder(
            GPTDataset, [None, None, 0], lambda: True, asked
        ).build()
        train, valid = (
            {token for sample in samples(data, range(len(data))) for token in sample}
            for data in built[:2]
        )
        assert train & valid <= {VOCABULARY}
        assert len(valid) > len(train) / 8

    def test_a_writer_that_is_gone_is_reported(
        self, text: Path, tokenizer: MegatronTokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = source_of(text, tokenizer)
        clock = iter(range(0, 10_000, 50))
        monkeypatch.setattr(corpus.time, "monotonic", lambda: float(next(clock)))
        monkeypatch.setattr(corpus.time, "sleep", lambda _: None)
        with pytest.raises(DataError, match="no process tokenizes it any more"):
            Corpus(source.directory, source.path).shard(0)

    def test_a_corpus_without_a_sample_is_refused(
        self, tmp_path: Path, tokenizer: MegatronTokenizer
    ) -> None:
        few = tmp_path / "few.jsonl"
        few.write_text('{"text": "1 2 3"}\n')
        source = source_of(few, tokenizer)
        tokenize([source], tokenizer, 1)
        order = CorpusOrder(
            Corpus(source.directory, source.path),
            (0.0, 1.0),
            {"length": 8, "extra": 1, "seed": 1},
        )
        with pytest.raises(DataError, match="no shard with the tokens of one sample"):
            order.pieces(0)


def test_a_process_of_its_own_tokenizes(
    text: Path, tokenizer: MegatronTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(text, tokenizer)
    (text.parent / "megatron").mkdir()
    (text.parent / "megatron" / "__init__.py").write_text("1 / 0  # another program")
    monkeypatch.chdir(text.parent)
    spec = TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY)
    process = start([source], spec, 1)
    assert process is not None
    assert process.wait() == 0
    assert len(train_set(source, None)) > 100
    assert start([source], spec, 1) is None  # nothing is left


def test_a_damaged_record_is_reported(tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text("{")
    with pytest.raises(DataError, match=r"corpus\.json is damaged"):
        CorpusProgress.read(str(tmp_path))


def test_a_writer_waits_for_another_one_and_continues_behind_it(
    text: Path, tokenizer: MegatronTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(text, tokenizer)
    waits: list[float] = []
    with open(Path(source.directory) / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        writer.CorpusProgress(key=source.key()).write(source.directory)
        first = _Writer(source, tokenizer, 1).shards()

        def wait(seconds: float) -> None:
            """The other writer ends, as if it was killed, after two shards."""
            waits.append(seconds)
            if len(waits) == 3:
                fcntl.flock(lock, fcntl.LOCK_UN)
            else:
                next(first)

        monkeypatch.setattr(writer.time, "sleep", wait)
        tokenize([source], tokenizer, 1)
    assert len(waits) == 3
    progress = CorpusProgress.read(source.directory)
    assert progress is not None
    assert progress.is_complete
    assert sum(progress.num_sequences) == 400
    assert progress.error is None
