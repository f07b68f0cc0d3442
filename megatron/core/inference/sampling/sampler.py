"""Choose the next tokens of a step's output rows on the device, without a wait of the host.

The host knows the parameters of every row, so rules that no row of a step uses cost nothing.
Only `SampledRows.to_result` waits for the device.  Shapes: ``r`` output rows, ``s`` of them
sampled, ``v`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.device import host_array
from megatron.core.fusions import kernels
from megatron.core.fusions.small_linear import small_linear
from megatron.core.inference.paged_engine.step_plan import (
    NO_TOKEN,
    SAMPLE,
    Admission,
    Integers,
    StepOutput,
    StepPlan,
)
from megatron.core.inference.sampling.choice import Blocks, Filters, choose, row_keys, scale_of
from megatron.core.inference.sampling_params import SamplingParams


@dataclass(frozen=True)
class SampledRows:
    """Results on the device: the tensors of `StepOutput`."""

    tokens: Tensor
    log_probs: Tensor
    top_tokens: Tensor
    top_log_probs: Tensor

    def to_result(self) -> StepOutput:
        """Wait for the device, once, and return the result on the host."""
        floats = torch.cat([self.log_probs[:, None], self.top_log_probs], dim=1)
        bits = floats.view(torch.int32).long()
        every = torch.cat([self.tokens[:, None], self.top_tokens, bits], dim=1).cpu().numpy()
        integers, found = np.split(every, [1 + self.top_tokens.shape[1]], axis=1)
        numbers = found.astype(np.int32).view(np.float32)
        return StepOutput(integers[:, 0], numbers[:, 0], integers[:, 1:], numbers[:, 1:])


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
        """Put a request into its slot; the slot forgets the request before it."""
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
            keep_allowed(allowed, self._upload(np.stack(words)))
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
        wanted = Filters(temperature, top_k.astype(np.int64), top_p, min_p)
        scale = scale_of(logits, wanted, self._upload)
        seeds = [self._slots.params[slot].seed for slot in rows.slots.tolist()]
        assert None not in seeds, "an admission has the seed of its request"
        keys = self._upload(row_keys([s or 0 for s in seeds], rows.positions))
        return choose(logits, scale, keys)[0]

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
            values = log_probs_of(part, torch.cat([mine.clamp(min=0), likely], dim=1))
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


# Beyond these, fp32 gives 0 / 0 and infinity / infinity, and tokens that are not allowed.
_LEAST_DIVISOR = 1e-30
_LARGEST_VALUE = 1e30


class Slots:
    """Requests by slot.  Arrays are indexed by slot and live on the host."""

    def __init__(self, max_requests: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self.params = [SamplingParams(temperature=0.0, seed=0)] * max_requests
        self.num_prompt = np.zeros(max_requests, dtype=np.int64)
        self.min_tokens = np.zeros(max_requests, dtype=np.int64)
        self.is_greedy = np.ones(max_requests, dtype=bool)
        self.wants_log_probs = np.zeros(max_requests, dtype=bool)
        self.has_penalty = np.zeros(max_requests, dtype=bool)
        self.has_bias = np.zeros(max_requests, dtype=bool)
        # Greedy, and nothing changes or reports logits: the largest logit is the whole answer.
        self.is_plain = np.ones(max_requests, dtype=bool)
        # Factor of top_p for each generated token, and least top_p; 1 and 0: it stays.
        self.top_p_decay = np.tile(np.array([1, 0], dtype=np.float32), (max_requests, 1))
        # By slot: tokens, and tokens that must not follow them.
        self.forbidden_after: dict[int, tuple[frozenset[int], tuple[int, ...]]] = {}
        # temperature, top_k (v: no limit), top_p, min_p, repetition, presence, frequency
        self.values = np.zeros((max_requests, 7), dtype=np.float32)
        self.penalties = Penalties(vocab_size, device)
        self.bias = SlotRows(vocab_size, torch.float32, device)

    def admit(self, admission: Admission) -> None:
        """Put a request into its slot; the slot forgets the request before it."""
        slot = admission.slot
        params = SamplingParams.from_json(admission.params)
        self.params[slot] = params
        self.num_prompt[slot] = admission.num_prompt
        self.min_tokens[slot] = params.min_tokens
        self.is_greedy[slot] = params.is_greedy
        self.wants_log_probs[slot] = params.return_log_probs or params.top_n_logprobs > 0
        top_k = min(params.top_k or self._vocab_size, self._vocab_size)
        temperature = max(params.temperature, _LEAST_DIVISOR)
        filters = (temperature, top_k, params.top_p or 1.0, params.min_p)
        repetition = max(params.repetition_penalty, _LEAST_DIVISOR)
        penalties = (repetition, params.presence_penalty, params.frequency_penalty)
        self.values[slot] = np.clip(filters + penalties, -_LARGEST_VALUE, _LARGEST_VALUE)
        decays = params.top_p > 0 and params.top_p_decay > 0
        self.top_p_decay[slot] = (params.top_p_decay, params.top_p_bound) if decays else (1, 0)
        self.forbidden_after.pop(slot, None)
        if any(params.forbidden_after):
            before, forbidden = params.forbidden_after
            self.forbidden_after[slot] = frozenset(before), forbidden
        self.has_bias[slot] = bool(params.logit_bias)
        self.has_penalty[slot] = params.has_penalty
        self.is_plain[slot] = params.is_greedy and not (
            self.has_bias[slot]
            or self.has_penalty[slot]
            or self.min_tokens[slot]
            or self.wants_log_probs[slot]
            or slot in self.forbidden_after
        )
        self.bias.free(slot)
        if params.logit_bias:
            bias = np.zeros(self._vocab_size, dtype=np.float32)
            bias[list(params.logit_bias)] = list(params.logit_bias.values())
            self.bias.put(slot, bias)
        self.penalties.free(slot)
        if self.has_penalty[slot]:
            self.penalties.admit(admission)


class SlotRows:
    """Rows on the device for those slots that need one; their number and width grow by doubling."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.zeros(0, width, dtype=dtype, device=device)
        self._row: dict[int, int] = {}
        self._free: list[int] = []

    def put(self, slot: int, values: npt.NDArray[Any]) -> None:
        """Give ``slot`` a row that begins with ``values``; the rest is 0."""
        self.free(slot)
        self.widen(len(values))
        if not self._free:
            size = len(self.data)
            self.data = torch.cat([self.data, self.data.new_zeros(max(size, 1), self.data.size(1))])
            self._free = list(range(len(self.data) - 1, size - 1, -1))
        row = self._row[slot] = self._free.pop()
        self.data[row] = 0
        found = torch.from_numpy(values)
        self.data[row, : len(values)] = found.to(self.data, non_blocking=True)

    def widen(self, width: int) -> None:
        """Give all rows at least ``width`` columns."""
        missing = width - self.data.size(1)
        if missing > 0:
            more = max(missing, self.data.size(1))
            self.data = torch.cat([self.data, self.data.new_zeros(len(self.data), more)], dim=1)

    def free(self, slot: int) -> None:
        """Free the row of ``slot``, if it has one."""
        row = self._row.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def rows(self, slots: Iterable[int]) -> Tensor:
        """Return the rows of ``slots`` in `data` [s], on the host."""
        return torch.tensor([self._row[slot] for slot in slots], dtype=torch.int64)


