"""Rounds of rollouts between the steps of the training loop.

Before the first step of a round, all ranks copy the weights to the engine, which generates the
answers; then they compute the log-probabilities that the loss needs.  The checkpoint of a step
inside of a round holds the round, since the weights that generated it are gone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.config.value_types import JsonObject
from megatron.core.distributed.distributed_data_parallel_config import is_fully_sharded
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.parallel.collectives import broadcast_json
from megatron.inference.engine_flags import GenerationLayout
from megatron.inference.generation import TrainingEngine, open_engine
from megatron.post_training.reference import ReferencePolicy, score, sum_over_ranks
from megatron.post_training.rl.environment import open_environments
from megatron.post_training.rl.generate import (
    Answer,
    PromptSource,
    check_prompts,
    evaluate_policy,
    generate_round,
)
from megatron.post_training.rl.objective import needs_old_log_probs, score_labels
from megatron.post_training.rl.rounds import (
    Rollouts,
    from_json,
    num_rollouts,
    step_batches,
    step_index,
    to_json,
    trim_rows,
)
from megatron.training.config.run import GRPO, RunConfig
from megatron.training.data.loaders import chunk_iterators, reads_data
from megatron.training.models.kind import Batch
from megatron.training.process.exit_report import in_phase
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import Callback, EvalResult, TrainingRun
from megatron.training.tokenizer.sft_tokenizer import chat_template_of


class RolloutTraining(Callback):
    """Callback that gives each step of a run its rollouts; `rollout_metrics` logs them."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.engine: TrainingEngine | None = None
        self._source: PromptSource | None = None  # on rank 0
        self._reference: ReferencePolicy | None = None
        self._config: RunConfig  # the run's own; a round has shorter rows (`trim_rows`)
        self._number: int | None = None  # number of the current round
        self._rollouts: Rollouts | None = None  # of the current round
        self._batches: list[dict[str, Tensor]] = []
        self._saved: JsonObject | None = None  # the round, while it is trained on
        self._ahead: JsonObject = {}  # answers of later rounds so far, by their keys
        self._num_held_out = 0  # environments for evaluations
        self._tokens_per_s = 0.0  # of the newest round

    def on_train_start(self, run: TrainingRun) -> None:
        config = run.config
        if config.objective != GRPO:
            return
        self._config = config
        state = run.objective.saved or {}
        self._ahead = state.get("ahead") or {}
        if run.is_rank_0:
            path = config.rl.langrl_env_config
            assert path is not None, "a check requires it"
            self._source = PromptSource(
                open_environments(path, config.training.seed),
                run.tokenizer,
                chat_template_of(run.tokenizer, config.tokenizer),
                {key: Answer(**answer) for key, answer in self._ahead.items()},
            )
            check_prompts(config, self._source)
        if config.rl.grpo_kl_beta:
            self._reference = ReferencePolicy(run)
        if state.get("round") is not None:  # the checkpoint was saved inside of it
            self._hold(state["number"], from_json(state["round"], config))
        self.engine = open_engine(
            run,
            layout=rollout_layout(config),
            options=rollout_options(config),
            share_memory=not is_fully_sharded(config.ddp),
        )
        held_out = () if self._source is None else self._source.environments.held_out
        self._num_held_out = broadcast_json(len(held_out), run.groups.world)
        # The micro-batches of each step, which `on_step_start` prepares.
        loader = (batch for _ in count() for batch in self._batches) if reads_data(run) else None
        run.data.train = chunk_iterators(run, loader, prefetches=False)

    def on_step_start(self, run: TrainingRun) -> None:
        if self.engine is None:
            return
        consumed = run.state.consumed_train_samples
        length = num_rollouts(run.config) * run.config.rl.grpo_iterations
        number, position = divmod(consumed, length)
        size = run.batches.global_batch_size(consumed)
        if position % size:
            raise ConfigError(
                f"--global-batch-size {size}: the checkpoint has {position} samples of a round, "
                "which is no multiple of it: resume with the batch size of before"
            )
        if number != self._number:
            run.config = self._config
            self._hold(number, self._new_round(run, self.engine, number))
            self.metrics["rollout tokens/s"] = self._tokens_per_s
        assert self._rollouts is not None, "generate a round before training on it"
        run.config = trim_rows(self._config, self._rollouts)
        run.objective.loss_share = 1 / run.config.data.seq_length  # the loss is divided by rollouts
        index = step_index(run.config, run.config.training.seed, number, position, size)
        self._batches = step_batches(run.config, self._rollouts, index, run.groups.dp.rank())
        is_last = position + size == length
        run.objective.saved = {
            "reference": self._reference and self._reference.hash,
            "reference_folder": self._reference and self._reference.folder,
            "number": None if is_last else number,
            "round": None if is_last else self._saved,
            "ahead": self._ahead,
        }

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        validation = run.config.validation
        is_due = validation.eval_interval and not run.state.iteration % validation.eval_interval
        if not is_due or not validation.eval_iters or not self._num_held_out:
            return
        assert self.engine is not None, "on_train_start opens it"
        with run.callbacks.paused(run, "evaluation"):
            self.engine.update()
            found = evaluate_policy(self._config, self.engine.writer.engine, self._source)
        for number, values in enumerate(found):
            several = number if len(found) > 1 else None
            evaluated = EvalResult(
                losses=values, split="validation", set_index=several, is_final=False
            )
            run.callbacks.on_eval_end(run, evaluated)

    @in_phase("rollouts")
    def _new_round(self, run: TrainingRun, engine: TrainingEngine, number: int) -> Rollouts:
        """Generate round ``number`` with the current weights.  Collective over all ranks."""
        engine.update()
        if run.config.rl.rl_verify_model_weights_swap:
            count = engine.weights.verify()
            print_rank_0(f" the engine has the weights of training: {count} hashes are equal")
        began_s = time.perf_counter()
        of_engine = engine.writer.engine
        rollouts, self._ahead = generate_round(run.config, of_engine, self._source, number)
        elapsed_s = time.perf_counter() - began_s
        self._tokens_per_s = float(rollouts.lengths.sum()) / max(elapsed_s, 1e-9)
        run.config = trim_rows(run.config, rollouts)
        if needs_old_log_probs(run.config):
            rollouts = replace(rollouts, old_log_probs=round_log_probs(run, rollouts))
        if self._reference is not None:
            free = rollouts.without_routes()  # the reference policy chooses its own experts
            with self._reference.in_model(run):
                rollouts = replace(rollouts, reference_log_probs=round_log_probs(run, free))
        return rollouts

    def _hold(self, number: int, rollouts: Rollouts) -> None:
        self._number = number
        self._rollouts = rollouts
        self._saved = to_json(rollouts) if needs_old_log_probs(self._config) else None
        lengths = rollouts.lengths.float()
        self.metrics = {
            "reward": float(rollouts.rewards.mean()),
            "reward std": float(rollouts.rewards.std()),
            "response length": float(lengths.mean()),
            "unfinished responses": float((~rollouts.is_finished).float().mean()),
        }


