"""Draft tokens by the model's multi-token-prediction (MTP) layers, after each step.

Depth d (from 1) computes the row of position p from the row of depth d - 1 (depth 0: the decoder)
and the token at p + d; its logits are those of the token at p + d + 1, as in training.  Its keys
and values have the position p, in pages of the same request, behind those of the decoder's layers.
All rows of a step go through all depths, so that the pages of a prompt are complete for every
request that shares them; the row of the last accepted token gives the drafts.  Drafts beyond the
number of depths apply the last depth again, to the row that it gave, as a row of the position
after it: the next step writes the entries of these rows anew.

A row that has read a token which is not yet known, or a draft that is then rejected, leaves an
entry that makes later drafts worse; tokens never depend on these entries.

Collective over tp, in this order: broadcast of the sampled tokens, then for each draft the layer
and a broadcast of the draft.  With experts also over ep: all ranks run the same number of layers.

``N`` rows, ``r`` output rows, ``w`` segments that want a draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.device import host_array
from megatron.core.inference.paged_engine.cache import BatchView, PagedCache, SlotPositions
from megatron.core.inference.paged_engine.step_plan import (
    NO_INTEGERS,
    NO_TOKEN,
    SAMPLE,
    Integers,
    Segment,
    StepPlan,
)
from megatron.core.inference.sampling.sampler import Sampler
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model

_ONE_TOKEN: Integers = np.zeros(1, dtype=np.int64)  # its id is on the device
_SAMPLE_ONLY: Integers = np.array([SAMPLE], dtype=np.int64)


class DraftModel:
    """Drafts at most ``num_tokens`` tokens of each segment with ``num_layers`` MTP layers.

    ``module``: the last stage.  ``sampler``: on the rank that samples.  The draft of a token is the
    sample that the token gets if the MTP layer gives the logits: with the same noise.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: ProcessGroupCollection,
        cache: PagedCache,
        sampler: Sampler | None,
        *,
        num_layers: int,
        num_tokens: int,
    ) -> None:
        self._predict = get_attr_wrapped_model(module, "predict_ahead")
        self._logits = get_attr_wrapped_model(module, "logits")
        self._tp = groups.tp
        self._in_lockstep = groups.ep.size() > 1
        self._cache = cache
        self._sampler = sampler
        self._num_layers = num_layers
        self._num_tokens = num_tokens

    def draft(
        self, plan: StepPlan, view: BatchView, sampled: Tensor | None, slots: SlotPositions
    ) -> Integers:
        """Return drafts [segments, d] after a step with ``view``, `NO_TOKEN` behind the last ones.

        ``sampled`` [r]: results of the output rows, on the rank that samples.
        ``slots``: see `BatchView`.  All ranks of tp return the same.
        """
        hidden = view.hidden
        assert hidden is not None, "the model has run"
        if sampled is None:
            sampled = torch.empty(plan.num_outputs, dtype=torch.int64, device=hidden.device)
        rows = _Rows.of(plan, self._shared(sampled).cpu().numpy(), self._num_layers, self._cache)
        ids = _upload(rows.ahead, hidden.device)
        found: list[tuple[list[int], Tensor]] = []
        for depth in range(self._num_layers):
            hidden = self._predict(hidden, ids, depth, view.at_depth(depth + 1))
            wanting = rows.wanting(depth + 1)
            at = _upload(rows.last_row[wanting], hidden.device)
            last = hidden.index_select(0, at)
            drafts = self._sample(last, rows, wanting, depth + 1)
            found.append((wanting, drafts))
            if depth + 1 < self._num_layers:
                ids = ids.roll(-1)
                ends = _upload(rows.last_row, hidden.device)
                known = [next(iter(s.ahead[depth + 1 :]), 0) for s in plan.segments]
                ids.index_copy_(0, ends, _upload(known, hidden.device))
                ids.index_copy_(0, at, drafts.clamp(min=0))
        self._chain(rows, last, found, slots)
        return _table(found, len(plan.segments))

    def _chain(
        self,
        rows: _Rows,
        hidden: Tensor,
        found: list[tuple[list[int], Tensor]],
        slots: SlotPositions,
    ) -> None:
        """Apply the last depth again to its rows ``hidden`` [w, 1, h]; add drafts to ``found``."""
        layers = self._num_layers
        idle_slot = self._cache.max_requests
        count = max(s.num_drafts for s in rows.segments)
        for number in range(layers + 1, (self._num_tokens if self._in_lockstep else count) + 1):
            before, drafts = found[-1]
            wanting = rows.wanting(number)
            segments = []
            for i in wanting:
                s = rows.segments[i]
                start = int(rows.position[i]) + number - layers
                segments.append(Segment(s.slot, start, _ONE_TOKEN, s.pages, NO_INTEGERS))
            if not segments and not self._in_lockstep:
                break
            if segments:
                of_before = {segment: row for row, segment in enumerate(before)}
                at = _upload(np.array([of_before[i] for i in wanting]), hidden.device)
                hidden = hidden.index_select(0, at)
                ids = drafts.index_select(0, at)
            else:  # other ranks have drafts
                idle = np.array([self._cache.num_pages])
                segments = [Segment(idle_slot, 0, _ONE_TOKEN, idle, NO_INTEGERS)]
                hidden = hidden.new_zeros(1, *hidden.shape[1:])
                ids = drafts.new_zeros(1)
            view = BatchView(self._cache, StepPlan(segments), hidden.device, slots=slots)
            hidden = self._predict(hidden, ids.clamp(min=0), layers - 1, view.at_depth(layers))
            if wanting:
                found.append((wanting, self._sample(hidden, rows, wanting, number)))

    def _sample(self, hidden: Tensor, rows: _Rows, wanting: list[int], number: int) -> Tensor:
        """Return draft ``number`` (from 1) of the segments ``wanting``: [w, 1, h] -> [w]."""
        drafts = torch.empty(len(wanting), dtype=torch.int64, device=hidden.device)
        if not wanting:
            return drafts
        logits = self._logits(hidden, gather=True)[0]
        if self._sampler is not None:
            drafts = self._sampler.draft(logits, rows.plan_of_drafts(wanting, number))
        return self._shared(drafts)

    def _shared(self, tokens: Tensor) -> Tensor:
        """Return the tokens of the rank that samples on all ranks of tp."""
        if self._tp.size() > 1 and len(tokens):
            tokens = tokens.contiguous()
            dist.broadcast(tokens, group=self._tp, group_src=0)
        return tokens


