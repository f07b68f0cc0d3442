"""Requests and answers of Megatron-LM's engines: text and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from megatron.core.inference.sampling_params import SamplingParams


class Status(Enum):
    """Where a request is."""

    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5  # the model gave no finite logits, or the request was aborted


@dataclass(kw_only=True)
class InferenceRequest:
    """A prompt, and after generation what follows it.

    Log-probabilities are those of the model, in the order of the tokens; prompts have none for
    their first token.  Top-n entries map the text of a token to its log-probability.  Segments are
    the texts of single tokens.  ``tpot`` holds the seconds that each generated token took.
    """

    request_id: int
    prompt: str
    sampling_params: SamplingParams | None = None
    inference_parameters: SamplingParams | None = None  # former name of sampling_params
    prompt_tokens: list[int] | None = None
    arrival_time: float | None = None
    status: Status | None = None
    encoder_prompt: str | None = None
    generated_text: str | None = None
    segments: list[str] | None = None
    generated_segments: list[str] | None = None
    generated_sequence_lengths: list[int] | None = None
    generated_tokens: Tensor | list[int] | None = None
    prompt_log_probs: list[float] | None = None
    generated_log_probs: list[float] | None = None
    prompt_top_n_logprobs: list[dict[str, float]] | None = None
    generated_top_n_logprobs: list[dict[str, float]] | None = None
    generated_length: int | None = None
    tpot: list[float] | None = None
    text: str | None = field(default=None, repr=False)  # prompt and generated text

    def __post_init__(self) -> None:
        if self.inference_parameters is not None and self.sampling_params is None:
            self.sampling_params = self.inference_parameters


@dataclass(kw_only=True)
class VLMInferenceRequest(InferenceRequest):
    """A prompt whose tokens ``image_token_index`` of the model stand for images.

    ``imgs`` f32 [t, 3, H, W]: the tiles of all images; ``num_tiles`` i64: tiles of each image.
    """

    num_img_embeddings_per_tile: int
    imgs: Tensor
    num_tiles: Tensor
    decoder_seq_length: int  # most positions of the prompt, where images have several


@dataclass(kw_only=True)
class DynamicInferenceRequest(InferenceRequest):
    """A request of `DynamicInferenceEngine`; its tokens are a list that grows."""

    request_id: int
    generated_tokens: list[int] = field(default_factory=list)
    prompt: str | None = None  # type: ignore[assignment]
    prompt_tokens: Tensor | None = None  # type: ignore[assignment]
