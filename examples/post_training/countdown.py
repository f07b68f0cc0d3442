"""Countdown: write an expression of given numbers that has a given result.

python -m examples.post_training.countdown --output warmup.jsonl --count 5000

writes texts whose expressions have the right form and a random operator: a model that is trained on
them knows what an answer looks like, and not which one is right.  `Countdown` is the environment.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.post_training.rl.environment import Environment, Prompt

_OPERATORS = "+-*"


class Countdown(Environment):
    """``count`` problems of ``size`` numbers from 1 to ``largest``.

    The reward is 1 for an expression that uses each number once and has the result, ``form`` for
    one that uses each number once, else 0.
    """

    def __init__(
        self, count: int = 500, size: int = 2, largest: int = 9, form: float = 0.1, seed: int = 1
    ) -> None:
        self._form = form
        self.prompts = problems(random.Random(seed), count, size, largest)

    def reward(self, prompt: Prompt, answer: str) -> float:
        assert isinstance(prompt, Mapping)
        result = value_of(answer.strip(), prompt["numbers"])
        if result is None:
            return 0.0
        return 1.0 if result == prompt["result"] else self._form


def problems(
    source: random.Random, count: int, size: int, largest: int
) -> Sequence[Mapping[str, object]]:
    """Return problems that have a solution."""
    found = []
    for _ in range(count):
        numbers = [source.randint(1, largest) for _ in range(size)]
        result = value_of(expression(source, numbers), numbers)
        text = f"{' '.join(map(str, numbers))} = {result}:"
        found.append({"prompt": text, "numbers": numbers, "result": result})
    return found


def expression(source: random.Random, numbers: Sequence[int]) -> str:
    """Return the numbers in their order, with random operators."""
    text = str(numbers[0])
    for number in numbers[1:]:
        text += source.choice(_OPERATORS) + str(number)
    return text


def value_of(text: str, numbers: Sequence[int]) -> int | None:
    """Return the value of an expression of ``numbers``, None if it is none or has others."""
    if not re.fullmatch(r"\d{1,9}([-+*]\d{1,9})*", text):
        return None
    if sorted(map(int, re.findall(r"\d+", text))) != sorted(numbers):
        return None
    terms = re.findall(r"([-+]?)([\d*]+)", text)
    return sum(
        (-1 if sign == "-" else 1) * math.prod(map(int, factors.split("*")))
        for sign, factors in terms
    )


def main() -> None:
    """Write the texts of the warm-up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--largest", type=int, default=9)
    args = parser.parse_args()
    source = random.Random(0)
    with args.output.open("w") as file:
        for problem in problems(source, args.count, args.size, args.largest):
            text = f"{problem['prompt']} {expression(source, problem['numbers'])}"
            print(json.dumps({"text": text}), file=file)


if __name__ == "__main__":
    main()
