"""Rules about the fields of configs, and the base class of the configs that they check.

A `Rule` is a combination of values that is refused, and its message, which names the flags of the
fields.  Rules are written as tables, message -> breach, which `rules`, `where` and `first_of`
combine.  They read `Settings`: the values of one config, when a project constructs it, or of all
sections of a run, for the command line.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import starmap
from typing import Any, ClassVar, TypeVar

from megatron.core.config.errors import FieldError
from megatron.core.config.option import cli_default, flag_of, options_of, problem_of_value

C = TypeVar("C", bound="CheckedConfig")
_IS_CHECKED = "_is_checked"


class Settings:
    """Values of configs by field name, whichever config has the field; properties too.

    Indexing reads a value for a message: ``settings["--seq-length"]`` is the flag with its value,
    other keys are attributes.
    """

    has_attention = True  # whether a layer has attention
    has_one_stack = True  # False: encoder and decoder split their layers each for itself

    def __init__(self, *configs: object) -> None:
        self._configs = configs
        self._fields = fields_by_flag(*map(type, configs))
        self.model: Any = configs[0]

    def __getattr__(self, name: str) -> Any:
        for part in self._configs:
            if hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(f"no config has {name}")

    def __getitem__(self, key: str) -> Any:
        return self.shown(key) if key.startswith("--") else getattr(self, key)

    def value(self, flag: str) -> Any:
        """Return the value of the field of ``flag``; True if it is a switch and given."""
        name, is_negated = self._fields.get(flag) or (flag.lstrip("-").replace("-", "_"), False)
        value = getattr(self, name)
        return not value if is_negated else value

    def shown(self, flag: str) -> str:
        """Return ``flag`` with its value; a switch alone."""
        value = self.value(flag)
        if isinstance(value, enum.Enum):
            value = value.name
        if isinstance(value, tuple | list):
            value = " ".join(map(str, value))
        return flag if isinstance(value, bool) else f"{flag} {value}"

    def with_field_names(self, message: str) -> str:
        """Return ``message`` with the names of fields in place of their flags."""

        def name_of(match: re.Match[str]) -> str:
            own_name = match[0].lstrip("-").replace("-", "_")
            name, is_negated = self._fields.get(match[0]) or (own_name, False)
            return f"{name}=False" if is_negated else name if hasattr(self, name) else match[0]

        return re.sub(r"--[a-z][\w-]*", name_of, message)


@cache
def fields_by_flag(*config_classes: type) -> dict[str, tuple[str, bool]]:
    """Return flag -> (name of the field, whether the flag negates it)."""
    return {
        flag_of(f, opt): (f.name, cli_default(f, opt) is True and not opt.both_ways)
        for config_class in config_classes
        # A project's subclass may declare a field again, without its flag.
        for base in reversed(config_class.__mro__)
        if is_dataclass(base)
        for f, opt in options_of(base)
    }


# A function, or flags of which one at least must be given, each with a value if it needs this one:
# "--sft --dpo-beta", "--compile model".
Condition = Callable[[Any], object] | str


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


@cache
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


def problems_of(rules: Iterable[Rule], settings: Settings) -> list[str]:
    """Return an error message for each breach of ``rules``."""
    return [problem for rule in rules for problem in rule.problems(settings)]


class CheckedConfig:
    """Base of the config dataclasses, whose values are checked.

    Construction derives values and checks all.  A value that is assigned later is checked at once
    by its own field; how it fits the others is checked when the config is used (`check`).
    """

    RULES: ClassVar[Sequence[Rule]] = ()  # the command line evaluates them too
    # Rules that a command line cannot break, because it derives these values.
    LIBRARY_RULES: ClassVar[Sequence[Rule]] = ()

    @classmethod
    def unchecked(cls: type[C], **values: Any) -> C:
        """Construct a config whose values the caller checks, to report all problems at once."""
        config = cls.__new__(cls)
        vars(config)[_IS_CHECKED] = None
        config.__init__(**values)  # type: ignore[misc]
        return config

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__hash__" not in vars(cls):  # which dataclass() would set to None
            cls.__hash__ = CheckedConfig.__hash__  # type: ignore[method-assign]

    def changed(self: C, **values: Any) -> C:
        """Return a copy with other values, of which the caller knows that they are possible."""
        config = copy(self)
        vars(config).update(values, **{_IS_CHECKED: None})
        config.derive()
        vars(config)[_IS_CHECKED] = True
        return config

    def __post_init__(self) -> None:
        is_unchecked = vars(self).get(_IS_CHECKED, False) is None
        if not is_unchecked:
            self._check_each_value()
        self.derive()
        if is_unchecked:
            vars(self)[_IS_CHECKED] = True
        self.check()

    def derive(self) -> None:
        """Fill in values that depend on other fields."""

    def check(self) -> None:
        """Raise FieldError if values contradict each other; again only after an assignment."""
        if not vars(self).get(_IS_CHECKED):
            self._check_each_value()
            settings = Settings(self)
            if problems := problems_of((*self.RULES, *self.LIBRARY_RULES), settings):
                raise FieldError(settings.with_field_names("; ".join(problems)))
            vars(self)[_IS_CHECKED] = True

    def _check_each_value(self) -> None:
        problems = (problem_of_value(f, getattr(self, f.name)) for f in fields(self))  # type: ignore
        if found := [*filter(None, problems)]:
            raise FieldError("; ".join(found))

    def __setattr__(self, name: str, value: object) -> None:
        if vars(self).get(_IS_CHECKED) is not None:
            f = getattr(type(self), "__dataclass_fields__", {}).get(name)
            if f is not None and (problem := problem_of_value(f, value)):
                raise FieldError(problem)
            vars(self)[_IS_CHECKED] = False
        object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return hash(tuple(_hashable(getattr(self, f.name)) for f in fields(self)))  # type: ignore


def _hashable(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    # Projects' subclasses have other values too; equality compares these.
    return value if isinstance(value, Hashable) else type(value)
