"""Engines: requests in, finished requests out.

Every rank of a model makes the same calls and gets the same results.
"""

from __future__ import annotations

import abc
import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.errors import ConfigError, MegatronError
from megatron.core.diagnostics.log_once import warn_once
from megatron.core.inference.paged_engine.request import Request, RequestError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.utils import Counter
from megatron.core.inference.v014.collective_engine import CollectiveEngine
from megatron.core.inference.v014.contexts import (
    ChunkOverflowError,
    DynamicInferenceContext,
    MaxSequenceLengthOverflowError,
)
from megatron.core.inference.v014.controllers import (
    TextGenerationController,
)
from megatron.core.inference.v014.requests import (
    AsyncStream,
    DynamicInferenceRequest,
    InferenceRequest,
    Scheduler,
    Status,
)

FinishedStep = tuple[list[DynamicInferenceRequest], list[DynamicInferenceRequest], float]


class AbstractEngine(abc.ABC):
    """An engine generates texts for prompts."""

    @abc.abstractmethod
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the finished requests of the given prompts."""


class StaticInferenceEngine(AbstractEngine):
    """Generates texts of prompts that are known beforehand, at most ``max_batch_size`` together.

    A request that ends makes its place free for the next.  ``max_batch_size`` defaults to the
    wrapper's ``inference_max_requests``, which bounds it.  ``random_seed`` seeds torch, from whose
    generator each request without a seed gets one.  Construction is collective.
    """

    def __init__(
        self,
        text_generation_controller: TextGenerationController,
        max_batch_size: int | None = None,
        random_seed: int | None = None,
    ) -> None:
        controller = text_generation_controller
        most = controller.inference_wrapped_model.inference_wrapper_config.inference_max_requests
        asked = max_batch_size or most
        if asked > most:
            warn_once(
                f"StaticInferenceEngine: max_batch_size {asked} is above "
                f"inference_max_requests {most} of InferenceWrapperConfig, which counts"
            )
        controller.max_requests = min(asked, most)
        self.text_generation_controller = controller
        controller.static_engine()  # all ranks are here; later, replicas may be at different places
        self.random_seed = random_seed
        self.scheduler = Scheduler(controller.max_requests)

    def get_new_request_id(self) -> int:
        """Return an id that no request has had."""
        return self.scheduler.get_new_request_id()

    def add_request(
        self,
        prompt: str | None = None,
        add_BOS: bool = False,  # noqa: N803
        encoder_prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        inference_request: InferenceRequest | None = None,
        *,
        inference_parameters: SamplingParams | None = None,
    ) -> int:
        """Queue a prompt, or a complete request; return its id.

        ``streaming`` needs a running event loop; see `get_stream_generator`.
        """
        tokens = None
        if inference_request is None:
            if prompt is None:
                raise ConfigError("add_request: give prompt or inference_request")
            tokens = self.text_generation_controller.tokenize_prompt(prompt, add_BOS)
        return self.scheduler.add_request(
            prompt,
            tokens,
            encoder_prompt,
            sampling_params or inference_parameters or SamplingParams(),
            streaming=streaming,
            inference_request=inference_request,
        )

    def get_stream_generator(self, request_id: int) -> AsyncGenerator[InferenceRequest, None]:
        """Return a generator of the request with its text so far, one for each token."""
        stream = self.scheduler.streams.get(request_id)
        if stream is None:
            raise ConfigError(f"request {request_id} has no stream: add it with streaming=True")
        return self._read(request_id, stream)

    async def _read(
        self, request_id: int, stream: AsyncStream
    ) -> AsyncGenerator[InferenceRequest, None]:
        # The stream is kept until here: the engine's thread may finish before a reader begins.
        try:
            async with aclosing(stream.generator()) as items:
                async for item in items:
                    yield item
        finally:
            self.scheduler.streams.pop(request_id, None)

    def generate(
        self,
        prompts: Sequence[str] | None = None,
        add_BOS: bool = False,  # noqa: N803
        encoder_prompts: Sequence[str] | None = None,
        common_inference_params: SamplingParams | None = None,
        sampling_params: SamplingParams | None = None,
        inference_requests: Sequence[InferenceRequest] | None = None,
    ) -> list[InferenceRequest]:
        """Return the finished requests of the prompts, or of ``inference_requests``, in order.

        Prompts of a decoder may be left out with ``encoder_prompts``: the decoder then starts with
        its start token.
        """
        params = sampling_params or common_inference_params
        if inference_requests is not None:
            ids = [self.add_request(inference_request=r) for r in inference_requests]
        else:
            if prompts is None and encoder_prompts is not None:
                prompts = [""] * len(encoder_prompts)
            if prompts is None:
                raise ConfigError("generate: give prompts, encoder_prompts or inference_requests")
            sources: Sequence[str | None] = encoder_prompts or [None] * len(prompts)
            if len(sources) != len(prompts):
                raise ConfigError(
                    f"generate: {len(prompts)} prompts and {len(sources)} encoder_prompts: give "
                    "one of each for a text"
                )
            ids = [
                self.add_request(prompt, add_BOS, source, params)
                for prompt, source in zip(prompts, sources, strict=True)
            ]
        self.run_engine()
        return [self.scheduler.completed_request_pool.pop(i) for i in ids]

    def run_engine(self) -> None:
        """Generate until no request waits.  Collective over the ranks of the model.

        An error of a request, such as a prompt that is too long, ends all requests that wait.
        """
        if self.random_seed is not None:
            torch.manual_seed(self.random_seed)
        scheduler = self.scheduler
        while scheduler.have_requests_pending():
            pending = OrderedDict(scheduler.active_request_pool | scheduler.waiting_request_pool)
            streams = OrderedDict((i, s) for i, s in scheduler.streams.items() if i in pending)
            try:
                results = self.text_generation_controller.generate_all_output_tokens_static_batch(
                    pending, streams
                )
                scheduler.update_requests_pools(results)
            except MegatronError as error:
                scheduler.active_request_pool.clear()
                scheduler.waiting_request_pool.clear()
                for stream in streams.values():
                    stream.finish(exception=error)
                raise

    async def run_engine_async(self) -> None:
        """Run `run_engine` in a thread, so that coroutines can read streams meanwhile."""
        await asyncio.to_thread(self.run_engine)


class DynamicInferenceEngine(AbstractEngine):
    """Continuous batching: requests arrive while others are generated.  Construction is collective.

    ``termination_id``: the token that ends a text; None: as the tokenizer says.
    ``enable_cuda_graph``: decode on a GPU with CUDA graphs.  ``random_seed``: of requests without a
    seed of their own.
    """

    def __init__(
        self,
        controller: TextGenerationController,
        context: DynamicInferenceContext,
        termination_id: int | None,
        enable_cuda_graph: bool,
        random_seed: int | None = None,
    ) -> None:
        self.controller = controller
        self.context = context
        wrapper = controller.inference_wrapped_model
        model = wrapper.generation_model(controller.tokenizer, termination_id)
        self.termination_id = model.eod
        self.random_seed = random_seed
        self.request_counter = Counter()
        self.requests: dict[int, DynamicInferenceRequest] = {}
        num_graphs = context.options.num_cuda_graphs if enable_cuda_graph else 0
        self._engine = CollectiveEngine(model, replace(context.options, num_cuda_graphs=num_graphs))
        self.max_requests = self._engine.limits.max_requests
        context.engine = self
        self.reset()

    def reset(self) -> None:
        """End all requests without results, and begin the random numbers again."""
        for request_id in self.requests:
            self._engine.abort(str(request_id))
        self.requests.clear()
        self.request_counter.reset()
        seed = int(torch.randint(2**62, ())) if self.random_seed is None else self.random_seed
        self._seeds = random.Random(seed)
        self._waiting: dict[int, int | None] = {}  # ids without parameters -> tokens to generate
        self._futures: dict[int, asyncio.Future[DynamicInferenceRequest]] = {}
        self._arrival = asyncio.Event()

    @property
    def is_decode_only(self) -> bool:
        """Whether the next step reads no prompt: all requests have a generated token."""
        requests = self.requests.values()
        return bool(requests) and all(request.generated_tokens for request in requests)

    def has_unfinished_requests(self) -> bool:
        """Return whether a request waits or runs."""
        return bool(self.requests)

    def add_request(
        self,
        request_id: int,
        prompt: str | list[int] | Tensor,
        num_tokens_to_generate: int | None = None,
    ) -> asyncio.Future[DynamicInferenceRequest]:
        """Queue a prompt, text or tokens; the next step sets its parameters.

        The result is a future of the finished request.  MaxSequenceLengthOverflowError: prompt and
        tokens to generate are too long.  ChunkOverflowError: the cache is too small for them.
        """
        if request_id in self.requests:
            raise RequestError(f"request {request_id} is unfinished: give another id", "request_id")
        if isinstance(prompt, str):
            tokens = self.controller.tokenize_prompt(prompt)
        else:
            tokens = [int(token) for token in torch.as_tensor(prompt).tolist()]
        count = num_tokens_to_generate or 1
        longest = min(self.context.max_sequence_length, self._engine.model.max_sequence_length)
        if len(tokens) + count > longest:
            raise MaxSequenceLengthOverflowError(
                f"request {request_id} has {len(tokens)} tokens and asks for {count}: the "
                f"context holds {longest}; shorten it or raise max_sequence_length"
            )
        params = SamplingParams(num_tokens_to_generate=count)
        try:
            self._engine.check(Request(str(request_id), tokens, params))
        except RequestError as error:
            if not tokens:
                raise
            raise ChunkOverflowError(f"request {request_id}: {error}") from error
        self.requests[request_id] = DynamicInferenceRequest(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_tokens=torch.tensor(tokens),
            arrival_time=time.time(),
            status=Status.WAITING_IN_QUEUE,
        )
        self._waiting[request_id] = num_tokens_to_generate
        future: asyncio.Future[DynamicInferenceRequest] = asyncio.Future(loop=_event_loop())
        self._futures[request_id] = future
        self._arrival.set()
        return future

    async def async_step(
        self, sampling_params: SamplingParams, *, verbose: bool | None = False
    ) -> FinishedStep:
        """Run `step`, and let other coroutines run."""
        result = self.step(sampling_params, verbose=verbose)
        await asyncio.sleep(0)
        return result

    def step(
        self, sampling_params: SamplingParams, *, verbose: bool | None = False
    ) -> FinishedStep:
        """Run one forward pass; return its unfinished and its finished requests, and its seconds.

        ``sampling_params``: of the requests that have been added since the last step.
        Collective over the ranks of the model.
        """
        active: list[DynamicInferenceRequest] = []
        finished: list[DynamicInferenceRequest] = []
        for request_id, count in self._waiting.items():
            request = self.requests[request_id]
            request.sampling_params = sampling_params
            if count is not None:
                request.sampling_params = replace(sampling_params, num_tokens_to_generate=count)
            try:
                self.controller.start(request, self._engine, lambda: self._seeds.getrandbits(62))
            except RequestError as error:
                request.status = Status.FAILED
                finished.append(self._finish(request_id, error))
        self._waiting.clear()
        elapsed = 0.0
        for running, output in self._engine.advance(to_end=False):
            elapsed = running.outputs[-1][1]
            request = self.requests[running.request.request_id]
            request.generated_tokens += [token.token for token in output.new]
            if output.finish_reason is None:
                active.append(request)
            else:
                running.write(request)
                finished.append(self._finish(request.request_id))
        if verbose:
            print(f"step: {len(active)} active, {len(finished)} finished, {elapsed:.6f} s")
        return active, finished, elapsed

    def generate(
        self,
        prompts: Sequence[str],
        sampling_params: SamplingParams | None = SamplingParams(),  # noqa: B008  (only read)
    ) -> list[DynamicInferenceRequest]:
        """Return the finished requests of ``prompts``, those that end first first."""
        params = sampling_params or SamplingParams()
        for prompt in prompts:
            self.add_request(next(self.request_counter), prompt, params.num_tokens_to_generate)
        finished: list[DynamicInferenceRequest] = []
        while self.requests:
            finished += self.step(params)[1]
        return finished

    async def run_engine(
        self, sampling_params: SamplingParams, *, verbose: bool | None = False
    ) -> None:
        """Step as long as there are requests and wait for others, until this task is cancelled."""
        while True:
            while self.requests:
                await self.async_step(sampling_params, verbose=verbose)
            self._arrival.clear()
            await self._arrival.wait()

    def _finish(
        self, request_id: int, error: RequestError | None = None
    ) -> DynamicInferenceRequest:
        """Return the finished request, and set its future."""
        request = self.requests.pop(request_id)
        future = self._futures.pop(request_id)
        if not future.done():
            if error is None:
                future.set_result(request)
            else:
                future.set_exception(error)
        return request


_idle_loop = cache(asyncio.new_event_loop)


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop, or one that does not run, for scripts without."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return _idle_loop()
