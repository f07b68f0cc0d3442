"""Runs of pretrain_retro.py: layouts, checkpoints that go on in another layout, the gate."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.retro.db import load_db
from megatron.core.datasets.retro.index import ChunkIndex
from megatron.core.datasets.retro.project import load_project
from megatron.training.arguments.input_files import take_retro_project
from megatron.training.arguments.parser import parse_args
from tests.support import tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import ANY_LENGTH, TINY, losses, run_gpt
from tools.retro import text_generation

FLAGS = (
    "--model-kind retro --retro-add-retriever --retro-chunk-length 8 --num-layers 9 --lr 1e-2 "
    "--retro-encoder-hidden-dropout 0 --retro-encoder-attention-dropout 0 --init-method-std 0.2"
).split()
BASE = [*TINY, *FLAGS]


def run(folder: Path, flags: str, ranks: int = 1) -> torch.Tensor:
    """Return the losses of a run."""
    seen = run_gpt(folder, *flags.split(), base=BASE, world_size=ranks, timeout_s=120)
    return torch.tensor(losses(seen))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, Path]:
    """Losses of four steps in one process, and a checkpoint after two of them."""
    folder = tmp_path_factory.mktemp("retro")
    saved = folder / "checkpoint"
    return run(folder / "whole", f"--save {saved} --save-interval 2"), saved


@pytest.mark.feature(
    "Training: pretrain_retro.py, its checkpoints go on with tensor, sequence, pipeline and data "
    "parallelism"
)
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", 2),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*6|t*3L", 4),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
            "--pipeline-model-parallel-layout Et*2|t*3|t*2|t*2L",
            4,
        ),
    ],
)
def test_a_layout_goes_on_as_one_process(
    tmp_path: Path, whole: tuple[torch.Tensor, Path], flags: str, ranks: int
) -> None:
    wanted, saved = whole
    rest = run(tmp_path, f"--load {saved} --ckpt-step 2 {flags}", ranks)
    torch.testing.assert_close(rest, wanted[2:], **tolerances.LAYOUT_LOSS)


def written(rank: int, world_size: int, folder: str, *flags: str) -> str:
    """What tools/retro/text_generation.py prints for a prompt."""
    words = f"--load {folder} --temperature 0 --num-tokens 16 --device cpu".split()
    argv = ["text_generation.py", *words, "--prompt", "5 6 7 8 9 10 11 12 13", *flags]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(io.StringIO()) as said:
        text_generation.main()
    return said.getvalue().splitlines()[-1] if rank == 0 else ""


@pytest.mark.feature("Inference: tools/retro/text_generation.py continues a text with neighbors")
def test_a_checkpoint_writes_by_its_neighbors_in_any_layout(
    tmp_path: Path, whole: tuple[torch.Tensor, Path]
) -> None:
    _, saved = whole
    texts = {}
    for name, first in (("up", range(14, 40)), ("down", range(98, 60, -2))):
        passages = tmp_path / name
        passages.write_text(f"{' '.join(map(str, first))}\n{first[-1]}\nnot read\n")
        found = [run_ranks(written, n, str(saved), "--neighbors", str(passages))[0] for n in (1, 2)]
        assert found[0] == found[1]
        texts[name] = found[0]
    texts["none"] = run_ranks(written, 1, str(saved))[0]
    assert all(text.startswith("5 6 7 8 9 10 11 12 13") for text in texts.values())
    assert len({*texts.values()}) == 3


@pytest.mark.feature(
    "Training: --retro-attention-gate 0 equals GPT, --retro-cyclic-train-iters repeats samples"
)
def test_cyclic_training_reads_the_first_samples_again(tmp_path: Path) -> None:
    words = "--lr 0 --min-lr 0 --retro-cyclic-train-iters 2"
    cyclic = run(tmp_path / "cyclic", words)
    assert torch.equal(cyclic[:2], cyclic[2:])
    assert not torch.equal(cyclic[:1], cyclic[1:2])
    closed = run(tmp_path / "closed", f"{words} --retro-attention-gate 0")
    base = [word for word in BASE if word != "--retro-add-retriever"]
    plain = run_gpt(tmp_path / "plain", "--lr", "0", "--min-lr", "0", base=base)
    assert closed[:2].tolist() == losses(plain)[:2]
    assert not torch.equal(closed, cyclic)


def test_a_project_gives_data_and_settings(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    pytest.importorskip("faiss")
    data = importlib.import_module("tests.unit.datasets.test_retro")
    folder = tmp_path / "project"
    data.write_corpus(tmp_path / "corpora" / "data" / "a", 60, 1)
    settings = {"train_samples": 70, "global_batch_size": 7, "eval_interval": 9, "eval_iters": 0}
    settings = {f"retro_gpt_{name}": value for name, value in settings.items()}
    config = data.project(tmp_path / "corpora", folder, retro_gpt_data_path=("a",), **settings)
    data.preprocess(config)
    base = [word for word in (*ANY_LENGTH, *FLAGS) if word != "--mock-data"]
    at = base.index("--retro-chunk-length")
    del base[at : at + 2]
    base += f"--vocab-size {data.VOCAB} --micro-batch-size 1 --retro-project-dir {folder}".split()
    with pytest.raises(ConfigError) as refused:
        take_retro_project(parse_args(argv=[*base, "--train-iters", "3"]))
    differ = "--seq-length 32", "--global-batch-size 8", "--eval-interval 1000", "--train-iters 3"
    for flag in differ:
        assert f"{flag}: the neighbors in {folder} were looked up for" in str(refused.value)
    given = "--seq-length 12 --global-batch-size 7 --eval-interval 9 --eval-iters 0".split()
    whole = run_gpt(tmp_path / "one", *given, base=base)
    assert len(losses(whole)) == 10
    shared = run_gpt(
        tmp_path / "two", *given, "--tensor-model-parallel-size", "2", base=base, world_size=2
    )
    found, wanted = torch.tensor(losses(shared)), torch.tensor(losses(whole))
    torch.testing.assert_close(found, wanted, **tolerances.LAYOUT_LOSS)
    index = ChunkIndex(load_project(str(folder)), data.TOKENIZER, data.embed)
    database = load_db(index.config, "train", data.VOCAB)
    neighbors = text_generation.look_up(index, 2, 2, database[5]["text"].tolist())
    assert neighbors[0] == database.with_continuation(5, 2)[1].tolist()
    assert len(neighbors) == 2
