"""Distillation from a store: one run saves the teacher's log-probabilities, another trains on them.

``s`` tokens, ``b`` sequences, ``k`` stored tokens.  Both runs build the same training set, and a
sample carries its index in it.  Batch tensors are [b, s, ...], also the index and the checksum of a
sample, because context parallelism splits every tensor along the sequence.

Collectives of the last stage: for each chunk of tokens the output layer's, then the losses' over
tp.  The saving run all-gathers over cp, and gathers errors over all ranks after each file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.data import Dataset

from megatron.core.config.errors import DataError
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.parallel.collectives import all_or_none, broadcast_json
from megatron.core.parallel.context_parallel_partition import order_of_gathered, row_lengths
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_gather_first_dim
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_attr_wrapped_model
from megatron.post_training.distillation.logits_store import (
    LogitsStore,
    StoredRows,
    StoreSettings,
    checksum_of,
    no_entries,
    prepare_store,
    read_settings,
    write_rows,
)
from megatron.post_training.distillation.losses import (
    distillation_loss,
    divergence_from_stored,
    find_most_probable,
    lm_losses,
    map_chunks,
    require_wrapper,
)
from megatron.training.config.distillation import DistillationConfig
from megatron.training.config.run import RunConfig
from megatron.training.models.kind import Batch, BatchTable, ModelImplementation, TensorSpec
from megatron.training.process.exit_report import in_phase
from megatron.training.process.rank_print import print_rank_0
from megatron.training.step.run import ModelRun
from megatron.training.step.train_step import forward_backward

_IDS = "teacher_ids"
_LOG_PROBS = "teacher_log_probs"
_INDEX = "sample_index"
_CHECKSUM = "sample_checksum"
_FILE_BYTES = 256 << 20  # a rank keeps so many bytes of entries in memory before it writes them
_ENTRY_BYTES = 8


@cache
def add_stored_logits_loss(inner: ModelImplementation) -> ModelImplementation:
    """Return the implementation that trains as ``inner`` does, but towards a store."""
    return replace(
        inner,
        build=partial(_build, _losses, inner),
        batch=partial(_batch, _specs_of_entries, inner),
        apply=partial(_apply, inner),
        loss=partial(distillation_loss, _weigh, inner),
        load_frozen=partial(_check_store, inner),
        wrap_dataset=_with_entries,
    )


@cache
def save_top_tokens(inner: ModelImplementation) -> ModelImplementation:
    """Return the implementation that writes a store in place of training."""
    return replace(
        inner,
        build=partial(_build, _top_tokens, inner),
        batch=partial(_batch, _specs_of_keys, inner),
        loss=_rows_to_save,
        load_frozen=partial(_check_stage, "--logits-save-dir", inner),
        wrap_dataset=lambda _run, _split, _size, dataset: _MoreTensors(dataset, _keys),
        prepare_data=partial(_skip_saved_steps, inner),
        replace_training=save_logits,
    )


class LastStage(MegatronModule):
    """Last pipeline stage of a model, ``module``, whose output ``compute`` makes.

    It maps this stage, settings, final hidden states [s, b, h] and labels [b, s] to the output.
    """

    entries: tuple[Tensor, Tensor] | None = None  # [b, s, k] of the next micro-batch

    def __init__(
        self, model: LanguageModule, config: RunConfig, compute: Callable[..., Any]
    ) -> None:
        super().__init__(model.config)
        self.module = model
        model.loss_runner = partial(compute, self, config.distillation)

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """Run the model."""
        return self.module(*inputs, **kwargs)

    def in_chunks(
        self, function: Callable[..., Any], hidden: Tensor, tokens: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Call ``function`` on logits [c, b, v/tp] and ``tokens``; see `map_chunks`."""
        model: Any = self.module
        weight = model.output_weight()
        return map_chunks(
            model,
            lambda x, *tokens: function(model.sharded_logits(x, weight), *tokens),
            [model.scaled(hidden)],
            tokens,
        )


