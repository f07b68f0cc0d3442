"""POST /v1/completions: OpenAI's fields, and vLLM's extensions to them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.inference.paged_engine.request import TokenOutput
from megatron.inference.server.endpoint import Service, json_answer
from megatron.inference.server.errors import ApiError
from megatron.inference.server.fields import Body, Fields, log_prob_of
from megatron.inference.server.generation import Sample, Wanted, usage_of, write
from megatron.inference.server.model import Model
from megatron.inference.server.sampling_fields import (
    MAX_LOG_PROBS,
    MAX_SAMPLES,
    read_num_samples,
    read_params,
    read_rules,
    read_stream,
    with_log_probs,
)
from megatron.inference.text import Detokenizer, PlacedToken, TextDelta

MAX_PROMPTS = 2048
MAX_ECHO = 10 << 20  # characters of prompts in one answer
_DEFAULT_TOKENS = 16


@dataclass(frozen=True)
class CompletionRequest:
    """A request whose fields have been checked."""

    wanted: Wanted
    num_returned: int  # samples of each prompt
    texts: list[str]  # of the prompts, for ``has_echo``
    num_log_probs: int | None
    num_prompt_log_probs: int | None
    has_echo: bool
    is_stream: bool
    has_usage: bool


async def answer_completion(service: Service, request: Any, body: Body) -> Any:
    """Answer one request."""
    asked = await read_completion(service, body)
    started_at = int(time.time())
    model = service.model
    if not asked.is_stream:
        samples = _best(await service.samples(asked.wanted, request), asked)

        def written() -> Any:
            choices = [choice_of(model, asked, sample, _all_of(sample)) for sample in samples]
            for index, choice in enumerate(choices):
                choice["index"] = index
            usage = usage_of(samples, asked.num_returned)
            number = samples[0].generation_id
            return json_answer(_answer(model, number, started_at, choices, usage=usage))

        return await write(asked.wanted.num_values, written)
    generation = service.generation(asked.wanted)
    begun: set[int] = set()  # samples whose prompt has been sent

    def to_events(sample: Sample, delta: TextDelta) -> list[dict[str, Any]]:
        choice = choice_of(model, asked, sample, delta, is_first=sample.index not in begun)
        begun.add(sample.index)
        if not (delta.text or delta.finish_reason or choice["text"] or choice["logprobs"]):
            return []
        return [_answer(model, generation.id, started_at, [choice])]

    def last(samples: list[Sample]) -> list[dict[str, Any]]:
        if not asked.has_usage:
            return []
        usage = usage_of(samples, asked.num_returned)
        return [_answer(model, generation.id, started_at, [], usage=usage)]

    return await service.stream(generation, request, to_events, last)


async def read_completion(service: Service, body: Body) -> CompletionRequest:
    """Check the fields of a request.  Raises ApiError."""
    fields = Fields(body)
    model = service.model
    service.check_model(fields)
    has_echo = fields.boolean("echo")
    is_plain = not fields.boolean("add_special_tokens", True)
    prompts, texts = await read_prompts(fields, model, has_texts=has_echo, is_plain=is_plain)
    num_log_probs = fields.integer("logprobs", None, 0, MAX_LOG_PROBS)
    prompt_log_probs = fields.integer("prompt_logprobs", None, 0, MAX_LOG_PROBS)
    is_scoring = has_echo or prompt_log_probs is not None
    num_tokens = fields.integer(
        "max_tokens", _DEFAULT_TOKENS, 0 if is_scoring else 1, model.info.max_sequence_length
    )
    of_prompt = num_log_probs if has_echo and prompt_log_probs is None else prompt_log_probs
    params = with_log_probs(read_params(fields, model, num_tokens), num_log_probs, of_prompt)
    rules = read_rules(fields, model, params)
    num_returned = read_num_samples(fields)
    best_of = fields.integer("best_of", num_returned, num_returned, MAX_SAMPLES)
    is_stream, has_usage = read_stream(fields)
    if is_stream and best_of > num_returned:
        raise ApiError("best_of: cannot be streamed; leave it out or stream", "best_of")
    if fields.get("suffix"):
        raise ApiError("suffix: this model writes no text before another; leave it out", "suffix")
    if len(prompts) * best_of > MAX_PROMPTS:
        raise ApiError(f"n: {MAX_PROMPTS} samples at most, over all prompts", "n")
    num_echoed = best_of * sum(map(len, texts))
    if num_echoed > MAX_ECHO:
        raise ApiError(
            f"echo: the answer would repeat {num_echoed} characters of prompts, at most "
            f"{MAX_ECHO}: reduce the prompts or n",
            "echo",
        )
    service.finish_reading(fields)
    return CompletionRequest(
        wanted=Wanted(
            prompts,
            params,
            rules,
            best_of,
            keeps_tokens=num_log_probs is not None and not is_stream,
        ),
        num_returned=num_returned,
        texts=texts,
        num_log_probs=num_log_probs,
        num_prompt_log_probs=prompt_log_probs,
        has_echo=has_echo,
        is_stream=is_stream,
        has_usage=has_usage,
    )


async def read_prompts(
    fields: Fields, model: Model, *, has_texts: bool, is_plain: bool = False
) -> tuple[list[list[int]], list[str]]:
    """Read ``prompt``: a text, texts, token ids or lists of them; return ids, and texts if wanted.

    Everything that is too long is refused before anything is tokenized.
    """
    value = fields.get("prompt")
    is_ids = isinstance(value, list) and value and isinstance(value[0], int)
    many = value if isinstance(value, list) and not is_ids else [value]
    if not many or len(many) > MAX_PROMPTS:
        raise ApiError(f"prompt: give 1 to {MAX_PROMPTS} prompts", "prompt")
    longest = model.info.max_sequence_length
    for item in many:
        if isinstance(item, str):
            model.check_characters(item, "prompt")
        elif isinstance(item, list):
            fields.token_ids("prompt", item, model.info.vocab_size, longest)
        else:
            raise ApiError(
                "prompt: give a text, a list of texts, token ids, or a list of lists of token ids",
                "prompt",
            )
    given = [item for item in many if isinstance(item, str)]
    tokenized = iter(await model.tokenize(given, is_plain=is_plain))
    prompts = [next(tokenized) if isinstance(item, str) else item for item in many]
    if not has_texts:
        return prompts, []
    decoded = iter(await model.decode_all([item for item in many if isinstance(item, list)]))
    return prompts, [item if isinstance(item, str) else next(decoded) for item in many]


def choice_of(
    model: Model,
    asked: CompletionRequest,
    sample: Sample,
    delta: TextDelta,
    *,
    is_first: bool = True,
) -> dict[str, Any]:
    """Return the choice for what is new of a sample; the prompt comes with the first."""
    prompt_text = asked.texts[sample.index // asked.wanted.num_samples] if asked.has_echo else ""
    has_prompt = asked.has_echo and is_first
    table = LogProbTable(model, asked.num_log_probs or 0)
    if asked.num_log_probs is not None:
        if has_prompt:
            table.add_prompt(sample.prompt, sample.prompt_scores)
        table.add(delta.tokens, len(prompt_text))
    choice: dict[str, Any] = {
        "index": sample.index,
        "text": (prompt_text if has_prompt else "") + delta.text,
        "logprobs": table.columns() if table.tokens else None,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stopped_by,
        "weight_version": sample.weight_version,
    }
    if asked.num_prompt_log_probs is not None and is_first:
        choice["prompt_logprobs"] = _prompt_table(model, sample, asked.num_prompt_log_probs)
    return choice


@dataclass
class LogProbTable:
    """OpenAI's ``logprobs`` of a completion: one entry a token in each column."""

    model: Model
    num_top: int
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add_prompt(self, prompt: Sequence[int], scores: Sequence[TokenOutput]) -> None:
        """Add the prompt's tokens; its first one has no log-probability."""
        detokenizer = Detokenizer(self.model.decode)
        offset = 0
        for index, token in enumerate(prompt):
            score = scores[index - 1] if 0 < index <= len(scores) else None
            self._add(token, score, offset)
            offset += len(detokenizer.add(token))

    def add(self, tokens: Sequence[PlacedToken], first_offset: int) -> None:
        """Add generated tokens, whose text begins at ``first_offset``."""
        for placed in tokens:
            self._add(placed.output.token, placed.output, first_offset + placed.offset)

    def columns(self) -> dict[str, Any]:
        """Return the table as a JSON object."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs if self.num_top else None,
            "text_offset": self.text_offset,
        }

    def _add(self, token: int, score: TokenOutput | None, offset: int) -> None:
        text = self.model.token_text(token)
        self.tokens.append(text)
        self.text_offset.append(offset)
        if score is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(log_prob_of(score.log_prob))
        top: dict[str, float] = {}
        for other, value in score.top[: self.num_top]:
            top.setdefault(self.model.token_text(other), log_prob_of(value))
        # Even if it is not among the most likely; other tokens may have the same text.
        top.setdefault(text, log_prob_of(score.log_prob))
        self.top_logprobs.append(top)


def _prompt_table(model: Model, sample: Sample, num_top: int) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: for each token of the prompt, id -> log-probability."""
    table: list[dict[str, Any] | None] = [None]
    for score in sample.prompt_scores:
        found = {**dict(score.top[:num_top]), score.token: score.log_prob}
        table.append(
            {
                str(token): {"logprob": log_prob_of(p), "decoded_token": model.token_text(token)}
                for token, p in found.items()
            }
        )
    return table


def _all_of(sample: Sample) -> TextDelta:
    return TextDelta(sample.text, tuple(sample.tokens), sample.finish_reason, sample.stopped_by)


def _best(samples: list[Sample], asked: CompletionRequest) -> list[Sample]:
    """Return for each prompt the samples with the highest mean log-probability (``best_of``)."""
    made = asked.wanted.num_samples
    kept = asked.num_returned
    if made == kept:
        return samples
    groups = [samples[at : at + made] for at in range(0, len(samples), made)]
    ordered = [sorted(group, key=lambda s: -s.mean_log_prob) for group in groups]
    return [sample for group in ordered for sample in group[:kept]]


def _answer(
    model: Model, number: str, started_at: int, choices: list[dict[str, Any]], **more: object
) -> dict[str, Any]:
    return {
        "id": f"cmpl-{number}",
        "object": "text_completion",
        "created": started_at,
        "model": model.info.model,
        "choices": choices,
        **more,
    }
