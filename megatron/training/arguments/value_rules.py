"""Check rules for all values of a type: no blank strings, finite floats, integers in range.

A flag declares exceptions in its `option()`: ``at_least``, ``at_most``, ``infinite``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite, isnan

from megatron.core.config.option import INT64_MAX, Option, problem_of_range
from megatron.training.arguments.sections import flags_and_defaults, options_by_dest

_LONGEST_SHOWN = 200  # characters of a value in a message


def problem_of_type(value: object, opt: Option) -> str | None:
    """Return why ``value`` is invalid for any flag of its type, or None.

    ``value`` may be a sequence.
    """
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, str) and not part.strip():
            return "the value is empty; check that the shell variable behind it is set"
        if isinstance(part, float) and not isfinite(part) and (isnan(part) or not opt.infinite):
            return "a finite number is needed"
        if isinstance(part, int) and abs(part) > INT64_MAX:
            return "a whole number of at most 64 bits is needed"
    return None


def shown(text: str) -> str:
    """Return ``text`` for a message, with control characters escaped and a long text shortened."""
    if not text.strip() or not text.isprintable():
        text = repr(text)
    if len(text) > _LONGEST_SHOWN:
        return f"{text[: _LONGEST_SHOWN // 2]}... ({len(text)} characters)"
    return text


def out_of_range(given: Mapping[str, object]) -> Iterator[str]:
    """Yield messages about values of ``given`` (dest -> value) outside the range of their flag."""
    for dest, opt in options_by_dest().items():
        flag, default = flags_and_defaults()[dest]
        value = given.get(dest)
        if opt.refused or opt.ignored or value == default:
            continue
        for part in _parts(value):
            problem = problem_of_type(part, opt) or problem_of_range(part, opt)
            if problem is not None:
                yield f"{flag} {shown(str(part))}: {problem}"
                break


def has_excessive_number(given: Mapping[str, object]) -> bool:
    """Return whether an integer exceeds the maximum of its flag.

    `resolve` then stops early: derivations and checks would build lists as long as that number.
    """
    return any(
        isinstance(part, int) and part > opt.at_most
        for dest, opt in options_by_dest().items()
        for part in _parts(given.get(dest))
    )


def _parts(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
