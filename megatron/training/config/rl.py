"""Flags for reinforcement learning: rollouts, rewards and the GRPO loss (pretrain_rl.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option

_rl = partial(option, group="rl")


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    perform_rl_step: bool = _rl(
        False,
        "Train by reinforcement learning (GRPO) on answers that the model generates; "
        "pretrain_rl.py sets it.",
        default=None,
    )
    langrl_env_config: str | None = _rl(
        None,
        "YAML file that lists the environments: agent_type (an import path, or http), agent_args "
        "and weight of each.",
    )
    grpo_prompts_per_step: int = _rl(32, "Prompts of a round of rollouts.", at_least=1)
    grpo_group_size: int = _rl(
        2, "Answers for each prompt; an advantage is relative to the others.", at_least=2
    )
    grpo_iterations: int = _rl(
        2, "Number of times that each rollout is trained on.", at_least=1, at_most=1000
    )
    grpo_clamp_eps_lower: float = _rl(0.01, "Clip probability ratios below 1 minus this.")
    grpo_clamp_eps_upper: float = _rl(0.01, "Clip probability ratios above 1 plus this.")
    grpo_kl_beta: float = _rl(
        0.001,
        "Weight of the KL divergence from the reference policy, the weights in "
        "--pretrained-checkpoint, by default those that the run begins with (--load); 0: no "
        "reference policy is held.",
    )
    grpo_entropy_term_weight: float = _rl(0.0, "Weight of the entropy bonus.")
    grpo_filter_groups_with_same_reward: bool = _rl(
        False, "Leave groups whose answers all have the same reward out of the loss."
    )
    grpo_loss_type: str = _rl(
        "dapo",
        "Mean of the token losses: over all tokens of a step (dapo), first over each answer "
        "(grpo), over the tokens of a micro-batch (bnpo), or divided by the longest possible "
        "answer (dr_grpo).",
        choices=("dapo", "grpo", "bnpo", "dr_grpo"),
    )
    grpo_scale_rewards: str = _rl(
        "group",
        "Divide advantages by the standard deviation of the rewards of the group, of the round "
        "(batch), or by nothing (none).",
        choices=("group", "batch", "none"),
    )
    rl_default_temperature: float = _rl(1.0, "Temperature of sampling.")
    rl_default_top_p: float = _rl(0.0, "Sample from the most likely tokens of this probability.")
    rl_default_top_k: int = _rl(-1, "Sample from this many most likely tokens.", at_least=-1)
    rl_max_response_length: int | None = _rl(
        None, "Longest answer in tokens; default: as many as fit into --seq-length.", at_least=1
    )
    rl_max_inflight_requests: int | None = _rl(
        None, "Answers that the engine generates at the same time in a replica.", at_least=1
    )
    rl_inference_logprobs_is_correction: bool = _rl(
        False,
        "Weight token losses by the ratio of trained to sampled probability, which differ by "
        "rounding.",
        both_ways=True,
    )
    rl_importance_sampling_truncation_coef: float | None = _rl(
        None, "Upper limit of the weights of --rl-inference-logprobs-is-correction."
    )
    rl_inference_tensor_model_parallel_size: int | None = _rl(
        None, "Tensor parallelism of rollouts; default: that of training.", at_least=1
    )
    rl_inference_pipeline_model_parallel_size: int | None = _rl(
        None, "Pipeline parallelism of rollouts; default: that of training.", at_least=1
    )
    rl_inference_expert_model_parallel_size: int | None = _rl(
        None, "Expert parallelism of rollouts; default: that of training.", at_least=1
    )
    rl_inference_expert_tensor_model_parallel_size: int | None = _rl(
        None, "Tensor parallelism of experts in rollouts; default: that of training.", at_least=1
    )
    rl_use_sequence_packing: bool = _rl(
        False,
        "Pack several rollouts into a sequence.",
        both_ways=True,
        ignored=flag_messages.UNPACKED,
    )
    rl_partial_rollouts: bool = _rl(
        False,
        "End the generation of a round when its own answers have ended: the answers of later "
        "rounds (--rl-generation-lag) go on with the weights of the next round.",
        both_ways=True,
    )
    rl_generation_lag: float | None = _rl(
        None,
        "Rounds by which generation is ahead of training, in prompts of a round: with 1, an answer "
        "begins a round before it is trained on. Default: 1 with --rl-partial-rollouts, else 0.",
    )
    rl_consumption_granularity: str = _rl(
        "B",
        "What is trained on as soon as it has ended: a round (B), a group (G) or an answer (R).",
        choices=("R", "G", "B"),
        refused_values=dict.fromkeys(
            "RG",
            "rounds are trained on in the order of their prompts, so that a run can be "
            "repeated; use B",
        ),
    )
    rl_verify_model_weights_swap: bool = _rl(
        False,
        "Compare a hash of each parameter of the engine with training before each round.",
        both_ways=True,
    )
    rl_prompts_per_eval: int = _rl(
        32,
        "Prompts that an evaluation takes from each environment with evaluation_only.",
        at_least=1,
    )

    @property
    def num_prompts_ahead(self) -> int:
        """Prompts of later rounds whose answers a round generates too."""
        lag = self.rl_generation_lag
        if lag is None:
            lag = 1.0 if self.rl_partial_rollouts else 0.0
        return math.ceil(lag * self.grpo_prompts_per_step)


# Flags that have an effect in reinforcement learning only.
RL_FLAGS = tuple(
    f.name
    for f in fields(RLConfig)
    if f.name != "perform_rl_step"
    and not any(vars(f.metadata["option"])[why] for why in ("refused", "ignored", "refused_values"))
)
