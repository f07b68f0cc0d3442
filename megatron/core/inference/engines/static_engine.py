"""The engine for prompts that are known beforehand.

Every rank of a model makes the same calls and gets the same results.  All requests that wait are
generated together: one that ends makes its place free for the next.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import torch

from megatron.core.config.errors import ConfigError, MegatronError
from megatron.core.diagnostics.log_once import warn_once
from megatron.core.inference.engines.abstract_engine import AbstractEngine
from megatron.core.inference.inference_request import InferenceRequest
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.scheduler import Scheduler
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)


class StaticInferenceEngine(AbstractEngine):
    """Generates texts; at most ``max_batch_size`` at the same time.  Construction is collective.

    ``max_batch_size`` defaults to the wrapper's ``inference_max_requests``, which bounds it.
    ``random_seed`` seeds torch, from whose generator each request without a seed gets one.
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
        if inference_request is not None:
            return self.scheduler.add_request(
                inference_request=inference_request, streaming=streaming
            )
        if prompt is None:
            raise ConfigError("add_request: give prompt or inference_request")
        return self.scheduler.add_request(
            prompt=prompt,
            prompt_tokens=self.text_generation_controller.tokenize_prompt(prompt, add_BOS),
            encoder_prompt=encoder_prompt,
            sampling_params=sampling_params or inference_parameters or SamplingParams(),
            streaming=streaming,
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
        while self.scheduler.have_requests_pending():
            pending: OrderedDict[int, InferenceRequest] = OrderedDict(
                self.scheduler.active_request_pool | self.scheduler.waiting_request_pool
            )
            streams = OrderedDict(
                (i, self.scheduler.streams[i]) for i in pending if i in self.scheduler.streams
            )
            try:
                results = self.text_generation_controller.generate_all_output_tokens_static_batch(
                    pending, streams
                )
            except MegatronError as error:
                self._drop(pending, error)
                raise
            self.scheduler.update_requests_pools(results)
            for request_id in streams:
                self.scheduler.streams.pop(request_id, None)

    async def run_engine_async(self) -> None:
        """Run `run_engine` in a thread, so that coroutines can read streams meanwhile."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.run_engine)

    def _drop(self, requests: OrderedDict[int, Any], error: MegatronError) -> None:
        for request_id in requests:
            self.scheduler.active_request_pool.pop(request_id, None)
            self.scheduler.waiting_request_pool.pop(request_id, None)
            stream = self.scheduler.streams.pop(request_id, None)
            if stream is not None:
                stream.finish(exception=error)
