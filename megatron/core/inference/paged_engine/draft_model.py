"""Draft tokens by the model's multi-token-prediction (MTP) layers or draft heads, after each step.

Depth d (from 1) computes the row of position p from the row of depth d - 1 (depth 0: the decoder)
and the token at p + d; its logits are those of the token at p + d + 1, as in training.  Its keys
and values have the position p, in pages of the same request, behind those of the decoder's layers.
All rows of a step go through all depths, so that the pages of a prompt are complete for every
request that shares them; the row of the last accepted token gives the drafts.  Drafts beyond the
number of depths apply the last depth again, to the row that it gave, as a row of the position
after it: the next step writes the entries of these rows anew.

A row that has read a token which is not yet known, or a draft that is then rejected, leaves an
entry that makes later drafts worse; tokens never depend on these entries.

The layer of EAGLE-3 is one such depth, which reads three layers of the decoder in place of the last
one; Medusa's heads are depths that read the row of the decoder and have no entries (see
`peft.draft_heads`).

Collective over tp, in this order: broadcast of the sampled tokens, then for each draft the layer
and a broadcast of the draft.  With experts also over ep: all ranks run the same number of layers.

``N`` rows, ``r`` output rows, ``S`` segments, of which ``w`` want a draft.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.inference.paged_engine.cache import BatchView, PagedCache, SlotPositions
from megatron.core.inference.paged_engine.sampler import Sampler, upload
from megatron.core.inference.paged_engine.step_plan import (
    NO_INTEGERS,
    NO_TOKEN,
    SAMPLE,
    SAMPLE_ONLY,
    Integers,
    Segment,
    StepPlan,
    idle_segment,
)
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model

_ONE_TOKEN: Integers = np.zeros(1, dtype=np.int64)  # its id is on the device


class DraftModel:
    """Drafts the tokens that segments want with ``num_layers`` MTP layers.

    ``module``: the last stage.  ``sampler``: on the rank that samples.  The draft of a token is the
    sample that the token gets if the MTP layer gives the logits: with the same noise.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: ProcessGroupCollection,
        cache: PagedCache,
        sampler: Sampler | None,
        num_layers: int,
        num_tokens: int,
    ) -> None:
        self._predict = get_attr_wrapped_model(module, "predict_ahead")
        self._logits = get_attr_wrapped_model(module, "draft_logits")
        self._features = get_attr_wrapped_model(module, "draft_features")
        self._tp = groups.tp
        self._in_lockstep = groups.ep.size() > 1
        self._cache = cache
        self._sampler = sampler
        self._num_layers = num_layers
        self._num_tokens = num_tokens

    def draft(
        self, plan: StepPlan, view: BatchView, sampled: Integers | None, slots: SlotPositions
    ) -> Integers:
        """Return drafts [S, d] after a step with ``view``, `NO_TOKEN` behind the last ones.

        ``sampled`` [r]: results of the output rows, on the rank that samples.
        ``slots``: see `BatchView`.  All ranks of tp return the same.
        """
        hidden = view.hidden
        assert hidden is not None, "the model has run"
        where = hidden.device
        if sampled is None:
            sampled = np.empty(plan.num_outputs, dtype=np.int64)
        results = self._shared(torch.from_numpy(sampled).to(where)).cpu().numpy()
        last_rows, positions, ahead = _after(plan, results)
        layers = self._num_layers
        most = max(layers, *(s.num_drafts for s in plan.segments))
        drafts = torch.full((len(plan.segments), most), NO_TOKEN, device=where)
        ids = upload(ahead, where)
        ends = upload(last_rows, where)

        def want(number: int) -> list[int]:
            """Return the segments that want draft ``number`` and have an entry for its row."""
            behind = positions + number - layers
            return [
                i
                for i, s in enumerate(plan.segments)
                if s.num_drafts >= number and behind[i] < len(s.pages) * self._cache.page_size
            ]

        def sample(hidden: Tensor, number: int, wanting: list[int]) -> None:
            """Set draft ``number`` of the segments ``wanting`` from the hidden states of all."""
            if not wanting:
                return
            at = upload(wanting, where)
            logits = self._logits(hidden.index_select(0, at), min(number, layers) - 1)[0]
            found = torch.empty_like(at)
            if self._sampler is not None:
                behind = positions + number
                sampled = [(plan.segments[i].slot, int(behind[i])) for i in wanting]
                rows = [Segment(*s, _ONE_TOKEN, NO_INTEGERS, SAMPLE_ONLY) for s in sampled]
                found = self._sampler.draft(logits, StepPlan(rows))
            drafts[at, number - 1] = self._shared(found)

        hidden = self._features(hidden)
        for number in range(1, layers + 1):
            hidden = self._predict(hidden, ids, number - 1, view.at_depth(number))
            last = hidden.index_select(0, ends)
            wanting = want(number)
            sample(last, number, wanting)
            ids = ids.roll(-1)
            known = [next(iter(s.ahead[number:]), 0) for s in plan.segments]
            ids.index_copy_(0, ends, upload(known, where))
            at = upload(np.array(wanting, dtype=np.int64), where)
            ids.index_copy_(0, ends[at], drafts[at, number - 1].clamp(min=0))
        # Then the last depth again, on its own rows.
        for number in range(layers + 1, (self._num_tokens if self._in_lockstep else most) + 1):
            wanting = want(number)
            if not wanting and not self._in_lockstep:
                break
            at = upload(wanting or [0], where)
            ids = at
            segments = [idle_segment(self._cache.max_requests, self._cache.num_pages)]
            if wanting:  # else other ranks have drafts
                ids = drafts[at, number - 2].clamp(min=0)
                behind = positions + number - layers
                segments = [
                    Segment(s.slot, int(behind[i]), _ONE_TOKEN, s.pages, NO_INTEGERS)
                    for i, s in enumerate(plan.segments)
                    if i in wanting
                ]
            rows = BatchView(self._cache, StepPlan(segments), where, slots=slots)
            hidden = self._predict(last.index_select(0, at), ids, layers - 1, rows.at_depth(layers))
            last.index_copy_(0, at, hidden)
            sample(last, number, wanting)
        return drafts.cpu().numpy()

    def _shared(self, tokens: Tensor) -> Tensor:
        """Return the tokens of the rank that samples on all ranks of tp."""
        if self._tp.size() > 1 and len(tokens):
            tokens = tokens.contiguous()
            dist.broadcast(tokens, group=self._tp, group_src=0)
        return tokens


def _after(plan: StepPlan, results: Integers) -> tuple[Integers, Integers, Integers]:
    """Return where the segments stand after a step whose output rows gave ``results`` [r].

    That is the row of each segment's last accepted token among all rows [S], the token's position
    [S], and the token after each row [N].
    """
    last_rows = []
    positions = []
    ahead = []
    first = at = 0
    for s in plan.segments:
        found = results[at : at + len(s.targets)]
        last = len(s.tokens) - 1
        num_drafts = int((s.targets == SAMPLE).sum()) - 1
        if num_drafts > 0:
            is_wrong = s.tokens[-num_drafts:] != found[:num_drafts]
            last -= num_drafts - int([*is_wrong, True].index(True))
        last_rows.append(first + last)
        positions.append(s.start + last)
        after = np.concatenate([s.tokens[1:], s.ahead[:1] if len(s.ahead) else _ONE_TOKEN])
        if len(found):
            after[-len(found) :] = found
        ahead.append(after)
        first += len(s.tokens)
        at += len(found)
    return np.array(last_rows), np.array(positions), np.concatenate(ahead).clip(min=0)
