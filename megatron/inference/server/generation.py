"""From the prompts of an HTTP request to requests of the engine, their texts, and counters."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from megatron.core.config.errors import MegatronError
from megatron.core.inference.paged_engine.request import (
    Beam,
    BeamParams,
    FinishReason,
    Pooling,
    PromptImage,
    Request,
    RequestError,
    RequestOutput,
    TokenOutput,
    text_of,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.optional import require
from megatron.inference.server.chat_formats import NONE, REASONING_PARSERS, TOOL_PARSERS, Markup
from megatron.inference.server.chat_images import ImageFiles
from megatron.inference.server.engine_link import Call, EngineClient, request_to_json
from megatron.inference.server.fields import ApiError, Fields, as_api_error
from megatron.inference.server.http import DONE, EventStream, event, until_disconnect
from megatron.inference.server.model import ChatTemplate, Model
from megatron.inference.text import PlacedToken, SampleText, TextDelta, TextRules

_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counters and histograms of requests; gauges of the engine's `stats`."""

    def __init__(self) -> None:
        self._library: Any = require("prometheus_client", "the server")
        self._registry = self._library.CollectorRegistry()
        count = self._library.Counter
        timing = partial(self._make, self._library.Histogram)
        self.requests = self._make(count, "requests", "Finished samples", ["finish_reason"])
        self._answers = self._make(count, "http_responses", "HTTP answers", ["path", "status"])
        self.prompt = self._make(count, "prompt_tokens", "Tokens of prompts")
        self.generated = self._make(count, "generation_tokens", "Generated tokens")
        self.open = self._make(self._library.Gauge, "open_samples", "Samples in progress")
        self.first_token_s = timing(
            "time_to_first_token_seconds", "Until the first token", buckets=_BUCKETS_S
        )
        self.gap_s = timing(
            "time_per_output_token_seconds", "Between tokens", buckets=_GAP_BUCKETS_S
        )
        self.total_s = timing(
            "request_duration_seconds", "Until the last token", buckets=_BUCKETS_S
        )
        self._engine: dict[str, Any] = {}

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP answer; ``path``: of a route."""
        self._answers.labels(path, str(status)).inc()

    def text(self, engine: Mapping[str, Any]) -> bytes:
        """Return all metrics; numbers of ``engine`` are the values of its stats."""
        for name, value in engine.items():
            if isinstance(value, int | float):
                if name not in self._engine:
                    self._engine[name] = self._make(
                        self._library.Gauge, f"engine_{name}", f"The engine's {name}"
                    )
                self._engine[name].set(value)
        found: bytes = self._library.generate_latest(self._registry)
        return found

    def _make(
        self, kind: Any, name: str, text: str, labels: Sequence[str] = (), **more: Any
    ) -> Any:
        return kind(f"megatron_{name}", text, labels, registry=self._registry, **more)


class RequestTimer:
    """Times of one sample."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._metrics.open.inc()
        self._started_s = time.monotonic()
        self._last_s: float | None = None

    def received(self, num_tokens: int) -> None:
        """Note that tokens have arrived."""
        if num_tokens == 0:
            return
        now_s = time.monotonic()
        if self._last_s is None:
            self._metrics.first_token_s.observe(now_s - self._started_s)
        else:
            for _ in range(num_tokens):
                self._metrics.gap_s.observe((now_s - self._last_s) / num_tokens)
        self._last_s = now_s
        self._metrics.generated.inc(num_tokens)

    def finished(self, reason: str) -> None:
        """Note the end."""
        self._metrics.total_s.observe(time.monotonic() - self._started_s)
        self._metrics.open.dec()
        self._metrics.requests.labels(reason).inc()


T = TypeVar("T")
Objects: TypeAlias = list[dict[str, Any]]  # of a stream

SEED_LIMIT = 2**63
MAX_VALUES = 300_000  # of one answer, see `GenerationRequest.num_values`; some 10 MB of JSON
MAX_PROMPT_TOKENS = 1 << 24  # of all samples of a request: the engine keeps each one's prompt
_LONG_ANSWER = 1000  # values; a longer answer is written in a thread


