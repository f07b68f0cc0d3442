"""What the engine reports of a request, as the fields of `InferenceRequest`."""

from __future__ import annotations

import copy
from typing import Any

import torch

from megatron.core.inference.inference_request import InferenceRequest, Status
from megatron.core.inference.paged_engine.collective_engine import TimedOutput
from megatron.core.inference.paged_engine.request import FinishReason, TokenOutput
from megatron.core.inference.sampling_params import SamplingParams


class Answer:
    """The tokens of ``request`` so far.  ``prompt``: the tokens that they follow."""

    def __init__(
        self,
        request: InferenceRequest,
        params: SamplingParams,
        tokenizer: Any,
        eod: int | None,
        prompt: list[int],
    ) -> None:
        self.request = request
        self.params = params
        self.name = str(request.request_id)
        self.finish_reason: FinishReason | None = None
        self.tokens: list[TokenOutput] = []
        self._tokenizer = tokenizer
        self._eod = eod
        self.prompt = prompt
        self._scores: tuple[TokenOutput, ...] = ()
        self._seconds: list[float] = []

    def record(self, timed: TimedOutput) -> None:
        """Add what a step reports."""
        output = timed.output
        self.tokens += output.new
        self._seconds += [timed.elapsed_s / max(len(output.new), 1)] * len(output.new)
        self._scores = output.prompt_scores or self._scores
        self.finish_reason = output.finish_reason or self.finish_reason

    def snapshot(self) -> InferenceRequest:
        """Return a copy of the request with its results so far."""
        answer = copy.copy(self)
        answer.request = copy.copy(self.request)
        answer._write()
        return answer.request

    def write_results(self) -> None:
        """Set the results of the finished request."""
        self._write()
        is_failed = self.finish_reason in ("error", "abort", None)
        self.request.status = Status.FAILED if is_failed else Status.COMPLETED

    def _write(self) -> None:
        request = self.request
        params = self.params
        new = self.tokens
        if new and new[-1].token == self._eod:
            new = new[:-1]  # the token that ends the text is no part of it
        ids = [t.token for t in new]
        request.generated_tokens = torch.tensor(ids, dtype=torch.int64)
        request.generated_length = len(ids)
        request.generated_sequence_lengths = [len(ids)]
        request.tpot = self._seconds[: len(ids)]
        request.generated_text = self.text_of(ids)
        request.text = (request.prompt or "") + request.generated_text
        if params.return_segments:
            request.segments = token_texts(self._tokenizer, self.prompt + ids)
            request.generated_segments = request.segments[len(self.prompt) :]
        if params.return_log_probs:
            request.prompt_log_probs = [t.log_prob for t in self._scores]
            request.generated_log_probs = [t.log_prob for t in new]
        if params.top_n_logprobs:
            request.generated_top_n_logprobs = [self._top(t) for t in new]
            if params.return_prompt_top_n_logprobs:
                request.prompt_top_n_logprobs = [self._top(t) for t in self._scores]

    def text_of(self, tokens: list[int]) -> str:
        """Return the text that ``tokens`` add to the prompt."""
        if self.request.encoder_prompt is not None:
            text: str = self._tokenizer.detokenize(tokens)
            return text
        whole: str = self._tokenizer.detokenize(self.prompt + tokens)
        return whole.removeprefix(self._tokenizer.detokenize(self.prompt))

    def _top(self, token: TokenOutput) -> dict[str, float]:
        return {self._tokenizer.detokenize([i]): log_prob for i, log_prob in token.top}


def token_texts(tokenizer: Any, tokens: list[int]) -> list[str]:
    """Return the text of each token; together they are the text of all, if the tokenizer can."""
    offsets = getattr(tokenizer, "offsets", None)
    if offsets is None:
        return [tokenizer.detokenize([token]) for token in tokens]
    text = tokenizer.detokenize(tokens)
    try:
        starts = offsets(tokens, text)
    except (NotImplementedError, AttributeError):  # this tokenizer has no offsets
        return [tokenizer.detokenize([token]) for token in tokens]
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
