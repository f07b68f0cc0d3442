"""PUT /api: the protocol of Megatron-LM's text-generation server.

A wrong field is answered with status 400 and Megatron-LM's text for it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from megatron.core.inference.paged_engine.request import BeamParams
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.server.fields import ApiError, Body, as_number, log_prob_of
from megatron.inference.server.generation import GenerationRequest, Sample, Service, write
from megatron.inference.server.http import json_answer
from megatron.inference.server.model import Model
from megatron.inference.text import Detokenizer, TextRules

MAX_PROMPTS = 128
_FLAGS = (
    "logprobs",
    "add_BOS",
    "stop_on_double_eol",
    "stop_on_eol",
    "prevent_newline_after_colon",
    "no_log",  # this server logs no prompts
)
KNOWN = {
    *"prompts tokens_to_generate temperature top_k top_p top_p_decay top_p_bound".split(),
    *"random_seed beam_width length_penalty stop_token".split(),
    *_FLAGS,
}


async def answer_api(service: Service, request: Any, body: Body) -> Any:
    """PUT /api: Megatron-LM's protocol."""
    model = service.model
    params = read_params(body)
    texts = body["prompts"]
    beam = _read_beam(body, len(texts))
    prompts = await _tokenize(service, texts, adds_bos=body.get("add_BOS", False))
    num_tokens = sum(len(ids) + params.num_tokens_to_generate for ids in prompts)
    _need(
        num_tokens <= service.max_api_tokens,
        f"Too many tokens.  {num_tokens} is greater than {service.max_api_tokens}",
    )
    ends = {"stop_on_double_eol": "\n\n", "stop_on_eol": "\n"}
    stops = tuple(stop for name, stop in ends.items() if body.get(name))
    prevents_newline = body.get("prevent_newline_after_colon")
    stop_token = body.get("stop_token")
    if beam is None:
        if prevents_newline:
            forbidden = await asyncio.to_thread(lambda: model.newlines_after_colons)
            params = replace(params, forbidden_after=forbidden)
        rules = TextRules(model.end_tokens(params), stops, keeps_stop=True)
    else:
        _need(
            not stops and not prevents_newline,
            "beam_width does not go with stop_on_eol, stop_on_double_eol and "
            "prevent_newline_after_colon",
        )
        if stop_token not in (None, model.info.eod):
            is_known = 0 <= stop_token < model.info.vocab_size
            _need(is_known, f"stop_token must be below {model.info.vocab_size}")
            params = replace(params, ignore_eos=True, stop_token_ids=(stop_token,))
        rules = TextRules()
    wanted = GenerationRequest(prompts, params, rules, beam=beam)
    samples = await service.samples(wanted, request)
    return await write(
        max(num_tokens, wanted.num_values), lambda: _answer(model, texts, wanted, samples)
    )


async def _tokenize(service: Service, texts: list[str], *, adds_bos: bool) -> list[list[int]]:
    """Return the tokens of each prompt."""
    model = service.model
    first = model.tokenizer.id_of("bos")
    first = model.info.eod if first is None else first
    bos = [] if first is None else [first]  # the tokens of an empty prompt
    _need(bool(bos) or not adds_bos, "add_BOS: this tokenizer has no BOS token")
    for text in texts:
        model.check_characters(text, "prompts")
    num_characters = sum(map(len, texts))
    most = service.max_api_tokens
    _need(
        num_characters <= most * model.longest_token,
        f"Too many tokens.  {num_characters} characters are more than {most} have",
    )
    tokenized = iter(await model.tokenize([text for text in texts if text], "prompts"))
    rows = [next(tokenized) if text else [] for text in texts]
    # The tokenizer may have added it.
    return [bos + ids if adds_bos and ids[:1] != bos else ids for ids in rows]


def _answer(
    model: Model, texts: list[str], wanted: GenerationRequest, samples: list[Sample]
) -> Any:
    ends = model.end_tokens(wanted.params)
    found: dict[str, Any]
    if wanted.beam is not None:
        prompt = samples[0].prompt
        beams = samples[0].beams  # best first
        new = [[t.token for t in beam.tokens if t.token not in ends] for beam in beams]
        rows = [prompt + row for row in new]
        answers = [texts[0] + Detokenizer(model.decode, prompt).add_all(row) for row in new]
        found = {"scores": [beam.score for beam in beams]}
    else:
        rows = []
        log_probs = []
        for sample in samples:
            outputs = [placed.output for placed in sample.tokens]
            if sample.stopped_by in ends:
                outputs.pop()  # it is no part of the text
            rows.append(sample.prompt + [output.token for output in outputs])
            scores = (*sample.prompt_scores, *outputs)  # of each token after the first
            log_probs.append([log_prob_of(score.log_prob) for score in scores])
        answers = [text + sample.text for text, sample in zip(texts, samples, strict=True)]
        is_scored = wanted.params.return_log_probs
        found = {"logprobs": log_probs if is_scored else None, "tokens": rows}
    segments = [[model.token_text(token) for token in row] for row in rows]
    return json_answer({"text": answers, "segments": segments, **found})


