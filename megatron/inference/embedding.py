"""Embed texts: the mean of BERT's last hidden states over a text, without [CLS] and [SEP].

Dimensions: n texts, b texts of a batch, s tokens, h hidden size.  All ranks compute each batch
together; the first rank writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron.core import device
from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.models.bert.pooler import mean_of_text
from megatron.core.optional import require
from megatron.inference.generation import (
    ONE_REPLICA,
    GenerationLayout,
    generation_config,
    load_model,
    longest_sequence,
)
from megatron.training.checkpointing.checkpoint_args import without_code_and_paths
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.conversion.hf_folder import has_tokenizer
from megatron.training.initialize import connect
from megatron.training.models.registry import model_kind
from megatron.training.preprocess.documents import RecordFormat, read_documents
from megatron.training.process.rank_print import is_rank0


@dataclass(frozen=True)
class Embedder:
    """Model with its tokenizer: text -> ids, and ids with mask [b, s] -> vectors [b, h]."""

    tokenize: Callable[[str], list[int]]  # without special tokens
    vectors: Callable[[Tensor, Tensor], Tensor]
    cls: int
    sep: int
    pad: int
    longest: int  # maximum tokens of a text, with special tokens
    width: int


def megatron_embedder(
    load: str,
    *,
    step: int | None = None,
    device_kind: str = "auto",
    layout: GenerationLayout = ONE_REPLICA,
) -> Embedder:
    """Load the BERT checkpoint in ``load``, saved with any layout.  Collective over all ranks.

    Raises CheckpointError if there is no checkpoint, ConfigError if it is not a BERT model.
    """
    asked = without_code_and_paths(open_checkpoint(load, step).asked, {})
    config = generation_config(asked, load, step=step, device_kind=device_kind, layout=layout)
    lm = config.language_model
    if not model_kind(lm.model_kind).has_masked_lm_head:
        raise ConfigError(f"--load {load} holds a {lm.model_kind}: give one of BERT")
    connect(config)
    run, model = load_model(config, return_embeddings=True)
    tokenizer = run.tokenizer

    def vectors(ids: Tensor, mask: Tensor) -> Tensor:
        kinds = torch.zeros_like(ids) if lm.bert_binary_head else None
        found: Tensor = model(ids, mask, tokentype_ids=kinds)
        return found

    def ids_of(text: str) -> list[int]:
        """Tokenize without the special tokens that some tokenizers add around a text."""
        ids: list[int] = tokenizer.tokenize(text)
        ids = ids[1:] if ids[:1] == [tokenizer.cls] else ids
        return ids[:-1] if ids[-1:] == [tokenizer.sep] else ids

    return Embedder(
        ids_of,
        vectors,
        tokenizer.cls,
        tokenizer.sep,
        tokenizer.pad,
        longest_sequence(run),
        config.model.hidden_size,
    )


def huggingface_embedder(folder: str, *, device_kind: str = "auto") -> Embedder:
    """Load the Hugging Face model in a local folder, in this process only."""
    transformers = require("transformers", "--bert-embedder-type huggingface")
    path = Path(folder)
    if path.is_dir() and not has_tokenizer(path):
        raise ConfigError(f"--load {folder}: no tokenizer is beside the model; put its files there")
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        model = transformers.AutoModel.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--load {folder}: {reason}; give the folder of a BERT") from error
    device.choose(device_kind, 0)
    model = model.to(device.current()).eval()

    def vectors(ids: Tensor, mask: Tensor) -> Tensor:
        hidden = model(ids, attention_mask=mask).last_hidden_state
        return mean_of_text(hidden.transpose(0, 1), mask)

    return Embedder(
        partial(tokenizer.encode, add_special_tokens=False),
        vectors,
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
        tokenizer.pad_token_id,
        model.config.max_position_embeddings,
        model.config.hidden_size,
    )


@dataclass
class Corpus:
    """Texts as ids: of files of documents, or the documents of an indexed dataset."""

    path: str
    record_format: RecordFormat
    embedder: Embedder

    def __post_init__(self) -> None:
        self._indexed = IndexedDataset(self.path) if IndexedDataset.exists(self.path) else None

    def __len__(self) -> int:
        if self._indexed is not None:
            return len(self._indexed.document_indices) - 1
        return sum(1 for _ in self._texts())

    def rows(self, first: int) -> Iterator[list[int]]:
        """Yield the ids of each text from index ``first`` on, truncated to the model's maximum."""
        room = self.embedder.longest - 2
        if self._indexed is None:
            for text in islice(self._texts(), first, None):
                yield self.embedder.tokenize(text)[:room]
            return
        for number in range(first, len(self)):
            begin, end = self._indexed.document_indices[number : number + 2].tolist()
            sentences = self._indexed[begin:end]
            yield [token for part in sentences for token in part.tolist()][:room]

    def _texts(self) -> Iterator[str]:
        for _, found in read_documents(self.path, self.record_format):
            for text in found[self.record_format.json_keys[0]]:
                yield text if isinstance(text, str) else " ".join(text)


