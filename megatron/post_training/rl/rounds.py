"""A round: the rollouts of one set of weights, and the micro-batches that are trained on.

Shapes: ``n`` rollouts of a round, group after group; ``s`` positions (--seq-length).  Position t
predicts the token at t + 1: log-probabilities of an answer begin at the last token of its prompt.
All ranks hold the complete round.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.training.config.rl import RLConfig
from megatron.training.config.run import RunConfig

_UNIT = 64  # tokens: rows of a round have a multiple of it


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The answers of a round, from the engine and the environments.

    ``old_log_probs``, ``reference_log_probs``: None where training does not need them.
    """

    tokens: Tensor  # [n, s] int64: prompt and answer, then zeros
    bounds: Tensor  # [n, 2] int64: number of tokens of the prompt, and of prompt and answer
    sampled_log_probs: Tensor  # [n, s] fp32, as all log-probabilities 0 outside answers
    rewards: Tensor  # [n] fp32
    is_finished: Tensor  # [n] bool: the answer has ended before the longest possible one
    old_log_probs: Tensor | None = None  # [n, s] fp32, under the weights that generated the answers
    reference_log_probs: Tensor | None = None
    routes: Tensor | None = None  # [n, s, layers, k] int16: experts of generation, -1: no choice

    def without_routes(self) -> Rollouts:
        """Return the rollouts, whose tokens choose their experts themselves."""
        routes = None if self.routes is None else torch.full_like(self.routes, -1)
        return replace(self, routes=routes)

    @property
    def is_answer(self) -> Tensor:
        """Return [n, s]: whether the position predicts a token of the answer."""
        positions = torch.arange(self.tokens.shape[1])[None]
        first = self.bounds[:, :1] - 1
        last = self.bounds[:, 1:] - 1
        return (positions >= first) & (positions < last)

    @property
    def lengths(self) -> Tensor:
        """Return the number of tokens [n] of each answer."""
        return self.bounds[:, 1] - self.bounds[:, 0]


def group_advantages(rewards: Tensor, rl: RLConfig) -> Tensor:
    """Return the advantages [n]: rewards relative to the group's mean."""
    groups = rewards.view(-1, rl.grpo_group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if rl.grpo_scale_rewards == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    elif rl.grpo_scale_rewards == "batch":
        advantages = advantages / (rewards.std() + 1e-4)
    return advantages.flatten()


def is_kept(rewards: Tensor, rl: RLConfig) -> Tensor:
    """Return which rollouts [n] are in the loss (--grpo-filter-groups-with-same-reward)."""
    if not rl.grpo_filter_groups_with_same_reward:
        return torch.ones_like(rewards, dtype=torch.bool)
    groups = rewards.view(-1, rl.grpo_group_size)
    differs = (groups != groups[:, :1]).any(1, keepdim=True)
    return differs.expand_as(groups).flatten()


def token_weights(is_answer: Tensor, kept: Tensor, config: RunConfig, longest: int) -> Tensor:
    """Return the weight [n, s] of each token in the loss of a step of these ``n`` rollouts.

    The loss of a step is the sum of the weighted token losses divided by ``n``.  ``longest``:
    tokens of the longest possible answer.
    """
    kind = config.rl.grpo_loss_type
    number = len(is_answer)
    mask = (is_answer & kept[:, None]).float()
    if kind == "dapo":
        return mask * (number / mask.sum().clamp(min=1))
    if kind == "bnpo":
        size = config.training.micro_batch_size
        tokens = mask.view(-1, size, mask.shape[1]).sum((1, 2)).clamp(min=1)
        return mask * (size / tokens).repeat_interleave(size)[:, None]
    scale = number / kept.sum().clamp(min=1)
    divisor = mask.sum(1, keepdim=True).clamp(min=1) if kind == "grpo" else longest
    return mask * scale / divisor


def step_batches(
    config: RunConfig, rollouts: Rollouts, index: Tensor, dp_rank: int
) -> list[dict[str, Tensor]]:
    """Return the micro-batches of data-parallel rank ``dp_rank``: of the rollouts ``index``.

    Rows have the length of ``config``, at least the length of the longest rollout (`trim_rows`).
    """
    rl = config.rl
    size = config.training.micro_batch_size
    advantages = group_advantages(rollouts.rewards, rl)
    kept = is_kept(rollouts.rewards, rl)
    longest = rl.rl_max_response_length or rollouts.tokens.shape[1]
    is_answer = rollouts.is_answer[index]
    tokens = rollouts.tokens[index]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    every = {
        "tokens": tokens,
        "labels": torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1),
        "position_ids": positions,
        "is_padding": positions >= rollouts.bounds[index, 1:],
        "weights": token_weights(is_answer, kept[index], config, longest),
        "advantages": advantages[index, None] * is_answer,
        "sampled_log_probs": rollouts.sampled_log_probs[index],
    }
    for name in ("old_log_probs", "reference_log_probs"):
        if (values := getattr(rollouts, name)) is not None:
            every[name] = values[index]
    if rollouts.routes is not None:
        every["routes"] = rollouts.routes[index].int()  # NCCL sends no int16
    starts = range(dp_rank * size, len(index), size * config.data_parallel_size)
    return [
        {
            name: values[start : start + size, : config.data.seq_length]
            for name, values in every.items()
        }
        for start in starts
    ]


