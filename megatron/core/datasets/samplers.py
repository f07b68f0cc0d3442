"""Assign samples to data-parallel ranks.

The global sample stream depends only on the data, the seed and the sample number.  Each micro-batch
step takes the next ``micro_batch_size * data_parallel_size`` samples of it.  A global batch
therefore has the same samples for every layout, batch-size ramp-up and resumption.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.utils.data import default_collate

from megatron.core.config.errors import DataError, MegatronError
from megatron.core.datasets.megatron_dataset import Sample
from megatron.core.datasets.utils import EpochOrder
from megatron.core.packed_seq_params import PackedBounds

# None is a sample with a zero loss mask, which pads the last batch
Batch = list[int | None]


@dataclass(eq=False)
class _Sampler:
    """Position in the sample stream, and this data-parallel rank's share of each step."""

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        if self.total_samples < 1:
            raise DataError("a sampler needs at least one sample, the dataset has none")
        self.step_samples = self.micro_batch_size * self.data_parallel_size

    def __len__(self) -> int:
        return self.total_samples

    def share(self, first: int) -> range:
        """Return this rank's samples of the step whose first sample in the stream is ``first``."""
        start = first + self.data_parallel_rank * self.micro_batch_size
        return range(start, start + self.micro_batch_size)


@dataclass(eq=False)
class MegatronPretrainingSampler(_Sampler):
    """Sampler for --dataloader-type single: each sample once, in order, from ``consumed_samples``.

    An incomplete last step is dropped or, with ``drop_last=False``, padded with None.
    ``pad_to_samples`` pads to complete global batches of that many samples.
    """

    drop_last: bool = True
    pad_to_samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        left = self.total_samples - self.consumed_samples
        if left <= 0:
            raise DataError(
                f"all {self.total_samples} samples are consumed (the run stands at "
                f"{self.consumed_samples}): raise --train-samples or --train-iters, or give more "
                "data"
            )
        unit = self.pad_to_samples or self.step_samples
        assert unit % self.step_samples == 0, f"{unit} is no multiple of {self.step_samples}"
        num_samples = left // self.step_samples * self.step_samples
        if not self.drop_last:
            num_samples = -(-left // unit) * unit
        self._stop = self.consumed_samples + num_samples

    def __iter__(self) -> Iterator[Batch]:
        for first in range(self.consumed_samples, self._stop, self.step_samples):
            yield [i if i < self.total_samples else None for i in self.share(first)]


class MegatronPretrainingRandomSampler(_Sampler):
    """Sampler for --dataloader-type cyclic: endless epochs, each in a different random order.

    The order depends only on seed and epoch.  A step at the end of an epoch continues with the
    first samples of the next.  ``data_sharding`` has no effect on the samples of a global batch.
    """

    def __init__(
        self,
        dataset: Sized,
        *share: int,
        data_sharding: bool = True,
        seed: int = 1234,
        **named: int,
    ) -> None:
        super().__init__(*share, **named)
        self.dataset = dataset
        self.data_sharding = data_sharding
        self.seed = seed
        self._order = EpochOrder(self.total_samples, seed)

    def __iter__(self) -> Iterator[Batch]:
        for first in count(self.consumed_samples, self.step_samples):
            yield [self._order[i] for i in self.share(first)]


@dataclass(frozen=True, kw_only=True)
class DataLoaderConfig:
    """Settings of the data loader of one rank.

    ``joined``: names of tensors whose samples have different numbers of rows.
    """

    micro_batch_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    dataloader_type: str = "single"
    num_workers: int = 0
    pin_memory: bool = False
    seed: int = 1234
    drop_last: bool = True
    pad_to_samples: int | None = None
    joined: tuple[str, ...] = ()


def build_data_loader(dataset: Any, consumed_samples: int, config: DataLoaderConfig) -> Any:
    """Build the loader of this rank's micro-batches, starting at sample ``consumed_samples``.

    None if ``dataset`` is None.  With ``dataloader_type="external"``, ``dataset`` is already a
    loader and is returned unchanged.  Not a collective.
    """
    if dataset is None or config.dataloader_type == "external":
        return dataset
    share = (
        len(dataset),
        consumed_samples,
        config.micro_batch_size,
        config.data_parallel_rank,
        config.data_parallel_size,
    )
    sampler: _Sampler
    if config.dataloader_type == "single":
        sampler = MegatronPretrainingSampler(*share, config.drop_last, config.pad_to_samples)
    else:
        sampler = MegatronPretrainingRandomSampler(dataset, *share, seed=config.seed)
    # Each new iterator consumes a random seed.  A separate generator keeps data loading,
    # evaluation and resumption from changing the random stream of dropout.
    generator = torch.Generator().manual_seed(config.seed)
    return _Loader(
        dataset,
        generator=generator,
        batch_sampler=sampler,
        num_workers=config.num_workers,
        pin_memory=config.pin_memory,
        persistent_workers=config.num_workers > 0,
        worker_init_fn=outlive_signals,
        collate_fn=partial(collate, joined=config.joined),
    )


class _Loader(torch.utils.data.DataLoader[Any]):
    """Loader that raises the errors for users of its worker processes without tracebacks."""

    def __iter__(self) -> Any:
        batches = super().__iter__()  # workers start here
        if self.num_workers:
            _running.add(batches)
            atexit.unregister(_end_workers)
            atexit.register(_end_workers)  # before what was registered earlier, gc.collect too
        return _without_tracebacks(batches)


_running: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators that have worker processes


def _end_workers() -> None:
    """End the worker processes of all loaders, at exit.

    The garbage collector may finalize the queues to the workers before their iterator, which then
    waits 5 seconds for each worker.
    """
    for batches in list(_running):
        batches._shutdown_workers()


def _without_tracebacks(batches: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from batches
    except MegatronError as error:
        # torch raises the type again, with the traceback of the worker as its message.
        kind = type(error)
        _, name, message = str(error).rpartition(f"{kind.__module__}.{kind.__qualname__}: ")
        raise kind(message.rstrip()) if name else error from None


def collate(samples: list[Any], joined: tuple[str, ...] = ()) -> Any:
    """Return torch's default micro-batch of ``samples``, with the bounds of all rows in one.

    Tensors named in ``joined`` are concatenated.
    """
    first: Sample = samples[0] if isinstance(samples[0], dict) else {}
    apart: Sample = {
        name: torch.cat([torch.as_tensor(s[name]) for s in samples]) for name in joined
    }
    for name, value in first.items():
        if isinstance(value, PackedBounds):
            apart[name] = PackedBounds.of_rows([s[name] for s in samples])
    if not apart:
        return default_collate(samples)
    rest = [{name: x for name, x in s.items() if name not in apart} for s in samples]
    return default_collate(rest) | apart


def outlive_signals(worker_id: int) -> None:
    """Ignore SIGTERM and SIGINT from outside in a data-loading worker process.

    A launcher signals the complete process group.  Workers must survive so that the rank can save
    its checkpoint.  SIGTERM from its parent, the rank, still ends a worker: multiprocessing sends
    it when the rank exits without having shut its workers down.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # `_obey_parent` waits for it
    threading.Thread(target=_obey_parent, daemon=True).start()


def _obey_parent() -> None:
    parent = os.getppid()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass  # sent by a launcher to the complete process group
    os._exit(0)
