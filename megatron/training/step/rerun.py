"""The rerun state machine of a run: the state that a pass changes, and how a step ends the run.

`megatron.core.rerun.state_machine` explains the diagnosis.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core import device
from megatron.core.aux_loss import aux_losses_of
from megatron.core.config.errors import NonFiniteError
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.distributed.non_finite import naming_step
from megatron.core.parallel.collectives import all_gather_json
from megatron.core.rerun.results import RerunDiagnostic, RerunErrorInjector, RerunMode, log
from megatron.core.rerun.state_machine import (
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
    PassRejected,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.tensor_parallel.random import get_rng_tracker
from megatron.training.process import exit_report
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import ModelRun, TrainingRun

_MODES = {
    "disabled": RerunMode.DISABLED,
    "validate_results": RerunMode.VALIDATE_RESULTS,
    "report_stats": RerunMode.REPORT_DETERMINISM_STATS,
}


class StepRejected(Exception):
    """The result of a step must not be used: the run ends with ``exit_code``, on all ranks."""

    def __init__(self, reason: str, exit_code: int, *, should_checkpoint: bool) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.should_checkpoint = should_checkpoint


def install_state_machine(run: ModelRun) -> None:
    """Create the state machine of this rank, as the flags request."""
    asked = run.config.resilience
    snapshot = StepSnapshot(run)
    initialize_rerun_state_machine(
        state_save_func=snapshot.save,
        state_restore_func=snapshot.restore,
        mode=_MODES[asked.rerun_mode],
        error_injector=RerunErrorInjector(
            asked.error_injection_rate, RerunDiagnostic(asked.error_injection_type)
        ),
        result_rejected_tracker_filename=asked.result_rejected_tracker_filename,
    )
    run.rerun = get_rerun_state_machine()


def run_step(run: TrainingRun, step: Callable[[TrainingRun], StepResult]) -> StepResult:
    """Return the result of ``step(run)``, which is repeated as the rerun state machine decides.

    Collective over all ranks.  Raises StepRejected if the result must not be used.
    """
    number = run.state.iteration + 1
    fault_point("step.before", step=number)
    run.rerun.current_iteration = run.state.iteration
    result: StepResult | None = None
    with naming_step(number):
        while run.rerun.should_run_forward_backward(run.data.train):
            with suppress(PassRejected):
                result = step(run)
        end_if_rejected(run)
    assert result is not None, "only a rejected step has no result"
    return result


def end_if_rejected(run: TrainingRun) -> None:
    """Raise StepRejected if the results of the step must not be used.  Collective over all ranks.

    Without --save, which the next start needs, a result that the rerun reproduced raises
    NonFiniteError instead.
    """
    should_checkpoint, should_exit, exit_code = run.rerun.should_checkpoint_and_exit()
    if not should_exit:
        return
    step = run.state.iteration + 1
    found = all_gather_json(run.rerun.explanation, run.groups.world)
    mine = run.rerun.blamed
    blamed = [place for place in all_gather_json(mine, run.groups.world) if place is not None]
    if mine is not None:
        why = f"persistent error: step {step} had another result after a restart"
        exit_report.blame(mine.rank, why, host=mine.node, device=mine.device)
    results = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None]
    more = f" (and {len(results) - 3} more ranks)" if len(results) > 3 else ""
    text = f"{'; '.join(results[:3])}{more}"
    if exit_code == EXIT_CODE_RESUME_TO_DISAMBIGUATE:
        cause = "the step was computed twice with this result"
        # A checkpoint of iteration 0 would be a release, which holds weights alone.
        if run.config.checkpoint.save is None or run.state.iteration == 0:
            raise NonFiniteError(
                f"{text}; {cause}: look for its cause in the data and the hyperparameters; with a "
                "checkpoint of the step before (--save, and not in the first step) the next start "
                "could tell a fault of the hardware from a correct result"
            )
        log(
            "Saving a checkpoint and exiting now. Please resume the job from the checkpoint to "
            "rerun the last iteration and establish a diagnostic",
            once=True,
        )
        advice = "start the run again from its checkpoint, if possible on other devices"
    elif should_checkpoint:
        places = "; ".join(f"rank {r} on node {node}, device {at}" for r, node, at in blamed)
        cause = "the step had another result in the run before: a persistent error of the hardware"
        cause += f" of {places}" if places else ""
        advice = "start the run again without this hardware"
    else:
        cause = "the step has this result on every start: it is no fault of the hardware"
        advice = (
            "look for its cause in the data, the hyperparameters or an earlier checkpoint, or skip "
            "the step with --iterations-to-skip"
        )
    reason = f"exiting program with code {exit_code}: step {step}: {text}; {cause}; {advice}"
    raise StepRejected(reason, exit_code, should_checkpoint=should_checkpoint)


class _Buffer(NamedTuple):
    """Copy of a module's buffer, and the version of the buffer that was copied."""

    copy: Tensor
    original: Tensor
    version: int


class StepSnapshot:
    """State that forward and backward passes change, besides gradients: saved and restored.

    Random states, buffers (amax histories, biases and counts of MoE routers), auxiliary losses.
    """

    def __init__(self, run: ModelRun) -> None:
        self._run = run
        self._places: list[tuple[dict[str, Tensor | None], str]] | None = None
        self._buffers: dict[int, _Buffer] = {}  # of the last `save`

    def save(self) -> Any:
        """Return the random states and copies of the buffers; copy those that have changed.

        The result stays valid after later calls.
        """
        # A replay of a CUDA graph changes buffers, but not their versions.
        always = self._run.config.model.uses_graphs
        stale: list[tuple[Tensor, Tensor]] = []
        for i, buffer in self._live_buffers():
            known = self._buffers.get(i)
            if (
                always
                or known is None
                or known.original is not buffer
                or known.copy.shape != buffer.shape
                or known.version != buffer._version
            ):
                copy = torch.empty_like(buffer)
                stale.append((copy, buffer))
                self._buffers[i] = _Buffer(copy, buffer, buffer._version)
        _copy(stale)
        return (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            device.rng_state(),
            get_rng_tracker().get_states(),
            {i: known.copy for i, known in self._buffers.items()},
        )

    def restore(self, states: Any) -> None:
        """Restore ``states``, a result of `save`; drop auxiliary losses and gradients."""
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        device.set_rng_state(states[3])
        get_rng_tracker().set_states(states[4])
        _copy([(buffer, states[5][i]) for i, buffer in self._live_buffers()])
        for losses in aux_losses_of(self._run.model_chunks):
            losses.take()
        if isinstance(self._run, TrainingRun):
            self._run.optimizer.drop_gradients()

    def _live_buffers(self) -> Iterator[tuple[int, Tensor]]:
        if self._places is None:
            modules = (m for chunk in self._run.model_chunks for m in chunk.modules())
            self._places = [(m._buffers, name) for m in modules for name in m._buffers]
        for i, (buffers, name) in enumerate(self._places):
            buffer = buffers.get(name)
            if buffer is not None:
                yield i, buffer


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first one."""
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [values for _, values in pairs])
