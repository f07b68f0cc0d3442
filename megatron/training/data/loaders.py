"""Build iterators of micro-batches from the data flags, and prefetch for the next step.

The stream of global samples is a function of data, seed and sample index.  The samples of a rank
follow from consumed samples, micro-batch size and data-parallel rank.

Between two steps the host may wait for the gradient norm, and the device would then idle until the
next micro-batch has arrived.  Within a step the host runs ahead of the device, so reading costs no
time.  A step captured as one CUDA graph needs all its micro-batches at its start.
"""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from megatron.core import device
from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import LengthCurriculum
from megatron.core.datasets.samplers import DataLoaderConfig, build_data_loader
from megatron.core.datasets.utils import Blend, get_blend_from_list
from megatron.core.dist_checkpointing.folders import folder_name
from megatron.core.rerun.state_machine import RerunDataIterator
from megatron.core.text_files import read_text
from megatron.training.config.data import DataConfig, parse_iterations
from megatron.training.data.balanced_rows import BalancedRows, BalancedSteps
from megatron.training.data.blend_history import note_blend
from megatron.training.models.attention_request import documents_are_bounds
from megatron.training.models.kind import BatchTable, DocumentSpec, TensorSpec
from megatron.training.models.registry import implementation_of
from megatron.training.process.exit_report import in_phase
from megatron.training.process.rank_print import print_detail, print_rank_0
from megatron.training.runtime.context import RunContext
from megatron.training.runtime.source_losses import SOURCE_IDS, SourceLosses, WithSources

SPLITS = "train", "valid", "test"
Provider = Callable[[Sequence[int | None]], tuple[Any, Any, Any]]


@dataclass
class TrainingData:
    """The data of a run on this rank; a loader is None on ranks that receive micro-batches."""

    train: Any = None  # iterator; with several model chunks a list of one per chunk
    train_loader: Any = None  # of the program, with --dataloader-type external
    # One loader per validation set; every pass makes a new iterator.
    valid_loaders: Sequence[Any] = ()
    test_loader: Any = None
    has_test_set: bool = False  # the same on all ranks
    mean_row_tokens: int = 0  # of training data; 0: all rows have --seq-length tokens


def get_blend_and_blend_per_split(data: DataConfig | Namespace) -> tuple[Any, Any]:
    """Return (blend, None), (None, [train, valid, test]) or (None, None) from the data flags.

    ``data`` may also be the namespace of get_args(), which user scripts pass.
    """
    if data.data_path:
        return get_blend_from_list(data.data_path), None
    if data.data_args_path:
        return _blend_of_file(data.data_args_path, "--data-args-path"), None
    if data.phase_data_args_path:
        return blend_of_phase(data.phase_data_args_path[0]), None
    if data.per_split_data_args_path:
        lists = _lists_per_split(data.per_split_data_args_path)
        return None, [get_blend_from_list(words) for words in lists]
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if any(paths):
        return None, [get_blend_from_list(path) for path in paths]
    return None, None


def blend_of_phase(path: str) -> Blend:
    """Return the blend of a file of --phase-data-args-path."""
    return _blend_of_file(path, "--phase-data-args-path")


def _blend_of_file(path: str, flag: str) -> Blend:
    words = _read(path, flag).split()
    blend = get_blend_from_list(words)
    if blend is None:
        raise DataError(f"{flag} {path} names no data: write prefixes into it")
    return blend


def train_valid_test_num_samples(run: RunContext) -> tuple[int | None, int | None, int | None]:
    """Return the number of samples each set must offer; None is one complete pass.

    These numbers decide the order of samples, so the count uses --global-batch-size even where
    --decrease-batch-size-if-needed runs with a smaller batch.
    """
    config, batch = run.config, run.batches.global_batch_size_wanted
    validation = config.validation
    train = config.training.train_samples
    if train is None:
        left = (run.train_iters - run.state.iteration) * batch  # the batch size may have grown
        train = max(run.train_iters * batch, run.state.consumed_train_samples + left)
    passes = run.train_iters // validation.eval_interval + 1
    test = validation.eval_iters * batch
    return train, None if validation.full_validation else passes * test, test


