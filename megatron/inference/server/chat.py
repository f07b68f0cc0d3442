"""POST /v1/chat/completions: messages to a prompt, and text to messages and calls of tools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.core.inference.paged_engine.request import PromptImage
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.server.chat_fields import (
    Tools,
    grammar_of_tools,
    read_messages,
    read_response_format,
    read_tools,
)
from megatron.inference.server.chat_images import ImageLimits, prompt_of
from megatron.inference.server.endpoint import Service, json_answer
from megatron.inference.server.errors import ApiError
from megatron.inference.server.fields import Body, Fields, log_prob_of
from megatron.inference.server.generation import Sample, Wanted, usage_of, write
from megatron.inference.server.model import Model
from megatron.inference.server.sampling_fields import (
    MAX_LOG_PROBS,
    read_num_samples,
    read_params,
    read_rules,
    read_stream,
    with_log_probs,
)
from megatron.inference.server.tool_calls import ToolCallParser, call_object, read_call
from megatron.inference.text import PlacedToken, TextDelta

_BROKEN = "\ufffd"


@dataclass(frozen=True)
class ChatRequest:
    """A request whose fields have been checked."""

    wanted: Wanted
    tools: Tools
    num_top: int | None  # None: no log-probabilities
    is_stream: bool
    has_usage: bool


async def answer_chat(service: Service, request: Any, body: Body) -> Any:
    """Answer one request."""
    asked = await read_chat(service, body)
    started_at = int(time.time())
    model = service.model
    if not asked.is_stream:
        samples = await service.samples(asked.wanted, request)

        def written() -> Any:
            choices = [_choice(model, asked, sample) for sample in samples]
            usage = usage_of(samples, asked.wanted.num_samples)
            number = samples[0].generation_id
            return json_answer(_answer(model, number, started_at, choices, "", usage=usage))

        return await write(asked.wanted.num_values, written)
    generation = service.generation(asked.wanted)
    states = {sample.index: _Stream(asked) for sample in generation.samples.values()}

    def to_events(sample: Sample, delta: TextDelta) -> list[dict[str, Any]]:
        choices = states[sample.index].choices(model, sample, delta)
        return [_answer(model, generation.id, started_at, [c], ".chunk") for c in choices]

    def last(samples: list[Sample]) -> list[dict[str, Any]]:
        if not asked.has_usage:
            return []
        usage = usage_of(samples, asked.wanted.num_samples)
        return [_answer(model, generation.id, started_at, [], ".chunk", usage=usage)]

    return await service.stream(generation, request, to_events, last)


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
    is_stream, has_usage = read_stream(fields)
    num_samples = read_num_samples(fields)
    longest = model.info.max_sequence_length
    num_tokens = fields.integer("max_completion_tokens", None, 1, longest)
    num_tokens = fields.integer("max_tokens", num_tokens, 1, longest)
    is_plain = not fields.boolean("add_special_tokens", True)
    options = fields.sub_object("chat_template_kwargs")
    more = fields.get("chat_template_kwargs") if options is not None else {}
    params = read_params(fields, model, num_tokens or longest)
    params = _with_end_of_turn(
        with_log_probs(params, num_top if has_log_probs else None, None), model
    )
    rules = read_rules(fields, model, params)
    service.finish_reading(fields)
    text = await _render(service, messages, tools, more)
    limits = ImageLimits(longest, num_samples)
    prompt, images = await _read_prompt(service, text, urls, limits, is_plain=is_plain)
    if num_tokens is None:
        room = longest if model.info.decoder_start is not None else longest - len(prompt)
        params = replace(params, num_tokens_to_generate=max(room, 1))
    wanted = Wanted(
        [prompt],
        params,
        rules,
        num_samples,
        grammar,
        images=images,
        keeps_tokens=has_log_probs and not is_stream,
    )
    return ChatRequest(wanted, tools, num_top if has_log_probs else None, is_stream, has_usage)


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
    service: Service, text: str, urls: list[str], limits: ImageLimits, *, is_plain: bool
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
        prompt_of, model.image_prompts, rows, urls, service.image_files, limits
    )
    return model.with_one_bos(ids), images


def _with_end_of_turn(params: SamplingParams, model: Model) -> SamplingParams:
    """End a text also at the tokenizer's EOS, which in chat models ends a turn."""
    eos = model.tokenizer.id_of("eos")
    if eos is None or eos == model.info.eod or params.ignore_eos:
        return params
    return replace(params, stop_token_ids=(*params.stop_token_ids, eos))


