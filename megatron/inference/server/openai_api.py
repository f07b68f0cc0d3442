"""POST /v1/completions and /v1/chat/completions: OpenAI's fields, and vLLM's extensions to them."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, TypeAlias

from megatron.core.chat_templates import open_last_message
from megatron.core.inference.paged_engine.request import PromptImage, TokenOutput
from megatron.inference.server.chat_formats import (
    CALL,
    NONE,
    REASONING,
    REASONING_PARSERS,
    ChatParser,
    Markup,
    Part,
    markup_of_choice,
    parser_of,
)
from megatron.inference.server.chat_images import prompt_of
from megatron.inference.server.fields import ApiError, Body, Fields, log_prob_of
from megatron.inference.server.generation import GenerationRequest, Objects, Sample, Service, write
from megatron.inference.server.http import json_answer
from megatron.inference.server.model import Model
from megatron.inference.server.openai_fields import (
    MAX_LOG_PROBS,
    MAX_SAMPLES,
    grammar_of_tools,
    read_grammar,
    read_messages,
    read_params,
    read_rules,
    read_tools,
)
from megatron.inference.text import Detokenizer, PlacedToken, TextDelta

MAX_PROMPTS = 2048
MAX_ECHO = 10 << 20  # characters of prompts in one answer
_BROKEN = "\ufffd"
# Fields of OpenAI's API that concern its accounts and hosts.
WITHOUT_EFFECT = (
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
# Token, its score if it has one, and the number of characters before it.
Entry: TypeAlias = tuple[int, TokenOutput | None, int]


class _OpenAIRequest(ABC):
    """A request whose fields have been checked, and the state of its stream."""

    id_prefix: str
    kinds: tuple[str, str]  # of a complete answer, and of a chunk
    generation: GenerationRequest
    num_log_probs: int | None  # likely tokens of each token; None: no log-probabilities
    has_ids = False  # ids of tokens in the answer

    def __init__(self, service: Service, body: Body) -> None:
        """Read the fields that all requests have.  Raises ApiError."""
        self.service = service
        self.model = service.model
        self.started_at = int(time.time())
        self.fields = fields = Fields(body)
        self.adapter = service.check_model(fields)
        self.is_plain = not fields.boolean("add_special_tokens", True)
        self.num_returned = fields.integer("n", 1, 1, MAX_SAMPLES)  # samples of each prompt
        self.is_stream = fields.boolean("stream")
        self.has_usage = False  # in the last event of a stream
        options = fields.sub_object("stream_options")
        if options is not None:
            if not self.is_stream:
                raise ApiError("stream_options: only with stream: true", "stream_options")
            self.has_usage = options.boolean("include_usage")
            options.refuse_others()
        self.has_ids = fields.boolean("return_token_ids")
        self.skips_special = fields.boolean("skip_special_tokens")
        self.cache_salt = fields.text("cache_salt", "")
        # Number of tokens that stay; -1: as many as the model can read.
        longest = self.model.info.max_sequence_length
        self.num_kept = fields.integer("truncate_prompt_tokens", None, -1, longest)
        if self.num_kept == 0:
            raise fields.fail("truncate_prompt_tokens", "give -1, or 1 and more")
        self.num_prompt_log_probs = fields.integer("prompt_logprobs", None, 0, MAX_LOG_PROBS)

    def truncated(self, prompt: list[int], num_new: int) -> list[int]:
        """Return the last tokens of a prompt, as ``truncate_prompt_tokens`` asks."""
        if self.num_kept is None:
            return prompt
        longest = self.model.info.max_sequence_length
        return prompt[-(self.num_kept if self.num_kept > 0 else max(longest - num_new, 1)) :]

    def prompt_fields(self, sample: Sample) -> dict[str, Any]:
        """Return the fields about the prompt, which come with the first event of a sample."""
        found: dict[str, Any] = {}
        if self.num_prompt_log_probs is not None:
            found["prompt_logprobs"] = self._prompt_table(sample, self.num_prompt_log_probs)
        if self.has_ids:
            found["prompt_token_ids"] = sample.prompt
        return found

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

    @abstractmethod
    async def read(self) -> None:
        """Read the other fields, and set ``generation``.  Raises ApiError."""

    def choice(self, sample: Sample) -> dict[str, Any]:
        """Return the choice of a complete sample."""
        tokens = tuple(sample.tokens)
        delta = TextDelta(sample.text, tokens, sample.finish_reason, sample.stopped_by)
        choice = self.chunks(sample, delta)[0]
        return {**choice, "token_ids": sample.token_ids} if self.has_ids else choice

    def events(self, sample: Sample, delta: TextDelta) -> Objects:
        """Return the objects to send when a stream has ``delta``."""
        return [
            self._object(sample, [found], **self.about_answer(sample))
            for found in self.chunks(sample, delta)
        ]

    def last_events(self, samples: list[Sample]) -> Objects:
        """Return the objects after the last sample of a stream."""
        usage = self.usage(samples)
        return [self._object(samples[0], [], usage=usage)] if self.has_usage else []

    def complete_object(self, samples: list[Sample]) -> dict[str, Any]:
        """Return the answer that is no stream."""
        choices = [{**self.choice(s), "index": i} for i, s in enumerate(samples)]
        more = self.about_answer(samples[0])
        return self._object(samples[0], choices, usage=self.usage(samples), **more)

    def _object(self, sample: Sample, choices: Objects, **more: object) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{sample.generation_id}",
            "object": self.kinds[self.is_stream],
            "created": self.started_at,
            "model": self.adapter or self.model.info.model,
            "choices": choices,
            **more,
        }

    def about_answer(self, sample: Sample) -> dict[str, Any]:
        """Return further fields of the object around the choices."""
        return {}

    def take(self, sample: Sample, delta: TextDelta) -> object:
        """Add new text of a sample to an answer that is no stream."""
        return None

    @abstractmethod
    def chunks(self, sample: Sample, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the choices to send when a stream has ``delta``."""

    def best(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples of each prompt with the highest mean log-probability (``best_of``)."""
        made = self.generation.num_samples
        if made == self.num_returned:
            return samples
        best = []
        for at in range(0, len(samples), made):
            ordered = sorted(samples[at : at + made], key=lambda sample: -sample.mean_log_prob)
            best += ordered[: self.num_returned]
        return best

    def usage(self, samples: list[Sample]) -> dict[str, object]:
        """Return OpenAI's ``usage``: a prompt counts once for all its samples."""
        prompts = samples[:: self.num_returned]
        num_prompt = sum(len(sample.prompt) for sample in prompts)
        num_new = sum(sample.state.num_tokens for sample in samples)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": sum(s.num_cached for s in prompts)},
        }


