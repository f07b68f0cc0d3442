"""preprocess_data.py: the reference's bytes, whatever the input's form and the run's division."""

from __future__ import annotations

import gzip
import importlib
import json
import logging
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.preprocess import documents, encode, run
from megatron.training.preprocess.documents import Block, json_lines
from megatron.training.preprocess.encode import BlockEncoder, EncodedBlock
from megatron.training.tokenizer import TokenBatch, TokenizerSpec, create_tokenizer, fast
from megatron.training.tokenizer.fingerprint import Fingerprint, read_fingerprint
from tests.support.tokenizer_files import CORPUS, DATA, SPM_MODEL, corpus_texts, write_bpe
from tools import preprocess_data

TOKENIZER = ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", str(SPM_MODEL)]
EOD = 2


def preprocess(source, prefix, *flags, num_workers=1):
    """Run the tool in this process."""
    argv = ["--input", str(source), "--output-prefix", str(prefix), *TOKENIZER]
    preprocess_data.main([*argv, "--workers", str(num_workers), *flags])


def contents(prefix):
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def rows(prefix):
    return [row.tolist() for row in IndexedDataset(str(prefix))[:]]


def ids(text):
    tokenizer = create_tokenizer(
        TokenizerSpec(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(SPM_MODEL))
    )
    return tokenizer.tokenize(text)


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_bytes(gzip.decompress(CORPUS.read_bytes()))
    return path


GOLDEN = DATA / "text_text_document"


@pytest.mark.feature("Data: preprocess_data.py writes the bytes that Megatron-LM writes")
@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_bytes_are_the_references(corpus_file, tmp_path, num_workers):
    preprocess(corpus_file, tmp_path / "out", "--append-eod", num_workers=num_workers)
    assert contents(tmp_path / "out_text_document") == contents(GOLDEN)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_input_gives_the_same_bytes(corpus_file, tmp_path, suffix):
    source = CORPUS
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        source = tmp_path / "corpus.jsonl.zst"
        data = corpus_file.read_bytes()
        frames = (data[:100_000], data[100_000:])  # a frame may end inside a line
        source.write_bytes(b"".join(zstandard.compress(frame) for frame in frames))
    preprocess(source, tmp_path / "out", "--append-eod", num_workers=2)
    assert contents(tmp_path / "out_text_document") == contents(GOLDEN)


@pytest.mark.parametrize("compressed", [False, True])
def test_sequential_partitions_give_the_same_bytes(corpus_file, tmp_path, compressed):
    source = CORPUS if compressed else corpus_file
    flags = ("--append-eod", "--partitions", "3", "--keep-sequential-samples")
    preprocess(source, tmp_path / "out", *flags)
    assert contents(tmp_path / "out_text_document") == contents(GOLDEN)


def test_partitions_take_documents_in_turn(corpus_file, tmp_path):
    preprocess(corpus_file, tmp_path / "out", "--append-eod", "--partitions", "4")
    lines = corpus_file.read_bytes().splitlines(keepends=True)
    dealt = tmp_path / "dealt.jsonl"
    dealt.write_bytes(b"".join(line for i in range(4) for line in lines[i::4]))
    preprocess(dealt, tmp_path / "wanted", "--append-eod")
    found = contents(tmp_path / "out_text_document")
    assert found == contents(tmp_path / "wanted_text_document")
    names = {path.name for path in tmp_path.glob("out*")}
    assert names == {f"out_text_document.{e}" for e in ("bin", "crc", "idx", "tokenizer.json")}


def test_several_files_follow_each_other_by_name(corpus_file, tmp_path):
    lines = corpus_file.read_bytes().splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_bytes(b"".join(lines[200:]))
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:200]).rstrip(b"\n"))
    preprocess(str(tmp_path / "*.jsonl"), tmp_path / "out", "--append-eod")
    assert contents(tmp_path / "out_text_document") == contents(GOLDEN)
    flags = ("--append-eod", "--partitions", "3", "--keep-sequential-samples")
    preprocess(str(tmp_path / "*.jsonl"), tmp_path / "parts", *flags)
    assert contents(tmp_path / "parts_text_document") == contents(GOLDEN)


