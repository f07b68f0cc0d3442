"""From the prompts of an HTTP request to requests of the engine, and their texts; see `Service`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from megatron.core.config.errors import MegatronError
from megatron.core.inference.paged_engine.request import (
    Beam,
    BeamParams,
    FinishReason,
    PromptImage,
    Request,
    RequestError,
    TokenOutput,
    text_of,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.server.chat_images import ImageFiles
from megatron.inference.server.engine_link import Call, EngineClient
from megatron.inference.server.fields import ApiError, Fields, as_api_error
from megatron.inference.server.http import DONE, EventStream, event, until_disconnect
from megatron.inference.server.metrics import Metrics, RequestTimer
from megatron.inference.server.model import Model
from megatron.inference.server.workers import ChatTemplate
from megatron.inference.text import PlacedToken, SampleText, TextDelta, TextRules

T = TypeVar("T")

SEED_LIMIT = 2**63
# Fields of OpenAI's API that concern its accounts and hosts: accepted, without effect.
WITHOUT_EFFECT = (
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
MAX_VALUES = 300_000  # of one answer, see `GenerationRequest.num_values`; some 10 MB of JSON
MAX_PROMPT_TOKENS = 1 << 24  # of all samples of a request: the engine keeps each one's prompt
_LONG_ANSWER = 1000  # values; a longer answer is written in a thread


@dataclass(frozen=True)
class GenerationRequest:
    """The request of an HTTP client: ``num_samples`` texts of each prompt (token ids).

    ``images``: those whose ids the prompts have.  ``keeps_tokens``: samples have tokens at their
    end, not only text; each takes much more memory than its text.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    rules: TextRules
    num_samples: int = 1
    grammar: tuple[str, str] | None = None
    beam: BeamParams | None = None
    images: tuple[PromptImage, ...] = ()
    keeps_tokens: bool = True

    @property
    def num_values(self) -> int:
        """Number of log-probabilities, or of tokens in beams, that the answer has at most."""
        params = self.params
        num_new = params.num_tokens_to_generate
        num_given = sum(map(len, self.prompts))
        if self.beam is not None:
            return self.beam.width * (num_given + num_new)
        if not params.return_log_probs:
            return 0
        values = len(self.prompts) * num_new * (1 + params.top_n_logprobs)
        if params.return_prompt_top_n_logprobs:
            values += num_given * (1 + params.top_n_logprobs)
        elif params.return_prompt_log_probs:
            values += num_given
        return self.num_samples * values


