"""The engine for requests that arrive while others are generated.

Every rank of a model makes the same calls and gets the same results.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from megatron.core.inference.contexts.dynamic_context import (
    ChunkOverflowError,
    DynamicInferenceContext,
    MaxSequenceLengthOverflowError,
)
from megatron.core.inference.engines.abstract_engine import AbstractEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status
from megatron.core.inference.paged_engine.collective_engine import CollectiveEngine
from megatron.core.inference.paged_engine.request import Request, RequestError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.answers import Answer
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.inference.utils import Counter

Finished = tuple[list[DynamicInferenceRequest], list[DynamicInferenceRequest], float]


class DynamicInferenceEngine(AbstractEngine):
    """Continuous batching.  Construction is collective over the ranks of the model.

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
        context.bind(self._engine)
        self.reset()

    def reset(self) -> None:
        """End all requests without results, and begin the random numbers again."""
        for name in [str(request_id) for request_id in self.requests]:
            self._engine.abort(name)
        self.requests.clear()
        self.request_counter.reset()
        seed = int(torch.randint(2**62, ())) if self.random_seed is None else self.random_seed
        self._seeds = random.Random(seed)
        self._waiting: dict[int, int | None] = {}  # ids without parameters -> tokens to generate
        self._answers: dict[str, Answer] = {}
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
        """Queue a prompt, text or tokens; the parameters are those of the next step.

        The result is a future of the finished request.  MaxSequenceLengthOverflowError: prompt and
        tokens to generate are too long.  ChunkOverflowError: the cache is too small for them.
        """
        if request_id in self.requests:
            raise RequestError(f"request {request_id} is unfinished: give another id", "request_id")
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            tokens = self.controller.tokenize_prompt(prompt)
        else:
            tokens = [int(token) for token in torch.as_tensor(prompt).tolist()]
        self._check(request_id, tokens, num_tokens_to_generate)
        self.requests[request_id] = DynamicInferenceRequest(
            request_id=request_id,
            prompt=text,
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
    ) -> Finished:
        """Run `step`, and let other coroutines run."""
        result = self.step(sampling_params, verbose=verbose)
        await asyncio.sleep(0)
        return result

    def step(self, sampling_params: SamplingParams, *, verbose: bool | None = False) -> Finished:
        """Run one forward pass; return its unfinished and its finished requests, and its seconds.

        ``sampling_params`` are those of the requests that have been added since the last step.
        Collective over the ranks of the model.
        """
        active: list[DynamicInferenceRequest] = []
        finished: list[DynamicInferenceRequest] = []
        while self._waiting:
            request_id = next(iter(self._waiting))
            count = self._waiting.pop(request_id)
            answer = self._start(self.requests[request_id], sampling_params, count)
            try:
                self._engine.add(Request(answer.name, answer.prompt, answer.params))
            except RequestError as error:
                finished.append(self._finish(answer, error))
        elapsed = 0.0
        for timed in self._engine.advance(to_end=False):
            elapsed = timed.elapsed_s
            answer = self._answers[timed.output.request_id]
            answer.record(timed)
            request = self.requests[answer.request.request_id]
            request.generated_tokens += [t.token for t in timed.output.new]
            if answer.finish_reason is None:
                active.append(request)
            else:
                finished.append(self._finish(answer))
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

    def _check(self, request_id: int, tokens: list[int], count: int | None) -> None:
        longest = min(self.context.max_sequence_length, self._engine.model.max_sequence_length)
        if len(tokens) + (count or 1) > longest:
            raise MaxSequenceLengthOverflowError(
                f"request {request_id} has {len(tokens)} tokens and asks for {count or 1}: the "
                f"context holds {longest}; shorten it or raise max_sequence_length"
            )
        params = SamplingParams(num_tokens_to_generate=count or 1)
        try:
            self._engine.check(Request(str(request_id), tokens, params))
        except RequestError as error:
            if not tokens:
                raise
            raise ChunkOverflowError(f"request {request_id}: {error}") from error

    def _start(
        self, request: DynamicInferenceRequest, params: SamplingParams, count: int | None
    ) -> Answer:
        """Set the parameters of a request; return the answer to record its outputs in."""
        assert request.prompt_tokens is not None, "add_request() sets them"
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        if count is None:
            count = params.num_tokens_to_generate
        request.sampling_params = replace(
            params,
            seed=seed,
            num_tokens_to_generate=count,
            return_prompt_log_probs=params.return_log_probs or params.return_prompt_log_probs,
        )
        prompt = request.prompt_tokens.tolist()
        answer = Answer(
            replace(request),
            request.sampling_params,
            self.controller.tokenizer,
            self.termination_id,
            prompt,
        )
        self._answers[answer.name] = answer
        request.status = Status.ACTIVE_AND_GENERATING_TOKENS
        return answer

    def _finish(self, answer: Answer, error: RequestError | None = None) -> DynamicInferenceRequest:
        """Return the finished request, with all tokens that the model gave, and set its future."""
        answer.write_results()
        request = self.requests.pop(answer.request.request_id)
        tokens = request.generated_tokens
        for name, value in vars(answer.request).items():
            setattr(request, name, value)
        request.generated_tokens = tokens
        del self._answers[answer.name]
        future = self._futures.pop(request.request_id)
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
