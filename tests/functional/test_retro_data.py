"""tools/retro/preprocess_data.py makes a RETRO project with a BERT checkpoint of this program."""

from __future__ import annotations

import importlib
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.retro.blocks import Rows
from megatron.core.datasets.retro.db import load_db
from megatron.core.datasets.retro.project import load_project
from megatron.inference.embedding import embed, megatron_embedder
from megatron.training.tokenizer.base import TokenizerSpec
from megatron.training.tokenizer.tokenizer import create_tokenizer
from tests.support.dataset_files import GOLDEN, write
from tests.support.ranks import run_ranks
from tests.support.runs import ANY_LENGTH, TINY, losses, run_gpt
from tests.support.tokenizer_files import corpus_texts
from tools.retro import preprocess_data

pytest.importorskip("faiss")
pytest.importorskip("h5py")
unit = importlib.import_module("tests.unit.datasets.test_retro")  # skips where they are missing

LETTERS = sorted({letter for text in corpus_texts() for letter in text.lower() if letter.strip()})
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{c}" for c in LETTERS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT checkpoint with its vocabulary, and a corpus with its tokenizer."""
    folder = tmp_path_factory.mktemp("retro")
    (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    base = [word for word in TINY if word not in ("NullTokenizer", "--vocab-size", "100")]
    base.insert(base.index("--tokenizer-type") + 1, "BertWordPieceLowerCase")
    base += ["--vocab-file", str(folder / "vocab.txt"), "--model-kind", "bert"]
    run_gpt(folder, "--save", str(folder / "bert"), "--train-iters", "1", base=base)
    (folder / "project" / "data").mkdir(parents=True)
    documents = IndexedDataset(str(GOLDEN / "text_text_document"))[:60]
    write(folder / "project" / "data" / "text", documents)
    return folder


def flags(folder: Path, project: Path, *more: str) -> list[str]:
    return [
        *f"--retro-project-dir {project} --load {folder / 'bert'} --device cpu "
        f"--retro-gpt-data-path text --retro-gpt-split 90,5,5 "
        f"--retro-gpt-tokenizer-type GPTSentencePieceTokenizer "
        f"--retro-gpt-tokenizer-model {GOLDEN / 'spm.model'} "
        "--retro-gpt-seq-length 64 --retro-gpt-chunk-length 16 --retro-gpt-train-samples 24 "
        "--retro-gpt-eval-interval 10 --retro-gpt-eval-iters 1 --retro-gpt-global-batch-size 4 "
        f"--retro-bert-vocab-file {folder / 'vocab.txt'} --retro-index-str Flat "
        "--retro-index-ntrain 50 --retro-block-size 100 --retro-query-num-neighbors-query 30 "
        "--retro-query-num-neighbors-save 4 --retro-bert-batch-size 64".split(),
        *more,
    ]


def run(rank: int, world_size: int, *commands: list[str]) -> None:
    for words in commands:
        preprocess_data.main(words)


def embeddings(rank: int, world_size: int, load: str, texts: list[str]) -> np.ndarray:
    made = megatron_embedder(load, device_kind="cpu")
    rows = [made.tokenize(text)[:30] for text in texts]
    return np.concatenate(
        [embed(rows[at : at + 50], made).numpy() for at in range(0, len(rows), 50)]
    )


@pytest.fixture(scope="module")
def project(folder: Path) -> Path:
    run_ranks(run, 1, flags(folder, folder / "project"))
    return folder / "project"


def test_neighbors_are_nearest_in_the_space_of_the_checkpoint(folder: Path, project: Path) -> None:
    config = load_project(str(project))
    assert {*config.retro_neighbor_dirs} == {"train", "valid", "test"}
    tokenizer = create_tokenizer(
        TokenizerSpec(
            tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(GOLDEN / "spm.model")
        )
    )
    db = load_db(config, "train", tokenizer.eod)
    data = preprocess_data.query_datasets(config, tokenizer)
    assert data.train is not None
    text = data.train[0][0]["tokens"][:16]
    texts = [tokenizer.detokenize(db.tokens(row).tolist()) for row in db.chunks[:]]
    query = tokenizer.detokenize(text[text != tokenizer.eod].tolist())
    (vectors,) = run_ranks(embeddings, 1, str(folder / "bert"), [query, *texts])
    own = {piece[0] for piece in data.train[0].pieces(0)}
    distances = ((vectors[1:] - vectors[0]) ** 2).sum(1)
    distances[[int(row[1]) in own for row in db.chunks[:]]] = np.inf
    path = sorted((project / "query" / config.retro_neighbor_dirs["train"]).glob("*.hdf5"))[0]
    found = Rows(str(path), "neighbors")[:][0]
    np.testing.assert_allclose(distances[found], np.sort(distances)[:4], rtol=1e-3, atol=1e-5)


def test_two_ranks_write_the_same_project(folder: Path, project: Path, tmp_path: Path) -> None:
    shutil.copytree(project / "data", tmp_path / "data")
    run_ranks(run, 2, flags(folder, tmp_path, "--retro-tasks", "db-build,index-build"))
    more = ["--retro-project-dir", str(tmp_path), "--device", "cpu", "--retro-tasks"]
    validate = ["--retro-task-validate", "0.5"]
    run_ranks(run, 2, [*more, "query-neighbors"])  # the project has the other settings
    run_ranks(run, 1, [*more, "db-build,query-neighbors", *validate])
    for name in ("train", "valid", "sampled"):
        one, two = (p / "db" / "merged" / f"{name}.hdf5" for p in (project, tmp_path))
        assert one.read_bytes() == two.read_bytes()


def test_bad_command_lines_have_one_error(
    folder: Path, project: Path, tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(ConfigError) as caught:
        preprocess_data.main(
            "--retro-tasks build,db --retro-gpt-seq-length 63 --retro-task-validate 2 "
            "--retro-block-size 0".split()
        )
    text = str(caught.value)
    assert "--retro-project-dir is missing" in text
    assert "--load is missing" in text
    assert "--retro-gpt-seq-length 63 is no multiple of --retro-gpt-chunk-length 64" in text
    assert "--retro-task-validate 2.0: give a fraction" in text
    assert "--retro-block-size 0: at least 1" in text
    assert "--retro-tasks db: give one or more of db-build, index-train" in text
    other = flags(folder, project, "--retro-gpt-seq-length", "32", "--retro-gpt-seed", "5")
    with pytest.raises(ConfigError, match="was begun with 64; give this value") as caught:
        preprocess_data.main(other)
    problems = [problem.split(":")[0] for problem in caught.value.problems]
    assert problems == ["--retro-gpt-seed 5", "--retro-gpt-seq-length 32"]
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="text.bin"):
        preprocess_data.main(flags(folder, tmp_path))
    shutil.copytree(project / "data", tmp_path / "data", dirs_exist_ok=True)
    sidecar = {"tokenizer": "GPT2BPETokenizer", "vocab_size": 50257, "eod": 50256, "sha256": "0"}
    path = tmp_path / "data" / "text.tokenizer.json"
    path.write_text(json.dumps(sidecar))
    with pytest.raises(DataError, match="was written with GPT2BPETokenizer"):
        preprocess_data.main(flags(folder, tmp_path))
    path.unlink()
    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB[:5] + VOCAB[:4:-1]) + "\n")
    wrong = flags(folder, tmp_path, "--retro-bert-vocab-file", str(tmp_path / "vocab.txt"))
    with pytest.raises(AssertionError, match="was trained with another tokenizer; give its own"):
        run_ranks(run, 1, wrong)
    capsys.readouterr()
    words = preprocess_data.known_flags(["--num-layers", "24", "--retro-tasks", "build", "--fp16"])
    assert words == ["--retro-tasks", "build"]
    assert "--num-layers, --fp16: without effect, --load has the" in capsys.readouterr().out


