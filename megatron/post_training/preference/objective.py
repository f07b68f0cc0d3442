"""The objectives of pairs of answers: batch tables, losses, and the reference model of DPO.

Losses use one score per answer.  Direct preference optimization: https://arxiv.org/abs/2305.18290,
equation 7; the loss IPO: https://arxiv.org/abs/2310.12036, equation 17, with log-probabilities
averaged over the tokens of an answer; the hinge loss: https://arxiv.org/abs/2305.10425.  Reward
models: the loss of Bradley and Terry, https://arxiv.org/abs/2203.02155, equation 1.

The reference model has the weights that a run begins with.  Its log-probabilities of all answers
are computed once, by forward passes before the first step, and kept in files named by a hash of the
weights and of the data: in --data-cache-path and in the directory of --save, where a run that goes
on finds them.  Order of collectives, for each data path: rank 0 looks for the file (broadcast); the
forward passes; one sum over all ranks.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.errors import CheckpointError
from megatron.core.datasets.index_cache import load_array, save_array
from megatron.core.datasets.samplers import collate
from megatron.core.datasets.utils import Split
from megatron.core.models.gpt.gpt_model import RewardModel
from megatron.core.packed_seq_params import sequence_index
from megatron.core.parallel.collectives import broadcast_json
from megatron.core.parallel.context_parallel_partition import held_tokens, row_lengths
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_reduce, through
from megatron.post_training.preference.dataset import (
    MockPreferenceDataset,
    PreferenceDataset,
    PreferenceDatasetConfig,
)
from megatron.post_training.reference import score, sum_over_ranks
from megatron.post_training.sft.objective import (
    GPT_SFT,
    set_loss_share,
    sft_batch,
    sft_settings,
    token_specs,
)
from megatron.training.config import run
from megatron.training.config.preference import HINGE, IPO, PreferenceConfig
from megatron.training.config.run import RunConfig
from megatron.training.data.loaders import joined_tensors, reads_data
from megatron.training.models.gpt import gpt_layer_spec
from megatron.training.models.kind import Batch, BatchTable, language_arguments
from megatron.training.process.rank_print import print_rank_0
from megatron.training.step.run import ModelRun
from megatron.training.step.weight_hash import params_hash

_WEIGHTS = "reference_weights"  # in the state that checkpoints of the objective hold
_PASSES_AT_ONCE = 256  # micro-batches whose results are kept at a time


def preference_dataset_config(config: RunConfig, **common: Any) -> PreferenceDatasetConfig:
    """Return the dataset config; ``common`` holds the arguments shared by all model kinds."""
    scores_answers = config.objective == run.REWARD
    settings = sft_settings(config, common["tokenizer"])
    return PreferenceDatasetConfig(scores_answers=scores_answers, **settings, **common)


def preference_batch(config: RunConfig, stage: int, num_stages: int) -> BatchTable:
    """Return the tensors that ``stage`` reads: as for --sft, and on the last stage more.

    is_rejected, and reference for direct preference optimization: see `PreferenceDataset`.
    """
    integers, reals = token_specs(config)
    is_last = stage == num_stages - 1
    has_reference = config.objective == run.DPO
    return {
        **sft_batch(config, stage, num_stages),
        "is_rejected": integers if is_last else None,
        "reference": reals if is_last and has_reference else None,
    }


def build_reward_model(
    config: RunConfig, *, vp_stage: int | None = None, **stage: Any
) -> RewardModel:
    """Build one pipeline stage of a reward model on the current device."""
    arguments = language_arguments(config, **stage)
    return RewardModel(
        config=config.model,
        transformer_layer_spec=gpt_layer_spec(config),
        vp_stage=vp_stage,
        **arguments | {"share_embeddings_and_output_weights": False},
    )


class Pairs(NamedTuple):
    """Sums over the answers of a micro-batch, [pairs, 2]: the chosen answer first.

    Ranks that share sequences (context parallelism) have the same sums.  A pair that does not
    exist has no tokens.
    """

    scores: Tensor  # log-probabilities of the model, or scores of a reward model
    reference: Tensor  # log-probabilities of the reference model
    num_tokens: Tensor

    @property
    def exist(self) -> Tensor:
        """Which pairs exist: bool [pairs]."""
        return self.num_tokens[:, 0] > 0


def preference_loss(
    config: RunConfig, groups: ProcessGroupCollection, batch: Batch, output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the losses of all pairs, their number, and the logged sums.

    ``output`` [1, n]: negative log-probabilities, or the scores of a reward model; the loss mask
    selects the score of the last token of each answer.  `pairs_of` names the tensors of
    ``batch``.  Collective over the context-parallel group.
    """
    is_reward_model = config.objective == run.REWARD
    pairs = pairs_of(batch, output if is_reward_model else -output, groups.cp)
    if is_reward_model:
        name = "reward loss"
        losses = -F.logsigmoid(pairs.scores[:, 0] - pairs.scores[:, 1])
        rewards = pairs.scores
    else:
        beta = config.preference.dpo_beta
        assert beta is not None, "it selects this loss"
        name = "dpo loss"
        losses = dpo_losses(pairs, beta, config.preference)
        rewards = beta * (pairs.scores - pairs.reference)
    number = pairs.exist.sum()
    chosen, rejected = rewards.detach().unbind(-1)
    margins = chosen - rejected
    logged = {
        name: losses.detach(),
        "reward of chosen": chosen,
        "reward of rejected": rejected,
        "reward margin": margins,
        "reward accuracy": (margins > 0).float(),
    }
    reported = {
        key: torch.stack([values.masked_fill(~pairs.exist, 0).sum(), number.float()])
        for key, values in logged.items()
    }
    return losses.masked_fill(~pairs.exist, 0).sum(), number.to(torch.int), reported


