"""Authenticated keys in a process group's store, which only the ranks of this run can write.

Any program that reaches the TCP port of a store can read, overwrite and delete its keys.  The ranks
of a run therefore share a secret that is never written to the store (`agree_on_secret`): names of
keys are derived from it, and each value is stored with a message authentication code (MAC) of key
and value.  A value with a wrong MAC counts as absent.

Not protected: counters, which only determine how long ranks wait; deletion of keys; flooding.
"""

from __future__ import annotations

import hmac
import secrets

import torch
import torch.distributed as dist
from torch.distributed import Store

from megatron.core import device

SECRET_BYTES = 32
_CODE_DIGITS = 64  # hexadecimal digits of SHA-256
# Counter of ranks that ended without reporting
# (`megatron.training.fault_tolerance.failure_watch`).
LOST_RANKS = "lost_ranks"


def agree_on_secret() -> bytes:
    """Return 32 random bytes, the same on all ranks.  Collective over all ranks.

    Rank 0 broadcasts them over the process group, not over the store.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return secret
    shared = torch.tensor(list(secret), dtype=torch.uint8, device=device.current())
    dist.broadcast(shared, src=0)
    return bytes(shared.tolist())


class RunStore:
    """Authenticated view of ``store`` for the ranks that share ``secret``.

    Not thread-safe: another thread needs a `clone`.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store = store
        self._secret = secret

    def clone(self) -> RunStore:
        """Return a view of the same keys through a connection of its own."""
        return RunStore(self._store.clone(), self._secret)  # type: ignore[attr-defined]

    def set(self, name: str, value: str) -> None:
        """Write ``value`` under ``name``."""
        key = self._key(name)
        self._store.set(key, self._sealed(key, value))

    def get(self, name: str) -> str | None:
        """Return the value, or None if no rank of this run has written one.  Does not block."""
        key = self._key(name)
        if not self._store.check([key]):
            return None
        return self._opened(key, self._store.get(key))

    def set_first(self, name: str, value: str) -> str:
        """Write ``value`` unless a rank of this run has already done so; return the stored one."""
        key = self._key(name)
        before = ""
        sealed = self._sealed(key, value)
        first = self._opened(key, self._store.compare_set(key, before, sealed))
        if first is None:  # a program outside of this run has written it
            self._store.set(key, sealed)
            return value
        return first

    def add(self, name: str, amount: int) -> int:
        """Add ``amount`` to a counter and return its new value.  Counters are not protected."""
        return int(self._store.add(self._key(name), amount))

    def _key(self, name: str) -> str:
        return f"run/{self._code(name)}"

    def _sealed(self, key: str, value: str) -> str:
        return self._code(f"{key}={value}") + value

    def _opened(self, key: str, data: bytes) -> str | None:
        text = data.decode(errors="replace")
        code = text[:_CODE_DIGITS]
        value = text[_CODE_DIGITS:]
        expected = self._code(f"{key}={value}")
        return value if hmac.compare_digest(code.encode(), expected.encode()) else None

    def _code(self, text: str) -> str:
        return hmac.digest(self._secret, text.encode(errors="replace"), "sha256").hex()
