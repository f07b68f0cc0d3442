"""Evaluate a policy on the prompts of held-out environments, one answer for each.

Order of collectives: the engine's messages (rank 0 plans, all ranks compute), then a broadcast of
the results from rank 0.
"""

from __future__ import annotations

import numpy as np

from megatron.core.inference.paged_engine.engine import Engine
from megatron.core.inference.paged_engine.request import Request
from megatron.core.parallel.json_collectives import broadcast_json
from megatron.post_training.rl.environment import Environment, Task
from megatron.post_training.rl.generate import (
    PromptSource,
    answers_of,
    rewards_of,
    sampling_params,
    tokenized,
)
from megatron.training.config.run import RunConfig


def evaluate_policy(
    config: RunConfig, engine: Engine, source: PromptSource | None
) -> list[dict[str, float]]:
    """Return the mean reward and response length of each held-out environment, on all ranks.

    The prompts and the noise of their answers are the same at each evaluation.  Collective over all
    ranks.  Rank 0 has the ``source``.
    """
    found: list[dict[str, float]] = []
    if source is None:
        engine.follow()
    else:
        for number, environment in enumerate(source.environments.held_out):
            found.append(_evaluated(config, engine, source, number, environment))
        engine.close()
    return broadcast_json(found, engine.model.groups.world)


def _evaluated(
    config: RunConfig,
    engine: Engine,
    source: PromptSource,
    number: int,
    environment: Environment,
) -> dict[str, float]:
    """Return the means over the first --rl-prompts-per-eval prompts.  On rank 0."""
    count = min(config.rl.rl_prompts_per_eval, len(environment.prompts))
    tasks = [Task(environment, environment.prompts[i]) for i in range(count)]
    requests = []
    for i, task in enumerate(tasks):
        prompt = tokenized(task, source, config)
        key = [config.training.seed, number, i, 1]  # rollouts have keys of three integers
        seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
        params = sampling_params(config, len(prompt), seed, source.ends)
        requests.append(Request(f"evaluation {number}/{i}", prompt, params))
    answers = answers_of(engine, requests)
    rewards = rewards_of(tasks, answers, source)
    return {
        "reward": float(np.mean(rewards)),
        "response length": float(np.mean([len(answer.tokens) for answer in answers])),
        "unfinished responses": float(np.mean([not answer.is_finished for answer in answers])),
    }
