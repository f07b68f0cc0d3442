"""Environments: prompts for a policy, and rewards of its answers.

The file of --langrl-env-config is a list, in YAML::

    - agent_type: my_package.my_module:MyEnvironment
      agent_args: {path: problems.jsonl}
      weight: 2.0
      evaluation_only: false

``agent_type`` is the import path of a class, ``functions`` (`FunctionEnvironment`) or ``http``
(`HttpEnvironment`); ``agent_args`` are its keyword arguments; ``weight`` is its share of the
prompts.  With ``evaluation_only: true`` the policy is evaluated on its prompts, and not trained on
them.  Only this file of the user names code: a checkpoint never does.
"""

from __future__ import annotations

import inspect
import json
import math
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import numpy as np

from megatron.core.config.errors import ConfigError, DataError, MegatronError
from megatron.core.datasets.conversations import messages_of, open_rows, tools_of
from megatron.core.text_files import parse_yaml, read_text
from megatron.training.process.user_code import find_user_object
from megatron.training.tokenizer import MegatronTokenizer
from megatron.training.tokenizer.chat import ChatTemplate

_LARGEST_WEIGHT = 1e100  # the sum of all is finite
_KEYS = {"agent_type", "agent_args", "weight", "evaluation_only"}

# A text, or an object whose entry ``prompt`` is a text or a list of messages (and ``tools``); its
# other entries are for the reward.
Prompt: TypeAlias = "str | Mapping[str, Any]"
_WHAT = "agent_args: functions"
_LONGEST_WAIT_S = 30.0


class Environment(ABC):
    """Prompts, and the reward of an answer.

    A subclass sets ``prompts`` in its constructor, as a class attribute or as a property.  Rank 0
    alone builds and calls an environment.  `reward` must depend on nothing but its arguments: a run
    that was killed computes it again.  ``num_threads``: calls of `reward` at the same time.
    """

    num_threads = 1
    prompts: Any  # with len() and []

    @abstractmethod
    def reward(self, prompt: Prompt, answer: str) -> float:
        """Return the reward of an answer; it does not include the prompt."""


class FileEnvironment(Environment):
    """Environment whose prompts are the rows of a jsonl or parquet file, or a `datasets` folder."""

    def __init__(self, prompts: str, num_threads: int = 1) -> None:
        self.prompts = open_rows(prompts)
        if type(num_threads) is not int or num_threads < 1:
            raise ConfigError(f"agent_args: num_threads {num_threads!r:.80}: give a number above 0")
        self.num_threads = num_threads


@dataclass(frozen=True)
class Task:
    """A prompt with its environment."""

    environment: Environment
    prompt: Prompt

    @property
    def text(self) -> str | None:
        """Return the text of the prompt; None if it has messages."""
        text = self.prompt if isinstance(self.prompt, str) else self.prompt.get("prompt")
        if isinstance(text, list):
            return None
        if not isinstance(text, str) or not text:
            raise DataError(
                f"a prompt of {type(self.environment).__name__} is {self.prompt!r:.200}: give a "
                "text, or an object whose entry prompt is a text or a list of messages"
            )
        return text

    def tokens(self, tokenizer: MegatronTokenizer, chat: ChatTemplate | None) -> list[int]:
        """Return the tokens of the prompt; ``chat`` renders messages.  Raises DataError."""
        text = self.text
        if text is not None:
            return tokenizer.tokenize(text)
        assert isinstance(self.prompt, Mapping), "a prompt without a text has messages"
        if chat is None:
            raise DataError(
                "a prompt is a list of messages, and there is no chat template: give "
                "--chat-template, or a tokenizer that has one"
            )
        messages = messages_of(self.prompt["prompt"], "prompt")
        return [int(t) for t in chat.encode_prompt(messages, tools_of(self.prompt))]

    def reward(self, answer: str) -> float:
        """Return the reward.  Raises DataError if it is no finite number."""
        found = self.environment.reward(self.prompt, answer)
        try:
            value = float(found)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise DataError(
                f"{type(self.environment).__name__}: the reward of the answer {answer!r} to the "
                f"prompt {self.prompt!r} is {found!r}: return a finite number"
            )
        return value


