"""Send and receive activations and gradients between pipeline stages.

The stage that computes a tensor puts it into the mailbox, and the stage that needs it takes it out.
Two stages on one rank share the mailbox and need no communication; between ranks a TransferBatch
of the plan sends the tensor.

Order of communication: each TransferBatch of a rank in the order of its plan, one
``batch_isend_irecv`` over pp, and one before it if shapes vary.  Transfers between two ranks are
matched by order, not by tag.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.diagnostics import collective_tracer
from megatron.core.pipeline_parallel.microbatch import StepHooks
from megatron.core.pipeline_parallel.plan import Placement, Transfer, TransferBatch

_WORDS = {"activation": "forward", "gradient": "backward"}


class Mailbox:
    """Tensors that stages send and receive in one step, all of one ``dtype``.

    ``shapes[i]`` is the shape of the activation that stage i sends to stage i + 1, and of its
    gradient; without ``shapes`` each activation may have another one, with three dimensions, which
    is sent before it.  ``waits_at_once`` waits for each TransferBatch where it is posted (no
    overlap).
    """

    def __init__(
        self,
        placement: Placement,
        pp_group: ProcessGroup,
        hooks: StepHooks,
        *,
        shapes: Sequence[tuple[int, ...]] | None,
        dtype: torch.dtype,
        waits_at_once: bool = False,
    ) -> None:
        self.placement = placement
        self.pp_group = pp_group
        self.hooks = hooks
        self.shapes = shapes
        self.dtype = dtype
        self.waits_at_once = waits_at_once
        # Without shapes: (micro-batch, stage that sends the activation) -> its shape.
        self._seen: dict[tuple[int, int], tuple[int, ...]] = {}
        self._tensors: dict[Transfer, Tensor] = {}  # put but not sent, or received but not taken
        # Requests of receives that `take` has not waited for yet.
        self._arriving: dict[Transfer, dist.Work] = {}
        # Requests of the sends of the last batch, and the tensors that these sends read: the memory
        # must not be reused before the requests are complete.
        self._leaving: list[dist.Work] = []
        self._held: list[Tensor] = []

    def put(self, transfer: Transfer, tensor: Tensor) -> None:
        """Store the tensor that ``transfer`` sends, or that another stage of this rank takes."""
        if self.shapes is None and transfer.kind == "activation":
            self._seen[transfer.microbatch, transfer.source] = tuple(tensor.shape)
        shape = self._shape(transfer)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, self.dtype), (
            f"stage {transfer.source} made {tuple(tensor.shape)} of {tensor.dtype}, "
            f"stage {transfer.target} expects {shape} of {self.dtype}"
        )
        self._tensors[transfer] = tensor.detach()

    def post(self, batch: TransferBatch) -> None:
        """Start all transfers of ``batch``; each peer posts the matching TransferBatch.

        Collective over the ranks at the other ends of the transfers.
        """
        with self.hooks.timed(_name(batch)):
            # At most one TransferBatch of sends is open: this bounds the memory that sends hold.
            _wait(self._leaving)
            if self.shapes is None:
                self._exchange_shapes(batch)
            sent = [self._tensors.pop(transfer).contiguous() for transfer in batch.sends]
            received = [
                torch.empty(self._shape(transfer), dtype=self.dtype, device=device.current())
                for transfer in batch.receives
            ]
            collective_tracer.record.purposes = (
                f"{transfer.kind} of microbatch {transfer.microbatch}"
                for transfer in (*batch.sends, *batch.receives)
            )
            works = self._start(batch.sends, sent, batch.receives, received)
            if len(works) == 1:  # NCCL returns one request for the whole batch
                works *= len(sent) + len(received)
            self._leaving = []
            self._held = []
            self._tensors.update(zip(batch.receives, received, strict=True))
            if self.waits_at_once:
                _wait(works)
            else:
                self._leaving = works[: len(sent)]
                self._held = sent
                self._arriving.update(zip(batch.receives, works[len(sent) :], strict=True))

    def _start(
        self,
        sends: Sequence[Transfer],
        sent: Sequence[Tensor],
        receives: Sequence[Transfer],
        received: Sequence[Tensor],
    ) -> list[dist.Work]:
        """Start to send and to receive tensors; return the requests."""
        ends: list[tuple[Any, Tensor, int]]
        ends = [(dist.isend, x, t.target) for x, t in zip(sent, sends, strict=True)]
        ends += [(dist.irecv, x, t.source) for x, t in zip(received, receives, strict=True)]
        location = self.placement.location
        group = self.pp_group
        return dist.batch_isend_irecv(
            [
                dist.P2POp(operation, tensor, group=group, group_peer=location(stage)[0])
                for operation, tensor, stage in ends
            ]
        )

    def _exchange_shapes(self, batch: TransferBatch) -> None:
        """Tell the receivers of activations their shapes; a gradient has that of its activation."""
        sends = [t for t in batch.sends if t.kind == "activation"]
        receives = [t for t in batch.receives if t.kind == "activation"]
        if not sends and not receives:
            return
        here = device.current()
        sent = [torch.tensor(self._shape(transfer), device=here) for transfer in sends]
        received = [torch.empty(3, dtype=torch.int64, device=here) for _ in receives]
        _wait(self._start(sends, sent, receives, received))
        for transfer, shape in zip(receives, received, strict=True):
            self._seen[transfer.microbatch, transfer.source] = tuple(shape.tolist())

    def take(self, transfer: Transfer) -> Tensor:
        """Return the tensor of ``transfer``, after waiting for its receive."""
        with self.hooks.timed(f"{_WORDS[transfer.kind]}-recv"):
            if transfer in self._arriving:
                self._arriving.pop(transfer).wait()
        return self._tensors.pop(transfer)

    def close(self) -> None:
        """End the step: wait for the sends; every tensor must have been taken."""
        _wait(self._leaving)
        self._held = []
        assert not self._tensors, f"never received: {', '.join(map(str, self._tensors))}"

    def _shape(self, transfer: Transfer) -> tuple[int, ...]:
        stage = min(transfer.source, transfer.target)
        if self.shapes is None:
            return self._seen[transfer.microbatch, stage]
        return tuple(self.shapes[stage])


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


def _name(batch: TransferBatch) -> str:
    """Return the timer name of a TransferBatch, for example forward-send-backward-recv."""
    parts = []
    for transfers, verb in ((batch.sends, "send"), (batch.receives, "recv")):
        kinds = sorted({transfer.kind for transfer in transfers})
        parts += [*(_WORDS[kind] for kind in kinds), verb] if kinds else []
    return "-".join(parts)
