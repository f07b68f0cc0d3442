"""Generate answers with the engine of a run, and let environments reward them.

A round is trained on; an evaluation has one answer to each prompt of the held-out environments.
Order of collectives: the engine's messages (rank 0 plans, all ranks compute), then a broadcast of
the results from rank 0.  The answers are a function of the weights, the seed, the index of the
prompt and the number of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch

from megatron.core.config.errors import DataError
from megatron.core.config.value_types import JsonObject
from megatron.core.datasets.conversations import read_all
from megatron.core.inference.paged_engine.engine import Engine
from megatron.core.inference.paged_engine.request import Request, RequestOutput
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.parallel.collectives import broadcast_json
from megatron.post_training.rl.environment import Environments, FileEnvironment, Task
from megatron.post_training.rl.rounds import (
    Rollouts,
    array_to_json,
    from_json,
    num_rollouts,
    tensor_from_json,
    to_json,
)
from megatron.training.config.run import RunConfig
from megatron.training.tokenizer import MegatronTokenizer
from megatron.training.tokenizer.chat import ChatTemplate


@dataclass
class Answer:
    """Tokens of an answer, their log-probabilities, and whether it ends with an end token."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    is_finished: bool = False
    is_done: bool = False  # it has ended, or is as long as it may be
    reward: float = 0.0
    routes: JsonObject | None = None  # experts of the tokens, with --moe-enable-routing-replay


