"""The database, the index and the neighbors of a RETRO project, and the samples that have them."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.retro.blocks import ONE_PROCESS, Ranks, Rows, write_hdf5
from megatron.core.datasets.retro.db import build_db, load_db
from megatron.core.datasets.retro.index import ChunkIndex, RetroGPTChunkDatasets
from megatron.core.datasets.retro.project import (
    RetroPreprocessingConfig,
    load_project,
    save_project,
)
from megatron.core.datasets.retro.retro_dataset import (
    MultiSplitGPTDataset,
    MultiSplitGPTDatasetConfig,
    documents_of,
    get_retro_datasets,
)
from megatron.training.tokenizer.base import _NullTokenizer

pytest.importorskip("h5py")
faiss = pytest.importorskip("faiss")

VOCAB = 60
M = 4  # tokens in a chunk
LENGTH = 12
TOKENIZER = _NullTokenizer(VOCAB)
PROJECTION = np.random.default_rng(7).standard_normal((VOCAB, 16)).astype(np.float32)


def embed(texts: Sequence[str]) -> np.ndarray:
    """The sum of a random vector for each token, which depends on its place in the chunk."""
    rows = [sum((PROJECTION[int(w)] * (i + 1) for i, w in enumerate(t.split())), np.zeros(16))
            for t in texts]  # fmt: skip
    return np.array(rows, np.float32).reshape(-1, 16)


def num_bert_tokens(tokens: np.ndarray) -> int:
    """Chunks that begin with token 0 have no BERT tokens."""
    return 0 if tokens[0] == 0 else len(tokens)


def write_corpus(prefix: Path, num_docs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(num_docs):
        tokens = [*rng.integers(VOCAB, size=rng.integers(1, 30)).tolist(), VOCAB]
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    write_corpus(folder / "data" / "a", 60, 1)
    write_corpus(folder / "data" / "b", 90, 2)
    return folder


def project(corpora: Path, folder: Path, **more: Any) -> RetroPreprocessingConfig:
    shutil.copytree(corpora, folder, dirs_exist_ok=True)
    settings: dict[str, Any] = {
        "retro_project_dir": str(folder),
        "retro_gpt_data_path": ("0.4", "a", "0.6", "b"),
        "retro_gpt_split": "80,15,5",
        "retro_gpt_seq_length": LENGTH,
        "retro_gpt_chunk_length": M,
        "retro_block_size": 50,
        "retro_doc_block_size": 25,
        "retro_index_str": "Flat",
        "retro_index_ntrain": 200,
        "retro_query_num_neighbors_query": 60,
        "retro_query_num_neighbors_save": 3,
    }
    return RetroPreprocessingConfig(**(settings | more))


def datasets(config: RetroPreprocessingConfig, cls: Any = GPTDataset, **more: Any) -> list[Any]:
    settings = GPTDatasetConfig(
        random_seed=config.retro_gpt_seed,
        sequence_length=LENGTH,
        blend=config.blend,
        split=config.retro_gpt_split,
        tokenizer=TOKENIZER,
        create_attention_mask=False,
        **more,
    )
    return BlendedMegatronDatasetBuilder(cls, [70, 8, 0], lambda: True, settings).build()


def preprocess(config: RetroPreprocessingConfig, ranks: Ranks = ONE_PROCESS) -> ChunkIndex:
    save_project(config)
    build_db(config, num_bert_tokens, VOCAB, ranks)
    index = ChunkIndex(config, TOKENIZER, embed, ranks)
    index.train()
    index.add()
    train, valid, _ = datasets(config)
    index.query(RetroGPTChunkDatasets((train, 70), (valid, 8)))
    return index


def retro_config(config: RetroPreprocessingConfig, **more: Any) -> Any:
    settings = {
        "retro_project_dir": config.retro_project_dir,
        "retro_num_neighbors": 2,
        "retro_num_retrieved_chunks": 2,
        "retro_verify_neighbor_count": True,
    }
    return SimpleNamespace(**(settings | more))


def open_sets(config: RetroPreprocessingConfig, **more: Any) -> list[Any]:
    train, valid, _ = datasets(config)
    sets = {"train": (train, 70), "valid": (valid, 8), "test": (None, 0)}
    return list(get_retro_datasets(retro_config(config, **more), sets, LENGTH, VOCAB))


@pytest.fixture(scope="module")
def flat(corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> RetroPreprocessingConfig:
    """A project with a flat index, whose neighbors are exact."""
    config = project(corpora, tmp_path_factory.mktemp("flat"))
    preprocess(config)
    return config


def training_chunks(config: RetroPreprocessingConfig) -> list[tuple[int, int, int, list[int]]]:
    """Corpus, document, first token and tokens of each chunk of the training documents."""
    db = load_db(config, "train", VOCAB)
    found = []
    for number, (corpus, num_docs) in enumerate(zip(db.indexed_datasets, (60, 90), strict=True)):
        for document in range(round(num_docs * 0.8)):
            tokens = corpus[document].tolist()[:-1]
            for at in range(0, len(tokens), M):
                if tokens[at] != 0:
                    found.append((number, document, at, tokens[at : at + M]))
    return found


def test_the_database_has_every_chunk_of_the_training_documents(flat: Any) -> None:
    expected = training_chunks(flat)
    db = load_db(flat, "train", VOCAB)
    assert len(db) == len(expected)
    for i, (corpus, document, _, tokens) in enumerate(expected):
        assert db[i]["doc_id"] == (corpus, document)
        assert db[i]["text"].tolist() == tokens + [VOCAB] * (M - len(tokens))
    sampled = load_db(flat, "sampled", VOCAB).chunks[:]
    assert len(sampled) == 200
    assert {tuple(row) for row in sampled.tolist()} <= {tuple(r) for r in db.chunks[:].tolist()}


@pytest.mark.feature(
    "Data: RETRO project: chunk database, faiss index and neighbor ids, validated by sampling"
)
def test_neighbors_are_those_of_brute_force_without_own_documents(flat: Any) -> None:
    chunks = training_chunks(flat)
    vectors = embed([" ".join(map(str, tokens)) for *_, tokens in chunks]).astype(np.float64)
    for retro in open_sets(flat)[:2]:
        for idx in range(len(retro)):
            sample = retro[idx]
            path, documents = documents_of(retro.dataset, idx)
            own = {("ab".index(Path(str(path)).name), document) for document in documents}
            for i in range(LENGTH // M):
                text = sample["text"][i * M : i * M + M]
                (query,) = embed([" ".join(map(str, text[text != VOCAB]))])
                distances = ((vectors - query) ** 2).sum(1)
                order = [
                    j for j in np.argsort(distances, kind="stable") if chunks[j][:2] not in own
                ]
                found = sample["neighbor_chunks"][i, :, 0]
                assert (found >= 0).all()
                np.testing.assert_allclose(distances[found], distances[order[:2]], rtol=1e-4)
                assert all(chunks[j][:2] not in own for j in found)


def test_a_sample_has_its_neighbors_and_their_continuations(flat: Any) -> None:
    chunks = training_chunks(flat)
    train, valid, test = open_sets(flat)
    assert test is None
    padded = 0
    for idx in range(len(train)):
        sample = train[idx]
        plain = train.dataset[idx]
        np.testing.assert_array_equal(sample["text"][:-1], plain["tokens"])
        assert sample["text"][-1] == plain["labels"][-1]
        assert sample["neighbor_tokens"].shape == (3, 2, 2 * M)
        for ids, tokens in zip(
            sample["neighbor_chunks"].reshape(-1, 2), sample["neighbor_tokens"].reshape(-1, 2, M),
            strict=True,
        ):  # fmt: skip
            corpus, document, at, first = chunks[ids[0]]
            assert tokens[0].tolist() == first + [VOCAB] * (M - len(first))
            after = [c for c in chunks if c[:3] == (corpus, document, at + M)]
            if not after:
                padded += 1
                assert ids[1] == -1
                assert tokens[1].tolist() == [VOCAB] * M
            else:
                assert ids[1] == ids[0] + 1
                assert tokens[1].tolist() == after[0][3] + [VOCAB] * (M - len(after[0][3]))
    assert padded > 10


@pytest.mark.parametrize(("name", "recall"), [("IVF8,Flat", 0.9), ("IVF4,PQ16x4", 0.5)])
def test_an_ivf_index_finds_nine_of_ten_neighbors(
    name: str, recall: float, flat: Any, corpora: Path, tmp_path: Path
) -> None:
    """Product quantization, whose codes are lossy, finds half."""
    config = project(corpora, tmp_path, retro_index_str=name, retro_query_nprobe=4)
    preprocess(config)
    hits = [
        {*a["neighbor_chunks"][:, :, 0].flat} & {*b["neighbor_chunks"][:, :, 0].flat}
        for a, b in zip(open_sets(flat)[0], open_sets(config)[0], strict=True)
    ]
    assert recall <= sum(map(len, hits)) / (len(hits) * 2 * LENGTH // M)


def test_db_build_continues_to_the_same_bytes_after_kill_9(
    flat: Any, corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = project(corpora, tmp_path)
    replace_file = os.replace

    def die_at_third(source: str, target: str) -> None:
        if target.endswith("hdf5") and len([*tmp_path.rglob("*.hdf5")]) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        replace_file(source, target)

    if (child := os.fork()) == 0:
        os.replace = die_at_third
        build_db(config, num_bert_tokens, VOCAB)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len([*tmp_path.rglob("*.hdf5")]) == 2
    assert len([*tmp_path.rglob("*.tmp")]) == 1
    with pytest.raises(DataError, match="has no complete database: run the task db-build"):
        load_db(config, "train", VOCAB)
    build_db(config, num_bert_tokens, VOCAB)
    db = Path(flat.project_dir) / "db"
    for path in db.rglob("*.*"):
        assert (tmp_path / "db" / path.relative_to(db)).read_bytes() == path.read_bytes(), path


@pytest.mark.parametrize("task", ["index", "query"])
def test_a_killed_task_continues_to_the_same_bytes(
    task: str, flat: Any, corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends while it writes; what it left is not read, and no block is written twice."""
    config = project(corpora, tmp_path)
    written: list[str] = []
    replace_file = os.replace

    def end_at_third(source: str, target: str) -> None:
        if f"/{task}/" in target and target.endswith("hdf5"):
            written.append(target)
            if len(written) == 3:
                Path(source).write_bytes(b"half")  # what a kill leaves
                raise KeyboardInterrupt
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", end_at_third)
    with pytest.raises(KeyboardInterrupt):
        preprocess(config)
    preprocess(config)
    assert len(written) == len({*written}) + 1  # the third, again
    for path in Path(flat.project_dir).rglob("*.*"):
        again = tmp_path / path.relative_to(flat.project_dir)
        if {"db", "index"} & {*path.parts} and path.is_file():
            assert again.read_bytes() == path.read_bytes(), path
    assert not [*tmp_path.rglob("*.tmp")]
    first, second = (
        [retro[i]["neighbor_chunks"] for retro in open_sets(c)[:2] for i in range(8)]
        for c in (flat, config)
    )
    np.testing.assert_array_equal(first, second)


