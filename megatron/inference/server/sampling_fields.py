"""Fields of OpenAI's and vLLM's requests that choose tokens, and what ends a text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.server.errors import ApiError
from megatron.inference.server.fields import Fields
from megatron.inference.server.model import Model
from megatron.inference.text import TextRules

MAX_SAMPLES = 128
MAX_LOG_PROBS = 20
_MAX_STOPS = 16
_MAX_STOP_TOKENS = 128
_MAX_STOP_CHARACTERS = 256
_SEED_LIMIT = 2**63

# Fields of OpenAI's API that concern its accounts and hosts: accepted, without effect.
WITHOUT_EFFECT = (
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)


def read_params(fields: Fields, model: Model, num_tokens: int) -> SamplingParams:
    """Read the sampling parameters of a request that generates ``num_tokens`` at most."""
    seed = fields.integer("seed", None, -_SEED_LIMIT, _SEED_LIMIT - 1)
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise fields.fail("top_p", "give a number above 0; temperature 0 is greedy")
    repetition_penalty = fields.number("repetition_penalty", 1.0, 0.0, 100.0)
    if repetition_penalty == 0:
        raise fields.fail("repetition_penalty", "give a number above 0")
    top_k = fields.integer("top_k", 0, -1, model.info.vocab_size)
    stop_ids = fields.get("stop_token_ids")
    stop_ids = [] if stop_ids is None else stop_ids
    fields.token_ids("stop_token_ids", stop_ids, model.info.vocab_size, _MAX_STOP_TOKENS)
    return SamplingParams(
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_k=max(top_k, 0),  # -1 is vLLM's "no limit"
        top_p=top_p,
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        seed=None if seed is None else seed % _SEED_LIMIT,
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=repetition_penalty,
        logit_bias=_logit_bias(fields, model.info.vocab_size),
        min_tokens=fields.integer("min_tokens", 0, 0, num_tokens),
        stop_token_ids=tuple(stop_ids),
        ignore_eos=fields.boolean("ignore_eos"),
        num_tokens_to_generate=num_tokens,
        prompt_log_probs_only=num_tokens == 0,
    )


def with_log_probs(params: SamplingParams, top: int | None, prompt: int | None) -> SamplingParams:
    """Ask for log-probabilities too.

    ``top`` and ``prompt``: number of likely tokens for each generated token and each token of the
    prompt; None: no log-probabilities of those.
    """
    return replace(
        params,
        return_log_probs=top is not None or prompt is not None,
        top_n_logprobs=max(top or 0, prompt or 0),
        return_prompt_log_probs=prompt is not None,
        return_prompt_top_n_logprobs=bool(prompt),
    )


def sample_params(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of sample ``index`` of a request: each has its own seed."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + index) % _SEED_LIMIT)


def read_rules(fields: Fields, model: Model, params: SamplingParams) -> TextRules:
    """Read the fields that end a text."""
    value = fields.get("stop")
    if isinstance(value, str):
        stops = [fields.check_text("stop", value)]
    else:
        stops = fields.list_of("stop", fields.check_text, _MAX_STOPS)
    for stop in stops:
        if not 0 < len(stop) <= _MAX_STOP_CHARACTERS:
            raise fields.fail("stop", f"a stop string has 1 to {_MAX_STOP_CHARACTERS} characters")
    return TextRules(
        end_tokens=model.end_tokens(params),
        stops=tuple(stops),
        min_tokens=params.min_tokens,
        keeps_stop=fields.boolean("include_stop_str_in_output"),
    )


def read_num_samples(fields: Fields) -> int:
    """Read ``n``."""
    return fields.integer("n", 1, 1, MAX_SAMPLES)


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """Read whether to stream, and whether a last event then has the usage."""
    is_stream = fields.boolean("stream")
    options = fields.sub_object("stream_options")
    if options is None:
        return is_stream, False
    if not is_stream:
        raise ApiError("stream_options: only with stream: true", "stream_options")
    has_usage = options.boolean("include_usage")
    options.refuse_others()
    return is_stream, has_usage


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    given = fields.sub_object("logit_bias")
    names: Any = fields.get("logit_bias") or {}
    if len(names) > vocab_size:
        raise fields.fail("logit_bias", f"the vocabulary has {vocab_size} tokens")
    biases: dict[int, float] = {}
    for name in names:
        if given is None or not name.isdecimal() or len(name) > 9 or int(name) >= vocab_size:
            reason = f"its fields are token ids from 0 to {vocab_size - 1}"
            raise fields.fail("logit_bias", reason)
        biases[int(name)] = given.number(name, 0.0, -100.0, 100.0)
    return biases
