"""Rendezvous of an attempt: torch's dynamic rendezvous, and what the nodes then agree on.

After torch's rendezvous every node publishes its name and history in the store of the round; all
take the history with the most attempts.  From it follow the placement (a rotation of the nodes; the
agent also rotates the ranks within a node) and, if flags fix the sizes of other axes than data
parallelism, the number of nodes that train: the largest that the flags allow.  The others wait.
torch's rendezvous also says which nodes live.

Keys of the round: ``node/I``, ``attempt``, ``ended`` (a node ends the attempt), ``join`` (further
nodes wait), ``report/I`` (how the ranks of node I ended), ``decision`` (each node comes to one; the
first that is written is valid for all); torch's own.  Keys of the run: ``supervisor/history``,
``supervisor/connected`` (number of nodes), ``supervisor/unhealthy``
(number of nodes that left by --check-node), ``supervisor/unhealthy/I``, ``supervisor/end``,
``supervisor/left``.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    DEFAULT_PORT,
    create_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _RendezvousExitOp,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    parse_rendezvous_endpoint,
)
from torch.distributed.launcher.api import LaunchConfig

from megatron.core.config.errors import ConfigError, LaunchError
from megatron.training.fault_tolerance.restart_policy import (
    Decision,
    History,
    NodeReport,
    from_json,
    to_json,
)
from megatron.training.process.rendezvous import why_not_reachable

# Number of nodes that joined -> number of nodes that train.
NodeCount = Callable[[int], int]
_POLL_S = 0.1
_FILE = "rendezvous.json"
_PAUSE_S = 1.0
_JOIN_TIMEOUT_S = 600
# Parameters of --rdzv-conf.
_NUMBERS = (
    *("join_timeout", "last_call_timeout", "close_timeout", "read_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt"),
)


@dataclass(frozen=True)
class Node:
    """A node of an attempt; ``hosts_store``: it hosts the store of the run."""

    name: str
    address: str
    hosts_store: bool


@dataclass(frozen=True)
class AttemptCoordination:
    """An attempt as this node sees it, and what its nodes agree on through the attempt's store.

    ``rank`` is the index of this node in ``nodes``; the first ``num_training`` nodes start ranks.
    The methods raise torch's DistError.
    """

    store: dist.Store
    rank: int
    nodes: tuple[Node, ...]
    num_training: int
    name: str

    @property
    def is_training(self) -> bool:
        """Whether this node starts ranks."""
        return self.rank < self.num_training

    def has(self, event: str) -> bool:
        """Return whether a node has called ``announce(event)``."""
        return bool(self.store.check([event]))

    def announce(self, event: str) -> None:
        """Publish ``ended`` or ``join``."""
        self.store.set(event, "")

    def collect(
        self, report: NodeReport, limit_s: float, lost_nodes: Callable[[], Collection[int]]
    ) -> tuple[list[NodeReport], list[str]]:
        """Publish ``report``; return the reports of all nodes, and the names of lost nodes.

        Waits without limit for nodes whose ranks train on, and ``limit_s`` after an attempt has
        ended by a failure.  ``lost_nodes`` returns the ranks of nodes without a sign of life.
        """
        self.store.set(f"report/{self.rank}", to_json(report))
        missing = list(range(len(self.nodes)))
        ended_at_s: float | None = None
        while True:
            missing = [rank for rank in missing if not self.has(f"report/{rank}")]
            if ended_at_s is None and self.has("ended"):
                ended_at_s = time.monotonic()
            is_over = ended_at_s is not None and time.monotonic() - ended_at_s > limit_s
            if is_over or not set(missing) - set(lost_nodes()):
                break
            time.sleep(_POLL_S)
        present = [rank for rank in range(len(self.nodes)) if rank not in missing]
        texts = [self.store.get(f"report/{rank}").decode() for rank in present]
        lost = [self.nodes[rank].name for rank in missing]
        return [from_json(NodeReport, text) for text in texts], lost

    def agree(self, decision: Decision) -> Decision:
        """Return the decision of the node that decided first."""
        text = self.store.compare_set("decision", "", to_json(decision))
        return from_json(Decision, text.decode())


class WaitingNode(Exception):  # noqa: N818  not an error
    """This node joined, but the layout does not need it in this attempt."""


class Rendezvous(DynamicRendezvousHandler):
    """torch's handler of one connection to the store of the run; ``attempt`` is the latest one."""

    def __init__(self, config: LaunchConfig, node: str) -> None:
        """Connect to the store.  Raises RendezvousError."""
        parameters = _parameters(config)
        backend, store = create_backend(parameters)
        made = create_handler(store, backend, parameters)
        super().__init__(made._this_node, made.settings, backend.name, store, made._state_holder)
        self._node = node
        self._local_addr = config.local_addr
        self._hosts_store = hosts_store(config)
        self.run_store: dist.Store = dist.PrefixStore("supervisor", store)
        self.run_store.add("connected", 1)
        self.attempt: AttemptCoordination | None = None
        self._places: dict[Any, int] = {}  # torch's node -> its rank in the attempt
        self.history = History()
        self.nodes_that_train: NodeCount = lambda joined: joined

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round.

        Raises WaitingNode if this node does not train, ConfigError if no number of nodes fits the
        flags.
        """
        info = self._join()
        store = dist.PrefixStore("supervisor", info.store)
        address = self._local_addr or socket.gethostname()
        mine = Node(self._node, address, self._hosts_store)
        store.set(f"node/{info.rank}", json.dumps([to_json(mine), to_json(self.history)]))
        pairs = [json.loads(store.get(f"node/{i}")) for i in range(info.world_size)]
        nodes = [from_json(Node, text) for text, _ in pairs]
        history = max((from_json(History, text) for _, text in pairs), key=lambda h: h.attempts)
        if info.rank == 0:  # the excluded nodes of the history and of --check-node
            attempt = f"attempt_{history.attempts}_{secrets.token_hex(3)}"
            store.set("attempt", json.dumps([attempt, self.excluded(history)]))
        attempt, excluded = json.loads(store.get("attempt"))
        self.history = replace(history, excluded=tuple(excluded))
        # Only the nodes that train are rotated: rank 0 must be one of them.
        num_training = self.nodes_that_train(info.world_size)
        turned = [(i - history.placement) % num_training for i in range(num_training)]
        order = [*turned, *range(num_training, info.world_size)]  # torch's ranks, as they are used
        joined = self._state_holder.state.participants
        self._places = {node: order.index(rank) for node, rank in joined.items()}
        rank = order.index(info.rank)
        ordered = tuple(nodes[i] for i in order)
        self.attempt = AttemptCoordination(store, rank, ordered, num_training, attempt)
        if not self.attempt.is_training:
            raise WaitingNode
        placed = dist.PrefixStore("placed", info.store)
        found = RendezvousStoreInfo.build(rank, placed, local_addr=self._local_addr)
        return RendezvousInfo(placed, rank, num_training, found)

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that wait and for which the next round has room.

        A node that another one has outrun stays in torch's wait list, also if there is no room.
        """
        waiting: int = super().num_nodes_waiting()  # reads the state, without dead nodes
        return 0 if self._is_full() else waiting

    def _is_full(self) -> bool:
        state = self._state_holder.state
        return state.complete and len(state.participants) >= self.settings.max_nodes

    def _join(self) -> RendezvousInfo:
        """Join torch's next round; a spare node waits for a place without a time limit."""
        while True:
            try:
                return super().next_rendezvous()
            except RendezvousTimeoutError:
                if not self._is_full():
                    raise

    def leave(self) -> None:
        """Leave the latest round without an end of the run; torch's next round waits for this.

        Raises RendezvousError.
        """
        self._stop_heartbeats()
        self._op_executor.run(_RendezvousExitOp(), self._get_deadline(self.settings.timeout.join))

    @property
    def num_spare(self) -> int:
        """Number of living nodes that wait for a place, as of the last request to the store."""
        state = self._state_holder.state
        return len(state.wait_list | state.redundancy_list)

    def num_spare_nodes(self) -> int:
        """Return the number of living nodes that wait for a place.  Raises RendezvousError."""
        self.num_nodes_waiting()
        return self.num_spare

    def is_empty(self) -> bool:
        """Return whether no living node trains or waits for a place.  Raises RendezvousError."""
        return self.num_spare_nodes() == 0 and not self._state_holder.state.participants

    def lost_nodes(self) -> list[int]:
        """Return the ranks of the attempt's other nodes that give no sign of life.

        torch's rendezvous removes them.  Raises RendezvousError.
        """
        self.num_nodes_waiting()
        present = {*self._state_holder.state.participants, self._this_node}
        return [rank for node, rank in self._places.items() if node not in present]

    def report_unhealthy(self) -> None:
        """Tell the other nodes that this node leaves the run."""
        self.run_store.set(f"unhealthy/{self.run_store.add('unhealthy', 1)}", self._node)

    def excluded(self, history: History) -> tuple[str, ...]:
        """Return the nodes that ``history`` excludes, and those that left by --check-node."""
        count = self.run_store.add("unhealthy", 0)
        more = [self.run_store.get(f"unhealthy/{i}").decode() for i in range(1, count + 1)]
        return tuple(dict.fromkeys((*history.excluded, *more)))

    def agreed_history(self) -> History | None:
        """Return the history after the latest attempt of the run, None before its end."""
        is_known = self.run_store.check(["history"])
        return from_json(History, self.run_store.get("history").decode()) if is_known else None