class Environments:
    """The environments of a run; the task of an index is a function of the seed.

    ``held_out`` are those for evaluations alone.
    """

    def __init__(
        self,
        entries: Sequence[tuple[Environment, float]],
        seed: int,
        held_out: Sequence[Environment] = (),
    ) -> None:
        self.held_out = held_out
        self._entries = entries
        self._seed = seed
        self._counts = [0] * len(entries)  # prompts of each environment before index `_next`
        self._next = 0
        self._orders: dict[int, tuple[int, Any]] = {}  # environment -> its current pass, and order

    @property
    def every(self) -> list[Environment]:
        """Return all environments."""
        return [*(environment for environment, _ in self._entries), *self.held_out]

    def tasks(self, first: int, count: int) -> list[Task]:
        """Return the tasks ``first`` to ``first`` + ``count``.

        The environments take turns by their weights; each pass over one has an order of its own.
        """
        if first < self._next:
            self._counts = [0] * len(self._entries)
            self._next = 0
        found = []
        while self._next < first + count:
            self._next += 1
            behind = [
                weight * self._next - taken
                for (_, weight), taken in zip(self._entries, self._counts, strict=True)
            ]
            chosen = behind.index(max(behind))
            number = self._counts[chosen]
            self._counts[chosen] += 1
            if self._next <= first:
                continue
            environment = self._entries[chosen][0]
            epoch, position = divmod(number, len(environment.prompts))
            if self._orders.get(chosen, (-1, None))[0] != epoch:
                order = np.random.default_rng([self._seed, chosen, epoch])
                self._orders[chosen] = epoch, order.permutation(len(environment.prompts))
            row = int(self._orders[chosen][1][position])
            found.append(Task(environment, environment.prompts[row]))
        return found


def open_environments(path: str, seed: int) -> Environments:
    """Build the environments that the file ``path`` lists.  Raises ConfigError."""
    what = f"--langrl-env-config {path}"
    entries = parse_yaml(read_text(path, what, ConfigError, "a YAML file"), what, ConfigError)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{what}: write a list of environments, each with agent_type")
    found = [_open_environment(e, f"{what}: entry {i}") for i, e in enumerate(entries)]
    trained = [(environment, weight) for environment, weight in found if weight]
    held_out = [environment for environment, weight in found if not weight]
    if not trained:
        raise ConfigError(f"{what}: all environments have evaluation_only: give one to train on")
    total = sum(weight for _, weight in trained)
    shares = [(environment, weight / total) for environment, weight in trained]
    return Environments(shares, seed, held_out)


def _open_environment(entry: Any, what: str) -> tuple[Environment, float]:
    """Return the environment of an entry and its weight; 0 for evaluations only."""
    if not isinstance(entry, dict) or "agent_type" not in entry or entry.keys() - _KEYS:
        raise ConfigError(
            f"{what} is {entry!r}: give agent_type, and agent_args, weight and evaluation_only at "
            "most"
        )
    name = str(entry["agent_type"])
    arguments = entry.get("agent_args")
    weight = entry.get("weight", 1.0)
    is_held_out = entry.get("evaluation_only", False)
    for key, fits, wanted in (
        ("weight", _is_number(weight) and weight > 0, "a number above 0"),
        ("evaluation_only", isinstance(is_held_out, bool), "true or false"),
        ("agent_args", isinstance(arguments, dict | None), "an object of arguments"),
    ):
        if not fits:
            raise ConfigError(f"{what}: {key} {entry[key]!r:.80}: give {wanted}")
    built_in = {"functions": FunctionEnvironment, "http": HttpEnvironment}
    made = built_in.get(name) or _class_of(name, what)
    try:
        environment = made(**(arguments or {}))
    except TypeError as error:
        raise ConfigError(f"{what}: agent_args: {error}; correct the arguments") from None
    if not hasattr(environment, "prompts"):
        raise ConfigError(f"{what}: {name} has no attribute prompts: set it in __init__()")
    if not len(environment.prompts):
        raise ConfigError(f"{what}: {name} has no prompts: give at least one")
    return environment, 0.0 if is_held_out else float(weight)


