"""Rendezvous of an attempt: torch's dynamic rendezvous, and what the nodes then agree on.

After torch's rendezvous every node publishes its name and history in the store of the round; all
take the history with the most attempts.  From it follow the placement (a rotation of the nodes; the
agent also rotates the ranks within a node) and, if flags fix the sizes of other axes than data
parallelism, the number of nodes that train: the largest that the flags allow.  The others wait.

Keys of the round: ``node/I``, ``attempt``; those of `meeting.Meeting`; torch's own.  Keys of the
run: ``supervisor/history``, ``supervisor/outcome/ATTEMPT``, ``supervisor/connected`` (number of
nodes), ``supervisor/unhealthy`` (number of nodes that left by --check-node),
``supervisor/unhealthy/I``, ``supervisor/end``, ``supervisor/left``.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
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
    _RendezvousExitOp,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    parse_rendezvous_endpoint,
)
from torch.distributed.launcher.api import LaunchConfig

from megatron.core.config.errors import ConfigError
from megatron.training.supervisor.evidence import Outcome
from megatron.training.supervisor.policy import History

NodeCount = Callable[[int], int]  # nodes that joined -> nodes that train
_NUMBERS = (  # of --rdzv-conf
    *("join_timeout", "last_call_timeout", "close_timeout", "read_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt"),
)


@dataclass(frozen=True)
class Round:
    """An attempt as this node sees it.  ``rank`` is its index in ``names``; the first train."""

    store: dist.Store
    rank: int
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    num_training: int
    history: History
    name: str  # of the attempt
    hosts: tuple[bool, ...]  # whether a node hosts the store, in the order of names

    @property
    def is_training(self) -> bool:
        """Whether this node starts ranks."""
        return self.rank < self.num_training


class WaitingNode(Exception):  # noqa: N818  not an error
    """This node joined, but the layout does not need it in this attempt."""


class Rendezvous(RendezvousHandler):
    """torch's handler of one connection to the store of the run; ``round`` is the latest one."""

    def __init__(self, config: LaunchConfig, node: str) -> None:
        """Connect to the store.  Raises RendezvousError."""
        parameters = _parameters(config)
        backend, store = create_backend(parameters)
        self._inner = create_handler(store, backend, parameters)
        self._node = node
        self._local_addr = config.local_addr
        self._hosts_store = hosts_store(config)
        self.run_store: dist.Store = dist.PrefixStore("supervisor", store)
        self.run_store.add("connected", 1)
        self.round: Round | None = None
        self.history = History()
        self.num_spare = 0  # nodes that waited for a place when this node last looked
        self.nodes_that_train: NodeCount = lambda joined: joined

    @property
    def use_agent_store(self) -> bool:
        return self._inner.use_agent_store

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round.

        Raises WaitingNode if this node does not train, ConfigError if no number of nodes fits the
        flags.
        """
        info = self._joined()
        store = dist.PrefixStore("supervisor", info.store)
        address = self._local_addr or socket.gethostname()
        mine = {
            "node": self._node,
            "address": address,
            "hosts": self._hosts_store,
            "history": self.history.to_text(),
        }
        store.set(f"node/{info.rank}", json.dumps(mine))
        nodes = [json.loads(store.get(f"node/{i}")) for i in range(info.world_size)]
        history = max((History.from_text(n["history"]) for n in nodes), key=lambda h: h.attempts)
        if info.rank == 0:  # the excluded nodes of the history and of --check-node
            attempt = f"attempt_{history.attempts}_{secrets.token_hex(3)}"
            store.set("attempt", json.dumps([attempt, self.excluded(history)]))
        attempt, excluded = json.loads(store.get("attempt"))
        history = replace(history, excluded=tuple(excluded))
        self.history = history
        # Only the nodes that train are rotated: rank 0 must be one of them.
        num_training = self.nodes_that_train(info.world_size)
        rank = info.rank
        shift = history.placement % num_training
        if rank < num_training:
            rank = (rank + shift) % num_training
        ordered = [nodes[(i - shift) % num_training] for i in range(num_training)]
        ordered += nodes[num_training:]
        names, addresses, hosts = (
            tuple(node[key] for node in ordered) for key in ("node", "address", "hosts")
        )
        self.round = Round(store, rank, names, addresses, num_training, history, attempt, hosts)
        if not self.round.is_training:
            raise WaitingNode
        placed = dist.PrefixStore("placed", info.store)
        found = RendezvousStoreInfo.build(rank, placed, local_addr=self._local_addr)
        return RendezvousInfo(placed, rank, num_training, found)

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that wait and for which the next round has room.

        A node that another one has outrun stays in torch's wait list, also if there is no room.
        """
        waiting = self._inner.num_nodes_waiting()  # reads the state, without dead nodes
        state = self._inner._state_holder.state
        self.num_spare = len(state.wait_list | state.redundancy_list)
        return 0 if self._is_full() else waiting

    def _is_full(self) -> bool:
        state = self._inner._state_holder.state
        return state.complete and len(state.participants) >= self._inner.settings.max_nodes

    def _joined(self) -> RendezvousInfo:
        """Join torch's next round; a spare node waits for a place without a time limit."""
        while True:
            try:
                return self._inner.next_rendezvous()
            except RendezvousTimeoutError:
                if not self._is_full():
                    raise

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()

    def leave(self) -> None:
        """Leave the latest round without an end of the run; torch's next round waits for this.

        Raises RendezvousError.
        """
        inner = self._inner
        inner._stop_heartbeats()
        deadline_s = inner._get_deadline(inner._settings.timeout.join)
        inner._op_executor.run(_RendezvousExitOp(), deadline_s)

    def num_spare_nodes(self) -> int:
        """Return the number of living nodes that wait for a place.  Raises RendezvousError."""
        self.num_nodes_waiting()
        return self.num_spare

    def is_empty(self) -> bool:
        """Return whether no living node trains or waits for a place.  Raises RendezvousError."""
        return self.num_spare_nodes() == 0 and not self._inner._state_holder.state.participants

    def report_unhealthy(self) -> None:
        """Tell the other nodes that this node leaves the run."""
        self.run_store.set(f"unhealthy/{self.run_store.add('unhealthy', 1)}", self._node)

    def excluded(self, history: History) -> tuple[str, ...]:
        """Return the nodes that ``history`` excludes, and those that left by --check-node."""
        count = self.run_store.add("unhealthy", 0)
        more = [self.run_store.get(f"unhealthy/{i}").decode() for i in range(1, count + 1)]
        return tuple(dict.fromkeys((*history.excluded, *more)))

    def outcomes(self, count: int) -> list[Outcome]:
        """Return the outcomes of the first ``count`` attempts that are in this store."""
        keys = [f"outcome/{attempt}" for attempt in range(1, count + 1)]
        texts = [self.run_store.get(key).decode() for key in keys if self.run_store.check([key])]
        return [Outcome.from_text(text) for text in texts]

    def agreed_history(self) -> History | None:
        """Return the history after the latest attempt of the run, None before its end."""
        is_known = self.run_store.check(["history"])
        return History.from_text(self.run_store.get("history").decode()) if is_known else None


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