def test_cyclic_training_repeats_the_samples_of_a_project(project: Path, tmp_path: Path) -> None:
    left = {"--seq-length", "--global-batch-size", "--eval-interval", "--eval-iters"}
    left |= {"--tokenizer-type", "--vocab-size", "--max-position-embeddings"}
    words = [word for word in ANY_LENGTH if word != "--mock-data"]
    base = [w for before, w in pairwise(["", *words]) if not {before, w} & left]
    flags = (
        f"--model-kind retro --retro-project-dir {project} --retro-add-retriever --lr 0 --min-lr 0 "
        "--max-position-embeddings 64 --retro-encoder-hidden-dropout 0 "
        "--retro-encoder-attention-dropout 0 --retro-cyclic-train-iters 2"
    )
    found = losses(run_gpt(tmp_path, *flags.split(), base=base))
    assert len(found) == 6
    assert found == found[:2] * 3
    assert found[0] != found[1]


@pytest.mark.slow
@pytest.mark.feature("Training: neighbors of a RETRO project lower the loss on repeated text")
def test_retrieval_lowers_the_loss_on_repeated_text(tmp_path: Path) -> None:
    """Documents of random tokens occur twice: only the other copy tells the tokens of a chunk."""
    rng = np.random.default_rng(0)
    documents = rng.integers(unit.VOCAB, size=(1000, 31)).repeat(2, axis=0)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "text", [[*d, unit.VOCAB] for d in rng.permutation(documents)])
    config = unit.RetroPreprocessingConfig(
        retro_project_dir=str(tmp_path),
        retro_gpt_data_path=("text",),
        retro_gpt_split="100,0,0",
        retro_gpt_seq_length=32,
        retro_gpt_chunk_length=8,
        retro_gpt_train_samples=1920,
        retro_gpt_global_batch_size=16,
        retro_index_str="Flat",
        retro_query_num_neighbors_save=1,
    )
    unit.save_project(config)
    unit.build_db(config, len, unit.VOCAB)
    index = unit.ChunkIndex(config, unit.TOKENIZER, unit.embed)
    index.train()
    index.add()
    index.query(preprocess_data.query_datasets(config, unit.TOKENIZER))
    base = [word for word in ANY_LENGTH if word != "--mock-data"]
    for flag in ("--global-batch-size", "--eval-interval"):
        del base[base.index(flag) : base.index(flag) + 2]
    base += (
        f"--model-kind retro --retro-project-dir {tmp_path} --retro-add-retriever --num-layers 2 "
        f"--hidden-size 64 --vocab-size {unit.VOCAB} --micro-batch-size 16 --lr 5e-3 "
        "--eval-iters 0 --init-method-std 0.1 --lr-decay-style constant "
        "--retro-num-neighbors 1 --retro-encoder-layers 1 --retro-encoder-hidden-dropout 0 "
        "--retro-encoder-attention-dropout 0"
    ).split()
    with_neighbors, without = (
        losses(run_gpt(tmp_path / gate, "--retro-attention-gate", gate, base=base, timeout_s=400))
        for gate in "10"
    )
    assert np.mean(without[-10:]) > 0.95 * np.log(unit.VOCAB)
    assert np.mean(with_neighbors[-10:]) < 0.7 * np.log(unit.VOCAB)
