"""The stream of samples: the same for every layout, batch size and resumption."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron.core.config.errors import DataError
from megatron.core.datasets.samplers import (
    DataLoaderConfig,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
    build_data_loader,
)

TOTAL = 100


def sampler(
    kind: str, consumed: int, micro: int, rank: int, size: int, total: int = TOTAL, **more: Any
) -> Any:
    if kind == "single":
        return MegatronPretrainingSampler(total, consumed, micro, rank, size, **more)
    return MegatronPretrainingRandomSampler(
        range(total), total, consumed, micro, rank, size, **more
    )


def global_stream(
    kind: str, consumed: int, micro: int, size: int, steps: int, total: int = TOTAL
) -> list[int]:
    """What all ranks read together in ``steps`` micro-batch steps."""
    ranks = [iter(sampler(kind, consumed, micro, rank, size, total)) for rank in range(size)]
    return [i for _ in range(steps) for rank in ranks for i in next(rank)]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
class TestStream:
    @pytest.mark.parametrize(("micro", "size"), [(1, 1), (4, 1), (1, 4), (2, 2), (3, 4), (24, 1)])
    def test_every_layout_reads_the_same_samples_in_the_same_order(
        self, kind: str, micro: int, size: int
    ) -> None:
        steps = 24 // (micro * size)
        assert global_stream(kind, 0, micro, size, steps) == global_stream(kind, 0, 1, 1, 24)

    @pytest.mark.feature("Data: the sample stream survives another layout, batch size or ramp")
    def test_a_resumed_run_in_another_layout_goes_on_where_the_first_stopped(
        self, kind: str
    ) -> None:
        before = global_stream(kind, 0, 2, 4, 3)
        after = global_stream(kind, 24, 4, 2, 4)
        assert before + after == global_stream(kind, 0, 1, 1, 56)

    def test_a_batch_size_ramp_changes_no_sample(self, kind: str) -> None:
        # 1, then 2, then 4 micro-batches a step, resumed between the steps
        ramped: list[int] = []
        for num_microbatches in (1, 2, 4):
            ramped += global_stream(kind, len(ramped), 2, 2, num_microbatches)
        assert ramped == global_stream(kind, 0, 2, 2, 7)

    def test_every_pass_begins_at_the_same_sample(self, kind: str) -> None:
        one = sampler(kind, 8, 2, 0, 1)
        assert next(iter(one)) == next(iter(one))


@pytest.mark.feature("Checkpoints: a resumed run reads the samples of the unbroken one")
@pytest.mark.parametrize(("kind", "total"), [("single", 20_000), ("cyclic", 3_001)])
def test_the_next_10_000_samples_after_a_resume_are_those_of_the_unbroken_run(
    kind: str, total: int
) -> None:
    unbroken = global_stream(kind, 0, 2, 4, 2_000, total)
    consumed = 2 * 4 * 137  # where the checkpoint was made
    for micro, size in ((1, 1), (4, 5), (5, 16), (8, 2)):
        resumed = global_stream(kind, consumed, micro, size, 10_000 // (micro * size), total)
        assert resumed == unbroken[consumed : consumed + 10_000], (micro, size)


class TestSingle:
    def test_samples_come_in_order_and_the_last_partial_step_is_dropped(self) -> None:
        assert list(MegatronPretrainingSampler(10, 2, 3, 0, 1)) == [[2, 3, 4], [5, 6, 7]]

    def test_a_filled_up_last_step_is_as_long_on_every_rank(self) -> None:
        ranks = [list(MegatronPretrainingSampler(5, 0, 2, r, 2, drop_last=False)) for r in (0, 1)]
        assert ranks == [[[0, 1], [4, None]], [[2, 3], [None, None]]]

    def test_filling_up_reaches_whole_global_batches(self) -> None:
        batches = list(MegatronPretrainingSampler(5, 0, 1, 0, 1, drop_last=False, pad_to_samples=4))
        assert batches == [[0], [1], [2], [3], [4], [None], [None], [None]]

    def test_a_run_that_has_seen_all_samples_is_told(self) -> None:
        with pytest.raises(DataError, match="all 10 samples are consumed .* stands at 12"):
            MegatronPretrainingSampler(10, 12, 1, 0, 1)

    def test_an_empty_dataset_is_refused(self) -> None:
        with pytest.raises(DataError, match="at least one sample"):
            MegatronPretrainingSampler(0, 0, 1, 0, 1)


class TestCyclic:
    def test_an_epoch_holds_every_sample_once_and_epochs_differ(self) -> None:
        two = global_stream("cyclic", 0, 1, 1, 2 * TOTAL)
        assert sorted(two[:TOTAL]) == sorted(two[TOTAL:]) == list(range(TOTAL))
        assert two[:TOTAL] != two[TOTAL:]

    def test_no_sample_is_lost_between_epochs(self) -> None:
        stream = global_stream("cyclic", 0, 7, 3, 10)
        assert sorted(stream[:TOTAL]) == list(range(TOTAL))

    def test_the_order_follows_the_seed_and_not_the_sharding(self) -> None:
        first, other, unsharded = (
            next(iter(sampler("cyclic", 0, 50, 0, 1, **more)))
            for more in ({"seed": 1}, {"seed": 2}, {"seed": 1, "data_sharding": False})
        )
        assert first == unsharded != other


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int | None) -> int:
        return -1 if i is None else i


class Damaged(Numbers):
    def __getitem__(self, i: int | None) -> int:
        try:
            raise ValueError("DataError: the cause")
        except ValueError as error:
            raise DataError("file.bin: sample 2 is damaged;\nwrite it again") from error


class TestLoader:
    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_errors_of_workers_have_the_message_alone(self, num_workers: int) -> None:
        config = DataLoaderConfig(micro_batch_size=2, num_workers=num_workers)
        with pytest.raises(DataError) as error:
            next(iter(build_data_loader(Damaged(), 2, config)))
        assert str(error.value) == "file.bin: sample 2 is damaged;\nwrite it again"

    def load(self, **changes: Any) -> Any:
        config = DataLoaderConfig(micro_batch_size=2, **changes)
        return build_data_loader(Numbers(), 2, config)

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_micro_batches_begin_at_the_consumed_sample(self, num_workers: int) -> None:
        assert [b.tolist() for b in self.load(num_workers=num_workers)] == [[2, 3], [4, 5]]

    def test_a_rank_of_several_gets_its_share(self) -> None:
        loader = self.load(data_parallel_rank=1, data_parallel_size=2)
        assert [b.tolist() for b in loader] == [[4, 5]]

    def test_filling_samples_reach_the_dataset(self) -> None:
        loader = self.load(drop_last=False, pad_to_samples=6)
        assert [b.tolist() for b in loader] == [[2, 3], [4, 5], [-1, -1]]

    def test_cyclic_goes_on_for_ever(self) -> None:
        loader = iter(self.load(dataloader_type="cyclic"))
        assert len([next(loader) for _ in range(10)]) == 10

    def test_external_loaders_and_nothing_pass_through(self) -> None:
        mine = [1, 2]
        config = DataLoaderConfig(micro_batch_size=2, dataloader_type="external")
        assert build_data_loader(mine, 0, config) is mine
        assert build_data_loader(None, 0, DataLoaderConfig(micro_batch_size=2)) is None


_READS_AND_FAILS = """
import os, signal, sys
from megatron.core.datasets.samplers import DataLoaderConfig, build_data_loader

