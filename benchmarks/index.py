"""Measure time and memory of building GPT index arrays and fetching samples.

    python -m benchmarks.index [--documents 20000000] [--tokens-per-document 500] [--directory DIR]

The .idx is synthetic, with random document lengths; the .bin is a sparse file, as no token is read
while an index is built.  Contenders alternate; results are medians of CPU time of one core, so that
other load on the machine matters little.  Dated results are in index.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    SampleRequest,
    build_indices,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.indexed_format import HEADER, MAGIC
from megatron.core.datasets.utils import Split

_REPEATS = 3
_FETCHED_SAMPLES = 5000


class Tokenizer:
    """Attributes of a tokenizer that a dataset reads."""

    unique_identifiers = OrderedDict[str, Any]({"class": "Benchmark"})
    vocab_size = 65_000
    eod = 0


def write_synthetic(prefix: str, documents: int, tokens_per_document: int) -> None:
    """Write an .idx of random lengths and a sparse .bin of zeros."""
    random = np.random.default_rng(0)
    low, high = tokens_per_document // 5, tokens_per_document * 9 // 5 + 1
    lengths = random.integers(low, high, documents, dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int64) * 2
    with open(prefix + ".idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        lengths.tofile(file)
        np.concatenate(([0], ends[:-1])).tofile(file)
        np.arange(documents + 1, dtype=np.int64).tofile(file)
    with open(prefix + ".bin", "wb") as file:
        file.truncate(int(ends[-1]))


def bench_start(prefix: str, num_tokens: int, files: int, length: int, *, index_free: bool) -> None:
    """Time a blend from nothing to its first 64 samples, and to 64 samples of its third epoch.

    ``files`` links to one file stand for as many files, together of ``num_tokens`` tokens.  Without
    ``index_free`` all arrays of Megatron-LM are built, as it builds them.
    """
    for i in range(files):
        for end in (".idx", ".bin"):
            if not os.path.lexists(f"{prefix}-{i}{end}"):
                os.symlink(prefix + end, f"{prefix}-{i}{end}")
    documents = len(IndexedDataset(prefix)) * files
    epoch = num_tokens // length
    tracemalloc.start()
    started_at_s = time.process_time()
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=length,
        blend=([f"{prefix}-{i}" for i in range(files)], [1.0] * files),
        split="1",
        tokenizer=Tokenizer(),
        create_attention_mask=False,
        index_free=index_free,
    )
    sizes = [3 * epoch, 0, 0]
    train = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
    for what, first in (("first", 0), ("third", 2 * epoch)):
        for i in range(first, first + 64):
            train[i]
        elapsed_s = time.process_time() - started_at_s
        memory = f"{tracemalloc.get_traced_memory()[1] / 2**20:.0f} MiB"
        how = "index-free" if index_free else "Megatron-LM's arrays"
        row = f"{how}, {documents:,} documents in {files} files, 64 samples of the {what} epoch"
        print(f"| {row} | {elapsed_s:.2f} s | {memory} at most |")
        started_at_s = time.process_time()
    tracemalloc.stop()


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of one call."""
    started_at_s = time.process_time()
    work()
    return time.process_time() - started_at_s


def bench_build(data: IndexedDataset, sequence_length: int) -> None:
    """Time document order, sample boundaries and sample order of one epoch."""
    num_tokens = int(data.sequence_lengths.sum(dtype=np.int64))
    request = SampleRequest(
        source="synthetic",
        indices=np.arange(len(data), dtype=np.int32),
        sequence_lengths=data.sequence_lengths,
        num_samples=None,
        sequence_length=sequence_length,
        random_seed=1234,
    )
    compiled = helpers._compiled()
    contenders = {"C++": compiled, "numpy": None} if compiled else {"numpy": None}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(_REPEATS):
        for name, module in contenders.items():
            helpers._compiled = lambda module=module: module  # type: ignore[assignment]
            seconds[name].append(cpu_seconds(lambda: build_indices(request)))
    for name, module in contenders.items():
        helpers._compiled = lambda module=module: module  # type: ignore[assignment]
        tracemalloc.start()
        built = build_indices(request)
        beyond = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        arrays = (built.document_index, built.sample_index, built.shuffle_index)
        beyond -= sum(array.nbytes for array in arrays)
        median = statistics.median(seconds[name])
        speed = num_tokens / median / 1e9
        memory = f"memory beyond the arrays {beyond / 2**20:.1f} MiB"
        print(f"| build, {name} | {speed:.1f} G tokens/s | {median:.2f} s; {memory} |")


def bench_open(prefix: str) -> None:
    """Time opening a file pair, with all pointers and lengths checked."""
    median = statistics.median(cpu_seconds(lambda: IndexedDataset(prefix)) for _ in range(_REPEATS))
    data = IndexedDataset(prefix)
    print(f"| open and check | {len(data) / median / 1e6:.0f} M documents/s | {median:.2f} s |")


