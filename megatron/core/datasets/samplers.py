"""Which rank reads which sample.

The global stream of samples depends on the data, the seed and the sample number alone.  Every
micro-batch step takes ``micro_batch_size * data_parallel_size`` samples from it in order, so a
global batch is the same samples for every layout, batch-size ramp and resumption.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch

from megatron.core.config.errors import ConfigError, DataError

# None stands for a sample without loss that fills up the last batch
Batch = list[int | None]


@dataclass(eq=False)
class _Sampler:
    """What both samplers know: the shape of the stream and this rank's share of it."""

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        assert self.micro_batch_size > 0, f"micro-batch size {self.micro_batch_size}"
        assert 0 <= self.data_parallel_rank < self.data_parallel_size, (
            f"data-parallel rank {self.data_parallel_rank} of {self.data_parallel_size}"
        )
        if self.total_samples < 1:
            raise DataError("a sampler needs at least one sample, the dataset has none")
        self.step_samples = self.micro_batch_size * self.data_parallel_size

    def __len__(self) -> int:
        return self.total_samples

    def share(self, first: int) -> range:
        """This rank's part of the step that begins with sample ``first`` of the stream."""
        start = first + self.data_parallel_rank * self.micro_batch_size
        return range(start, start + self.micro_batch_size)


@dataclass(eq=False)
class MegatronPretrainingSampler(_Sampler):
    """``single``: samples 0, 1, 2, ... once, from ``consumed_samples`` on.

    A last step that is not full is dropped, or, with ``drop_last=False``, filled up with None.
    ``pad_to_samples`` fills up further, to whole global batches.
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
    """``cyclic``: the dataset over and over, each epoch in an order of its own.

    The order is a function of seed and epoch; epochs follow each other without a gap.  With
    ``data_sharding`` or without it, a global batch holds the same samples.
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
        self._epoch = -1
        self._order = np.empty(0, np.uint32)

    def __iter__(self) -> Iterator[Batch]:
        for first in count(self.consumed_samples, self.step_samples):
            yield [self._sample(i) for i in self.share(first)]

    def _sample(self, i: int) -> int:
        """The dataset's sample at place ``i`` of the endless stream."""
        epoch, place = divmod(i, self.total_samples)
        if epoch != self._epoch:
            random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            fits = self.total_samples <= np.iinfo(np.uint32).max
            self._order = np.arange(self.total_samples, dtype=np.uint32 if fits else np.int64)
            random.shuffle(self._order)
            self._epoch = epoch
        return int(self._order[place])


@dataclass(frozen=True, kw_only=True)
class DataLoaderConfig:
    """How one rank reads its micro-batches."""

    micro_batch_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    dataloader_type: str = "single"
    num_workers: int = 0
    pin_memory: bool = False
    seed: int = 1234
    drop_last: bool = True
    pad_to_samples: int | None = None


def build_data_loader(dataset: Any, consumed_samples: int, config: DataLoaderConfig) -> Any:
    """Micro-batches of this rank from sample ``consumed_samples`` of the stream on.

    None for no dataset; an ``external`` dataset is a loader already and is returned as it is.
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
    elif config.dataloader_type == "cyclic":
        sampler = MegatronPretrainingRandomSampler(dataset, *share, seed=config.seed)
    else:
        raise ConfigError(
            f"--dataloader-type {config.dataloader_type}: give single, cyclic or external"
        )
    # Iterators draw a seed: from a generator of their own, so that reading data, evaluating or
    # resuming leaves the streams of dropout alone.
    generator = torch.Generator().manual_seed(config.seed)
    return torch.utils.data.DataLoader(
        dataset,
        generator=generator,
        batch_sampler=sampler,
        num_workers=config.num_workers,
        pin_memory=config.pin_memory,
        persistent_workers=config.num_workers > 0,
        worker_init_fn=outlive_signals,
    )


def outlive_signals(worker_id: int) -> None:
    """In a reading process: leave SIGTERM and SIGINT to the rank, which saves and then ends it.

    A SIGTERM of the rank itself, sent when it ends without having asked the process to, ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # for `_obey_parent` to take
    threading.Thread(target=_obey_parent, daemon=True).start()


def _obey_parent() -> None:
    parent = os.getppid()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass  # from a launcher, to the whole process group
    os._exit(0)
