"""The monitor process of a worker, and the coordinator in the monitor process of worker 0.

    launcher (torchrun) -> monitor process -> worker

The process that the launcher has started forks the worker before it has run any operation, and
keeps nothing but the imported modules.  So the launcher does not notice when a worker is killed:
the monitor process reports it to the coordinator and stays until the run ends, with the exit status
of the run.  It ends a worker that has made no progress for --inprocess-hard-timeout.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import FrameType

from megatron.core.config.errors import MegatronError
from megatron.training.fault_tolerance.heartbeat import process_state
from megatron.training.fault_tolerance.inprocess.control import Control
from megatron.training.fault_tolerance.inprocess.coordinator import Coordinator, End, Start
from megatron.training.fault_tolerance.inprocess.options import RestartOptions
from megatron.training.fault_tolerance.inprocess.worker import (
    IS_WATCHED,
    PROGRESS_NS,
    WORKER,
    Attempt,
    Slots,
    Worker,
    report_lost_store,
)
from megatron.training.process import exit_report
from megatron.training.process.failure_watch import tell_launcher
from megatron.training.process.rendezvous import meet
from megatron.training.process.signals import StopSignal

_COORDINATOR = "coordinator"  # name of its heartbeat
_POLL_S = 0.05  # of the coordinator; each is one request to the store
_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_TOKEN_BYTES = 16
_FAREWELL_S = 10.0


def run_with_restarts(
    call: Callable[[Attempt], None],
    options: RestartOptions,
    end: Callable[[int], None] = os._exit,
) -> None:
    """Call ``call`` with restarts inside the processes.  Every started process calls this.

    Returns in the worker processes when the run is done; in the monitor processes it never returns.
    ``end(status)`` ends the process without running any other code in it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    slots: Slots = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
    pipe = os.pipe()
    worker = int(os.environ["RANK"])
    monitor = os.getpid()
    os.environ[WORKER] = str(worker)
    child = os.fork()
    if child:
        os.close(pipe[0])
        code = 1
        try:
            code = _Monitor(worker, child, options, slots).run(pipe[1])
        finally:
            sys.stdout.flush()
            end(code)
    os.close(pipe[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(pipe[0], "rb") as reading:
        token = reading.read(2 * _TOKEN_BYTES).decode()
    if not token or os.getppid() != monitor:
        end(1)  # the monitor process has reported why
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the worker never serves the store
    try:
        Worker(worker, options, token, slots).run(call)
    except RuntimeError as error:
        report_lost_store(error)
        end(1)


class _Monitor:
    """Monitor process of one worker."""

    def __init__(self, worker: int, child: int, options: RestartOptions, slots: Slots) -> None:
        self._worker = worker
        self._child = child
        self._options = options
        self._slots = slots
        self._flags = options.flags
        self._descriptor = os.pidfd_open(child)
        self._is_alive = True
        self._code = 1  # exit status of the worker
        self._why = ""  # this process has ended it
        self._seen: tuple[int, float] = (-1, time.monotonic())  # heartbeats of the coordinator

    def run(self, pipe: int) -> int:
        """Watch the worker until the run ends; return the exit status."""
        world_size = self._options.world_size
        try:
            store = meet(self._worker, world_size, timedelta(seconds=self._options.timeout_s))
        except MegatronError as error:
            return self._fail(f"{type(error).__name__}: {error}", error.exit_code)
        store.set(f"node/{self._worker}", _node())
        if self._worker == 0:
            store.set("token", secrets.token_hex(_TOKEN_BYTES))
        token = store.get("token").decode()
        self._forward_signals()
        if self._worker == 0:
            nodes = [store.get(f"node/{w}").decode() for w in range(world_size)]
            coordinator = Coordinator(self._options.policy, nodes)
            serve = _Service(coordinator, Control(token), self._flags.inprocess_heartbeat_interval)
            serve.limit_s = self._flags.inprocess_heartbeat_timeout
            threading.Thread(target=serve.run, name=_COORDINATOR, daemon=True).start()
        os.write(pipe, token.encode())
        os.close(pipe)
        try:
            return self._watch(Control(token))
        except RuntimeError as error:
            report_lost_store(error)
            return self._fail(f"rank {self._worker} has lost the store of the run", 1)

    def _watch(self, control: Control) -> int:
        beat_at_s = 0.0
        while True:
            if time.monotonic() >= beat_at_s:
                beat_at_s = time.monotonic() + self._flags.inprocess_heartbeat_interval
                control.beat(str(self._worker))
                self._check_coordinator(control)
            self._wait(self._flags.inprocess_monitor_process_interval)
            end = control.end()
            if end is not None:
                return self._end(end, control)
            if not self._is_alive:
                continue
            if self._has_ended():
                text = f"{self._why or 'its'} process {self._child} {_how(self._code)}"
                control.send(kind="dead", worker=self._worker, text=text)
            elif control.is_killed(self._worker):
                self._kill("it came too late for the next attempt")
            elif self._is_stuck():
                state = "is stopped" if process_state(self._child) == "stopped" else "is stuck"
                limit_s = self._flags.inprocess_hard_timeout
                self._kill(f"it {state}, without progress for {limit_s:.0f} s")

    def _wait(self, seconds: float) -> None:
        """Wait until the worker ends, at most ``seconds``."""
        if not self._is_alive:
            time.sleep(min(seconds, 0.2))
            return
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        poll.poll(1000 * seconds)

    def _has_ended(self) -> bool:
        process, status = os.waitpid(self._child, os.WNOHANG)
        if process:
            self._is_alive = False
            self._code = os.waitstatus_to_exitcode(status)
        return bool(process)

    def _is_stuck(self) -> bool:
        stuck_s = (time.monotonic_ns() - self._slots[PROGRESS_NS]) / 1e9
        limit_s = self._flags.inprocess_hard_timeout
        return bool(self._slots[IS_WATCHED]) and stuck_s > limit_s

    def _kill(self, why: str) -> None:
        """End the worker: SIGTERM, and SIGKILL after the grace time."""
        self._why = f"{why}; its monitor process has ended it:"
        with suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGTERM)
            os.kill(self._child, signal.SIGCONT)
        self._wait(self._flags.inprocess_termination_grace_time)
        with suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
        self._wait(self._flags.inprocess_termination_grace_time)

    def _check_coordinator(self, control: Control) -> None:
        beats = control.beats(_COORDINATOR)
        now_s = time.monotonic()
        if beats != self._seen[0]:
            self._seen = (beats, now_s)
        elif now_s - self._seen[1] > self._flags.inprocess_heartbeat_timeout:
            raise RuntimeError("the monitor process of rank 0 does not answer")

    def _end(self, end: End, control: Control) -> int:
        """Let the worker exit, and return the exit status of the run."""
        was_alive = self._is_alive
        until_s = time.monotonic() + self._flags.inprocess_completion_timeout
        while self._is_alive and not self._has_ended() and time.monotonic() < until_s:
            self._wait(min(1.0, self._flags.inprocess_completion_timeout))
        if self._is_alive:
            self._kill("the run has ended")
        self._leave(control)
        if end.code:
            exit_report.write(exit_report.kind_of(end.code), end.code, end.text)
            if not was_alive and end.text:
                tell_launcher(end.text)
            return end.code
        if not was_alive:
            return 0  # a reserve has done its work
        return self._code if self._code >= 0 else 1

    def _leave(self, control: Control) -> None:
        """Wait on worker 0 for the other monitor processes: this process may serve their store."""
        with suppress(RuntimeError):
            control.beat("left")
            until_s = time.monotonic() + _FAREWELL_S
            if self._worker == 0:
                while control.beats("left") < self._options.world_size:
                    if time.monotonic() > until_s:
                        return
                    time.sleep(_POLL_S)

    def _fail(self, text: str, code: int) -> int:
        print(text, file=sys.stderr, flush=True)
        tell_launcher(text)
        exit_report.write(exit_report.kind_of(code), code, text)
        with suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
        return code

    def _forward_signals(self) -> None:
        """Send signals for the run to the worker; some launchers signal only this process."""
        for signum in _FORWARDED:
            before = signal.signal(signum, self._forward)
            if isinstance(before, StopSignal) and before.received:
                self._forward(signum, None)

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._child, signum)


