"""The errors a person who runs the program can meet.

Each message is one sentence: the flag or file, the value found, and the cure.  What only a
programmer can break is an ``assert`` with a message instead.
"""

from __future__ import annotations

from collections.abc import Iterable


class MegatronError(Exception):
    """Base of all errors below; entry points print the message without a traceback."""


class ConfigError(MegatronError, ValueError):
    """The command line contradicts itself, or asks for what cannot be."""

    problems: tuple[str, ...] = ()  # of a command line, a sentence each

    @classmethod
    def raise_for(cls, problems: Iterable[str]) -> None:
        """Raise one error that joins all ``problems`` of a command line; nothing for none."""
        if problems := tuple(problems):
            lines = (f"  - {problem}" for problem in problems)
            error = cls("\n".join(["this run cannot start:", *lines]))
            error.problems = problems
            raise error


class DataError(MegatronError, ValueError):
    """A data file is missing, damaged, or does not fit the run."""


class CheckpointError(MegatronError, RuntimeError):
    """A checkpoint is missing, damaged, or does not fit the run."""


class LaunchError(MegatronError, RuntimeError):
    """The ranks of a run cannot find each other."""


class MissingDependency(MegatronError, ImportError):
    """An optional package is needed for what was asked."""


class OutOfMemory(MegatronError, MemoryError):
    """An allocation has failed; the message says who holds the memory, and what helps."""


class NonFiniteError(MegatronError, FloatingPointError):
    """A loss or gradient is NaN or infinite."""
