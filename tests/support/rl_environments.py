"""Environments for tests of reinforcement learning; prompts and answers are ids in decimal."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from megatron.post_training.rl.environment import Environment, Prompt


class Echo(Environment):
    """The reward is the share of the answer's tokens that repeat the prompt's last one."""

    def __init__(self, count: int = 10) -> None:
        self.prompts = [f"{(7 * i) % 20} {i}" for i in range(count)]

    def reward(self, prompt: Prompt, answer: str) -> float:
        assert isinstance(prompt, str)
        words = answer.split()
        return sum(word == prompt.split()[-1] for word in words) / max(len(words), 1)


class Dying(Echo):
    """Kill the process at call ``calls`` of `reward`, unless the file ``marker`` exists."""

    def __init__(self, calls: int, marker: str) -> None:
        super().__init__()
        self._left = calls
        self._marker = Path(marker)

    def reward(self, prompt: Prompt, answer: str) -> float:
        self._left -= 1
        if not self._left and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reward(prompt, answer)
