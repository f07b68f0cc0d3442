"""Tokens and loss of each data source of a blend (--log-loss-by-source).

Each sample gets `SOURCE_IDS`, the number of its source for each label, so that the ids follow the
tokens through packing and every parallel layout.  The last pipeline stage adds the losses of a
micro-batch by source, on the device.

`SourceLosses.collect` is one all-reduce over all ranks, at each log interval and each save.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from megatron.core import device
from megatron.core.datasets.blended_dataset import BlendedDataset, PhasedDataset
from megatron.core.parallel.process_groups_config import ProcessGroupCollection

SOURCE_IDS = "source_ids"  # int32, in the shape of the labels; NCCL has no int16
_MOST_ON_CONSOLE = 16  # sources


class SourceLosses:
    """Sums of loss and tokens of each source; ``paths`` are the data paths of the sources.

    ``seen`` counts the tokens with loss of each path since the run began, up to the last `collect`.
    """

    def __init__(self, paths: Sequence[str], seen: dict[str, float]) -> None:
        self.paths = list(paths)
        self._seen = seen
        names = [os.path.basename(path.rstrip("/")) for path in paths]
        counts = Counter(names)
        self._names = [
            path if counts[n] > 1 else n for path, n in zip(self.paths, names, strict=True)
        ]
        shape = 2, len(self.paths)  # loss and tokens
        # Sums over many tokens: fp32 would lose single ones.
        self._step = torch.zeros(shape, dtype=torch.float64, device=device.current())
        self._steps = torch.zeros_like(self._step)  # since the last `collect`
        self._interval = torch.zeros(shape, dtype=torch.float64)  # up to it; of all ranks
        # By thread: two micro-batches may take turns.
        self._read: dict[int, tuple[Tensor, Tensor]] = {}

    def add_ids(self, data: Any) -> Dataset[Any]:
        """Return training data ``data`` with the source of each label."""
        return WithSources(data, self.paths)

    def expect(self, ids: Tensor | None, loss_mask: Tensor | None) -> None:
        """Remember the ids and the loss mask of the micro-batch that this thread has read."""
        if ids is not None and loss_mask is not None:
            self._read[get_ident()] = ids, loss_mask

    def forward_step(self, inner: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        """Call ``inner``, the program's forward step; its loss function also adds by source."""
        output, loss_func = inner(*args)
        read = self._read.pop(get_ident(), None)
        return output, loss_func if read is None else partial(self._add, loss_func, *read)

    def _add(self, loss_func: Any, ids: Tensor, mask: Tensor, losses: Tensor, **named: Any) -> Any:
        with torch.no_grad():
            weights = mask.flatten().double()
            sums = torch.stack([losses.detach().flatten().double() * weights, weights])
            self._step.index_add_(1, ids.flatten(), sums)
        return loss_func(losses, **named)

    def begin_step(self) -> None:
        """Forget what an earlier attempt of the step has added."""
        self._step.zero_()

    def end_step(self) -> None:
        """Count the step, whose update was made."""
        self._steps += self._step

    def collect(self, groups: ProcessGroupCollection, *, has_loss: bool) -> None:
        """Add the counts of all ranks to those of the run.  Collective over all ranks."""
        counts_here = has_loss and groups.tp.rank() == 0
        total = self._steps.clone() if counts_here else torch.zeros_like(self._steps)
        self._steps.zero_()
        if groups.world.size() > 1:
            dist.all_reduce(total, group=groups.world)
        total = total.cpu()
        self._interval += total
        for path, count in zip(self.paths, total[1].tolist(), strict=True):
            self._seen[path] = self._seen.get(path, 0) + int(count)

    def end_interval(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the values of an interval by label of the console and by tag of TensorBoard.

        A source without tokens in the interval has no loss.
        """
        shown: dict[str, float] = {}
        tags: dict[str, float] = {}
        rows = self._interval.T.tolist()
        self._interval.zero_()
        for path, name, (loss, count) in zip(self.paths, self._names, rows, strict=True):
            values = {"lm loss": loss / count} if count else {}
            values["tokens"] = self._seen.get(path, 0)
            shown |= {f"{label} {name}": value for label, value in values.items()}
            tags |= {f"{label}/{name}": value for label, value in values.items()}
        return shown if len(self.paths) <= _MOST_ON_CONSOLE else {}, tags


class WithSources(Dataset[Any]):
    """Samples of ``data`` with `SOURCE_IDS`; of evaluation data, without ``paths``, all are 0."""

    def __init__(self, data: Any, paths: Sequence[str] = ()) -> None:
        self._data = data
        number = {path: i for i, path in enumerate(paths)}
        is_phased = isinstance(data, PhasedDataset)
        self._starts = data.starts if is_phased else [0]
        # Of each phase: the numbers of the sources of its blend.
        self._numbers = [
            [number.get(each.dataset_path, 0) for each in _sets_of(phase)] if paths else None
            for phase in (data.datasets if is_phased else [data])
        ]

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        sample = self._data[idx]
        numbers = self._numbers[bisect_right(self._starts, idx or 0) - 1]
        number = numbers[sample.get("dataset_id", 0)] if numbers else 0
        ids = torch.full_like(torch.as_tensor(sample["labels"]), number, dtype=torch.int32)
        return {**sample, SOURCE_IDS: ids}


def _sets_of(data: Any) -> Sequence[Any]:
    """Return the data sets of a blend, of one set itself, of a phase that is over none."""
    if data is None:
        return []
    return data.datasets if isinstance(data, BlendedDataset) else [data]
