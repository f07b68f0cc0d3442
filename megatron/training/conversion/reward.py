"""Reward models: families of language models with one score in place of the output layer.

Hugging Face calls them sequence classifiers of one label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.training.conversion.family import Config, Family, Field, Values
from megatron.training.conversion.shape import ModelShape

SCORE = "score.weight"  # here and at Hugging Face
CLASSIFIER = "ForSequenceClassification"
_LANGUAGE_MODEL = "ForCausalLM"
_LABELS: Values = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def is_reward_model(config: Config) -> bool:
    """Return whether config.json names a sequence classifier."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and str(architectures[:1]).endswith(f"{CLASSIFIER}']")


def scoring(family: Family) -> Family:
    """Return the family of the reward models of ``family``.

    Raises CheckpointError if that is no family of left-to-right language models.
    """
    if not family.architecture.endswith(_LANGUAGE_MODEL) or family.kind != "gpt":
        raise CheckpointError(f"{family.model_type}: its sequence classifiers are not converted")
    return replace(
        family,
        architecture=family.architecture.replace(_LANGUAGE_MODEL, CLASSIFIER),
        fields=(*family.fields, Field(_check_labels, _labels)),
        outside={**family.outside, "score": "score"},
        always={**family.always, "is_reward": True},
    )


def without_heads(weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the weights that the adapters of a reward model leave frozen.

    Its score is trained; an output layer of the language model that it begins with is not in it.
    """
    return {name: t for name, t in weights.items() if name not in (SCORE, "output_layer.weight")}


def as_classifier(config: Config) -> JsonObject:
    """Return the config.json of a language model as that of its reward model."""
    if is_reward_model(config) or not config:
        return dict(config)
    names = [name.replace(_LANGUAGE_MODEL, CLASSIFIER) for name in config.get("architectures", ())]
    return {**config, "architectures": names, **_LABELS}


def _labels(shape: ModelShape) -> Values:
    return dict(_LABELS)


def _check_labels(config: Config) -> Values:
    """Raise CheckpointError unless the classifier has one label."""
    number = len(config.get("id2label", (0, 1)))
    if number != 1:
        raise CheckpointError(
            f"config.json has {number} labels: only classifiers of one label, which are reward "
            "models, can be converted"
        )
    return {}
