"""Choose the next tokens of a step's output rows on the device.

The host knows the parameters of every row, so rules that no row of a step uses cost nothing; it
waits for the device only for the result.  Shapes: ``r`` output rows, ``s`` of them sampled, ``v``
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.device import host_array
from megatron.core.fusions import kernels
from megatron.core.fusions.small_linear import small_linear
from megatron.core.inference.paged_engine.choice import Blocks, choose, row_keys, scale_of
from megatron.core.inference.paged_engine.request_state import GrowingInts
from megatron.core.inference.paged_engine.step_plan import (
    NO_INTEGERS,
    NO_TOKEN,
    SAMPLE,
    Admission,
    Floats,
    Integers,
    StepOutput,
    StepPlan,
)
from megatron.core.inference.sampling_params import SamplingParams

# Beyond these, fp32 gives 0 / 0 and infinity / infinity, and tokens that are not allowed.
_LEAST_DIVISOR = 1e-30
_LARGEST_VALUE = 1e30


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
        # By slot, on the host:
        self._params = [SamplingParams(temperature=0.0, seed=0)] * max_requests
        self._num_prompt = np.zeros(max_requests, dtype=np.int64)
        # Greedy, and nothing changes or reports logits: the largest logit is the whole answer.
        self._is_plain = np.ones(max_requests, dtype=bool)
        # temperature, top_k (v: no limit), top_p, min_p, factor of top_p for each generated token
        # (1: it stays), least top_p; repetition, presence and frequency penalty
        self._numbers = np.zeros((max_requests, 9), dtype=np.float32)
        self._biases: dict[int, tuple[Integers, Floats]] = {}  # tokens and what is added to each
        self._texts: dict[int, _PenalizedText] = {}
        self._allowed: dict[int, Integers] = {}  # as the masks of a plan

    def admit(self, admission: Admission) -> None:
        """Put a request into its slot; the slot forgets the request before it."""
        slot = admission.slot
        params = SamplingParams.from_json(admission.params)
        self._params[slot] = params
        self._num_prompt[slot] = admission.num_prompt
        self._is_plain[slot] = params.is_greedy and not (
            params.logit_bias
            or params.has_penalty
            or params.min_tokens
            or any(params.forbidden_after)
            or params.allowed_token_ids
            or params.return_log_probs
            or params.top_n_logprobs
        )
        decays = params.top_p > 0 and params.top_p_decay > 0
        numbers = (
            max(params.temperature, _LEAST_DIVISOR),
            min(params.top_k or self._vocab_size, self._vocab_size),
            params.top_p or 1.0,
            params.min_p,
            *((params.top_p_decay, params.top_p_bound) if decays else (1, 0)),
            max(params.repetition_penalty, _LEAST_DIVISOR),
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._numbers[slot] = np.clip(numbers, -_LARGEST_VALUE, _LARGEST_VALUE)
        bias = params.logit_bias
        self._biases[slot] = np.array([*bias], np.int64), np.array([*bias.values()], np.float32)
        self._texts.pop(slot, None)
        self._allowed.pop(slot, None)
        if params.allowed_token_ids:
            self._allowed[slot] = _words_of(params.allowed_token_ids, self._vocab_size)
        if params.has_penalty:
            self._texts[slot] = _PenalizedText(admission)

    def sample(self, logits: Tensor, plan: StepPlan) -> StepOutput:
        """Return tokens and log-probs of all output rows from their ``logits`` [r, v].

        A row with NaN or infinity among its largest logits, or without an allowed token, gets
        `NO_TOKEN`; other rows are not affected.
        """
        known = logits[:, : self._vocab_size]
        if not plan.masks and all(
            len(s.targets) == 1 and s.targets[0] == SAMPLE and self._is_plain[s.slot]
            for s in plan.segments
            if len(s.targets)
        ):
            blocks = Blocks.of(known.float())
            tokens = _checked(blocks.argmax(), blocks)[:, None]
            return _to_host(tokens, tokens.new_zeros(tokens.shape, dtype=torch.float32))
        rows = _Rows.of(plan)
        tokens = self._upload(rows.targets)
        sampled = np.flatnonzero(rows.targets == SAMPLE)
        if len(sampled):
            chosen = self._choose(self._take(known, sampled), rows.take(sampled), plan)
            tokens = tokens.index_copy(0, self._upload(sampled), chosen)
        result = self._with_log_probs(logits, tokens, rows)
        for slot, token in zip(rows.slots[sampled], result.tokens[sampled], strict=True):
            if slot in self._texts and token != NO_TOKEN:
                self._texts[slot].add(int(token))
        return result

    def draft(self, logits: Tensor, plan: StepPlan) -> Tensor:
        """Return the tokens that `sample` would choose from ``logits`` [r, v]."""
        return self._choose(logits[:, : self._vocab_size], _Rows.of(plan), plan)

    def _choose(self, logits: Tensor, rows: _Rows, plan: StepPlan) -> Tensor:
        """Return tokens [s] from ``logits`` [s, v]."""
        params = [self._params[slot] for slot in rows.slots]
        logits = self._apply_rules(logits, rows, params, plan.masks)
        blocks = Blocks.of(logits.float())
        drawn = np.flatnonzero([not p.is_greedy for p in params])
        if len(drawn) == len(params):
            tokens = self._draw(blocks, rows)
        else:
            tokens = blocks.argmax()
            if len(drawn):
                at = self._upload(drawn)
                tokens.index_copy_(0, at, self._draw(blocks.take(at), rows.take(drawn)))
        return _checked(tokens, blocks)

    def _apply_rules(
        self,
        logits: Tensor,
        rows: _Rows,
        params: list[SamplingParams],
        masks: dict[int, Integers],
    ) -> Tensor:
        """Return ``logits``, or changed logits of rows that have bias, penalties or masks."""
        biased = np.flatnonzero([bool(p.logit_bias) for p in params])
        penalized = np.flatnonzero(
            [s in self._texts and self._texts[s].tokens.size > 0 for s in rows.slots]
        )
        masks = {**self._allowed, **masks} if self._allowed else masks
        masked = np.flatnonzero([slot in masks for slot in rows.slots])
        hidden = self._hidden(rows, params)
        if not (len(biased) or len(penalized) or len(masked) or hidden):
            return logits
        logits = logits.to(torch.float32, copy=True)
        if len(biased):
            tokens, values = zip(*(self._biases[slot] for slot in rows.slots[biased]), strict=True)
            where = biased.repeat([*map(len, tokens)])
            index = self._upload(where), self._upload(np.concatenate(tokens))
            logits[index] += self._upload(np.concatenate(values))
        if len(penalized):
            self._penalize(logits, penalized, rows.slots[penalized])
        if hidden:
            logits.index_put_(tuple(self._upload(hidden).T), logits.new_full((), float("-inf")))
        if len(masked):
            words = [masks[slot] for slot in rows.slots[masked]]
            longest = max(map(len, words))  # tokens beyond the words are not allowed
            words = [np.pad(one, (0, longest - len(one))) for one in words]
            at = self._upload(masked)
            allowed = logits.index_select(0, at)
            keep_allowed(allowed, self._upload(np.stack(words)))
            logits.index_copy_(0, at, allowed)
        return logits

    def _penalize(self, logits: Tensor, rows: Integers, slots: Integers) -> None:
        """Apply repetition, presence and frequency penalties to ``rows`` of ``logits``, in place.

        Repetition (Keskar et al. 2019) divides positive logits, and multiplies others, of tokens
        that the prompt or the generated text has; presence and frequency are subtracted, for
        generated tokens only.  Only the logits of a text's tokens are read and written, so that the
        cost grows with the text and not with the vocabulary.
        """
        assert len({*slots}) == len(slots), "penalties with drafted rows"
        texts = [self._texts[slot] for slot in slots]
        size = max(text.tokens.size for text in texts)
        # Shorter texts are repeated: a token that occurs twice gets one value twice.
        tokens = np.stack([np.resize(text.tokens.view(), size) for text in texts])
        counts = np.stack([np.resize(text.counts.view(), size) for text in texts])
        repetition, presence, frequency = self._numbers[slots, 6:].T[..., None]
        lowered = self._upload((counts > 0) * presence + counts.astype(np.float32) * frequency)
        index = self._upload(rows[:, None]), self._upload(tokens)
        found = logits[index]
        factor = self._upload(repetition)
        logits[index] = torch.where(found > 0, found / factor, found * factor) - lowered

    def _hidden(self, rows: _Rows, params: list[SamplingParams]) -> list[tuple[int, int]]:
        """Return (row, token) that min_tokens, forbidden_after or bad_words hide."""
        hidden: list[tuple[int, int]] = []
        num_generated = rows.positions - self._num_prompt[rows.slots]
        for row, (p, number, token, slot) in enumerate(
            zip(params, num_generated, rows.inputs, rows.slots, strict=True)
        ):
            if number < p.min_tokens:
                hidden += [(row, end) for end in p.stop_token_ids]
                if self._eod is not None and not p.ignore_eos:
                    hidden.append((row, self._eod))
            before, forbidden = p.forbidden_after
            if token in before:
                hidden += [(row, following) for following in forbidden]
            for *first, last in p.bad_words:
                if self._texts[slot].generated[-len(first) :] == first or not first:
                    hidden.append((row, last))
        return hidden

    def _draw(self, logits: Blocks, rows: _Rows) -> Tensor:
        """Return tokens [s] sampled from ``logits`` [s, v] with temperature and filters."""
        temperature, top_k, top_p, min_p, decay, bound = self._numbers[rows.slots, :6].T
        num_generated = rows.positions - self._num_prompt[rows.slots]
        top_p = np.maximum(top_p * decay**num_generated, bound).astype(np.float32)
        scale = scale_of(logits, temperature, top_k.astype(np.int64), top_p, min_p, self._upload)
        seeds = [self._params[slot].seed or 0 for slot in rows.slots]  # an admission has one
        keys = self._upload(row_keys(seeds, rows.positions))
        return choose(logits, scale, keys)

    def _with_log_probs(self, logits: Tensor, tokens: Tensor, rows: _Rows) -> StepOutput:
        """Return ``tokens`` [r] with the log-probabilities that requests of the step ask for."""
        params = [self._params[slot] for slot in rows.slots]
        is_target = rows.targets != SAMPLE
        tops = [
            p.top_n_logprobs
            for p, is_given in zip(params, is_target, strict=True)
            if p.return_prompt_top_n_logprobs or not is_given
        ]
        count = min(max(tops, default=0), self._vocab_size)
        every = tokens.new_full((len(tokens), 1 + count), NO_TOKEN)
        every[:, 0] = tokens
        log_probs = tokens.new_zeros(every.shape, dtype=torch.float32)
        wants = [p.return_log_probs or p.top_n_logprobs > 0 for p in params]
        wanted = np.flatnonzero(is_target | np.array(wants, dtype=bool))
        if len(wanted):
            at = self._upload(wanted)
            part = self._take(logits, wanted).float()
            if count:
                likely = Blocks.of(part[:, : self._vocab_size]).likeliest(count)
                every.index_copy_(0, at, torch.cat([tokens[at, None], likely], dim=1))
            log_probs.index_copy_(0, at, log_probs_of(part, every[at].clamp(min=0)))
        is_bad = ~log_probs[:, 0].isfinite()
        log_probs[:, 0].masked_fill_(is_bad, 0)
        every[:, 0].masked_fill_(is_bad, NO_TOKEN)
        return _to_host(every, log_probs)

    def _take(self, logits: Tensor, index: Integers) -> Tensor:
        """Return rows of ``logits``, without a copy if they are all rows."""
        if len(index) == len(logits):
            return logits
        return logits.index_select(0, self._upload(index))

    def _upload(self, values: npt.ArrayLike) -> Tensor:
        return upload(values, self._device)


def upload(values: npt.ArrayLike, device: torch.device) -> Tensor:
    """Copy integers as int64, or float32 numbers, to the device without a wait.

    On a CPU the tensor shares the memory of ``values``.
    """
    array = torch.from_numpy(np.ascontiguousarray(values))
    return host_array(array, device).to(device, non_blocking=True)


class _Rows(NamedTuple):
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
        targets = [NO_INTEGERS]
        inputs = [NO_INTEGERS]
        for segment in plan.segments:
            count = len(segment.targets)
            slots += [segment.slot] * count
            positions += range(segment.num_keys - count + 1, segment.num_keys + 1)
            targets.append(segment.targets)
            inputs.append(segment.tokens[len(segment.tokens) - count :])
        return _Rows(
            np.array(slots, dtype=np.int64),
            np.array(positions, dtype=np.int64),
            np.concatenate(targets),
            np.concatenate(inputs),
        )

    def take(self, index: Integers) -> _Rows:
        """Return the rows of ``index``."""
        return _Rows(*(values[index] for values in self))


def _checked(tokens: Tensor, blocks: Blocks) -> Tensor:
    """Return ``tokens`` [r] with `NO_TOKEN` in rows without a finite largest logit."""
    return tokens.where(blocks.maxima.amax(-1).isfinite(), NO_TOKEN)


def _to_host(tokens: Tensor, log_probs: Tensor) -> StepOutput:
    """Return a token and the most likely ones of each row [r, 1 + n]: one copy to the host."""
    every = torch.cat([tokens, log_probs.view(torch.int32).long()], dim=1).cpu().numpy()
    integers, bits = np.split(every, 2, axis=1)
    values = bits.astype(np.int32).view(np.float32)
    return StepOutput(integers[:, 0], values[:, 0], integers[:, 1:], values[:, 1:])


class _PenalizedText:
    """The distinct tokens of a text, how often each was generated, and the generated ones."""

    def __init__(self, admission: Admission) -> None:
        history = admission.history
        self._places = {token: i for i, token in enumerate(dict.fromkeys(history))}
        self.tokens = GrowingInts(self._places)
        self.counts = GrowingInts([0] * self.tokens.size)
        self.generated: list[int] = []
        for token in history[admission.num_prompt :]:
            self.add(token)

    def add(self, token: int) -> None:
        """Append a generated token."""
        place = self._places.setdefault(token, self.tokens.size)
        if place == self.tokens.size:
            self.tokens.append(token)
            self.counts.append(0)
        self.counts.values[place] += 1
        self.generated.append(token)


def _words_of(tokens: Sequence[int], vocab_size: int) -> Integers:
    """Return the words of `keep_allowed` in which the bits of ``tokens`` are 1."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


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
