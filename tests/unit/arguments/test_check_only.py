"""--check-only plans a run for any number of ranks, alone and without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import megatron.post_training  # noqa: F401  registers its objectives
from megatron.core.extensions.transformer_engine.engine import unsupported_reason
from megatron.training.arguments.input_files import vocabulary_of
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.planning.check import check_only
from tests.support.command_lines import argv


def report(words: str, without: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    lines: list[str] = []
    status = check_only(parse_args(argv=argv("--check-only " + words, without)), lines.append)
    return status, "\n".join(lines).splitlines()


@pytest.mark.feature("Command line: --check-only plans a run for any number of ranks")
def test_the_plan_shows_layout_memory_batches_and_warnings() -> None:
    status, lines = report(
        "--check-world-size 32 --tensor-model-parallel-size 2 --global-batch-size 128 --bf16 "
        "--use-mcore-models"
    )
    assert status == 0
    assert lines[0] == "this run can start on 32 ranks"
    assert "tensor                2      16  0 1" in lines
    assert "data                 16       2  0 2 4 6 8 10 12 14 ... 30" in lines
    assert "one replica           2      16  0 1" in lines
    assert (
        "batch: 128 samples a step = 16 replicas x 4 micro-batches x 2 samples; 4,096 tokens a step"
    ) in lines
    assert "memory of one rank of each pipeline stage, GiB (computed, tensors only):" in lines
    assert lines[-1].startswith("  - --use-mcore-models is without effect")


def test_a_plan_of_fine_tuning_counts_all_rows_of_a_micro_batch() -> None:
    status, lines = report(
        "--sft --check-world-size 8 --tensor-model-parallel-size 2 --context-parallel-size 2 "
        "--position-embedding-type rope"
    )
    assert (status, lines[0]) == (0, "this run can start on 8 ranks")


def test_every_conflict_is_printed_and_the_status_is_2() -> None:
    status, lines = report("--check-world-size 1024 --tensor-model-parallel-size 3 --bf16 --fp16")
    assert status == 2
    assert lines[0] == "this run cannot start:"
    assert len([line for line in lines if line.startswith("  - ")]) >= 3


def test_what_needs_transformer_engine_is_told_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is for another machine: what a flag requires is a warning, what it builds an error."""
    missing = "transformer_engine.pytorch is not installed"
    if unsupported_reason() != missing:
        pytest.skip("Transformer Engine is installed")
    status, lines = report("--require-transformer-engine --bf16")
    told = f"  - --require-transformer-engine: this machine cannot start it: {missing}"
    assert (status, lines[-1]) == (0, told)
    (tmp_path / "spec_of_te.py").write_text(_SPEC)
    monkeypatch.syspath_prepend(tmp_path)
    status, lines = report("--spec spec_of_te spec")
    sentence = f"a layer of Transformer Engine, of --spec or a script: {missing}; pip install"
    assert (status, len(lines)) == (2, 1)
    assert lines[0].startswith(sentence)


_SPEC = """
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

spec = get_gpt_layer_local_spec()
spec.submodules.mlp.submodules.linear_fc1 = TEColumnParallelLinear
"""


def test_a_rank_outside_the_world_is_refused() -> None:
    refused = report("--check-world-size 4 --check-rank 4")
    assert refused == (2, ["--check-rank 4: ranks are 0 to 3"])


@pytest.mark.feature("Command line: --check-device-memory-gib names the cheapest change that fits")
def test_a_run_that_does_not_fit_is_refused_with_the_cheapest_change() -> None:
    words = "--check-world-size 4 --num-layers 1 --hidden-size 1024 --check-device-memory-gib"
    status, lines = report(f"{words} 0.001")
    sentence = "this run does not fit --check-device-memory-gib 0.001: rank 0 needs "
    assert status == 2
    assert lines[0].startswith(sentence), "the verdict is the first line, and there is one"
    assert not any("can start" in line for line in lines)
    assert "no single change is enough:" in lines
    peak = float(lines[0].removeprefix(sentence).split()[0])
    # The optimizer's state is a third of it and more, so its division is what helps first.
    status, lines = report(f"{words} {0.9 * peak}")
    assert status == 2
    assert lines[-1].startswith("cheapest change: --use-distributed-optimizer, ")
    status, lines = report(f"{words} {1.1 * peak}")
    assert (status, lines[0]) == (0, "this run can start on 4 ranks")
    assert lines[1].endswith(f"GiB and fits --check-device-memory-gib {1.1 * peak:g}")


