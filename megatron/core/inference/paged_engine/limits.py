"""Sizes of the engine, and which requests fit into them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.inference.paged_engine.prompt_images import FIRST_ID, PLACE_BITS, text_of
from megatron.core.inference.paged_engine.request import Request, RequestError

_LARGEST_BIAS = 100.0  # of a token's logit, as in OpenAI's API


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of the engine; a request holds one of ``max_requests`` slots while it runs."""

    page_size: int
    num_pages: int
    max_requests: int
    max_step_tokens: int
    max_sequence_length: int
    max_waiting: int
    has_prefix_cache: bool = True
    has_recurrent_layers: bool = False  # their state is not in pages: nothing can be shared
    num_draft_tokens: int = 0
    num_draft_layers: int = 0  # MTP layers that draft; 0: drafts come from earlier text
    num_reserved_pages: int = 0  # kept for requests that run: none starts with fewer free


def generation_length(request: Request, limits: EngineLimits) -> int:
    """Return how many tokens a request generates at most; RequestError: it can never run."""
    params = request.params
    length = len(request.prompt)
    if not length:
        raise RequestError("prompt has no tokens: give at least one")
    wanted = 0 if params.prompt_log_probs_only else params.num_tokens_to_generate
    longest = limits.max_sequence_length - (wanted > 0)
    if length > longest:
        raise RequestError(
            f"prompt has {length} tokens, but at most {longest} fit into a sequence of "
            f"{limits.max_sequence_length}: shorten it or raise --inference-max-seq-length"
        )
    max_new = min(wanted, limits.max_sequence_length - length)
    num_pages = -(-max(length, length + max_new - 1) // limits.page_size)
    if num_pages > limits.num_pages:
        raise RequestError(
            f"prompt of {length} tokens and {max_new} to generate need {num_pages} pages of "
            f"{limits.page_size} tokens, but the cache has {limits.num_pages}: ask for fewer "
            "tokens or raise --inference-dynamic-batching-buffer-size-gb",
            "num_tokens_to_generate" if max_new else "prompt",
        )
    return max_new


def check_grammar(request: Request) -> None:
    """Raise RequestError if a request has a grammar that cannot be followed."""
    if request.grammar is not None and request.matcher is None:
        raise RequestError("this engine has no grammars: leave it out", "grammar")
    if request.matcher is not None and request.matcher.error:
        raise RequestError(request.matcher.error, "grammar")
    if request.matcher is not None and request.params.min_tokens:
        raise RequestError(
            f"min_tokens {request.params.min_tokens} does not go with a grammar, which decides "
            "where the text ends: leave one out",
            "min_tokens",
        )


def check_fork(request: Request, parent: Request) -> None:
    """Raise RequestError unless a request has the prompt of ``parent``, its ``fork_of``."""
    if parent.prompt != request.prompt or parent.source != request.source:
        raise RequestError(
            f"the prompt of fork_of {request.fork_of!r} is another one: give the same prompt",
            "fork_of",
        )


def _check_images(request: Request) -> None:
    """Raise RequestError if the prompt has other images than the request, or wants their scores."""
    named = {token - token % (1 << PLACE_BITS) for token in request.prompt if token >= FIRST_ID}
    if named != {image.ids[0] for image in request.images}:
        raise RequestError("prompt has ids of other images than the request: give all its images")
    params = request.params
    if params.return_prompt_log_probs or params.prompt_log_probs_only:
        raise RequestError(
            "log-probabilities of a prompt with images: an image is no token; ask for those of the "
            "generated tokens",
            "return_prompt_log_probs",
        )


def check_tokens(request: Request, vocab_size: int) -> None:
    """Raise RequestError if a token id of a request is not one of the model's."""
    last = vocab_size - 1
    params = request.params
    if request.images:
        _check_images(request)
    ids = {
        "prompt": text_of(request.prompt) if request.images else request.prompt,
        "source": request.source,
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
        "forbidden_after": [token for group in params.forbidden_after for token in group],
    }
    for param, tokens in ids.items():
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token <= last:
                text = f"{param} has token {token}: token ids of this model are 0 to {last}"
                raise RequestError(text, param)
    for token, bias in params.logit_bias.items():
        if not -_LARGEST_BIAS <= bias <= _LARGEST_BIAS:  # also NaN
            text = f"logit_bias of token {token} is {bias}: give a number from -100 to 100"
            raise RequestError(text, "logit_bias")