@dataclass(frozen=True)
class _Rows:
    """Where the segments of a step stand after it.

    ``last_row`` [segments]: the row of the last accepted token among all rows; ``position``: its
    position.  ``ahead`` [N]: the token after each row.
    """

    segments: list[Segment]
    last_row: Integers
    position: Integers
    ahead: Integers
    num_layers: int
    page_size: int

    @staticmethod
    def of(plan: StepPlan, results: Integers, num_layers: int, cache: PagedCache) -> _Rows:
        """Return the rows of ``plan``, whose output rows gave ``results`` [r]."""
        last_row = []
        position = []
        ahead = []
        first = at = 0
        for s in plan.segments:
            found = results[at : at + len(s.targets)]
            last = len(s.tokens) - 1
            num_drafts = int((s.targets == SAMPLE).sum()) - 1
            if num_drafts > 0:
                is_wrong = s.tokens[-num_drafts:] != found[:num_drafts]
                last -= num_drafts - int([*is_wrong, True].index(True))
            last_row.append(first + last)
            position.append(s.start + last)
            after = np.concatenate([s.tokens[1:], s.ahead[:1] if len(s.ahead) else _ONE_TOKEN])
            if len(found):
                after[-len(found) :] = found
            ahead.append(after)
            first += len(s.tokens)
            at += len(found)
        return _Rows(
            plan.segments,
            np.array(last_row),
            np.array(position),
            np.concatenate(ahead).clip(min=0),
            num_layers,
            cache.page_size,
        )

    def wanting(self, number: int) -> list[int]:
        """Return the segments that want draft ``number`` and have an entry for its row."""
        return [
            i
            for i, s in enumerate(self.segments)
            if s.num_drafts >= number
            and self.position[i] + number - self.num_layers < len(s.pages) * self.page_size
        ]

    def plan_of_drafts(self, segments: list[int], number: int) -> StepPlan:
        """Return the plan that samples the tokens of the drafts ``number``."""
        return StepPlan(
            [
                Segment(
                    self.segments[i].slot,
                    int(self.position[i]) + number,
                    _ONE_TOKEN,
                    NO_INTEGERS,
                    _SAMPLE_ONLY,
                )
                for i in segments
            ]
        )


def _table(found: list[tuple[list[int], Tensor]], num_segments: int) -> Integers:
    """Return the drafts [segments, d] of each number, which ``found`` has by segment."""
    table = np.full((num_segments, len(found)), NO_TOKEN)
    drafts = torch.cat([tokens for _, tokens in found]).cpu().numpy()  # the only wait
    at = 0
    for column, (segments, _) in enumerate(found):
        table[segments, column] = drafts[at : at + len(segments)]
        at += len(segments)
    return table


def _upload(values: Integers | list[int], device: torch.device) -> Tensor:
    array = torch.from_numpy(np.asarray(values, dtype=np.int64))
    return host_array(array, device).to(device, non_blocking=True)
