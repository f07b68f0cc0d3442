"""A request to the engine, and what the engine reports of it.  Tokens only, no text."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron.core.config.errors import MegatronError
from megatron.core.inference.paged_engine.prompt_images import PromptImage
from megatron.core.inference.sampling_params import SamplingParams

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


class RequestError(MegatronError, ValueError):
    """A request that this engine can never serve; ``param`` names the field to change."""

    def __init__(self, message: str, param: str = "prompt") -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(MegatronError):
    """Too many requests wait: try again later."""


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Matcher(Protocol):
    """The state of a grammar for one request; ``error``: why its text cannot go on."""

    error: str

    def is_ready(self) -> bool:
        """Return whether `allowed` returns at once; may wait for a moment."""

    def allowed(self) -> npt.NDArray[np.int32]:
        """Return which tokens may follow: token t is bit t % 32 of word t // 32."""

    def accept(self, token: int) -> None:
        """Advance by an allowed token, which does not end the text."""


@dataclass(frozen=True)
class BeamParams:
    """Beam search with ``width`` beams.  A score is sum of log-probs / length ** length_penalty.

    ``early_stopping``: end when ``width`` texts have ended, even if an open one may score higher.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(eq=False)
class Request:
    """One sequence to generate.  The fields after ``params`` belong to the engine.

    ``prompt``: token ids, of the decoder; ``source``: those that an encoder reads.  ``images``:
    those whose ids the prompt has.
    ``grammar``: a constraint as its kind ("json_schema", "regex", "lark", "choice") and its text;
    ``matcher`` is what follows it.
    ``fork_of``: id of a request that was added before with the same prompt, whose pages this one
    shares as soon as they hold the prompt.  ``beam``: search instead of sampling.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    source: list[int] = field(default_factory=list)
    images: tuple[PromptImage, ...] = ()
    grammar: tuple[str, str] | None = None
    fork_of: str | None = None
    beam: BeamParams | None = None
    matcher: Matcher | None = None
    status: RequestStatus = RequestStatus.WAITING
    output: list[int] = field(default_factory=list)
    num_cached: int = 0  # tokens of prompt + output whose keys are in the cache
    slot: int | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output


class TokenOutput(NamedTuple):  # one for each token: quicker to make than a dataclass
    """One token with the log-probability that the model gave it, and the most likely tokens."""

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Beam:
    """A text that beam search has found, with the token that ended it, if any."""

    tokens: tuple[TokenOutput, ...]
    score: float
    finish_reason: FinishReason


class RequestOutput(NamedTuple):
    """What a step added to a request.

    ``prompt_scores``: of the prompt's tokens after its first, if the request asks for them; they
    come with the first token.  ``weight_version``: of the weights that computed the tokens.
    ``beams``: all texts of a beam search, best first; they and ``new``, the best one's tokens,
    come when the search has ended.  ``error``: why it ended, with the reason "error";
    ``error_param``: the field of the request to change, if the request is the cause.
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
