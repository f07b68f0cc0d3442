"""Connect to the store of the run, also after its host was lost.

The supervisor of the node that --rdzv-endpoint names hosts the store.  If the store is lost, the
other nodes first wait for that node to return.  If enough nodes remain, the first of them, in the
order of the last attempt, hosts a new store at the same port, and writes its address into
``rendezvous.json``.  Spare and returning nodes read that file, so --exit-report-dir must be shared
by all nodes for this.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from megatron.core.config.errors import ConfigError, LaunchError
from megatron.training.supervisor.rendezvous import Rendezvous, Round, hosts_store
from megatron.training.supervisor.report import log

_FILE = "rendezvous.json"
_PAUSE_S = 1.0
_CONNECT_S = 2.0
_JOIN_TIMEOUT_S = 600


class Connector:
    """Connects this node, and knows the nodes of the last attempt."""

    def __init__(
        self, config: LaunchConfig, node: str, folder: Path, host_timeout_s: float
    ) -> None:
        self._config = config
        self._node = node
        self._folder = folder
        self._host_timeout_s = host_timeout_s

    @property
    def join_timeout_s(self) -> float:
        """Time limit of a rendezvous (--rdzv-conf join_timeout)."""
        return float(self._config.rdzv_configs.get("join_timeout", _JOIN_TIMEOUT_S))

    def connect(self, last: Round | None, num_spare: int = 0) -> Rendezvous:
        """Return a new connection.

        ``last`` is the attempt in which the store was lost, if any; ``num_spare`` further nodes
        waited for a place.

        After the time limit of a rendezvous it raises LaunchError, or ConfigError if no attempt was
        made.
        """
        begin_s = time.monotonic()
        reason = ""
        for config in self._candidates(last, num_spare, begin_s):
            try:
                # torch's client would try for minutes, and print a stack.
                if not hosts_store(config) and not _is_reachable(config.rdzv_endpoint):
                    raise RendezvousConnectionError("nobody listens at this address")
                found = Rendezvous(config, self._node)
            except (RendezvousConnectionError, RendezvousError) as error:
                reason = str(error.__cause__ or error).splitlines()[0]
            else:
                self._publish(config)
                return found
            if time.monotonic() - begin_s > self.join_timeout_s:
                break
            time.sleep(_PAUSE_S)
        kind = ConfigError if last is None else LaunchError
        raise kind(
            f"--rdzv-endpoint {self._config.rdzv_endpoint}: no store there within "
            f"{self.join_timeout_s:.0f} s ({reason}); start the supervisor of that node, or raise "
            "--rdzv-conf join_timeout"
        )

    def _candidates(
        self, last: Round | None, num_spare: int, begin_s: float
    ) -> Iterator[LaunchConfig]:
        """Yield addresses to try, without end."""
        _, _, port = self._config.rdzv_endpoint.rpartition(":")
        while True:
            if (moved := self._moved_to()) is not None:
                yield self._at(moved, is_host=False)
            yield self._config
            if last is None or time.monotonic() - begin_s < self._host_timeout_s:
                continue
            others = [i for i, was_host in enumerate(last.hosts) if not was_host]
            is_enough = len(others) + num_spare >= self._config.min_nodes
            for i in others if is_enough else ():
                endpoint = f"{last.addresses[i]}:{port}"
                is_host = last.names[i] == self._node
                if is_host or _is_reachable(endpoint):
                    log(f"trying {endpoint} as the host of the rendezvous")
                    yield self._at(endpoint, is_host=is_host)

    def _at(self, endpoint: str, *, is_host: bool) -> LaunchConfig:
        configs = {**self._config.rdzv_configs, "is_host": str(is_host).lower()}
        return replace(self._config, rdzv_endpoint=endpoint, rdzv_configs=configs)

    def _moved_to(self) -> str | None:
        """Return the address that another node hosts the store at, if it is not the first one."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads((self._folder / _FILE).read_text())
            endpoint = str(found["endpoint"])
            is_same_run = found["run_id"] == self._config.run_id
            if is_same_run and endpoint != self._config.rdzv_endpoint and _is_reachable(endpoint):
                return endpoint
        return None

    def _publish(self, config: LaunchConfig) -> None:
        if config.rdzv_endpoint != self._config.rdzv_endpoint:
            text = json.dumps({"run_id": config.run_id, "endpoint": config.rdzv_endpoint})
            with contextlib.suppress(OSError):
                (self._folder / _FILE).write_text(text)


def _is_reachable(endpoint: str) -> bool:
    address = parse_rendezvous_endpoint(endpoint, default_port=DEFAULT_PORT)
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True
