"""A model without tensors that executes plans, to test the scheduler.

The cache holds one number for each position of each page.  The number of a position is a hash of
its token, its position and all numbers before it as the cache gives them; the next token and its
log-probability are a hash of all of them.  A page that is reused too early, a missing copy or a
wrong position therefore changes every later log-probability of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from megatron.core.inference.grammar import GrammarMatcher
from megatron.core.inference.paged_engine.pages import PagePool
from megatron.core.inference.paged_engine.request import Request, RequestOutput, TokenOutput
from megatron.core.inference.paged_engine.step_plan import SAMPLE, Segment, StepOutput, StepPlan

VOCABULARY = 12
EOD = 0


def _hash(*parts: object) -> int:
    data = b"".join(p.tobytes() if isinstance(p, np.ndarray) else b"%d," % p for p in parts)
    return int.from_bytes(blake2b(data, digest_size=7).digest(), "little")


def entry_of(earlier: np.ndarray, token: int, source: Sequence[int]) -> int:
    """What the cache holds for a token, after the entries of the tokens before it."""
    return _hash(len(earlier), token, *source, earlier)


def log_probs_of(entries: np.ndarray) -> np.ndarray:
    """Log-probabilities of the next token [v]."""
    value = _hash(entries)
    return -np.array([_hash(value, t) % 1_000_003 for t in range(VOCABULARY)], dtype=np.float32)


def sample(entries: np.ndarray, seed: int, last: int, mask: int = -1) -> int:
    """The next token: often the same one after ``last``, so that texts repeat themselves.

    ``mask``: bits of the allowed tokens.
    """
    value = _hash(entries, seed)
    token = value // 6 % VOCABULARY if value % 6 == 0 else 1 + (3 * last + 1) % (VOCABULARY - 1)
    while not mask >> token & 1:
        token = (token + 1) % VOCABULARY
    return token


class CountingMatcher(GrammarMatcher):
    """Allows three tokens, which depend on those before, and the end after five tokens."""

    error = ""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def allowed(self) -> np.ndarray:
        found = {1 + _hash(i, *self.tokens) % (VOCABULARY - 1) for i in range(3)}
        if len(self.tokens) >= 5:
            found.add(EOD)
        return np.array([sum(1 << token for token in found)], dtype=np.int32)

    def is_ready(self) -> bool:
        return True

    def accept(self, token: int) -> None:
        assert self.allowed()[0] >> token & 1
        self.tokens.append(token)


class PoisonedPool(PagePool):
    """Notes pages that have lost their content."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.lost: list[int] = []

    def allocate(self, count: int) -> list[int] | None:
        pages = super().allocate(count)
        self.lost += pages or []
        return pages

    def release(self, pages: Sequence[int]) -> None:
        super().release(pages)
        self.lost += [p for p in pages if not self._num_users[p] and p not in self._digest_of]


