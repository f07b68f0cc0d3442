"""PUT /api: the protocol of Megatron-LM's text-generation server.

A wrong field is answered with status 400 and Megatron-LM's text for it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron.core.inference.paged_engine.request import BeamParams
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.server.fields import ApiError, Body, log_prob_of
from megatron.inference.server.generation import GenerationRequest, Sample, Service, write
from megatron.inference.server.http import json_answer
from megatron.inference.server.model import Model
from megatron.inference.server.openai_fields import with_log_probs
from megatron.inference.text import Detokenizer, TextRules

MAX_PROMPTS = 128
_DEFAULT_TOKENS = 64


@dataclass(frozen=True)
class LegacyRequest:
    """The fields of a request, checked."""

    prompts: list[str]
    params: SamplingParams
    adds_bos: bool
    stops: tuple[str, ...]
    prevents_newline: bool
    beam: BeamParams | None
    stop_token: int | None


async def answer_api(service: Service, request: Any, body: Body) -> Any:
    """Answer one request."""
    return json_answer(await _generate(service, request, read_request(body)))


async def _generate(service: Service, request: Any, asked: LegacyRequest) -> dict[str, Any]:
    model = service.model
    first = model.tokenizer.id_of("bos")
    first = model.info.eod if first is None else first
    bos = [] if first is None else [first]  # the tokens of an empty prompt
    if asked.adds_bos and not bos:
        raise ApiError("add_BOS: this tokenizer has no BOS token")
    for text in asked.prompts:
        model.check_characters(text, "prompts")
    num_characters = sum(map(len, asked.prompts))
    most = service.max_api_tokens
    _need(
        num_characters <= most * model.longest_token,
        f"Too many tokens.  {num_characters} characters are more than {most} have",
    )
    tokenized = iter(await model.tokenize([text for text in asked.prompts if text], "prompts"))
    prompts = []
    for text in asked.prompts:
        ids = next(tokenized) if text else []
        has_bos = ids[:1] == bos  # the tokenizer has added it
        prompts.append(bos + ids if asked.adds_bos and not has_bos else ids)
    params = asked.params
    num_tokens = sum(len(ids) + params.num_tokens_to_generate for ids in prompts)
    _need(
        num_tokens <= service.max_api_tokens,
        f"Too many tokens.  {num_tokens} is greater than {service.max_api_tokens}",
    )
    if asked.prevents_newline:
        forbidden = await asyncio.to_thread(lambda: model.newlines_after_colons)
        params = replace(params, forbidden_after=forbidden)
    if asked.beam is not None:
        return await _search(service, request, asked, prompts[0], asked.beam)
    rules = TextRules(model.end_tokens(params), asked.stops, keeps_stop=True)
    samples = await service.samples(GenerationRequest(prompts, params, rules), request)
    return await write(num_tokens, partial(_answer, model, asked, rules, samples))


def _answer(
    model: Model, asked: LegacyRequest, rules: TextRules, samples: list[Sample]
) -> dict[str, Any]:
    rows = []
    texts = []
    log_probs = []
    for prompt_text, sample in zip(asked.prompts, samples, strict=True):
        new = [placed.output.token for placed in sample.tokens]
        if sample.stopped_by in rules.end_tokens:
            new.pop()  # it is no part of the text
        rows.append(sample.prompt + new)
        texts.append(prompt_text + sample.text)
        log_probs.append(_log_probs(sample, len(new)))
    return {
        "text": texts,
        "segments": [[model.token_text(token) for token in row] for row in rows],
        "logprobs": log_probs if asked.params.return_log_probs else None,
        "tokens": rows,
    }


async def _search(
    service: Service,
    request: Any,
    asked: LegacyRequest,
    prompt: list[int],
    beam: BeamParams,
) -> dict[str, Any]:
    """Answer with the beams of one prompt, best first."""
    model = service.model
    params = asked.params
    if asked.stops or asked.prevents_newline:
        raise ApiError(
            "beam_width does not go with stop_on_eol, stop_on_double_eol and "
            "prevent_newline_after_colon"
        )
    if asked.stop_token is not None and asked.stop_token != model.info.eod:
        if not 0 <= asked.stop_token < model.info.vocab_size:
            raise ApiError(f"stop_token must be below {model.info.vocab_size}")
        params = replace(params, ignore_eos=True, stop_token_ids=(asked.stop_token,))
    wanted = GenerationRequest([prompt], params, TextRules(), beam=beam)
    (sample,) = await service.samples(wanted, request)
    ends = model.end_tokens(params)
    return await write(wanted.num_values, partial(_beams, model, asked, sample, ends))


def _beams(
    model: Model, asked: LegacyRequest, sample: Sample, ends: frozenset[int]
) -> dict[str, Any]:
    prompt = sample.prompt
    rows = [[t.token for t in found.tokens if t.token not in ends] for found in sample.beams]
    return {
        "text": [
            asked.prompts[0] + Detokenizer(model.decode, sample.prompt).add_all(row) for row in rows
        ],
        "segments": [[model.token_text(token) for token in prompt + row] for row in rows],
        "scores": [found.score for found in sample.beams],
    }


def _log_probs(sample: Sample, num_new: int) -> list[float]:
    """Return the log-probability of each token after the first."""
    generated = [placed.output for placed in sample.tokens[:num_new]]
    return [log_prob_of(score.log_prob) for score in (*sample.prompt_scores, *generated)]


def read_request(body: Body) -> LegacyRequest:
    """Check the fields in Megatron-LM's order.  Raises ApiError."""
    prompts = _prompts(body)
    num_tokens = body.get("tokens_to_generate", _DEFAULT_TOKENS)
    _need(_is_int(num_tokens), "tokens_to_generate must be an integer greater than 0")
    _need(num_tokens >= 0, "tokens_to_generate must be an integer greater than or equal to 0")
    has_log_probs = _boolean(body, "logprobs")
    _need(num_tokens > 0 or has_log_probs, "tokens_to_generate=0 implies logprobs should be True")
    temperature = body.get("temperature", 1.0)
    _need(
        _is_number(temperature) and 0.0 < temperature <= 100.0,
        "temperature must be a positive number less than or equal to 100.0",
    )
    top_k, top_p = _top_k_and_top_p(body)
    decay, bound = _decay(body, top_p)
    adds_bos = _boolean(body, "add_BOS")
    _need(all(prompts) or adds_bos, "Empty prompts require add_BOS=true")
    stops = []
    if _boolean(body, "stop_on_double_eol"):
        stops.append("\n\n")
    if _boolean(body, "stop_on_eol"):
        stops.append("\n")
    prevents_newline = _boolean(body, "prevent_newline_after_colon")
    seed = body.get("random_seed", None)
    _need(seed is None or _is_int(seed), "random_seed must be integer")
    _need(seed is None or 0 <= seed < 2**63, "random_seed must be a positive integer")
    _boolean(body, "no_log")  # this server logs no prompts
    width = body.get("beam_width", None)
    _need(width is None or _is_int(width), "beam_width must be integer")
    _need(width is None or width >= 1, "beam_width must be an integer > 1")
    _need(width is None or width <= MAX_PROMPTS, f"beam_width must be at most {MAX_PROMPTS}")
    _need(width is None or len(prompts) == 1, "When doing beam_search, batch size must be 1")
    stop_token = body.get("stop_token", None)
    _need(stop_token is None or _is_int(stop_token), "stop_token must be an integer")
    penalty = body.get("length_penalty", 1.0)
    _need(_is_number(penalty), "length_penalty must be a float")
    _need(abs(penalty) <= 1e308, "length_penalty must be a float")  # an integer may be more
    params = SamplingParams(
        temperature=float(temperature),
        top_k=top_k,
        top_p=float(top_p),
        top_p_decay=decay,
        top_p_bound=bound,
        seed=seed,
        num_tokens_to_generate=num_tokens,
        prompt_log_probs_only=num_tokens == 0,
    )
    return LegacyRequest(
        prompts=prompts,
        params=with_log_probs(params, 0, 0) if has_log_probs else params,
        adds_bos=adds_bos,
        stops=tuple(stops),
        prevents_newline=prevents_newline,
        beam=None if width is None else BeamParams(width, float(penalty)),
        stop_token=stop_token,
    )