def dpo_losses(pairs: Pairs, beta: float, settings: PreferenceConfig) -> Tensor:
    """Return the loss of each pair: [pairs].

    ``beta`` weighs the distance from the reference model.  Label smoothing is the probability that
    the two answers of a pair are confused.
    """
    log_ratios = pairs.scores - pairs.reference
    if settings.dpo_loss_type == IPO:
        per_token = log_ratios / pairs.num_tokens.clamp(min=1)
        return (per_token[:, 0] - per_token[:, 1] - 1 / (2 * beta)).square()
    margins = beta * (log_ratios[:, 0] - log_ratios[:, 1])
    if settings.dpo_loss_type == HINGE:
        return torch.relu(1 - margins)
    smooth = settings.dpo_label_smoothing
    return -(1 - smooth) * F.logsigmoid(margins) - smooth * F.logsigmoid(-margins)


def pairs_of(batch: Batch, scores: Tensor, cp_group: ProcessGroup) -> Pairs:
    """Return the sums of each answer's tokens.  Collective over ``cp_group``.

    Each packed sequence of the micro-batch is an answer with its prompt; the rejected one follows
    the chosen one.  ``batch`` has, for this rank's n tokens, in [1, n]: loss_mask; is_rejected, 1
    for the tokens of rejected answers; and reference, whose sum over the tokens with loss of an
    answer is its log-probability under the reference model.
    """
    packed = batch["packed_seq_params"]
    mask = batch["loss_mask"].flatten()
    is_rejected = batch["is_rejected"].flatten().long()
    size = cp_group.size()
    sequence = sequence_index(packed.ends, len(mask) * size)
    if size > 1:
        lengths = row_lengths(packed.lengths, len(mask) * size)
        sequence = sequence[held_tokens(lengths, cp_group.rank(), size, sequence.device)]
    reference = torch.zeros_like(mask) if batch["reference"] is None else batch["reference"]
    values = torch.stack([scores.flatten().float(), reference.flatten(), mask.float()])
    values = torch.where(mask > 0, values, 0.0).t()
    num_sequences = packed.ends.numel()  # tokens after the last one are one more
    # The two answers of a pair are added at the number of the chosen one.
    slot = 2 * (sequence - is_rejected) + is_rejected
    sums = values.new_zeros(2 * num_sequences, 3).index_add(0, slot, values)
    if size > 1:
        # Each rank computes the loss of all pairs, and the framework adds the ranks' gradients and
        # their numbers of pairs: the sum over ranks is needed in backward too.
        sums = through(sums, cp_group, all_reduce, all_reduce)
    score, reference, num_tokens = sums.view(-1, 2, 3).unbind(-1)
    return Pairs(score, reference.detach(), num_tokens.detach())


def references_of_data(run: ModelRun, config: PreferenceDatasetConfig) -> dict[str, Any]:
    """Return the setting ``references`` of the dataset config.  Collective over all ranks.

    Raises CheckpointError if a run goes on, and the files of its beginning are gone.
    """
    set_loss_share(run, config)
    state = run.objective.saved or {}
    begins = _WEIGHTS not in state
    weights = f"{params_hash(run.parts):016x}" if begins else str(state[_WEIGHTS])
    run.objective.saved = {**state, _WEIGHTS: weights}
    blends = [config.blend] if config.blend is not None else config.blend_per_split or []
    paths = {path for blend in blends if blend is not None for path in blend[0]}
    references = {
        path: _references(run, config, path, weights, begins=begins)
        for path in sorted(paths) or [""]  # mock data has no path
    }
    return {"references": references}