def bench_cache(prefix: str, directory: str, sequence_length: int) -> None:
    """Time the construction of a dataset, first without and then with cached index arrays."""
    config = dataset_config(prefix, sequence_length, path_to_cache=os.path.join(directory, "cache"))
    data = IndexedDataset(prefix)
    indices = np.arange(len(data), dtype=np.int32)
    for what in ("built, written and synced", "found in the cache"):
        started_at_s = time.perf_counter()
        GPTDataset(data, prefix, indices, None, Split.train, config)
        elapsed_s = time.perf_counter() - started_at_s
        print(f"| dataset, {what} | {elapsed_s:.2f} s | wall time |")


def dataset_config(prefix: str, sequence_length: int, **more: Any) -> GPTDatasetConfig:
    """Return a config with one split and no attention mask."""
    return GPTDatasetConfig(
        random_seed=1234,
        sequence_length=sequence_length,
        blend=([prefix], None),
        split="1",
        tokenizer=Tokenizer(),
        create_attention_mask=False,
        **more,
    )


class MapReader:
    """Reader through a memory map; SIGBUS ends the process if the file is truncated."""

    def __init__(self, bin_path: str) -> None:
        self._buffer = np.memmap(bin_path, mode="r")

    def read(self, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        """Return a view of the map."""
        return np.frombuffer(self._buffer, dtype, count, offset)


def bench_fetch(directory: str, sequence_length: int) -> None:
    """Time fetching samples of 200,000 documents (100 M tokens) from the page cache."""
    prefix = os.path.join(directory, "tokens")
    random = np.random.default_rng(0)
    lengths = random.integers(100, 900, 200_000)
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    builder.add_documents(
        random.integers(1, 65_000, lengths.sum(), dtype=np.uint16),
        lengths,
        np.ones(len(lengths), np.int64),
    )
    builder.finalize(prefix + ".idx")
    resets = {"reset_position_ids": True, "eod_mask_loss": True}
    for what, options, more in (
        ("memory map, for comparison", {}, {}),
        ("pread", {}, {}),
        ("pread, file opened each time", {"mmap": False}, {}),
        ("pread, --verify-data, after the first round", {"verify_data": True}, {}),
        ("pread, resets and eod loss mask", {}, resets),
        ("pread, index-free", {}, {"index_free": True}),
    ):
        config = dataset_config(prefix, sequence_length, **more)
        data = IndexedDataset(prefix, **options)
        if what.startswith("memory map"):
            data.bin_reader = MapReader(prefix + ".bin")
        indices = np.arange(len(data), dtype=np.int32)
        report_fetch(what, GPTDataset(data, prefix, indices, None, Split.train, config))
    config = dataset_config(prefix, sequence_length)
    report_fetch("mock data", MockGPTDataset(None, None, indices, 10**9, Split.train, config))


def report_fetch(what: str, dataset: GPTDataset) -> None:
    """Print tokens per second of ``dataset[i]``; the first round fills the page cache."""

    def fetch() -> None:
        for i in range(_FETCHED_SAMPLES):
            dataset[i]

    fetch()
    median = statistics.median(cpu_seconds(fetch) for _ in range(_REPEATS)) / _FETCHED_SAMPLES
    speed = dataset.config.sequence_length / median / 1e6
    print(f"| fetch, {what} | {speed:.0f} M tokens/s | {median * 1e6:.1f} us a sample |")


def main() -> None:
    """Print the rows of index.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=20_000_000)
    parser.add_argument("--tokens-per-document", type=int, default=500)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--directory", default=None, help="where some 1 GB of files go for a while")
    parser.add_argument("--only-start", action="store_true", help="only the first samples")
    parser.add_argument("--most-built", type=int, default=10**7, help="documents with index arrays")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        prefix = os.path.join(directory, "synthetic")
        write_synthetic(prefix, args.documents, args.tokens_per_document)
        if args.only_start:
            bench_starts(directory, args)
            return
        print(f"{args.documents:,} documents of {args.tokens_per_document} tokens, samples of "
              f"{args.sequence_length}\n")  # fmt: skip
        print("| what | speed | |\n|---|---|---|")
        bench_open(prefix)
        bench_build(IndexedDataset(prefix), args.sequence_length)
        bench_cache(prefix, directory, args.sequence_length)
        bench_fetch(directory, args.sequence_length)
        bench_starts(directory, args)


def bench_starts(directory: str, args: argparse.Namespace) -> None:
    """Time the start on 10^6 to 10^9 documents; on up to --most-built, the arrays too."""
    print("| what | CPU time | memory |\n|---|---|---|")
    for documents in (10**6, 10**7, 10**8, 10**9):
        part = os.path.join(directory, f"of-{documents}")
        write_synthetic(part, documents // 1000, args.tokens_per_document)
        num_tokens = documents * args.tokens_per_document
        for index_free in (True, False):
            if index_free or documents <= args.most_built:
                bench_start(part, num_tokens, 1000, args.sequence_length, index_free=index_free)


if __name__ == "__main__":
    main()