@in_phase("building the data")
def build_data(run: RunContext, provider: Provider) -> TrainingData:
    """Build the data iterators of ``run``.  Collective over all ranks.

    Index building may take long on the first rank.  The other ranks wait for its file lock
    meanwhile, so that no collective is pending (it could run into its timeout).
    """
    evaluates = run.config.validation.eval_iters > 0 or run.config.validation.full_validation
    if run.finished() and not evaluates:
        return TrainingData()  # nothing is read, and no text is tokenized
    sizes = train_valid_test_num_samples(run)
    print_detail(" > datasets target sizes (minimum size):")
    for name, size in zip(("train:     ", "validation:", "test:      "), sizes, strict=True):
        print_detail(f"    {name} {size}")
    train = valid = test = None
    if getattr(provider, "is_distributed", False) or run.groups.tp.rank() == 0:
        train, valid, test = provider(sizes)
    wrap = implementation_of(run.config).wrap_dataset
    if wrap is not None:
        train, valid, test = (
            _map_sets(partial(wrap, run, split, size), sets)
            for split, size, sets in zip(SPLITS, sizes, (train, valid, test), strict=True)
        )
    if run.config.data.dataloader_type == "external":
        return _external(run, train, valid, test)
    mean = mean_row_tokens(train)
    run.sources = _sources_of(run)
    note_blend(run, *train_blends(run))
    if run.sources is not None:
        train = _map_sets(run.sources.add_ids, train)
        valid, test = _map_sets(WithSources, [valid, test])
    if (curriculum := run.config.data.length_curriculum) is not None and train is not None:
        as_bounds = documents_are_bounds(run.config)
        train = LengthCurriculum(train, *curriculum, eod=run.tokenizer.eod, as_bounds=as_bounds)
    train_data: Any = None
    if not run.config.validation.skip_train and not run.finished():
        loader = make_loader(run, train, run.state.consumed_train_samples, is_training=True)
        train_data = chunk_iterators(run, loader)
    sets = list(valid) if isinstance(valid, list | tuple) else [valid]
    found = [s for s in sets if s is not None and evaluates]
    num_valid, num_test, mean = agree_on(
        run.groups.mp,
        len(found),
        int(test is not None and evaluates),
        mean,
    )
    whole = run.config.validation.full_validation
    return TrainingData(
        train=train_data,
        valid_loaders=[make_loader(run, s, 0, whole=whole) for s in found] or [None] * num_valid,
        test_loader=make_loader(run, test, 0),
        has_test_set=bool(num_test),
        mean_row_tokens=mean,
    )


def train_blends(run: RunContext) -> tuple[list[Blend | None], list[int]]:
    """Return the blend of the training data of each phase, and the phase's first sample."""
    data = run.config.data
    batch = run.batches.global_batch_size_wanted
    starts = [0, *(i * batch for i in parse_iterations(data.phase_transition_iterations))]
    if files := data.phase_data_args_path:
        return [*map(blend_of_phase, files)], starts
    blend, per_split = get_blend_and_blend_per_split(data)
    return [per_split[0] if per_split else blend] * len(starts), starts


def _sources_of(run: RunContext) -> SourceLosses | None:
    """Return the counts of the sources of --log-loss-by-source; None for less than two sources."""
    if not run.config.logging.log_loss_by_source:
        return None
    blends, _ = train_blends(run)
    paths = list(dict.fromkeys(path for each in blends if each for path in each[0]))
    if len(paths) < 2:
        print_rank_0("--log-loss-by-source has no effect: the training data has one source")
        return None
    return SourceLosses(paths, run.state.tokens_by_source)


def mean_row_tokens(dataset: Any) -> int:
    """Return the mean number of tokens of a row; 0 if all rows have --seq-length tokens."""
    if isinstance(dataset, BlendedDataset):
        means = [mean_row_tokens(each) for each in dataset.datasets]
        return int(np.average(means, weights=dataset.weights))
    lengths = getattr(dataset, "trimmed_lengths", None)
    return 0 if lengths is None else int(lengths[lengths > 0].mean())


def _map_sets(function: Callable[[Any], Any], sets: Any) -> Any:
    """Return ``function`` of a data set, or of each of several; None stays None."""
    if isinstance(sets, list | tuple):
        return [_map_sets(function, each) for each in sets]
    return None if sets is None else function(sets)


