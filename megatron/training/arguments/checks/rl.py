"""Checks of reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig

_FLAG = "--perform-rl-step"


def rollouts_fill_whole_steps(run: RunConfig) -> Iterator[str]:
    """Require that each pass over the rollouts of a round is a number of complete steps."""
    rl = run.rl
    batch = run.training.global_batch_size
    if not rl.perform_rl_step:
        return
    count = rl.grpo_prompts_per_step * rl.grpo_group_size
    if batch and count % batch:
        yield (
            f"--grpo-prompts-per-step {rl.grpo_prompts_per_step} x --grpo-group-size "
            f"{rl.grpo_group_size} = {count} rollouts is not a multiple of --global-batch-size "
            f"{batch}: change one of them"
        )
    if run.training.rampup_batch_size is not None:
        yield f"--rampup-batch-size: {_FLAG} needs steps of one size: leave it out"


def rollouts_have_rewards_and_a_reference(run: RunConfig) -> Iterator[str]:
    """Require environments, and with a KL term the checkpoint of the reference policy."""
    rl = run.rl
    if not rl.perform_rl_step:
        return
    if rl.langrl_env_config is None:
        yield f"{_FLAG} needs --langrl-env-config, a YAML file that lists environments: add it"
    has_base = run.adapters.lora_rank is not None  # the frozen model is the reference
    named = run.checkpoint.pretrained_checkpoint or run.checkpoint.load
    if rl.grpo_kl_beta and named is None and not has_base:
        yield (
            f"--grpo-kl-beta {rl.grpo_kl_beta:g} needs a reference policy, the weights in "
            "--pretrained-checkpoint or --load: add one of these flags, or use --grpo-kl-beta 0"
        )


def sampling_has_probabilities(run: RunConfig) -> Iterator[str]:
    """Refuse sampling whose probabilities the loss does not know."""
    rl = run.rl
    if not rl.perform_rl_step:
        return
    if rl.rl_default_temperature == 0:
        yield (
            "--rl-default-temperature 0: all answers of a group would be equal, and their "
            "advantages 0: use a number above 0"
        )
    if rl.rl_default_top_p > 1:
        yield f"--rl-default-top-p {rl.rl_default_top_p:g}: give a probability, 0 to 1"
    changes = {
        f"--rl-default-temperature {rl.rl_default_temperature:g}": rl.rl_default_temperature != 1,
        f"--rl-default-top-k {rl.rl_default_top_k}": rl.rl_default_top_k > 0,
        f"--rl-default-top-p {rl.rl_default_top_p:g}": 0 < rl.rl_default_top_p < 1,
    }
    for flag, is_changed in changes.items():
        if is_changed and rl.rl_inference_logprobs_is_correction:
            yield (
                f"--rl-inference-logprobs-is-correction with {flag}: the engine returns "
                "log-probabilities before sampling filters and temperature: leave one of them out"
            )


def policy_reads_rollouts_alone(run: RunConfig) -> Iterator[str]:
    """Refuse options of data sets and models that rollouts do not have."""
    d = run.data
    m = run.model
    if not run.rl.perform_rl_step:
        return
    for flag, is_on in (
        ("--sft", d.sft),
        ("--mock-data", d.mock_data),
        ("--data-path", bool(d.data_path)),
        ("--dataset-type", d.dataset_type is not None),
        ("--reset-attention-mask", d.reset_attention_mask),
    ):
        if is_on:
            yield f"{flag}: {_FLAG} trains on answers to the prompts of environments: leave it out"
    if run.adapters.lora_base_dtype is not None:
        yield (
            f"--lora-base-dtype {run.adapters.lora_base_dtype}: the engine needs the weights of "
            "the base in the precision of the run: leave it out"
        )
    if m.mtp_num_layers is not None:
        yield (
            f"--mtp-num-layers {m.mtp_num_layers}: {_FLAG} does not train multi-token prediction: "
            "leave it out"
        )
    if run.distributed.virtual_ranks is not None:
        yield (
            f"--virtual-ranks {run.distributed.virtual_ranks}: the engine of {_FLAG} needs a "
            "process per rank: use torchrun"
        )
    if run.training.rehearse_memory:
        yield f"--rehearse-memory: the rollouts of {_FLAG} come later: leave it out"
    if m.uses_graphs and not m.captures_layers:
        yield (
            f"--cuda-graph-scope full_iteration: {_FLAG} also runs passes without a step: use "
            "another scope"
        )