def trim_rows(config: RunConfig, rollouts: Rollouts) -> RunConfig:
    """Return ``config`` with rows that are as long as the longest of ``rollouts``, rounded up.

    Layers that are captured as graphs have rows of one length: then unchanged.
    """
    m = config.model
    if m.uses_graphs or m.tp_comm_overlap:
        return config
    unit = math.lcm(_UNIT, 2 * m.tensor_model_parallel_size * m.context_parallel_size)
    length = -(-int(rollouts.bounds.max()) // unit) * unit
    length = min(length, config.data.seq_length)
    return replace(config, data=replace(config.data, seq_length=length))


def num_rollouts(config: RunConfig) -> int:
    """Return the number of rollouts of a round."""
    return config.rl.grpo_prompts_per_step * config.rl.grpo_group_size


def step_index(config: RunConfig, seed: int, number: int, consumed: int, size: int) -> Tensor:
    """Return the rollouts that a step trains on: ``size`` after ``consumed`` of round ``number``.

    Each iteration over the round has an order of its own.
    """
    iteration, begin = divmod(consumed, num_rollouts(config))
    order = np.random.default_rng([seed, number, iteration]).permutation(num_rollouts(config))
    return torch.from_numpy(order[begin : begin + size])


def to_json(rollouts: Rollouts) -> JsonObject:
    """Return rollouts as JSON: for other ranks, and for a checkpoint inside of the round."""
    return {name: array_to_json(t.numpy()) for name, t in _tensors(rollouts).items()}


def array_to_json(array: npt.NDArray[Any]) -> JsonObject:
    """Return an array as JSON: compressed base64."""
    data = base64.b64encode(zlib.compress(array.tobytes(), 1)).decode("ascii")
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def from_json(saved: JsonObject, config: RunConfig) -> Rollouts:
    """Return the rollouts of `to_json`.  Raises CheckpointError if they are of another shape."""
    try:
        rollouts = Rollouts(**{name: tensor_from_json(entry) for name, entry in saved.items()})
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise CheckpointError(
            f"the checkpoint holds rollouts that cannot be read ({error!r}): load another one"
        ) from None
    shape = num_rollouts(config), config.data.seq_length
    if any(len(t) != shape[0] for t in _tensors(rollouts).values()) or (
        rollouts.tokens.shape != shape
    ):
        raise CheckpointError(
            f"the checkpoint was saved inside of a round of rollouts of shape "
            f"{list(rollouts.tokens.shape)}, and --grpo-prompts-per-step, --grpo-group-size and "
            f"--seq-length ask for {list(shape)}: keep these flags, or load a checkpoint from the "
            "end of a round"
        )
    return rollouts


def _tensors(rollouts: Rollouts) -> dict[str, Tensor]:
    return {name: value for name, value in vars(rollouts).items() if value is not None}


def tensor_from_json(entry: Mapping[str, Any]) -> Tensor:
    """Return the array of `array_to_json` as a tensor."""
    array = np.frombuffer(zlib.decompress(base64.b64decode(entry["data"])), entry["dtype"])
    return torch.from_numpy(array.reshape(entry["shape"]).copy())