def agree_on(mp_group: dist.ProcessGroup, *counts: int) -> list[int]:
    """Return the ``counts`` of the first rank of ``mp_group`` on all its ranks.

    Collective over ``mp_group``.  Needed because ranks that do not read data cannot count it.
    """
    if mp_group.size() == 1:
        return list(counts)
    agreed = torch.tensor(counts, device=device.current())
    dist.broadcast(agreed, dist.get_global_rank(mp_group, 0), group=mp_group)
    return [int(n) for n in agreed]


def reads_data(run: RunContext) -> bool:
    """Return whether this rank reads micro-batches; other ranks receive them by broadcast."""
    return run.groups.tp.rank() == 0 and any(_chunks_that_read(run))


def chunk_iterators(run: RunContext, loader: Any, *, prefetches: bool = True) -> Any:
    """Return an iterator over ``loader``; with several model chunks a list of one per chunk.

    An entry is None for a chunk that reads nothing.  ``prefetches``: read micro-batches of the next
    step during a step.
    """
    readers = _chunks_that_read(run)
    if run.config.model.hybrid_context_parallel:
        return BalancedRows(run, loader)
    if len(readers) == 1:
        return ReadAhead(iter(loader), prefetches) if loader is not None else None
    if loader is None:
        return [None] * len(readers)
    # Each chunk reads every micro-batch; tee keeps it until the slowest chunk has read it.
    copies = iter(itertools.tee(loader, sum(readers)))
    return [ReadAhead(next(copies), prefetches) if reads else None for reads in readers]


def _chunks_that_read(run: RunContext) -> list[bool]:
    """Return for each model chunk whether its stage needs any tensor of a micro-batch."""
    return [any(batch_table(run, stage).values()) for stage in run.stages]


def batch_table(run: RunContext, stage: int) -> BatchTable:
    """Return the tensors that a stage reads; the last one also ids of sources, if they are logged.

    Called without `sources` too, before the data is built.
    """
    table = implementation_of(run.config).batch(run.config, stage, run.placement.num_stages)
    if run.sources is None:
        return table
    labels = table["labels"] if stage == run.placement.num_stages - 1 else None
    assert not isinstance(labels, DocumentSpec), "labels are a tensor"
    return {**table, SOURCE_IDS: labels and labels._replace(dtype=torch.int32)}


def make_loader(
    run: RunContext,
    dataset: Dataset[Any] | None,
    consumed: int,
    *,
    whole: bool = False,
    is_training: bool = False,
) -> Any:
    """Return the loader of this data-parallel rank from sample ``consumed`` on; None without data.

    ``whole`` also reads the last, incomplete global batch, padded with samples without loss.
    """
    if dataset is None:
        return None
    config, dp = run.config, run.groups.dp
    if config.model.hybrid_context_parallel:
        sizes = run.batches.global_batch_size if is_training else None
        return BalancedSteps(run, dataset, consumed, sizes, joined_tensors(run))
    return build_data_loader(
        dataset,
        consumed,
        DataLoaderConfig(
            micro_batch_size=config.training.micro_batch_size,
            data_parallel_rank=dp.rank(),
            data_parallel_size=dp.size(),
            dataloader_type=config.data.dataloader_type,
            num_workers=config.data.num_workers,
            pin_memory=device.is_cuda(),
            seed=config.training.seed,
            drop_last=not whole,
            pad_to_samples=run.batches.full_global_batch_size if whole else None,
            joined=joined_tensors(run),
        ),
    )


def joined_tensors(run: RunContext) -> tuple[str, ...]:
    """Return the tensors of a batch that concatenate those of its samples."""
    table = batch_table(run, 0)
    bounds = table.get("packed_seq_params")
    if isinstance(bounds, DocumentSpec) and bounds.is_trimmed:
        return tuple(name for name in table if name != "packed_seq_params")
    return tuple(
        name for name, spec in table.items() if isinstance(spec, TensorSpec) and spec.is_joined
    )


