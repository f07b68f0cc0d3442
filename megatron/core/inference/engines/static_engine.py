"""Generate text for one prompt at a time with a key-value cache.

The prompt passes through the model once; then each token costs one forward pass of length 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.inference.sampling import sample
from megatron.core.inference.sampling_params import SamplingParams


@dataclass(frozen=True)
class Generated:
    """A token and the log-probability that the model gave it (before temperature and limits)."""

    token: int
    log_prob: float


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A model to sample from: ``model(tokens, positions, mask, inference_context=...)`` [b, s, v].

    The ranks of ``tp_group`` share the model; the first one samples and broadcasts the token.  An
    encoder-decoder model (`T5Model`) has a ``decoder_start``: the encoder reads the prompt, and the
    decoder continues from that token.
    """

    model: nn.Module
    max_sequence_length: int
    vocab_size: int  # ids beyond it are padding and never chosen
    eod: int | None
    tp_group: dist.ProcessGroup
    device: torch.device
    decoder_start: int | None = None

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Generated]:
        """Yield the tokens after ``prompt``, up to EOD, the requested number or full length.

        Collective over ``tp_group``.  Raises ValueError for a prompt that is empty or too long.
        """
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        is_read_apart = self.decoder_start is not None  # by an encoder, and leaves the room alone
        room = self.max_sequence_length - len(prompt) + is_read_apart
        if room <= 0:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, the model takes {self.max_sequence_length}: "
                "shorten it"
            )
        random = torch.Generator(device=self.device)
        random.manual_seed(torch.seed() % 2**63 if params.seed is None else params.seed)
        cache = StaticInferenceContext(1, self.max_sequence_length)
        tokens = torch.tensor([list(prompt)], device=self.device)
        model: Callable[..., Tensor] = self.model
        if self.decoder_start is not None:
            model = self._decoder(tokens)
            tokens, room = tokens.new_full((1, 1), self.decoder_start), self.max_sequence_length - 1
        for _ in range(min(room, params.num_tokens_to_generate)):
            logits = self._logits(model, tokens, cache)
            tokens = self._choose(logits, params, random)
            chosen = int(tokens)
            log_prob = torch.log_softmax(logits.float(), dim=-1)[0, chosen]
            yield Generated(chosen, float(log_prob))
            if chosen == self.eod:
                return

    def _decoder(self, source: Tensor) -> Callable[..., Tensor]:
        """Return the decoder with the encoder output of ``source`` [1, s] bound to it."""
        with torch.no_grad():
            encoded = self.model(source, None, output_encoder_hidden_only=True)

        def decode(tokens: Tensor, *_: object, inference_context: StaticInferenceContext) -> Tensor:
            logits: Tensor = self.model(
                None, tokens, encoder_hidden_states=encoded, inference_context=inference_context
            )
            return logits

        return decode

    def _logits(
        self, model: Callable[..., Tensor], tokens: Tensor, cache: StaticInferenceContext
    ) -> Tensor:
        """Return the logits after the last of ``tokens``: [1, s] -> [1, v]."""
        start, length = cache.num_tokens, tokens.size(1)
        positions = torch.arange(start, start + length, device=self.device).unsqueeze(0)
        with torch.no_grad():
            logits = model(tokens, positions, None, inference_context=cache)
        cache.advance(length)
        return logits[:, -1, : self.vocab_size]

    def _choose(self, logits: Tensor, params: SamplingParams, random: torch.Generator) -> Tensor:
        chosen = sample(logits, params, random).unsqueeze(-1)
        if self.tp_group.size() > 1:
            dist.broadcast(chosen, dist.get_global_rank(self.tp_group, 0), group=self.tp_group)
        return chosen


def generate(
    generator: Generator,
    prompt: Sequence[int],
    params: SamplingParams,
    on_token: Callable[[Generated], None] | None = None,
) -> list[Generated]:
    """Return all tokens after ``prompt``; ``on_token`` is called with each as it is sampled."""
    out = []
    for item in generator.stream(prompt, params):
        out.append(item)
        if on_token is not None:
            on_token(item)
    return out
