"""POST /v1/completions and /v1/chat/completions: OpenAI's fields, and vLLM's extensions to them.

Both read a request (`read_completion`, `read_chat`) and answer in the same way: complete, or as a
stream of chunks (`answer`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from megatron.core.inference.paged_engine.request import PromptImage, TokenOutput
from megatron.inference.server.chat_images import prompt_of
from megatron.inference.server.fields import ApiError, Body, Fields, log_prob_of
from megatron.inference.server.generation import (
    GenerationRequest,
    Sample,
    Service,
    usage_of,
    write,
)
from megatron.inference.server.http import json_answer
from megatron.inference.server.model import Model
from megatron.inference.server.openai_fields import (
    MAX_LOG_PROBS,
    MAX_SAMPLES,
    ToolCallParser,
    Tools,
    call_object,
    grammar_of_tools,
    read_call,
    read_messages,
    read_params,
    read_response_format,
    read_rules,
    read_stream,
    read_tools,
    with_log_probs,
)
from megatron.inference.text import Detokenizer, PlacedToken, TextDelta

MAX_PROMPTS = 2048
MAX_ECHO = 10 << 20  # characters of prompts in one answer
_DEFAULT_TOKENS = 16
_BROKEN = "\ufffd"


@dataclass(frozen=True, kw_only=True)
class _OpenAIRequest:
    """A request whose fields have been checked, and the state of its stream."""

    id_prefix: ClassVar[str]
    kinds: ClassVar[tuple[str, str]]  # of a complete answer, and of a chunk
    model: Model
    generation: GenerationRequest
    num_returned: int  # samples of each prompt
    num_log_probs: int | None  # likely tokens of each token; None: no log-probabilities
    is_stream: bool
    has_usage: bool

    def choice(self, sample: Sample) -> dict[str, Any]:
        """Return the choice of a complete sample."""
        raise NotImplementedError

    def chunks(self, sample: Sample, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the choices to send when a stream has ``delta``."""
        raise NotImplementedError

    def best(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples of each prompt with the highest mean log-probability (``best_of``)."""
        made = self.generation.num_samples
        if made == self.num_returned:
            return samples
        groups = [samples[at : at + made] for at in range(0, len(samples), made)]
        ordered = [sorted(group, key=lambda s: -s.mean_log_prob) for group in groups]
        return [sample for group in ordered for sample in group[: self.num_returned]]


async def answer(
    read: Callable[[Service, Body], Awaitable[_OpenAIRequest]],
    service: Service,
    request: Any,
    body: Body,
) -> Any:
    """Answer the request that ``read`` returns with one object, or with a stream of them."""
    asked = await read(service, body)
    started_at = int(time.time())

    def object_of(number: str, choices: list[dict[str, Any]], **more: object) -> dict[str, Any]:
        return {
            "id": f"{asked.id_prefix}-{number}",
            "object": asked.kinds[asked.is_stream],
            "created": started_at,
            "model": service.model.info.model,
            "choices": choices,
            **more,
        }

    if not asked.is_stream:
        samples = asked.best(await service.samples(asked.generation, request))

        def written() -> Any:
            choices = [{**asked.choice(s), "index": i} for i, s in enumerate(samples)]
            usage = usage_of(samples, asked.num_returned)
            return json_answer(object_of(samples[0].generation_id, choices, usage=usage))

        return await write(asked.generation.num_values, written)
    generation = service.generation(asked.generation)

    def to_events(sample: Sample, delta: TextDelta) -> list[dict[str, Any]]:
        return [object_of(generation.id, [choice]) for choice in asked.chunks(sample, delta)]

    def last(samples: list[Sample]) -> list[dict[str, Any]]:
        usage = usage_of(samples, asked.num_returned)
        return [object_of(generation.id, [], usage=usage)] if asked.has_usage else []

    return await service.stream(generation, request, to_events, last)


# ---- completions -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(_OpenAIRequest):
    """A request of /v1/completions.  ``texts``: of the prompts, for ``has_echo``."""

    id_prefix = "cmpl"
    kinds = ("text_completion", "text_completion")
    texts: list[str]
    num_prompt_log_probs: int | None
    has_echo: bool
    begun: set[int] = field(default_factory=set)  # samples whose prompt a stream has sent

    def choice(self, sample: Sample) -> dict[str, Any]:
        """Return the choice of a complete sample."""
        tokens = tuple(sample.tokens)
        delta = TextDelta(sample.text, tokens, sample.finish_reason, sample.stopped_by)
        return self._choice(sample, delta, is_first=True)

    def chunks(self, sample: Sample, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the choice for ``delta``, or none if it has nothing to send."""
        choice = self._choice(sample, delta, is_first=sample.index not in self.begun)
        self.begun.add(sample.index)
        has_news = delta.text or delta.finish_reason or choice["text"] or choice["logprobs"]
        return [choice] if has_news else []

    def _choice(self, sample: Sample, delta: TextDelta, *, is_first: bool) -> dict[str, Any]:
        """Return the choice for ``delta``; the prompt comes with the first one of a sample."""
        text = self.texts[sample.index // self.generation.num_samples] if self.has_echo else ""
        has_prompt = self.has_echo and is_first
        table = LogProbTable(self.model, self.num_log_probs or 0)
        if self.num_log_probs is not None:
            if has_prompt:
                table.add_prompt(sample.prompt, sample.prompt_scores)
            table.add(delta.tokens, len(text))
        choice: dict[str, Any] = {
            "index": sample.index,
            "text": (text if has_prompt else "") + delta.text,
            "logprobs": table.columns() if table.tokens else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stopped_by,
            "weight_version": sample.weight_version,
        }
        if self.num_prompt_log_probs is not None and is_first:
            choice["prompt_logprobs"] = self._prompt_table(sample, self.num_prompt_log_probs)
        return choice

    def _prompt_table(self, sample: Sample, num_top: int) -> list[dict[str, Any] | None]:
        """Return vLLM's ``prompt_logprobs``: of each token of the prompt, id -> log-probability."""
        table: list[dict[str, Any] | None] = [None]
        for score in sample.prompt_scores:
            found = {**dict(score.top[:num_top]), score.token: score.log_prob}
            table.append(
                {
                    str(t): {"logprob": log_prob_of(p), "decoded_token": self.model.token_text(t)}
                    for t, p in found.items()
                }
            )
        return table


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
    num_returned = fields.integer("n", 1, 1, MAX_SAMPLES)
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
    keeps_tokens = num_log_probs is not None and not is_stream
    return CompletionRequest(
        model=model,
        generation=GenerationRequest(prompts, params, rules, best_of, keeps_tokens=keeps_tokens),
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


# ---- chat --------------------------------------------------------------------------------------


@dataclass
class _Sent:
    """Parts of one sample that a stream has sent."""

    is_begun: bool = False
    parser: ToolCallParser = field(default_factory=ToolCallParser)
    num_calls: int = 0


@dataclass(frozen=True, kw_only=True)
class ChatRequest(_OpenAIRequest):
    """A request of /v1/chat/completions: text to messages and calls of tools."""

    id_prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")
    tools: Tools
    sent: dict[int, _Sent] = field(default_factory=dict)  # by index of the sample

    def choice(self, sample: Sample) -> dict[str, Any]:
        """Return the choice of a complete sample."""
        content, calls = self._content_and_calls(sample.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if calls else ""),
        }
        if calls:
            message["tool_calls"] = calls
        return {
            "index": sample.index,
            "message": message,
            "logprobs": self._log_probs(sample.tokens),
            "finish_reason": _reason(sample.finish_reason, bool(calls)),
            "stop_reason": sample.stopped_by,
            "weight_version": sample.weight_version,
        }

    def chunks(self, sample: Sample, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the choices to send, at most one with content and one for the end."""
        sent = self.sent.setdefault(sample.index, _Sent())
        is_last = delta.finish_reason is not None
        content = delta.text
        calls: list[dict[str, Any]] = []
        if self.tools.is_call:
            content, calls = self._content_and_calls(sample.text) if is_last else ("", [])
        elif self.tools.are_parsed:
            content, calls = sent.parser.add(delta.text, is_last=is_last)
            if not self.tools.many:
                calls = [] if sent.num_calls else calls[:1]
        found: dict[str, Any] = {} if sent.is_begun else {"role": "assistant", "content": ""}
        if content:
            found["content"] = content
        if calls:
            numbered = enumerate(calls, sent.num_calls)
            found["tool_calls"] = [{"index": index, **call} for index, call in numbered]
            sent.num_calls += len(calls)
        log_probs = self._log_probs(delta.tokens)
        out = []
        if found or (log_probs and log_probs["content"]):
            out.append(_chunk(sample, found, log_probs, None))
            sent.is_begun = True
        if is_last:
            out.append(_chunk(sample, {}, None, _reason(delta.finish_reason, sent.num_calls > 0)))
        return out

    def _content_and_calls(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the content of a complete text, and the calls in it."""
        tools = self.tools
        if tools.function is not None:
            return "", [call_object(tools.function, text)]
        if tools.is_required:
            call = read_call(text)
            return ("", [call]) if call is not None else (text, [])
        if not tools.are_parsed:
            return text, []
        content, calls = ToolCallParser().add(text, is_last=True)
        return (content.strip() if calls else content), calls if tools.many else calls[:1]

    def _log_probs(self, tokens: Sequence[PlacedToken]) -> dict[str, Any] | None:
        if self.num_log_probs is None:
            return None
        entries = []
        for placed in tokens:
            entry = self._log_prob(placed.output.token, placed.output.log_prob)
            top = placed.output.top[: self.num_log_probs]
            entries.append({**entry, "top_logprobs": [self._log_prob(t, p) for t, p in top]})
        return {"content": entries, "refusal": None}

    def _log_prob(self, token: int, value: float) -> dict[str, Any]:
        text = self.model.token_text(token)
        is_text = _BROKEN not in text  # else a part of a character, whose bytes are unknown
        return {
            "token": text,
            "logprob": log_prob_of(value),
            "bytes": list(text.encode()) if is_text else None,
        }


def _reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and reason == "stop" else reason


def _chunk(
    sample: Sample, delta: dict[str, Any], log_probs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    return {
        "index": sample.index,
        "delta": delta,
        "logprobs": log_probs,
        "finish_reason": reason,
        "weight_version": sample.weight_version,
    }


async def read_chat(service: Service, body: Body) -> ChatRequest:
    """Check the fields of a request and render its prompt.  Raises ApiError."""
    fields = Fields(body)
    model = service.model
    service.check_model(fields)
    messages, urls = read_messages(fields, model)
    tools = read_tools(fields, model)
    grammar = read_response_format(fields, model) or grammar_of_tools(tools)
    has_log_probs = fields.boolean("logprobs")
    num_top = fields.integer("top_logprobs", 0, 0, MAX_LOG_PROBS)
    if num_top and not has_log_probs:
        raise ApiError("top_logprobs: only with logprobs: true", "top_logprobs")
    num_log_probs = num_top if has_log_probs else None
    is_stream, has_usage = read_stream(fields)
    num_samples = fields.integer("n", 1, 1, MAX_SAMPLES)
    longest = model.info.max_sequence_length
    num_tokens = fields.integer("max_completion_tokens", None, 1, longest)
    num_tokens = fields.integer("max_tokens", num_tokens, 1, longest)
    is_plain = not fields.boolean("add_special_tokens", True)
    options = fields.sub_object("chat_template_kwargs")
    more = fields.get("chat_template_kwargs") if options is not None else {}
    params = with_log_probs(read_params(fields, model, num_tokens or longest), num_log_probs, None)
    eos = model.tokenizer.id_of("eos")  # in chat models it ends a turn
    if eos not in (None, model.info.eod) and not params.ignore_eos:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, eos))
    rules = read_rules(fields, model, params)
    service.finish_reading(fields)
    text = await _render(service, messages, tools, more)
    prompt, images = await _read_prompt(service, text, urls, num_samples, is_plain=is_plain)
    if num_tokens is None:
        room = longest if model.info.decoder_start is not None else longest - len(prompt)
        params = replace(params, num_tokens_to_generate=max(room, 1))
    generation = GenerationRequest(
        [prompt],
        params,
        rules,
        num_samples,
        grammar,
        images=images,
        keeps_tokens=has_log_probs and not is_stream,
    )
    return ChatRequest(
        model=model,
        generation=generation,
        num_returned=num_samples,
        tools=tools,
        num_log_probs=num_log_probs,
        is_stream=is_stream,
        has_usage=has_usage,
    )


async def _render(
    service: Service, messages: list[dict[str, Any]], tools: Tools, more: dict[str, Any]
) -> str:
    if service.template is None:
        raise ApiError(
            "messages: the tokenizer of this model has no chat template; start the server with "
            "--chat-template FILE, or use /v1/completions",
            "messages",
            code="no_chat_template",
        )
    variables = {
        "add_generation_prompt": True,
        **more,
        "messages": service.model.turns(messages),
        "tools": tools.given or None,
    }
    return await service.template.render(variables)


async def _read_prompt(
    service: Service, text: str, urls: list[str], num_samples: int, *, is_plain: bool
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return the ids of a rendered prompt, and its images."""
    model = service.model
    model.check_characters(text, "messages")
    if model.image_prompts is None:
        (ids,) = await model.tokenize([text], "messages", is_plain=is_plain)
        return model.with_one_bos(ids), ()
    # As the methods of ImagePrompts do, but long texts in another process.
    first, *others = model.image_prompts.texts_of(text)
    is_plain = is_plain or model.image_prompts.is_conversation
    rows = await model.tokenize([first], "messages", is_plain=is_plain) if first else [[]]
    rows += await model.tokenize(others, "messages", is_plain=True)
    ids, images = await asyncio.to_thread(
        prompt_of,
        model.image_prompts,
        rows,
        urls,
        service.image_files,
        max_rows=model.info.max_sequence_length,
        num_samples=num_samples,
    )
    return model.with_one_bos(ids), images
