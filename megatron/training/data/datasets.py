"""Build the datasets of a run for its model kind, or those of user code (--dataset-type NAME)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal, cast

from torch import Tensor
from torch.utils.data import Dataset

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.config.rule import problems_of
from megatron.core.datasets.blended_dataset import PhasedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.corpus import Corpus
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Blend
from megatron.core.packed_seq_params import PackedBounds
from megatron.training.arguments.rules.rule import Settings
from megatron.training.arguments.rules.training import SCHEDULE_LENGTHS
from megatron.training.config.data import DATASETS
from megatron.training.data.energon import build_loaders
from megatron.training.data.loaders import (
    agree_on,
    blend_of_phase,
    get_blend_and_blend_per_split,
    reads_data,
    train_blends,
)
from megatron.training.models.kind import ModelImplementation
from megatron.training.models.registry import implementation_of, model_kind_of
from megatron.training.preprocess.corpus import CorpusSource, sources_of, start
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.context import RunContext
from megatron.training.tokenizer.base import MegatronTokenizer, TokenizerSpec
from megatron.training.tokenizer.fingerprint import check_data

# Settings that flags and data sets name alike.
_OF_DATA = (
    "split num_dataset_builder_threads mmap_bin_files object_storage_cache_path "
    "mid_level_dataset_surplus verify_data"
).split()


def build_datasets(run: RunContext, num_samples: Sequence[int | None]) -> tuple[Any, Any, Any]:
    """Build the train, validation and test set with at least ``num_samples`` samples each.

    None stands for one pass over the data.  Ranks that read no data receive None in place of
    datasets.  Raise ConfigError for --dataloader-type external, DataError if no training data is
    left.
    """
    data, kind = run.config.data, implementation_of(run.config)
    if data.dataloader_type == "external":
        if model_kind_of(run.config).reads_images and data.data_path:
            reads = reads_data(run)
            return build_loaders(run, _dataset_config(run)) if reads else (None, None, None)
        raise ConfigError(
            "--dataloader-type external is for programs that bring their own loaders, and this one "
            "builds data sets: use single or cyclic"
        )
    if data.dataset_type is not None:
        reads = reads_data(run)
        return build_user_datasets(run, data.dataset_type, num_samples, reads=reads)
    config = _dataset_config(run)
    if run.is_rank_0 and not data.mock_data:
        _check_data(run, kind, config)
        _start_tokenizing(run, config)
    reads = reads_data(run)
    cls = kind.datasets[data.mock_data]
    if data.phase_transition_iterations and cls is GPTDataset:
        train, valid, test = _build_phases(run, num_samples, config, reads=reads)
    else:
        builder = BlendedMegatronDatasetBuilder(cls, list(num_samples), lambda: reads, config)
        train, valid, test = builder.build()
        _check_size(run, train, num_samples[0])
    if train is None and reads and not run.config.validation.skip_train:
        given = f"--split {config.split}" if config.split else "the data of each split"
        raise DataError(f"{given} leaves nothing to train on: give training data, or --skip-train")
    if config.corpora:
        _check_text([train, valid, test])
    if data.sft_show_sample and run.is_rank_0 and train is not None:
        row: Any = train[0]
        print(sample_as_text(row, run.tokenizer, in_color=sys.stdout.isatty()), flush=True)
    return train, valid, test


def _build_phases(
    run: RunContext,
    num_samples: Sequence[int | None],
    config: BlendedMegatronDatasetConfig,
    *,
    reads: bool,
) -> list[Any]:
    """Build the training data of each phase that is not over; the other sets are of the first."""
    data = run.config.data
    batch = run.batches.global_batch_size_wanted
    blends, starts = train_blends(run)
    total, *others = num_samples
    assert total is not None, "checks require iterations"
    if (read := run.state.consumed_train_samples) != (wanted := run.state.iteration * batch):
        raise ConfigError(
            f"--global-batch-size {batch}: the checkpoint has read {read} samples, not {wanted}: "
            "its phases of --phase-transition-iterations began elsewhere; keep its batch size"
        )
    ends = [*starts[1:], max(total, starts[-1] + 1)]
    sets: list[Any] = []
    rest: list[Any] = [None, None]
    for phase, (first, end) in enumerate(zip(starts, ends, strict=True)):
        is_over = phase < len(starts) - 1 and end <= run.state.consumed_train_samples
        sizes = [0 if is_over else end - first, *(others if phase == 0 else (0, 0))]
        has_exact_shares = phase < len(starts) - 1
        blend = blends[phase] if data.phase_data_args_path else config.blend
        settings = replace(config, blend=blend, has_exact_shares=has_exact_shares)
        train, *more = BlendedMegatronDatasetBuilder(
            GPTDataset, sizes, lambda: reads, settings
        ).build()
        _check_size(run, train, sizes[0])
        sets.append(train)
        rest = more if phase == 0 else rest
    return [PhasedDataset(sets, starts) if reads else None, *rest]


def _check_text(sets: Sequence[Any]) -> None:
    """Raise DataError for a part of a small text without samples, which no evaluation can read.

    Text that is still tokenized after its first shard is large enough.
    """
    for data in sets:
        for each in data if isinstance(data, list) else getattr(data, "datasets", [data]):
            corpus = getattr(each, "dataset", None)
            if isinstance(corpus, Corpus) and corpus.is_complete():
                each[0]


def _check_size(run: RunContext, train: Any, wanted: int | None) -> None:
    """Raise DataError for training data that ends before the run does."""
    training = run.config.training
    may_end_early = (
        training.exit_interval or training.exit_duration_in_mins or run.config.validation.skip_train
    )
    is_read_once = run.config.data.dataloader_type == "single" and not may_end_early
    if train is not None and wanted and is_read_once and len(train) < wanted:
        raise DataError(
            f"the training data has {len(train)} samples and the run reads {wanted}: paths without "
            "weights are read once; give weights, which repeat data, or fewer steps"
        )


def count_epochs(run: RunContext) -> None:
    """Set the number of steps of --epochs, from the rows of the training data after packing.

    Collective over the model-parallel ranks.  Raises ConfigError if the schedule of the learning
    rate does not fit the number.
    """
    training = run.config.training
    if training.epochs is None:
        return
    num_rows = 0
    if reads_data(run):
        config = _dataset_config(run)
        each = config.blend_per_split and [*map(_without_weights, config.blend_per_split)]
        config = replace(config, blend=_without_weights(config.blend), blend_per_split=each)
        cls = implementation_of(run.config).datasets[run.config.data.mock_data]
        (train, *_) = BlendedMegatronDatasetBuilder(cls, [None, 0, 0], lambda: True, config).build()
        assert isinstance(train, MegatronDataset), "checks require one path"
        num_rows = len(train)
    (num_rows,) = agree_on(run.groups.mp, num_rows)
    run.samples_of_epochs = math.ceil(training.epochs * num_rows)
    batch = run.batches.full_global_batch_size
    run.train_iters = -(-run.samples_of_epochs // batch)
    print_rank_0(
        f"setting training iterations to {run.train_iters}: --epochs {training.epochs:g} of "
        f"{num_rows} rows, {batch} in a step"
    )
    run.config = replace(run.config, training=replace(training, train_iters=run.train_iters))
    ConfigError.raise_for(problems_of(SCHEDULE_LENGTHS, Settings(run.config)))


def _without_weights(blend: Blend | None) -> Blend | None:
    """Return ``blend``, whose path is read once: a weight would need a number of samples."""
    return None if blend is None else (blend[0], None)


def prepare_datasets(run: RunContext) -> None:
    """Compute what the objective adds to its data sets.  Collective over all ranks.

    Must precede the call of a datasets provider, which not every rank calls.
    """
    kind = implementation_of(run.config)
    if kind.prepare_data is not None:
        run.objective.dataset_settings = kind.prepare_data(run, _dataset_config(run))


def _dataset_config(run: RunContext) -> BlendedMegatronDatasetConfig:
    settings = _common(run) | run.objective.dataset_settings
    config = implementation_of(run.config).dataset_config(run.config, **settings)
    sources = _text_sources(run, config)
    if not sources:
        return config
    return replace(config, index_free=True, corpora={s.path: s.directory for s in sources})


def _text_sources(run: RunContext, config: BlendedMegatronDatasetConfig) -> list[CorpusSource]:
    """Return the data paths that are text; only left-to-right pretraining reads such."""
    if implementation_of(run.config).datasets[False] is not GPTDataset:
        return []
    return sources_of(_paths(run, config), run.config.data, run.tokenizer)


def _start_tokenizing(run: RunContext, config: BlendedMegatronDatasetConfig) -> None:
    """Start the process that tokenizes text, if there is any to tokenize.  On rank 0."""
    sources = _text_sources(run, config)
    workers = run.config.data.data_tokenize_workers
    if sources and start(sources, TokenizerSpec.of(run.config.tokenizer), workers) is not None:
        names = ", ".join(source.path for source in sources)
        print_rank_0(f"tokenizing {names} during training into {sources[0].directory}")


def _paths(run: RunContext, config: BlendedMegatronDatasetConfig) -> list[str]:
    """Return the data paths of all splits and phases, each once."""
    given = [config.blend] if config.blend is not None else config.blend_per_split or []
    blends = [*given, *map(blend_of_phase, run.config.data.phase_data_args_path or ())]
    return [*{path: None for blend in blends if blend is not None for path in blend[0]}]


def _common(run: RunContext) -> dict[str, Any]:
    """Return the dataset arguments that all model kinds share."""
    data, validation = run.config.data, run.config.validation
    blend, blend_per_split = get_blend_and_blend_per_split(data)
    return {
        **{name: getattr(data, name) for name in _OF_DATA},
        "random_seed": run.config.training.seed,
        "sequence_length": data.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "multiple_validation_sets": validation.multiple_validation_sets,
        "full_validation": validation.full_validation,
        "path_to_cache": data.data_cache_path,
        "tokenizer": run.tokenizer,
    }


def _check_data(
    run: RunContext, kind: ModelImplementation, config: BlendedMegatronDatasetConfig
) -> None:
    """Check on one rank that the data fits tokenizer, vocabulary and the flags that act on EOD."""
    data = run.config.data
    given = {
        "--reset-position-ids": data.reset_position_ids,
        "--reset-attention-mask": data.reset_attention_mask,
        "--eod-mask-loss": data.eod_mask_loss,
    }
    for prefix in _paths(run, config):
        tokens = kind.datasets[False].build_low_level_dataset(prefix, config)
        if not isinstance(tokens, IndexedDataset):  # it holds text, for the run's tokenizer
            continue
        check_data(
            tokens,
            run.tokenizer,
            run.padded_vocab_size,
            [flag for flag, is_given in given.items() if is_given],
        )


_GREEN = "\x1b[32m"
_PLAIN = "\x1b[0m"


def sample_as_text(row: Mapping[str, Any], tokenizer: MegatronTokenizer, *, in_color: bool) -> str:
    """Return the first conversation of a row; trained text is green, or between {+ and +}."""
    bounds = row["packed_seq_params"]
    assert isinstance(bounds, PackedBounds), "a row of conversations has their bounds"
    stop = int(bounds.cumulative[1]) - int(row["is_padding"][: bounds.cumulative[1]].sum())
    tokens = [*row["tokens"][:1].tolist(), *row["labels"][:stop].tolist()]
    is_trained = [False, *(row["loss_mask"][:stop] > 0).tolist()]
    begin, end = (_GREEN, _PLAIN) if in_color else ("{+", "+}")
    text = ""
    for marked, pairs in groupby(zip(tokens, is_trained, strict=True), key=lambda pair: pair[1]):
        part = tokenizer.detokenize([token for token, _ in pairs])
        text += f"{begin}{part}{end}" if marked else part
    num_trained = sum(is_trained)
    mark = "green" if in_color else "{+marked+}"
    return (
        f"first training sample, {len(tokens)} tokens, of which {num_trained} are trained "
        f"({mark}):\n{text}"
    )


Split = Literal["train", "valid", "test"]
Samples = Dataset[Mapping[str, Tensor]]  # with a length
# (run, split, samples to be read or None for one pass) -> dataset, or None without such a split
BuildDataset = Callable[[RunContext, Split, int | None], Samples | None]
_SPLITS: tuple[Split, ...] = ("train", "valid", "test")


def register_dataset(name: str, build: BuildDataset) -> None:
    """Register a dataset for --dataset-type ``name``.  Raise ConfigError if the name is taken.

    ``build`` is called once per split, only on ranks that read data; it must not use collectives.
    """
    if not callable(build):
        raise ConfigError(f"register_dataset({name!r}, ...): {build!r} is no function")
    DATASETS.register(name, build)


def build_user_datasets(
    run: RunContext, name: str, num_samples: Sequence[int | None], *, reads: bool
) -> tuple[Samples | None, Samples | None, Samples | None]:
    """Build the train, validation and test set of dataset ``name``.

    All are None on ranks that do not read.  Raise DataError for a set without length or with too
    few samples, or if there is nothing to train on.
    """
    build = cast(BuildDataset, DATASETS.find(name))  # register_dataset() has checked it
    if not reads:
        return None, None, None
    train, valid, test = (
        build(run, split, n) for split, n in zip(_SPLITS, num_samples, strict=True)
    )
    repeats = run.config.data.dataloader_type == "cyclic"
    for split, samples, wanted in zip(_SPLITS, (train, valid, test), num_samples, strict=True):
        if samples is None:
            if split == "train" and not run.config.validation.skip_train:
                raise DataError(f"--dataset-type {name} has no samples to train on: give it some")
        elif not isinstance(samples, Sized):
            raise DataError(f"--dataset-type {name}: its {split} set has no length: define __len__")
        elif wanted is not None and len(samples) < wanted and not repeats:
            raise DataError(
                f"--dataset-type {name}: its {split} set has {len(samples)} samples and the run "
                f"reads {wanted}: use --dataloader-type cyclic to read them again in a new order, "
                "or fewer steps"
            )
    return train, valid, test
