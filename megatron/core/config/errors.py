"""Errors for users of the program.

A message contains the flag or file, the value found, why it is wrong, and a suggested fix.  Errors
that only a programmer can cause are ``assert`` statements with a message instead.
"""

from __future__ import annotations

from collections.abc import Iterable


class MegatronError(Exception):
    """Base of all errors below; entry points print the message without a traceback."""


class ConfigError(MegatronError, ValueError):
    """Invalid command line or configuration."""

    problems: tuple[str, ...] = ()  # one error message for each problem of a command line

    @classmethod
    def raise_for(cls, problems: Iterable[str]) -> None:
        """Raise one error with all ``problems`` of a command line; do nothing if there are none."""
        if problems := tuple(problems):
            lines = (f"  - {problem}" for problem in problems)
            error = cls("\n".join(["this run cannot start:", *lines]))
            error.problems = problems
            raise error


class DataError(MegatronError, ValueError):
    """Data file that is missing, damaged, or does not match the run."""


class CheckpointError(MegatronError, RuntimeError):
    """Checkpoint that is missing, damaged, or does not match the run."""


class LaunchError(MegatronError, RuntimeError):
    """Failure of the ranks of a run to connect to each other."""


class MissingDependency(MegatronError, ImportError):
    """Optional package that a flag needs and that cannot be imported."""


class OutOfMemory(MegatronError, MemoryError):
    """Failed allocation; the message reports what uses the memory, and flags that reduce it."""


class NonFiniteError(MegatronError, FloatingPointError):
    """Loss or gradient that is NaN or infinite."""
