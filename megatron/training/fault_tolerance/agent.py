"""One attempt on this node: torch's agent starts the ranks, this subclass watches and ends them.

The attempt ends when a rank of this node fails, another node announces the end, a node is lost, a
rank hangs, further nodes want to join, or a stop signal comes.  After a stop signal, and when nodes
want to join, the ranks are asked to save and stop (SIGTERM; with --exit-signal-handler they do).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

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

from megatron.training.fault_tolerance.heartbeat import (
    VARIABLE,
    HangWatch,
    Limits,
    is_stopped,
    read_heartbeats,
)
from megatron.training.fault_tolerance.rendezvous import AttemptCoordination, Rendezvous
from megatron.training.fault_tolerance.restart_policy import (
    NodeReport,
    Options,
    RankEnd,
    read_reports,
)
from megatron.training.process import exit_report
from megatron.training.process.signals import ECHO_S, SUPERVISOR

_REQUEST_S = 1.0  # between requests to the store
_TERM_S = 5.0  # between SIGTERM and SIGKILL
_POLL_S = 0.05
_STACKS_S = 1.0  # for the ranks to print their stacks
_STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")


class AttemptAgent(LocalElasticAgent):
    """torch's agent for one attempt; ``report`` is the result."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        rendezvous: Rendezvous,
        stop: StopSignals,
        limits: Options,
        folder: Path,
        detector: HangDetector | None,
        **options: Any,
    ) -> None:
        """``folder`` receives a folder of exit reports of each attempt."""
        super().__init__(spec=spec, logs_specs=logs_specs, **options)
        self._rendezvous_of_run = rendezvous
        self._stop = stop
        self._limits = limits
        self._folder = folder
        self._detector = detector
        # The count of restarts that ranks and names of log folders show.
        self._remaining_restarts = spec.max_restarts - rendezvous.history.restarts
        self._asked_to_stop_at_s: float | None = None
        self._requested_at_s = 0.0
        self.processes = RankProcesses({})
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
        attempt = self._attempt()
        try:
            while not self._is_over(attempt):
                time.sleep(group.spec.monitor_interval)
            has_hang = self._detector is not None and self._detector.found
            if self.processes.has_failure or has_hang:
                attempt.announce("ended")
        except (dist.DistError, RendezvousError) as error:
            self.lost_store = str(error).splitlines()[0]
        codes = [end.code for end in self.processes.ends.values()]
        # 2: every rank has the same message.
        is_final = self._stop.first is not None or 2 in codes
        patience_s = 0.0 if is_final else self._limits.peer_timeout
        self.processes.end(patience_s, lambda: not self._stop.is_second)
        self._shutdown()  # closes their logs
        group.state = WorkerState.STOPPED
        ranks = dict.fromkeys(worker.global_rank for worker in group.workers)
        return RunResult(state=WorkerState.STOPPED, return_values=ranks)

    def _attempt(self) -> AttemptCoordination:
        assert self._rendezvous_of_run.attempt is not None, "the nodes have not met"
        return self._rendezvous_of_run.attempt

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Create the folders of the attempt and start the ranks."""
        reports = self._folder / self._attempt().name
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

    def _is_over(self, attempt: AttemptCoordination) -> bool:
        """Poll signals, ranks, hangs and other nodes; return whether to end the attempt."""
        self.processes.poll()
        if self._stop.first is not None and self._asked_to_stop_at_s is None:
            self._ask_ranks_to_stop()
        if self._asked_to_stop_at_s is not None:
            waited_s = time.monotonic() - self._asked_to_stop_at_s
            is_late = self._stop.is_second or waited_s > self._limits.shutdown_timeout
            return is_late or not self.processes.running() or self.processes.has_failure
        if self.processes.has_failure or not self.processes.running():
            return True
        if time.monotonic() - self._requested_at_s < _REQUEST_S:
            return False
        self._requested_at_s = time.monotonic()
        if self._rendezvous_of_run.lost_nodes():
            attempt.announce("ended")  # at once: a lost node may be back at the next request
            return True
        if attempt.has("ended"):
            return True
        if not attempt.has("join") and self._rendezvous_of_run.num_nodes_waiting() > 0:
            attempt.announce("join")
        if attempt.has("join"):
            self._ask_ranks_to_stop()
        return self._detector is not None and self._detector.poll(self.processes)

    def _ask_ranks_to_stop(self) -> None:
        self._asked_to_stop_at_s = time.monotonic()
        self.processes.send(signal.SIGTERM)

    def report(self, node: str) -> NodeReport:
        """Return how the ranks of this node have ended."""
        ended = self.processes.ends
        reports = read_reports(Path(os.environ[exit_report.FOLDER])) if ended else {}
        found = self._detector.found if self._detector is not None else {}
        ends = []
        for rank, end in sorted(ended.items()):
            text, order = found.get(rank, (None, ()))
            ends.append(replace(end, report=reports.get(rank, {}), hang=text, hang_order=order))
        return NodeReport(node=node, ranks=tuple(ends), stop_signal=self._stop.first)


class StopRequested(Exception):  # noqa: N818  not an error
    """A stop signal came while no rank was running."""


class StopSignals:
    """The stop signals that have come.

    The first asks the ranks to save and stop, a second ends them.  The signals are SIGTERM, SIGINT
    and SIGUSR1, which schedulers send before a time limit or a preemption, and those of
    --signals-to-handle.  While no rank runs, a signal raises StopRequested.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.is_second = False
        self.has_ranks = False  # else the handler raises
        self._first_at_s = 0.0

    def install(self, names: Iterable[str] = ()) -> None:
        """Install the handler; call it again after torch's agent has installed its own."""
        for name in {*_STOP_SIGNALS, *(name.strip() for name in names if name.strip())}:
            signal.signal(signal.Signals[name], self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.first is None:
            self.first = signum
            self._first_at_s = now_s
        elif signum == signal.SIGINT or now_s - self._first_at_s > ECHO_S:
            self.is_second = True
        if not self.has_ranks:
            raise StopRequested


class Process(Protocol):
    """The part of ``subprocess.Popen`` that is needed."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status, None while the process runs."""


class RankProcesses:
    """The processes of a node's ranks, by global rank.

    A rank is started as the leader of its own session, so its process group contains its data
    loader workers and checkpoint writers.
    """

    def __init__(self, processes: Mapping[int, Process]) -> None:
        self._processes = dict(processes)
        self._sent: set[int] = set()  # ranks that were sent a final signal
        self.ends: dict[int, RankEnd] = {}

    def poll(self) -> None:
        """Record the processes that have ended."""
        for rank in self.running():
            if (code := self._processes[rank].poll()) is not None:
                self.ends[rank] = RankEnd(
                    rank=rank, code=code, at_s=time.time(), was_ended=rank in self._sent
                )

    def running(self) -> list[int]:
        """Return the ranks that have not ended, as of the last `poll`."""
        return [rank for rank in self._processes if rank not in self.ends]

    @property
    def has_failure(self) -> bool:
        """Whether a rank ended with another exit status than 0."""
        return any(end.code != 0 for end in self.ends.values())

    def send(self, signum: int, ranks: Iterable[int] | None = None) -> None:
        """Send ``signum`` to the running ranks, or those of ``ranks``; not to their children."""
        for rank in self.running() if ranks is None else ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signum)

    def kill(self, rank: int) -> None:
        """End a rank and its children at once."""
        if rank not in self.ends:
            self._sent.add(rank)
            self._signal_group(rank, signal.SIGKILL)

    def end(self, patience_s: float, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """Wait ``patience_s`` for the ranks to end by themselves, then end them.

        A rank that its failure watch ends finishes its pending save first.  The wait
        ends when ``may_go_on`` returns False.
        """
        self._wait(patience_s, may_go_on)
        if may_go_on():
            self._sent.update(self.running())
            for rank in self.running():
                self._signal_group(rank, signal.SIGTERM)
            self._wait(_TERM_S, may_go_on)
        for rank in self.running():
            self.kill(rank)
        self._wait(_TERM_S, lambda: True)
        for rank in self._processes:  # what a rank has left in its group
            self._signal_group(rank, signal.SIGKILL)

    def _wait(self, patience_s: float, may_go_on: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + patience_s
        self.poll()
        while self.running() and time.monotonic() < deadline_s and may_go_on():
            time.sleep(_POLL_S)
            self.poll()

    def _signal_group(self, rank: int, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes[rank].pid, signum)


class HangDetector:
    """Detects ranks of this node that hang.

    It reads the heartbeats in ``folder``, which is in shared memory of the node.

    ``limits`` returns the present limits: a run learns them and saves them beside its checkpoints.
    ``found`` has the hang of each rank of which this node has found one, and a sort key, by which
    the rank that the others wait for comes first: one whose process is stopped, then one in no
    collective, then the one whose last sign is oldest.
    """

    def __init__(self, folder: Path, limits: Callable[[], Limits]) -> None:
        self._folder = folder
        self._limits = limits
        self._watch = HangWatch()
        self.found: dict[int, tuple[str, tuple[float, ...]]] = {}

    def begin(self) -> None:
        """Delete the heartbeats of the attempt before, and pass the folder to the ranks."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)
        os.environ[VARIABLE] = str(self._folder)

    def poll(self, processes: RankProcesses) -> bool:
        """Return whether a rank hangs; if so, ask all for their stacks and end the likely cause.

        The failure watch of the other ranks then ends them, with their reports.
        """
        running = set(processes.running())
        beats = [beat for beat in read_heartbeats(self._folder) if beat.rank in running]
        now_ns = time.monotonic_ns()
        hangs = self._watch.poll(beats, self._limits(), now_ns)
        if not hangs:
            return False
        stopped = {beat.rank for beat in beats if is_stopped(beat.pid)}
        # A rank with a heartbeat prints the stacks of all its threads; others would end.
        processes.send(signal.SIGUSR2, [beat.rank for beat in beats])
        time.sleep(_STACKS_S)
        for hang in hangs:
            beat = hang.heartbeat
            text = f"its process is stopped; {hang}" if beat.rank in stopped else str(hang)
            # Other hosts have another clock: compare the time that has passed since the sign.
            order = float(beat.rank not in stopped), float(beat.is_in_collective), -hang.waited_s
            self.found[beat.rank] = text, order
        processes.kill(min(self.found, key=lambda rank: self.found[rank][1]))
        return True
