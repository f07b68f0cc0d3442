"""Validation blocks."""

from __future__ import annotations

import math

import pytest

from megatron.training.callbacks.sinks import EvalRecord, validation_block


def _record(**changes: object) -> EvalRecord:
    fields = {
        "iteration": 100,
        "consumed_samples": 800,
        "losses": {"lm loss": 7.12},
        "split": "validation",
        "suffix": "",
        "is_final": False,
    }
    return EvalRecord(**(fields | changes))  # type: ignore[arg-type]


def test_a_validation_block_has_loss_and_perplexity_between_rules() -> None:
    rule = "-" * 95
    assert validation_block(_record()) == (
        f"{rule}\n validation loss at iteration 100 | lm loss value: 7.120000E+00 | "
        f"lm loss PPL: 1.236450E+03 | \n{rule}"
    )


def test_only_the_loss_of_a_language_model_has_a_perplexity() -> None:
    losses = {"lm loss": 7.12, "reward accuracy": 0.5}
    record = _record(losses=losses)
    assert list(record.perplexities) == ["lm loss"]
    assert "PPL" not in validation_block(_record(losses={"reward": 0.5, "accuracy": 0.5}))
    text = validation_block(record)
    assert "lm loss PPL: 1.236450E+03 | reward accuracy value: 5.000000E-01 | \n" in text


def test_the_last_evaluations_name_their_set_and_several_sets_their_number() -> None:
    final = validation_block(_record(split="test", is_final=True)).splitlines()[1]
    assert final.startswith(" validation loss at iteration 100 on test set | ")
    second = validation_block(_record(suffix="-1")).splitlines()[1]
    assert second.startswith(" validation-1 loss at iteration 100 | ")


def test_perplexity_is_cut_where_it_would_overflow() -> None:
    assert _record(losses={"lm loss": 1e4}).perplexities == {"lm loss": pytest.approx(4.85165e8)}


def test_the_perplexity_of_a_nan_is_a_nan() -> None:
    assert math.isnan(_record(losses={"lm loss": math.nan}).perplexities["lm loss"])
