"""Requests of Megatron-LM's engines, the streams of their texts, and their record by state."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.inference.paged_engine.request import RequestOutput, TokenOutput
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.utils import Counter


class Status(Enum):
    """State of a request."""

    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5  # the model gave no finite logits, or the request was aborted


@dataclass(kw_only=True)
class InferenceRequest:
    """A prompt, and after generation the tokens and text that follow it.

    Log-probabilities are of the model, in the order of the tokens; prompts have none for
    their first token.  Top-n entries map the text of a token to its log-probability.  Segments are
    the texts of single tokens.  ``tpot`` holds the seconds that each generated token took.
    """

    request_id: int
    prompt: str
    sampling_params: SamplingParams | None = None
    inference_parameters: SamplingParams | None = None  # former name of sampling_params
    prompt_tokens: list[int] | None = None
    arrival_time: float | None = None
    status: Status | None = None
    encoder_prompt: str | None = None
    generated_text: str | None = None
    segments: list[str] | None = None
    generated_segments: list[str] | None = None
    generated_sequence_lengths: list[int] | None = None
    generated_tokens: Tensor | list[int] | None = None
    prompt_log_probs: list[float] | None = None
    generated_log_probs: list[float] | None = None
    prompt_top_n_logprobs: list[dict[str, float]] | None = None
    generated_top_n_logprobs: list[dict[str, float]] | None = None
    generated_length: int | None = None
    tpot: list[float] | None = None
    text: str | None = field(default=None, repr=False)  # prompt and generated text

    def __post_init__(self) -> None:
        if self.inference_parameters is not None and self.sampling_params is None:
            self.sampling_params = self.inference_parameters


@dataclass(kw_only=True)
class VLMInferenceRequest(InferenceRequest):
    """A prompt whose tokens ``image_token_index`` of the model stand for images.

    ``imgs`` f32 [t, 3, H, W]: the tiles of all images; ``num_tiles`` i64: tiles of each image.
    """

    num_img_embeddings_per_tile: int
    imgs: Tensor
    num_tiles: Tensor
    decoder_seq_length: int  # most positions of the prompt, where images have several


@dataclass(kw_only=True)
class DynamicInferenceRequest(InferenceRequest):
    """A request of `DynamicInferenceEngine`; its tokens are a list that grows."""

    request_id: int
    generated_tokens: list[int] = field(default_factory=list)
    prompt: str | None = None  # type: ignore[assignment]
    prompt_tokens: Tensor | None = None  # type: ignore[assignment]


@dataclass(eq=False)
class RunningRequest:
    """A request at an engine, whose outputs become its results.

    ``prompt``: the tokens that the generated ones follow.  ``eod``: ends a text without being a
    part of it.  ``outputs``: each with the seconds of its step.
    """

    request: InferenceRequest
    tokenizer: Any
    prompt: list[int]
    eod: int | None
    outputs: list[tuple[RequestOutput, float]] = field(default_factory=list)

    def write(self, request: InferenceRequest) -> InferenceRequest:
        """Set the results so far on the request, or on a copy of it; return it."""
        reason = self.outputs[-1][0].finish_reason
        if reason is not None:
            is_failed = reason in ("error", "abort")
            request.status = Status.FAILED if is_failed else Status.COMPLETED
        params = request.sampling_params or SamplingParams()
        new = [token for output, _ in self.outputs for token in output.new]
        seconds = [s / len(output.new) for output, s in self.outputs for _ in output.new]
        scores = [score for output, _ in self.outputs for score in output.prompt_scores]
        every = [token.token for token in new]
        if new and new[-1].token == self.eod:
            new = new[:-1]
        ids = every[: len(new)]
        if isinstance(request, DynamicInferenceRequest):
            request.generated_tokens = every
        else:
            request.generated_tokens = torch.tensor(ids, dtype=torch.int64)
        request.generated_length = len(ids)
        request.generated_sequence_lengths = [len(ids)]
        request.tpot = seconds[: len(ids)]
        before = self.prompt if request.encoder_prompt is None else []
        whole: str = self.tokenizer.detokenize(before + ids)
        request.generated_text = whole.removeprefix(self.tokenizer.detokenize(before))
        request.text = (request.prompt or "") + request.generated_text
        if params.return_segments:
            request.segments = token_texts(self.tokenizer, self.prompt + ids)
            request.generated_segments = request.segments[len(self.prompt) :]
        if params.return_log_probs:
            request.prompt_log_probs = [token.log_prob for token in scores]
            request.generated_log_probs = [token.log_prob for token in new]
        if params.top_n_logprobs:
            request.generated_top_n_logprobs = self._top(new)
            if params.return_prompt_top_n_logprobs:
                request.prompt_top_n_logprobs = self._top(scores)
        return request

    def _top(self, tokens: Iterable[TokenOutput]) -> list[dict[str, float]]:
        decode = self.tokenizer.detokenize
        return [{decode([i]): log_prob for i, log_prob in token.top} for token in tokens]


def token_texts(tokenizer: Any, tokens: list[int]) -> list[str]:
    """Return the text of each token; together they are the text of all, if the tokenizer can."""
    try:
        text = tokenizer.detokenize(tokens)
        starts = tokenizer.offsets(tokens, text)
    except (NotImplementedError, AttributeError):  # this tokenizer has no offsets
        return [tokenizer.detokenize([token]) for token in tokens]
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


_Item: TypeAlias = InferenceRequest | BaseException | type[BaseException]


class AsyncStream:
    """Items of one request; made in a running event loop, filled from any thread."""

    def __init__(self, request_id: int, cancel: Callable[[int], None]) -> None:
        """``cancel`` is called with ``request_id`` if the reader stops before the end."""
        self._request_id = request_id
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._is_finished = False

    def put(self, item: _Item) -> None:
        """Append an item, or an exception that the reader gets; ignored after the end."""
        if not self._is_finished:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def finish(self, exception: BaseException | type[BaseException] | None = None) -> None:
        """End the stream, with ``exception`` raised in the reader if given."""
        self.put(exception or StopAsyncIteration)
        self._is_finished = True

    @property
    def finished(self) -> bool:
        """Whether the stream has ended."""
        return self._is_finished

    async def generator(self) -> AsyncGenerator[InferenceRequest, None]:
        """Yield the items; an abandoned generator cancels the request."""
        try:
            while True:
                item = await self._queue.get()
                if item is StopAsyncIteration:
                    return
                if not isinstance(item, InferenceRequest):
                    raise item
                yield item
        except (GeneratorExit, asyncio.CancelledError):
            self._cancel(self._request_id)
            raise


class Scheduler:
    """Requests by state, in the order of their arrival; the paged engine decides when they run.

    At most ``max_batch_size`` are in ``active_request_pool``.
    """

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self.active_request_pool: OrderedDict[int, InferenceRequest] = OrderedDict()
        self.waiting_request_pool: OrderedDict[int, InferenceRequest] = OrderedDict()
        self.completed_request_pool: OrderedDict[int, InferenceRequest] = OrderedDict()
        self.streams: OrderedDict[int, AsyncStream] = OrderedDict()
        self.request_counter = Counter()

    def get_new_request_id(self) -> int:
        """Return an id that no request has had."""
        return next(self.request_counter)

    def add_request(
        self,
        prompt: str | None = None,
        prompt_tokens: list[int] | Tensor | None = None,
        encoder_prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        arrival_time: float | None = None,
        streaming: bool = False,
        inference_request: InferenceRequest | None = None,
        *,
        inference_parameters: SamplingParams | None = None,
    ) -> int:
        """Queue a request, made of its parts or given complete; return its id."""
        request = inference_request
        if request is None:
            if prompt is None or prompt_tokens is None:
                raise ConfigError("add_request: give prompt and prompt_tokens, or a request")
            tokens = prompt_tokens.tolist() if isinstance(prompt_tokens, Tensor) else prompt_tokens
            request = InferenceRequest(
                request_id=self.get_new_request_id(),
                prompt=prompt,
                sampling_params=sampling_params or inference_parameters,
                prompt_tokens=list(tokens),
                arrival_time=time.time() if arrival_time is None else arrival_time,
                encoder_prompt=encoder_prompt,
            )
        if streaming:
            self.streams[request.request_id] = AsyncStream(request.request_id, self.abort_request)
        request.status = Status.WAITING_IN_QUEUE
        self.waiting_request_pool[request.request_id] = request
        self.update_requests_pools()
        return request.request_id

    def num_requests_pending(self) -> int:
        """Count active and waiting requests."""
        return len(self.active_request_pool) + len(self.waiting_request_pool)

    def have_requests_pending(self) -> bool:
        """Return whether a request is active or waits."""
        return self.num_requests_pending() > 0

    def add_earliest_waiting_request_to_active_pool(self) -> None:
        """Make the request that has waited longest active."""
        assert len(self.active_request_pool) < self.max_batch_size, "the active pool is full"
        if self.waiting_request_pool:
            request_id, request = self.waiting_request_pool.popitem(last=False)
            request.status = Status.ACTIVE_BUT_NOT_GENERATING_TOKENS
            self.active_request_pool[request_id] = request

    def update_requests_pools(
        self, result_dict: OrderedDict[int, InferenceRequest] | None = None
    ) -> None:
        """Move finished requests to the completed pool and refill the active one."""
        for request_id, request in (result_dict or {}).items():
            if request.status in (Status.COMPLETED, Status.FAILED):
                self.active_request_pool.pop(request_id, None)
                self.waiting_request_pool.pop(request_id, None)
                self.completed_request_pool[request_id] = request
        while self.waiting_request_pool and len(self.active_request_pool) < self.max_batch_size:
            self.add_earliest_waiting_request_to_active_pool()

    def abort_request(
        self, request_id: int, *, exception: BaseException | type[BaseException] | None = None
    ) -> None:
        """End the stream of a request; one that waits is not generated."""
        stream = self.streams.get(request_id)
        if stream is not None:
            stream.finish(exception=exception)
        request = self.waiting_request_pool.pop(request_id, None)
        if request is not None:
            request.status = Status.FAILED
            self.completed_request_pool[request_id] = request
