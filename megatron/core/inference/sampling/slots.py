"""What the sampler knows of the request in each slot: parameters on the host, texts on the device.

Parameters are plain numbers of the host: a step uploads those of its rows at once.  Only slots
whose requests have penalties or a logit bias hold rows of the vocabulary's size on the device.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron.core.inference.paged_engine.step_plan import Admission
from megatron.core.inference.sampling.rules import Penalties, SlotRows
from megatron.core.inference.sampling_params import SamplingParams

# Beyond these, fp32 gives 0 / 0 and infinity / infinity, and tokens that are not allowed.
_LEAST_DIVISOR = 1e-30
_LARGEST_VALUE = 1e30


class Slots:
    """Requests by slot.  Arrays are indexed by slot and live on the host."""

    def __init__(self, max_requests: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self.params = [SamplingParams(temperature=0.0, seed=0)] * max_requests
        self.num_prompt = np.zeros(max_requests, dtype=np.int64)
        self.min_tokens = np.zeros(max_requests, dtype=np.int64)
        self.is_greedy = np.ones(max_requests, dtype=bool)
        self.wants_log_probs = np.zeros(max_requests, dtype=bool)
        self.has_penalty = np.zeros(max_requests, dtype=bool)
        self.has_bias = np.zeros(max_requests, dtype=bool)
        # Greedy, and nothing changes or reports logits: the largest logit is the whole answer.
        self.is_plain = np.ones(max_requests, dtype=bool)
        # Factor of top_p for each generated token, and least top_p; 1 and 0: it stays.
        self.top_p_decay = np.tile(np.array([1, 0], dtype=np.float32), (max_requests, 1))
        # By slot: tokens, and tokens that must not follow them.
        self.forbidden_after: dict[int, tuple[frozenset[int], tuple[int, ...]]] = {}
        # temperature, top_k (v: no limit), top_p, min_p, repetition, presence, frequency
        self.values = np.zeros((max_requests, 7), dtype=np.float32)
        self.penalties = Penalties(vocab_size, device)
        self.bias = SlotRows(vocab_size, torch.float32, device)

    def admit(self, admission: Admission) -> None:
        """Put a request into its slot, in place of what the slot had."""
        slot = admission.slot
        params = SamplingParams.from_json(admission.params)
        self.params[slot] = params
        self.num_prompt[slot] = admission.num_prompt
        self.min_tokens[slot] = params.min_tokens
        self.is_greedy[slot] = params.is_greedy
        self.wants_log_probs[slot] = params.return_log_probs or params.top_n_logprobs > 0
        top_k = min(params.top_k or self._vocab_size, self._vocab_size)
        temperature = max(params.temperature, _LEAST_DIVISOR)
        filters = (temperature, top_k, params.top_p or 1.0, params.min_p)
        repetition = max(params.repetition_penalty, _LEAST_DIVISOR)
        penalties = (repetition, params.presence_penalty, params.frequency_penalty)
        self.values[slot] = np.clip(filters + penalties, -_LARGEST_VALUE, _LARGEST_VALUE)
        decays = params.top_p > 0 and params.top_p_decay > 0
        self.top_p_decay[slot] = (params.top_p_decay, params.top_p_bound) if decays else (1, 0)
        self.forbidden_after.pop(slot, None)
        if any(params.forbidden_after):
            before, forbidden = params.forbidden_after
            self.forbidden_after[slot] = frozenset(before), forbidden
        self.has_bias[slot] = bool(params.logit_bias)
        self.has_penalty[slot] = params.has_penalty
        self.is_plain[slot] = params.is_greedy and not (
            self.has_bias[slot]
            or self.has_penalty[slot]
            or self.min_tokens[slot]
            or self.wants_log_probs[slot]
            or slot in self.forbidden_after
        )
        self.bias.free(slot)
        if params.logit_bias:
            bias = np.zeros(self._vocab_size, dtype=np.float32)
            bias[list(params.logit_bias)] = list(params.logit_bias.values())
            self.bias.put(slot, bias)
        self.penalties.free(slot)
        if self.has_penalty[slot]:
            self.penalties.admit(admission)