@pytest.mark.parametrize("flags", [(), ("--keep-sequential-samples",)])
def test_an_interrupted_run_goes_on_after_its_last_finished_partition(
    corpus_file, tmp_path, monkeypatch, flags
):
    flags = ("--append-eod", "--partitions", "4", *flags)
    preprocess(corpus_file, tmp_path / "wanted", *flags)
    written = []
    write = run._Run._write_partition

    def interrupted(self, partition, *rest):
        if partition == 2 and not written.count("again"):
            raise KeyboardInterrupt
        written.append(partition)
        write(self, partition, *rest)

    monkeypatch.setattr(run._Run, "_write_partition", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preprocess(corpus_file, tmp_path / "out", *flags)
    assert not (tmp_path / "out_text_document.idx").exists()
    written.append("again")
    preprocess(corpus_file, tmp_path / "out", *flags)
    assert written == [0, 1, "again", 2, 3]
    assert contents(tmp_path / "out_text_document") == contents(tmp_path / "wanted_text_document")


def test_changed_input_or_options_start_all_partitions_again(corpus_file, tmp_path, monkeypatch):
    source = tmp_path / "in.jsonl"
    source.write_bytes(corpus_file.read_bytes())
    merge = run._Run._merge
    monkeypatch.setattr(run._Run, "_merge", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        preprocess(source, tmp_path / "out", "--partitions", "2")
    monkeypatch.setattr(run._Run, "_merge", merge)
    preprocess(source, tmp_path / "out", "--partitions", "2", "--append-eod")
    lines = corpus_file.read_bytes().splitlines(keepends=True)
    source.write_bytes(b"".join(lines[0::2] + lines[1::2]))
    preprocess(source, tmp_path / "wanted", "--append-eod")
    assert contents(tmp_path / "out_text_document") == contents(tmp_path / "wanted_text_document")


def test_each_key_has_its_files_and_an_empty_text_is_an_empty_document(tmp_path):
    records = [{"a": "one two", "b": ""}, {"a": "", "b": "three"}, {"a": "four", "b": "five six"}]
    source = write_lines(tmp_path / "in.jsonl", records)
    preprocess(source, tmp_path / "out", "--json-keys", "a", "b", "--append-eod")
    assert rows(tmp_path / "out_a_document") == [[*ids("one two"), EOD], [*ids("four"), EOD]]
    assert rows(tmp_path / "out_b_document") == [[*ids("three"), EOD], [*ids("five six"), EOD]]
    documents = IndexedDataset(str(tmp_path / "out_a_document")).document_indices
    assert documents.tolist() == [0, 1, 1, 2]


def test_a_list_of_texts_is_a_document_of_several_sequences(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"text": ["one", "", "two"]}, {"text": "three"}])
    preprocess(source, tmp_path / "out", "--append-eod")
    wanted = [ids("one"), [*ids("two"), EOD], [*ids("three"), EOD]]
    assert rows(tmp_path / "out_text_document") == wanted
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert dataset.document_indices.tolist() == [0, 2, 3]