def _choice(model: Model, asked: ChatRequest, sample: Sample) -> dict[str, Any]:
    content, calls = _content_and_calls(asked.tools, sample.text)
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    return {
        "index": sample.index,
        "message": message,
        "logprobs": _log_probs(model, asked, sample.tokens),
        "finish_reason": _reason(sample.finish_reason, bool(calls)),
        "stop_reason": sample.stopped_by,
        "weight_version": sample.weight_version,
    }


def _content_and_calls(tools: Tools, text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the content of a complete text, and the calls in it."""
    if tools.function is not None:
        return "", [call_object(tools.function, text)]
    if tools.is_required:
        call = read_call(text)
        return ("", [call]) if call is not None else (text, [])
    if not tools.are_parsed:
        return text, []
    content, calls = ToolCallParser().add(text, is_last=True)
    return (content.strip() if calls else content), calls if tools.many else calls[:1]


def _reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and reason == "stop" else reason


@dataclass
class _Stream:
    """What a stream has sent of one sample."""

    asked: ChatRequest
    is_begun: bool = False
    parser: ToolCallParser = field(default_factory=ToolCallParser)
    num_calls: int = 0

    def choices(self, model: Model, sample: Sample, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the choices to send, at most one with content and one for the end."""
        tools = self.asked.tools
        is_last = delta.finish_reason is not None
        content = delta.text
        calls: list[dict[str, Any]] = []
        if tools.is_call:
            content, calls = _content_and_calls(tools, sample.text) if is_last else ("", [])
        elif tools.are_parsed:
            content, calls = self.parser.add(delta.text, is_last=is_last)
            calls = calls if tools.many or self.num_calls == 0 else []
            calls = calls if tools.many else calls[:1]
        found: dict[str, Any] = {} if self.is_begun else {"role": "assistant", "content": ""}
        if content:
            found["content"] = content
        if calls:
            numbered = enumerate(calls, self.num_calls)
            found["tool_calls"] = [{"index": index, **call} for index, call in numbered]
            self.num_calls += len(calls)
        log_probs = _log_probs(model, self.asked, delta.tokens)
        out = []
        if found or (log_probs and log_probs["content"]):
            out.append(_chunk(sample, found, log_probs, None))
            self.is_begun = True
        if is_last:
            out.append(_chunk(sample, {}, None, _reason(delta.finish_reason, self.num_calls > 0)))
        return out


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


def _log_probs(
    model: Model, asked: ChatRequest, tokens: Sequence[PlacedToken]
) -> dict[str, Any] | None:
    if asked.num_top is None:
        return None
    entries = []
    for placed in tokens:
        entry = _log_prob(model, placed.output.token, placed.output.log_prob)
        top = placed.output.top[: asked.num_top]
        entries.append({**entry, "top_logprobs": [_log_prob(model, t, p) for t, p in top]})
    return {"content": entries, "refusal": None}


def _log_prob(model: Model, token: int, value: float) -> dict[str, Any]:
    text = model.token_text(token)
    is_text = _BROKEN not in text  # else a part of a character, whose bytes are unknown
    return {
        "token": text,
        "logprob": log_prob_of(value),
        "bytes": list(text.encode()) if is_text else None,
    }


def _answer(
    model: Model,
    number: str,
    started_at: int,
    choices: list[dict[str, Any]],
    suffix: str,
    **more: object,
) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{number}",
        "object": f"chat.completion{suffix}",
        "created": started_at,
        "model": model.info.model,
        "choices": choices,
        **more,
    }