def _references(
    run: ModelRun, config: PreferenceDatasetConfig, path: str, weights: str, *, begins: bool
) -> np.ndarray:
    """Return the log-probabilities of the answers at ``path``: float64 [2 rows]."""
    pairs: PreferenceDataset | None = None
    if reads_data(run):
        cls = MockPreferenceDataset if run.config.data.mock_data else PreferenceDataset
        rows = cls.build_low_level_dataset(path or None, config)
        pairs = cls(rows, path, np.arange(len(rows)), None, Split.train, config)
    found: np.ndarray | None = None
    name = ""
    if run.is_rank_0:
        assert pairs is not None, "the first rank reads data"
        name = f"reference-{_digest(pairs, weights)}.npy"
        arrays = (load_array(os.path.join(folder, name)) for folder in _folders(run, config))
        shape = (pairs.num_answers,)
        found = next((a for a in arrays if a is not None and a.shape == shape), None)
    sizes = [0, 0] if pairs is None else [pairs.num_answers, pairs.rows.rows_per_epoch]
    has_found, num_answers, num_rows = broadcast_json([found is not None, *sizes], run.groups.world)
    if has_found:
        values = torch.zeros(num_answers, dtype=torch.float64)
        values += 0.0 if found is None else torch.from_numpy(found.copy())
    elif begins:
        print_rank_0(f" > computing log-probabilities of {num_answers} answers (reference model)")
        values = _log_probs(run, pairs, num_answers, num_rows)
    else:
        raise CheckpointError(
            f"{path}: its log-probabilities under the reference model, computed when this run "
            "began, are gone: --load and --data-cache-path have none for these pairs and this "
            "--seq-length; restore the files reference-*.npy, or start again with --finetune and "
            "another --save"
        )
    references = sum_over_ranks(run, values).numpy()
    if run.is_rank_0:
        for folder in _folders(run, config):
            file = os.path.join(folder, name)
            is_written = (
                folder != run.config.checkpoint.load or folder == run.config.checkpoint.save
            )
            if is_written and not os.path.exists(file):
                os.makedirs(folder, exist_ok=True)
                save_array(file, references)
    return references


def _folders(run: ModelRun, config: PreferenceDatasetConfig) -> list[str]:
    """Return the folders that may have the file."""
    checkpoint = run.config.checkpoint
    named = (config.path_to_cache, checkpoint.save, checkpoint.load)
    return [folder for folder in named if folder is not None]


def _digest(pairs: PreferenceDataset, weights: str) -> str:
    """Return a digest of the weights, of all tokens, and of how long answers are cut."""
    digest = hashlib.sha256(weights.encode())
    rows = pairs.encoded
    for array in (rows.tokens, rows.is_trained, rows.ends, pairs.kept_lengths):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:32]


def _log_probs(
    run: ModelRun, pairs: PreferenceDataset | None, num_answers: int, num_rows: int
) -> Tensor:
    """Return this rank's part of the log-probabilities, 0 for the others.  Collective."""
    values = torch.zeros(num_answers, dtype=torch.float64)
    dp = run.groups.dp
    size = run.config.training.micro_batch_size
    num_passes = -(-num_rows // (size * dp.size()))
    reports = run.has_loss and run.groups.tp.rank() == 0 and run.groups.cp.rank() == 0
    joined = joined_tensors(run)

    def report(batch: Batch, losses: Tensor) -> dict[str, Tensor]:
        found = pairs_of(batch, -losses, run.groups.cp)
        return {"log_probs": found.scores[found.exist]}

    for first in range(0, num_passes, _PASSES_AT_ONCE):
        passes = range(first, min(first + _PASSES_AT_ONCE, num_passes))
        starts = [(i * dp.size() + dp.rank()) * size for i in passes]
        # None after the last row
        rows = [[i if i < num_rows else None for i in range(s, s + size)] for s in starts]
        loader = (
            None
            if pairs is None
            else (collate([pairs[row] for row in these], joined) for these in rows)
        )
        found = score(run, loader, len(rows), report)
        for these, each in zip(rows, found if reports else (), strict=reports):
            assert pairs is not None, "a rank that reports reads data"
            answers = [answer for row in these if row is not None for answer in pairs.answers(row)]
            values[answers] = each["log_probs"].flatten().cpu().double()
    return values


DPO = replace(
    GPT_SFT,
    datasets=(PreferenceDataset, MockPreferenceDataset),
    dataset_config=preference_dataset_config,
    batch=preference_batch,
    loss=preference_loss,
    prepare_data=references_of_data,
)
REWARD = replace(DPO, build=build_reward_model, prepare_data=set_loss_share)