class Connector:
    """Connects this node to the store of the run, also after the host of the store was lost.

    The supervisor of the node that --rdzv-endpoint names hosts the store.  If the store is lost,
    the other nodes first wait for that node to return.  If enough nodes remain, the first of them,
    in the order of the last attempt, hosts a new store at the same port, and writes its address
    into ``rendezvous.json``.  Spare and returning nodes read that file, so --exit-report-dir must
    be shared by all nodes for this.
    """

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

    def connect(self, last: AttemptCoordination | None, num_spare: int = 0) -> Rendezvous:
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
                if config.rdzv_endpoint != self._config.rdzv_endpoint:
                    moved = {"run_id": config.run_id, "endpoint": config.rdzv_endpoint}
                    with contextlib.suppress(OSError):
                        (self._folder / _FILE).write_text(json.dumps(moved))
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
        self, last: AttemptCoordination | None, num_spare: int, begin_s: float
    ) -> Iterator[LaunchConfig]:
        """Yield addresses to try, without end."""
        _, _, port = self._config.rdzv_endpoint.rpartition(":")
        while True:
            if (moved := self._moved_to()) is not None:
                yield self._at(moved, is_host=False)
            yield self._config
            if last is None or time.monotonic() - begin_s < self._host_timeout_s:
                continue
            others = [node for node in last.nodes if not node.hosts_store]
            is_enough = len(others) + num_spare >= self._config.min_nodes
            for node in others if is_enough else ():
                endpoint = f"{node.address}:{port}"
                is_host = node.name == self._node
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


