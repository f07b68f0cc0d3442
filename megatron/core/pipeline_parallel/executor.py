"""Execute a plan: one step of this rank's model chunks, instruction by instruction.

Order of collectives: sends and receives between stages in the order of the plan; within each pass
those of the model; with overlapped reduction, those of a chunk's gradients during its last pass, or
a fixed number of passes later.  The plan alone determines this order, never the time at which a
tensor arrives: the ranks of a tensor- or data-parallel group follow the same plan, so they start
their collectives in the same order.

Lifetime of tensors: a stage keeps, from the forward pass of a micro-batch to its backward pass, the
autograd graph and the tensor that it received, whose ``grad`` it sends to the previous stage.  It
does not keep the tensor that it sent: the mailbox holds that until the send is complete, and
backward begins at the edge of the graph that computed it.  This saves one hidden state for each
micro-batch in flight.  With weight passes, only the inputs that weight gradients need are kept
after the backward pass.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.config.errors import ConfigError
from megatron.core.pipeline_parallel.microbatch import (
    ForwardStepFunc,
    LossFunc,
    LossRule,
    StepHooks,
    StepLosses,
)
from megatron.core.pipeline_parallel.pass_interleaving import interleave
from megatron.core.pipeline_parallel.plan import (
    Instruction,
    Placement,
    Transfer,
    TransferBatch,
    Work,
    is_pair,
)
from megatron.core.pipeline_parallel.transfer import Mailbox
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from megatron.core.utils import get_attr_wrapped_model


@dataclass(frozen=True, kw_only=True)
class StepTask:
    """Parameters of a step that do not depend on its plan."""

    forward_step_func: ForwardStepFunc
    rule: LossRule
    hooks: StepHooks
    forward_only: bool = False
    collect_non_loss_data: bool = False
    # Number of last micro-batches whose output-layer weight gradient is computed after all passes.
    num_deferred: int = 0
    # Whether a forward pass and the backward pass after it are interleaved at expert all-to-alls.
    in_pairs: bool = False
    # Whether weight gradients of such a backward pass are computed during its all-to-alls.
    delays_weights: bool = False


@dataclass
class InFlightMicrobatch:
    """State of one micro-batch in one chunk, from its forward pass to its last pass."""

    received: Tensor | None = None  # sent by the previous stage; a leaf that collects its gradient
    loss: Tensor | None = None  # last stage: backward begins at it
    begin: GradientEdge | None = None  # other stages: backward begins at it; keeps no output alive
    later: WeightGradQueue | None = None  # weight gradients that have a pass of their own


class Executor:
    """Executor of one step of this rank's model chunks."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        data: Sequence[object],
        placement: Placement,
        rank: int,
        task: StepTask,
        mailbox: Mailbox,
    ) -> None:
        """``data[i]``: data iterator of chunk i."""
        assert len(chunks) == len(data) == placement.num_chunks, (
            f"{placement.num_chunks} chunks a rank: {len(chunks)} models, {len(data)} iterators"
        )
        self.chunks = chunks
        self.data = data
        self.task = task
        self.mailbox = mailbox
        self.rank = rank
        self.stages = [placement.stage(rank, chunk) for chunk in range(placement.num_chunks)]
        self.last_stage = placement.num_stages - 1
        self.losses = StepLosses()
        # Data-parallel wrappers; a model without one (None) has no gradients to reduce.
        self._wrappers: list[Any] = [c if hasattr(c, "ddp_config") else None for c in chunks]
        self._alive: dict[tuple[int, int], InFlightMicrobatch] = {}
        self._passes: set[Work] = set()  # backward and weight passes of this step
        self._final: set[Work] = set()  # the last backward and the last weight pass of each chunk
        self._last: dict[int, Work] = {}  # chunk -> its last backward or weight pass
        self.deferred = WeightGradQueue() if task.num_deferred else None
        self._weights_of_pair = WeightGradQueue() if task.delays_weights else None
        self._delayed: WeightGradQueue | None = None  # set while a pair runs
        self._num_passes = 0
        # (number of passes after which its reduction starts, wrapper of the chunk)
        self._to_reduce: deque[tuple[int, Any]] = deque()

    def run(self, instructions: Sequence[Instruction]) -> StepLosses:
        """Execute ``instructions``.  Collective over pp, and over the ranks of the model.

        When it returns, the gradients of this rank are complete, and their reduction has started
        if it overlaps with backward.
        """
        self.begin(instructions)
        rest = deque(instructions)
        while rest:
            one = rest.popleft()
            if self.task.in_pairs and rest and is_pair(one, rest[0]):
                self._both(one, rest.popleft())
            else:
                self.do(one)
        self._run_deferred()
        self.mailbox.close()
        self._reduce_due(math.inf)
        return self.losses

    def begin(self, instructions: Sequence[Instruction]) -> None:
        """Record the backward and weight passes of the step, and the last ones of each chunk."""
        # Dictionaries keep the last of equal keys.
        passes = [i for i in instructions if isinstance(i, Work) and i.kind != "forward"]
        self._passes = set(passes)
        self._last = {work.chunk: work for work in passes}
        self._final = set({(work.kind, work.chunk): work for work in passes}.values())

    def do(self, instruction: Instruction) -> None:
        """Execute one instruction."""
        if isinstance(instruction, TransferBatch):
            self.mailbox.post(instruction)
            return
        if self.task.hooks.pass_func is not None:
            self.task.hooks.pass_func(instruction.kind)
        getattr(self, f"_{instruction.kind}")(instruction)

    def _both(self, forward: Instruction, backward: Instruction) -> None:
        """Interleave a pair: one pass computes while the other one's expert all-to-alls run.

        The two passes run in two threads, but never at the same time, and they switch at the same
        calls on every rank (`pass_interleaving`).  So the attributes of this object need no lock.
        """
        # Only the backward pass reads this.  Its weight gradients are computed during its
        # all-to-alls (`during_all_to_all`), the remaining ones at its end, which empties the queue.
        self._delayed = self._weights_of_pair

        def during_all_to_all(which: int) -> None:
            if which == 1 and self._delayed is not None:
                self._delayed.run()

        try:
            interleave(partial(self.do, forward), partial(self.do, backward), during_all_to_all)
        finally:
            self._delayed = None

    def _forward(self, work: Work) -> None:
        stage = self.stages[work.chunk]
        model = self.chunks[work.chunk]
        task = self.task
        alive = InFlightMicrobatch()
        if work._replace(kind="weight") in self._passes:
            alive.later = WeightGradQueue()
        if stage > 0:
            received = self.mailbox.take(Transfer("activation", work.microbatch, stage - 1, stage))
            alive.received = received.requires_grad_(not task.forward_only)
            # The model reads its input from this attribute: a script's forward step function calls
            # the model with the tokens on every stage.
            get_attr_wrapped_model(model, "set_input_tensor")([received])
        with task.hooks.timed("forward-compute"), torch.set_grad_enabled(not task.forward_only):
            output, loss_func = task.forward_step_func(self.data[work.chunk], model)
            if stage == self.last_stage:
                alive.loss = self._loss(loss_func, output)
        if stage < self.last_stage:
            self.mailbox.put(Transfer("activation", work.microbatch, stage, stage + 1), output)
            # Keep the graph, but not the output: the mailbox frees it after sending.
            alive.begin = get_gradient_edge(output) if output.requires_grad else None
        if not task.forward_only:
            self._alive[work.chunk, work.microbatch] = alive

    def _loss(self, loss_func: LossFunc, output: Tensor) -> Tensor | None:
        """Return the scaled loss; None if the step collects other data than losses.

        ``loss_func`` returns (loss, reported) or (sum of losses, number of tokens, reported).
        """
        if self.task.collect_non_loss_data:
            self.losses.append(loss_func(output, non_loss_data=True))
            return None
        returned = loss_func(output)
        if not isinstance(returned, tuple | list) or not 2 <= len(returned) <= 3:
            raise ConfigError(
                f"the loss function returned {type(returned).__name__}: return (loss, reported) or "
                "(sum of losses, number of tokens, reported)"
            )
        loss, *counts, reported = returned
        self.losses.append(reported)
        num_tokens = counts[0] if counts else None
        if isinstance(num_tokens, int):
            num_tokens = torch.tensor(num_tokens, device=loss.device)
        if num_tokens is not None:
            count = num_tokens.detach().to(torch.float64)  # counts are exact up to 2**53
            before = self.losses.num_tokens
            self.losses.num_tokens = count if before is None else before + count
        return self.task.rule.scale(loss, num_tokens)

    def _backward(self, work: Work) -> None:
        stage = self.stages[work.chunk]
        hooks = self.task.hooks
        alive = self._alive[work.chunk, work.microbatch]
        gradient: Tensor | None = None
        if stage < self.last_stage:
            gradient = self.mailbox.take(Transfer("gradient", work.microbatch, stage + 1, stage))
        with (
            self._synced(work.chunk, is_final=work in self._final),
            self._collected(work, alive),
            hooks.timed("backward-compute"),
        ):
            if alive.loss is not None:
                if hooks.loss_check_func is not None:
                    hooks.loss_check_func(alive.loss, work.microbatch)
                scale = hooks.grad_scale_func
                (alive.loss if scale is None else scale(alive.loss)).backward()
            elif alive.begin is not None:
                torch.autograd.backward(alive.begin, gradient)
            if self._delayed is not None:
                self._delayed.run()
        if alive.received is not None:
            to_previous = Transfer("gradient", work.microbatch, stage, stage - 1)
            assert alive.received.grad is not None, f"stage {stage} does not use its input"
            self.mailbox.put(to_previous, alive.received.grad)
        # Dropping the entry frees the tensors that the graph has saved.  The mailbox keeps the
        # gradient of ``received`` until it is sent.
        del self._alive[work.chunk, work.microbatch]
        if alive.later is not None:
            self._alive[work.chunk, work.microbatch] = InFlightMicrobatch(later=alive.later)
        self._count_pass(work)

    def _collected(self, work: Work, alive: InFlightMicrobatch) -> AbstractContextManager[None]:
        """Return the context in which backward queues weight gradients to compute them later.

        A queue holds the input and the output gradient of each matmul: memory in exchange for a
        shorter backward pass.  A hook of the data-parallel wrapper that finds no gradient waits for
        the next pass (`GradSlot.take`), so a bucket is complete only after the queue has run.
        """
        later = self._delayed if alive.later is None else alive.later
        if later is not None:
            return later.collecting()
        first_deferred = self.task.rule.num_microbatches - self.task.num_deferred
        if self.deferred is None or alive.loss is None or work.microbatch < first_deferred:
            return nullcontext()
        return self.deferred.collecting(only_output_layer=True)

    def _weight(self, work: Work) -> None:
        later = self._alive.pop((work.chunk, work.microbatch)).later
        assert later is not None, f"{work} comes before its backward"
        is_final = work in self._final
        with self._synced(work.chunk, is_final=is_final), self.task.hooks.timed("backward-compute"):
            later.run()
        self._count_pass(work)

    def _run_deferred(self) -> None:
        """Compute the deferred weight gradients of the output layer, while other stages drain.

        All but the last one run under ``no_sync``: a bucket must not be reduced before all weight
        gradients are added.
        """
        if self.deferred:
            chunk = self.stages.index(self.last_stage)
            with self._synced(chunk, is_final=False):
                self.deferred.run(len(self.deferred) - 1)
            with self._synced(chunk, is_final=True):
                self.deferred.run()

    def _synced(self, chunk: int, *, is_final: bool) -> AbstractContextManager[object]:
        """Return the context of a pass that adds to gradients: only the last may start to reduce.

        A bucket that was reduced too early would miss later micro-batches.  A delayed reduction
        (`_delay`) is started by `_reduce_due`, never by a pass.
        """
        wrapper = self._wrappers[chunk]
        if wrapper is None or (is_final and self._delay(wrapper) == 0):
            return nullcontext()
        context: AbstractContextManager[None] = wrapper.no_sync()
        return context

    def _delay(self, wrapper: Any) -> int:
        """Return the number of passes between a chunk's last one and the start of its reduction.

        0: the reduction starts during the last pass.  With ``align_grad_reduce`` (default) all
        stages start at the same time, although each ends its last pass one pass before the previous
        stage.  So reductions share the network with the pipeline's sends and receives once, not at
        a different time for each stage.
        """
        return self.rank if wrapper.ddp_config.align_grad_reduce else 0

    def _count_pass(self, work: Work) -> None:
        """Count a finished pass, and start the reductions that are due.

        All data-parallel ranks start a reduction between the same two passes, since they count
        passes and do not measure time.  Otherwise, with expert or tensor parallelism, the order of
        collectives of different groups could differ between ranks and deadlock.
        """
        self._num_passes += 1
        wrapper = self._wrappers[work.chunk]
        is_held_up = bool(self.deferred) and self.stages[work.chunk] == self.last_stage
        is_complete = work == self._last[work.chunk] and not is_held_up
        if is_complete and wrapper is not None and wrapper.ddp_config.overlap_grad_reduce:
            self._to_reduce.append((self._num_passes + self._delay(wrapper), wrapper))
        self._reduce_due(self._num_passes)

    def _reduce_due(self, num_passes: float) -> None:
        # Chunks become complete in the order of the plan, all with the same delay: the queue is
        # sorted by due time.
        while self._to_reduce and self._to_reduce[0][0] <= num_passes:
            self._to_reduce.popleft()[1].start_grad_sync()
