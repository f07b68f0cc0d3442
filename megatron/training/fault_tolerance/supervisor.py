"""Supervisor of one node: attempts, one after the other, until the policy ends the run.

Each node runs one.  They meet in torch's rendezvous, end an attempt together, exchange how their
ranks ended, and agree on a decision of the policy.  No node leads: whatever node is lost, the
others go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from megatron.core.config.errors import ConfigError, LaunchError, MegatronError
from megatron.core.dist_checkpointing.folders import published
from megatron.training.fault_tolerance.agent import (
    AttemptAgent,
    HangDetector,
    StopRequested,
    StopSignals,
)
from megatron.training.fault_tolerance.heartbeat import STATE_FILE, Limits
from megatron.training.fault_tolerance.launch_flags import Launch, value_of
from megatron.training.fault_tolerance.rendezvous import (
    AttemptCoordination,
    Connector,
    Rendezvous,
    WaitingNode,
    log,
    nodes_that_fit,
)
from megatron.training.fault_tolerance.restart_policy import (
    Decision,
    History,
    NodeReport,
    Outcome,
    decide,
    exit_text,
    outcome_of,
    to_json,
)
from megatron.training.process.shared_memory import HEARTBEATS, lock_folder

# A program: its command line -> exit status and output.  megatron itself starts none.
Runner = Callable[[Sequence[str]], tuple[int, str]]
_MEMORY_DIR = "MEGATRON_MEMORY_DIR"  # of --non-persistent-ckpt-type in_memory
# Arguments of torch's WorkerSpec that its LaunchConfig has under the same names.
_OF_WORKERS = (
    "monitor_interval local_addr event_log_handler numa_options duplicate_stdout_filters "
    "duplicate_stderr_filters virtual_local_rank"
).split()
_MARGIN_S = 20.0  # for reports of other nodes, beyond the time in which they end their ranks
_FAREWELL_S = 5.0  # for other nodes to read the decision from the store that this node may host


class Supervisor:
    """``run`` returns the exit status of the run."""

    def __init__(
        self, launch: Launch, runner: Runner, node_problem: Callable[[int], str | None]
    ) -> None:
        """``node_problem`` returns why this node is unhealthy, for --check-node.

        Its argument is the number of restarts.
        """
        self._launch = launch
        self._config = launch.config
        self._runner = runner
        self._node_problem = node_problem
        self._stop = StopSignals()
        limits = launch.options
        self._connector = Connector(launch.config, launch.node, launch.folder, limits.node_timeout)
        self._rendezvous: Rendezvous | None = None
        self._history = History()
        self._problem = ""  # of this node, by --check-node
        self._ended: str | None = None  # exit.json of the nodes that trained until the end
        self._has_waited = False  # until the other nodes have ended the run

    def run(self) -> int:
        """Start the ranks, and restart them as the policy decides.  Returns the exit status."""
        # Ranks connect to a store of their own: in a shared one, keys of the ranks before remain.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        memory = self._launch.memory
        if value_of(self._launch.script, "--non-persistent-local-ckpt-dir") is None:
            os.environ.setdefault(_MEMORY_DIR, str(memory / "memory"))
        lock = lock_folder(memory)
        self._stop.install(self._launch.signals)
        try:
            decision = self._attempts()
        except StopRequested:
            code = 128 + (self._stop.first or 0)
            decision = self._end(code, "stopped by a signal while no rank was running")
        except MegatronError as error:
            text = f"{type(error).__name__}: {error}"
            print(text, file=sys.stderr, flush=True)
            decision = self._end(error.exit_code, text)
        finally:
            self._stop.has_ranks = True  # from here on a signal must not interrupt
            shutil.rmtree(memory, ignore_errors=True)
            lock.close()
        text = self._ended or exit_text(decision)
        if self._ended is not None or not self._has_waited:  # else the result is not known
            write_exit(self._launch.folder / "exit.json", text)
        if self._has_waited:
            log(decision.why)
        elif decision.history.outcomes:
            verb = "ended" if decision.code == 0 else "failed"
            log(
                f"the run {verb}: {decision.why} (exit status {decision.code}, "
                f"{decision.history.restarts} restarts)"
            )
            if decision.code not in (0, ConfigError.exit_code):  # that message is printed already
                print_causes(decision.history)
            log(f"report: {self._launch.folder / 'exit.json'}")
        self._leave(text)
        return decision.code

    def _attempts(self) -> Decision:
        self._check_node()
        while not self._is_excluded():
            decision = self._attempt()
            self._history = decision.history
            if not decision.restarts:
                return decision
            log(
                f"attempt {self._history.attempts} ended: {decision.why}; restart "
                f"{self._history.restarts} in {decision.backoff_s:.0f} s"
            )
            print_causes(self._history)
            self._stop.has_ranks = False
            if self._history.outcomes[-1].blames_hardware and not self._is_excluded():
                self._check_node()
            time.sleep(decision.backoff_s)
        return self._wait_for_the_end()

    def _check_node(self) -> None:
        """Exclude this node from the run if --check-node is given and the node is unhealthy.

        Raises LaunchError before the first attempt.
        """
        problem = self._node_problem(self._history.restarts) if self._launch.check_node else None
        if problem is None:
            return
        self._problem = f"--check-node: node {self._launch.node} is unhealthy:\n{problem}"
        if self._rendezvous is None:
            raise LaunchError(self._problem)
        log(self._problem)
        try:
            self._rendezvous.report_unhealthy()
        except dist.DistError:
            raise LaunchError(self._problem) from None

    def _is_excluded(self) -> bool:
        """Return whether this node is excluded, also by nodes that trained before it started."""
        try:
            rendezvous = self._connect()
            history = rendezvous.agreed_history() or self._history
            return self._launch.node in rendezvous.excluded(history)
        except dist.DistError:
            return self._launch.node in self._history.excluded

    def _attempt(self) -> Decision:
        rendezvous = self._connect()
        agent = self._agent(rendezvous)
        try:
            if agent.run() is None:  # the run has ended while this node waited
                return self._read_result()
        except WaitingNode:
            pass  # it has started no ranks
        except RendezvousClosedError:
            return self._read_result()
        except RendezvousTimeoutError:
            raise self._missing_nodes_error(rendezvous) from None
        except (dist.DistError, RendezvousError) as error:
            agent.lost_store = str(error)
        self._history = rendezvous.history
        report = agent.report(self._launch.node)
        if agent.lost_store is None:
            try:
                return self._agree(rendezvous, report)
            except (dist.DistError, RendezvousError) as error:
                agent.lost_store = str(error)
        return self._decide_alone(rendezvous, report, agent.lost_store.splitlines()[0])

    def _connect(self, last: AttemptCoordination | None = None, num_spare: int = 0) -> Rendezvous:
        """Return the connection, a new one if the store was lost (see `Connector.connect`)."""
        if self._rendezvous is None:
            self._rendezvous = self._connector.connect(last, num_spare)
            self._rendezvous.nodes_that_train = self._nodes_that_train
        self._rendezvous.history = self._history
        return self._rendezvous

    def _decide_alone(self, rendezvous: Rendezvous, report: NodeReport, error: str) -> Decision:
        """Decide without the other nodes after the store was lost; connect again.

        The nodes agree on the history of one of them in the next rendezvous.
        """
        self._stop.has_ranks = False
        log(f"lost the store of the rendezvous: {error}")
        with contextlib.suppress(dist.DistError, RendezvousError):
            rendezvous.leave()  # its thread would go on to send signs of life
        decision = self._decide(outcome_of([replace(report, lost_store=True)]))
        # The report of the run has this outcome even if the nodes do not meet again.
        self._history = replace(self._history, outcomes=decision.history.outcomes)
        if rendezvous.attempt is None:  # this node was in no attempt yet
            decision = replace(decision, history=self._history)
        if decision.restarts:
            self._rendezvous = None
            self._connect(rendezvous.attempt, rendezvous.num_spare)
        return decision

    def _agree(self, rendezvous: Rendezvous, report: NodeReport) -> Decision:
        """Exchange reports with the other nodes; return the common decision."""
        limits = self._launch.options
        attempt = rendezvous.attempt
        assert attempt is not None, "the nodes have not met"
        limit_s = limits.peer_timeout + limits.node_timeout + _MARGIN_S
        outcome = outcome_of(*attempt.collect(report, limit_s, rendezvous.lost_nodes))
        num_spare = rendezvous.num_spare_nodes() + len(attempt.nodes) - attempt.num_training
        decision = attempt.agree(self._decide(outcome, num_spare > 0, attempt.has("join")))
        rendezvous.run_store.set("history", to_json(decision.history))
        return decision

    def _decide(self, outcome: Outcome, has_spare: bool = False, is_join: bool = False) -> Decision:
        return decide(
            self._history,
            outcome,
            self._launch.options,
            has_spare_node=has_spare,
            is_join=is_join,
            older_checkpoint=older_checkpoint,
        )

    def _agent(self, rendezvous: Rendezvous) -> AttemptAgent:
        launch = self._launch
        config = self._config
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.nproc_per_node,
            entrypoint=launch.program,
            args=(*launch.script, *restart_flags(launch.script, self._history)),
            rdzv_handler=rendezvous,
            max_restarts=launch.options.max_restarts,
            **{name: vars(config)[name] for name in _OF_WORKERS},
        )
        assert config.logs_specs is not None, "the command line sets it"
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
        detector = HangDetector(launch.memory / HEARTBEATS, self._limits)
        return AttemptAgent(
            spec,
            config.logs_specs,
            rendezvous,
            self._stop,
            launch.options,
            launch.folder,
            detector if launch.detects_hangs else None,
            log_line_prefix_template=config.log_line_prefix_template,
        )

    def _limits(self) -> Limits:
        save = value_of(self._launch.script, "--save")
        saved = Limits() if save is None else Limits.load(Path(save) / STATE_FILE)
        learned = Limits.load(self._launch.memory / HEARTBEATS / STATE_FILE)  # in this attempt
        return Limits({**saved.learned, **learned.learned})

    def _nodes_that_train(self, joined: int) -> int:
        least = self._config.min_nodes
        if least == self._config.max_nodes:
            return joined  # the ranks check the flags themselves
        return nodes_that_fit(joined, least, self._config.nproc_per_node, self._refusal)

    @cache  # noqa: B019  one supervisor per process
    def _refusal(self, world_size: int) -> str | None:
        """Return why the flags do not allow ``world_size`` ranks, by the script's --check-only."""
        check = ("--check-only", "--check-world-size", str(world_size))
        code, output = self._runner((self._launch.program, *self._launch.script, *check))
        return output.strip() if code == ConfigError.exit_code else None

    def _missing_nodes_error(self, rendezvous: Rendezvous) -> MegatronError:
        config = self._config
        excluded = self._history.excluded
        with contextlib.suppress(dist.DistError):
            excluded = rendezvous.excluded(self._history)
        names = f"excluded: {', '.join(excluded)}; " if excluded else ""
        kind = ConfigError if self._history.attempts == 0 else LaunchError
        return kind(
            f"--nnodes {config.min_nodes}:{config.max_nodes}: fewer than {config.min_nodes} nodes "
            f"joined at {config.rdzv_endpoint} within {self._connector.join_timeout_s:.0f} s; "
            f"{names}start the same command on the other nodes, or raise --rdzv-conf join_timeout"
        )

    def _read_result(self) -> Decision:
        assert self._rendezvous is not None, "it was connected"
        self._has_waited = True
        code = 0
        result = "the host of the rendezvous is gone, so this node does not know the result"
        with contextlib.suppress(dist.DistError):
            store = self._rendezvous.run_store
            if store.check(["end"]):
                self._ended = store.get("end").decode()
                found = json.loads(self._ended)
                code = int(found["code"])
                result = f"{found['reason']} (exit status {code}, {found['restarts']} restarts)"
        return self._end(code, f"the run ended while this node waited: {result}")

    def _end(self, code: int, why: str) -> Decision:
        return Decision(code=code, why=why, history=self._history)

    def _wait_for_the_end(self) -> Decision:
        """Wait, as an excluded node, which may host the store, until the others end the run.

        Raises LaunchError if no other node is left.
        """
        log(f"node {self._launch.node} is excluded from the run; it waits for the end")
        self._stop.has_ranks = False
        assert self._rendezvous is not None, "it was connected"
        try:
            self._rendezvous.leave()
            left_at_s = time.monotonic()  # when another node was there last
            while not self._rendezvous.run_store.check(["end"]):
                if not self._rendezvous.is_empty():
                    left_at_s = time.monotonic()
                elif time.monotonic() - left_at_s > self._launch.options.node_timeout:
                    why = f"node {self._launch.node} is excluded, and no other node is left"
                    raise LaunchError(f"{why}\n{self._problem}".strip())
                time.sleep(1.0)
        except (dist.DistError, RendezvousError):
            pass  # the other nodes have ended
        return self._read_result()

    def _leave(self, exit_report: str) -> None:
        """End the rendezvous; wait shortly, because this node may host the store."""
        if self._rendezvous is None:
            return
        with contextlib.suppress(dist.DistError, RendezvousError):  # if the host has ended
            store = self._rendezvous.run_store
            store.set("end", exit_report)
            self._rendezvous.shutdown()
            store.add("left", 1)
            deadline_s = time.monotonic() + _FAREWELL_S
            while store.add("left", 0) < store.add("connected", 0):
                if time.monotonic() > deadline_s:
                    return
                time.sleep(0.1)


