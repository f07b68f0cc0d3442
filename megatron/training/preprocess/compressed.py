"""Compressed text and Parquet as pieces of plain bytes; a damaged file is an error."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import BinaryIO

from megatron.core.config.errors import DataError
from megatron.core.optional import require
from megatron.training.preprocess.file_kinds import is_parquet
from megatron.training.preprocess.parquet import json_lines

SUFFIXES = (".gz", ".zst")
_STORED_BYTES = 1 << 17  # read from the disk at once


def pieces(path: str, num_bytes: int) -> Iterator[tuple[bytes, int]]:
    """The bytes of a file, decompressed by its name, or JSON lines of Parquet.

    Each piece has about ``num_bytes`` and comes with the position in the file on disk.
    """
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    with open(path, "rb") as raw:
        if path.endswith(".gz"):
            source = iter(partial(gzip.GzipFile(fileobj=raw).read, num_bytes), b"")
        elif path.endswith(".zst"):
            zstandard = require("zstandard", f"--input {path}")
            errors = (*errors, zstandard.ZstdError)
            source = _zstandard_pieces(raw, zstandard)
        elif is_parquet(path):
            yield from json_lines(path)
            return
        else:
            source = iter(partial(raw.read, num_bytes), b"")
        try:
            for piece in source:
                yield piece, raw.tell()
        except errors as error:
            raise DataError(f"{path} is damaged: {error}; copy it again") from error


def _zstandard_pieces(raw: BinaryIO, zstandard: ModuleType) -> Iterator[bytes]:
    """Decompress frame after frame: zstandard's own reader takes a cut frame for a whole one."""
    decompressor = zstandard.ZstdDecompressor()
    frame = None  # None: between two frames
    while stored := raw.read(_STORED_BYTES):
        while stored:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(stored)
            stored = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends inside a compressed frame")


def uncompressed_extension(path: str) -> str:
    """``.jsonl`` of ``a.jsonl`` and of ``a.jsonl.gz``."""
    stem, extension = os.path.splitext(path)
    return os.path.splitext(stem)[1] if extension in SUFFIXES else extension