def check_parameters(config: LaunchConfig) -> None:
    """Raise ValueError if --rdzv-endpoint or --rdzv-conf contains a wrong value."""
    parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=DEFAULT_PORT)
    parameters = _parameters(config)
    parameters.get_as_bool("is_host")
    for name in _NUMBERS:
        if (value := parameters.get_as_int(name)) is not None and value <= 0:
            raise ValueError(f"--rdzv-conf {name}={value}: at least 1 is needed")


def hosts_store(config: LaunchConfig) -> bool:
    """Return whether this node hosts the store, if no other process of this host does."""
    given = _parameters(config).get_as_bool("is_host")
    if given is not None:
        return given
    host, _ = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=DEFAULT_PORT)
    return _matches_machine_hostname(host)


def _parameters(config: LaunchConfig) -> RendezvousParameters:
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )


def nodes_that_fit(
    joined: int, min_nodes: int, ranks_per_node: int, refusal: Callable[[int], str | None]
) -> int:
    """Return the largest number of nodes, at most ``joined``, whose ranks the flags allow.

    ``refusal(world_size)`` returns why a number of ranks is not possible.  Raises ConfigError if no
    number of at least ``min_nodes`` is.
    """
    first = None
    for nodes in range(joined, min_nodes - 1, -1):
        why = refusal(nodes * ranks_per_node)
        if why is None:
            return nodes
        first = first or why
    raise ConfigError(
        f"{joined} nodes with {ranks_per_node} ranks each joined, and the flags allow no number of "
        f"nodes from {min_nodes} (--nnodes) to {joined}; with {joined}:\n{first}"
    )


def _is_reachable(endpoint: str) -> bool:
    address = parse_rendezvous_endpoint(endpoint, default_port=DEFAULT_PORT)
    return why_not_reachable(*address) is None


def log(text: str) -> None:
    """Print a line of the supervisor to standard error."""
    print(f"[supervisor] {text}", file=sys.stderr, flush=True)
