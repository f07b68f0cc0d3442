"""Database of chunks: the documents of the corpora, divided into chunks of m tokens.

    db/indexed_dataset_infos.json     the corpora: name, number of documents, identity
    db/individual/<i>-<name>/*.hdf5   per block of documents: chunks_valid u32 [n, 4], rows of
                                      document, first token, end, number of BERT tokens;
                                      chunks_invalid, those without BERT tokens
    db/merged/{train,valid,sampled}.hdf5   chunks u32 [n, 5]: corpus, then the row of chunks_valid

A chunk's number is its row in train.hdf5.  Documents of the validation and test splits are in no
index, and a sample of them finds neighbors in training documents.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.retro.blocks import ONE_PROCESS, Block, Blocks, Ranks, Rows, write_rows
from megatron.core.datasets.retro.project import RetroPreprocessingConfig, read_json, write_json
from megatron.core.datasets.utils import normalize

_PIECE = 1 << 20  # rows that are copied at once
_INFOS = "indexed_dataset_infos.json"
_LAST = "sampled.hdf5"  # the file that is written last
_CURE = "run the task db-build of tools/retro/preprocess_data.py"


class DBDataset:
    """Chunks of the database: ``db[i]`` is its document and its tokens i64 [m], padded with EOD."""

    def __init__(
        self,
        db_path: str,
        indexed_datasets: Sequence[IndexedDataset],
        chunks: Rows | np.ndarray,
        chunk_length: int,
        eod_token_id: int,
    ) -> None:
        self.db_path = db_path
        self.indexed_datasets = indexed_datasets
        self.chunks = chunks
        self.chunk_length = chunk_length
        self.eod_token_id = eod_token_id

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, chunk_id: int) -> dict[str, Any]:
        (row,) = self.chunks[chunk_id : chunk_id + 1]
        text = np.full(self.chunk_length, self.eod_token_id, np.int64)
        tokens = self.tokens(row)
        text[: len(tokens)] = tokens
        return {"doc_id": tuple(row[:2].tolist()), "text": text}

    def tokens(self, row: np.ndarray) -> np.ndarray:
        """Return the tokens of the chunk that a row of ``chunks`` describes, without padding."""
        corpus, document, begin, end = row[:4].tolist()
        found: np.ndarray = self.indexed_datasets[corpus].get(document, begin, end - begin)
        return found

    def with_continuation(self, chunk_id: int, num_chunks: int) -> tuple[np.ndarray, np.ndarray]:
        """Return chunk ids i64 [c] and tokens i64 [c * m] of a chunk and the ``c - 1`` after it.

        The continuation ends with its document; -1 and EOD follow.
        """
        ids = np.full(num_chunks, -1, np.int64)
        text = np.full(num_chunks * self.chunk_length, self.eod_token_id, np.int64)
        rows = self.chunks[chunk_id : chunk_id + num_chunks]
        for i, row in enumerate(rows):
            if i and (tuple(row[:2]) != tuple(rows[0][:2]) or row[2] != rows[i - 1][3]):
                break
            tokens = self.tokens(row)
            ids[i] = chunk_id + i
            text[i * self.chunk_length : i * self.chunk_length + len(tokens)] = tokens
        return ids, text

    def load_doc_tuples(self) -> np.ndarray:
        """Return corpus and document of every chunk, u32 [n, 2]."""
        found = np.empty((len(self), 2), np.uint32)
        for at in range(0, len(self), _PIECE):
            found[at : at + _PIECE] = self.chunks[at : at + _PIECE][:, :2]
        return found


def load_db(config: RetroPreprocessingConfig, name: str, eod_token_id: int) -> DBDataset:
    """Open a database of the project: train, valid or sampled.

    Raises DataError if it is not complete or the corpora have changed since it was built.
    """
    corpora = _open_corpora(config)
    if not os.path.exists(_path(config, "merged", _LAST)):
        raise DataError(f"{config.project_dir} has no complete database: {_CURE}")
    path = _path(config, "merged", f"{name}.hdf5")
    rows = Rows(path, "chunks")
    return DBDataset(path, corpora, rows, config.retro_gpt_chunk_length, eod_token_id)


def build_db(
    config: RetroPreprocessingConfig,
    num_bert_tokens: Callable[[np.ndarray], int],
    eod_token_id: int,
    ranks: Ranks = ONE_PROCESS,
    validate: float | None = None,
) -> int:
    """Build the database, or continue an interrupted build.  Collective over ``ranks``.

    ``num_bert_tokens`` counts the BERT tokens of the text of GPT tokens.  With ``validate``, that
    fraction of the blocks is computed again instead.  Returns the number of blocks that this rank
    compared.
    """
    if ranks.rank == 0 and not os.path.exists(_path(config, _INFOS)):
        rows = [_describe(prefix) for prefix in config.blend[0]]
        write_json(_path(config, _INFOS), rows)
    ranks.wait_for_all()
    count = 0
    all_blocks = []
    for number, corpus in enumerate(_open_corpora(config)):
        name = f"{number}-{os.path.basename(corpus.path_prefix)}"
        blocks = Blocks(_path(config, "individual", name), len(corpus), config.retro_doc_block_size)
        all_blocks.append(blocks)

        def compute(block: Block, corpus: IndexedDataset = corpus) -> dict[str, np.ndarray]:
            length = config.retro_gpt_chunk_length
            return _chunks_of(corpus, block, length, eod_token_id, num_bert_tokens)

        if validate is not None:
            count += blocks.validate(compute, validate, ranks)
        else:
            blocks.write_missing(compute, ranks)
    if validate is None and ranks.rank == 0:
        _merge(config, all_blocks)
    ranks.wait_for_all()
    return count


def _chunks_of(
    corpus: IndexedDataset,
    block: Block,
    chunk_length: int,
    eod: int,
    num_bert_tokens: Callable[[np.ndarray], int],
) -> dict[str, np.ndarray]:
    chunks: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    for document in range(block.begin, block.end):
        tokens = corpus.get(document)
        end = len(tokens) - int(len(tokens) > 0 and tokens[-1] == eod)  # without EOD
        for begin in range(0, end, chunk_length):
            part = tokens[begin : min(begin + chunk_length, end)]
            count = num_bert_tokens(part)
            chunks[count > 0].append((document, begin, begin + len(part), count))
    names = {"chunks_valid": True, "chunks_invalid": False}
    return {n: np.array(chunks[v], np.uint32).reshape(-1, 4) for n, v in names.items()}


def _merge(config: RetroPreprocessingConfig, all_blocks: list[Blocks]) -> None:
    """Write the merged databases; sampled.hdf5, the last, shows that they are complete."""
    split = convert_split_vector_to_split_matrix(parse_and_normalize_split(config.retro_gpt_split))
    train_end = split[0][1] if split[0] else 0.0

    def parts(trains: bool) -> Iterator[np.ndarray]:
        for number, blocks in enumerate(all_blocks):
            for block in blocks:
                rows = Rows(block.path, "chunks_valid")[:]
                cut = np.searchsorted(rows[:, 0], round(train_end * blocks.num_rows))
                yield np.insert(rows[:cut] if trains else rows[cut:], 0, number, axis=1)

    os.makedirs(_path(config, "merged"), exist_ok=True)
    for name, trains in (("train", True), ("valid", False)):
        total = sum(len(part) for part in parts(trains))
        path = _path(config, "merged", f"{name}.hdf5")
        write_rows(path, {"chunks": ((total, 5), np.uint32, parts(trains))})
    _sample(config, Rows(_path(config, "merged", "train.hdf5"), "chunks"))


def _sample(config: RetroPreprocessingConfig, rows: Rows) -> None:
    """Write sampled.hdf5: --retro-index-ntrain chunks of the corpora in proportion to weights."""
    prefixes, weights = config.blend
    totals = np.zeros(len(prefixes), np.int64)
    for at in range(0, len(rows), _PIECE):
        totals += np.bincount(rows[at : at + _PIECE][:, 0], minlength=len(prefixes))
    wanted = config.retro_index_ntrain or len(rows)
    rng = np.random.default_rng(config.retro_gpt_seed)
    first = 0
    chosen = []
    for total, ratio in zip(totals.tolist(), normalize(weights or totals.tolist()), strict=True):
        size = min(total, round(ratio * wanted))
        chosen.append(first + np.sort(rng.choice(total, size, replace=False, shuffle=False)))
        first += total
    ids = np.concatenate(chosen)

    def parts() -> Iterator[np.ndarray]:
        for at in range(0, len(rows), _PIECE):
            begin, end = np.searchsorted(ids, (at, at + _PIECE))
            yield rows[at : at + _PIECE][ids[begin:end] - at]

    write_rows(_path(config, "merged", _LAST), {"chunks": ((len(ids), 5), np.uint32, parts())})


def _describe(prefix: str) -> dict[str, Any]:
    """Return a row of indexed_dataset_infos.json."""
    corpus = IndexedDataset(prefix)
    if len(corpus) != len(corpus.document_indices) - 1:
        raise DataError(
            f"{prefix}: its documents are divided into sentences, and a document's own sentences "
            "could not be left out of its neighbors: preprocess it without --split-sentences"
        )
    return {"prefix": os.path.basename(prefix), "n_docs": len(corpus), "identity": corpus.identity}


def _open_corpora(config: RetroPreprocessingConfig) -> list[IndexedDataset]:
    """Open the corpora.  Raises DataError if one has changed since the database was begun."""
    known = read_json(_path(config, _INFOS), lambda rows: [r["identity"] for r in rows], _CURE)
    corpora = [IndexedDataset(prefix) for prefix in config.blend[0]]
    for corpus, identity in zip(corpora, known, strict=True):
        if corpus.identity != identity:
            raise DataError(
                f"{corpus.path_prefix} has changed since the database of {config.project_dir} was "
                f"begun (sequences, bytes and checksum are {corpus.identity}, were "
                f"{identity}): restore it, or begin another project"
            )
    return corpora


def _path(config: RetroPreprocessingConfig, *names: str) -> str:
    return os.path.join(config.project_dir, "db", *names)
