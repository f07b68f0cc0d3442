"""pretrain_bert.py from text to a checkpoint: it learns, it goes on in another layout."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.training.preprocess.documents import RecordFormat
from megatron.training.preprocess.run import PreprocessOptions, preprocess
from megatron.training.preprocess.train import TrainingOptions, train_wordpiece
from megatron.training.tokenizer.library import _BertWordPieceTokenizer
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, losses, refusal, run_gpt
from tests.support.tokenizer_files import CORPUS

BERT = [*TINY, "--model-kind", "bert"]


@pytest.mark.feature("BERT: pretrain_bert.py learns hidden words and the order of sentences")
def test_made_up_data_are_learned(tmp_path: Path) -> None:
    flags = "--train-iters 40 --lr 1e-2 --micro-batch-size 16 --global-batch-size 16".split()
    metrics = run_gpt(tmp_path, *flags, base=BERT)
    assert sum(losses(metrics)[-5:]) / 5 < math.log(97) - 0.3  # a guess among the ids of text
    assert len(losses(metrics, "sop loss")) == 40
    plain = run_gpt(tmp_path / "plain", "--bert-no-binary-head", base=BERT)
    assert losses(plain, "sop loss") == []


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that name word pieces of the golden corpus, and its sentences in their ids."""
    folder = tmp_path_factory.mktemp("text")
    record_format = RecordFormat()
    learn = TrainingOptions(
        input=str(CORPUS),
        output_dir=str(folder),
        record_format=record_format,
        vocab_size=500,
        special_tokens=(),
    )
    (vocab,) = train_wordpiece(learn, lower_case=True)
    options = PreprocessOptions(
        input=str(CORPUS),
        output_prefix=str(folder / "corpus"),
        record_format=record_format,
        split_sentences=True,
        workers=1,
    )
    preprocess(options, _BertWordPieceTokenizer(vocab, True))
    tokenizer = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocab]
    return [*tokenizer, "--data-path", str(folder / "corpus_text_sentence"), "--split", "90,10,0"]


def test_text_is_learned_and_goes_on_in_another_layout(tmp_path: Path, text: list[str]) -> None:
    drop = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100")
    base = [word for word in BERT if word not in drop] + text
    base += "--train-iters 8 --lr 5e-3 --eval-interval 4 --num-layers 2".split()
    cache, saves = str(tmp_path / "cache"), str(tmp_path / "ck")
    base += ["--data-cache-path", cache]
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --save-interval 4".split()
    straight = run_gpt(tmp_path / "a", *layout, "--save", saves, base=base, world_size=2)
    assert losses(straight)[-1] < losses(straight)[0]
    names = {path.name[33:] for path in Path(cache).iterdir()}
    ends = ("crc.json", "description.txt", "sample_index.npy")
    assert names == {f"BERTMaskedWordPieceDataset-{end}" for end in ends}
    with CheckpointReader(Path(saves) / "iter_0000008") as reader:
        assert {
            "embedding.tokentype_embeddings.weight",
            "lm_head.dense.weight",
            "output_layer.bias",
            "pooler.dense.bias",
            "binary_head.weight",
        } <= set(reader.tensors)
    again = ["--load", saves, "--ckpt-step", "4", "--pipeline-model-parallel-size", "2"]
    resumed = run_gpt(tmp_path / "b", *again, base=base, world_size=2)
    assert len(losses(resumed)) == 4
    for key in ("lm loss", "sop loss"):
        assert losses(resumed, key) == pytest.approx(losses(straight, key)[4:], rel=1e-5)


def test_sequences_are_not_divided() -> None:
    (said,) = run_ranks(refusal, 1, [*BERT, "--context-parallel-size", "2"])
    assert "--context-parallel-size 2 with BERT: BERT does not support context parallelism" in said
