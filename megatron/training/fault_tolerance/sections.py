"""Sections of this rank: setup, step, checkpointing, and the time outside of them.

The setup lasts until the first step has ended, since that step is slow for its own reasons.  An
evaluation consists of steps.  Sections are reported in the rank's heartbeat, and to NVIDIA's rank
monitor where ``ft_launcher`` has started this process.  The supervisor, which reads the heartbeats
of its host (`MEGATRON_HEARTBEAT_DIR`), or NVIDIA's rank monitor, which receives the limits,
enforces them.  Under another launcher nobody does, and the limits are only learned.

The limits are learned alike in all cases (`Limits`), so NVIDIA's calculation, which has no minimum,
is not used.  Nothing in this module is collective, except `Monitor.learn`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.diagnostics import collective_tracer
from megatron.core.optional import require
from megatron.core.parallel.collectives import largest_of_ranks
from megatron.core.rank_local import each_rank_owns
from megatron.training.fault_tolerance.heartbeat import (
    MIN_COUNTS,
    OUT_OF_SECTION,
    SECTIONS_WITH_LIMIT,
    STATE_FILE,
    VARIABLE,
    Durations,
    HeartbeatFile,
    Limits,
)
from megatron.training.process.rank_print import print_rank_0, rank, world_size

# ft_launcher sets it.
_SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"
_FLAG = "--enable-ft-package"


class Monitor:
    """Sections of this rank, their durations and limits.  Does nothing until it is started."""

    def __init__(self) -> None:
        self.limits = Limits()
        self.seen = Durations()
        self.client: Any = None  # NVIDIA's; each call is a round trip to its monitor
        self.has_loaded = (
            False  # a persistent checkpoint; without one a setup is too short to learn
        )
        self._file: HeartbeatFile | None = None
        self._shared_folder: Path | None = None  # of the supervisor
        self._saved = Limits()  # before this run
        self._state_path: Path | None = None  # the same on all ranks, also if rank 0 cannot write
        self._has_failed_to_save = False
        self._open: list[tuple[str, float]] = []  # sections and when they began
        self._closed_at_s = 0.0
        self._num_steps = 0

    @property
    def is_on(self) -> bool:
        """Whether sections are watched."""
        return self._file is not None

    def start(self, folder: str | None = None) -> None:
        """Begin the setup; write the heartbeat into ``folder``, else into private memory.

        A later call begins the setup again (restart inside the process).  Raises LaunchError.
        """
        if self._file is not None:
            self._open.clear()
            self.begin("setup")
            return
        if folder is not None:
            # The supervisor asks for stacks with this signal, which would end other processes.
            faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
            self._shared_folder = Path(folder)
        self._file = HeartbeatFile(self._shared_folder, rank())
        collective_tracer.record.board = collective_tracer.Board(self._file.board, self._file.name)
        if world_size() > 1:
            collective_tracer.note_collectives()
        self.begin("setup")

    def enable(self, state_folder: str | None, learns: bool) -> None:
        """Connect to NVIDIA's monitor, if it watches this process (--enable-ft-package).

        ``learns``: save the learned limits in ``state_folder`` (--calc-ft-timeouts), where they are
        read in any case.  Raises MissingDependency, LaunchError or ConfigError.
        """
        if not self.is_on:
            self.start()
        if state_folder is not None:
            path = Path(state_folder) / STATE_FILE
            self.limits = self._saved = Limits.load(path)
            self._state_path = path if learns else None
        self._share()
        if _SOCKET in os.environ and self.client is None:
            self.client = _rank_monitor_client()
            self._set_limits_of_client()
            for section, _ in self._open:
                self.client.start_section(section)
        watcher = "NVIDIA's rank monitor" if self.client else "nobody: start with tools/launch.py"
        watcher = "the supervisor" if self._shared_folder is not None else watcher
        print_rank_0(f"> sections of this run are watched by {watcher}")

    def begin(self, section: str) -> None:
        """Enter ``section``, which may lie inside another one."""
        if self._file is None:
            return
        now_s = time.monotonic()
        if not self._open and self._closed_at_s:
            self.seen.add(OUT_OF_SECTION, now_s - self._closed_at_s)
        self._open.append((section, now_s))
        self._file.begin(section)
        if self.client is not None:
            self.client.start_section(section)

    def end(self, section: str) -> None:
        """Leave ``section``; do nothing if it is not the innermost one."""
        if self._file is None or not self._open or self._open[-1][0] != section:
            return
        now_s = time.monotonic()
        _, began_s = self._open.pop()
        if section != "setup" or self.has_loaded:
            self.seen.add(section, now_s - began_s)
        self._closed_at_s = now_s
        self._file.begin(self._open[-1][0] if self._open else OUT_OF_SECTION)
        if self.client is not None:
            self.client.end_section(section)

    def begin_step(self, iteration: int | None = None) -> None:
        """Begin training step ``iteration``; the first one is part of the setup."""
        if self._file is not None:
            self._file.at_iteration(iteration)
            if not self._open:
                self.begin("step")

    def end_step(self) -> None:
        """End the training step, or the setup with the first one."""
        for section in ("step", "setup"):
            self.end(section)
        self._num_steps += 1
        if self._num_steps == MIN_COUNTS["step"] + 2:  # the first step is part of the setup
            self.learn()

    def learn(self) -> None:
        """Update the limits if more durations are known since the last call, then share them.

        Called after a save, at the end, and when enough training steps were seen, which is the same
        on all ranks.  With --calc-ft-timeouts it is collective over all ranks, which then learn the
        same limits, and rank 0 saves them; without it each rank learns alone.
        """
        if not self.seen.known() or self._file is None:
            return
        saves = self._state_path is not None
        if saves:
            longest_s = [self.seen.longest_s.get(name, 0.0) for name in SECTIONS_WITH_LIMIT]
            values = largest_of_ranks(longest_s)
            self.seen.longest_s = dict(zip(SECTIONS_WITH_LIMIT, values, strict=True))
        limits = self._saved.merged(self.seen)
        if limits == self.limits:
            return
        self.limits = limits
        self._share()
        if self.client is not None and saves:
            self._set_limits_of_client()
        if self._state_path is not None and rank() == 0 and not self._has_failed_to_save:
            try:
                limits.save(self._state_path)
            except OSError as error:  # the run is worth more
                print_rank_0(
                    f"WARNING: --calc-ft-timeouts: {self._state_path} cannot be written ({error})"
                )
                self._has_failed_to_save = True

    def close(self) -> None:
        """End all sections: from now on there is no limit."""
        if self._file is not None:
            self._file.begin("ended")
            self._open.clear()
            self._closed_at_s = 0.0
        if self.client is not None:
            self.client.shutdown_workload_monitoring()
            self.client = None

    def _set_limits_of_client(self) -> None:
        """Replace limits of NVIDIA's monitor by those that were learned; the others stay.

        Its limit between heartbeats is removed: sections replace heartbeats.
        """
        timeouts = self.client.section_timeouts
        before = {**timeouts.section, OUT_OF_SECTION: timeouts.out_of_section}
        state = self.limits.to_state(before)
        state["current_timeouts"]["heartbeat"] = {"initial": None, "subsequent": None}
        self.client.load_state_dict(state)

    def _share(self) -> None:
        """Write the limits for the supervisor of this host."""
        if self._shared_folder is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            with suppress(OSError):  # it then keeps the limits that it has
                self.limits.save(self._shared_folder / STATE_FILE)


def _rank_monitor_client() -> Any:
    """Return NVIDIA's client of this rank's monitor, connected.

    Raises MissingDependency, or ConfigError if ft_launcher lacks sections.
    """
    package: Any = require("nvidia_resiliency_ext.fault_tolerance", _FLAG)
    client = package.RankMonitorClient()
    client.init_workload_monitoring()
    known = client.section_timeouts.section
    if missing := [name for name in SECTIONS_WITH_LIMIT if name and name not in known]:
        raise ConfigError(
            f"{_FLAG}: ft_launcher knows no section {', '.join(missing)}: start it with "
            "--ft-rank_section_timeouts=setup:1800,step:900,checkpointing:1800 and "
            "--ft-rank_out_of_section_timeout=900 (seconds)"
        )
    return client


monitor = Monitor()  # read it as ``sections.monitor``: every virtual rank has its own
each_rank_owns(__name__, "monitor")


def start_heartbeat() -> None:
    """Start the monitor if a supervisor has asked for heartbeats, or if it is on already.

    Raises LaunchError.
    """
    folder = os.environ.get(VARIABLE)
    if folder or monitor.is_on:
        monitor.start(folder or None)
