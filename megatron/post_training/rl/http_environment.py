"""An environment behind HTTP: the prompts are in a file, a service returns the rewards.

For each answer it receives ``POST url`` with the JSON object {"prompt": ..., "answer": ...}, where
``prompt`` is the row of the file, and answers with {"reward": number}.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from urllib.parse import urlsplit

from megatron.core.config.errors import ConfigError, MegatronError
from megatron.post_training.rl.environment import FileEnvironment, Prompt, checked_threads

_LONGEST_WAIT_S = 30.0


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
        super().__init__(prompts)
        self._url = url
        self._timeout_s = timeout_s
        self._retries = retries
        self._wait_s = wait_s
        self.num_threads = checked_threads(num_threads)

    def reward(self, prompt: Prompt, answer: str) -> float:
        body = json.dumps({"prompt": prompt, "answer": answer}).encode()
        for attempt in range(self._retries + 1):
            try:
                return self._asked(body)
            except _TryAgain as error:
                problem = error
            if attempt < self._retries:
                time.sleep(min(self._wait_s * 2**attempt, _LONGEST_WAIT_S))
        raise RewardServiceError(
            f"the reward service {self._url} has failed {self._retries + 1} times, the last time "
            f"with: {problem}; start it, or raise retries or timeout_s in agent_args"
        )

    def _asked(self, body: bytes) -> float:
        request = urllib.request.Request(
            self._url, data=body, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            status = f"status {error.code} {error.reason}"
            if error.code == 429 or error.code >= 500:
                raise _TryAgain(status) from None
            raise RewardServiceError(
                f"the reward service {self._url} refuses a request with {status}: correct url"
            ) from None
        except (OSError, HTTPException) as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from None
        try:
            return float(json.loads(text)["reward"])
        except (KeyError, TypeError, ValueError):
            raise RewardServiceError(
                f"the reward service {self._url} returned {text[:200]!r}: it must return "
                '{"reward": number}'
            ) from None


class _TryAgain(Exception):
    """A request failed in a way that may pass."""