def _class_of(name: str, what: str) -> Any:
    # MODULE:NAME may be written MODULE.NAME, as Megatron-LM does.
    path = name if ":" in name else ":".join(name.rsplit(".", 1))
    made = find_user_object(path, f"{what}: agent_type")
    if not (isinstance(made, type) and issubclass(made, Environment)):
        raise ConfigError(
            f"{what}: agent_type {name} is no class that derives from "
            "megatron.post_training.rl.environment.Environment: name such a class"
        )
    if missing := sorted(getattr(made, "__abstractmethods__", ())):
        raise ConfigError(f"{what}: agent_type {name} does not define {missing[0]}(): define it")
    return made


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= _LARGEST_WEIGHT


class FunctionEnvironment(FileEnvironment):
    """The reward of an answer is the weighted sum of the results of ``functions``.

    ``functions``: FILE.py:NAME or MODULE:NAME, one or a list; or a mapping of these to weights.
    """

    def __init__(
        self,
        functions: str | Sequence[str] | Mapping[str, float],
        prompts: str,
        num_threads: int = 1,
    ) -> None:
        super().__init__(prompts, num_threads)
        names = [functions] if isinstance(functions, str) else functions
        weights = names if isinstance(names, Mapping) else dict.fromkeys(names, 1.0)
        if not weights:
            raise ConfigError(f"{_WHAT} is empty: name at least one function")
        for name, weight in weights.items():
            if not _is_number(weight):
                raise ConfigError(f"{_WHAT} {name}: its weight is {weight!r:.80}: give a number")
        self._functions = [(_find_function(name), weight) for name, weight in weights.items()]

    def reward(self, prompt: Prompt, answer: str) -> float:
        """Return the weighted sum.  A function that returns None has no part in it, as in TRL."""
        found = [(function(prompt, answer), weight) for function, weight in self._functions]
        rewards = [value * weight for value, weight in found if value is not None]
        return sum(rewards) if rewards else math.nan


def _find_function(name: object) -> Callable[[Prompt, str], float | None]:
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


class RewardServiceError(MegatronError, RuntimeError):
    """The service did not return a reward."""


class HttpEnvironment(FileEnvironment):
    """Each reward is the answer of a service.

    A request takes ``timeout_s`` at most.  After a failed connection and the statuses 429 and 5xx
    it is sent again, ``retries`` times, with waits that double from ``wait_s`` on.
    """

    def __init__(
        self,
        url: str,
        prompts: str,
        timeout_s: float = 60.0,
        retries: int = 3,
        wait_s: float = 1.0,
        num_threads: int = 16,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"url {url!r}: give an address that begins with http:// or https://")
        super().__init__(prompts, num_threads)
        self._url = url
        self._timeout_s = timeout_s
        self._retries = retries
        self._wait_s = wait_s

    def reward(self, prompt: Prompt, answer: str) -> float:
        body = json.dumps({"prompt": prompt, "answer": answer}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(min(self._wait_s * 2 ** (attempt - 1), _LONGEST_WAIT_S))
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                    text = response.read()
                return float(json.loads(text)["reward"])
            except urllib.error.HTTPError as error:
                problem = f"status {error.code} {error.reason}"
                if error.code != 429 and error.code < 500:
                    break
            except (OSError, HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
            except (KeyError, TypeError, ValueError):
                problem = f'the answer {text[:200]!r}, which is not {{"reward": number}}'
                break
        raise RewardServiceError(
            f"the reward service {self._url} has failed after {attempt + 1} requests with "
            f"{problem}: start it, correct url, or raise retries or timeout_s in agent_args"
        )
