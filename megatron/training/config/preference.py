"""Flags of training on pairs of answers."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option

_preference = partial(option, group="preference")
SIGMOID = "sigmoid"
IPO = "ipo"
HINGE = "hinge"


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    dpo_beta: float | None = _preference(
        None,
        "Train on pairs of a chosen and a rejected answer by direct preference optimization; the "
        "weight of the distance from the reference model, which is the loaded model.",
    )
    dpo_loss_type: str = _preference(
        SIGMOID, "Loss of a pair with --dpo-beta.", choices=(SIGMOID, IPO, HINGE)
    )
    dpo_label_smoothing: float = _preference(
        0.0, "Probability that the answers of a pair are confused (--dpo-loss-type sigmoid)."
    )
    reward_model: bool = _preference(
        False,
        "Train a reward model on pairs of answers: a linear layer of one output, which reads the "
        "last token of an answer, takes the place of the output layer.",
    )


def reads_conversations(ns: Namespace) -> bool:
    """Return whether the run of these flags trains on conversations."""
    return bool(ns.sft or ns.dpo_beta is not None or ns.reward_model)
