"""tools/bert_embedding.py writes the means of hidden states that a reader computes himself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.inference import embedding, generation
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, run_gpt
from tools import bert_embedding
from tools.checkpoint.convert import main as convert_main

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"a b c d e f g h ##i ##j".split()]
TEXTS = ["a b ci", "", "d", "e f g h ai bj " * 9, "ci di ei"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two tensor-parallel ranks, its vocabulary and texts."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    drop = ("NullTokenizer", "--vocab-size", "100")
    base = [word for word in TINY if word not in drop]
    base.insert(base.index("--tokenizer-type") + 1, "BertWordPieceLowerCase")
    base += ["--vocab-file", str(folder / "vocab.txt"), "--model-kind", "bert"]
    base += "--train-iters 1 --eval-iters 0 --tensor-model-parallel-size 2".split()
    run_gpt(folder, "--save", str(folder / "ck"), base=base, world_size=2)
    return folder


def embed(rank: int, world_size: int, words: list[str]) -> None:
    bert_embedding.main([*words, "--device", "cpu"])


def flags(saved: Path, output: Path, *more: str) -> list[str]:
    words = ["--load", str(saved / "ck"), "--input", str(saved / "texts.jsonl")]
    return [*words, "--output", str(output), *more]


def by_hand(rank: int, world_size: int, load: str, rows: list[list[int]]) -> Any:
    """Text by text without padding: the mean of the last hidden states."""
    seen: list[torch.Tensor] = []
    made = embedding.megatron_embedder(load, device_kind="cpu")
    model = made.vectors.__closure__[1].cell_contents  # type: ignore[attr-defined]
    model.encoder.register_forward_hook(lambda _m, _i, out: seen.append(out[1:-1, 0]))
    for row in rows:
        embedding.embed([row], made)
    zeros = torch.zeros(32)
    return [states.mean(0).numpy() if len(states) else zeros.numpy() for states in seen]


def test_vectors_are_means_over_each_text(saved: Path, tmp_path: Path) -> None:
    run_ranks(embed, 1, flags(saved, tmp_path / "a.npy", "--micro-batch-size", "2"))
    vectors = np.load(tmp_path / "a.npy")
    assert (vectors.dtype, vectors.shape) == (np.float32, (5, 32))
    ids = {token: i for i, token in enumerate(VOCAB)}
    rows = [[ids[t] for t in "a b c ##i".split()], [], [ids["d"]]]
    (expected,) = run_ranks(by_hand, 1, str(saved / "ck"), rows)
    np.testing.assert_allclose(vectors[:3], expected, rtol=1e-5, atol=1e-6)
    assert np.abs(vectors[3:]).sum(1).min() > 0.1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy"]


def test_two_ranks_and_an_indexed_dataset_give_the_same(saved: Path, tmp_path: Path) -> None:
    run_ranks(embed, 1, flags(saved, tmp_path / "a.npy"))
    run_ranks(embed, 2, flags(saved, tmp_path / "b.npy"))
    builder = IndexedDatasetBuilder(str(tmp_path / "ids.bin"), dtype=np.uint16)
    ids = {token: i for i, token in enumerate(VOCAB)}
    builder.add_document([ids[t] for t in "a b c ##i".split()], [1, 3])
    builder.add_document([ids["d"]], [1])
    builder.finalize(str(tmp_path / "ids.idx"))
    words = flags(saved, tmp_path / "c.npy")
    words[words.index("--input") + 1] = str(tmp_path / "ids")
    run_ranks(embed, 1, words)
    a, b, c = (np.load(tmp_path / f"{name}.npy") for name in "abc")
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(a[[0, 2]], c, rtol=1e-5, atol=1e-6)


def stopped(rank: int, world_size: int, words: list[str]) -> None:
    """A run that ends after its first batch, and one that goes on and computes the rest."""
    calls: list[int] = []
    compute = embedding.embed

    def once(rows: list[list[int]], embedder: embedding.Embedder) -> torch.Tensor:
        calls.append(len(rows))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compute(rows, embedder)

    embedding.embed = once
    with pytest.raises(KeyboardInterrupt):
        embed(0, 1, words)
    assert calls == [2, 2]
    embedding.embed = compute


def test_an_interrupted_run_goes_on(saved: Path, tmp_path: Path) -> None:
    run_ranks(embed, 1, flags(saved, tmp_path / "a.npy"))
    words = flags(saved, tmp_path / "b.npy", "--micro-batch-size", "2")
    run_ranks(stopped, 1, words)
    part = np.load(tmp_path / "b.npy.part", mmap_mode="r+")
    part[0] = 7  # what is done is not computed again
    part.flush()
    run_ranks(embed, 1, words)
    a, b = np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy")
    assert (b[0] == 7).all()
    np.testing.assert_allclose(a[1:], b[1:], rtol=1e-5, atol=1e-6)


def test_a_folder_of_hugging_face(tmp_path: Path, saved: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=len(VOCAB), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    model.save_pretrained(tmp_path / "hf")
    tokenizer = transformers.BertTokenizerFast(vocab={t: i for i, t in enumerate(VOCAB)})
    tokenizer.save_pretrained(tmp_path / "hf")
    words = flags(saved, tmp_path / "a.npy", "--bert-embedder-type", "huggingface")
    words[words.index("--load") + 1] = str(tmp_path / "hf")
    bert_embedding.main([*words, "--device", "cpu"])
    vectors = np.load(tmp_path / "a.npy")
    for i in (0, 2, 4):
        with torch.no_grad():
            hidden = model(**tokenizer(TEXTS[i], return_tensors="pt")).last_hidden_state[0]
        np.testing.assert_allclose(vectors[i], hidden[1:-1].mean(0), rtol=1e-5, atol=1e-6)


def test_a_bert_that_came_from_hugging_face_embeds_as_there(tmp_path: Path, saved: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=len(VOCAB), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    transformers.BertModel(config).eval().save_pretrained(tmp_path / "bare")
    words = flags(saved, tmp_path / "no.npy", "--bert-embedder-type", "huggingface")
    words[words.index("--load") + 1] = str(tmp_path / "bare")
    with pytest.raises(ConfigError, match="no tokenizer is beside the model"):
        bert_embedding.main([*words, "--device", "cpu"])
    fast = transformers.BertTokenizerFast(vocab={t: i for i, t in enumerate(VOCAB)})
    for name in ("tokenizer.json", "vocab.txt"):  # either alone is enough
        folder = tmp_path / name
        shutil.copytree(tmp_path / "bare", folder)
        if name == "tokenizer.json":
            fast.save_pretrained(folder)
        else:
            shutil.copy(saved / name, folder)
        convert_main(["--from", str(folder), "--to", str(folder / "ours")])
        for kind, load in (("huggingface", folder), ("megatron", folder / "ours")):
            words = flags(saved, tmp_path / f"{kind}.npy", "--bert-embedder-type", kind)
            words[words.index("--load") + 1] = str(load)
            run_ranks(embed, 1, words)
        theirs, ours = (np.load(tmp_path / f"{kind}.npy") for kind in ("huggingface", "megatron"))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
        for kind in ("huggingface", "megatron"):
            (tmp_path / f"{kind}.npy").unlink()


def write_text(rank: int, world_size: int, load: str) -> None:
    generation.open_writer(load, device_kind="cpu")


def test_bert_writes_no_text(saved: Path) -> None:
    with pytest.raises(AssertionError, match="holds a BERT, which writes no text"):
        run_ranks(write_text, 1, str(saved / "ck"))


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path, saved: Path) -> None:
    run_gpt(tmp_path, "--train-iters", "1", "--eval-iters", "0", "--save", str(tmp_path / "ck"))
    with pytest.raises(AssertionError, match="holds a gpt: give one of BERT"):
        run_ranks(embed, 1, flags(tmp_path, tmp_path / "a.npy", "--input", str(saved)))
    with pytest.raises(ConfigError, match="--micro-batch-size 0"):
        bert_embedding.main(flags(saved, tmp_path / "a.npy", "--micro-batch-size", "0"))
