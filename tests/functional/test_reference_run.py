"""A run that the reference began goes on here and prints what the reference printed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import host_gpu, selection
from tests.support.log_parser import TrainingLine, ValidationLine, parse_log
from tests.support.ranks import run_ranks
from tests.support.reference_checkpoints import unpack
from tests.support.runs import train_gpt

GOLDEN = Path(__file__).resolve().parent.parent / "golden"

# The reference's command line, word for word, but for the files.
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 10 "
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 "
    "--adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.02 --seed 1234 "
    "--hidden-dropout 0 --attention-dropout 0 --make-vocab-size-divisible-by 64 --split 90,5,5 "
    "--tokenizer-type GPTSentencePieceTokenizer --log-interval 1 --eval-iters 2 "
    "--eval-interval 10 --save-interval 5 --log-params-norm --log-num-zeros-in-grad "
    "--use-cpu-initialization --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion "
    "--no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--attention-softmax-in-fp32 --attention-backend unfused --distributed-backend gloo "
    "--num-workers 0 --no-create-attention-mask-in-dataloader"
).split()
OURS = ["--device", "cpu", "--pad-vocab-in-loss"]
if host_gpu.is_asked():  # gloo sends no tensors of a GPU from stage to stage
    OURS += ["--distributed-backend", "nccl"]
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
RUNS = [
    ("gpt_torch_dist", 1, ""),
    ("gpt_torch_dist", 2, "--overlap-grad-reduce"),
    ("gpt_torch_dist", 2, f"{TP} --sequence-parallel"),
    ("gpt_torch", 2, PP),
    ("gpt_torch", 4, f"{TP} --use-distributed-optimizer"),
    ("gpt_torch_tp2pp2_distopt", 1, ""),
    ("gpt_torch_tp2pp2_distopt", 4, f"{TP} {PP} --use-distributed-optimizer"),
]

# What a line says besides the time.  The last printed digit may be rounded the other way (the
# reference rounds the learning rate to fp32 before it prints it).  The bias of a key has no part in
# the softmax: its gradient is rounding noise of 1e-12, of which an entry may be 0 by chance.
PRINTED_DIGITS = {
    "consumed samples": 0.0,
    "learning rate": 1.1e-10,
    "global batch size": 0.0,
    "lm loss": 1.1e-6,
    "loss scale": 0.0,
    "grad norm": 1.1e-3,
    "num zeros": 2.0,
    "params norm": 1.1e-3,
    "number of skipped iterations": 0.0,
    "number of nan iterations": 0.0,
}

Line = TrainingLine | ValidationLine


def go_on(rank: int, world_size: int, argv: Sequence[str]) -> str:
    """pretrain_gpt.py; what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train_gpt(rank, world_size, argv)
    return printed.getvalue()


def continued(folder: Path, name: str, *flags: str, world_size: int = 1) -> list[Line]:
    """The lines of a run that goes on from iteration 5, with the reference's data and flags."""
    for suffix in ("bin", "idx"):
        (folder / f"text_text_document.{suffix}").symlink_to(
            GOLDEN / "data" / f"text_text_document.{suffix}"
        )
    files = ["--data-path", str(folder / "text_text_document"), "--data-cache-path"]
    files += [str(folder / "cache"), "--tokenizer-model", str(GOLDEN / "data" / "spm.model")]
    argv = [*FLAGS, *files, *OURS, "--load", str(unpack(folder, name)), *flags]
    return list(parse_log(run_ranks(go_on, world_size, argv)[-1].splitlines()))


def expected(name: str) -> list[Line]:
    """What the reference printed after iteration 5."""
    printed = GOLDEN / ("gpt_torch.losses" if name == "gpt_torch_dist" else f"{name}.losses")
    return [line for line in parse_log(printed.read_text().splitlines()) if line.iteration > 5]


@pytest.mark.parametrize(("name", "world_size", "flags"), selection.only(RUNS[2::2], RUNS))
@pytest.mark.feature("Checkpoints: Megatron-LM's runs go on here, in any layout, with its numbers")
def test_it_goes_on_with_the_numbers_that_the_reference_printed(
    tmp_path: Path, name: str, world_size: int, flags: str
) -> None:
    ours = continued(tmp_path, name, *flags.split(), world_size=world_size)
    theirs = expected(name)
    training = [line for line in theirs if isinstance(line, TrainingLine)]
    assert len(training) == 5
    for here, there in zip(ours[:5], training, strict=True):
        assert isinstance(here, TrainingLine)
        assert here.iteration == there.iteration
        assert set(there.values) == set(PRINTED_DIGITS)
        for label, tolerance in PRINTED_DIGITS.items():
            assert here.values[label] == pytest.approx(there.values[label], abs=tolerance), label
    compare_evaluations(ours[5:], theirs[5:])


def compare_evaluations(ours: Sequence[Line], theirs: Sequence[Line]) -> None:
    """In the loop, on the validation set and on the test set.

    The reference reads on in the validation set where the pass before ended; here every pass
    reads the same samples, so that both passes print what its first one printed.
    """
    assert len(ours) == len(theirs) == 3
    first_pass, _, test = theirs
    for here, there in zip(ours, (first_pass, first_pass, test), strict=True):
        assert isinstance(here, ValidationLine)
        assert isinstance(there, ValidationLine)
        assert here.losses["lm loss"] == pytest.approx(there.losses["lm loss"], abs=1.1e-6)
        assert here.perplexities["lm loss"] == pytest.approx(
            there.perplexities["lm loss"], rel=2e-6
        )


def test_the_command_line_of_the_reference_s_checkpoint_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length")
    pairs = [FLAGS[FLAGS.index(flag) : FLAGS.index(flag) + 2] for flag in sizes]
    shorter = [word for word in FLAGS if not any(word == pair[0] for pair in pairs)]
    for _, value in pairs:
        shorter.remove(value)
    monkeypatch.setattr("tests.functional.test_reference_run.FLAGS", shorter)
    taken = "--use-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args"
    ours = continued(tmp_path, "gpt_torch", *taken.split())
    assert isinstance(ours[0], TrainingLine)
    assert ours[0].iteration == 6
    assert ours[0].values["lm loss"] == expected("gpt_torch")[0].values["lm loss"]
