"""Messages between the workers, their monitor processes and the coordinator, over the store.

Events go to the coordinator: each writer takes the next number and writes one key.  Decisions are
keys that everybody polls.  No function blocks longer than one request.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.training.fault_tolerance.inprocess.coordinator import (
    Decision,
    End,
    Event,
    Kill,
    Start,
    Stop,
)

_ANSWER = timedelta(seconds=30)  # of the store


class Control:
    """A connection to the store of this start of the run, which ``token`` names.

    Not thread-safe: each thread opens its own.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._tcp = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=_ANSWER,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )
        self._store = dist.PrefixStore(f"inprocess/{token}", self._tcp)

    def reopened(self) -> Control:
        """Return another connection."""
        return Control(self._token)

    def store_of_attempt(self, number: int, timeout: timedelta) -> dist.Store:
        """Return a store for the process groups of one attempt, over a connection of its own."""
        tcp = self._tcp.clone()  # type: ignore[attr-defined]
        tcp.set_timeout(timeout)
        return dist.PrefixStore(f"inprocess/{self._token}/attempt/{number}", tcp)

    def send(self, **event: Any) -> None:
        """Send an event to the coordinator; see `Coordinator.take` for the keys."""
        number = self._store.add("events", 1)
        self._store.set(f"event/{number}", json.dumps(event))

    def events(self) -> Iterator[Event | None]:
        """Yield the events in order, None while there is no further one."""
        number = 1
        while True:
            if not self._store.check([f"event/{number}"]):
                yield None
                continue
            yield json.loads(self._store.get(f"event/{number}"))
            self._store.delete_key(f"event/{number}")
            number += 1

    def publish(self, decision: Decision) -> None:
        """Publish a decision of the coordinator."""
        if isinstance(decision, Start):
            self._store.set(f"start/{decision.number}", json.dumps(decision.active))
        elif isinstance(decision, Stop):
            self._store.set(f"stop/{decision.number}", decision.text)
        elif isinstance(decision, Kill):
            self._store.set(f"kill/{decision.worker}", "")
        else:
            self._store.set("end", json.dumps([decision.code, decision.text]))

    def start(self, number: int) -> list[int] | None:
        """Return the active workers of an attempt, None if it has not started."""
        key = f"start/{number}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def is_stopped(self, number: int) -> bool:
        """Return whether the attempt is to be left."""
        return bool(self._store.check([f"stop/{number}"]))

    def is_killed(self, worker: int) -> bool:
        """Return whether the worker is to be ended."""
        return bool(self._store.check([f"kill/{worker}"]))

    def end(self) -> End | None:
        """Return how the run has ended, None while it has not."""
        return End(*json.loads(self._store.get("end"))) if self._store.check(["end"]) else None

    def beat(self, name: str) -> None:
        """Write a heartbeat."""
        self._store.add(f"beat/{name}", 1)

    def beats(self, name: str) -> int:
        """Return the number of heartbeats of ``name``."""
        return int(self._store.add(f"beat/{name}", 0))