def _build(
    compute: Callable[..., Any],
    inner: ModelImplementation,
    config: RunConfig,
    *,
    post_process: bool = True,
    **stage: Any,
) -> nn.Module:
    model = inner.build(config, post_process=post_process, **stage)
    assert isinstance(model, LanguageModule)
    return LastStage(model, config, compute) if post_process else model


def _losses(
    stage: LastStage, settings: DistillationConfig, hidden: Tensor, labels: Tensor
) -> Tensor:
    """Return the losses of each token [2, b, s]; in an evaluation [1, b, s]."""
    student: Any = stage.module
    entries = stage.entries
    stage.entries = None
    if not torch.is_grad_enabled():  # the store has no entries for an evaluation
        return student.token_losses(hidden, labels)[None]  # type: ignore[no-any-return]
    assert entries is not None, "apply() sets them"
    learns = settings.logits_load_kd_loss_alpha < 1

    def losses_of(logits: Tensor, labels: Tensor, ids: Tensor, log_probs: Tensor) -> Any:
        kl = divergence_from_stored(
            logits, ids, log_probs, tp_group=student.tp_group, vocab_size=_vocab_size(student)
        )
        return lm_losses(student, logits, labels, learns=learns), kl

    return torch.stack(stage.in_chunks(losses_of, hidden, [labels, *entries]))


def _top_tokens(
    stage: LastStage, settings: DistillationConfig, hidden: Tensor, labels: Tensor
) -> tuple[Tensor, ...]:
    """Return ids and log-probabilities [b, s, k] of the most probable tokens, -inf for others."""
    model: Any = stage.module
    size = _vocab_size(model)
    k = _top_k(settings, size)

    def top_of(logits: Tensor, _labels: Tensor) -> tuple[Tensor, ...]:
        ids, log_probs = find_most_probable(logits, k, tp_group=model.tp_group, vocab_size=size)
        if settings.logits_save_top_p is not None:
            before = log_probs.exp().cumsum(-1) - log_probs.exp()
            is_dropped = before >= settings.logits_save_top_p
            is_dropped[..., : settings.logits_save_top_p_min_k] = False
            log_probs = log_probs.masked_fill(is_dropped, float("-inf"))
        return ids, log_probs

    return stage.in_chunks(top_of, hidden, [labels])


def _vocab_size(model: LanguageModule) -> int:
    return model.num_tokens or model.vocab_size


def _top_k(settings: DistillationConfig, vocab_size: int) -> int:
    """Return the number of stored tokens: all of the vocabulary without --logits-save-top-k."""
    return min(settings.logits_save_top_k or vocab_size, vocab_size)


def _check_stage(flag: str, inner: ModelImplementation, run: Any) -> None:
    """Raise ConfigError if the last stage of a program's own model is none of ours."""
    inner.load_frozen(run)
    last = run.placement.num_stages - 1
    chunks = zip(run.model_chunks, run.stages, strict=True)
    require_wrapper([chunk for chunk, stage in chunks if stage == last], LastStage, flag)


def _check_store(inner: ModelImplementation, run: Any) -> None:
    """Raise DataError if the store is of another vocabulary or sequence length than ``run``."""
    _check_stage("--logits-load-dir", inner, run)
    folder = run.config.distillation.logits_load_dir
    settings = _settings(folder)
    found = settings.seq_length, settings.vocab_size
    wanted = run.config.data.seq_length, run.tokenizer.vocab_size
    if found != wanted:
        raise DataError(
            f"--logits-load-dir {folder}: --seq-length and vocabulary of the store are {found}, of "
            f"this run {wanted}: give the --seq-length and the tokenizer of the store"
        )


def _apply(inner: ModelImplementation, model: nn.Module, batch: Batch) -> Any:
    if batch[_IDS] is not None:
        stage = get_attr_wrapped_model(model, "entries", return_model_obj=True)
        stage.entries = batch[_IDS], batch[_LOG_PROBS]
    return inner.apply(model, batch)


def _batch(
    specs_of: Callable[[RunConfig], dict[str, TensorSpec]],
    inner: ModelImplementation,
    config: RunConfig,
    stage: int,
    num_stages: int,
) -> BatchTable:
    specs = specs_of(config)
    more = specs if stage == num_stages - 1 else dict.fromkeys(specs)
    return {**inner.batch(config, stage, num_stages), **more}