async def answer(kind: type[_OpenAIRequest], service: Service, request: Any, body: Body) -> Any:
    """Answer a request with one object, or with a stream of them."""
    asked = kind(service, body)
    await asked.read()
    asked.generation = replace(asked.generation, adapter=asked.adapter)
    if asked.is_stream:
        return await service.stream(asked.generation, request, asked.events, asked.last_events)
    samples = asked.best(await service.samples(asked.generation, request, asked.take))
    return await write(
        asked.generation.num_values, lambda: json_answer(asked.complete_object(samples))
    )


class CompletionRequest(_OpenAIRequest):
    """POST /v1/completions: texts -> their continuations."""

    id_prefix = "cmpl"
    kinds = ("text_completion", "text_completion")

    async def read(self) -> None:
        """Read the other fields, and set ``generation``.  Raises ApiError."""
        fields = self.fields
        model = self.model
        self.begun: set[int] = set()  # samples whose prompt has been sent
        self.has_echo = fields.boolean("echo")
        prompts, self.texts = await read_prompts(
            fields,
            model,
            has_texts=self.has_echo,
            is_plain=self.is_plain,
            is_cut=self.num_kept is not None,
        )
        self.num_log_probs = fields.integer("logprobs", None, 0, MAX_LOG_PROBS)
        of_prompt = self.num_prompt_log_probs
        least = 0 if self.has_echo or of_prompt is not None else 1
        num_tokens = fields.integer("max_tokens", 16, least, model.info.max_sequence_length)
        if self.has_echo and of_prompt is None:
            of_prompt = self.num_log_probs
        params = await read_params(fields, model, num_tokens, self.num_log_probs, of_prompt)
        rules = read_rules(fields, model, params)
        grammar = read_grammar(fields, model)
        best_of = fields.integer("best_of", self.num_returned, self.num_returned, MAX_SAMPLES)
        if self.is_stream and best_of > self.num_returned:
            raise ApiError("best_of: cannot be streamed; leave it out or stream", "best_of")
        if fields.get("suffix"):
            raise ApiError("suffix: the model only continues a text; leave it out", "suffix")
        if len(prompts) * best_of > MAX_PROMPTS:
            raise ApiError(f"n: {MAX_PROMPTS} samples at most, over all prompts", "n")
        num_echoed = best_of * sum(map(len, self.texts))
        if num_echoed > MAX_ECHO:
            raise ApiError(
                f"echo: the answer would repeat {num_echoed} characters of prompts, at most "
                f"{MAX_ECHO}: reduce the prompts or n",
                "echo",
            )
        fields.refuse_others(WITHOUT_EFFECT)
        keeps = self.num_log_probs is not None and not self.is_stream
        if self.has_echo and self.num_kept is not None:
            raise ApiError("echo: a prompt that is truncated is not repeated; leave it out", "echo")
        self.generation = GenerationRequest(
            [self.truncated(prompt, num_tokens) for prompt in prompts],
            params,
            rules,
            best_of,
            grammar,
            keeps_tokens=keeps,
            hidden=model.special_ids(()) if self.skips_special else frozenset(),
            cache_salt=self.cache_salt,
        )

    def chunks(self, sample: Sample, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the choice for ``delta``; the prompt comes with the first one of a sample."""
        is_first = sample.index not in self.begun
        self.begun.add(sample.index)
        text = self.texts[sample.index // self.generation.num_samples] if self.has_echo else ""
        has_prompt = self.has_echo and is_first
        log_probs = None
        if self.num_log_probs is not None:
            entries = self._prompt_entries(sample) if has_prompt else []
            entries += [(p.output.token, p.output, len(text) + p.offset) for p in delta.tokens]
            log_probs = log_prob_table(self.model, entries, self.num_log_probs)
        choice = choice_of(
            sample,
            log_probs,
            delta.finish_reason,
            text=(text if has_prompt else "") + delta.text,
            stop_reason=delta.stopped_by,
        )
        about_prompt = self.prompt_fields(sample) if is_first else {}
        choice |= about_prompt
        if self.has_ids:
            choice["token_ids"] = [placed.output.token for placed in delta.tokens]
        has_news = choice["text"] or log_probs or about_prompt or choice.get("token_ids")
        return [choice] if delta.finish_reason or has_news else []

    def _prompt_entries(self, sample: Sample) -> list[Entry]:
        """Return the prompt's tokens; its first one has no log-probability."""
        detokenizer = Detokenizer(self.model.decode)
        entries: list[Entry] = []
        offset = 0
        for token, score in zip_longest(sample.prompt, (None, *sample.prompt_scores)):
            entries.append((token, score, offset))
            offset += len(detokenizer.add(token))
        return entries


async def read_prompts(
    fields: Fields,
    model: Model,
    *,
    name: str = "prompt",
    has_texts: bool,
    is_plain: bool = False,
    is_cut: bool = False,
) -> tuple[list[list[int]], list[str]]:
    """Read ``name``: a text, texts, token ids or lists of them; return ids, and texts if wanted.

    Everything that is too long is refused before anything is tokenized, unless it ``is_cut`` later.
    """
    value = fields.get(name)
    is_ids = isinstance(value, list) and value and isinstance(value[0], int)
    many = value if isinstance(value, list) and not is_ids else [value]
    if not many or len(many) > MAX_PROMPTS:
        raise ApiError(f"{name}: give 1 to {MAX_PROMPTS} prompts", name)
    longest = model.info.max_sequence_length
    for item in many:
        if isinstance(item, str):
            if not is_cut:
                model.check_characters(item, name)
        elif isinstance(item, list):
            fields.token_ids(name, item, model.info.vocab_size, longest)
        else:
            raise ApiError(
                f"{name}: give a text, a list of texts, token ids, or a list of lists of token ids",
                name,
            )
    given = [item for item in many if isinstance(item, str)]
    prompts = _replaced(many, str, await model.tokenize(given, name, is_plain=is_plain))
    if not has_texts:
        return prompts, []
    ids = [item for item in many if isinstance(item, list)]
    return prompts, _replaced(many, list, await model.decode_all(ids))


def _replaced(items: list[Any], kind: type, new: Iterable[Any]) -> list[Any]:
    """Return ``items`` with the items of one kind replaced by ``new``, in order."""
    found = iter(new)
    return [next(found) if isinstance(item, kind) else item for item in items]


def log_prob_table(model: Model, entries: list[Entry], num_top: int) -> dict[str, Any] | None:
    """Return OpenAI's ``logprobs`` of a completion: one entry a token in each column."""

    def tops(token: int, score: TokenOutput) -> dict[str, float]:
        top: dict[str, float] = {}
        # The token too if it is not among the most likely; other tokens may have its text.
        for other, value in (*score.top[:num_top], (token, score.log_prob)):
            top.setdefault(model.token_text(other), log_prob_of(value))
        return top

    if not entries:
        return None
    return {
        "tokens": [model.token_text(token) for token, *_ in entries],
        "token_logprobs": [score and log_prob_of(score.log_prob) for _, score, _ in entries],
        "top_logprobs": [s and tops(token, s) for token, s, _ in entries] if num_top else None,
        "text_offset": [offset for *_, offset in entries],
    }


class ChatPrompt:
    """The prompt of a conversation; `ids` sets ``text``, the rendered one."""

    def __init__(self, service: Service, fields: Fields, *, is_plain: bool) -> None:
        """Read the fields of the conversation.  Raises ApiError."""
        self._service = service
        self._model = service.model
        self._is_plain = is_plain
        self._messages, self._urls = read_messages(fields, service.model)
        self.tools = read_tools(fields, service.model)
        self._continues = fields.boolean("continue_final_message")
        adds_prompt = fields.boolean("add_generation_prompt", not self._continues)
        if adds_prompt and self._continues:
            reason = "give false with continue_final_message: the last message goes on"
            raise fields.fail("add_generation_prompt", reason)
        effort = fields.text("reasoning_effort", None)
        given = fields.sub_object("chat_template_kwargs") and fields.get("chat_template_kwargs")
        self._variables = {
            "add_generation_prompt": adds_prompt,
            **({} if effort is None else {"reasoning_effort": effort}),
            **(given or {}),
        }

    async def ids(
        self, num_samples: int, *, is_cut: bool = False
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the ids of the prompt and its images.  ``is_cut``: a long one is truncated."""
        model = self._model
        self.text = await self._render()
        if not is_cut:
            model.check_characters(self.text, "messages")
        images = model.image_prompts
        if images is None:
            (ids,) = await model.tokenize([self.text], "messages", is_plain=self._is_plain)
            return model.with_one_bos(ids), ()
        # As the methods of ImagePrompts do, but long texts in another process.
        first, *others = images.texts_of(self.text)
        is_plain = self._is_plain or images.is_conversation
        rows = await model.tokenize([first], "messages", is_plain=is_plain) if first else [[]]
        rows += await model.tokenize(others, "messages", is_plain=True)
        ids, read = await asyncio.to_thread(
            prompt_of,
            images,
            rows,
            self._urls,
            self._service.image_files,
            max_rows=model.info.max_sequence_length,
            num_samples=num_samples,
        )
        return model.with_one_bos(ids), read

    async def _render(self) -> str:
        template = self._service.template
        if template is None:
            raise ApiError(
                "messages: the tokenizer of this model has no chat template; start the server with "
                "--chat-template FILE, or use /v1/completions",
                "messages",
                code="no_chat_template",
            )
        turns = self._model.turns(self._messages)
        given = {"messages": turns, "tools": self.tools.given or None}
        try:
            text = await template.render({**self._variables, **given})
        except ApiError as error:
            calls = [call for turn in turns for call in turn.get("tool_calls", ())]
            if "TypeError" not in str(error) or not calls:
                raise
            for call in calls:  # DeepSeek's templates join the arguments as text
                function = call["function"]
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            text = await template.render({**self._variables, **given})
        if not self._continues:
            return text
        opened = open_last_message(text, self._messages[-1]["content"])
        if opened is None:
            raise ApiError(
                "continue_final_message: the chat template does not write the text of the last "
                "message; give it a text, or leave this field out",
                "continue_final_message",
            )
        return opened


@dataclass
class _Answer:
    """What one sample has written so far."""

    parser: ChatParser
    is_begun: bool = False  # in a stream
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    num_reasoning_tokens: int = 0


class ChatRequest(_OpenAIRequest):
    """POST /v1/chat/completions: messages -> a message with text, reasoning and calls of tools."""

    id_prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")

    async def read(self) -> None:
        """Read the other fields, render the prompt, and set ``generation``.  Raises ApiError."""
        fields = self.fields
        model = self.model
        self.begun: set[int] = set()  # samples whose first object has been sent
        # By index of the sample; the parser follows from the prompt.
        self.answers: dict[int, _Answer] = defaultdict(lambda: _Answer(self._parser()))
        self.prompt = ChatPrompt(self.service, fields, is_plain=self.is_plain)
        self.tools = self.prompt.tools
        grammar = read_grammar(fields, model) or grammar_of_tools(self.tools)
        self.has_reasoning = grammar is None  # a grammar begins with the first token
        has_log_probs = fields.boolean("logprobs")
        num_top = fields.integer("top_logprobs", 0, 0, MAX_LOG_PROBS)
        if num_top and not has_log_probs:
            raise ApiError("top_logprobs: only with logprobs: true", "top_logprobs")
        self.num_log_probs = num_top if has_log_probs else None
        longest = model.info.max_sequence_length
        num_tokens = fields.integer("max_completion_tokens", None, 1, longest)
        num_tokens = fields.integer("max_tokens", num_tokens, 1, longest)
        self.shows_reasoning = fields.boolean("include_reasoning", True)
        params = await read_params(
            fields, model, num_tokens or longest, self.num_log_probs, self.num_prompt_log_probs
        )
        eos = model.tokenizer.id_of("eos")  # in chat models it ends a turn
        ends: list[int | None] = [] if eos in (None, model.info.eod) else [eos]
        markups = (self.service.reasoning, self.service.calls)
        ends += [model.tokenizer.vocab.get(end) for markup in markups for end in markup.ends]
        if not params.ignore_eos:
            more_ends = dict.fromkeys(end for end in ends if end is not None)
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *more_ends))
        rules = read_rules(fields, model, params)
        fields.refuse_others(WITHOUT_EFFECT)
        prompt, images = await self.prompt.ids(self.num_returned, is_cut=self.num_kept is not None)
        if images and self.num_kept is not None:
            reason = "a prompt with images is not truncated; leave it out"
            raise fields.fail("truncate_prompt_tokens", reason)
        prompt = self.truncated(prompt, num_tokens or 1)
        if num_tokens is None:
            room = longest if model.info.decoder_start is not None else longest - len(prompt)
            params = replace(params, num_tokens_to_generate=max(room, 1))
        self.generation = GenerationRequest(
            [prompt],
            params,
            rules,
            self.num_returned,
            grammar,
            images=images,
            keeps_tokens=has_log_probs and not self.is_stream,
            hidden=model.special_ids(self._kept_texts()) if self.skips_special else frozenset(),
            cache_salt=self.cache_salt,
        )

    def _kept_texts(self) -> set[str]:
        """Return the texts of special tokens that the parser of the answer needs."""
        tags = [
            tags for m in (self.service.reasoning, self.service.calls) for tags in m.tags.values()
        ]
        return {tag for some in tags for tag in some}

    def _parser(self) -> ChatParser:
        tools = self.tools
        calls: Markup | None = self.service.calls
        if tools.choice == "none":
            calls = None
        elif tools.choice != "auto":
            return ChatParser([markup_of_choice(tools.function)], CALL, {})
        reasoning = self.service.reasoning if self.has_reasoning else REASONING_PARSERS[NONE]
        return parser_of(reasoning, calls, self.prompt.text, tools.parameters)

    def take(self, sample: Sample, delta: TextDelta) -> list[Part]:
        """Add new text to the answer; return its parts."""
        answer = self.answers[sample.index]
        parts = answer.parser.add(delta.text, is_last=delta.finish_reason is not None)
        if answer.parser.state == REASONING:
            answer.num_reasoning_tokens += len(delta.tokens)
        found = []
        for part in parts:
            if part.kind == "call":
                if answer.calls and not self.tools.many:
                    continue
                function = {"name": part.name, "arguments": part.text}
                call = {"id": part.call_id, "type": "function", "function": function}
                answer.calls.append(call)
            elif part.kind == "content":
                answer.content.append(part.text)
            elif not self.shows_reasoning:
                continue
            else:
                answer.reasoning.append(part.text)
            found.append(part)
        return found

    def choice(self, sample: Sample) -> dict[str, Any]:
        """Return the choice of a complete sample."""
        answer = self.answers[sample.index]
        more = {"token_ids": sample.token_ids} if self.has_ids else {}
        content = "".join(answer.content)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if answer.reasoning:
            message |= _reasoning("".join(answer.reasoning))
        if answer.calls:
            message |= {"content": content.strip() or None, "tool_calls": answer.calls}
        return choice_of(
            sample,
            self._log_probs(sample.tokens),
            _reason(sample.finish_reason, bool(answer.calls)),
            message=message,
            stop_reason=sample.stopped_by,
            **more,
        )

    def chunks(self, sample: Sample, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the choices to send, at most one with text and one for the end."""
        answer = self.answers[sample.index]
        num_calls = len(answer.calls)
        parts = self.take(sample, delta)
        found: dict[str, Any] = {} if answer.is_begun else {"role": "assistant", "content": ""}
        content = "".join(part.text for part in parts if part.kind == "content")
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        if content:
            found["content"] = content
        if reasoning:
            found |= _reasoning(reasoning)
        if calls := answer.calls[num_calls:]:
            found["tool_calls"] = [{"index": i, **c} for i, c in enumerate(calls, num_calls)]
        log_probs = self._log_probs(delta.tokens)
        out = []
        ids = [placed.output.token for placed in delta.tokens] if self.has_ids else []
        if found or (log_probs and log_probs["content"]) or ids:
            more = {"token_ids": ids} if self.has_ids else {}
            out.append(choice_of(sample, log_probs, None, delta=found, **more))
            answer.is_begun = True
        if delta.finish_reason is not None:
            reason = _reason(delta.finish_reason, bool(answer.calls))
            out.append(choice_of(sample, None, reason, delta={}))
        return out

    def about_answer(self, sample: Sample) -> dict[str, Any]:
        """Return what vLLM tells about the prompt, in the first object of a sample."""
        is_first = sample.index not in self.begun
        self.begun.add(sample.index)
        return self.prompt_fields(sample) if is_first else {}

    def usage(self, samples: list[Sample]) -> dict[str, object]:
        """Return OpenAI's ``usage`` with the tokens of the reasoning."""
        answers = [self.answers[sample.index] for sample in samples]
        num_reasoning = sum(answer.num_reasoning_tokens for answer in answers)
        details = {"reasoning_tokens": num_reasoning}
        return {**super().usage(samples), "completion_tokens_details": details}

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


def _reasoning(text: str) -> dict[str, str]:
    """Return the fields of reasoning: vLLM's, and that of DeepSeek's API and chat templates."""
    return {"reasoning": text, "reasoning_content": text}


def _reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and reason == "stop" else reason


def choice_of(
    sample: Sample, log_probs: dict[str, Any] | None, reason: str | None, **more: object
) -> dict[str, Any]:
    """Return a choice, whose text or message is in ``more``."""
    return {
        "index": sample.index,
        "logprobs": log_probs,
        "finish_reason": reason,
        "weight_version": sample.weight_version,
        **more,
    }