def _prompts(body: Body) -> list[str]:
    _need("prompts" in body, "prompts argument required")
    renamed = {"max_len": "tokens_to_generate", "sentences": "prompts"}
    _need("max_len" not in body, "max_len is no longer used.  Replace with tokens_to_generate")
    _need("sentences" not in body, "sentences is no longer used.  Replace with prompts")
    unknown = set(body) - _KNOWN - set(renamed)
    _need(not unknown, f"{min(unknown, default='')[:80]} is no field of this server; leave it out")
    prompts = body["prompts"]
    _need(isinstance(prompts, list), "prompts is not a list of strings")
    _need(bool(prompts), "prompts is empty")
    _need(len(prompts) <= MAX_PROMPTS, f"Maximum number of prompts is {MAX_PROMPTS}")
    _need(all(isinstance(p, str) for p in prompts), "prompts is not a list of strings")
    return list(prompts)


def _top_k_and_top_p(body: Body) -> tuple[int, float]:
    top_k = body.get("top_k", 0)
    limits = "equal to or greater than 0 and less than or equal to 1000"
    _need(_is_int(top_k), f"top_k must be an integer {limits}")
    _need(0 <= top_k <= 1000, f"top_k must be {limits}")
    top_p = body.get("top_p", 0.0)
    _need(_is_number(top_p), "top_p must be a positive float less than or equal to 1.0")
    _need(not (top_p > 0.0 and top_k > 0), "cannot set both top-k and top-p samplings.")
    _need(0 <= top_p <= 1.0, "top_p must be less than or equal to 1.0")
    return top_k, top_p


def _decay(body: Body, top_p: float) -> tuple[float, float]:
    """Read the fields that lower top_p from token to token: a factor, and the least top_p."""
    decay = body.get("top_p_decay", 0.0)
    _need(_is_number(decay), "top_p_decay must be a positive float less than or equal to 1.0")
    _need(top_p != 0.0 or "top_p_decay" not in body, "top_p_decay cannot be set without top_p")
    _need(0 <= decay <= 1.0, "top_p_decay must be less than or equal to 1.0")
    bound = body.get("top_p_bound", 0.0)
    _need(_is_number(bound), "top_p_bound must be a positive float less than or equal to top_p")
    _need(top_p != 0.0 or "top_p_bound" not in body, "top_p_bound cannot be set without top_p")
    is_bound = "top_p_bound" not in body or 0.0 < bound <= top_p
    _need(is_bound, "top_p_bound must be greater than 0 and less than top_p")
    return float(decay), float(bound)


def _boolean(body: Body, name: str) -> bool:
    value = body.get(name, False)
    _need(isinstance(value, bool), f"{name} must be a boolean value")
    return bool(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _need(fits: bool, message: str) -> None:
    if not fits:
        raise ApiError(message)


_KNOWN = frozenset(
    "prompts tokens_to_generate logprobs temperature top_k top_p top_p_decay top_p_bound add_BOS "
    "stop_on_double_eol stop_on_eol prevent_newline_after_colon random_seed no_log beam_width "
    "length_penalty stop_token".split()
)