@dataclass(frozen=True)
class PromptSource:
    """What rank 0 needs beside the engine: environments, and how prompts become tokens.

    ``ahead``: answers of later rounds, by the key "prompt/number".
    """

    environments: Environments
    tokenizer: MegatronTokenizer
    chat: ChatTemplate | None  # renders prompts that are lists of messages
    ahead: dict[str, Answer] = field(default_factory=dict)

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the tokens that end an answer: end of document, and in chats end of turn."""
        found = [self.tokenizer.id_of(role) for role in ("eod", "eos")]
        return tuple({token: None for token in found if token is not None})


def generate_round(
    config: RunConfig, engine: Engine, source: PromptSource | None, number: int
) -> tuple[Rollouts, JsonObject]:
    """Generate round ``number``, from 0.  Collective over all ranks.

    Rank 0 has the ``source``.  Also returns the answers of later rounds so far, as JSON.
    """
    rl = config.rl
    saved: JsonObject = {}
    if source is None:
        engine.follow()
    else:
        first = number * rl.grpo_prompts_per_step
        count = rl.grpo_prompts_per_step + rl.num_prompts_ahead
        tasks = enumerate(source.environments.tasks(first, count), first)
        keyed = [(task, (i, j)) for i, task in tasks for j in range(rl.grpo_group_size)]
        answers = answer_tasks(config, engine, source, keyed, num_rollouts(config))
        engine.close()
        ahead = {key: asdict(answer) for key, answer in source.ahead.items()}
        saved = {"round": to_json(_build_rollouts(config, answers)), "ahead": ahead}
    saved = broadcast_json(saved, engine.model.groups.world)
    return from_json(saved["round"], config), saved["ahead"]


def check_prompts(config: RunConfig, source: PromptSource) -> None:
    """Check the prompts that are in files, before the first round.

    Raises DataError with file and line of those that cannot be used.
    """
    for environment in source.environments.every:
        if isinstance(environment, FileEnvironment):  # prompts of others may be without number
            read_all(
                environment.prompts,
                lambda prompt: tokenize_task(Task(environment, prompt), source, config),  # noqa: B023
                "prompts",
            )


def tokenize_task(task: Task, source: PromptSource, config: RunConfig) -> list[int]:
    """Return the tokens of a prompt.  Raises DataError if they do not fit."""
    tokens = task.tokens(source.tokenizer, source.chat)
    if not tokens or len(tokens) >= config.data.seq_length:
        raise DataError(
            f"the prompt {task.prompt!r:.80} has {len(tokens)} tokens: give 1 to "
            f"{config.data.seq_length - 1}, or raise --seq-length {config.data.seq_length}"
        )
    return tokens


def answer_tasks(
    config: RunConfig,
    engine: Engine,
    source: PromptSource,
    keyed: Sequence[tuple[Task, tuple[int, ...]]],
    num_needed: int | None = None,
) -> list[Answer]:
    """Return answers with rewards; the noise of each depends on --seed and its key.

    On rank 0, while the other ranks follow.  Those after the first ``num_needed`` are begun, or
    finished without --rl-partial-rollouts, and go to ``source.ahead``.  Noise depends on positions
    too, so an answer that goes on has the noise of one that was not interrupted.
    """
    rl = config.rl
    requests: list[Request] = []
    firsts: dict[int, Request] = {}  # of each task: the others share its pages
    found: dict[str, Answer] = {}
    for task, key in keyed:
        name = "/".join(map(str, key))
        if (begun := source.ahead.get(name)) is not None:
            found[name] = begun
            if begun.is_done:
                continue
        first = firsts.get(id(task)) if begun is None else None
        prompt = tokenize_task(task, source, config) if first is None else list(first.prompt)
        answer = found.setdefault(name, Answer(prompt))
        longest = config.data.seq_length - len(prompt)
        entropy = np.random.SeedSequence([config.training.seed, *key])
        params = SamplingParams(
            temperature=rl.rl_default_temperature,
            top_p=rl.rl_default_top_p,
            top_k=max(rl.rl_default_top_k, 0),
            num_tokens_to_generate=(
                min(longest, rl.rl_max_response_length or longest) - len(answer.tokens)
            ),
            seed=int(entropy.generate_state(1, np.uint64)[0]),
            return_log_probs=True,
            stop_token_ids=source.ends,
        )
        fork_of = None if first is None else first.request_id
        requests.append(Request(name, prompt + answer.tokens, params, fork_of=fork_of))
        if begun is None:
            firsts.setdefault(id(task), requests[-1])
    needed = list(found.values())[:num_needed]
    for request in requests:
        engine.add(request)
    goes_on = rl.rl_partial_rollouts and num_needed is not None
    while engine.has_unfinished:
        if goes_on and all(answer.is_done for answer in needed):
            for request in requests:
                engine.abort(request.request_id)
        for output in engine.step():
            _take(output, found)
    if num_needed is not None:
        source.ahead.clear()
        source.ahead.update(list(found.items())[num_needed:])
    _reward(source, [task for task, _ in keyed[:num_needed]], needed)
    return needed


def _take(output: RequestOutput, found: dict[str, Answer]) -> None:
    """Add the tokens of a step to their answer.  Raises DataError for logits that diverged."""
    if output.finish_reason == "error":
        raise DataError(
            f"the answer {output.request_id} cannot be generated: {output.error}; the "
            "policy has diverged: resume from an earlier checkpoint with a lower --lr"
        )
    answer = found[output.request_id]
    answer.tokens += [t.token for t in output.new]
    answer.log_probs += [t.log_prob for t in output.new]
    answer.is_finished = output.finish_reason == "stop"
    answer.is_done = output.finish_reason is not None
    if output.routes is not None:
        answer.routes = array_to_json(output.routes)


def _reward(source: PromptSource, tasks: Sequence[Task], answers: Sequence[Answer]) -> None:
    """Set the rewards of answers to ``tasks``."""
    texts = [
        source.tokenizer.detokenize(a.tokens[:-1] if a.is_finished else a.tokens) for a in answers
    ]
    # The engine stays open: while the other ranks follow, no timeout limits the rewards.
    num_threads = max(task.environment.num_threads for task in tasks)
    with ThreadPoolExecutor(num_threads) as threads:
        run = map if num_threads == 1 else threads.map
        for answer, reward in zip(answers, run(Task.reward, tasks, texts), strict=True):
            answer.reward = reward


def _build_rollouts(config: RunConfig, answers: Sequence[Answer]) -> Rollouts:
    shape = len(answers), config.data.seq_length
    rollouts = Rollouts(
        tokens=torch.zeros(shape, dtype=torch.int64),
        bounds=torch.zeros(len(answers), 2, dtype=torch.int64),
        sampled_log_probs=torch.zeros(shape),
        rewards=torch.tensor([answer.reward for answer in answers]),
        is_finished=torch.tensor([answer.is_finished for answer in answers]),
    )
    for i, answer in enumerate(answers):
        begin = len(answer.prompt)
        end = begin + len(answer.tokens)
        rollouts.tokens[i, :end] = torch.tensor(answer.prompt + answer.tokens)
        rollouts.bounds[i] = torch.tensor([begin, end])
        rollouts.sampled_log_probs[i, begin - 1 : end - 1] = torch.tensor(answer.log_probs)
    m = config.model
    if m.moe_enable_routing_replay:
        routes = torch.full((*shape, m.num_layers, m.moe_router_topk), -1, dtype=torch.int16)
        for row, answer in zip(routes, answers, strict=True):
            assert answer.routes is not None, "the engine has recorded them"
            found = tensor_from_json(answer.routes)
            row[: len(found)] = found
        rollouts = replace(rollouts, routes=routes)
    return rollouts


def evaluate_policy(
    config: RunConfig, engine: Engine, source: PromptSource | None
) -> list[dict[str, float]]:
    """Return the mean reward and response length of each held-out environment, on all ranks.

    Of the first --rl-prompts-per-eval prompts.  They and the noise of their answers are the same at
    each evaluation.  Collective over all ranks.  Rank 0 has the ``source``.
    """
    found: list[dict[str, float]] = []
    if source is None:
        engine.follow()
    else:
        for number, environment in enumerate(source.environments.held_out):
            count = min(config.rl.rl_prompts_per_eval, len(environment.prompts))
            # Keys of rollouts are shorter.
            keyed = [
                (Task(environment, environment.prompts[i]), (number, i, 1)) for i in range(count)
            ]
            answers = answer_tasks(config, engine, source, keyed)
            values_of: dict[str, list[float]] = {
                "reward": [answer.reward for answer in answers],
                "response length": [len(answer.tokens) for answer in answers],
                "unfinished responses": [not answer.is_finished for answer in answers],
            }
            found.append({name: float(np.mean(values)) for name, values in values_of.items()})
        engine.close()
    return broadcast_json(found, engine.model.groups.world)