def round_log_probs(run: TrainingRun, rollouts: Rollouts) -> Tensor:
    """Return the log-probabilities [n, s] of all answers, 0 elsewhere.  Collective over all ranks.

    Each data-parallel rank computes its share of the rollouts.
    """
    groups = run.groups
    size = run.config.training.micro_batch_size
    rank = groups.dp.rank()
    step = size * groups.dp.size()
    blank = torch.zeros_like(rollouts.sampled_log_probs)
    filled = replace(rollouts, old_log_probs=blank, reference_log_probs=blank)
    batches = step_batches(run.config, filled, torch.arange(len(rollouts.tokens)), rank)
    temperature = run.config.rl.rl_default_temperature

    def report(batch: Batch, logits: Tensor) -> dict[str, Tensor]:
        scores = score_labels(
            logits,
            batch["labels"],
            groups.tp,
            temperature=temperature,
            as_engine=run.config.model.batch_invariant_mode,
        )
        return {"log_probs": scores.log_probs, "positions": batch["position_ids"]}

    found = score(run, batches, len(batches), report)
    total = torch.zeros(blank.shape, device=device.current())
    if run.has_loss and groups.tp.rank() == 0:
        for i, of_batch in enumerate(found):
            rows = total[i * step + rank * size :][:size]
            rows.scatter_(1, of_batch["positions"], of_batch["log_probs"])
    return sum_over_ranks(run, total) * rollouts.is_answer


def rollout_metrics(run: TrainingRun, result: StepResult) -> Mapping[str, float]:
    """Return the metrics of the newest round, for `register_metric`."""
    del result
    for callback in run.callbacks:
        if isinstance(callback, RolloutTraining):
            return callback.metrics
    return {}


def rollout_layout(config: RunConfig) -> GenerationLayout:
    """Return the parallel sizes of rollouts; the default is the layout of training."""
    rl = config.rl
    m = config.model
    expert_tensor = rl.rl_inference_expert_tensor_model_parallel_size
    return GenerationLayout(
        tensor=rl.rl_inference_tensor_model_parallel_size or m.tensor_model_parallel_size,
        pipeline=rl.rl_inference_pipeline_model_parallel_size or m.pipeline_model_parallel_size,
        expert=rl.rl_inference_expert_model_parallel_size or m.expert_model_parallel_size,
        expert_tensor=expert_tensor or m.expert_tensor_parallel_size,
    )


def rollout_options(config: RunConfig) -> EngineOptions:
    """Return the sizes of the engine."""
    rl = config.rl
    return EngineOptions(
        buffer_bytes=int(config.inference.inference_dynamic_batching_buffer_size_gb * 2**30),
        max_requests=rl.rl_max_inflight_requests,
        max_sequence_length=config.data.seq_length,
        num_cuda_graphs=16 if device.is_cuda() else 0,  # a round is too short for recording
        max_waiting=max((rl.grpo_prompts_per_step + rl.num_prompts_ahead) * rl.grpo_group_size, 1),
        log_interval=config.inference.inference_logging_step_interval,
        batch_invariant=config.model.batch_invariant_mode,
        records_routes=config.model.moe_enable_routing_replay,
    )
