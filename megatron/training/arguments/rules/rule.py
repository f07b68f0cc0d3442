"""Rules about flags as data, and the engine that evaluates them.

A `Rule` describes a combination of flags that stops the run, a `Requirement` one that leaves flags
without effect.  Both read the resolved run as `Settings`: one flat set of values.  Rules are
written as tables, message -> breach, which `rules`, `where` and `first_of` combine.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import starmap
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.config.option import cli_default, dest_of, flag_of, options_of
from megatron.core.distributed.distributed_data_parallel_config import is_fully_sharded
from megatron.core.ssm.mamba_hybrid_layer_allocation import layer_pattern
from megatron.training.arguments.sections import FLAGS_ONLY, SECTIONS, flags_and_defaults
from megatron.training.config.run import DPO, REWARD, SFT, RunConfig
from megatron.training.models.kind import ModelKind
from megatron.training.models.registry import model_kind_of


class Settings:
    """Values of a resolved run by field name, whichever section has the field.

    Properties of RunConfig and its sections are attributes too.  Indexing reads a value for a
    message: ``settings["--seq-length"]`` is the flag with its value, other keys are attributes.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._sections = [vars(config)[name] for name in SECTIONS]
        self.asked: Mapping[str, Any] = config.asked
        for section in self._sections:
            vars(self).update({f.name: vars(section)[f.name] for f in fields(section)})

    def __getattr__(self, name: str) -> Any:
        for part in (self.config, *self._sections):
            if hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(f"no section of RunConfig has {name}")

    def __getitem__(self, key: str) -> Any:
        return self.shown(key) if key.startswith("--") else getattr(self, key)

    def value(self, flag: str) -> Any:
        """Return the resolved value of ``flag``; True if it is a switch and given."""
        name, is_field, is_negated = _fields_by_flag()[flag]
        value = getattr(self, name) if is_field else self.asked[name]
        return not value if is_negated else value

    def shown(self, flag: str) -> str:
        """Return ``flag`` with its value; a switch alone."""
        value = self.value(flag)
        if isinstance(value, enum.Enum):
            value = value.name
        if isinstance(value, tuple | list):
            value = " ".join(map(str, value))
        return flag if isinstance(value, bool) else f"{flag} {value}"

    @cached_property
    def kind(self) -> ModelKind:
        """Kind of the model."""
        return model_kind_of(self.config)

    @cached_property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP shards the parameters."""
        return is_fully_sharded(self.config.ddp)

    @cached_property
    def hybrid_pattern(self) -> str:
        """Letters of the layers of a hybrid; "" for other models and for an invalid pattern."""
        if not self.kind.is_hybrid or not self.num_layers:
            return ""
        ratios = self.hybrid_attention_ratio, self.hybrid_mlp_ratio
        try:
            return layer_pattern(self.num_layers, *ratios, self.hybrid_override_pattern)
        except ConfigError:
            return ""

    @property
    def flag_of_objective(self) -> str:
        """The flag with which the run trains on conversations."""
        return {SFT: "--sft", DPO: "--dpo-beta", REWARD: "--reward-model"}[self.objective]

    def has_layer(self, letters: str) -> bool:
        """Return whether the model may have a layer of one of these kinds."""
        return not self.hybrid_pattern or bool({*letters} & {*self.hybrid_pattern})


# A function, or flags of which one at least must be given, each with a value if it needs this one:
# "--sft --dpo-beta", "--compile model".
Condition = Callable[[Settings], object] | str


@dataclass(frozen=True)
class Rule:
    """A combination of flags that a run refuses.

    ``message`` is a format string: ``{--seq-length}`` is the flag with its value, ``{seq_length}``
    the value, ``{found}`` what ``breach`` returns: a true value if the settings break the rule, a
    list if they break it several times.  Flags as ``breach`` return those that are given.  A
    message "A needs B: ..." or "A and B exclude each other: ..." is its own breach: None.  The rule
    applies where all conditions of ``where`` hold.
    """

    message: str
    breach: Condition | None
    where: tuple[Condition, ...] = ()

    def problems(self, settings: Settings) -> Iterator[str]:
        """Yield an error message per breach."""
        if not all(evaluate(condition, settings) for condition in self.where):
            return
        breach = self.breach
        found = _breaks(self.message, settings) if breach is None else evaluate(breach, settings)
        for one in found if isinstance(found, list) else [found] if found else []:
            yield self.message.format_map(_Values(settings, one))


def evaluate(condition: Condition, settings: Settings) -> object:
    """Return what a condition finds in the settings."""
    return given(condition)(settings) if isinstance(condition, str) else condition(settings)


Table = Mapping[str, Condition | None]  # message -> breach, of several rules

_TERM = r"\{?(--[\w-]+)\}?( [\w-]+)?"
_STATEMENT = re.compile(rf"{_TERM} (needs|and) {_TERM}(?: exclude each other)?(?=[:,]|$)")


def _breaks(message: str, settings: Settings) -> bool:
    """Return whether the settings contradict "A needs B" or "A and B exclude each other"."""
    first, second, is_second_wrong = _parse_statement(message)
    return bool(given(first)(settings)) and bool(given(second)(settings)) == is_second_wrong


@cache
def _parse_statement(message: str) -> tuple[str, str, bool]:
    """Return both flags, each with a value if it has one, and whether the second is excluded."""
    statement = _STATEMENT.match(message)
    assert statement, f"neither a statement about two flags, nor a breach: {message}"
    flag, value, verb, other, value_of_other = statement.groups(default="")
    return flag + value, other + value_of_other, verb == "and"


@dataclass(frozen=True)
class _Values:
    settings: Settings
    found: object

    def __getitem__(self, key: str) -> Any:
        return self.found if key == "found" else self.settings[key]


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


def rules(*parts: Table | list[Rule]) -> list[Rule]:
    """Return the rules of all ``parts``, in order."""
    return [
        rule
        for part in parts
        for rule in (starmap(Rule, part.items()) if isinstance(part, Mapping) else part)
    ]


def where(condition: Condition, *parts: Table | list[Rule]) -> list[Rule]:
    """Return the rules of ``parts``, which apply where ``condition`` holds."""
    return [replace(rule, where=(condition, *rule.where)) for rule in rules(*parts)]


def first_of(*parts: Table | list[Rule]) -> list[Rule]:
    """Return the rules of ``parts``; each applies only if the settings keep the rules before it."""

    def keeps(earlier: Rule) -> Callable[[Settings], bool]:
        return lambda c: not any(earlier.problems(c))

    every = rules(*parts)
    return [
        replace(rule, where=(*rule.where, *map(keeps, every[:i]))) for i, rule in enumerate(every)
    ]


def is_set(value: object) -> bool:
    """Return whether a flag with this value is on, or names something."""
    return value is not False and value not in (None, "", ())


def given(
    flags: str, is_wrong: Callable[[Any], object] | None = None
) -> Callable[[Settings], list[str]]:
    """Return a breach: the ``flags`` with a value that ``is_wrong``, each shown with its value.

    By default these are the flags that are given, with one of the values that follow in ``flags``.
    """
    terms = re.findall(r"(--\S+)((?: +(?!--)\S+)*)", flags)

    def is_found(value: Any, wanted: str) -> bool:
        if is_wrong is not None:
            return value is not None and bool(is_wrong(value))
        return str(value) in wanted.split() if wanted else is_set(value)

    return lambda c: [c.shown(flag) for flag, wanted in terms if is_found(c.value(flag), wanted)]


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


def problems_of(rules: Iterable[Rule], config: RunConfig) -> list[str]:
    """Return an error message for each breach of ``rules`` in ``config``."""
    settings = Settings(config)
    return [problem for rule in rules for problem in rule.problems(settings)]


def warnings_of(requirements: Iterable[Requirement], config: RunConfig) -> list[str]:
    """Return a warning for each given flag whose requirement ``config`` does not meet."""
    settings = Settings(config)
    unmet = (need for need in requirements if not need.is_met(settings))
    return [warning for need in unmet for warning in need.warnings(config.asked)]


@cache
def _fields_by_flag() -> dict[str, tuple[str, bool, bool]]:
    """Return flag -> (name of the field or dest, whether it is a field, whether it negates it)."""
    return {
        flag_of(f, opt): (
            f.name if is_field else dest_of(f, opt),
            is_field,
            cli_default(f, opt) is True and not opt.both_ways,
        )
        for is_field, classes in ((True, SECTIONS.values()), (False, FLAGS_ONLY))
        for config_class in classes
        for f, opt in options_of(config_class)
    }
