"""Keys of a process group's store that only the ranks of this run can write.

Everybody who reaches the TCP port of a store can read, overwrite and delete its keys.  The ranks of
a run therefore share a secret that never stands in the store (`agree_on_secret`): names of keys are
derived from it, and a value carries a message authentication code of its key and itself.  What
somebody else has written counts as absent.

Not protected: counters, which only say how long to wait; deleted keys; a store that is flooded.
"""

from __future__ import annotations

import hmac
import secrets

import torch
import torch.distributed as dist
from torch.distributed import Store

from megatron.core import device

SECRET_BYTES = 32
_CODE_DIGITS = 64  # of SHA-256 in hexadecimal
# Counter of ranks that have ended without a word; see `megatron.training.process.failure_watch`.
LOST_RANKS = "lost_ranks"


def agree_on_secret() -> bytes:
    """32 random bytes, the same on all ranks.  Collective over all ranks.

    Rank 0 broadcasts them over the process group, not over the store.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return secret
    shared = torch.tensor(list(secret), dtype=torch.uint8, device=device.current())
    dist.broadcast(shared, src=0)
    return bytes(shared.tolist())


class RunStore:
    """``store`` for the ranks that know ``secret``.  One thread at a time; `clone` for another."""

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store, self._secret = store, secret

    def clone(self) -> RunStore:
        """The same keys through another connection."""
        return RunStore(self._store.clone(), self._secret)  # type: ignore[attr-defined]

    def set(self, name: str, value: str) -> None:
        """Write ``value``."""
        key = self._key(name)
        self._store.set(key, self._sealed(key, value))

    def get(self, name: str) -> str | None:
        """The value, None if no rank of this run has written one.  Does not wait."""
        key = self._key(name)
        if not self._store.check([key]):
            return None
        return self._opened(key, self._store.get(key))

    def set_first(self, name: str, value: str) -> str:
        """Write ``value`` unless a rank of this run has written one; the value that stands."""
        key, before = self._key(name), ""
        sealed = self._sealed(key, value)
        found = self._store.compare_set(key, before, sealed)
        first = self._opened(key, found)
        if first is None:  # somebody else has written it
            self._store.set(key, sealed)
            return value
        return first

    def add(self, name: str, amount: int) -> int:
        """Add to a counter, which is not protected; its new value."""
        return int(self._store.add(self._key(name), amount))

    def _key(self, name: str) -> str:
        return f"run/{self._code(name)}"

    def _sealed(self, key: str, value: str) -> str:
        return self._code(f"{key}={value}") + value

    def _opened(self, key: str, data: bytes) -> str | None:
        text = data.decode(errors="replace")
        code, value = text[:_CODE_DIGITS], text[_CODE_DIGITS:]
        expected = self._code(f"{key}={value}")
        return value if hmac.compare_digest(code.encode(), expected.encode()) else None

    def _code(self, text: str) -> str:
        return hmac.digest(self._secret, text.encode(errors="replace"), "sha256").hex()
