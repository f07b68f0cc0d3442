"""Distillation from a store: one run saves the teacher's log-probabilities, another trains on them.

``s`` tokens, ``b`` sequences, ``k`` stored tokens.  Both runs build the same training set, and a
sample carries its index in it.  Batch tensors are [b, s, ...], also the index and the checksum of a
sample, because context parallelism splits every tensor along the sequence.

Collective, on the last stage: those of the output layer and of the losses over tp, for each chunk
of tokens; in the saving run all-gathers over cp, and a gather of errors over all ranks after each
file.
"""

from __future__ import annotations

import time
from collections.abc import Sized
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
from megatron.core.parallel.collectives import all_gather_single
from megatron.core.parallel.context_parallel_partition import order_of_gathered, row_lengths
from megatron.core.parallel.json_collectives import all_or_none, broadcast_json
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
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
    divergence_from_stored,
    in_chunks,
    lm_losses,
    most_probable,
    require_wrapper,
    sum_of_masked,
)
from megatron.training.config.run import RunConfig
from megatron.training.models.kind import Batch, BatchTable, ModelImplementation, TensorSpec
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.phases import in_phase
from megatron.training.runtime.runtime import Runtime
from megatron.training.step.train_step import forward_backward

_IDS = "teacher_ids"
_LOG_PROBS = "teacher_log_probs"
_INDEX = "sample_index"
_CHECKSUM = "sample_checksum"
_FILE_BYTES = 256 << 20  # of one rank; entries are kept in host memory until they are written
_ENTRY_BYTES = 8


@cache
def taught(inner: ModelImplementation) -> ModelImplementation:
    """Return the implementation that trains as ``inner`` does, but towards a store."""
    return replace(
        inner,
        build=partial(_build, StoredTeacher, inner),
        batch=partial(_taught_batch, inner),
        apply=partial(_apply, inner),
        loss=partial(_taught_loss, inner),
        load_frozen=partial(_check_store, inner),
        wrap_dataset=_with_entries,
    )


@cache
def saving(inner: ModelImplementation) -> ModelImplementation:
    """Return the implementation whose last stage returns what a store keeps."""
    return replace(
        inner,
        build=partial(_build, TopTokens, inner),
        batch=partial(_saved_batch, inner),
        loss=_rows_to_save,
        load_frozen=partial(_check_saving, inner),
        wrap_dataset=_with_keys,
        prepare_data=partial(_skip_saved_steps, inner),
        replace_training=save_logits,
    )


class StoredTeacher(MegatronModule):
    """Last pipeline stage of a student, ``module``, that compares itself with stored entries."""

    def __init__(self, student: LanguageModule, config: RunConfig) -> None:
        super().__init__(student.config)
        self.module = student
        self.learns_text = config.distillation.logits_load_kd_loss_alpha < 1
        self._entries: tuple[Tensor, Tensor] | None = None
        self.vocab_size = _vocabulary(student)
        student.loss_runner = self._losses

    def expect(self, ids: Tensor, log_probs: Tensor) -> None:
        """Set the entries [b, s, k] of the next micro-batch."""
        self._entries = ids, log_probs

    def forward(self, *inputs: object, **kwargs: object) -> Tensor:
        """Return the losses of each token [2, b, s]; in an evaluation [1, b, s]."""
        losses: Tensor = self.module(*inputs, **kwargs)
        self._entries = None
        return losses

    def _losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        student = self.module
        assert isinstance(student, LanguageModule)
        if not torch.is_grad_enabled():  # the store has no entries for an evaluation
            return student.token_losses(hidden, labels).unsqueeze(0)
        assert self._entries is not None, "apply() sets them"
        weight = student.output_weight()

        def losses_of(x: Tensor, labels: Tensor, ids: Tensor, log_probs: Tensor) -> Any:
            logits = student.sharded_logits(x, weight)
            kl = divergence_from_stored(
                logits, ids, log_probs, tp_group=student.tp_group, vocab_size=self.vocab_size
            )
            return lm_losses(student, logits, labels, learns=self.learns_text), kl

        tokens = [labels, *self._entries]
        return torch.stack(in_chunks(student, losses_of, [student.scaled(hidden)], tokens))