def state_path(run: RunContext, folder: str) -> Path:
    """Return the file of --dataloader-save for this data-parallel rank, as Megatron-LM names it."""
    stage = "mp_rank_00" + ("_000" if run.groups.pp.size() > 1 else "")
    name = f"train_dataloader_dprank{run.groups.dp.rank():03d}.pt"
    return Path(folder, folder_name(run.state.iteration), stage, name)


def _external(run: RunContext, train: Any, valid: Any, test: Any) -> TrainingData:
    saves_state = run.config.data.dataloader_save is not None
    if saves_state and train is not None and not hasattr(train, "save_state"):
        raise ConfigError(
            f"--dataloader-save {run.config.data.dataloader_save}: the training loader of this "
            f"program, a {type(train).__name__}, has no method save_state(); add one, or leave the "
            "flag out"
        )
    found = agree_on(run.groups.mp, int(valid is not None), int(test is not None))
    return TrainingData(
        # The state must not be that after micro-batches of a later step.
        train=chunk_iterators(run, train, prefetches=not saves_state),
        train_loader=train,
        valid_loaders=[valid] * found[0],
        test_loader=test,
        has_test_set=bool(found[1]),
    )


def _lists_per_split(path: str) -> list[list[str]]:
    """Return the train, valid and test list of a JSON file, empty for a missing one.

    Raise DataError for a file of another form.
    """
    flag = "--per-split-data-args-path"
    splits = ("train", "valid", "test")
    text = _read(path, flag)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        content = error
    lists = [content.get(name) or [] for name in splits] if isinstance(content, dict) else []
    if not (
        any(lists)
        and content.keys() <= {*splits}
        and all(isinstance(words, list) for words in lists)
        and all(type(word) in (str, int, float) for words in lists for word in words)
    ):
        raise DataError(
            f"{flag} {path}: an object with the lists train, valid and test of weights and "
            f"prefixes is needed, not {content!r:.100}"
        )
    return lists


def _read(path: str, flag: str) -> str:
    return read_text(path, f"{flag} {path}", DataError, "a file that lists the data prefixes")


class ReadAhead(RerunDataIterator):
    """Iterator over ``batches`` that can read and copy some of them to the device in advance.

    It keeps micro-batches from the first `advance` on, so that an evaluation keeps none.
    """

    def __init__(self, batches: Iterator[Any], prefetches: bool = True) -> None:
        super().__init__(batches)
        self.prefetches = prefetches  # obeyed by `read_ahead`, which reads for the next step
        self._keeps = False
        self._batches = batches
        self._ahead: list[Any] = []
        self._stream: Any = None
        self._arrived: Any = None

    def _read_next(self) -> Any:
        if not self._ahead:
            return next(self._batches)
        device.wait_event(self._arrived)
        return self._ahead.pop(0)

    def first(self) -> Any:
        """Return the batch that `next` will return, without consuming it."""
        self.read()
        device.wait_event(self._arrived)
        return self._ahead[0]

    def read(self, count: int = 1) -> None:
        """Prefetch until ``count`` batches wait, or fewer at the end of the data.

        The copies to the device are asynchronous, on a side stream.
        """
        for batch in itertools.islice(self._batches, max(0, count - len(self._ahead))):
            self._ahead.append(self._sent(batch) if isinstance(batch, dict) else batch)

    def _sent(self, batch: dict[str, Any]) -> dict[str, Any]:
        self._stream = self._stream or device.side_stream()
        if self._stream is None:
            return batch
        # Allocate on the compute stream, which also uses and frees these tensors.
        tensors = {name: t for name, t in batch.items() if torch.is_tensor(t)}
        sent = {n: torch.empty_like(t, device=device.current()) for n, t in tensors.items()}
        device.wait_stream(self._stream)
        with device.on_stream(self._stream):
            for name, tensor in tensors.items():
                sent[name].copy_(tensor, non_blocking=True)
            self._arrived = device.record_event()
        return batch | sent


def read_ahead(data: Any, count: int = 1) -> None:
    """Prefetch ``count`` batches of the iterator of each model chunk.

    Iterators of any other type, which a user script supplied, are left alone.
    """
    for batches in data if isinstance(data, list) else [data]:
        if isinstance(batches, ReadAhead) and batches.prefetches:
            batches.read(count)
