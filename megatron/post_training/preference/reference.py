"""Log-probabilities of all answers under the reference model: the weights that a run begins with.

They are computed once, by forward passes of the model before its first step, and kept in files
named by a hash of the weights and of the data: in --data-cache-path and in the directory of --save,
where a run that goes on finds them.

Order of collectives, for each data path: rank 0 looks for the file (broadcast); the forward passes;
one sum over all ranks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import device
from megatron.core.config.errors import CheckpointError
from megatron.core.datasets.index_cache import load_array, save_array
from megatron.core.datasets.samplers import collate
from megatron.core.datasets.utils import Split
from megatron.core.parallel.json_collectives import broadcast_json
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.post_training.preference.dataset import PreferenceDataset, PreferenceDatasetConfig
from megatron.post_training.preference.losses import pairs_of
from megatron.post_training.sft.objective import apply_sft, set_loss_share
from megatron.training.checkpointing.checkpoint_tensors import RunParts
from megatron.training.data.batch import next_batch
from megatron.training.data.loaders import chunk_iterators, joined_tensors, reads_data
from megatron.training.models.kind import Batch
from megatron.training.models.registry import implementation_of
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.runtime import Runtime
from megatron.training.step.train_step import forward_backward
from megatron.training.step.weight_hash import params_hash

_WEIGHTS = "reference_weights"  # in the state that checkpoints of the objective hold
_PASSES_AT_ONCE = 256  # micro-batches whose results are kept at a time


def references_of_data(run: Runtime, config: PreferenceDatasetConfig) -> dict[str, Any]:
    """Return the setting ``references`` of the dataset config.  Collective over all ranks.

    Raises CheckpointError if a run goes on, and the files of its beginning are gone.
    """
    set_loss_share(run, config)
    state = run.objective_state or {}
    begins = _WEIGHTS not in state
    parts = RunParts(model_chunks=run.model_chunks, groups=run.groups)
    weights = f"{params_hash(parts):016x}" if begins else str(state[_WEIGHTS])
    run.objective_state = {**state, _WEIGHTS: weights}
    blends = [config.blend] if config.blend is not None else config.blend_per_split or []
    paths = {path for blend in blends if blend is not None for path in blend[0]}
    references = {
        path: _references(run, config, path, weights, begins=begins)
        for path in sorted(paths) or [""]  # mock data has no path
    }
    return {"references": references}


def _references(
    run: Runtime, config: PreferenceDatasetConfig, path: str, weights: str, *, begins: bool
) -> np.ndarray:
    """Return the log-probabilities of the answers at ``path``: float64 [2 rows]."""
    pairs = _all_pairs(run, config, path) if reads_data(run) else None
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
    total = values.to(device.current())
    if run.groups.world.size() > 1:
        dist.all_reduce(total, group=run.groups.world)
    references = total.cpu().numpy()
    if run.is_rank_0:
        for folder in _folders(run, config):
            if folder != run.config.checkpoint.load or folder == run.config.checkpoint.save:
                _keep(os.path.join(folder, name), references)
    return references


def _all_pairs(run: Runtime, config: PreferenceDatasetConfig, path: str) -> PreferenceDataset:
    cls = implementation_of(run.config).datasets[run.config.data.mock_data]
    pairs = cls.build_low_level_dataset(path or None, config)
    rows = np.arange(cls.numel_low_level_dataset(pairs))
    made = cls(pairs, path, rows, None, Split.train, config)
    assert isinstance(made, PreferenceDataset), "of this objective"
    return made


def _folders(run: Runtime, config: PreferenceDatasetConfig) -> list[str]:
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


def _keep(file: str, references: np.ndarray) -> None:
    if not os.path.exists(file):
        os.makedirs(os.path.dirname(file), exist_ok=True)
        save_array(file, references)


def _log_probs(
    run: Runtime, pairs: PreferenceDataset | None, num_answers: int, num_rows: int
) -> Tensor:
    """Return this rank's part of the log-probabilities, 0 for the others.  Collective."""
    values = torch.zeros(num_answers, dtype=torch.float64)
    dp = run.groups.dp
    size = run.config.training.micro_batch_size
    num_passes = -(-num_rows // (size * dp.size()))
    reports = run.has_loss and run.groups.tp.rank() == 0 and run.groups.cp.rank() == 0
    scoring = replace(run, forward_step_func=partial(_score, run))
    for chunk in run.model_chunks:
        chunk.eval()
    for first in range(0, num_passes, _PASSES_AT_ONCE):
        passes = range(first, min(first + _PASSES_AT_ONCE, num_passes))
        rows = [_rows_of(i * dp.size() + dp.rank(), size, num_rows) for i in passes]
        loader = None if pairs is None else _MicroBatches(pairs, rows, joined_tensors(run))
        data = chunk_iterators(run, loader, prefetches=False)
        with torch.no_grad():
            found = forward_backward(scoring, data, len(rows), forward_only=True)
        for these, each in zip(rows, found if reports else (), strict=reports):
            assert pairs is not None, "a rank that reports reads data"
            answers = [answer for row in these if row is not None for answer in pairs.answers(row)]
            values[answers] = each["log_probs"].flatten().cpu().double()
    for chunk in run.model_chunks:
        chunk.train()
    return values


def _rows_of(number: int, size: int, num_rows: int) -> list[int | None]:
    """Return the rows of micro-batch ``number``; None after the last row."""
    return [i if i < num_rows else None for i in range(number * size, (number + 1) * size)]


class _MicroBatches:
    """Micro-batches of given rows, read when they are used."""

    def __init__(
        self,
        dataset: PreferenceDataset,
        rows: Sequence[Sequence[int | None]],
        joined: tuple[str, ...],
    ) -> None:
        self._dataset = dataset
        self._rows = rows
        self._joined = joined

    def __iter__(self) -> Iterator[Any]:
        for rows in self._rows:
            yield collate([self._dataset[row] for row in rows], self._joined)


def _score(run: Runtime, data_iterator: Iterator[Any] | None, model: nn.Module) -> tuple[Any, Any]:
    """Run a stage on the next micro-batch, as the forward step of training."""
    batch = next_batch(run, data_iterator, model)
    return apply_sft(model, batch), partial(_reported, run.groups, batch)


def _reported(
    groups: ProcessGroupCollection, batch: Batch, losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    pairs = pairs_of(batch, -losses, groups.cp)
    none = losses.new_zeros(())
    return none, none + 1, {"log_probs": pairs.scores[pairs.exist]}