def test_ranks_divide_the_blocks(flat: Any, corpora: Path, tmp_path: Path) -> None:
    config = project(corpora, tmp_path)
    meeting = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        ranks = [Ranks(rank, 3, lambda: meeting.wait(60) and None) for rank in range(3)]
        [*pool.map(lambda r: preprocess(replace(config), r), ranks)]
    files = [p.relative_to(tmp_path) for p in tmp_path.rglob("*.hdf5") if "query" not in p.parts]
    assert {p.parts[0] for p in files} == {"db"}  # embeddings and codes are removed after use
    for path in files:
        assert (tmp_path / path).read_bytes() == (Path(flat.project_dir) / path).read_bytes()
    one, three = (open_sets(c)[0] for c in (flat, config))
    for a, b in zip(one, three, strict=True):
        np.testing.assert_array_equal(a["neighbor_tokens"], b["neighbor_tokens"])


def test_validation_finds_a_changed_block(corpora: Path, tmp_path: Path) -> None:
    config = project(
        corpora,
        tmp_path,
        retro_index_delete_training_embeddings=False,
        retro_index_delete_added_codes=False,
    )
    index = preprocess(config)
    train, valid, _ = datasets(config)
    tasks = {
        "db": lambda: build_db(config, num_bert_tokens, VOCAB, validate=1.0),
        "train_emb": lambda: index.validate("index-train", 1.0),
        "add_codes": lambda: index.validate("index-add", 1.0),
        "query": lambda: index.query(RetroGPTChunkDatasets((train, 70), (valid, 8)), 1.0),
    }
    for folder, validate in tasks.items():
        assert validate() > 0
        path = sorted(p for p in tmp_path.rglob("*.hdf5") if {folder} & {*p.parts})[0]
        name = {"db": "chunks_valid", "query": "neighbors"}.get(folder, "data")
        values = Rows(str(path), name)[:]
        values[-1] += 1
        write_hdf5(str(path), {name: values})
        with pytest.raises(DataError, match=f"{path.name}: {name} are not those of the project"):
            validate()


