"""Rewards of the recipe grpo: replace them by yours."""

import re


def right(prompt, answer):
    """Return 1 if the last number of the answer is the result."""
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == prompt["result"])


def short(prompt, answer):
    """Return up to 1, the more the shorter the answer is."""
    return 1 / (1 + len(answer))
