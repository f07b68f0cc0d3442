"""Runs of pretrain_vlm.py on tar shards of conversations with images."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.config.errors import DataError
from megatron.core.datasets.tar_shards import TarSample
from megatron.training.data.energon import content_of as of_energon
from megatron.training.tokenizer.multimodal_tokenizer import qwen2p0_custom_template
from tests.support import selection, tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, losses, refusal, run_gpt
from tests.support.tokenizer_files import write_bpe

Image = pytest.importorskip("PIL.Image")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

_REPLACED = {"--mock-data": 1, "--tokenizer-type": 2, "--vocab-size": 2}
FLAGS = (
    "--model-kind vlm --vision-num-layers 1 --dataloader-seq-length 24 --img-h 12 --img-w 12 "
    "--patch-dim 6 --use-tiling --max-num-tiles 2 --use-thumbnail --train-iters 4 --seed 5 "
    "--tokenizer-type MultimodalTokenizer --tokenizer-prompt-format qwen2p0 --split 90,10,0"
).split()


def base_flags() -> list[str]:
    """TINY without mock data and its tokenizer."""
    words = list(TINY)
    for flag, length in _REPLACED.items():
        at = words.index(flag)
        del words[at : at + length]
    return words


def picture(width: int, height: int, seed: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_shard(path: Path, *, broken: bool, first: int = 0) -> None:
    """Conversations with one image of one or three tiles, each fifth without an image."""
    with tarfile.open(path, "w") as tar:
        for n in range(first, first + 30):
            files = {"txt": f"the number is {n}".encode()}
            if n % 5:
                files["png"] = picture(12 if n % 2 else 30, 12, n)
            if broken and n == 7:
                files["png"] = files["png"][:50]
            for suffix, data in files.items():
                member = tarfile.TarInfo(f"{n:03}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags with a tokenizer and a shard, one of whose samples is broken."""
    folder = tmp_path_factory.mktemp("data")
    rules = tokenizers.Tokenizer.from_file(str(write_bpe(folder) / "tokenizer.json"))
    rules.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    wrapper = transformers.PreTrainedTokenizerFast(
        tokenizer_object=rules,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=qwen2p0_custom_template,
    )
    wrapper.save_pretrained(folder / "tokenizer")
    write_shard(folder / "train.tar", broken=True)
    data = ["--data-path", str(folder / "train.tar"), "--data-cache-path", str(folder / "cache")]
    return [*FLAGS, *data, "--tokenizer-model", str(folder / "tokenizer")]


@pytest.fixture(scope="module")
def whole(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run in one process."""
    return losses(run_gpt(tmp_path_factory.mktemp("whole"), *flags, base=base_flags()))


def same(found: list[float], wanted: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), **tolerances.LAYOUT_LOSS)


@pytest.mark.feature("Vision: pretrain_vlm.py trains on images and text in webdataset tar shards")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    selection.first(
        1,
        [
            (4, "--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel"),
            (2, "--use-distributed-optimizer"),
            (2, "--pipeline-model-parallel-size 2"),
        ],
    ),
)
def test_every_layout_has_the_losses_of_one_process(
    tmp_path: Path, flags: list[str], whole: list[float], ranks: int, layout: str
) -> None:
    found = run_gpt(tmp_path, *flags, *layout.split(), base=base_flags(), world_size=ranks)
    same(losses(found), whole)


def test_a_run_goes_on_with_another_number_of_data_parallel_ranks(
    tmp_path: Path, flags: list[str], whole: list[float]
) -> None:
    saved = str(tmp_path / "ck")
    stop = ["--exit-interval", "2", "--save", saved]
    first = run_gpt(tmp_path / "a", *flags, *stop, base=base_flags())
    rest = run_gpt(tmp_path / "b", *flags, "--load", saved, base=base_flags(), world_size=4)
    same(losses(first) + losses(rest), whole)


def test_tile_tags_are_text(tmp_path: Path, flags: list[str]) -> None:
    given = [*flags, "--use-tile-tags", "--dataloader-seq-length", "60"]
    assert len(losses(run_gpt(tmp_path, *given, base=base_flags()))) == 4


def test_broken_samples_may_end_the_run(flags: list[str]) -> None:
    given = [*base_flags(), *flags, "--broken-samples", "fail"]
    (said,) = run_ranks(refusal, 1, given)
    assert "train.tar, sample 007, image 0: no image that can be decoded" in said


def test_a_text_tokenizer_is_refused(flags: list[str]) -> None:
    given = [*TINY, *flags[:-2], "--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]
    given.remove("--mock-data")
    (said,) = run_ranks(refusal, 1, given)
    assert "use --tokenizer-type MultimodalTokenizer" in said


@pytest.fixture(scope="module")
def energon(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a run on a prepared Energon dataset of captions, with a broken sample."""
    prepare = pytest.importorskip("megatron.energon.tools.prepare")
    folder = tmp_path_factory.mktemp("energon")
    for i in range(3):
        write_shard(folder / f"shard-{i}.tar", broken=i == 0, first=30 * i)
    words = "--non-interactive --split-ratio 2,1,0 --sample-type CrudeWebdataset --num-workers 1"
    prepare.command.main([str(folder), *words.split()], standalone_mode=False)
    at = flags.index("--data-path") + 1
    external = "--dataloader-type external --eval-iters 1".split()
    return [*flags[:at], str(folder), *flags[at + 1 :], *external]


@pytest.mark.feature("Data: Energon's datasets, whose position is restored exactly")
def test_a_run_on_energon_goes_on_with_the_next_sample(tmp_path: Path, energon: list[str]) -> None:
    given = energon
    whole = run_gpt(tmp_path / "whole", *given, base=base_flags(), world_size=2)
    states = ["--dataloader-save", str(tmp_path / "states"), "--save", str(tmp_path / "ck")]
    stop = [*states, "--exit-interval", "2"]
    first = run_gpt(tmp_path / "a", *given, *stop, base=base_flags(), world_size=2)
    again = [*given, *states, "--load", str(tmp_path / "ck")]
    rest = run_gpt(tmp_path / "b", *again, base=base_flags(), world_size=2)
    assert losses(first) + losses(rest) == losses(whole)
    assert len(set(losses(whole))) == 4
    shutil.rmtree(tmp_path / "states")
    (said,) = run_ranks(refusal, 1, [*base_flags(), *again])
    assert "--dataloader-save has no " in said


def test_every_sample_type_of_energon_has_a_text_and_an_image() -> None:
    energon = pytest.importorskip("megatron.energon")
    data = picture(12, 12, 0)
    keys = {"__key__": "s", "__restore_key__": ()}
    caption = energon.CaptioningSample(**keys, image=data, caption="a dog")
    assert of_energon(caption) == TarSample("s", [data], text=b"a dog")
    asked = energon.VQASample(**keys, image=data, context="what?", answers=["a dog", "a cat"])
    turns = json.loads(of_energon(asked).json or b"")["conversations"]
    assert [turn["value"] for turn in turns] == ["<image>\nwhat?", "a dog"]
    with pytest.raises(DataError, match="is a TextSample of Energon"):
        of_energon(energon.TextSample(**keys, text="a dog"))
