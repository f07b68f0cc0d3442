"""An environment of functions: prompts are in a file, functions of the user reward answers.

A function is ``reward(prompt, answer) -> float``, or has the signature of TRL's reward functions,
``f(prompts, completions, **columns) -> list[float]``, which a parameter ``completions`` tells.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.post_training.rl.environment import (
    LARGEST_WEIGHT,
    FileEnvironment,
    Prompt,
    checked_threads,
)
from megatron.training.process.user_code import find_user_object

_WHAT = "agent_args: functions"


class FunctionEnvironment(FileEnvironment):
    """The reward of an answer is the weighted sum of what ``functions`` return.

    ``functions``: FILE.py:NAME or MODULE:NAME, one or a list; or a mapping of these to weights.
    """

    def __init__(
        self,
        functions: str | Sequence[str] | Mapping[str, float],
        prompts: str,
        num_threads: int = 1,
    ) -> None:
        super().__init__(prompts)
        self.num_threads = checked_threads(num_threads)
        names = [functions] if isinstance(functions, str) else functions
        weights = names if isinstance(names, Mapping) else dict.fromkeys(names, 1.0)
        if not weights:
            raise ConfigError(f"{_WHAT} is empty: name at least one function")
        self._functions = [(_found(name), _checked(name, w)) for name, w in weights.items()]

    def reward(self, prompt: Prompt, answer: str) -> float:
        """Return the weighted sum.  A function that returns None has no part in it, as in TRL."""
        found = [(function(prompt, answer), weight) for function, weight in self._functions]
        rewards = [value * weight for value, weight in found if value is not None]
        return sum(rewards) if rewards else math.nan


def _found(name: object) -> Callable[[Prompt, str], float | None]:
    """Return the function ``name`` as a function of a prompt and an answer.  Raises ConfigError."""
    if not isinstance(name, str):
        raise ConfigError(f"{_WHAT} {name!r:.60}: write MODULE:NAME or FILE.py:NAME")
    function = find_user_object(name, _WHAT)
    if not callable(function):
        raise ConfigError(f"{_WHAT} {name}: it is {function!r:.60}, no function: correct the name")
    try:
        signature = inspect.signature(function)
        if "completions" not in signature.parameters:
            signature.bind("prompt", "answer")
            return function
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{_WHAT} {name}: it cannot be called with a prompt and an answer ({error}): write "
            "reward(prompt, answer)"
        ) from None
    parameters = signature.parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def reward(prompt: Prompt, answer: str) -> float | None:
        row: Mapping[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else prompt
        columns = {**row, "prompts": row["prompt"], "completions": answer}
        if isinstance(row["prompt"], list):
            columns["completions"] = [{"role": "assistant", "content": answer}]
        del columns["prompt"]
        lists = {key: [v] for key, v in columns.items() if takes_all or key in parameters}
        (value,) = function(**lists)
        return None if value is None else float(value)

    return reward


def _checked(name: str, weight: float) -> float:
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not abs(weight) <= LARGEST_WEIGHT:
        raise ConfigError(f"{_WHAT} {name}: its weight is {weight!r:.80}: give a number")
    return float(weight)