def test_without_the_memory_of_a_device_the_verdict_asks_for_it() -> None:
    status, lines = report("")
    assert status == 0
    assert lines[1].startswith("memory: rank 0 needs ")
    assert lines[1].endswith("give --check-device-memory-gib to compare it with a device")


def test_tokens_on_their_way_to_experts_are_planned() -> None:
    """Each layer, in forward and in backward: rows go there and back, weights go there."""
    words = "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    _, lines = report(f"{words} --check-world-size 2 --micro-batch-size 1 --global-batch-size 2")
    (place,) = (i for i, line in enumerate(lines) if line.startswith("stage") and "ep" in line)
    operations = lines[place + 1].split("(")[1 + lines[place].split()[1:].index("ep")]
    assert operations.startswith(f"{4 * 6})")


def test_the_world_of_the_launcher_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert report("")[1][0] == "this run can start on 4 ranks"
    assert report("--check-world-size 2")[1][0] == "this run can start on 2 ranks"


def test_an_unknown_vocabulary_is_said_to_be_left_out() -> None:
    _, lines = report(
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model x", without=("--vocab-size",)
    )
    assert any("vocabulary is not counted" in line for line in lines)
    told = "  - vocabulary: the files of its tokenizer are not on this machine"
    assert told in lines


@pytest.mark.feature("Command line: --check-only counts the vocabulary of the tokenizer's files")
def test_the_vocabulary_is_that_of_the_tokenizer_files(tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]))
    words = "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1 "
    words += "--tokenizer-type BertWordPieceLowerCase --vocab-file"
    config = parse_args(argv=argv(f"{words} {file}", ("--vocab-size",)))
    size = vocabulary_of(resolve(config, 1).tokenizer).size
    assert size is not None
    assert size >= 8
    _, lines = report(f"{words} {file}", without=("--vocab-size",))
    _, given = report(f"--vocab-size {size} {words} {file}", without=("--vocab-size",))
    assert lines == given
    assert not any("vocabulary" in line for line in lines)
    _, without_file = report(f"{words} nowhere.txt", without=("--vocab-size",))
    told = "the 30,522 tokens of BertWordPieceLowerCase are assumed"
    assert any(told in line for line in without_file)
    assert "  - --vocab-file nowhere.txt: no such file or folder on this machine" in without_file


@pytest.mark.parametrize(("conflict", "status"), [("", 0), ("--bf16 --fp16", 2)])
def test_missing_files_are_reported_beside_everything_else(conflict: str, status: int) -> None:
    """The machine of the run may have them, so that they do not change the status."""
    found, lines = report(
        f"{conflict} --vocab-file v.json --merge-file m.txt --data-path 0.3 a 0.7 b",
        without=("--mock-data",),
    )
    assert found == status
    for told in (
        "--vocab-file v.json: no such file or folder on this machine",
        "--merge-file m.txt: no such file or folder on this machine",
        "--data-path a: not on this machine: a.idx, a.bin",
        "--data-path b: not on this machine: b.idx, b.bin",
    ):
        assert f"  - {told}" in lines


def test_text_is_no_prefix(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    paths = f"{tmp_path}/a.jsonl {tmp_path}/*.jsonl {tmp_path}/b.jsonl"
    _, lines = report(f"--data-path {paths}", without=("--mock-data",))
    missing = [line for line in lines if "machine" in line]
    assert missing == [f"  - --data-path {tmp_path}/b.jsonl: not on this machine: such text"]
