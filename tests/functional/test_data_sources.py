"""Training runs on several data sources: short sets without weights, text, sources in the log."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from tests.support.dataset_files import numbered, write
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, run_gpt, train_gpt

ON_FILES = [flag for flag in TINY if flag != "--mock-data"]


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two sources of 20 and 10 samples of 32 tokens; the token ids of the second are higher."""
    folder = tmp_path_factory.mktemp("sources")
    low = [[token % 50 for token in document] for document in numbered([33] * 20)]
    high = [[50 + token % 50 for token in document] for document in numbered([33] * 10)]
    return [write(folder / "low", low), write(folder / "high", high)]


def refused(rank: int, world_size: int, argv: list[str]) -> str:
    """Return the error message of a run that must fail."""
    with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit):
        train_gpt(rank, world_size, argv)
    return said.getvalue()


class TestSetsWithoutWeights:
    def test_an_evaluation_repeats_a_short_set(self, prefixes: list[str], tmp_path: Path) -> None:
        flags = ["--train-iters", "1", "--eval-iters", "2", "--split", "80,20,0"]
        log = run_gpt(tmp_path, "--data-path", *prefixes, *flags, base=ON_FILES)
        (valid,) = [line for line in log if line["kind"] == "validation"]
        once = run_gpt(
            tmp_path / "once", "--data-path", *prefixes, *flags, "--full-validation", base=ON_FILES
        )
        # The set has 6 samples.  An evaluation reads 16: all of them twice, and 4 a third time.
        (wanted,) = [line for line in once if line["kind"] == "validation"]
        key = "lm loss validation"
        assert valid[key] == pytest.approx(wanted[key], rel=0.05)

    def test_training_data_that_ends_before_the_run_is_refused(self, prefixes: list[str]) -> None:
        flags = ["--train-iters", "6", "--eval-iters", "0", "--split", "1,0,0"]
        argv = [*ON_FILES, "--data-path", *prefixes, *flags]
        (said,) = run_ranks(refused, 1, argv)
        assert "has 30 samples and the run reads 48: paths without weights are read once" in said
        (said,) = run_ranks(refused, 1, [*argv, "--exit-interval", "5"])  # it may end earlier
        assert "the training data ended after 24 samples" in said
