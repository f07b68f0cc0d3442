"""Generation for one prompt at a time with a cache of keys and values.

The prompt goes through the model once; after that every token costs one forward pass of length 1.
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
    """A model that writes.  ``model(tokens, positions, mask, inference_context=...)`` -> [b, s, v].

    ``tp_group`` shares the model; its first rank chooses, the others follow.  A model of an encoder
    and a decoder (`T5Model`) has a ``decoder_start``: the encoder reads the prompt, the decoder
    continues that one token.
    """

    model: nn.Module
    max_sequence_length: int
    vocab_size: int  # ids beyond it are padding and never chosen
    eod: int | None
    tp_group: dist.ProcessGroup
    device: torch.device
    decoder_start: int | None = None

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Generated]:
        """Tokens that follow ``prompt``, until EOD, the asked number, or the longest sequence.

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
        """The decoder alone, behind what the encoder makes of ``source`` [1, s]."""
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
        """Logits after the last of ``tokens`` [1, s] -> [1, v]."""
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
    """All tokens that follow ``prompt``; ``on_token`` sees each as it is chosen."""
    out = []
    for item in generator.stream(prompt, params):
        out.append(item)
        if on_token is not None:
            on_token(item)
    return out
