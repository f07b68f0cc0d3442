"""Requests to the engine and its outputs: token ids and images, no text.  No torch.

Each embedding of an image is a row of the prompt.  Its id is `FIRST_ID` or more and holds its
image, by the pixels, and its place in the image: requests with equal images share their pages.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron.core.config.errors import MegatronError
from megatron.core.inference.paged_engine.options import EngineLimits
from megatron.core.inference.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron.core.inference.grammar import GrammarMatcher

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
Pooling: TypeAlias = Literal["last", "mean"]
Vector: TypeAlias = npt.NDArray[np.float32]
Routes: TypeAlias = npt.NDArray[np.int16]
Ids: TypeAlias = npt.NDArray[np.int64]

FIRST_ID = 1 << 62
PLACE_BITS = 20
_KEY_BITS = 62 - PLACE_BITS
_LEAST_LENGTH = np.float32(1e-12)  # of a vector, as in torch's normalize
_LARGEST_BIAS = 100.0  # of a token's logit, as in OpenAI's API
_LARGEST_PENALTY = 10  # for lengths: their power is a finite number above 0


class RequestError(MegatronError, ValueError):
    """A request that this engine can never serve; ``param`` names the field to change."""

    def __init__(self, message: str, param: str = "prompt") -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(MegatronError):
    """Too many requests wait: try again later."""


@dataclass(frozen=True, eq=False)
class PromptImage:
    """An image of a prompt: ``pixels`` f32 [t, 3, H, W] of its tiles, and how many rows it has.

    ``size``: rows and columns of tiles, height and width in pixels of an image whose tiles the
    model arranges; or patches along time, height and width of an image of any size (its
    ``pixels`` are [blocks, 4, values of a patch]).
    """

    pixels: npt.NDArray[np.float32]
    num_rows: int
    size: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert 0 < self.num_rows < 1 << PLACE_BITS, f"an image of {self.num_rows} rows has no ids"

    @cached_property
    def key(self) -> int:
        """The image's content as a number."""
        seen = hashlib.blake2b(repr((self.pixels.shape, self.size)).encode(), digest_size=8)
        seen.update(np.ascontiguousarray(self.pixels).tobytes())
        return int.from_bytes(seen.digest(), "big") >> (64 - _KEY_BITS)

    @property
    def ids(self) -> list[int]:
        """The ids of its rows."""
        first = FIRST_ID + (self.key << PLACE_BITS)
        return list(range(first, first + self.num_rows))

    def to_json(self) -> list[object]:
        """Return number of rows, size, shape, and pixels as base64 of little-endian float32."""
        pixels = np.ascontiguousarray(self.pixels, "<f4")
        data = base64.b64encode(pixels.tobytes()).decode()
        return [self.num_rows, list(self.size), list(pixels.shape), data]

    @staticmethod
    def from_json(found: Sequence[Any]) -> PromptImage:
        """Return the image that `to_json` wrote."""
        num_rows, size, shape, data = found
        pixels = np.frombuffer(bytearray(base64.b64decode(data)), "<f4").reshape(shape)
        return PromptImage(pixels.astype(np.float32, copy=False), num_rows, tuple(size))


def text_of(ids: Iterable[int]) -> list[int]:
    """Return the ids of a prompt that are tokens of text."""
    return [token for token in ids if token < FIRST_ID]


def place_in_image(token: int) -> int:
    """Return the number of a row among those of its image; 0 for text."""
    return (token - FIRST_ID) % (1 << PLACE_BITS) if token >= FIRST_ID else 0


def starts_of_images(ids: Ids) -> list[int]:
    """Return where the first row of each image is."""
    is_first = (ids >= FIRST_ID) & ((ids - FIRST_ID) % (1 << PLACE_BITS) == 0)
    found: list[int] = np.flatnonzero(is_first).tolist()
    return found


@dataclass(frozen=True)
class BeamParams:
    """Beam search with ``width`` beams.  A score is sum of log-probs / length ** length_penalty."""

    width: int
    length_penalty: float = 1.0