@dataclass
class Sample:
    """One text, as far as it has arrived."""

    generation_id: str
    index: int
    prompt: list[int]
    state: SampleText
    timer: RequestTimer
    text: str = ""
    tokens: list[PlacedToken] = field(default_factory=list)
    num_scored: int = 0  # tokens of the text, also if they are not kept
    sum_log_prob: float = 0.0  # of these
    prompt_scores: tuple[TokenOutput, ...] = ()
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    num_cached: int = 0
    weight_version: int = 0
    beams: tuple[Beam, ...] = ()  # of a beam search, best first

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens, a stop string included."""
        return self.state.num_tokens

    @property
    def mean_log_prob(self) -> float:
        """Mean log-probability of its tokens."""
        return self.sum_log_prob / max(self.num_scored, 1)


class Generation:
    """Samples that the engine generates.  `start` it, and always `close` it."""

    def __init__(
        self, client: EngineClient, model: Model, metrics: Metrics, wanted: GenerationRequest
    ) -> None:
        self.id = uuid.uuid4().hex
        self._metrics = metrics
        self._keeps_tokens = wanted.keeps_tokens
        self.samples: dict[str, Sample] = {}
        for prompt in wanted.prompts:
            check_length(prompt, wanted.params, model)
        num_tokens = wanted.num_samples * sum(map(len, wanted.prompts))
        if num_tokens > MAX_PROMPT_TOKENS:
            raise ApiError(
                f"prompt: all samples together have {num_tokens} tokens of prompts, at most "
                f"{MAX_PROMPT_TOKENS}: reduce the prompts or n",
                "prompt",
            )
        if wanted.num_values > MAX_VALUES:
            raise ApiError(
                f"the answer may have {wanted.num_values} log-probabilities or tokens of beams, at "
                f"most {MAX_VALUES}: reduce the prompts, n, max_tokens or the number of "
                "log-probabilities",
                "logprobs",
            )
        requests = []
        counter = itertools.count()
        for prompt in wanted.prompts:
            for number in range(wanted.num_samples):
                index = next(counter)
                request = _request(f"{self.id}-{index}", prompt, wanted, number, model)
                if number > 0:  # the samples of a prompt share its pages
                    request.fork_of = f"{self.id}-{index - number}"
                state = SampleText(model.decode, wanted.rules, text_of(request.prompt))
                self.samples[request.request_id] = Sample(
                    self.id, index, prompt, state, metrics.timer()
                )
                requests.append(request)
        self._call = Call(client, requests)

    async def start(self) -> None:
        """Return when the engine has accepted all requests; raises otherwise."""
        try:
            await self._call.start()
        except BaseException:
            self.close()
            raise
        self._metrics.started(len(sample.prompt) for sample in self.samples.values())

    async def deltas(self) -> AsyncIterator[tuple[Sample, TextDelta]]:
        """Yield new text and tokens, sample by sample, until all have finished."""
        async for output in self._call.outputs():
            if output.finish_reason == "error":
                if output.error_param is not None:
                    raise RequestError(output.error, output.error_param)
                raise ApiError(output.error or "the engine failed", status=500)
            sample = self.samples[output.request_id]
            sample.timer.received(len(output.new))
            sample.num_cached = max(sample.num_cached, output.num_cached_prompt_tokens)
            sample.weight_version = output.weight_version
            sample.prompt_scores += output.prompt_scores
            sample.beams = output.beams
            delta = sample.state.add(output)
            sample.text += delta.text
            if self._keeps_tokens:
                sample.tokens += delta.tokens
            sample.num_scored += len(delta.tokens)
            for placed in delta.tokens:
                sample.sum_log_prob += placed.output.log_prob
            sample.finish_reason = delta.finish_reason
            sample.stopped_by = delta.stopped_by
            if delta.finish_reason is not None:
                self._call.finish(output.request_id)
                sample.timer.finished(delta.finish_reason)
            yield sample, delta

    async def finish(self) -> list[Sample]:
        """Return all samples when they have finished."""
        async for _ in self.deltas():
            pass
        return list(self.samples.values())

    def close(self) -> None:
        """Abort the samples that have not finished."""
        for sample in self.samples.values():
            if sample.finish_reason is None:
                sample.timer.finished("abort")
        self._call.close()


async def write(num_values: int, function: Callable[[], T]) -> T:
    """Return the result of ``function``, of a thread if there are many values."""
    return await asyncio.to_thread(function) if num_values > _LONG_ANSWER else function()


def check_length(prompt: Sequence[int], params: SamplingParams, model: Model) -> None:
    """Raise ApiError if the model has too few positions."""
    longest = model.info.max_sequence_length
    num_tokens = params.num_tokens_to_generate
    if not prompt:
        raise ApiError(
            "prompt: it is empty, and the tokenizer adds no token; give at least one, such as the "
            "end-of-document token as [ID]",
            "prompt",
        )
    num_positions = num_tokens + (0 if model.info.decoder_start is not None else len(prompt))
    if num_positions > longest or len(prompt) > longest:
        raise ApiError(
            f"This model's maximum context length is {longest} tokens; the prompt has "
            f"{len(prompt)} and {num_tokens} are to be generated: shorten the prompt or reduce "
            "max_tokens",
            "prompt" if len(prompt) >= longest else "max_tokens",
            code="context_length_exceeded",
        )


def usage_of(samples: Sequence[Sample], num_per_prompt: int) -> dict[str, object]:
    """Return OpenAI's ``usage``: a prompt counts once for all its samples."""
    num_prompt = sum(len(sample.prompt) for sample in samples[::num_per_prompt])
    num_new = sum(sample.num_tokens for sample in samples)
    cached = sum(sample.num_cached for sample in samples[::num_per_prompt])
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _request(
    request_id: str, prompt: list[int], wanted: GenerationRequest, number: int, model: Model
) -> Request:
    params = wanted.params
    if params.seed is not None and number:  # each sample has its own seed
        params = replace(params, seed=(params.seed + number) % SEED_LIMIT)
    start = model.info.decoder_start
    ids, source = (list(prompt), []) if start is None else ([start], list(prompt))
    request = Request(request_id, ids, params, source=source, images=wanted.images)
    request.grammar = wanted.grammar
    request.beam = wanted.beam
    return request