@dataclass(frozen=True)
class GenerationRequest:
    """The request of an HTTP client: ``num_samples`` texts of each prompt (token ids).

    ``images``: those whose ids the prompts have.  ``keeps_tokens``: samples have tokens at their
    end, not only text; each takes much more memory than its text.  ``hidden``: tokens whose text is
    left out.  ``cache_salt``: only requests with the same one share pages of the KV cache.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    rules: TextRules
    num_samples: int = 1
    grammar: tuple[str, str] | None = None
    beam: BeamParams | None = None
    images: tuple[PromptImage, ...] = ()
    keeps_tokens: bool = True
    hidden: frozenset[int] = frozenset()
    cache_salt: str = ""
    adapter: str | None = None
    pooling: Pooling | None = None

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
    token_ids: list[int] = field(default_factory=list)  # also if tokens are not kept
    sum_log_prob: float = 0.0
    prompt_scores: tuple[TokenOutput, ...] = ()
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    num_cached: int = 0
    weight_version: int = 0
    beams: tuple[Beam, ...] = ()  # of a beam search, best first
    vector: str = ""

    @property
    def mean_log_prob(self) -> float:
        """Mean log-probability of its tokens."""
        return self.sum_log_prob / max(len(self.token_ids), 1)

    def add(self, output: RequestOutput, *, keeps_tokens: bool) -> TextDelta:
        """Add an output; return what is new."""
        self.timer.received(len(output.new))
        self.num_cached = max(self.num_cached, output.num_cached_prompt_tokens)
        self.weight_version = output.weight_version
        self.prompt_scores += output.prompt_scores
        self.beams = output.beams
        self.vector = output.vector
        delta = self.state.add(output)
        self.text += delta.text
        if keeps_tokens:
            self.tokens += delta.tokens
        self.token_ids += [placed.output.token for placed in delta.tokens]
        self.sum_log_prob += sum(placed.output.log_prob for placed in delta.tokens)
        self.finish_reason = delta.finish_reason
        self.stopped_by = delta.stopped_by
        return delta


class Generation:
    """Samples that the engine generates.  `start` it, and always `close` it."""

    def __init__(
        self, client: EngineClient, model: Model, metrics: Metrics, wanted: GenerationRequest
    ) -> None:
        """Raise ApiError for a request that is too long."""
        self._client = client
        self._metrics = metrics
        self._keeps_tokens = wanted.keeps_tokens
        for prompt in wanted.prompts:
            _check_length(prompt, wanted.params, model)
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
        self._call = Call()
        generation_id = uuid.uuid4().hex
        self._requests = {
            f"{generation_id}-{at}-{number}": _request(generation_id, at, number, wanted, model)
            for at in range(len(wanted.prompts))
            for number in range(wanted.num_samples)
        }
        self.samples = {
            request_id: Sample(
                generation_id,
                index,
                wanted.prompts[index // wanted.num_samples],
                SampleText(
                    partial(model.decode, hidden=wanted.hidden),
                    wanted.rules,
                    text_of(request.prompt),
                ),
                RequestTimer(metrics),
            )
            for index, (request_id, request) in enumerate(self._requests.items())
        }
        self._open = dict(self.samples)

    async def start(self) -> None:
        """Return when the engine has accepted all requests; raises otherwise."""
        if self._client.refuses_requests:
            headers = {"Retry-After": "5"}
            raise ApiError("generation is paused: POST /resume", status=503, headers=headers)
        for request_id, request in self._requests.items():
            self._client.calls[request_id] = self._call
            self._client.send("add", request=request_to_json(request))
            await self._client.flush()
        for _ in self._requests:
            if (error := await self._call.answers.get()) is not None:
                raise error
        self._metrics.prompt.inc(sum(len(sample.prompt) for sample in self.samples.values()))

    async def deltas(self) -> AsyncIterator[tuple[Sample, TextDelta]]:
        """Yield new text and tokens, sample by sample, until all have finished."""
        while self._open:
            output = await self._call.outputs.get()
            if isinstance(output, MegatronError):
                raise output
            sample = self._open.get(output.request_id)
            if sample is None:
                continue  # a stop string has ended it
            if output.error_param is not None:
                raise RequestError(output.error, output.error_param)
            if output.finish_reason == "error":
                raise ApiError(output.error, status=500)
            delta = sample.add(output, keeps_tokens=self._keeps_tokens)
            if delta.finish_reason is not None:
                is_done = output.finish_reason is not None
                self._end(output.request_id, delta.finish_reason, is_done=is_done)
            yield sample, delta
            # Without a pause for each output, a client that has left is not noticed.
            await asyncio.sleep(0)

    def close(self) -> None:
        """Abort the samples that have not finished."""
        for request_id in tuple(self._open):
            self._end(request_id, "abort")

    def _end(self, request_id: str, reason: FinishReason, *, is_done: bool = False) -> None:
        """Forget a sample; abort it if the engine is not done with it."""
        self._open.pop(request_id).timer.finished(reason)
        is_known = self._client.calls.pop(request_id, None) is not None
        if is_known and not is_done and self._client.failure is None:
            self._client.send("abort", id=request_id)


async def write(num_values: int, function: Callable[[], T]) -> T:
    """Return the result of ``function``, of a thread if there are many values."""
    return await asyncio.to_thread(function) if num_values > _LONG_ANSWER else function()


def _check_length(prompt: Sequence[int], params: SamplingParams, model: Model) -> None:
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
    if max(num_positions, len(prompt)) > longest:
        raise ApiError(
            f"This model's maximum context length is {longest} tokens; the prompt has "
            f"{len(prompt)} and {num_tokens} are to be generated: shorten the prompt or reduce "
            "max_tokens",
            "prompt" if len(prompt) >= longest else "max_tokens",
            code="context_length_exceeded",
        )


def _request(
    generation_id: str, at: int, number: int, wanted: GenerationRequest, model: Model
) -> Request:
    """Return the request for sample ``number`` of prompt ``at``."""
    params = wanted.params
    if params.seed is not None:  # each sample has its own
        params = replace(params, seed=(params.seed + number) % SEED_LIMIT)
    prompt = list(wanted.prompts[at])
    start = model.info.decoder_start
    return Request(
        f"{generation_id}-{at}-{number}",
        prompt if start is None else [start],
        params,
        source=[] if start is None else prompt,
        images=wanted.images,
        grammar=wanted.grammar,
        fork_of=f"{generation_id}-{at}-0" if number else None,  # whose pages it shares
        adapter=wanted.adapter,
        pooling=wanted.pooling,
        beam=wanted.beam,
        cache_salt=wanted.cache_salt,
    )


@dataclass(eq=False)
class Service:
    """The engine's connection, the model, and the counters.

    ``calls`` and ``reasoning``: how the model writes them in chats.
    """

    client: EngineClient
    model: Model
    metrics: Metrics
    template: ChatTemplate | None
    image_files: ImageFiles
    max_api_tokens: int
    calls: Markup = TOOL_PARSERS["hermes"]
    reasoning: Markup = REASONING_PARSERS[NONE]

    def __post_init__(self) -> None:
        self.adapters = dict(self.model.info.adapters)  # name -> folder, as they are loaded

    def close(self) -> None:
        """End the processes that work on requests."""
        self.model.close()
        if self.template is not None:
            self.template.close()

    async def samples(
        self,
        wanted: GenerationRequest,
        request: Any,
        take: Callable[[Sample, TextDelta], object] = lambda sample, delta: None,
    ) -> list[Sample]:
        """Generate all samples; call ``take`` for new text.

        Raises ClientGone if the client leaves before.
        """
        generation = Generation(self.client, self.model, self.metrics, wanted)

        async def work() -> list[Sample]:
            await generation.start()
            async for sample, delta in generation.deltas():
                take(sample, delta)
            return list(generation.samples.values())

        try:
            return await until_disconnect(request.receive, work())
        finally:
            generation.close()

    async def stream(
        self,
        wanted: GenerationRequest,
        request: Any,
        to_events: Callable[[Sample, TextDelta], Objects],
        last: Callable[[list[Sample]], Objects],
    ) -> EventStream:
        """Answer with events: the objects for new text, and those after the last sample."""
        generation = Generation(self.client, self.model, self.metrics, wanted)

        async def events() -> AsyncIterator[str]:
            try:
                async for sample, delta in generation.deltas():
                    # The first event may have the scores of a long prompt.
                    of_delta = partial(to_events, sample, delta)
                    for found in await write(len(sample.prompt_scores), of_delta):
                        yield event(found)
                for found in last(list(generation.samples.values())):
                    yield event(found)
            except MegatronError as error:
                yield event(as_api_error(error).body)
            yield DONE

        try:
            await until_disconnect(request.receive, generation.start())
        except BaseException:
            generation.close()
            raise
        return EventStream(events(), generation.close)

    def check_model(self, fields: Fields) -> str | None:
        """Return the adapter that a request names as its model; None: the model itself.

        Raises ApiError (404) for any other name.
        """
        name = fields.text("model", None)
        if name in self.adapters:
            return name
        if name is not None and name != self.model.info.model:
            served = " or ".join(map(repr, [self.model.info.model, *self.adapters][:8]))
            raise ApiError(
                f"model: {name[:80]!r} is not served here; the model is {served}",
                "model",
                status=404,
                code="model_not_found",
            )
        return None