class Numbers(list):
    def __getitem__(self, index):
        return os.getpid()

config = DataLoaderConfig(micro_batch_size=1, num_workers=1)
data = iter(build_data_loader(Numbers(range(1000)), 0, config))
worker = int(next(data))
for number in (signal.SIGTERM, signal.SIGINT):  # as to a whole process group
    os.system(f"kill -{int(number)} {worker}")
assert int(next(data)) == worker
def keep():
    kept = data  # a frame of the traceback holds on to the iterator
    raise ValueError("boom")
keep()
"""


def test_reading_processes_outlive_signals_but_not_a_rank_that_fails() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _READS_AND_FAILS], capture_output=True, text=True, timeout=60
    )
    assert ended.stderr.rstrip().endswith("ValueError: boom")
    assert ended.returncode == 1


_READS_AND_ENDS = """
import torch.utils.data._utils as utils
from megatron.core.datasets.samplers import DataLoaderConfig, build_data_loader
from megatron.core.parallel.communicators import end_group_threads_at_exit

utils.MP_STATUS_CHECK_INTERVAL = 1000  # seconds for which torch waits for a worker
end_group_threads_at_exit()
config = DataLoaderConfig(micro_batch_size=1, num_workers=2)
def read():
    run = {"data": iter(build_data_loader(list(range(1000)), 0, config))}
    run["itself"] = run  # so that the garbage collector frees the iterator
    next(run["data"])
read()
"""


def test_reading_processes_end_at_once_with_their_rank() -> None:
    """A worker that does not receive the request to end is waited for until the time-out."""
    done = subprocess.run([sys.executable, "-c", _READS_AND_ENDS], check=False, timeout=60)
    assert done.returncode == 0
