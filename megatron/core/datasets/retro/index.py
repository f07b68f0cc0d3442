"""Index of the training chunks by their embeddings, and the neighbors of samples.

    index/<type>/<string>/train_emb/blocks/*.hdf5   data f32 [n, h], embeddings of sampled chunks
    index/<type>/<string>/empty_<x>.faissindex      the trained index
    index/<type>/<string>/add_codes/*.hdf5          data u8 [n, bytes], codes of training chunks
    index/<type>/<string>/added_<x>_<y>.faissindex  the index with the training chunks
    query/<split>_<hash>/*.hdf5                     neighbors i64 [n, k], rows of the database
    query/<split>_<hash>/samples.json               which samples these are the neighbors of

x and y are the fractions of embeddings and codes that are used.  All ranks compute blocks; rank 0
trains the index and adds the codes, in the order of the chunks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.retro.blocks import ONE_PROCESS, Block, Blocks, Ranks, Rows
from megatron.core.datasets.retro.db import DBDataset, load_db
from megatron.core.datasets.retro.project import RetroPreprocessingConfig, save_project
from megatron.core.datasets.retro.retro_dataset import (
    SAMPLES_FILE,
    check_samples,
    documents_of,
    record_samples,
    text_of,
)
from megatron.core.optional import require

EmbedTexts = Callable[[Sequence[str]], np.ndarray]  # f32 [n, h]


@dataclass
class RetroGPTChunkDatasets:
    """The datasets whose chunks are looked up, each with its number of samples."""

    train: tuple[Any, int] | None = None
    valid: tuple[Any, int] | None = None
    test: tuple[Any, int] | None = None


@dataclass(frozen=True)
class ChunkIndex:
    """The index of a project and its tasks.  ``tokenizer`` is that of the corpora."""

    config: RetroPreprocessingConfig
    tokenizer: Any
    embed: EmbedTexts
    ranks: Ranks = ONE_PROCESS

    def train(self) -> None:
        """Embed the sampled chunks and train the index with them.  Collective."""
        config = self.config
        path = self._empty_path
        if not os.path.exists(path):
            blocks = self._embeddings
            blocks.write_missing(self._embed_block, self.ranks)
            if self.ranks.rank == 0:
                fraction = config.retro_index_train_load_fraction
                vectors = np.concatenate([*_loaded(blocks, fraction)])
                index = self._factory(vectors.shape[1])
                if not index.is_trained:
                    index.train(vectors)
                _write(index, path)
        self._remove(self._embeddings, config.retro_index_delete_training_embeddings)

    def add(self) -> None:
        """Encode the training chunks and add them to the index.  Collective."""
        config = self.config
        path = self._added_path
        if not os.path.exists(path):
            index = _read(self._empty_path, "index-train")
            blocks = self._codes
            blocks.write_missing(lambda block: self._encode_block(index, block), self.ranks)
            if self.ranks.rank == 0:
                for codes in _loaded(blocks, config.retro_index_add_load_fraction):
                    index.add_sa_codes(codes)
                _write(index, path)
        self._remove(self._codes, config.retro_index_delete_added_codes)

    def validate(self, task: str, fraction: float) -> int:
        """Compute a ``fraction`` of the blocks of index-train or index-add again, and compare."""
        blocks = self._embeddings if task == "index-train" else self._codes
        if not os.path.isdir(blocks.directory):
            flag = "training-embeddings" if task == "index-train" else "added-codes"
            raise DataError(
                f"{blocks.directory} does not exist: --retro-task-validate compares what {task} "
                f"keeps with --no-retro-index-delete-{flag}"
            )
        if task == "index-train":
            return blocks.validate(self._embed_block, fraction, self.ranks)
        index = _read(self._empty_path, "index-train")
        return blocks.validate(lambda block: self._encode_block(index, block), fraction, self.ranks)

    def query(self, datasets: RetroGPTChunkDatasets, validate: float | None = None) -> int:
        """Look the neighbors of every chunk up.  Collective.

        With ``validate``, look a fraction of the blocks up again instead and compare.  Returns the
        number of blocks compared by this rank.
        """
        config = self.config
        count = 0
        directories = {**config.retro_neighbor_dirs}
        for split, entry in vars(datasets).items():
            if entry is None:
                continue
            dataset, num_samples = entry
            name = f"{split}_{dataset.unique_description_hash}"
            directory = os.path.join(config.project_dir, "query", name)
            is_begun = os.path.exists(os.path.join(directory, SAMPLES_FILE))
            if self.ranks.rank == 0 and not is_begun:
                record_samples(directory, dataset, num_samples)
            self.ranks.wait_for_all()
            check_samples(directory, dataset)
            num_rows = num_samples * config.chunks_per_sample
            blocks = Blocks(directory, num_rows, config.retro_block_size)

            def compute(block: Block, dataset: Any = dataset) -> dict[str, np.ndarray]:
                return {"neighbors": self._neighbors(dataset, block)}

            if validate is not None:
                count += blocks.validate(compute, validate, self.ranks)
                continue
            blocks.write_missing(compute, self.ranks)
            directories[split] = name
        if self.ranks.rank == 0 and validate is None:
            save_project(replace(config, retro_neighbor_dirs=directories))
        return count

    def search(self, vectors: np.ndarray, count: int) -> np.ndarray:
        """Return chunks i64 [n, count], nearest first, -1 where the index finds fewer."""
        _, places = self._added.search(np.ascontiguousarray(vectors, np.float32), count)
        size = self.config.retro_block_size
        loaded = _num_loaded(size, self.config.retro_index_add_load_fraction)
        if loaded == size:
            return np.asarray(places, np.int64)
        return np.where(places < 0, -1, places // loaded * size + places % loaded)

    def embed_tokens(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return embeddings f32 [n, h] of tokens of the corpora's tokenizer, without their EOD."""
        eod = self.tokenizer.eod
        return self.embed([self.tokenizer.detokenize(row[row != eod].tolist()) for row in rows])

    def _neighbors(self, dataset: Any, block: Block) -> np.ndarray:
        """Return neighbors i64 [n, k] of a block's chunks, none from the sample's own documents."""
        config = self.config
        length = config.retro_gpt_chunk_length
        per_sample = config.chunks_per_sample
        first, last = block.begin // per_sample, (block.end - 1) // per_sample
        chunks = []
        own = []  # the sample's documents, for each chunk
        for number in range(first, last + 1):
            text = text_of(dataset[number])[: per_sample * length]
            path, documents = documents_of(dataset, number)
            corpus = config.blend[0].index(str(path))
            chunks += np.split(text, per_sample)
            own += [_key(np.array([[corpus, d] for d in documents]))] * per_sample
        begin = block.begin - first * per_sample
        rows = slice(begin, begin + block.end - block.begin)
        found = self.search(self.embed_tokens(chunks[rows]), config.retro_query_num_neighbors_query)
        neighbors = np.full((len(found), config.retro_query_num_neighbors_save), -1, np.int64)
        for i, (ids, documents_of_sample) in enumerate(zip(found, own[rows], strict=True)):
            ids = ids[ids >= 0]
            ids = ids[~np.isin(self._documents[ids], documents_of_sample)]
            ids = ids[: neighbors.shape[1]]
            neighbors[i, : len(ids)] = ids
        return neighbors

    @cached_property
    def _documents(self) -> np.ndarray:
        return _key(self._train_db.load_doc_tuples())

    @cached_property
    def _added(self) -> Any:
        """The complete index, with the settings of queries."""
        faiss = require("faiss", "an index of RETRO")
        index = _read(self._added_path, "index-add")
        ivf = faiss.try_extract_index_ivf(index)
        if ivf is not None:
            ivf.nprobe = min(self.config.retro_query_nprobe, ivf.nlist)
            quantizer = faiss.downcast_index(ivf.quantizer)
            if hasattr(quantizer, "hnsw"):
                quantizer.hnsw.efSearch = self.config.retro_query_ef_search
        return index

    def _factory(self, width: int) -> Any:
        faiss = require("faiss", "an index of RETRO")
        text = self.config.retro_index_str
        try:
            return faiss.index_factory(width, text)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ConfigError(
                f"--retro-index-str {text}: faiss makes no such index of {width} values ({reason})"
            ) from error

    def _embed_block(self, block: Block) -> dict[str, np.ndarray]:
        return {"data": self._embeddings_of(self._sampled_db, block)}

    def _encode_block(self, index: Any, block: Block) -> dict[str, np.ndarray]:
        return {"data": index.sa_encode(self._embeddings_of(self._train_db, block))}

    def _embeddings_of(self, db: DBDataset, block: Block) -> np.ndarray:
        rows = db.chunks[block.begin : block.end]
        return self.embed_tokens([db.tokens(row) for row in rows])

    @cached_property
    def _train_db(self) -> DBDataset:
        return load_db(self.config, "train", self.tokenizer.eod)

    @cached_property
    def _sampled_db(self) -> DBDataset:
        return load_db(self.config, "sampled", self.tokenizer.eod)

    @property
    def _embeddings(self) -> Blocks:
        directory = os.path.join(self._directory, "train_emb", "blocks")
        return Blocks(directory, len(self._sampled_db), self.config.retro_block_size)

    @property
    def _codes(self) -> Blocks:
        directory = os.path.join(self._directory, "add_codes")
        return Blocks(directory, len(self._train_db), self.config.retro_block_size)

    @property
    def _directory(self) -> str:
        kind = self.config.retro_index_type
        text = str(self.config.retro_index_str)
        return os.path.join(self.config.project_dir, "index", kind, text)

    @property
    def _empty_path(self) -> str:
        fraction = self.config.retro_index_train_load_fraction
        return os.path.join(self._directory, f"empty_{fraction:.3f}.faissindex")

    @property
    def _added_path(self) -> str:
        config = self.config
        fractions = config.retro_index_train_load_fraction, config.retro_index_add_load_fraction
        name = "added_{:.3f}_{:.3f}.faissindex".format(*fractions)
        return os.path.join(self._directory, name)

    def _remove(self, blocks: Blocks, is_asked: bool) -> None:
        self.ranks.wait_for_all()
        if is_asked and self.ranks.rank == 0:
            shutil.rmtree(blocks.directory, ignore_errors=True)


def _loaded(blocks: Blocks, fraction: float) -> Iterator[np.ndarray]:
    """Yield the first ``fraction`` of the rows of each block."""
    for block in blocks:
        yield Rows(block.path, "data")[: _num_loaded(block.end - block.begin, fraction)]


def _num_loaded(size: int, fraction: float) -> int:
    return max(1, int(fraction * size))


def _key(documents: np.ndarray) -> np.ndarray:
    """Return one number for each row of corpus and document."""
    found: np.ndarray = documents[:, 0].astype(np.int64) << 32 | documents[:, 1].astype(np.int64)
    return found


def _write(index: Any, path: str) -> None:
    faiss = require("faiss", "an index of RETRO")
    faiss.write_index(index, path + ".tmp")
    os.replace(path + ".tmp", path)


def _read(path: str, task: str) -> Any:
    faiss = require("faiss", "an index of RETRO")
    try:
        return faiss.read_index(path)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise DataError(
            f"{path} is missing or damaged ({reason}): run the task {task} again"
        ) from error