def test_sentences_are_split_in_one_call(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.training.preprocess.encode.why_missing", lambda name: "gone")
    source = write_lines(tmp_path / "in.jsonl", [{"text": "One is here. Two is there!  Three"}])
    preprocess(source, tmp_path / "out", "--split-sentences", "--append-eod")
    wanted = [ids("One is here."), ids("Two is there!"), [*ids("Three"), EOD]]
    assert rows(tmp_path / "out_text_sentence") == wanted
    assert [path.name for path in tmp_path.glob("*_ss*")] == []


@pytest.mark.parametrize(
    ("sample_by", "wanted"),
    [
        ("line", ["one", "two", "three"]),
        ("paragraph", ["one\ntwo", "three"]),
        ("document", ["one\ntwo\n \n\nthree\n"]),
    ],
)
def test_plain_text_is_cut_as_asked(tmp_path, sample_by, wanted):
    source = tmp_path / "in.txt"
    source.write_text("one\ntwo\n \n\nthree\n")
    preprocess(source, tmp_path / "out", "--sample-by", sample_by)
    assert rows(tmp_path / "out_text_document") == [ids(text) for text in wanted]
    with gzip.open(tmp_path / "in2.txt.gz", "wt") as file:
        file.write(source.read_text())
    preprocess(tmp_path / "in2.txt.gz", tmp_path / "out2", "--sample-by", sample_by)
    assert rows(tmp_path / "out2_text_document") == rows(tmp_path / "out_text_document")


def test_partitions_of_paragraphs_and_files_keep_them_whole(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(f"{name} one\n\n{name} two\nlines\n")
    pattern = str(tmp_path / "*.txt")
    preprocess(pattern, tmp_path / "out", "--sample-by", "document", "--partitions", "2")
    texts = [(tmp_path / name).read_text() for name in ("a.txt", "c.txt", "b.txt")]
    assert rows(tmp_path / "out_text_document") == [ids(text) for text in texts]
    preprocess(pattern, tmp_path / "out2", "--sample-by", "paragraph", "--partitions", "2")
    wanted = [f"{n} one" for n in ("a.txt", "b.txt", "c.txt")]
    wanted += [f"{n} two\nlines" for n in ("a.txt", "b.txt", "c.txt")]
    assert rows(tmp_path / "out2_text_document") == [ids(text) for text in wanted]


@pytest.mark.parametrize(
    ("form", "line", "reason"),
    [
        ("plain", '{"text": "cut', "no JSON: Unterminated string"),
        ("plain", '{"other": "x"}', "the record has no key 'text'"),
        ("plain", '{"text": 5}', "the value is int, not text"),
        ("plain", '["text"]', "the record is list, not an object"),
        ("plain", '{"text": "\\ud800"}', "the text is no Unicode"),
        ("gz", '{"text": 5}', "the value is int, not text"),
        ("dealt", '{"text": 5}', "the value is int, not text"),
        ("runs", '{"text": "\\ud800"}', "the text is no Unicode"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path, form, line, reason):
    good = [json.dumps({"text": text}) for text in corpus_texts()[:300]]
    lines = [*good[:200], "", line, *good[200:]]  # an empty line is passed over, and counted
    source = tmp_path / ("in.jsonl.gz" if form == "gz" else "in.jsonl")
    opener = gzip.open if form == "gz" else open
    with opener(source, "wt") as file:
        file.write("\n".join(lines) + "\n")
    flags = ["--partitions", "3"] if form in ("dealt", "runs") else []
    flags += ["--keep-sequential-samples"] if form == "runs" else []
    with pytest.raises(DataError, match=f"^{source}, line 202: {reason}"):
        preprocess(source, tmp_path / "out", *flags, num_workers=2)
    assert not (tmp_path / "out_text_document.idx").exists()


@pytest.mark.parametrize("backend", ["gigatoken", "owner"])
def test_a_lone_surrogate_is_an_error_with_every_library(tmp_path, backend):
    if backend != "owner":
        pytest.importorskip(backend)
    bpe = write_bpe(tmp_path / "bpe", 400)
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a"}, {"text": "b \ud800"}])
    argv = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    argv += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(bpe)]
    with pytest.raises(DataError, match=f"^{source}, line 2: the text is no Unicode"):
        preprocess_data.main([*argv, "--tokenizer-backend", backend])


def test_bytes_that_are_no_utf8_are_named_with_their_line(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=f"^{source}, line 2: no UTF-8"):
        preprocess(source, tmp_path / "out")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_short_is_an_error(corpus_file, tmp_path, suffix):
    source = tmp_path / f"in.jsonl{suffix}"
    if suffix == ".gz":
        data = CORPUS.read_bytes()
    else:
        zstandard = pytest.importorskip("zstandard")
        data = zstandard.compress(corpus_file.read_bytes())
    source.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=rf"in\.jsonl\{suffix} is damaged"):
        preprocess(source, tmp_path / "out")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_record_that_no_worker_can_hold_is_refused(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(documents, "_LARGEST_BLOCK", 1 << 21)
    data = b'{"text": "a"}\n' + b" " * (1 << 23)
    if suffix == ".zst":
        data = pytest.importorskip("zstandard").compress(data)
    source = tmp_path / f"in.jsonl{suffix}"
    source.write_bytes(gzip.compress(data) if suffix == ".gz" else data)
    with pytest.raises(DataError, match=r"the record at byte \d+ has more than 2097152 bytes"):
        preprocess(source, tmp_path / "out")


def test_a_few_rows_of_parquet_are_held_at_once(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    texts = pyarrow.DictionaryArray.from_arrays([0] * 1000, ["x" * 10_000])
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    sizes = [len(piece) for piece, _ in json_lines(str(tmp_path / "a.parquet"))]
    assert max(sizes) < 1_000_000
    assert sum(sizes) > 10_000_000


def test_a_key_with_a_slash_is_refused(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [{"a/b": "text"}])
    with pytest.raises(ConfigError, match="--json-keys 'a/b': the key is part of the names"):
        preprocess(source, tmp_path / "out", "--json-keys", "a/b")


def test_a_worker_that_is_killed_ends_the_run(corpus_file, tmp_path, monkeypatch):
    def die(self, block):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(BlockEncoder, "encode", die)
    with pytest.raises(DataError, match="was ended by a signal; .*fewer --workers"):
        preprocess(corpus_file, tmp_path / "out", num_workers=2)


def test_a_fault_in_a_worker_ends_the_run_and_shows_its_traceback(
    corpus_file, tmp_path, monkeypatch
):
    def fail(self, block):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(BlockEncoder, "encode", fail)
    with pytest.raises(ZeroDivisionError, match="oh") as raised:
        preprocess(corpus_file, tmp_path / "out")
    assert 'raise ZeroDivisionError("oh")' in str(raised.value.__cause__)


def test_an_id_that_does_not_fit_the_file_is_an_error(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "5 70000"}])
    argv = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    with pytest.raises(DataError, match="in.jsonl, bytes 0 to 20: the tokenizer gave the id 70000"):
        preprocess_data.main([*argv, "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"])


@pytest.mark.parametrize("partitions", ["1", "2"])
def test_a_fast_library_with_other_ids_is_switched_off_with_a_warning(
    corpus_file, tmp_path, monkeypatch, caplog, partitions
):
    bpe = write_bpe(tmp_path / "bpe", 400)
    argv = ["--input", str(corpus_file), "--workers", "1", "--partitions", partitions]
    argv += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(bpe)]
    owner = ["--tokenizer-backend", "owner", "--output-prefix", str(tmp_path / "wanted")]
    preprocess_data.main([*argv, *owner])

    class Wrong:
        name = "gigatoken"
        added_tokens = ()

        def encode_batch(self, texts):
            return TokenBatch(np.ones(len(texts), np.int32), np.ones(len(texts), np.int64))

    monkeypatch.setattr(fast, "GigatokenEncoder", lambda rules: Wrong())
    monkeypatch.setattr(fast, "why_missing", lambda name: None)
    prefix = ["--output-prefix", str(tmp_path / "out")]
    with caplog.at_level(logging.WARNING):
        preprocess_data.main([*argv, *prefix])
    assert "gigatoken gives other ids than the tokenizer's own library" in caplog.text
    assert "it is switched off" in caplog.text
    assert contents(tmp_path / "out_text_document") == contents(tmp_path / "wanted_text_document")
    with pytest.raises(ConfigError, match="--tokenizer-backend gigatoken: .*; use auto or owner"):
        preprocess_data.main([*argv, *prefix, "--tokenizer-backend", "gigatoken"])


def test_no_more_blocks_are_under_way_than_the_window_allows(monkeypatch):
    monkeypatch.setattr(
        BlockEncoder, "encode", lambda self, block: EncodedBlock({}, block.start, 0, 0)
    )
    taken = []

    def blocks():
        for start in range(200):
            taken.append(start)
            yield Block("x", start, start + 1, 1, b"x")

    encoder = BlockEncoder(None, None, np.uint16, 1, None, None)
    with encode.WorkerPool(encoder, 2) as pool:
        for given, result in enumerate(pool.map(blocks())):
            assert result.num_documents == given
            assert len(taken) <= given + 2 * encode._WINDOW + 1
    assert len(taken) == 200


def test_the_sidecar_says_which_tokenizer_made_the_data(corpus_file, tmp_path):
    preprocess(corpus_file, tmp_path / "out")
    tokenizer = create_tokenizer(
        TokenizerSpec(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(SPM_MODEL))
    )
    assert read_fingerprint(str(tmp_path / "out_text_document")) == Fingerprint.of(tokenizer)


def test_rate_share_and_time_left_are_printed(corpus_file, tmp_path, capsys):
    preprocess(corpus_file, tmp_path / "out")
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("Processed 420 documents (")
    assert "docs/s, " in line
    assert line.endswith("MB/s), 100.0 %, 0:00:00 left")


@pytest.mark.parametrize(
    ("flags", "error", "sentence"),
    [
        (["--input", "/none"], ConfigError, "--input /none: no such file"),
        (["--workers", "0"], ConfigError, "--workers 0 must be at least 1"),
        (["--partitions", "0"], ConfigError, "--partitions 0 must be at least 1"),
        (["--partitions", str(2**62)], ConfigError, f"--partitions {2**62} must be at most "),
        (["--output-prefix", "/none/x"], ConfigError, "there is no directory /none; make it"),
    ],
)
def test_wrong_options_are_said_with_their_flags(corpus_file, tmp_path, flags, error, sentence):
    with pytest.raises(error, match=sentence):
        preprocess(corpus_file, tmp_path / "out", *flags)


def test_text_and_json_are_not_read_in_one_run(tmp_path):
    (tmp_path / "a.txt").write_text("x\n")
    write_lines(tmp_path / "b.jsonl", [{"text": "x"}])
    with pytest.raises(ConfigError, match="--input names plain text .*a.txt.* and JSON lines"):
        preprocess(str(tmp_path / "*"), tmp_path / "out")


def test_an_empty_file_gives_an_empty_data_set(tmp_path):
    (tmp_path / "in.jsonl").write_text("")
    preprocess(tmp_path / "in.jsonl", tmp_path / "out")
    assert len(IndexedDataset(str(tmp_path / "out_text_document"))) == 0


def test_the_options_are_the_references_with_its_defaults():
    parser = preprocess_data.get_parser()
    args = parser.parse_args(["--input", "i", "--output-prefix", "o", "--workers", "1"])
    wanted = {
        "json_keys": ["text"],
        "split_sentences": False,
        "keep_newlines": False,
        "append_eod": False,
        "lang": "english",
        "partitions": 1,
        "log_interval": 1000,
        "keep_sequential_samples": False,
        "vocab_extra_ids": 0,
        "tiktoken_num_special_tokens": 1000,
        "tokenizer_type": None,
    }
    assert {name: vars(args)[name] for name in wanted} == wanted
    required = {a.dest for a in parser._actions if a.required}
    # The reference needs --workers too.
    assert required == {"input", "output_prefix"}
