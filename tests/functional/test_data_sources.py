"""Training runs on several data sources: short sets without weights, text, sources in the log."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.dist_checkpointing import CheckpointReader
from megatron.training.checkpointing.load import BLENDS
from tests.support.chat_templates import write_chat_tokenizer, write_conversations
from tests.support.dataset_files import numbered, write
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, heard, losses, refusal, run_gpt

ON_FILES = [flag for flag in TINY if flag != "--mock-data"]


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two sources of 20 and 10 samples of 32 tokens; the token ids of the second are higher."""
    folder = tmp_path_factory.mktemp("sources")
    low = [[token % 50 for token in document] for document in numbered([33] * 20)]
    high = [[50 + token % 50 for token in document] for document in numbered([33] * 10)]
    return [write(folder / "low", low), write(folder / "high", high)]


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
        (said,) = run_ranks(refusal, 1, argv)
        assert "has 30 samples and the run reads 48: paths without weights are read once" in said
        (said,) = run_ranks(refusal, 1, [*argv, "--exit-interval", "5"])  # it may end earlier
        assert "the training data ended after 24 samples" in said


def by_source(log: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Return tag -> value at each step, of the tags of sources."""
    tags = [f"{label}/{name}" for label in ("lm loss", "tokens") for name in ("low", "high")]
    return {tag: [line.get(tag) for line in log if line["kind"] == "step"] for tag in tags}


class TestLossBySource:
    FLAGS = (
        "--split 100,0,0 --eval-iters 0 --log-loss-by-source --log-interval 2 --num-layers 4"
    ).split()

    @pytest.fixture(scope="class")
    def one_process(self, prefixes: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
        low, high = prefixes
        argv = ["--data-path", "3", low, "1", high, *self.FLAGS]
        return by_source(run_gpt(tmp_path_factory.mktemp("one"), *argv, base=ON_FILES))

    def test_it_is_the_mean_over_the_tokens_of_a_source(
        self, one_process: Any, prefixes: list[str], tmp_path: Path
    ) -> None:
        assert one_process["tokens/low"] == [None, 12 * 32, None, 24 * 32]
        assert one_process["tokens/high"] == [None, 4 * 32, None, 8 * 32]
        # A learning rate of 0: the loss of each source alone is its loss in the blend.
        still = ["--lr", "0", "--min-lr", "0", "--train-iters", "2", *self.FLAGS]
        low, high = prefixes
        blend = run_gpt(tmp_path / "ab", "--data-path", "1", low, "1", high, *still, base=ON_FILES)
        mean = blend[-1]["interval"]["lm loss"]
        losses = [blend[-1][f"lm loss/{name}"] for name in ("low", "high")]
        assert sum(losses) / 2 == pytest.approx(mean, rel=1e-5)
        assert abs(losses[0] - losses[1]) > 1e-4
        assert blend[-1]["interval"]["lm loss low"] == losses[0]

    @pytest.mark.parametrize(
        "layout",
        [
            "--tensor-model-parallel-size 2 --context-parallel-size 2 "
            "--make-vocab-size-divisible-by 64",
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        ],
    )
    def test_it_is_the_same_in_every_layout(
        self, one_process: Any, prefixes: list[str], tmp_path: Path, layout: str
    ) -> None:
        low, high = prefixes
        argv = ["--data-path", "3", low, "1", high, *self.FLAGS, *layout.split()]
        found = by_source(run_gpt(tmp_path, *argv, world_size=4, base=ON_FILES))
        for tag, values in one_process.items():
            assert found[tag] == [value and pytest.approx(value, rel=1e-4) for value in values]

    def test_a_resumed_run_continues_the_counts_in_new_phases(
        self, one_process: Any, prefixes: list[str], tmp_path: Path
    ) -> None:
        low, high = prefixes
        for name, content in (("0", f"3 {low} 1 {high}"), ("1", f"1 {high}")):
            (tmp_path / name).write_text(content)
        phases = ["--phase-transition-iterations", "2", "--phase-data-args-path"]
        argv = [*phases, str(tmp_path / "0"), str(tmp_path / "1"), *self.FLAGS]
        save = ["--save", str(tmp_path / "ck"), "--load", str(tmp_path / "ck")]
        run_gpt(tmp_path, *argv, *save, "--train-iters", "4", "--exit-interval", "3", base=ON_FILES)
        log = by_source(run_gpt(tmp_path, *argv, *save, base=ON_FILES))
        assert log["tokens/low"] == [None, 12 * 32, None, 12 * 32]
        assert log["tokens/high"] == [None, 4 * 32, None, 20 * 32]
        assert log["lm loss/low"][3] is None

    def test_rows_of_conversations_count_the_tokens_of_answers(self, tmp_path: Path) -> None:
        pytest.importorskip("jinja2")
        write_chat_tokenizer(tmp_path)
        paths = [str(write_conversations(tmp_path / f"{i}.jsonl", 20, seed=i)) for i in range(2)]
        flags = f"--sft --tokenizer-type SFTTokenizer --tokenizer-model {tmp_path} --log-interval 2"
        words = [*flags.split(), "--log-loss-by-source", "--eval-iters", "0", "--seq-length", "128"]
        base = [
            flag for flag in ON_FILES if flag not in ("--no-create-attention-mask-in-dataloader")
        ]
        argv = [
            "--max-position-embeddings",
            "128",
            "--train-data-path",
            "1",
            paths[0],
            "1",
            paths[1],
        ]
        (line,) = run_gpt(tmp_path, *words, *argv, "--train-iters", "2", base=base)[-1:]
        counts = [line["tokens/0.jsonl"], line["tokens/1.jsonl"]]
        losses = [line["lm loss/0.jsonl"], line["lm loss/1.jsonl"]]
        assert min(counts) > 0
        mean = sum(map(operator.mul, counts, losses)) / sum(counts)
        assert mean == pytest.approx(line["interval"]["lm loss"], rel=0.02)


class TestChangedBlends:
    def test_a_resume_with_other_weights_says_what_changes_in_the_stream(
        self, prefixes: list[str], tmp_path: Path
    ) -> None:
        low, high = prefixes
        save = ["--save", str(tmp_path / "ck"), "--load", str(tmp_path / "ck"), "--eval-iters", "0"]
        first = ["--data-path", "3", low, "1", high, "--exit-interval", "2"]
        run_ranks(heard, 1, [*ON_FILES, *first, *save])
        again = ["--data-path", "1", low, "1", high, "--exit-interval", "3"]
        ((said, complaint),) = run_ranks(heard, 1, [*ON_FILES, *again, *save])
        assert complaint == ""
        text = "\n".join(said)
        assert "after 16 samples (iteration 2); sample 16 is the next one, of the new blend" in text
        assert (
            f"{low}: 75 % -> 50 %, continues at about its sample 8; 12 were read, 4 are repeated"
            in text
        )
        assert f"{high}: 25 % -> 50 %, continues at about its sample 8; 4 were read, 4 are" in text
        with CheckpointReader(tmp_path / "ck" / "iter_0000003") as reader:
            history = reader.common()["args"][BLENDS]
        assert [entry["iteration"] for entry in history] == [0, 2]
        assert history[1]["phases"] == [{"begins": 0, "shares": {low: 0.5, high: 0.5}}]
        ((said, _),) = run_ranks(heard, 1, [*ON_FILES, *again, *save, "--exit-interval", "4"])
        assert "blend of the training data" not in "\n".join(said)


@pytest.mark.feature("Data: text gives the same samples at any number of ranks and after a kill")
def test_text_gives_one_stream_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    text = tmp_path / "some text.jsonl"
    documents = [random.integers(0, 100, random.integers(5, 60)).tolist() for _ in range(200)]
    lines = (json.dumps({"text": " ".join(map(str, document))}) for document in documents)
    text.write_text("\n".join(lines))
    flags = ["--data-path", str(text), "--data-cache-path", str(tmp_path / "cache")]
    flags += ["--eval-iters", "0", "--save", str(tmp_path / "ck"), "--save-interval", "2"]
    (said,) = run_ranks(refusal, 1, [*ON_FILES, *flags[:4]])
    assert "no shard with the tokens of one sample between 0.999 and 1 of its documents" in said
    monkeypatch.setenv("FAULTS", "step.updated:kill:step4")
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_gpt(tmp_path, *flags, base=ON_FILES)
    monkeypatch.delenv("FAULTS")
    killed = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    load = ["--load", str(tmp_path / "ck")]
    rest = run_gpt(tmp_path / "two", *flags, *load, base=ON_FILES, world_size=2)
    whole = run_gpt(tmp_path / "four", *flags[:6], base=ON_FILES, world_size=4)
    assert losses(killed)[:2] + losses(rest) == pytest.approx(losses(whole), rel=1e-5)
    assert len(set(losses(whole))) == 4


def test_contexts_grow_in_every_layout(tmp_path: Path) -> None:
    documents = [[*(token % 100 for token in part), 100] for part in numbered([32] * 20)]
    flags = [
        "--data-path",
        write(tmp_path / "ended", documents),
        "--split",
        "1,0,0",
        "--eval-iters",
        "0",
    ]
    at = ON_FILES.index("--no-create-attention-mask-in-dataloader")
    base = [*ON_FILES[:at], *ON_FILES[at + 1 :], *flags]
    resets = ["--reset-attention-mask", "--reset-position-ids"]
    curriculum = [*resets, "--length-curriculum", "4", "24"]
    grown = losses(run_gpt(tmp_path / "a", *curriculum, base=base))
    layout = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64"
    layout += " --pipeline-model-parallel-size 2"
    split = run_gpt(tmp_path / "b", *curriculum, *layout.split(), base=base, world_size=4)
    assert losses(split) == pytest.approx(grown, rel=1e-4)
    assert losses(run_gpt(tmp_path / "c", *resets, base=base))[0] != grown[0]
    (said,) = run_ranks(refusal, 1, [*base, "--length-curriculum", "40", "24"])
    assert "--length-curriculum 40 24: give 1 to --seq-length tokens" in said
    assert "give --reset-attention-mask and --reset-position-ids" in said
