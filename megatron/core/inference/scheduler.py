"""Queues of requests under their names in Megatron-LM; `StaticInferenceEngine` empties them."""

from __future__ import annotations

import time
from collections import OrderedDict

from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.inference.async_stream import AsyncStream
from megatron.core.inference.inference_request import InferenceRequest, Status
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.utils import Counter


class Scheduler:
    """Waiting, active and completed requests by id; at most ``max_batch_size`` are active."""

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
        request_id = request.request_id
        if streaming:
            self.streams[request_id] = AsyncStream(request_id, self.abort_request)
        is_active = len(self.active_request_pool) < self.max_batch_size
        request.status = (
            Status.ACTIVE_BUT_NOT_GENERATING_TOKENS if is_active else Status.WAITING_IN_QUEUE
        )
        pool = self.active_request_pool if is_active else self.waiting_request_pool
        pool[request_id] = request
        return request_id

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
        if stream is not None and not stream.finished:
            stream.finish(exception=exception)
        request = self.waiting_request_pool.pop(request_id, None)
        if request is not None:
            request.status = Status.FAILED
            self.completed_request_pool[request_id] = request
