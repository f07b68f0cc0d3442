"""Training on token files through the real command line: naming them, what they must hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import TINY, losses, refusal, run_gpt

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "data"
FLAGS = [flag for flag in TINY if flag != "--mock-data"]
FLAGS[FLAGS.index("NullTokenizer") : FLAGS.index("--vocab-size") + 2] = [
    "GPTSentencePieceTokenizer",
    "--tokenizer-model",
    str(GOLDEN / "spm.model"),
]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """The reference's token files where an index cache may be written."""
    for suffix in ("bin", "idx"):
        (tmp_path / f"text.{suffix}").symlink_to(GOLDEN / f"text_text_document.{suffix}")
    return str(tmp_path / "text")


def test_one_file_named_once_or_as_a_blend_of_itself_trains(tmp_path: Path, prefix: str) -> None:
    flags = ["--split", "90,5,5"]
    once = losses(run_gpt(tmp_path, *flags, "--data-path", prefix, base=FLAGS))
    assert once[-1] < once[0]
    blend = ["--data-path", "0.3", prefix, "0.7", prefix]
    assert len(losses(run_gpt(tmp_path, *flags, *blend, base=FLAGS))) == len(once)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "no data is named: give --data-path"),
        (["--data-path", "PREFIX", "--split", "0,100,0"], "--split 0,100,0 leaves nothing"),
        (["--data-path", "PREFIX", "--dataloader-type", "external"], "use single or cyclic"),
        (["--valid-data-path", "PREFIX"], "the data of each split leaves nothing to train on"),
    ],
)
def test_a_run_without_training_data_says_so(prefix: str, flags: list[str], sentence: str) -> None:
    argv = [*FLAGS, *(prefix if flag == "PREFIX" else flag for flag in flags)]
    (said,) = run_ranks(refusal, 1, argv)
    assert sentence in said
    assert "Traceback" not in said