def _specs_of_entries(config: RunConfig) -> dict[str, TensorSpec]:
    top_k = _settings(config.distillation.logits_load_dir).top_k
    shape = config.training.micro_batch_size, config.data.seq_length, top_k
    return {_IDS: TensorSpec(torch.int32, shape), _LOG_PROBS: TensorSpec(torch.float32, shape)}


def _specs_of_keys(config: RunConfig) -> dict[str, TensorSpec]:
    spec = TensorSpec(torch.int64, (config.training.micro_batch_size, config.data.seq_length))
    return dict.fromkeys((_INDEX, _CHECKSUM), spec)


@cache
def _settings(folder: str) -> StoreSettings:
    return read_settings(folder, "--logits-load-dir")


def _weigh(config: RunConfig, _groups: ProcessGroupCollection, sums: list[Tensor]) -> Tensor:
    """Return the loss of a micro-batch: alpha * distillation + (1 - alpha) * cross entropy."""
    lm, kl = sums
    alpha = config.distillation.logits_load_kd_loss_alpha
    return alpha * kl + (1 - alpha) * lm if alpha < 1 else kl


def _rows_to_save(
    config: RunConfig,
    groups: ProcessGroupCollection,
    batch: Batch,
    output: tuple[Tensor, Tensor],
    *,
    non_loss_data: bool = False,
) -> Any:
    """Return the `StoredRows` of a micro-batch, on the CPU.  Collective over cp."""
    if not non_loss_data:  # the planner's pass
        zero = output[1].sum()
        return zero, zero.int(), {}
    packed = batch.get("packed_seq_params")  # if all rows are joined into one
    lengths = None if packed is None else packed.lengths
    shape = -1, config.data.seq_length
    index, checksum, ids, log_probs = (
        _gather_rows(x, groups.cp, lengths).flatten(0, 1).unflatten(0, shape).cpu()
        for x in (batch[_INDEX], batch[_CHECKSUM], *output)
    )
    return StoredRows(index[:, 0], checksum[:, 0], ids, log_probs)


def _gather_rows(x: Tensor, cp_group: ProcessGroup, lengths: tuple[int, ...] | None) -> Tensor:
    """Return the complete rows [b, s, ...] of context-parallel parts [b, s/cp, ...].

    ``lengths``: of the samples that are packed into a row.
    """
    size = cp_group.size()
    if size == 1:
        return x
    every = all_gather_first_dim(x.transpose(0, 1), cp_group)
    lengths = row_lengths(lengths, len(every))
    order, _ = order_of_gathered(lengths, tuple(range(size)), size, x.device)
    return every[order].transpose(0, 1)


class _MoreTensors(Dataset[Any]):
    """A data set whose samples have more tensors, ``more(index, sample)``."""

    def __init__(
        self, samples: Any, more: Callable[[int | None, dict[str, Any]], dict[str, Any]]
    ) -> None:
        self._samples = samples
        self._more = more

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int | None) -> dict[str, Any]:
        sample = dict(self._samples[index])
        return sample | self._more(index, sample)


def _keys(index: int | None, sample: dict[str, Any]) -> dict[str, Any]:
    """Return index and checksum of a sample, for each of its tokens."""
    keys = torch.tensor([-1 if index is None else index, checksum_of(sample)])
    length = len(sample["tokens"])
    return dict(zip((_INDEX, _CHECKSUM), keys[:, None].expand(2, length), strict=True))