def write_vectors(
    corpus: Corpus, embedder: Embedder, output: str, *, batch_size: int, origin: str
) -> int:
    """Write vectors [n, h] in float32 to the .npy file ``output``.  Collective.

    Until it is complete, the file is named ``output.part``, and ``output.done`` records how many
    rows are final.  A rerun with the same ``origin`` continues from them.  Returns the number of
    rows that an earlier run had written.
    """
    shape = (len(corpus), embedder.width)
    if not shape[0]:
        raise DataError("there is no text to embed: look at --input and --json-keys")
    part = f"{output}.part"
    done = f"{output}.done"
    first = _rows_done(part, done, origin, shape)
    table = None
    if is_rank0():
        mode: Literal["r+", "w+"] = "r+" if first else "w+"
        table = np.lib.format.open_memmap(part, mode=mode, dtype=np.float32, shape=shape)
    at = first
    rows = corpus.rows(first)
    while batch := list(islice(rows, batch_size)):
        found = embed(batch, embedder)
        if table is not None:
            table[at : at + len(batch)] = found.cpu().numpy()
            table.flush()
            with open(done, "w", encoding="utf-8") as file:
                json.dump({"origin": origin, "rows": at + len(batch)}, file)
        at += len(batch)
    if table is not None:
        os.replace(part, output)
        os.remove(done)
    return first


@torch.no_grad()
def embed(rows: list[list[int]], embedder: Embedder) -> Tensor:
    """Return vectors [b, h] of texts given by their ids."""
    lengths = torch.tensor([len(row) + 2 for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), embedder.pad)
    for i, row in enumerate(rows):
        ids[i, : lengths[i]] = torch.tensor([embedder.cls, *row, embedder.sep])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return embedder.vectors(ids.to(device.current()), mask.to(device.current()))


def embed_texts(
    embedder: Embedder, texts: Sequence[str], *, batch_size: int, longest: int
) -> np.ndarray:
    """Return vectors f32 [n, h] of texts, cut off after ``longest`` tokens with special tokens."""
    most = min(longest, embedder.longest) - 2
    rows = [embedder.tokenize(text)[:most] for text in texts]
    starts = range(0, len(rows), batch_size)
    found = [embed(rows[at : at + batch_size], embedder).float().cpu().numpy() for at in starts]
    return np.concatenate(found) if found else np.empty((0, embedder.width), np.float32)


def _rows_done(part: str, done: str, origin: str, shape: tuple[int, int]) -> int:
    """Return the number of final rows; 0 if they are of other texts or another model."""
    try:
        with open(done, encoding="utf-8") as file:
            noted = json.load(file)
        is_same = noted["origin"] == origin and np.load(part, mmap_mode="r").shape == shape
    except (OSError, ValueError, EOFError):
        return 0
    return int(noted["rows"]) if is_same else 0
