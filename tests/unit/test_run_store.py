"""Who reaches the store but does not know the secret cannot speak for a rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron.core.parallel.run_store import RunStore, agree_on_secret
from tests.support.ranks import run_ranks

SECRET = bytes(range(32))


def keys_of(store: dist.Store, name: str) -> str:
    """The key under which ``name`` stands: a stranger can list the keys of a TCPStore."""
    return RunStore(store, SECRET)._key(name)


def test_ranks_that_share_a_secret_share_values() -> None:
    store = dist.HashStore()
    one, other = RunStore(store, SECRET), RunStore(store, SECRET)
    assert one.get("failure") is None
    one.set("failure", "rank 1: \u00fc")
    assert other.get("failure") == "rank 1: \u00fc"
    assert other.set_first("failure", "rank 2") == "rank 1: \u00fc"
    assert other.add("left", 1) + one.add("left", 1) == 3


@pytest.mark.feature("Running: who only reaches the store's port cannot end a run")
def test_what_a_stranger_writes_counts_as_absent() -> None:
    store = dist.HashStore()
    ours, strangers = RunStore(store, SECRET), RunStore(store, bytes(32))
    strangers.set("failure", "rank 0 failed")
    assert ours.get("failure") is None
    for forged in ("", "rank 0 failed", "0" * 64 + "rank 0 failed", "\u00fc" * 80):
        store.set(keys_of(store, "failure"), forged)
        assert ours.get("failure") is None
    store.set(keys_of(store, "failure"), b"\xff" * 100)
    assert ours.set_first("failure", "rank 1 failed") == "rank 1 failed"
    assert ours.get("failure") == "rank 1 failed"


def test_a_value_cannot_be_moved_to_another_key() -> None:
    store = dist.HashStore()
    ours = RunStore(store, SECRET)
    ours.set("line", "waits")
    store.set(keys_of(store, "failure"), store.get(keys_of(store, "line")))
    assert ours.get("failure") is None


def _secret(rank: int, world_size: int) -> bytes:
    return agree_on_secret()


def test_all_ranks_of_a_run_agree_on_a_secret_of_their_own() -> None:
    first, second = run_ranks(_secret, 2), run_ranks(_secret, 2)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert len({first[0], second[0], agree_on_secret()}) == 3
    assert len(first[0]) == 32