def _with_entries(run: ModelRun, split: str, num_samples: int | None, dataset: Any) -> Any:
    """Return ``dataset`` with the entries of the store; raise DataError if it lacks some.

    Samples that are not trained on have none: a data loader may read ahead.
    """
    num_trained = (num_samples or 0) if split == "train" else 0
    settings = run.config.distillation
    folder = settings.logits_load_dir or ""
    store = LogitsStore(folder) if num_trained else None
    wrapped = _MoreTensors(dataset, partial(_entries, _settings(folder), store, num_trained))
    if store is None:
        return wrapped
    missing = next((i for i in range(num_trained) if i not in store), None)
    if missing is not None and not settings.logits_load_ignore_errors:
        raise DataError(
            f"--logits-load-dir {folder}: the store has {len(store)} samples and not sample "
            f"{missing}, the run trains on {num_trained}: save the store with the data, the seed "
            "and the number of samples of this run"
        )
    wrapped[0]  # other data is refused here, and not in a worker of the data loader
    return wrapped


def _entries(
    settings: StoreSettings,
    store: LogitsStore | None,
    num_trained: int,
    index: int | None,
    sample: dict[str, Any],
) -> dict[str, Any]:
    found = no_entries(settings)
    if store is not None and index is not None and index < num_trained and index in store:
        found = store.entries(index, checksum_of(sample))
    return dict(zip((_IDS, _LOG_PROBS), found, strict=True))


def _skip_saved_steps(inner: ModelImplementation, run: ModelRun, config: Any) -> dict[str, Any]:
    """Create the store, and skip the steps whose samples it has.  Collective over all ranks."""
    folder = Path(run.config.distillation.logits_save_dir or "")

    def known() -> list[int]:
        """Return the number of steps, and of samples, that the store has completely; on rank 0."""
        steps = 0
        samples = 0
        if run.is_rank_0:
            prepare_store(folder, _settings_to_save(run))
            store = LogitsStore(str(folder), "--logits-save-dir")
            while steps < run.train_iters:
                end = samples + run.batches.global_batch_size(samples)
                if not all(index in store for index in range(samples, end)):
                    break
                steps = steps + 1
                samples = end
        return [steps, samples]

    found = broadcast_json(all_or_none(known, str(folder), run.groups.world), run.groups.world)
    run.state.iteration, run.state.consumed_train_samples = found
    if run.state.iteration:
        print_rank_0(
            f"  {folder} has the samples of {run.state.iteration} steps: continuing after them"
        )
    return {} if inner.prepare_data is None else inner.prepare_data(run, config)


def _settings_to_save(run: ModelRun) -> StoreSettings:
    size = run.tokenizer.vocab_size
    asked = run.config.distillation
    return StoreSettings(
        size, run.config.data.seq_length, _top_k(asked, size), asked.logits_save_dtype
    )


@in_phase("saving log-probabilities")
def save_logits(run: ModelRun) -> None:
    """Run all training steps forward and write the store.  Collective over all ranks."""
    for chunk in run.model_chunks:
        chunk.eval()
    groups = run.groups
    folder = Path(run.config.distillation.logits_save_dir or "")
    settings = _settings_to_save(run)
    rows: list[StoredRows] = []
    # On one rank, at most: the same on all ranks.
    samples = run.batches.global_batch_size_wanted // groups.dp.size()
    bytes_of_step = samples * settings.seq_length * settings.top_k * _ENTRY_BYTES
    first = run.state.iteration + 1
    began_s = time.monotonic()

    def write() -> None:
        if run.has_loss and groups.tp.rank() == 0 and groups.cp.rank() == 0:
            write_rows(folder, rows, settings.dtype, (first, step), groups.dp.rank())

    while not run.finished():
        consumed = run.state.consumed_train_samples
        with torch.no_grad():
            rows += forward_backward(
                run,
                run.data.train,
                run.batches.num_microbatches(consumed),
                forward_only=True,
                collect_non_loss_data=True,
            )
        run.state.iteration += 1
        run.state.consumed_train_samples += run.batches.global_batch_size(consumed)
        step = run.state.iteration
        if run.finished() or (step - first + 1) * bytes_of_step >= _FILE_BYTES:
            all_or_none(write, str(folder), groups.world)
            rows = []
            first = step + 1
        if step % run.config.logging.log_interval == 0 or run.finished():
            print_rank_0(
                f" step {step:8d}/{run.train_iters:8d} | log-probabilities of "
                f"{run.state.consumed_train_samples} samples | elapsed time (s): "
                f"{time.monotonic() - began_s:.1f}"
            )
