"""Values of a resolved run that rules read, and requirements of flags.

A `Rule` of `megatron.core.config.rule` is a combination of values that stops the run, a
`Requirement` one that leaves flags without effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from megatron.core.config import rule
from megatron.core.config.errors import ConfigError
from megatron.core.config.rule import fields_by_flag, given, is_set
from megatron.core.distributed.distributed_data_parallel_config import is_fully_sharded
from megatron.core.ssm.mamba_hybrid_layer_allocation import ATTENTION, layer_pattern
from megatron.training.arguments.sections import FLAGS_ONLY, SECTIONS, flags_and_defaults
from megatron.training.config.run import DPO, PRETRAINING, REWARD, SFT, RunConfig
from megatron.training.models.kind import ModelKind
from megatron.training.models.registry import model_kind_of


class Settings(rule.Settings):
    """Values of a resolved run by field name, and of flags that no section has.

    Properties of RunConfig and its sections are attributes too.  ``asked``: values by dest.
    """

    def __init__(self, config: RunConfig) -> None:
        sections = [vars(config)[name] for name in SECTIONS]
        super().__init__(config, *sections)
        self._fields = fields_by_flag(*SECTIONS.values(), *FLAGS_ONLY)
        self.config = config
        self.model = config.model
        self.asked: Mapping[str, Any] = config.asked
        for flags in FLAGS_ONLY:
            vars(self).update({f.name: config.asked.get(f.name) for f in fields(flags)})
        for section in sections:
            vars(self).update({f.name: vars(section)[f.name] for f in fields(section)})

    @cached_property
    def kind(self) -> ModelKind:
        """Kind of the model."""
        return model_kind_of(self.config)

    @cached_property
    def reads_documents(self) -> bool:
        """Whether training reads documents of data files from left to right."""
        kind = self.kind
        is_text = not (kind.masks_tokens or kind.reads_images or kind.classifies_images)
        return (
            is_text
            and self.config.objective == PRETRAINING
            and not (self.mock_data or self.dataset_type)
        )

    @cached_property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP shards the parameters."""
        return is_fully_sharded(self.config.ddp)

    @cached_property
    def hybrid_pattern(self) -> str:
        """Letters of the layers of a hybrid, those of an MTP layer last; "" for other models.

        "" for an invalid pattern too.
        """
        if not self.kind.is_hybrid or not self.num_layers:
            return ""
        ratios = self.hybrid_attention_ratio, self.hybrid_mlp_ratio
        ahead = self.mtp_num_layers and self.mtp_hybrid_override_pattern or ""
        try:
            return layer_pattern(self.num_layers, *ratios, self.hybrid_override_pattern) + ahead
        except ConfigError:
            return ""

    @property
    def has_attention(self) -> bool:  # type: ignore[override]
        """Whether a layer has attention."""
        return self.has_layer(ATTENTION)

    @property
    def has_one_stack(self) -> bool:  # type: ignore[override]
        """Whether the layers are one stack, without an encoder beside the decoder."""
        return not self.kind.has_encoder

    @property
    def flag_of_objective(self) -> str:
        """The flag with which the run trains on conversations."""
        return {SFT: "--sft", DPO: "--dpo-beta", REWARD: "--reward-model"}[self.objective]

    def has_layer(self, letters: str) -> bool:
        """Return whether the model may have a layer of one of these kinds."""
        return not self.hybrid_pattern or bool({*letters} & {*self.hybrid_pattern})


@dataclass(frozen=True)
class Requirement:
    """Condition without which ``dests`` have no effect; ``words`` name it in the warning."""

    words: str
    dests: tuple[str, ...]
    is_met: Callable[[Settings], object]

    def warnings(self, asked: Mapping[str, object]) -> Iterator[str]:
        """Yield a warning for each given flag."""
        for dest in self.dests:
            flag, default = flags_and_defaults()[dest]
            if asked.get(dest, default) != default:
                yield f"{flag} is without effect: it needs {self.words}"


def needs(
    words: str, dests: str, is_met: Callable[[Settings], object] | None = None
) -> Requirement:
    """Return the requirement of ``dests``: by default the flags in ``words``, "A, B or C and D"."""

    def are_given(c: Settings) -> bool:
        parts = re.sub(",| or ", " ", words).split(" and ")
        return all(given(part)(c) for part in parts)

    return Requirement(words, tuple(dests.split()), is_met or are_given)


def named(flags: str) -> Callable[[Settings], list[str]]:
    """Return a breach that lists which of ``flags`` are given, without their values."""
    return lambda c: [flag for flag in flags.split() if is_set(c.value(flag))]


def several(flags: str) -> Callable[[Settings], str]:
    """Return a breach: at least two of ``flags`` are given."""
    find = given(flags)
    return lambda c: " and ".join(found) if len(found := find(c)) > 1 else ""


def refusal(function: Callable[..., object], *arguments: object) -> str | None:
    """Return the message of the ConfigError that a call raises, None without one."""
    try:
        function(*arguments)
    except ConfigError as error:
        return str(error)
    return None


def warnings_of(requirements: Iterable[Requirement], config: RunConfig) -> list[str]:
    """Return a warning for each given flag whose requirement ``config`` does not meet."""
    settings = Settings(config)
    unmet = (need for need in requirements if not need.is_met(settings))
    return [warning for need in unmet for warning in need.warnings(config.asked)]
