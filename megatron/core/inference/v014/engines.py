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
    RunningRequest,
    TextGenerationController,
    engine_params,
)
from megatron.core.inference.v014.requests import (
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
        if max_batch_size is not None and max_batch_size > most:
            warn_once(
                f"StaticInferenceEngine: max_batch_size {max_batch_size} is above "
                f"inference_max_requests {most} of InferenceWrapperConfig, which counts"
            )
        controller.max_requests = most if max_batch_size is None else min(max_batch_size, most)
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
        if inference_request is None and prompt is None:
            raise ConfigError("add_request: give prompt or inference_request")
        tokens = None
        if inference_request is None and prompt is not None:
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
        return stream.generator()

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
            finally:
                for request_id in streams:
                    scheduler.streams.pop(request_id, None)

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
        options = context.options
        if not enable_cuda_graph:
            options = replace(options, num_cuda_graphs=0)
        self._engine = CollectiveEngine(model, options)
        context.engine = self._engine
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
        self._running: dict[str, RunningRequest] = {}
        self._futures: dict[int, asyncio.Future[DynamicInferenceRequest]] = {}
        self._arrival = asyncio.Event()

    @property
    def is_decode_only(self) -> bool:
        """Whether the next step reads no prompt."""
        return self.context.is_decode_only()

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
        self._check(request_id, tokens, num_tokens_to_generate or 1)
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
        waiting = self._waiting
        self._waiting = {}
        for request_id, count in waiting.items():
            try:
                self._start(self.requests[request_id], sampling_params, count)
            except RequestError as error:
                finished.append(self._finish(request_id, error))
        elapsed = 0.0
        for output, elapsed in self._engine.advance(to_end=False):
            running = self._running[output.request_id]
            running.record(output, elapsed)
            request_id = running.request.request_id
            if running.finish_reason is None:
                active.append(self.requests[request_id])
            else:
                finished.append(self._finish(request_id))
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
        while self.has_unfinished_requests():
            finished += self.step(params)[1]
        return finished

    async def run_engine(
        self, sampling_params: SamplingParams, *, verbose: bool | None = False
    ) -> None:
        """Step as long as there are requests and wait for others, until this task is cancelled."""
        while True:
            while self.has_unfinished_requests():
                await self.async_step(sampling_params, verbose=verbose)
            self._arrival.clear()
            await self._arrival.wait()

    def _check(self, request_id: int, tokens: list[int], count: int) -> None:
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

    def _start(
        self, request: DynamicInferenceRequest, params: SamplingParams, count: int | None
    ) -> None:
        """Set the parameters of a request and queue it at the engine."""
        assert request.prompt_tokens is not None, f"request {request.request_id} has no tokens"
        asked = engine_params(params, self._seeds.getrandbits(62) if params.seed is None else 0)
        if count is not None:
            asked = replace(asked, num_tokens_to_generate=count)
        request.sampling_params = asked
        name = str(request.request_id)
        prompt = request.prompt_tokens.tolist()
        self._running[name] = RunningRequest(
            request, asked, self.controller.tokenizer, prompt, self.termination_id
        )
        self._engine.add(Request(name, prompt, asked))

    def _finish(
        self, request_id: int, error: RequestError | None = None
    ) -> DynamicInferenceRequest:
        """Return the finished request with its results, and set its future."""
        self._running.pop(str(request_id)).finish()
        request = self.requests.pop(request_id)
        future = self._futures.pop(request_id)
        if future.get_loop().is_running():  # maybe in another thread
            future.get_loop().call_soon_threadsafe(_set, future, request, error)
        else:
            _set(future, request, error)
        return request


def _set(
    future: asyncio.Future[DynamicInferenceRequest],
    request: DynamicInferenceRequest,
    error: RequestError | None,
) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(request)
    else:
        future.set_exception(error)


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop, or one that does not run, for scripts without."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return _idle_loop()


@cache
def _idle_loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()
