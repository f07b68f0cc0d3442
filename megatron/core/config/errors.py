"""Errors for users of the program.

A message contains the flag or file, the value found, why it is wrong, and a suggested fix.  Errors
that only a programmer can cause are ``assert`` statements with a message instead.

``exit_code`` of an error is the exit status of the program that it ends: 2 for an error that the
user must correct first, 65 for damaged data or checkpoints, 1 for an error that a restart may cure.
"""

from __future__ import annotations

from collections.abc import Iterable


class MegatronError(Exception):
    """Base of all errors below; entry points print the message without a traceback."""

    exit_code = 1


class ConfigError(MegatronError, ValueError):
    """Invalid command line or configuration."""

    exit_code = 2
    problems: tuple[str, ...] = ()  # one error message for each problem of a command line

    @classmethod
    def raise_for(cls, problems: Iterable[str]) -> None:
        """Raise one error with all ``problems`` of a command line; do nothing if there are none."""
        if problems := tuple(problems):
            lines = (f"  - {problem}" for problem in problems)
            error = cls("\n".join(["this run cannot start:", *lines]))
            error.problems = problems
            raise error


class FieldError(ConfigError, AssertionError):
    """Values of a config's fields that contradict each other.

    Megatron Core raises ValueError for some of them and AssertionError for the others.
    """


class DataError(MegatronError, ValueError):
    """Data file that is missing, damaged, or does not match the run."""

    exit_code = 65


class CheckpointError(MegatronError, RuntimeError):
    """Checkpoint that is missing, damaged, or does not match the run."""

    exit_code = 2


class CheckpointDamaged(CheckpointError):
    """A published checkpoint is not as written: a file is missing, truncated or changed."""

    exit_code = 65


class LaunchError(MegatronError, RuntimeError):
    """Failure of the ranks of a run to connect to each other."""


class MissingDependency(MegatronError, ImportError):
    """Optional package that a flag needs and that cannot be imported."""

    exit_code = 2


class OutOfMemory(MegatronError, MemoryError):
    """Failed allocation; the message reports what uses the memory, and flags that reduce it."""


class NonFiniteError(MegatronError, FloatingPointError):
    """Loss or gradient that is NaN or infinite."""