@dataclass(eq=False)
class Request:
    """One sequence to generate; the engine fills ``output``.

    ``prompt``: token ids, of the decoder; ``source``: token ids for an encoder.  ``images``: those
    whose ids the prompt has.  ``grammar``: a constraint as its kind ("json_schema", "regex")
    and its text; ``matcher`` follows it.  ``fork_of``: id of a request that was added before with
    the same prompt, whose pages this one shares as soon as they hold the prompt.  ``beam``: search
    instead of sampling.  ``adapter``: name of one that the engine has loaded, under a number that
    the engine sets.  ``pooling``: write no text, but return one vector of the last hidden states:
    of the last token, or their mean over all tokens.  ``cache_salt``: only requests with
    the same one share pages.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    source: list[int] = field(default_factory=list)
    images: tuple[PromptImage, ...] = ()
    grammar: tuple[str, str] | None = None
    fork_of: str | None = None
    adapter: str | None = None
    adapter_number: int = 0
    pooling: Pooling | None = None
    cache_salt: str = ""
    beam: BeamParams | None = None
    matcher: GrammarMatcher | None = None
    output: list[int] = field(default_factory=list)


class TokenOutput(NamedTuple):  # one for each token: quicker to make than a dataclass
    """One token with the log-probability that the model gave it, and the most likely tokens."""

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


class Beam(NamedTuple):
    """A text that beam search has found, with the token that ended it, if any."""

    tokens: tuple[TokenOutput, ...]
    score: float
    finish_reason: FinishReason


class RequestOutput(NamedTuple):
    """Tokens and results that a step adds to a request.

    ``prompt_scores``: of the prompt's tokens after its first, if the request asks for them; they
    come with the first token.  ``weight_version``: of the weights that computed the tokens.
    ``beams``: all texts of a beam search, best first; they and ``new``, the best one's tokens,
    come when the search has ended.  ``error``: why it ended, with the reason "error";
    ``error_param``: the field of the request to change, if the request is the cause.  ``vector``:
    what ``pooling`` asks for, see `vector_of`.  ``routes`` [n, layers, k]: the experts of the
    n processed tokens, all but the last, when the request has ended, if the engine records them.
    """

    request_id: str
    new: tuple[TokenOutput, ...] = ()
    prompt_scores: tuple[TokenOutput, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_prompt_tokens: int = 0  # prompt tokens that the prefix cache had
    weight_version: int = 0
    error: str = ""
    beams: tuple[Beam, ...] = ()
    error_param: str | None = None
    vector: str = ""
    routes: Routes | None = None

    @staticmethod
    def from_json(found: Sequence[Any]) -> RequestOutput:
        """Return the output of which JSON has made a list of lists."""
        output = RequestOutput(*found)
        beams = (Beam(_tokens_from_json(t), score, reason) for t, score, reason in output.beams)
        return output._replace(
            new=_tokens_from_json(output.new),
            prompt_scores=_tokens_from_json(output.prompt_scores),
            beams=tuple(beams),
        )


def vector_of(text: str, *, normalize: bool) -> Vector:
    """Return the vector of an output, base64 of little-endian float32; ``normalize``: length 1."""
    found = np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)
    return found / max(np.linalg.norm(found), _LEAST_LENGTH) if normalize else found


def _tokens_from_json(found: Any) -> tuple[TokenOutput, ...]:
    return tuple(TokenOutput(t, p, tuple((i, q) for i, q in top)) for t, p, top in found)


# ---- checks ------------------------------------------------------------------------------------


def generation_length(request: Request, limits: EngineLimits) -> int:
    """Return how many tokens a request generates at most; RequestError: it can never run."""
    params = request.params
    length = len(request.prompt)
    if not length:
        raise RequestError("prompt has no tokens: give at least one")
    has_text = not (params.prompt_log_probs_only or request.pooling)
    wanted = params.num_tokens_to_generate if has_text else 0
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
    return 1 if request.pooling else max_new  # the step that samples gives the vector too


def check_grammar(request: Request) -> None:
    """Raise RequestError if a request has a grammar that cannot be followed."""
    if request.grammar is not None and request.matcher is None:
        raise RequestError("this engine has no grammars: leave it out", "grammar")
    if request.matcher is not None and request.matcher.error:
        raise RequestError(request.matcher.error, "grammar")
    if request.matcher is not None and request.params.allowed_token_ids:
        raise RequestError(
            "allowed_token_ids does not go with a grammar, which decides about each token: leave "
            "one out",
            "allowed_token_ids",
        )
    if request.matcher is not None and request.params.min_tokens:
        raise RequestError(
            f"min_tokens {request.params.min_tokens} does not go with a grammar, which decides "
            "where the text ends: leave one out",
            "min_tokens",
        )


def check_beam(request: Request) -> None:
    """Raise RequestError if a request with beams asks for something that beam search lacks."""
    if request.beam is None:
        return
    if request.beam.width < 1:
        raise RequestError(f"beam width {request.beam.width}: give 1 or more", "beam_width")
    penalty = request.beam.length_penalty
    if not -_LARGEST_PENALTY <= penalty <= _LARGEST_PENALTY:  # also NaN
        raise RequestError(
            f"length_penalty {penalty:g}: give a number from {-_LARGEST_PENALTY} to "
            f"{_LARGEST_PENALTY}",
            "length_penalty",
        )
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    for name, value in neutral.items():
        if (found := getattr(request.params, name)) != value:
            raise RequestError(f"{name} {found} has no effect on beam search: leave it out", name)
    for name in ("logit_bias", "allowed_token_ids", "bad_words"):
        if getattr(request.params, name):
            raise RequestError(f"{name} has no effect on beam search: leave it out", name)
    if request.grammar is not None or request.matcher is not None:
        raise RequestError("beam search does not support a grammar: leave one out", "grammar")


def check_tokens(request: Request, vocab_size: int) -> None:
    """Raise RequestError if a token id of a request is not one of the model's."""
    last = vocab_size - 1
    params = request.params
    if request.images and (params.return_prompt_log_probs or params.prompt_log_probs_only):
        raise RequestError(
            "log-probabilities of a prompt with images: an image is no token; ask for those of the "
            "generated tokens",
            "return_prompt_log_probs",
        )
    ids = {
        "prompt": text_of(request.prompt) if request.images else request.prompt,
        "source": request.source,
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": [token for word in params.bad_words for token in word],
        "forbidden_after": [token for group in params.forbidden_after for token in group],
    }
    for param, tokens in ids.items():
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token <= last:
                text = f"{param} has token {token}: token ids of this model are 0 to {last}"
                raise RequestError(text, param)
    allowed = params.allowed_token_ids
    if allowed and {(token,) for token in allowed} <= {*params.bad_words}:
        text = "bad_words has every token of allowed_token_ids: allow another token"
        raise RequestError(text, "allowed_token_ids")
    for token, bias in params.logit_bias.items():
        if not -_LARGEST_BIAS <= bias <= _LARGEST_BIAS:  # also NaN
            text = f"logit_bias of token {token} is {bias}: give a number from -100 to 100"
            raise RequestError(text, "logit_bias")
