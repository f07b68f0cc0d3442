"""Detect ranks of this node that hang, by their heartbeat files."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from megatron.training.fault_tolerance.heartbeat import VARIABLE, process_state, read_heartbeats
from megatron.training.fault_tolerance.limits import HangWatch, Limits, likely_cause
from megatron.training.supervisor.processes import RankProcesses

_STACKS_S = 1.0  # for the ranks to print their stacks


class HangDetector:
    """Reads the heartbeats in ``folder``, which is in shared memory of the node.

    ``limits`` returns the present limits: a run learns them and saves them beside its checkpoints.
    ``found`` has the hang of each rank of which this node has found one, and its sort key.
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

    def look(self, processes: RankProcesses) -> bool:
        """Return whether a rank hangs; if so, ask all for their stacks and end the likely cause.

        The failure watch of the other ranks then ends them, with their reports.
        """
        running = set(processes.running())
        beats = [beat for beat in read_heartbeats(self._folder) if beat.rank in running]
        now_ns = time.monotonic_ns()
        hangs = self._watch.poll(beats, self._limits(), now_ns)
        if not hangs:
            return False
        states = {beat.rank: process_state(beat.pid) for beat in beats}
        # A rank with a heartbeat prints the stacks of all its threads; others would end.
        processes.send(signal.SIGUSR2, list(states))
        time.sleep(_STACKS_S)
        for hang in hangs:
            beat = hang.heartbeat
            is_stopped = states[beat.rank] == "stopped"
            text = f"its process is stopped; {hang}" if is_stopped else str(hang)
            runs, is_in_collective, _ = likely_cause(beat, is_stopped)
            # Other hosts have another clock: compare the time that has passed since the sign.
            self.found[beat.rank] = (text, (float(runs), float(is_in_collective), -hang.waited_s))
        processes.kill(min(self.found, key=lambda rank: self.found[rank][1]))
        return True
