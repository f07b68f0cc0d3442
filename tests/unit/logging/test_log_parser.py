"""The parser reads what Megatron-LM wrote, and what we write, back to the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.callbacks.sinks import FORMATS, EvalRecord, training_line, validation_block
from tests.support.log_parser import (
    TrainingLine,
    ValidationLine,
    parse_log,
    parse_training_line,
    parse_validation_line,
)

GOLDEN = Path(__file__).parents[2] / "golden"


def test_lines_of_the_reference_are_read() -> None:
    parsed = list(parse_log((GOLDEN / "gpt_torch.losses").read_text().splitlines()))
    steps = [line for line in parsed if isinstance(line, TrainingLine)]
    assert [step.iteration for step in steps] == list(range(1, 11))
    assert steps[0].train_iters == 10
    assert steps[0].values == {
        "consumed samples": 8,
        "learning rate": 5e-4,
        "global batch size": 8,
        "lm loss": 6.232583,
        "loss scale": 1.0,
        "grad norm": 0.963,
        "num zeros": 0.0,
        "params norm": 13.195,
        "number of skipped iterations": 0,
        "number of nan iterations": 0,
    }
    evals = [line for line in parsed if isinstance(line, ValidationLine)]
    assert [(e.split, e.is_final) for e in evals] == [
        ("validation", False),
        ("validation", True),
        ("test", True),
    ]
    assert evals[2].losses == {"lm loss": 6.118786}
    assert evals[2].perplexities == {"lm loss": 454.3130}


@pytest.mark.feature("Logging: Megatron-LM's training and validation lines, to the letter")
def test_our_formats_give_the_reference_lines_to_the_letter() -> None:
    for line in (GOLDEN / "gpt_torch.losses").read_text().splitlines():
        if step := parse_training_line(line):
            whole = {label for label, fmt in FORMATS.items() if fmt.endswith("d")}
            values = {k: int(v) if k in whole else v for k, v in step.values.items()}
            assert training_line(step.iteration, step.train_iters, values) == f" {line}"
        elif found := parse_validation_line(line):
            record = EvalRecord(
                iteration=found.iteration,
                consumed_samples=80,
                losses=found.losses,
                split=found.split,
                suffix=found.suffix,
                is_final=found.is_final,
            )
            ours = validation_block(record).splitlines()
            assert ours[0] == ours[2] == "-" * (len(ours[1]) + 1)
            assert ours[1].split(" PPL")[0] == f" {line}".split(" PPL")[0]


def test_every_field_survives_printing_and_parsing() -> None:
    values = {
        "consumed samples": 640,
        "skipped samples": 32,
        "elapsed time per iteration (ms)": 812.4,
        "throughput per GPU (TFLOP/s/GPU)": 41.7,
        "energy per GPU (J/iter/GPU)": 350.2,
        "power per GPU (W/GPU)": 431.0,
        "learning rate": 1.25e-4,
        "decoupled learning rate": 5e-5,
        "global batch size": 32,
        "lm loss": 9.8712,
        "load_balancing_loss": 0.0,
        "z_loss": -1.5,
        "loss scale": 65536.0,
        "grad norm": 2.345,
        "num zeros": 1234.0,
        "params norm": 210.987,
        "number of skipped iterations": 1,
        "number of nan iterations": 0,
        "tokens/s": 40333.3,
        "MFU": 41.25,
    }
    line = f" [2031-04-05 06:07:08]{training_line(20, 400, values)}"
    assert line == (
        " [2031-04-05 06:07:08] iteration       20/     400 | consumed samples:          640 |"
        " skipped samples:           32 | elapsed time per iteration (ms): 812.4 |"
        " throughput per GPU (TFLOP/s/GPU): 41.7 | energy per GPU (J/iter/GPU): 350.2 |"
        " power per GPU (W/GPU): 431.0 | learning rate: 1.250000E-04 |"
        " decoupled learning rate: 5.000000E-05 | global batch size:    32 |"
        " lm loss: 9.871200E+00 | load_balancing_loss: 0.000000E+00 | z_loss: -1.500000E+00 |"
        " loss scale: 65536.0 | grad norm: 2.345 | num zeros: 1234.0 | params norm: 210.987 |"
        " number of skipped iterations:   1 | number of nan iterations:   0 |"
        " tokens/s: 40333.3 | MFU: 41.25 % |"
    )
    parsed = parse_training_line(line)
    assert parsed == TrainingLine(
        iteration=20, train_iters=400, time="2031-04-05 06:07:08", values=values
    )


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 0.0, -2.0])
def test_a_loss_that_is_not_positive_is_shown(loss: float) -> None:
    parsed = parse_training_line(training_line(1, 2, {"lm loss": loss}))
    assert parsed is not None
    assert parsed.values["lm loss"] == pytest.approx(loss, nan_ok=True)


def test_other_lines_are_skipped_and_a_launchers_prefix_is_not_minded() -> None:
    lines = [
        "(min, max) time across ranks (ms):",
        "[rank3]: iteration        7/      10 | lm loss: 1.000000E+00 |",
        " validation-1 loss at iteration 7 | lm loss value: 2.0E+00 | lm loss PPL: 7.4E+00 | ",
        "",
    ]
    step, evaluation = parse_log(lines)
    assert isinstance(step, TrainingLine)
    assert step.iteration == 7
    assert isinstance(evaluation, ValidationLine)
    assert evaluation.suffix == "-1"