_LOG = logging.getLogger(__name__)

# Sample and its new text -> the objects to send.
ToEvents = Callable[[Sample, TextDelta], list[dict[str, Any]]]


@dataclass(eq=False)
class Service:
    """The engine's connection, the model, and the counters."""

    client: EngineClient
    model: Model
    metrics: Metrics
    template: ChatTemplate | None = None
    image_files: ImageFiles = field(default_factory=lambda: ImageFiles(None))
    max_api_tokens: int = 12000
    announced: set[str] = field(default_factory=set)

    def close(self) -> None:
        """End the processes that work on requests."""
        self.model.close()
        if self.template is not None:
            self.template.close()

    def generation(self, wanted: GenerationRequest) -> Generation:
        """Return a generation that is not started yet.  Raises ApiError for a prompt too long."""
        return Generation(self.client, self.model, self.metrics, wanted)

    async def samples(self, wanted: GenerationRequest, request: Any) -> list[Sample]:
        """Generate all samples.  Raises ClientGone if the client leaves before."""
        generation = self.generation(wanted)

        async def work() -> list[Sample]:
            await generation.start()
            return await generation.finish()

        try:
            return await until_disconnect(request.receive, work())
        finally:
            generation.close()

    async def stream(
        self,
        generation: Generation,
        request: Any,
        to_events: ToEvents,
        last: Callable[[list[Sample]], list[dict[str, Any]]],
    ) -> EventStream:
        """Answer with events; ``last`` gives the objects after the last sample."""
        await until_disconnect(request.receive, generation.start())
        return EventStream(_events(generation, to_events, last), generation.close)

    def check_model(self, fields: Fields) -> None:
        """Raise ApiError (404) if the request names another model than the served one."""
        name = fields.text("model", None)
        if name is not None and name != self.model.info.model:
            raise ApiError(
                f"model: {name[:80]!r} is not served here; the model is {self.model.info.model!r}",
                "model",
                status=404,
                code="model_not_found",
            )

    def finish_reading(self, fields: Fields) -> None:
        """Refuse unknown fields, and announce once each field without effect."""
        for name in fields.without_effect(WITHOUT_EFFECT):
            if name not in self.announced:
                self.announced.add(name)
                _LOG.warning("a client sends %s, which has no effect on this server", name)
        fields.refuse_others()


async def _events(
    generation: Generation,
    to_events: ToEvents,
    last: Callable[[list[Sample]], list[dict[str, Any]]],
) -> AsyncIterator[str]:
    begun: set[int] = set()
    try:
        async for sample, delta in generation.deltas():
            # The first event may have the scores of a long prompt.
            num_values = 0 if sample.index in begun else len(sample.prompt_scores)
            begun.add(sample.index)
            for found in await write(num_values, partial(to_events, sample, delta)):
                yield event(found)
        for found in last(list(generation.samples.values())):
            yield event(found)
    except MegatronError as error:
        yield event(as_api_error(error).body)
    yield DONE