def test_a_project_refuses_what_does_not_fit(flat: Any, corpora: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(flat.project_dir, folder)
    config = load_project(str(folder))
    with pytest.raises(ConfigError, match="--retro-num-neighbors 4: .* has 3 for each chunk"):
        open_sets(config, retro_num_neighbors=4)
    train, *_ = datasets(config)
    sets = {"train": (train, 71)}
    with pytest.raises(ConfigError, match=r"reads 71 train samples, and .* neighbors of 70"):
        get_retro_datasets(retro_config(config), sets, LENGTH, VOCAB)
    with pytest.raises(ConfigError, match="--seq-length 16: the neighbors of .* 12 tokens"):
        get_retro_datasets(retro_config(config), sets, 16, VOCAB)
    again = get_retro_datasets(
        retro_config(config, retro_verify_neighbor_count=False), sets, LENGTH, VOCAB
    )[0]
    assert again is not None
    np.testing.assert_array_equal(again[70]["text"], again[0]["text"])
    other, *_ = datasets(replace(config, retro_gpt_seed=3))
    with pytest.raises(DataError, match=r"sample 0 is not the one whose neighbors are in .*--seed"):
        get_retro_datasets(retro_config(config), {"train": (other, 70)}, LENGTH, VOCAB)
    (samples,) = (folder / "query").glob("train_*/samples.json")
    kept = samples.read_text()
    samples.write_text("[70]")
    with pytest.raises(DataError, match=r"samples.json is damaged, .*: remove this folder and run"):
        open_sets(config)
    samples.write_text(kept)
    sorted((folder / "query").glob("train_*/*.hdf5"))[1].unlink()
    with pytest.raises(DataError, match=r"1 blocks of neighbors are missing, such as .*100.hdf5"):
        open_sets(config)
    write_corpus(folder / "data" / "b", 90, 3)
    with pytest.raises(DataError, match=r"data/b has changed since the database of .* was begun"):
        open_sets(config)
    for text in ("{", '{"a": 1}', "[]"):
        (folder / "config.json").write_text(text)
        with pytest.raises(
            DataError, match=r"config.json is damaged, or .* \(.*\): run tools/retro"
        ):
            open_sets(config)
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match=r"config.json is missing: run tools/retro/preprocess"):
        open_sets(config)
    wrong = project(corpora, tmp_path / "wrong", retro_index_str="IVF_8")
    with pytest.raises(ConfigError, match="--retro-index-str IVF_8: faiss makes no such index"):
        preprocess(wrong)


def test_splits_are_cut_down_to_those_of_preprocessing(flat: Any) -> None:
    config = MultiSplitGPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=(flat.blend[0][:1], None),
        split="90,10,0",
        split_preprocessing="80,15,5",
        return_document_ids=True,
        tokenizer=TOKENIZER,
        create_attention_mask=False,
    )
    train, valid, _ = BlendedMegatronDatasetBuilder(
        MultiSplitGPTDataset, [None, None, 0], lambda: True, config
    ).build()
    assert (len(train.indices), len(valid.indices)) == (48, 3)
    sample = valid[0]
    assert len(sample["text"]) == LENGTH + 1
    assert {*sample["document_ids"].tolist()} <= {54, 55, 56}