def read_params(body: Body) -> SamplingParams:
    """Check the fields that Megatron-LM has; return those of sampling.  Raises ApiError."""
    _need("prompts" in body, "prompts argument required")
    for old, new in (("max_len", "tokens_to_generate"), ("sentences", "prompts")):
        _need(old not in body, f"{old} is no longer used.  Replace with {new}")
    for name in body:
        _need(name in KNOWN, f"{name[:80]} is no field of this server; leave it out")
    for name in _FLAGS:
        _need(isinstance(body.get(name, False), bool), f"{name} must be a boolean value")
    prompts = body["prompts"]
    are_texts = isinstance(prompts, list) and all(
        isinstance(prompt, str) for prompt in prompts[:MAX_PROMPTS]
    )
    _need(are_texts, "prompts is not a list of strings")
    _need(bool(prompts), "prompts is empty")
    _need(len(prompts) <= MAX_PROMPTS, f"Maximum number of prompts is {MAX_PROMPTS}")
    _need(all(prompts) or body.get("add_BOS", False), "Empty prompts require add_BOS=true")
    num_tokens = body.get("tokens_to_generate", 64)
    _need(type(num_tokens) is int, "tokens_to_generate must be an integer greater than 0")
    _need(num_tokens >= 0, "tokens_to_generate must be an integer greater than or equal to 0")
    is_scored = body.get("logprobs", False)
    _need(num_tokens > 0 or is_scored, "tokens_to_generate=0 implies logprobs should be True")
    temperature = body.get("temperature", 1.0)
    _need(
        0.0 < as_number(temperature) <= 100.0,
        "temperature must be a positive number less than or equal to 100.0",
    )
    top_k = body.get("top_k", 0)
    limits = "equal to or greater than 0 and less than or equal to 1000"
    _need(type(top_k) is int, f"top_k must be an integer {limits}")
    _need(0 <= top_k <= 1000, f"top_k must be {limits}")
    top_p, decay, bound = (body.get(name, 0.0) for name in ("top_p", "top_p_decay", "top_p_bound"))
    for name, value, most in (
        ("top_p", top_p, 1.0),
        ("top_p_decay", decay, 1.0),
        ("top_p_bound", bound, "top_p"),
    ):
        is_number = type(value) in (int, float)
        _need(is_number, f"{name} must be a positive float less than or equal to {most}")
        _need(
            name == "top_p" or name not in body or top_p != 0.0,
            f"{name} cannot be set without top_p",
        )
    _need(not (top_p > 0.0 and top_k > 0), "cannot set both top-k and top-p samplings.")
    _need(0 <= top_p <= 1.0, "top_p must be less than or equal to 1.0")
    _need(0 <= decay <= 1.0, "top_p_decay must be less than or equal to 1.0")
    is_bound = "top_p_bound" not in body or 0.0 < bound <= top_p
    _need(is_bound, "top_p_bound must be greater than 0 and less than top_p")
    seed = body.get("random_seed")
    _need(seed is None or type(seed) is int, "random_seed must be integer")
    _need(seed is None or 0 <= seed < 2**63, "random_seed must be a positive integer")
    return SamplingParams(
        temperature=float(temperature),
        top_k=top_k,
        top_p=float(top_p),
        top_p_decay=float(decay),
        top_p_bound=float(bound),
        seed=seed,
        num_tokens_to_generate=num_tokens,
        prompt_log_probs_only=num_tokens == 0,
        return_log_probs=is_scored,
        return_prompt_log_probs=is_scored,
    )


def _read_beam(body: Body, num_prompts: int) -> BeamParams | None:
    """Check the fields of beam search.  Raises ApiError."""
    penalty = body.get("length_penalty", 1.0)
    # An integer may be more than any float.
    _need(abs(as_number(penalty)) <= 1e308, "length_penalty must be a float")
    stop_token = body.get("stop_token")
    _need(stop_token is None or type(stop_token) is int, "stop_token must be an integer")
    width = body.get("beam_width")
    if width is None:
        return None
    _need(type(width) is int, "beam_width must be integer")
    _need(width >= 1, "beam_width must be an integer > 1")
    _need(width <= MAX_PROMPTS, f"beam_width must be at most {MAX_PROMPTS}")
    _need(num_prompts == 1, "When doing beam_search, batch size must be 1")
    return BeamParams(width, float(penalty))


def _need(fits: bool, message: str) -> None:
    if not fits:
        raise ApiError(message)
