"""From data flags to iterators of micro-batches.

The stream of global samples is a function of data, seed and sample index; a rank takes its share
by (consumed samples, micro-batch size, data-parallel rank).
"""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from megatron.core import device
from megatron.core.config.errors import DataError
from megatron.core.datasets.samplers import DataLoaderConfig, build_data_loader
from megatron.core.datasets.utils import get_blend_from_list
from megatron.training.config.data import DataConfig
from megatron.training.data.prefetch import ReadAhead
from megatron.training.models.registry import implementation_of
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.phases import in_phase
from megatron.training.runtime.runtime import Runtime

Provider = Callable[[Sequence[int | None]], tuple[Any, Any, Any]]


def get_blend_and_blend_per_split(data: DataConfig | Namespace) -> tuple[Any, Any]:
    """(blend, None), (None, [train, valid, test]) or (None, None) from the data flags.

    Scripts hand over get_args().
    """
    if data.data_path or data.data_args_path:
        words = data.data_path or _words(data.data_args_path)
        return get_blend_from_list(list(words)), None
    if data.per_split_data_args_path:
        lists = _lists_per_split(data.per_split_data_args_path)
        return None, [get_blend_from_list(words) for words in lists]
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if any(paths):
        return None, [get_blend_from_list(list(p) if p else None) for p in paths]
    return None, None


def train_valid_test_num_samples(run: Runtime) -> tuple[int | None, int | None, int | None]:
    """How many samples each set must offer; None is one whole pass.

    They decide the order of samples, so a batch that is decreased counts with its full size.
    """
    config, batch = run.config, run.batches.global_batch_size_wanted
    validation = config.validation
    train = config.training.train_samples
    if train is None:
        left = (run.train_iters - run.state.iteration) * batch  # batches may have grown since
        train = max(run.train_iters * batch, run.state.consumed_train_samples + left)
    passes = run.train_iters // validation.eval_interval + 1
    valid = None if validation.full_validation else passes * validation.eval_iters * batch
    return train, valid, validation.eval_iters * batch


@in_phase("building the data")
def build_data(run: Runtime, provider: Provider) -> None:
    """Fill the iterators of ``run``.

    Index building may take long on the first rank; the others poll for its files, no collective
    is open meanwhile.
    """
    sizes = train_valid_test_num_samples(run)
    print_rank_0(" > datasets target sizes (minimum size):")
    for name, size in zip(("train:     ", "validation:", "test:      "), sizes, strict=True):
        print_rank_0(f"    {name} {size}")
    train, valid, test = _provided(run, provider, sizes)
    if run.config.data.dataloader_type == "external":
        _take_external(run, train, valid, test)
        return
    if not run.config.validation.skip_train and not run.finished():
        loader = make_loader(run, train, run.state.consumed_train_samples)
        run.train_data = chunk_iterators(run, loader)
    sets = list(valid) if isinstance(valid, list | tuple) else [valid]
    evaluates = run.config.validation.eval_iters > 0 or run.config.validation.full_validation
    found = [s for s in sets if s is not None and evaluates]
    num_valid, num_test = agree_on(run.groups.mp, len(found), int(test is not None and evaluates))
    whole = run.config.validation.full_validation
    run.valid_loaders = [make_loader(run, s, 0, whole=whole) for s in found] or [None] * num_valid
    run.test_loader = make_loader(run, test, 0)
    run.has_test_set = bool(num_test)


def _provided(run: Runtime, provider: Provider, sizes: Sequence[int | None]) -> Any:
    """What the provider gives this rank.

    One that does not say ``is_distributed`` is asked on the ranks that read, and there alone.
    """
    if getattr(provider, "is_distributed", False) or run.groups.tp.rank() == 0:
        return provider(sizes)
    return None, None, None


def agree_on(mp_group: dist.ProcessGroup, *counts: int) -> list[int]:
    """What its first rank, which reads, found.  Collective over mp; not all ranks hold data."""
    if mp_group.size() == 1:
        return list(counts)
    agreed = torch.tensor(counts, device=device.current())
    dist.broadcast(agreed, dist.get_global_rank(mp_group, 0), group=mp_group)
    return [int(n) for n in agreed]


def reads_data(run: Runtime) -> bool:
    """Whether this rank reads micro-batches: the others of its tensor-parallel group receive."""
    return run.groups.tp.rank() == 0 and any(_chunks_that_read(run))


def chunk_iterators(run: Runtime, loader: Any) -> Any:
    """An iterator over ``loader``, or, with several model chunks, one for each that reads."""
    readers = _chunks_that_read(run)
    if len(readers) == 1:
        return ReadAhead(iter(loader)) if loader is not None else None
    if loader is None:
        return [None] * len(readers)
    # Each chunk sees all micro-batches; one that another has read already is kept for it.
    copies = iter(itertools.tee(loader, sum(readers)))
    return [ReadAhead(next(copies)) if reads else None for reads in readers]


def _chunks_that_read(run: Runtime) -> list[bool]:
    """Whether each chunk's stage needs anything of a micro-batch."""
    table, num_stages = implementation_of(run.config).batch, run.placement.num_stages
    return [any(table(run.config, stage, num_stages).values()) for stage in run.stages]


def make_loader(
    run: Runtime, dataset: Dataset[Any] | None, consumed: int, *, whole: bool = False
) -> Any:
    """Micro-batches of this data-parallel rank from sample ``consumed`` on; None without data.

    ``whole`` includes a last global batch that is not full, filled up with samples without loss.
    """
    if dataset is None:
        return None
    config, dp = run.config, run.groups.dp
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
        ),
    )


def _take_external(run: Runtime, train: Any, valid: Any, test: Any) -> None:
    found = agree_on(run.groups.mp, int(valid is not None), int(test is not None))
    run.train_data = chunk_iterators(run, train)
    run.valid_loaders = [valid] * found[0]
    run.test_loader = test
    run.has_test_set = bool(found[1])


def _lists_per_split(path: str) -> list[list[str] | None]:
    """What a JSON file names for train, valid and test; None for a set that is left out."""
    splits = ("train", "valid", "test")
    text = _read(path, "--per-split-data-args-path")
    needed = "an object with the lists train, valid and test of weights and prefixes is needed"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"--per-split-data-args-path {path}: no JSON ({error}): {needed}") from None
    if not isinstance(content, dict):
        raise DataError(f"--per-split-data-args-path {path}: {needed}")
    for name, words in content.items():
        if name not in splits or not isinstance(words, list | None) or not _are_words(words):
            raise DataError(
                f"--per-split-data-args-path {path}: {name!r} is {json.dumps(words)}: {needed}"
            )
    if not any(content.values()):
        raise DataError(f"--per-split-data-args-path {path} names no data: {needed}")
    return [content.get(name) for name in splits]


def _are_words(words: list[Any] | None) -> bool:
    """Whether all are weights or prefixes; no file name has a NUL in it."""
    return all(
        "\0" not in word if isinstance(word, str) else type(word) in (int, float)
        for word in words or ()
    )


def _words(path: str | None) -> list[str]:
    assert path is not None
    words = _read(path, "--data-args-path").split()
    if not words:
        raise DataError(f"--data-args-path {path} names no data: write prefixes into it")
    return words


def _read(path: str, flag: str) -> str:
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{flag} {path}: no such file; give a file that lists the data prefixes")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{flag} {path}: not UTF-8 text ({error}); save it as UTF-8") from None
    except OSError as error:
        raise DataError(f"{flag} {path}: {error.strerror or error}") from None
    if "\0" in text:
        raise DataError(f"{flag} {path} holds a NUL byte: it is not a text file; give a list")
    return text