class Model:
    """Executes plans of all lanes in the order in which they were made."""

    def __init__(self, pool: PoisonedPool) -> None:
        self.pool = pool
        self.cache = np.full((pool.num_pages, pool.page_size), -7, dtype=np.int64)
        self.slots: dict[int, dict[str, object]] = {}
        self.sources: dict[int, tuple[int, ...]] = {}
        self.num_rows = 0

    def poison(self) -> None:
        """Overwrite pages without content.  Call it before each plan."""
        for page in self.pool.lost:
            self.cache[page] = _hash(page, self.num_rows)
        self.pool.lost.clear()

    def execute(self, plan: StepPlan) -> StepOutput:
        """The result of a plan, as it looks after its way to other ranks."""
        plan = StepPlan.from_array(plan.to_array())
        for admission in plan.admissions:
            self.slots[admission.slot] = admission.params
            self.sources[admission.slot] = admission.source
        copied = [self.cache[source].copy() for source, _ in plan.copies]
        self.poison()
        for (_, to), values in zip(plan.copies, copied, strict=True):
            self.cache[to] = values
        slots = [s.slot for s in plan.segments]
        assert len({*slots}) == len(slots), "a slot is planned twice"
        rows = [row for s in plan.segments for row in self._rows(s, plan.masks)]
        self.num_rows += sum(len(s.tokens) for s in plan.segments)
        tops = [np.argsort(-row[1], kind="stable") for row in rows]
        return StepOutput(
            np.array([row[0] for row in rows], dtype=np.int64),
            np.array([row[1][row[0]] for row in rows], dtype=np.float32),
            np.array([top[:12] for top in tops], dtype=np.int64).reshape(len(rows), 12),
            np.array([r[1][t[:12]] for r, t in zip(rows, tops, strict=True)]).reshape(
                len(rows), 12
            ),
        )

    def _rows(self, segment: Segment, masks: dict[int, np.ndarray]) -> list[tuple[int, np.ndarray]]:
        size = self.pool.page_size
        params = self.slots[segment.slot]
        if segment.slot in masks or params["repetition_penalty"] != 1:
            assert (segment.targets == SAMPLE).sum() <= 1, "drafts of rows that depend on others"
        assert len(segment.pages) == self.pool.pages_for(segment.num_keys)
        out = []
        for i, token in enumerate(segment.tokens.tolist()):
            at = segment.start + i
            earlier = self.cache[segment.pages].ravel()[:at]
            page = segment.pages[at // size]
            self.cache[page, at % size] = entry_of(earlier, token, self.sources[segment.slot])
            row = i - len(segment.tokens) + len(segment.targets)
            if row >= 0:
                entries = self.cache[segment.pages].ravel()[: at + 1]
                target = int(segment.targets[row])
                if target == SAMPLE:
                    seed = params["seed"]
                    assert isinstance(seed, int)
                    mask = masks.get(segment.slot, np.array([-1]))
                    target = sample(entries, seed, token, int(mask[0]))
                out.append((target, log_probs_of(entries)))
        return out


@dataclass
class Expected:
    """What a request gives if it runs alone, computed without pages."""

    new: list[TokenOutput]
    scores: list[TokenOutput]
    reason: str


def run_alone(request: Request, max_sequence_length: int) -> Expected:
    """Generate token by token with a cache of its own."""
    params = request.params
    entries = np.empty(0, dtype=np.int64)
    scores = []
    new = []
    tokens = list(request.prompt)
    at = 0
    limit = 0 if params.prompt_log_probs_only else params.num_tokens_to_generate
    limit = min(limit, max_sequence_length - len(tokens))
    wants = params.return_prompt_log_probs or params.prompt_log_probs_only
    matcher = CountingMatcher() if request.matcher else None
    ends = {*params.stop_token_ids} | (set() if params.ignore_eos and not matcher else {EOD})
    assert params.seed is not None
    while True:
        entries = np.append(entries, entry_of(entries, tokens[at], request.source))
        log_probs = log_probs_of(entries)
        at += 1
        if at < len(request.prompt):
            top = params.top_n_logprobs if params.return_prompt_top_n_logprobs else 0
            scores += [_output(log_probs, tokens[at], top)] if wants else []
            continue
        if not limit:
            return Expected(new, scores, "length")
        mask = int(matcher.allowed()[0]) if matcher else -1
        token = sample(entries, params.seed, tokens[-1], mask)
        tokens.append(token)
        new.append(_output(log_probs, token, params.top_n_logprobs))
        if token in ends and len(new) > params.min_tokens:
            return Expected(new, scores, "stop")
        if len(new) == limit:
            return Expected(new, scores, "length")
        if matcher:
            matcher.accept(token)


def _output(log_probs: np.ndarray, token: int, num_top: int) -> TokenOutput:
    best = np.argsort(-log_probs, kind="stable")[:num_top].tolist()
    return TokenOutput(
        token, float(log_probs[token]), tuple((t, float(log_probs[t])) for t in best)
    )


def check(request: Request, outputs: Sequence[RequestOutput], longest: int, ended: bool) -> None:
    """Compare all outputs of a request with those of a run alone; ``ended``: not aborted."""
    expected = run_alone(request, longest)
    new = [t for o in outputs for t in o.new]
    scores = [t for o in outputs for t in o.prompt_scores]
    if ended:
        assert new == expected.new, request.request_id
        assert scores == expected.scores, request.request_id
        assert [o.finish_reason for o in outputs if o.finish_reason] == [expected.reason]
        assert outputs[-1].finish_reason is not None
    else:
        assert new == expected.new[: len(new)], request.request_id
        assert scores in ([], expected.scores)
        assert not any(o.finish_reason for o in outputs)
    assert request.output == [t.token for t in new]