def restart_flags(script: Sequence[str], history: History) -> list[str]:
    """Return flags to append to the command line of the ranks; the last value of a flag is used.

    A run that saves resumes from its own checkpoints, and does not start anew if they are gone.
    """
    flags: list[str] = []
    save = value_of(script, "--save")
    load = value_of(script, "--load")
    if history.attempts == 0 or save is None:
        return flags
    if load is None:
        flags += ["--load", save]
    if history.saved_iteration > 0:
        flags += ["--exit-on-missing-checkpoint"]
    if history.ckpt_step is not None:
        flags += ["--ckpt-step", str(history.ckpt_step)]
    return flags


def older_checkpoint(folder: str) -> int | None:
    """Return the iteration of the checkpoint that was published before the one in ``folder``."""
    path = Path(folder)
    order = [found for found in published(path.parent) if found.problem is None]
    names = [found.folder.name for found in order]
    older = order[names.index(path.name) + 1 :] if path.name in names else []
    return older[0].iteration if older else None


def write_exit(path: Path, text: str) -> None:
    """Write ``exit.json``."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        log(f"cannot write {path}: {error.strerror}")


def print_causes(history: History) -> None:
    """Print how the ranks ended in the last attempt, the first cause first."""
    for cause in history.outcomes[-1].causes:
        log(f"  {cause}")