class Penalties:
    """Repetition, presence and frequency penalties of the slots that have them.

    Repetition (Keskar et al. 2019) divides positive logits, and multiplies others, of tokens that
    the prompt or the generated text has; presence and frequency are subtracted, for generated
    tokens only.  Only the logits of a text's tokens are read and written, so that the cost grows
    with the text and not with the vocabulary.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._counts = SlotRows(vocab_size, torch.int32, device)  # how often it was generated
        self._in_prompt = SlotRows(vocab_size, torch.bool, device)
        self._texts = SlotRows(0, torch.int64, device)

    def admit(self, admission: Admission) -> None:
        """Take the text of a request that has penalties."""
        text = np.array(admission.history, dtype=np.int64)
        prompt, output = np.split(text, [admission.num_prompt])
        slot = admission.slot
        size = self._vocab_size
        self._counts.put(slot, np.bincount(output, minlength=size))
        self._in_prompt.put(slot, np.bincount(prompt, minlength=size) > 0)
        self._texts.put(slot, text)

    def free(self, slot: int) -> None:
        """Forget the text of ``slot``, if it has one."""
        for rows in (self._counts, self._in_prompt, self._texts):
            rows.free(slot)

    def apply(self, logits: Tensor, at: Tensor, slots: Integers, values: Tensor, size: int) -> None:
        """Apply the penalties of ``slots`` to the rows ``at`` [s] of ``logits``, in place.

        ``values`` [s, 3]: repetition, presence and frequency.  ``size``: of the longest text.
        """
        where = self._of(slots, at)
        tokens = self._texts.data[where, :size]  # behind the end of a text: 0, seen or not
        repetition, presence, frequency = values.split(1, dim=-1)
        counts = self._counts.data[where[:, None], tokens]
        is_generated = counts > 0
        is_seen = is_generated | self._in_prompt.data[where[:, None], tokens]
        found = logits[at[:, None], tokens]
        repeated = torch.where(found > 0, found / repetition, found * repetition)
        lowered = torch.where(is_seen, repeated, found)
        lowered -= is_generated * presence + counts * frequency
        logits[at[:, None], tokens] = lowered  # a token that occurs twice gets one value twice

    def record(self, slots: Integers, positions: Integers, tokens: Tensor) -> None:
        """Add ``tokens`` [s], chosen for ``positions`` of texts; negative ones are not counted."""
        where = self._of(slots, tokens)
        self._texts.widen(int(positions.max()) + 1)
        at = torch.from_numpy(positions).to(tokens.device, non_blocking=True)
        valid = tokens.clamp(min=0)
        self._texts.data[where, at] = valid
        counts = self._counts.data
        counts.index_put_((where, valid), (tokens >= 0).to(counts.dtype), accumulate=True)

    def _of(self, slots: Integers, like: Tensor) -> Tensor:
        # The three kinds of rows are taken and freed together, so their numbers are equal.
        return self._counts.rows(slots.tolist()).to(like.device, non_blocking=True)


def keep_allowed(logits: Tensor, words: Tensor) -> None:
    """Set the logits of tokens to -inf whose bit is 0: bit t % 32 of ``words`` [s, w][t // 32].

    Tokens beyond the words are not allowed.
    """
    every = torch.arange(8, dtype=torch.uint8, device=words.device)
    in_bytes = words.to(torch.int32).view(torch.uint8)[..., None]  # lowest byte first
    allowed = (in_bytes.bitwise_right_shift(every) & 1).flatten(1).bool()[:, : logits.size(1)]
    logits[:, : allowed.size(1)].masked_fill_(~allowed, float("-inf"))
    logits[:, allowed.size(1) :] = float("-inf")


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities [r, n] of ``tokens`` [r, n], in the steps of the training loss.

    The bits of a row do not depend on the number of rows.
    """
    highest = logits.amax(-1, keepdim=True)
    terms = (logits - highest).exp_()
    if kernels.find("matmul", terms) is not None:  # torch's sums on a GPU depend on the rows
        sums = small_linear(terms, terms.new_ones(1, terms.shape[1]))[:, 0]
    else:  # torch divides a single sum among threads, and then adds in another order
        sums = terms.repeat(2, 1).sum(-1)[:1] if len(terms) == 1 else terms.sum(-1)
    return logits.gather(-1, tokens) - highest - sums.log()[:, None]
