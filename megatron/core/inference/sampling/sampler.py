"""Choose the next tokens of a step's output rows on the device, without a wait of the host.

The host knows the parameters of every row, so rules that no row of a step uses cost nothing.
Only `SampledRows.to_result` waits for the device.  Shapes: ``r`` output rows, ``s`` of them
sampled, ``v`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.device import host_array
from megatron.core.inference.paged_engine.step_plan import (
    NO_TOKEN,
    SAMPLE,
    Admission,
    Integers,
    StepPlan,
    StepResult,
)
from megatron.core.inference.sampling import filters, log_probs, noise, rules
from megatron.core.inference.sampling.blocks import Blocks
from megatron.core.inference.sampling.slots import Slots


@dataclass(frozen=True)
class SampledRows:
    """Results on the device: the tensors of `StepResult`."""

    tokens: Tensor
    log_probs: Tensor
    top_tokens: Tensor
    top_log_probs: Tensor

    def to_result(self) -> StepResult:
        """Wait for the device, once, and return the result on the host."""
        floats = torch.cat([self.log_probs[:, None], self.top_log_probs], dim=1)
        bits = floats.view(torch.int32).long()
        every = torch.cat([self.tokens[:, None], self.top_tokens, bits], dim=1).cpu().numpy()
        integers, found = np.split(every, [1 + self.top_tokens.shape[1]], axis=1)
        numbers = found.astype(np.int32).view(np.float32)
        return StepResult(integers[:, 0], numbers[:, 0], integers[:, 1:], numbers[:, 1:])


class Sampler:
    """Sampling of the requests in ``max_requests`` slots; every rank can hold an equal one.

    ``eod``: the token that ends a text; with the request's stop tokens it is hidden before
    min_tokens.  Columns of logits beyond ``vocab_size`` are never chosen; they count in the sum of
    probabilities.
    """

    def __init__(
        self, max_requests: int, vocab_size: int, device: torch.device, eod: int | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._eod = eod
        self._slots = Slots(max_requests, vocab_size, device)

    def admit(self, admission: Admission) -> None:
        """Put a request into its slot, in place of what the slot had."""
        self._slots.admit(admission)

    def sample(self, logits: Tensor, plan: StepPlan) -> SampledRows:
        """Return tokens and log-probs of all output rows from their ``logits`` [r, v].

        A row with NaN or infinity among its largest logits, or without an allowed token, gets
        `NO_TOKEN`; other rows are not affected.
        """
        known = logits[:, : self._vocab_size]
        if self._is_plain(plan):
            blocks = Blocks.of(known.float())
            tokens = _checked(blocks.argmax(), blocks)
            log_probs = tokens.new_zeros((len(tokens), 1), dtype=torch.float32)
            return SampledRows(tokens, log_probs[:, 0], tokens[:, None][:, :0], log_probs[:, :0])
        rows = _Rows.of(plan)
        tokens = self._upload(rows.targets)
        sampled = np.flatnonzero(rows.targets == SAMPLE)
        if len(sampled):
            chosen = self._choose(_rows_of(known, sampled, self), rows.take(sampled), plan)
            if len(sampled) == len(tokens):
                tokens = chosen
            else:
                tokens = tokens.index_copy(0, self._upload(sampled), chosen)
        return self._with_log_probs(logits, tokens, rows)

    def _is_plain(self, plan: StepPlan) -> bool:
        """Return whether all rows are sampled, one of each request, from plain slots."""
        is_plain = self._slots.is_plain
        return not plan.masks and all(
            len(s.targets) == 1 and s.targets[0] == SAMPLE and is_plain[s.slot]
            for s in plan.segments
            if len(s.targets)
        )

    def draft(self, logits: Tensor, plan: StepPlan) -> Tensor:
        """Return the tokens that `sample` would choose from ``logits`` [r, v]."""
        return self._choose(logits[:, : self._vocab_size], _Rows.of(plan), plan)

    def _choose(self, logits: Tensor, rows: _Rows, plan: StepPlan) -> Tensor:
        """Return tokens [s] from ``logits`` [s, v]."""
        blocks = Blocks.of(self._apply_rules(logits, rows, plan).float())
        drawn = np.flatnonzero(~self._slots.is_greedy[rows.slots])
        if len(drawn) == len(rows.slots):
            tokens = self._draw(blocks, rows)
        else:
            tokens = blocks.argmax()
            if len(drawn):
                at = self._upload(drawn)
                tokens.index_copy_(0, at, self._draw(blocks.take(at), rows.take(drawn)))
        tokens = _checked(tokens, blocks)
        penalised = np.flatnonzero(self._slots.has_penalty[rows.slots])
        if len(penalised):
            part = rows.take(penalised)
            chosen = tokens[self._upload(penalised)]
            self._slots.penalties.record(part.slots, part.positions, chosen)
        return tokens

    def _apply_rules(self, logits: Tensor, rows: _Rows, plan: StepPlan) -> Tensor:
        """Return ``logits``, or changed logits of rows that have bias, penalties or masks."""
        slots = self._slots
        biased = np.flatnonzero(slots.has_bias[rows.slots])
        penalised = np.flatnonzero(slots.has_penalty[rows.slots])
        masked = np.array([i for i, s in enumerate(rows.slots.tolist()) if s in plan.masks])
        hidden = self._hidden(rows)
        if not (len(biased) or len(penalised) or len(masked) or hidden):
            return logits
        logits = logits.to(torch.float32, copy=True)
        if len(biased):
            where = slots.bias.rows(rows.slots[biased].tolist())
            bias = slots.bias.data.index_select(0, self._upload(where))
            logits.index_add_(0, self._upload(biased), bias)
        if len(penalised):
            part = rows.take(penalised)
            assert len(set(part.slots.tolist())) == len(part.slots), "penalties with drafted rows"
            values = self._upload(slots.values[part.slots, 4:])
            at = self._upload(penalised)
            size = int(part.positions.max())
            slots.penalties.apply(logits, at, part.slots, values, size)
        if hidden:
            logits.index_put_(tuple(self._upload(hidden).T), logits.new_full((), float("-inf")))
        if len(masked):
            words = [plan.masks[slot] for slot in rows.slots[masked].tolist()]
            at = self._upload(masked)
            allowed = logits.index_select(0, at)
            rules.keep_allowed(allowed, self._upload(np.stack(words)))
            logits.index_copy_(0, at, allowed)
        return logits

    def _hidden(self, rows: _Rows) -> list[tuple[int, int]]:
        """Return (row, token) that min_tokens or forbidden_after hides."""
        slots = self._slots
        num_generated = rows.positions - slots.num_prompt[rows.slots]
        hidden = []
        for row in np.flatnonzero(num_generated < slots.min_tokens[rows.slots]).tolist():
            params = slots.params[rows.slots[row]]
            ends_at_eod = self._eod is not None and not params.ignore_eos
            ends = (*params.stop_token_ids, self._eod) if ends_at_eod else params.stop_token_ids
            hidden += [(row, token) for token in ends]
        if slots.forbidden_after:
            for row, slot in enumerate(rows.slots.tolist()):
                before, forbidden = slots.forbidden_after.get(slot, ((), ()))
                if int(rows.inputs[row]) in before:
                    hidden += [(row, token) for token in forbidden]
        return hidden

    def _draw(self, logits: Blocks, rows: _Rows) -> Tensor:
        """Return tokens [s] sampled from ``logits`` [s, v] with temperature and filters."""
        values = self._slots.values[rows.slots]
        temperature, top_k, top_p, min_p = values[:, :4].T
        decay, bound = self._slots.top_p_decay[rows.slots].T
        if (decay < 1).any():
            num_generated = rows.positions - self._slots.num_prompt[rows.slots]
            top_p = np.maximum(top_p * decay**num_generated, bound).astype(np.float32)
        wanted = filters.Filters(temperature, top_k.astype(np.int64), top_p, min_p)
        scale = filters.scale_of(logits, wanted, self._upload)
        seeds = [self._slots.params[slot].seed for slot in rows.slots.tolist()]
        assert None not in seeds, "an admission has the seed of its request"
        keys = self._upload(noise.row_keys([s or 0 for s in seeds], rows.positions))
        return noise.choose(logits, scale, keys)[0]

    def _with_log_probs(self, logits: Tensor, tokens: Tensor, rows: _Rows) -> SampledRows:
        """Return ``tokens`` [r] with the log-probabilities that requests of the step ask for."""
        slots = self._slots
        is_target = rows.targets != SAMPLE
        tops = np.zeros(len(rows.slots), dtype=np.int64)
        for i, slot in enumerate(rows.slots.tolist()):
            params = slots.params[slot]
            if not is_target[i] or params.return_prompt_top_n_logprobs:
                tops[i] = params.top_n_logprobs
        count = min(int(tops.max(initial=0)), self._vocab_size)
        found = SampledRows(
            tokens,
            tokens.new_zeros(len(tokens), dtype=torch.float32),
            tokens.new_full((len(tokens), count), NO_TOKEN),
            tokens.new_zeros((len(tokens), count), dtype=torch.float32),
        )
        wanted = np.flatnonzero(is_target | slots.wants_log_probs[rows.slots])
        if len(wanted):
            at = self._upload(wanted)
            part = _rows_of(logits, wanted, self).float()
            mine = tokens[at, None]
            known = part[:, : self._vocab_size]
            likely = Blocks.of(known).likeliest(count) if count else mine[:, :0]
            values = log_probs.log_probs(part, torch.cat([mine.clamp(min=0), likely], dim=1))
            found.log_probs.index_copy_(0, at, values[:, 0])
            found.top_tokens.index_copy_(0, at, likely)
            found.top_log_probs.index_copy_(0, at, values[:, 1:])
        is_bad = ~found.log_probs.isfinite()
        found.log_probs.masked_fill_(is_bad, 0)
        return replace(found, tokens=tokens.masked_fill(is_bad, NO_TOKEN))

    def _upload(self, values: npt.ArrayLike) -> Tensor:
        """Copy integers as int64, or float32 numbers, to the device without a wait.

        On a CPU the tensor shares the memory of ``values``.
        """
        array = torch.from_numpy(np.ascontiguousarray(values))
        return host_array(array, self._device).to(self._device, non_blocking=True)


@dataclass(frozen=True)
class _Rows:
    """Slot, position of the new token, target and input token of each row: [r]."""

    slots: Integers
    positions: Integers
    targets: Integers
    inputs: Integers

    @staticmethod
    def of(plan: StepPlan) -> _Rows:
        """Return the output rows of ``plan``."""
        slots: list[int] = []
        positions: list[int] = []
        targets: list[Integers] = []
        inputs: list[Integers] = []
        for segment in plan.segments:
            count = len(segment.targets)
            slots += [segment.slot] * count
            positions += range(segment.num_keys - count + 1, segment.num_keys + 1)
            targets.append(segment.targets)
            inputs.append(segment.tokens[len(segment.tokens) - count :])
        empty = np.zeros(0, dtype=np.int64)
        return _Rows(
            np.array(slots, dtype=np.int64),
            np.array(positions, dtype=np.int64),
            np.concatenate(targets or [empty]),
            np.concatenate(inputs or [empty]),
        )

    def take(self, index: Integers) -> _Rows:
        """Return the rows of ``index``."""
        return _Rows(
            self.slots[index], self.positions[index], self.targets[index], self.inputs[index]
        )


def _checked(tokens: Tensor, blocks: Blocks) -> Tensor:
    """Return ``tokens`` [r] with `NO_TOKEN` in rows without a finite largest logit."""
    return tokens.where(blocks.maxima.amax(-1).isfinite(), NO_TOKEN)


def _rows_of(logits: Tensor, index: Integers, sampler: Sampler) -> Tensor:
    """Return rows of ``logits``, without a copy if they are all rows."""
    if len(index) == len(logits):
        return logits
    return logits.index_select(0, sampler._upload(index))
