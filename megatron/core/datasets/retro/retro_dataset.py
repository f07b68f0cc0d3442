"""Samples with the neighbors of their chunks.

L chunks of m tokens in a sample, k neighbors of a chunk, c chunks of a neighbor (itself and its
continuation), r = c * m tokens.  Neighbors are read by number of the sample, so the datasets must
give the samples of preprocessing; checksums of some samples are compared when a dataset is built.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.megatron_dataset import Sample
from megatron.core.datasets.retro.blocks import Blocks, Rows
from megatron.core.datasets.retro.db import DBDataset, load_db
from megatron.core.datasets.retro.project import load_project, read_json, write_json

SAMPLES_FILE = "samples.json"
_COMPARED = 16  # samples whose checksums are compared


class RetroDataset(torch.utils.data.Dataset[Sample]):
    """Samples of a GPT dataset with their neighbors.

    Added keys: text i64 [s + 1]; neighbor_chunks i64 [L, k, c], chunk numbers of the database, -1
    for none; neighbor_tokens i64 [L, k, r], EOD where there is none.  After the samples whose
    neighbors were looked up, the first follows again.
    """

    def __init__(
        self,
        dataset: Any,
        neighbors: Blocks,
        db: DBDataset,
        *,
        num_samples: int,
        num_queried_samples: int,
        num_neighbors: int,
        num_retrieved_chunks: int,
    ) -> None:
        self.dataset = dataset
        self.db = db
        self.num_samples = num_samples
        self.num_queried_samples = num_queried_samples
        self.num_neighbors = num_neighbors
        self.num_retrieved_chunks = num_retrieved_chunks
        self._chunks_per_sample = neighbors.num_rows // num_queried_samples
        self._block_size = neighbors.block_size
        self._paths = [block.path for block in neighbors]
        self._open: tuple[int, Rows] | None = None  # the block that was read last
        saved = self._block(0).shape[1]
        if saved < num_neighbors:
            raise ConfigError(
                f"--retro-num-neighbors {num_neighbors}: {neighbors.directory} has {saved} for "
                "each chunk; give fewer, or preprocess with --retro-query-num-neighbors-save "
                f"{num_neighbors}"
            )

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, idx: int | None) -> Sample:
        if idx is not None and idx >= len(self):
            raise IndexError(f"sample {idx} of {len(self)}")
        number = None if idx is None else int(idx) % self.num_queried_samples
        sample = self.dataset[number]
        first = (number or 0) * self._chunks_per_sample
        ids = self._neighbor_ids(first, first + self._chunks_per_sample)
        shape = (*ids.shape, self.num_retrieved_chunks)
        chunks = np.full(shape, -1, np.int64)
        tokens = np.full((*shape, self.db.chunk_length), self.db.eod_token_id, np.int64)
        for place in zip(*np.nonzero(ids >= 0), strict=True):
            chunks[place], text = self.db.with_continuation(
                int(ids[place]), self.num_retrieved_chunks
            )
            tokens[place] = text.reshape(tokens.shape[-2:])
        return {
            **sample,
            "text": text_of(sample),
            "neighbor_chunks": chunks,
            "neighbor_tokens": tokens.reshape(*ids.shape, -1),
        }

    def _neighbor_ids(self, begin: int, end: int) -> np.ndarray:
        parts = []
        while begin < end:  # a sample may begin in one block and end in the next
            number, at = divmod(begin, self._block_size)
            rows = self._block(number)[at : at + end - begin]
            parts.append(rows[:, : self.num_neighbors])
            begin += len(rows)
        return np.concatenate(parts)

    def _block(self, number: int) -> Rows:
        if self._open is None or self._open[0] != number:
            self._open = number, Rows(self._paths[number], "neighbors")
        return self._open[1]


def get_retro_datasets(
    config: Any,
    gpt_datasets: Mapping[str, tuple[Any, int | None]],
    sample_length: int,
    eod_token_id: int,
) -> tuple[RetroDataset | None, RetroDataset | None, RetroDataset | None]:
    """Return the train, valid and test set with the neighbors of the project.

    ``config``: a RetroConfig; ``gpt_datasets``: split -> (dataset, number of samples).  Raises
    ConfigError for settings that are not those of preprocessing, DataError if the neighbors are
    missing, incomplete, or of other samples.
    """
    project = load_project(config.retro_project_dir)
    if sample_length != project.retro_gpt_seq_length:
        raise ConfigError(
            f"--seq-length {sample_length}: the neighbors of {config.retro_project_dir} are of "
            f"samples of {project.retro_gpt_seq_length} tokens; give that length"
        )
    db = load_db(project, "train", eod_token_id)
    found: list[RetroDataset | None] = []
    for split in ("train", "valid", "test"):
        dataset, wanted = gpt_datasets.get(split) or (None, 0)
        if dataset is None or wanted == 0:
            found.append(None)
            continue
        name = project.retro_neighbor_dirs.get(split)
        if name is None:
            raise DataError(
                f"{config.retro_project_dir} has no neighbors of the {split} samples: run the task "
                "query-neighbors of tools/retro/preprocess_data.py"
            )
        directory = os.path.join(config.retro_project_dir, "query", name)
        num_queried = check_samples(directory, dataset)
        if config.retro_verify_neighbor_count and wanted is not None and wanted > num_queried:
            raise ConfigError(
                f"the run reads {wanted} {split} samples, and {directory} has neighbors of "
                f"{num_queried}: preprocess with the numbers of training, or read them again with "
                "--retro-no-verify-neighbor-count"
            )
        rows = num_queried * project.chunks_per_sample
        neighbors = Blocks(directory, rows, project.retro_block_size)
        if missing := neighbors.missing:
            raise DataError(
                f"{directory}: {len(missing)} blocks of neighbors are missing, such as "
                f"{os.path.basename(missing[0].path)}: run the task query-neighbors again"
            )
        found.append(
            RetroDataset(
                dataset,
                neighbors,
                db,
                num_samples=num_queried if wanted is None else wanted,
                num_queried_samples=num_queried,
                num_neighbors=config.retro_num_neighbors,
                num_retrieved_chunks=config.retro_num_retrieved_chunks,
            )
        )
    train, valid, test = found
    return train, valid, test


def text_of(sample: Sample) -> np.ndarray:
    """Return the tokens i64 [s + 1] of a sample of a GPT dataset: its inputs and the last label."""
    if "text" in sample:
        return np.asarray(sample["text"])
    return torch.cat((sample["tokens"], sample["labels"][-1:])).numpy()


def documents_of(dataset: Any, idx: int) -> tuple[str | None, list[int]]:
    """Return the data path of sample ``idx`` and the documents that it has tokens of."""
    if isinstance(dataset, BlendedDataset):
        number, idx = dataset.locate(idx)
        dataset = dataset.datasets[number]
    return dataset.dataset_path, [piece[0] for piece in dataset.pieces(idx)]


def record_samples(directory: str, dataset: Any, num_samples: int) -> None:
    """Write checksums of some samples, whose neighbors the directory is for."""
    chosen = np.unique(np.linspace(0, num_samples - 1, _COMPARED).astype(int)).tolist()
    checksums = [(idx, _checksum(dataset, idx)) for idx in chosen]
    write_json(os.path.join(directory, SAMPLES_FILE), [num_samples, checksums])


def check_samples(directory: str, dataset: Any) -> int:
    """Return the number of samples with neighbors.  Raises DataError if ``dataset`` has others."""

    def parse(found: Any) -> tuple[int, list[tuple[int, int]]]:
        num_samples, checksums = found
        return int(num_samples), [(int(idx), int(crc)) for idx, crc in checksums]

    cure = "remove this folder and run the task query-neighbors again"
    num_samples, checksums = read_json(os.path.join(directory, SAMPLES_FILE), parse, cure)
    for idx, crc in checksums:
        if idx >= len(dataset) or _checksum(dataset, idx) != crc:
            raise DataError(
                f"sample {idx} is not the one whose neighbors are in {directory}: train with the "
                "project's data, --split, --seed, --seq-length, numbers of samples and tokenizer, "
                "or preprocess again in another --retro-project-dir"
            )
    return num_samples


def _checksum(dataset: Any, idx: int) -> int:
    return zlib.crc32(text_of(dataset[idx]).astype(np.int64).tobytes())


@dataclass(kw_only=True)
class MultiSplitGPTDatasetConfig(GPTDatasetConfig):
    """Config whose splits are cut down to those of ``split_preprocessing``."""

    return_document_ids: bool | None = None
    split_preprocessing: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_preprocessing is not None:
            assert self.split is not None, "data of one source, divided by --split"
            self.split_matrix = convert_split_vector_to_split_matrix(
                parse_and_normalize_split(self.split),
                parse_and_normalize_split(self.split_preprocessing),
            )


class MultiSplitGPTDataset(GPTDataset):
    """GPT dataset whose samples are ``text`` i64 [s + 1] and the ids of its documents."""

    config: MultiSplitGPTDatasetConfig

    def __getitem__(self, idx: int | None) -> Sample:
        text, _ = self._read_sample(idx or 0)
        if not self.config.return_document_ids:
            return {"text": text}
        return {"text": text, "document_ids": np.array([p[0] for p in self.pieces(idx or 0)])}
