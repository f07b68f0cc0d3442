"""The worker process: calls the training function in each attempt, and leaves attempts that stop.

A thread polls whether the attempt has stopped.  If so, it makes waiting collectives fail (`abort`)
and sends a signal to the main thread, whose handler raises `Interrupted`, until the main thread has
left the training function.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from types import FrameType, TracebackType
from typing import TypeAlias

from megatron.core.config.errors import MegatronError
from megatron.core.diagnostics import collective_tracer
from megatron.core.diagnostics.fault_injection import ATTEMPT
from megatron.training.fault_tolerance.inprocess.abort import (
    abort,
    clear,
    outlive_nccl_errors,
    sockets,
)
from megatron.training.fault_tolerance.inprocess.control import Control
from megatron.training.fault_tolerance.inprocess.coordinator import End
from megatron.training.fault_tolerance.inprocess.options import RestartOptions
from megatron.training.process import exit_report
from megatron.training.process.failure_watch import (
    in_few_lines,
    is_lost_connection,
    tell_launcher,
)
from megatron.training.process.stall_report import is_timeout

IS_WATCHED, PROGRESS_NS = range(2)  # slots of the memory shared with the monitor process
WORKER = "MEGATRON_INPROCESS_WORKER"  # number of this worker
_SIGNAL = signal.SIGRTMIN + 7
_AGAIN_S = 0.5  # between two interruptions of a main thread that has not left
_FAST_S = 0.02  # polling interval while a decision is near


Slots: TypeAlias = "memoryview[int]"  # memory that is shared with the monitor process


class Interrupted(BaseException):
    """Raised in the main thread to leave an attempt."""


class Attempt:
    """One call of the training function.  ``store``: for its process groups."""

    def __init__(self, number: int, options: RestartOptions, control: Control, slots: Slots):
        self.number = number
        self._flags = options.flags
        self._slots = slots
        self._control = control.reopened()
        self._before = sockets()
        self._port = int(os.environ["MASTER_PORT"])
        self.store = control.store_of_attempt(number, timedelta(seconds=options.timeout_s))
        self.is_stopped = False
        self.result: tuple[str, str | None] = ("done", None)  # kind and reason of the exit report
        self._has_left = threading.Event()
        self._main = threading.main_thread()
        self._thread = threading.Thread(target=self._monitor, name="inprocess", daemon=True)
        self._progress: object = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context manager for the part of the training function that may be interrupted."""
        try:
            yield
        finally:
            self.leave()

    def begin(self) -> None:
        """Start the monitoring thread."""
        collective_tracer.note_collectives()
        signal.signal(_SIGNAL, self._interrupt)
        self._slots[PROGRESS_NS] = time.monotonic_ns()
        self._slots[IS_WATCHED] = 1
        self._thread.start()

    def leave(self) -> None:
        """Stop raising `Interrupted`: the main thread has left the training function."""
        while not self._has_left.is_set():
            with suppress(Interrupted):
                self._has_left.set()

    def end(self) -> None:
        """Leave, and wait for the monitoring thread."""
        self.leave()
        self._thread.join()
        self._slots[IS_WATCHED] = 0

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal, in the main thread."""
        if self.is_stopped and not self._has_left.is_set():
            while frame is not None and frame.f_code is not _called.__code__:
                frame = frame.f_back
            if frame is not None:  # else the main thread is on its way out already
                raise Interrupted

    def _monitor(self) -> None:
        flags = self._flags
        interval_s = min(
            flags.inprocess_monitor_thread_interval, flags.inprocess_progress_watchdog_interval
        )
        looked_s = signed_s = time.monotonic()
        has_reported = False
        while not self._has_left.wait(interval_s):
            now_s = time.monotonic()
            if now_s - signed_s >= flags.inprocess_progress_watchdog_interval:
                signed_s = now_s
                self._sign()
            stuck_s = now_s - self._slots[PROGRESS_NS] / 1e9
            if stuck_s > flags.inprocess_soft_timeout and not has_reported:
                has_reported = True
                self._report_stall(stuck_s)
            if now_s - looked_s >= flags.inprocess_monitor_thread_interval:
                looked_s = now_s
                with suppress(RuntimeError):  # without the store, the monitor process acts
                    if self._control.is_stopped(self.number) or self._control.end() is not None:
                        self._make_main_leave()

    def _sign(self) -> None:
        """Write the time for the monitor process if this rank has made progress.

        Progress is a collective or a movement of the main thread.
        """
        frame = sys._current_frames().get(self._main.ident or 0)
        place = frame and (id(frame), frame.f_lasti)
        sign = (collective_tracer.record.progress, place)
        if sign != self._progress:
            self._progress = sign
            self._slots[PROGRESS_NS] = time.monotonic_ns()

    def _report_stall(self, stuck_s: float) -> None:
        record = collective_tracer.record
        frame = sys._current_frames().get(self._main.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        print(f"no progress for {stuck_s:.0f} s, {record}; in\n{stack}", end="", file=sys.stderr)
        text = f"no progress for {stuck_s:.0f} s, it {record}"
        self._send_stall("fault", text, is_primary=not _is_waiting(), is_stall=True)

    def _send_stall(self, kind: str, text: str, **values: bool) -> None:
        step = exit_report.noted("iteration")
        event = {"worker": int(os.environ[WORKER]), "attempt": self.number, "step": step}
        with suppress(RuntimeError):
            self._control.send(kind=kind, text=text, **event, **values)

    def _make_main_leave(self) -> None:
        self.is_stopped = True
        if not _is_waiting():
            self._send_stall("computing", f"it {collective_tracer.record} while others waited")
        with_store = False
        while not self._has_left.is_set():
            abort(self._before, self._port, with_store=with_store)
            signal.pthread_kill(self._main.ident or 0, _SIGNAL)
            self._has_left.wait(_AGAIN_S)
            with_store = True


def _is_waiting() -> bool:
    record = collective_tracer.record
    return record.inside is not None or bool(record.awaits)


def _called(call: Callable[[Attempt], None], attempt: Attempt) -> None:
    """Call the training function; `Interrupted` is raised below this frame only."""
    call(attempt)


class Worker:
    """This process in all attempts."""

    def __init__(
        self,
        worker: int,
        options: RestartOptions,
        token: str,
        slots: Slots,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._worker = worker
        self._options = options
        self._slots = slots
        self._end_process = end
        self._control = Control(token)
        self._result: tuple[str, str | None] = ("done", None)
        self._num_suspects = 0  # of the exit report that were sent

    def run(self, call: Callable[[Attempt], None]) -> None:
        """Call ``call`` in every attempt in which this worker is active.

        Returns when the run is done, on every worker; ends the process if the run has failed.
        """
        outlive_nccl_errors()
        for number in count():
            os.environ[ATTEMPT] = str(number)
            self._send("ready", number)
            active = self._wait_for_start(number)
            if active is not None and self._worker in active:
                self._attempt(call, number, active)
                if not clear(empty_cache=self._options.flags.inprocess_empty_cuda_cache):
                    self._end_process(1)  # the monitor process reports it
            end = self._wait_for_stop(number)
            if end is not None:
                self._end(end)
                return

    def _attempt(self, call: Callable[[Attempt], None], number: int, active: list[int]) -> None:
        rank = active.index(self._worker)
        size = len(active)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        attempt = Attempt(number, self._options, self._control, self._slots)
        with self._reporting(attempt):
            attempt.begin()
            _called(call, attempt)

    @contextmanager
    def _reporting(self, attempt: Attempt) -> Iterator[None]:
        """Context manager of one attempt: report how it has ended, and continue."""
        with ExitStack() as stack:
            stack.push(partial(self._ended, attempt))
            yield

    def _ended(
        self,
        attempt: Attempt,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        attempt.end()
        if error is not None:
            self._report(error, attempt)
            traceback.clear_frames(trace)
        elif not attempt.is_stopped:
            self._result = attempt.result
            self._send("finished", attempt.number)
        return True

    def _report(self, error: BaseException, attempt: Attempt) -> None:
        """Send the fault to the coordinator, or that the run must end."""
        suspects = exit_report.suspects()[self._num_suspects :]
        self._num_suspects += len(suspects)
        if attempt.is_stopped and not suspects:  # the error is a consequence
            return
        code = exit_report.exit_code(error)
        text = f"{type(error).__name__}: {in_few_lines(str(error))}"
        is_consequence = attempt.is_stopped or is_lost_connection(error) or is_timeout(error)
        is_primary = not is_consequence
        if isinstance(error, SystemExit) and not code:
            self._send("finished", attempt.number)
            return
        if isinstance(error, MegatronError) and is_primary:
            print(error, file=sys.stderr, flush=True)
        elif is_primary and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        if is_primary and (code in (2, 65) or isinstance(error, KeyboardInterrupt)):
            self._send("end", attempt.number, code=code, text=text)
            return
        self._send(
            "fault",
            attempt.number,
            text=text,
            is_primary=is_primary,
            step=exit_report.noted("iteration"),
            code=code,
            excluded=[suspect["rank"] for suspect in suspects],
        )

    def _send(self, kind: str, number: int, **values: object) -> None:
        self._control.send(kind=kind, worker=self._worker, attempt=number, **values)

    def _wait_for_start(self, number: int) -> list[int] | None:
        """Return the active workers; None if the run has ended or this worker comes too late."""
        while True:
            if (active := self._control.start(number)) is not None:
                return active
            if self._control.end() is not None or self._control.is_stopped(number):
                return None
            time.sleep(_FAST_S)

    def _wait_for_stop(self, number: int) -> End | None:
        """Wait until the attempt stops (None) or the run ends."""
        while not self._control.is_stopped(number):
            if (end := self._control.end()) is not None:
                return end
            time.sleep(5 * _FAST_S)
        return None

    def _end(self, end: End) -> None:
        if end.code == 0:
            exit_report.write(self._result[0], 0, self._result[1])
            return
        exit_report.write(exit_report.kind_of(end.code), end.code, end.text)
        if end.text:
            tell_launcher(end.text)
        sys.stdout.flush()
        self._end_process(end.code)


def report_lost_store(error: RuntimeError) -> None:
    """Print that the coordinator cannot be reached."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    print(f"in-process restart: the store is lost ({first})", file=sys.stderr, flush=True)