class _Service:
    """The coordinator with its clock and its store; a thread of the monitor process of worker 0."""

    limit_s = float("inf")  # without a heartbeat of a monitor process, until its node is lost

    def __init__(self, coordinator: Coordinator, control: Control, beat_s: float) -> None:
        self._coordinator = coordinator
        self._control = control
        self._beat_s = beat_s
        self._seen = {w: (-1, time.monotonic()) for w in range(len(coordinator.nodes))}

    def run(self) -> None:
        """Decide until the run ends (target of the thread)."""
        with suppress(RuntimeError):  # the store is lost: every monitor process finds out
            events = self._control.events()
            beat_at_s = 0.0
            while True:
                now_s = time.monotonic()
                if now_s >= beat_at_s:
                    beat_at_s = now_s + self._beat_s
                    self._control.beat(_COORDINATOR)
                    self._look_for_lost_nodes(now_s)
                event = next(events)
                if event is not None:
                    self._coordinator.take(event, now_s)
                for decision in self._coordinator.decide(now_s):
                    if isinstance(decision, Start | End) and decision.text:
                        print(decision.text, file=sys.stderr, flush=True)
                    self._control.publish(decision)
                    if isinstance(decision, End):
                        return
                if event is None:
                    time.sleep(_POLL_S)

    def _look_for_lost_nodes(self, now_s: float) -> None:
        for worker, (beats, since_s) in self._seen.items():
            if worker in self._coordinator.lost:
                continue
            if (found := self._control.beats(str(worker))) != beats:
                self._seen[worker] = (found, now_s)
            elif now_s - since_s > self.limit_s:
                text = f"its monitor process has not answered for {now_s - since_s:.0f} s"
                self._coordinator.take({"kind": "dead", "worker": worker, "text": text}, now_s)


def _node() -> str:
    """Return the node of this process: its number from the launcher, or the host name."""
    for name in ("GROUP_RANK", "SLURM_NODEID"):
        if os.environ.get(name):
            return f"{name} {os.environ[name]}"
    return socket.gethostname()


def _how(code: int) -> str:
    if code >= 0:
        return f"has ended with status {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