class TopTokens(MegatronModule):
    """Last pipeline stage of a teacher, ``module``, that returns its most probable tokens."""

    def __init__(self, teacher: LanguageModule, config: RunConfig) -> None:
        super().__init__(teacher.config)
        self.module = teacher
        self.kd = config.distillation
        self.vocab_size = _vocabulary(teacher)
        teacher.loss_runner = self._top  # type: ignore[assignment]

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """Return ids and log-probabilities [b, s, k]; those that are not kept are -inf."""
        return self.module(*inputs, **kwargs)

    def _top(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        teacher = self.module
        kd = self.kd
        assert isinstance(teacher, LanguageModule)
        weight = teacher.output_weight()
        k = top_k_of(kd.logits_save_top_k, self.vocab_size)

        def top_of(x: Tensor, _labels: Tensor) -> tuple[Tensor, ...]:
            logits = teacher.sharded_logits(x, weight)
            ids, log_probs = most_probable(
                logits, k, tp_group=teacher.tp_group, vocab_size=self.vocab_size
            )
            if kd.logits_save_top_p is not None:
                before = log_probs.exp().cumsum(-1) - log_probs.exp()
                is_dropped = before >= kd.logits_save_top_p
                is_dropped[..., : kd.logits_save_top_p_min_k] = False
                log_probs = log_probs.masked_fill(is_dropped, float("-inf"))
            return ids, log_probs

        return in_chunks(teacher, top_of, [teacher.scaled(hidden)], [labels])


def top_k_of(asked: int | None, vocab_size: int) -> int:
    """Return the number of stored tokens: all of the vocabulary without --logits-save-top-k."""
    return min(asked or vocab_size, vocab_size)


def _vocabulary(model: LanguageModule) -> int:
    return model.num_tokens or model.vocab_size


def _build(
    wrapper: type[StoredTeacher | TopTokens],
    inner: ModelImplementation,
    config: RunConfig,
    *,
    post_process: bool = True,
    **stage: Any,
) -> nn.Module:
    model = inner.build(config, post_process=post_process, **stage)
    assert isinstance(model, LanguageModule)
    return wrapper(model, config) if post_process else model


def _check_store(inner: ModelImplementation, run: Any) -> None:
    """Raise DataError if the store is of another vocabulary or sequence length than ``run``."""
    if inner.load_frozen is not None:
        inner.load_frozen(run)
    folder = run.config.distillation.logits_load_dir
    if run.has_loss:
        require_wrapper(_last(run), StoredTeacher, "--logits-load-dir")
    settings = _settings(folder)
    size = run.tokenizer.vocab_size
    if settings.seq_length != run.config.data.seq_length:
        raise DataError(
            f"--logits-load-dir {folder}: the store has sequences of {settings.seq_length} tokens, "
            f"--seq-length is {run.config.data.seq_length}: give that of the store"
        )
    if settings.vocab_size != size:
        raise DataError(
            f"--logits-load-dir {folder}: the store has a vocabulary of {settings.vocab_size} "
            f"tokens, this run one of {size}: teacher and student need one tokenizer"
        )


def _check_saving(inner: ModelImplementation, run: Any) -> None:
    if inner.load_frozen is not None:
        inner.load_frozen(run)
    if run.has_loss:
        require_wrapper(_last(run), TopTokens, "--logits-save-dir")


def _last(run: Any) -> list[nn.Module]:
    """Return the model chunk of the last stage, on the ranks that have it."""
    last = run.placement.num_stages - 1
    return [
        chunk for chunk, stage in zip(run.model_chunks, run.stages, strict=True) if stage == last
    ]


def _apply(inner: ModelImplementation, model: nn.Module, batch: Batch) -> Any:
    if batch[_IDS] is not None:
        get_attr_wrapped_model(model, "expect")(batch[_IDS], batch[_LOG_PROBS])
    return inner.apply(model, batch)


def _taught_batch(
    inner: ModelImplementation, config: RunConfig, stage: int, num_stages: int
) -> BatchTable:
    settings = _settings(config.distillation.logits_load_dir)
    shape = config.training.micro_batch_size, config.data.seq_length, settings.top_k
    specs = {
        _IDS: TensorSpec(torch.int32, shape),
        _LOG_PROBS: TensorSpec(torch.float32, shape),
    }
    return _with_specs(inner.batch(config, stage, num_stages), specs, stage == num_stages - 1)


def _saved_batch(
    inner: ModelImplementation, config: RunConfig, stage: int, num_stages: int
) -> BatchTable:
    shape = config.training.micro_batch_size, config.data.seq_length
    specs = dict.fromkeys((_INDEX, _CHECKSUM), TensorSpec(torch.int64, shape))
    return _with_specs(inner.batch(config, stage, num_stages), specs, stage == num_stages - 1)


def _with_specs(table: BatchTable, specs: dict[str, TensorSpec], is_last: bool) -> BatchTable:
    return {**table, **(specs if is_last else dict.fromkeys(specs))}


@cache
def _settings(folder: str | None) -> StoreSettings:
    assert folder is not None, "the run reads a store"
    return read_settings(folder, "--logits-load-dir")


def _taught_loss(
    inner: ModelImplementation,
    config: RunConfig,
    groups: ProcessGroupCollection,
    batch: Batch,
    output: Tensor,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss of a micro-batch: alpha * distillation + (1 - alpha) * cross entropy."""
    count = inner.loss or sum_of_masked
    lm, num_tokens, reported = count(config, groups, batch, output[0])
    if len(output) == 1:
        return lm, num_tokens, reported
    kl = count(config, groups, batch, output[1])[0]
    alpha = config.distillation.logits_load_kd_loss_alpha
    total = alpha * kl + (1 - alpha) * lm if alpha < 1 else kl
    named = {"total loss": total, "logits distillation loss": kl}
    pairs = {name: torch.stack([x.detach(), num_tokens.to(x)]) for name, x in named.items()}
    return total, num_tokens, reported | pairs


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
    packed = batch.get("packed_seq_params")  # of rows that follow each other in one row
    lengths = None if packed is None else packed.lengths
    shape = -1, config.data.seq_length
    index, checksum, ids, log_probs = (
        _complete(x, groups.cp, lengths).flatten(0, 1).unflatten(0, shape).cpu()
        for x in (batch[_INDEX], batch[_CHECKSUM], *output)
    )
    return StoredRows(index[:, 0], checksum[:, 0], ids, log_probs)


def _complete(x: Tensor, cp_group: ProcessGroup, lengths: tuple[int, ...] | None) -> Tensor:
    """Return the complete rows [b, s, ...] of context-parallel parts [b, s/cp, ...].

    ``lengths``: of the samples that are packed into a row.
    """
    size = cp_group.size()
    if size == 1:
        return x
    mine = x.transpose(0, 1).contiguous()
    every = mine.new_empty((len(mine) * size, *mine.shape[1:]))
    all_gather_single(every, mine, group=cp_group)
    lengths = row_lengths(lengths, len(every))
    order, _ = order_of_gathered(lengths, tuple(range(size)), size, x.device)
    return every[order].transpose(0, 1)


class _Wrapped(Dataset[Any]):
    """A data set whose samples have more tensors."""

    def __init__(self, samples: Any) -> None:
        assert isinstance(samples, Sized)
        self.samples: Any = samples

    def __len__(self) -> int:
        return len(self.samples)


class _WithKeys(_Wrapped):
    """Samples with their index in the set, and their checksum, for each of their tokens."""

    def __getitem__(self, index: int | None) -> dict[str, Any]:
        sample = dict(self.samples[index])
        keys = torch.tensor([-1 if index is None else index, checksum_of(sample)])
        length = len(sample["tokens"])
        return sample | dict(zip((_INDEX, _CHECKSUM), keys[:, None].expand(2, length), strict=True))


class _WithEntries(_Wrapped):
    """Samples with the entries of a store; without entries those that are not trained on.

    A data loader may read samples ahead that the run does not need.
    """

    def __init__(
        self, samples: Any, settings: StoreSettings, store: LogitsStore | None, trained: range
    ) -> None:
        super().__init__(samples)
        self.settings = settings
        self.store = store
        self.trained = trained

    def __getitem__(self, index: int | None) -> dict[str, Any]:
        sample = dict(self.samples[index])
        entries = no_entries(self.settings)
        store = self.store
        if store is not None and index is not None and index in self.trained and index in store:
            entries = store.entries(index, checksum_of(sample))
        return sample | dict(zip((_IDS, _LOG_PROBS), entries, strict=True))


def _with_keys(config: RunConfig, dataset: Any, *, num_trained: int) -> Any:
    del config, num_trained
    return _WithKeys(dataset)


def _with_entries(config: RunConfig, dataset: Any, *, num_trained: int) -> Any:
    """Return ``dataset`` with the entries of the store; raise DataError if it lacks some."""
    kd = config.distillation
    settings = _settings(kd.logits_load_dir)
    if not num_trained:
        return _WithEntries(dataset, settings, None, range(0))
    store = LogitsStore(kd.logits_load_dir or "")
    wrapped = _WithEntries(dataset, settings, store, range(num_trained))
    missing = next((i for i in range(num_trained) if i not in store), None)
    if missing is not None and not kd.logits_load_ignore_errors:
        raise DataError(
            f"--logits-load-dir {kd.logits_load_dir}: the store has {len(store)} samples and not "
            f"sample {missing}, the run trains on {num_trained}: save the store with the data, the "
            "seed and the number of samples of this run"
        )
    wrapped[0]  # other data is refused here, and not in a worker of the data loader
    return wrapped


def _skip_saved_steps(inner: ModelImplementation, run: Runtime, config: Any) -> dict[str, Any]:
    """Create the store, and skip the steps whose samples it has.  Collective over all ranks."""
    world = run.groups.world
    folder = _store_folder(run)
    known = all_or_none(partial(_known_steps, run, folder), str(folder), world)
    run.state.iteration, run.state.consumed_train_samples = broadcast_json(known, world)
    if run.state.iteration:
        print_rank_0(
            f"  {folder} has the samples of {run.state.iteration} steps: continuing after them"
        )
    return {} if inner.prepare_data is None else inner.prepare_data(run, config)


def _known_steps(run: Runtime, folder: Path) -> list[int]:
    """Return the number of steps, and of samples, that the store has completely; on rank 0."""
    if run.groups.world.rank():
        return [0, 0]
    prepare_store(folder, _store_settings(run))
    store = LogitsStore(str(folder), "--logits-save-dir")
    steps = 0
    samples = 0
    while steps < run.train_iters:
        size = run.batches.global_batch_size(samples)
        if not all(index in store for index in range(samples, samples + size)):
            break
        steps = steps + 1
        samples = samples + size
    return [steps, samples]


def _store_folder(run: Runtime) -> Path:
    folder = run.config.distillation.logits_save_dir
    assert folder is not None, "the run saves a store"
    return Path(folder)


def _store_settings(run: Runtime) -> StoreSettings:
    assert run.tokenizer is not None, "setup_tokenizer() builds it"
    kd = run.config.distillation
    return StoreSettings(
        vocab_size=run.tokenizer.vocab_size,
        seq_length=run.config.data.seq_length,
        top_k=top_k_of(kd.logits_save_top_k, run.tokenizer.vocab_size),
        dtype=kd.logits_save_dtype,
    )


@in_phase("saving log-probabilities")
def save_logits(run: Runtime) -> None:
    """Run all training steps forward and write the store.  Collective over all ranks."""
    for chunk in run.model_chunks:
        chunk.eval()
    rows: list[StoredRows] = []
    first = run.state.iteration + 1
    began_s = time.monotonic()
    while not run.finished():
        consumed = run.state.consumed_train_samples
        with torch.no_grad():
            rows += forward_backward(
                run,
                run.train_data,
                run.batches.num_microbatches(consumed),
                forward_only=True,
                collect_non_loss_data=True,
            )
        run.state.iteration += 1
        run.state.consumed_train_samples += run.batches.global_batch_size(consumed)
        step = run.state.iteration
        if run.finished() or (step - first + 1) * _bytes_of_step(run) >= _FILE_BYTES:
            save = partial(_write_store, run, rows, (first, step))
            all_or_none(save, str(_store_folder(run)), run.groups.world)
            rows = []
            first = step + 1
        if step % run.config.logging.log_interval == 0 or run.finished():
            print_rank_0(
                f" step {step:8d}/{run.train_iters:8d} | log-probabilities of "
                f"{run.state.consumed_train_samples} samples | elapsed time (s): "
                f"{time.monotonic() - began_s:.1f}"
            )


def _bytes_of_step(run: Runtime) -> int:
    """Return the bytes of a step on one rank, at most: the same on all ranks."""
    settings = _store_settings(run)
    samples = run.batches.global_batch_size_wanted // run.groups.dp.size()
    return samples * settings.seq_length * settings.top_k * _ENTRY_BYTES


def _write_store(run: Runtime, rows: list[StoredRows], steps: tuple[int, int]) -> None:
    groups = run.groups
    if run.has_loss and groups.tp.rank() == 0 and groups.cp.rank() == 0:
        write_rows(_store_folder(run), rows, _store_settings(run).dtype, steps, groups.dp.rank())
