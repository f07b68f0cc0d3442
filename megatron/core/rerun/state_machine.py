"""Validate the results of a step, and compute it again to find the cause of an unexpected result.

A result is rejected by a function of the caller: a NaN loss, a large gradient, anything.  Then

1. the step runs again in place, from the same random states and micro-batches.  Another result:
   the first one was a *transient error*, and the second pass counts.
2. The same result: the run saves a checkpoint of the state before the step and exits with 16.  The
   next start runs the step once more, on other devices if the launcher places ranks elsewhere.
   Another result: *persistent error* of the first device, exit code 17.  The same: the result is
   *correct*; a fatal one ends the run with 17, with another one it goes on.

So a step runs at most twice in a process.  A start on the same device as before asks for one more
start (exit code 16), at most ``MAX_STARTS`` in all, and then decides without another device.

Order of collectives: at the end of each pass, one all-reduce of the ranks' requests over all ranks,
after which every rank takes the same transition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import device
from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.core.rank_local import each_rank_owns
from megatron.core.rerun.results import (
    Findings,
    Place,
    Request,
    RerunErrorInjector,
    RerunMode,
    RerunState,
    ResultValidator,
    Suspect,
    log,
    my_rank,
    num_ranks,
    request_after,
    steps_to_skip,
)

EXIT_CODE_RESUME_TO_DISAMBIGUATE = 16
EXIT_CODE_FAILED_ON_RESULT_VALIDATION = 17
# Outcomes after which the next start runs the step again.
_NEXT_START = (Request.RERUN_SHARED, Request.RERUN, Request.RERUN_ELSEWHERE)


class PassRejected(Exception):
    """A pass of a step must not change the parameters: it runs again, or the run ends."""


class RerunStateMachine(ResultValidator):
    """State machine of one rank; the program has one, `get_rerun_state_machine`.

    ``state_save_func`` returns the state that a pass changes, ``state_restore_func`` restores it.
    """

    REPORTING_INTERVAL_ITERATIONS: int = 2

    def __init__(
        self,
        state_save_func: Callable[[], Any] | None = None,
        state_restore_func: Callable[[Any], None] | None = None,
        mode: RerunMode = RerunMode.DISABLED,
        error_injector: RerunErrorInjector | None = None,
        result_rejected_tracker_filename: str | None = None,
    ) -> None:
        super().__init__(mode, error_injector, result_rejected_tracker_filename)
        self.outcome = Request.GO_ON
        self._own = Request.GO_ON  # what this rank asked for after the last pass
        self._save = state_save_func or (lambda: None)
        self._restore = state_restore_func or (lambda state: None)
        self.blamed: Place | None = None  # where a persistent error made this rank's results wrong
        self._saved: tuple[Any, dict[str, tuple[int, float]]] = None, {}
        self._pending_iteration: int | None = None  # of the step of a loaded suspect

    def set_mode(self, mode: RerunMode) -> None:
        """Set the mode, between steps."""
        log(f"Setting RerunStateMachine mode {mode.value}", once=True)
        self.mode = mode

    def get_mode(self) -> RerunMode:
        """Return the mode."""
        return self.mode

    # -- passes of a step ------------------------------------------------------------------

    def should_run_forward_backward(self, data_iterator: object) -> bool:
        """Return whether to run the forward and backward passes of the step, for the first time
        or again.  Collective over all ranks.

        ``data_iterator``: a `RerunDataIterator`, None on ranks that read no data, or a list of
        them.  A loop calls it before each pass until it returns False, and then
        `should_checkpoint_and_exit`.
        """
        listed = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        data = [iterator for iterator in listed if iterator is not None]
        if self.state in (RerunState.NOT_RUNNING_YET, RerunState.WILL_RERUN_FROM_CHECKPOINT):
            self._begin(data)
            return True
        if self._needs_another_pass():
            self.state = RerunState.RERUNNING_IN_PLACE
            self._go_back(data)
            self._pass = Findings()
            return True
        self._end_step(data)
        return False

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """Return (save a checkpoint of the state before the step, exit, exit code).

        The same on all ranks.
        """
        outcome = self.outcome
        if outcome in _NEXT_START:
            return True, True, EXIT_CODE_RESUME_TO_DISAMBIGUATE
        if outcome == Request.STOP_CORRECT:
            return False, True, EXIT_CODE_FAILED_ON_RESULT_VALIDATION
        if outcome in (Request.STOP_PERSISTENT_SHARED, Request.STOP_PERSISTENT):
            # The new checkpoint has no suspect: the next start does not judge the step again.
            return True, True, EXIT_CODE_FAILED_ON_RESULT_VALIDATION
        return False, False, 0

    @property
    def judges_by_norm(self) -> bool:
        """Whether `send_norm` knows on the device if the pass is accepted; the same on all ranks.

        Then the update may be queued before the host has read the norm.  Not in a rerun, which is
        judged by comparison, nor if the machine rejects correct results.
        """
        if self.state in (RerunState.NOT_RUNNING_YET, RerunState.WILL_RERUN_FROM_CHECKPOINT):
            return True
        if self.mode == RerunMode.VALIDATE_RESULTS:
            is_first = self.state == RerunState.INITIAL_RUN
            return is_first and not self.error_injector.error_injection_rate
        return self.mode == RerunMode.DISABLED

    def send_norm(self, squares: Tensor, *, is_checked: bool) -> SentNorm:
        """Start to copy ``squares`` to the host; agree on the ranks' requests with the same copy.

        Collective over all ranks in the first pass of a step.  ``is_checked``: a value that is not
        finite on some rank makes every rank run the step again.  Without this call the agreement
        costs a host read of its own.
        """
        values = squares.view(1)
        # Infinity minus infinity is NaN: fewer kernels than those of isfinite().
        accepted = squares - squares == 0.0
        if self.is_running and self.state == RerunState.INITIAL_RUN:
            request = torch.full_like(squares, float(self._own_request()))
            if num_ranks() > 1:
                if is_checked:
                    bad = torch.full_like(request, Request.RERUN_SHARED).maximum(request)
                    request = torch.where(accepted, request, bad)
                dist.all_reduce(request, dist.ReduceOp.MAX)
                values = torch.cat([values, request.view(1)])
            accepted &= request == float(Request.GO_ON)
        return SentNorm(accepted, AsyncHostCopy(values))

    def read_squared_norm(self, sent: SentNorm) -> float:
        """Return the sum of squares of the running pass; blocks the host until it is computed."""
        squares, request = sent.read()
        if request is not None:
            self._pass.agreed = request
        return squares

    def check_pass(self) -> None:
        """Raise PassRejected if the running pass must not change the parameters.

        Collective over all ranks, which all raise.  Outside of a pass nothing is rejected.
        """
        is_first = self.state == RerunState.INITIAL_RUN
        reports = self.mode == RerunMode.REPORT_DETERMINISM_STATS
        if (reports and is_first) or (self.is_running and self._agreed() > Request.EXPLAINED):
            raise PassRejected

    def _begin(self, data: list[Any]) -> None:
        self.current_iteration += 1
        if self.mode != RerunMode.DISABLED:
            for iterator in data:
                iterator.advance()
            self._saved = self._save(), dict(self._largest)
        self._pass = Findings()
        self.explanation = None
        self.outcome = self._own = Request.GO_ON
        is_pending = self.state == RerunState.WILL_RERUN_FROM_CHECKPOINT
        self.state = RerunState.INITIAL_RUN
        if is_pending and self._pending_iteration == self.current_iteration:
            self.state = RerunState.RERUNNING_FROM_CHECKPOINT
        else:  # nothing is pending, or its step is skipped
            self.suspect = None
        self._pending_iteration = None

    def _needs_another_pass(self) -> bool:
        """Return whether the step runs again in place.  Collective over all ranks."""
        if self.mode == RerunMode.DISABLED:
            return False
        is_first = self.state == RerunState.INITIAL_RUN
        if self.mode == RerunMode.REPORT_DETERMINISM_STATS:
            return is_first
        found = self._pass
        self.outcome = self._agreed()
        is_same = self.suspect is not None and found.difference == 0
        if self.state == RerunState.RERUNNING_IN_PLACE and not is_same:
            self.suspect = found.rejected
        if is_first and self.outcome != Request.GO_ON:
            self.suspect = found.rejected
            log("Need to rerun step to check reproducibility of initial result", once=True)
            return True
        return False

    def _end_step(self, data: list[Any]) -> None:
        """Set the state after the last pass of a step."""
        if self.mode == RerunMode.REPORT_DETERMINISM_STATS:
            self._results.clear()
            if self.current_iteration % self.REPORTING_INTERVAL_ITERATIONS == 0:
                self.report_stats()
        self.state = RerunState.NOT_RUNNING_YET
        if self.outcome == Request.EXPLAINED:
            log("Continuing normal execution", once=True)
        elif self.outcome > Request.EXPLAINED:
            self._go_back(data)
            if self._own != self.outcome:
                self.explanation = None  # another rank has found more
            if self.outcome == self._own == Request.STOP_PERSISTENT and self.suspect is not None:
                self.blamed = self.suspect.place
        if self.outcome == Request.RERUN_ELSEWHERE:
            log("Need to restart job again because it was scheduled on the same GPU", once=True)
        if self.outcome in _NEXT_START:
            self.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
            self._pending_iteration = self.current_iteration
            self.suspect = self._suspect_for_next_start()
        else:
            self.suspect = None

    def _suspect_for_next_start(self) -> Suspect | None:
        suspect = self.suspect
        if suspect is None or self.outcome == Request.RERUN_ELSEWHERE:
            return suspect and replace(suspect, num_starts=suspect.num_starts + 1)
        if self._own < Request.RERUN_SHARED:
            return None  # a transient error of this rank
        # A rank with a result of its own to check also explains the results that all ranks share.
        return None if suspect.is_shared and self.outcome == Request.RERUN else suspect

    def _go_back(self, data: list[Any]) -> None:
        """Restore the state before the step."""
        state, largest = self._saved
        self._restore(state)
        self._largest = dict(largest)
        for iterator in data:
            iterator.rewind()

    def _agreed(self) -> Request:
        """Return the largest request of all ranks after the pass.  Collective in its first call."""
        self._own = self._own_request()
        found = self._pass
        if found.agreed is None:
            found.agreed = self._own
            if num_ranks() > 1:
                value = torch.tensor(int(self._own), device=device.current())
                dist.all_reduce(value, dist.ReduceOp.MAX)
                found.agreed = int(value)
        return Request(found.agreed)

    def _own_request(self) -> Request:
        return request_after(
            self.state, self._pass, self.suspect, here=Place.here(my_rank()), num_ranks=num_ranks()
        )

    # -- state in checkpoints --------------------------------------------------------------

    def saved_state(self) -> dict[str, Any] | None:
        """Return the state of this rank as JSON; None if the next start needs none."""
        is_pending = self.state == RerunState.WILL_RERUN_FROM_CHECKPOINT
        if self.mode == RerunMode.DISABLED or not (is_pending or self._largest):
            return None
        return {
            "state": self.state.value if is_pending else RerunState.NOT_RUNNING_YET.value,
            "current_iteration": self.current_iteration,
            "suspect": self.suspect.to_json() if is_pending and self.suspect else None,
            "error_injector_checkpoint": self.error_injector.state_dict(),
            "large_value_counts": {name: count for name, (count, _) in self._largest.items()},
            "max_values": {name: largest for name, (_, largest) in self._largest.items()},
        }

    def load_saved_state(self, saved: Mapping[str, Any]) -> None:
        """Restore `saved_state`.  Raises Python's errors for values of other types."""
        if self.mode == RerunMode.DISABLED:
            return
        state = RerunState(saved["state"])
        suspect = None if saved["suspect"] is None else Suspect.from_json(saved["suspect"])
        counts = saved["large_value_counts"].items()
        largest = {str(k): (int(count), float(saved["max_values"][k])) for k, count in counts}
        iteration = int(saved["current_iteration"])
        self.error_injector.load_state_dict(saved["error_injector_checkpoint"])
        self._largest = largest
        self.current_iteration = iteration
        if state != RerunState.NOT_RUNNING_YET:
            self.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
            self.suspect = suspect
            self._pending_iteration = iteration
            self.current_iteration = iteration - 1

    def state_dict(
        self, data_iterator: object, ckpt_format: str, force: bool = False
    ) -> dict[str, Any] | None:
        """Return the state of this rank for a checkpoint; None if the next start needs none."""
        del data_iterator, ckpt_format  # data are found again by the number of consumed samples
        saved = self.saved_state()
        return {"mode": self.mode, "sharded": saved} if saved is not None or force else None

    def validate_state_dict(self, state_dict: Mapping[str, Any] | None) -> bool:
        """Return whether `load_state_dict` accepts ``state_dict``: its mode is that of this run."""
        return state_dict is not None and state_dict.get("mode") == self.mode

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        if state_dict["sharded"] is not None:
            self.load_saved_state(state_dict["sharded"])

    @classmethod
    def get_skipped_iterations_from_tracker_file(cls, tracker_file_name: str) -> list[int]:
        """Return the steps that a run skips because of the tracker file."""
        return steps_to_skip(tracker_file_name)


