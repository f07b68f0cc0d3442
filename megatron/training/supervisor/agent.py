"""One attempt on this node: torch's agent starts the ranks, this subclass watches and ends them.

The attempt ends when a rank of this node fails, another node announces the end, a node is lost, a
rank hangs, further nodes want to join, or a stop signal comes.  After a stop signal, and when nodes
want to join, the ranks are asked to save and stop (SIGTERM; with --exit-signal-handler they do).
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError

from megatron.training.process import exit_report
from megatron.training.process.launcher_watch import SUPERVISOR
from megatron.training.supervisor.evidence import NodeReport, RankEnd, read_reports
from megatron.training.supervisor.hangs import HangDetector
from megatron.training.supervisor.meeting import Meeting
from megatron.training.supervisor.processes import RankProcesses
from megatron.training.supervisor.rendezvous import Rendezvous
from megatron.training.supervisor.stop import StopSignals

_LOOK_S = 1.0  # between requests to the store


@dataclass(frozen=True, kw_only=True)
class Times:
    """Time limits in seconds."""

    patience_s: float = 15.0  # for ranks to end by themselves after another rank's failure
    shutdown_s: float = 30.0  # for ranks to save and stop after a stop signal
    node_s: float = 30.0  # without a sign of life of a node


class AttemptAgent(LocalElasticAgent):
    """torch's agent for one attempt; ``report`` is the result."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        rendezvous: Rendezvous,
        stop: StopSignals,
        times: Times,
        folder: Path,
        detector: HangDetector | None,
        **options: Any,
    ) -> None:
        """``folder`` receives a folder of exit reports of each attempt."""
        super().__init__(spec=spec, logs_specs=logs_specs, **options)
        self._rendezvous_of_run = rendezvous
        self._stop = stop
        self._times = times
        self._folder = folder
        self._detector = detector
        # The count of restarts that ranks and names of log folders show.
        self._remaining_restarts = spec.max_restarts - rendezvous.history.restarts
        self._asked_to_stop_at_s: float | None = None
        self._looked_at_s = 0.0
        self.processes = RankProcesses({})
        self.meeting: Meeting | None = None
        self.lost_nodes: list[int] = []
        self.lost_store: str | None = None  # error of the connection

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Rotate torch's ranks among the devices of this node, by the placement."""
        workers: list[Worker] = super()._assign_worker_ranks(
            store, group_rank, group_world_size, spec
        )
        shift = self._rendezvous_of_run.history.placement % max(1, len(workers))
        ranks = [(worker.global_rank, worker.role_rank) for worker in workers]
        for worker, (rank, role) in zip(workers, ranks[shift:] + ranks[:shift], strict=True):
            worker.global_rank = rank
            worker.role_rank = role
        return workers

    def _invoke_run(self, role: str = "") -> RunResult:
        """Start the ranks; return after all of this node have ended."""
        group = self._worker_group
        self._initialize_workers(group)
        assert self._rendezvous_of_run.round is not None, "the rendezvous has met"
        current = self._rendezvous_of_run.round
        self.meeting = Meeting(current.store, current.rank, len(current.names), self._times.node_s)
        try:
            while not self._is_over():
                time.sleep(group.spec.monitor_interval)
            if self.processes.has_failure or self.lost_nodes or self._hung():
                self.meeting.announce("ended")
        except (dist.DistError, RendezvousError) as error:
            self.lost_store = str(error).splitlines()[0]
        self._end_ranks()
        group.state = WorkerState.STOPPED
        ranks = dict.fromkeys(worker.global_rank for worker in group.workers)
        return RunResult(state=WorkerState.STOPPED, return_values=ranks)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Create the folders of the attempt and start the ranks."""
        current = self._rendezvous_of_run.round
        assert current is not None, "the rendezvous has met"
        reports = self._folder / current.name
        reports.mkdir(parents=True, exist_ok=True)
        os.environ[exit_report.FOLDER] = str(reports)
        os.environ[SUPERVISOR] = str(os.getpid())
        if self._detector is not None:
            self._detector.begin()
        self._stop.has_ranks = True  # from here on a signal ends the ranks first
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._stop.install()
        handlers = self._pcontext.subprocess_handlers  # type: ignore[union-attr]
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        self.processes = RankProcesses({ranks[i]: h.proc for i, h in handlers.items()})
        return started

    def _is_over(self) -> bool:
        """Look at signals, ranks, hangs and other nodes; return whether to end the attempt."""
        self.processes.poll()
        if self._stop.first is not None and self._asked_to_stop_at_s is None:
            self._ask_ranks_to_stop()
        if self._asked_to_stop_at_s is not None:
            waited_s = time.monotonic() - self._asked_to_stop_at_s
            is_late = self._stop.is_second or waited_s > self._times.shutdown_s
            return is_late or not self.processes.running() or self.processes.has_failure
        if self.processes.has_failure or not self.processes.running():
            return True
        if time.monotonic() - self._looked_at_s < _LOOK_S:
            return False
        self._looked_at_s = time.monotonic()
        return self._look_at_nodes() or self._look_for_hangs()

    def _look_at_nodes(self) -> bool:
        assert self.meeting is not None, "it was created before the ranks started"
        self.meeting.beat()
        self.lost_nodes = self.meeting.lost(self.meeting.neighbour())
        if self.lost_nodes or self.meeting.has("ended"):
            return True
        if not self.meeting.has("join") and self._rendezvous_of_run.num_nodes_waiting() > 0:
            self.meeting.announce("join")
        if self.meeting.has("join"):
            self._ask_ranks_to_stop()
        return False

    def _look_for_hangs(self) -> bool:
        return self._detector is not None and self._detector.look(self.processes)

    def _hung(self) -> bool:
        return self._detector is not None and bool(self._detector.found)

    def _ask_ranks_to_stop(self) -> None:
        self._asked_to_stop_at_s = time.monotonic()
        self.processes.send(signal.SIGTERM)

    def _end_ranks(self) -> None:
        """End all ranks of this node, and close their logs."""
        codes = [end.code for end in self.processes.ends.values()]
        patience_s = self._times.patience_s
        if self._stop.first is not None or 2 in codes:  # 2: every rank has the same message
            patience_s = 0.0
        self.processes.end(patience_s, lambda: not self._stop.is_second)
        self._shutdown()

    def report(self, node: str) -> NodeReport:
        """Return how the ranks of this node have ended."""
        reports = read_reports(Path(os.environ[exit_report.FOLDER]))
        found = self._detector.found if self._detector is not None else {}
        ends = []
        for rank, end in sorted(self.processes.ends.items()):
            text, order = found.get(rank, (None, ()))
            ends.append(
                RankEnd(
                    rank=rank,
                    code=end.code,
                    at_s=end.at_s,
                    report=reports.get(rank, {}),
                    hang=text,
                    hang_order=order,
                    was_ended=end.was_ended,
                )
            )
        return NodeReport(
            node=node,
            ranks=tuple(ends),
            stop_signal=self._stop.first,
            lost_store=self.lost_store is not None,
        )