_machine = RerunStateMachine()
each_rank_owns(__name__, "_machine")


def initialize_rerun_state_machine(**kwargs: Any) -> None:
    """Create the state machine of this rank; arguments as of `RerunStateMachine`."""
    global _machine
    _machine = RerunStateMachine(**kwargs)


def destroy_rerun_state_machine() -> None:
    """Replace the state machine of this rank by one in mode DISABLED."""
    initialize_rerun_state_machine()


def get_rerun_state_machine() -> RerunStateMachine:
    """Return the state machine of this rank; mode DISABLED until it is initialized."""
    return _machine


class SentNorm(NamedTuple):
    """Squared gradient norm, and where the ranks agree their largest request, sent to the host."""

    accepted: Tensor  # truth value on the device: finite, and no rank asks for another pass
    values: AsyncHostCopy

    def read(self) -> tuple[float, int | None]:
        """Return squared norm and request; blocks the host until the device has computed them."""
        squares, *request = self.values.get_list()
        return squares, int(request[0]) if request else None


class RerunDataIterator:
    """Iterator over ``iterable`` that keeps what it returned since the last `advance`."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable
        self.saved_microbatches: list[Any] = []
        self._position = 0  # in saved_microbatches; at its end new ones are read
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> RerunDataIterator:
        return self

    def __next__(self) -> Any:
        if self._position < len(self.saved_microbatches):
            self._position += 1
            return self.saved_microbatches[self._position - 1]
        batch = self._read_next()
        self.saved_microbatches.append(batch)
        self._position += 1
        return batch

    def rewind(self) -> None:
        """Return again what was returned since the last `advance`, then go on."""
        self._position = 0

    def advance(self) -> None:
        """Begin a step: forget what was returned so far; the next `rewind` goes back here."""
        del self.saved_microbatches[: self._position]
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the micro-batches since the last `advance`."""
        return {"saved_microbatches": list(self.saved_microbatches)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Return the micro-batches of `state_dict` first, then go on."""
        self.saved_microbatches = list(state_dict["saved_microbatches"])
        self._position = 0

    def _read_next(self) -> Any:
        if self._iterator is None:
            is_iterator = hasattr(self.iterable, "__next__")
            self._iterator = (
                cast(Iterator[Any], self.iterable) if is_iterator else iter(self.iterable)
            )
        return next(self._iterator)
